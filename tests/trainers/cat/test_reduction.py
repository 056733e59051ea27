"""With the gold answer as the reference, or with weight 0, the trainer is the host's, bit for bit."""

import random

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def gold_text(prompt, completions, gold, **row):
    """A text whose `parity` is the gold answer; it uses up random numbers, which must not move the host's."""
    torch.rand(7)
    return "@A"[int(gold)]


def exact_match(completions, gold, **kwargs):
    return [float(str(sum(text.encode()) % 2) == answer) for text, answer in zip(completions, gold)]


def length(completions, **kwargs):
    return [len(set(text)) / 8 for text in completions]


def host(policy_dir, kit, tmp_path, reward_funcs, **changes) -> GRPOTrainer:
    peft_config = changes.pop("peft_config", None)
    args = GRPOConfig(str(tmp_path / "host"), **kit.options(**{"beta": 0.04, **changes}))
    return GRPOTrainer(
        str(policy_dir), reward_funcs=reward_funcs, args=args, train_dataset=kit.sums(), peft_config=peft_config
    )


SETTINGS = {
    "dapo": {},
    "grpo, no KL, scaled by batch": {"loss_type": "grpo", "beta": 0.0, "scale_rewards": "batch"},
    "normalize then sum": {"multi_objective_aggregation": "normalize_then_sum"},
    "accumulated, two iterations": {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
        "num_iterations": 2,
    },
    "LoRA": {"peft_config": LoraConfig(r=4, init_lora_weights=False)},
}


@pytest.mark.parametrize(
    "changes",
    [pytest.param(c, id=name, marks=[] if name == "dapo" else [pytest.mark.slow]) for name, c in SETTINGS.items()],
)
def test_with_gold_references_three_steps_are_those_of_grpo_with_an_exact_match_reward(
    changes, policy_dir, kit, tmp_path, make_trainer
):
    theirs = host(policy_dir, kit, tmp_path, [exact_match], **changes)
    theirs.train()
    ours = make_trainer(aggregator=gold_text, answer_extractor=kit.parity, **changes)
    start = kit.weights(ours.model)
    ours.train()
    assert kit.differing(kit.weights(theirs.model), kit.weights(ours.model)) == []
    assert kit.differing(start, kit.weights(ours.model)), "nothing was learned: the comparison says nothing"

    def plain(rows):
        return [
            {k.replace("exact_match", "cat"): v for k, v in row.items() if not k.startswith("cat/")} for row in rows
        ]

    assert plain(kit.history(theirs)) == plain(kit.history(ours))
    assert list(theirs._logs["advantages"]) == list(ours._logs["advantages"])


def test_beside_another_reward_the_sum_is_that_of_grpo_with_both(policy_dir, kit, tmp_path, make_trainer):
    theirs = host(policy_dir, kit, tmp_path, [length, exact_match], reward_weights=[0.5, 2.0])
    theirs.train()
    ours = make_trainer(
        aggregator=gold_text,
        answer_extractor=kit.parity,
        reward_funcs=[length],
        reward_weights=[0.5],
        reward_weight=2.0,
    )
    ours.train()
    assert kit.differing(kit.weights(theirs.model), kit.weights(ours.model)) == []
    assert ours.args.reward_weights == [0.5]  # the user's object is as it was


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_with_weight_0_three_steps_are_those_of_grpo_with_the_users_reward(
    aggregation, policy_dir, kit, tmp_path, make_trainer
):
    calls = []

    def judge(items):
        calls.append(items)

    changes = {"multi_objective_aggregation": aggregation}
    theirs = host(policy_dir, kit, tmp_path, [length], **changes)
    theirs.train()
    ours = make_trainer(
        reward_funcs=[length], reward_weight=0.0, reward="rubric", aggregator="synthesis", judge=judge, **changes
    )
    ours.train()
    assert kit.differing(kit.weights(theirs.model), kit.weights(ours.model)) == []
    assert calls == []


def test_an_anchor_that_samples_leaves_every_random_state_as_it_was(make_trainer):
    trainer = make_trainer(
        aggregator="synthesis", rollouts=["1", "2", "3", "4"], answer_extractor=lambda text: text[:1] or None
    )
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    batch = {"prompts": ["x"] * 8, "completions": ["1", "2", "3", "4"] * 2}
    trainer._cat_reward(**batch, log_extra=lambda *a: None, log_metric=lambda *a: None)
    assert torch.equal(torch_state, torch.get_rng_state()) and python_state == random.getstate()
