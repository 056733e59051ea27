"""The anchor is the policy at step 0, whatever the policy is, and using it leaves no trace."""

import contextlib
import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hf_ext.chat import ChatReply
from hf_ext.trainers.cat.anchor import Anchor, BackendAnchor, CallableAnchor, PolicyAnchor, preserved

PROBE = torch.tensor([[5, 60, 97, 110, 33]])
LEARNED = {"aggregator": "first", "reward": "match"}


def logits(anchor_or_model) -> torch.Tensor:
    active = getattr(anchor_or_model, "active", None)
    with active() if active else contextlib.nullcontext(anchor_or_model) as model, torch.no_grad():
        return model(input_ids=PROBE, use_cache=False).logits.clone()


def lora(**changes) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **changes)


def changed(folder) -> LlamaForCausalLM:
    """A model in memory whose weights are not those of the folder that its configuration names."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    return model


def trained_adapter(folder):
    return get_peft_model(LlamaForCausalLM.from_pretrained(folder), lora(init_lora_weights=False))


POLICIES = {
    "a path": (lambda folder: str(folder), {}),
    "a path, no KL": (lambda folder: str(folder), {"beta": 0.0}),
    "an instance": (LlamaForCausalLM.from_pretrained, {}),
    "an instance, no KL": (LlamaForCausalLM.from_pretrained, {"beta": 0.0}),
    "an instance with weights of its own": (changed, {}),
    "an instance, copied": (LlamaForCausalLM.from_pretrained, {"anchor_source": "instance"}),
    "new LoRA": (lambda folder: str(folder), {"peft_config": lora()}),
    "new LoRA, no KL": (lambda folder: str(folder), {"peft_config": lora(), "beta": 0.0}),
    "LoRA that does not start at 0": (lambda folder: str(folder), {"peft_config": lora(init_lora_weights=False)}),
    "PiSSA": (lambda folder: str(folder), {"peft_config": lora(init_lora_weights="pissa")}),
    "a trained adapter": (trained_adapter, {}),
    "a trained adapter, no KL": (trained_adapter, {"beta": 0.0}),
    "with gradient checkpointing": (lambda folder: str(folder), {"gradient_checkpointing": True}),
    "LoRA with gradient checkpointing": (
        lambda folder: str(folder),
        {"peft_config": lora(), "gradient_checkpointing": True},
    ),
}


QUICK = ("a path", "an instance with weights of its own", "new LoRA", "a trained adapter, no KL")


@pytest.mark.parametrize(
    ("policy", "changes"),
    [pytest.param(*p, id=name, marks=[] if name in QUICK else [pytest.mark.slow]) for name, p in POLICIES.items()],
)
def test_after_three_steps_the_anchor_is_the_policy_of_step_0_and_the_policy_is_not(
    policy, changes, policy_dir, kit, make_trainer
):
    model = policy(policy_dir)
    trainer = make_trainer(model, aggregator="synthesis", answer_extractor=kit.parity, learning_rate=0.01, **changes)
    trainer.model.eval()
    start = logits(trainer.model)
    anchor = trainer._scorer.tools.anchor
    at_start = logits(anchor)
    torch.testing.assert_close(at_start, start, rtol=0, atol=0 if "pissa" not in str(changes) else 1e-5)
    trainer.model.train()
    trainer.train()
    trainer.model.eval()
    assert torch.equal(logits(anchor), at_start)
    assert not torch.equal(logits(trainer.model), start)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({}, "HostAnchor"), ({"peft_config": lora()}, "PolicyAnchor"), ({"beta": 0.0}, "Anchor")],
    ids=["reference model", "adapter", "loaded"],
)
def test_weights_are_held_twice_only_where_nothing_frozen_is_there(changes, kind, make_trainer):
    trainer = make_trainer(aggregator="synthesis", **changes)
    assert type(trainer._scorer.tools.anchor).__name__ == kind


def test_nothing_is_loaded_where_nothing_asks_for_an_anchor(make_trainer):
    assert make_trainer(aggregator="first", beta=0.0)._scorer.tools.anchor is None


class Stop(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True], ids=["used", "raising"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"peft_config": lora()}, {"peft_config": lora(init_lora_weights=False)}, {"anchor": "policy"}],
    ids=["model", "adapter off", "frozen adapter", "policy"],
)
def test_modes_flags_adapters_and_checkpointing_are_as_before_the_call(changes, fails, make_trainer, monkeypatch):
    trainer = make_trainer(aggregator="synthesis", gradient_checkpointing=True, **changes)
    model = trainer.model
    model.train()
    frozen = next(module for module in model.modules() if type(module).__name__ == "LlamaAttention")
    frozen.eval()  # a user's own choices
    next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)

    def state():
        return (
            [module.training for module in model.modules()],
            [parameter.requires_grad for parameter in model.parameters()],
            getattr(model, "active_adapter", None),
            model.is_gradient_checkpointing,
            model.config.use_cache,
            torch.is_grad_enabled(),
        )

    before = state()
    anchor = trainer._scorer.tools.anchor
    if fails:
        monkeypatch.setattr("hf_ext.trainers.cat.anchor.generate_replies", lambda *a, **k: raise_stop())
        with pytest.raises(Stop):
            anchor.generate([[{"role": "user", "content": "x"}]], max_new_tokens=2, temperature=0.0, seeds=[0])
    else:
        anchor.generate([[{"role": "user", "content": "x"}]], max_new_tokens=2, temperature=0.0, seeds=[0])
        anchor.score([("a", "b")])
    assert state() == before


def raise_stop():
    raise Stop


def test_preserved_puts_flags_back_that_the_block_changed():
    model = LlamaForCausalLM.config_class(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    model = LlamaForCausalLM(model)
    with pytest.raises(Stop), preserved(model):
        model.eval().requires_grad_(False)
        model.config.use_cache = False
        raise Stop
    assert all(p.requires_grad for p in model.parameters()) and model.config.use_cache is True


def test_the_policy_as_anchor_moves(make_trainer, kit):
    trainer = make_trainer(anchor="policy", aggregator="synthesis", answer_extractor=kit.parity, learning_rate=0.01)
    anchor = trainer._scorer.tools.anchor
    before = logits(anchor)
    trainer.train()
    assert isinstance(anchor, PolicyAnchor) and not torch.equal(logits(anchor), before)


def test_a_sampled_reply_depends_on_its_seed_alone(policy_dir):
    model, tokenizer = LlamaForCausalLM.from_pretrained(policy_dir), AutoTokenizer.from_pretrained(policy_dir)
    asked = [[{"role": "user", "content": text}] for text in ("one", "two and more", "three")]

    def replies(which, batch_size):
        anchor = Anchor(model, tokenizer, batch_size=batch_size)
        found = anchor.generate([asked[i] for i in which], max_new_tokens=12, temperature=1.0, seeds=which)
        return dict(zip(which, [reply.text for reply in found]))

    everything = replies([0, 1, 2], 3)
    assert replies([2, 0], 1) == {i: everything[i] for i in (2, 0)}
    assert replies([1], 8) == {1: everything[1]}
    other = Anchor(model, tokenizer).generate(asked[:1], max_new_tokens=12, temperature=1.0, seeds=[99])
    assert other[0].text != everything[0]


def test_scores_are_the_losses_of_the_model_in_any_batch(policy_dir):
    model, tokenizer = LlamaForCausalLM.from_pretrained(policy_dir), AutoTokenizer.from_pretrained(policy_dir)
    pairs = [("a prompt", "short"), ("another, longer prompt", "a longer completion"), ("", "no prompt"), ("x", "")]
    expected = []
    for prompt, completion in pairs:
        ids = tokenizer(prompt + completion, return_tensors="pt")["input_ids"]
        labels = ids.clone()
        labels[:, : len(tokenizer(prompt)["input_ids"])] = -100
        expected.append(model(input_ids=ids, labels=labels).loss.item() if completion else float("inf"))
    for batch_size in (1, 4):
        found = Anchor(model, tokenizer, batch_size=batch_size).score(pairs)
        assert found == pytest.approx(expected, rel=1e-5)


def test_other_anchors(make_trainer, policy_dir):
    said = [{"role": "user", "content": "x"}]
    by_function = make_trainer(anchor=lambda messages: messages[0]["content"] * 2)._scorer.tools.anchor
    assert isinstance(by_function, CallableAnchor)
    assert by_function.generate([said], max_new_tokens=1, temperature=0.0, seeds=[0])[0].text == "xx"

    class Backend:
        name = "echo"

        def complete(self, conversations, **sampling):
            return [ChatReply(c[0]["content"], "stop") for c in conversations]

    by_backend = make_trainer(anchor=Backend(), aggregator="synthesis")._scorer.tools.anchor
    assert isinstance(by_backend, BackendAnchor)
    assert by_backend.generate([said], max_new_tokens=1, temperature=0.0, seeds=[0])[0].text == "x"

    other = AutoModelForCausalLM.from_pretrained(policy_dir)
    by_model = make_trainer(anchor=other, aggregator="synthesis")._scorer.tools.anchor
    assert by_model.model is other and not any(p.requires_grad for p in other.parameters())
    by_path = make_trainer(anchor=str(policy_dir), aggregator="synthesis")._scorer.tools.anchor
    assert not by_path.model.training


def test_what_cannot_be_a_frozen_anchor_is_refused(make_trainer, policy_dir):
    with pytest.raises(ValueError, match="sync_ref_model=True moves the reference model"):
        make_trainer(sync_ref_model=True)
    with pytest.raises(TypeError, match="anchor is a int"):
        make_trainer(anchor=3)
    model = LlamaForCausalLM.from_pretrained(policy_dir)
    with pytest.raises(ValueError, match="anchor is the model in training"):
        make_trainer(model, anchor=model)
    with pytest.raises(ValueError, match="min_ppl needs an anchor whose weights are here"):
        make_trainer(aggregator="min_ppl", anchor=lambda messages: "x")


def test_an_adapter_that_vllm_would_merge_is_refused_before_anything_is_loaded(make_trainer, policy_dir):
    for mode in ("colocate", "server"):
        changes = {"use_vllm": True, "vllm_mode": mode, "aggregator": "synthesis"}
        with pytest.raises(ValueError, match=r"use_vllm=True merges the adapter.*pass anchor= \(an endpoint"):
            make_trainer(peft_config=lora(), **changes)
        with pytest.raises(ValueError, match="use_vllm=True merges the adapter"):
            make_trainer(trained_adapter(policy_dir), **changes)


def test_a_moving_reference_model_is_refused_only_where_an_anchor_is_asked_for(make_trainer):
    assert make_trainer(sync_ref_model=True, aggregator="first").args.sync_ref_model
    assert make_trainer(
        sync_ref_model=True, reward_weight=0.0, reward_funcs=[lambda prompts, **row: [0.0] * len(prompts)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_a_resume_restores_the_frozen_adapter_and_not_the_one_that_the_new_process_began_with(
    beta, make_trainer, policy_dir, kit
):
    changes = {"aggregator": "synthesis", "answer_extractor": kit.parity, "beta": beta, "learning_rate": 0.01}
    torch.manual_seed(1)
    first = make_trainer(trained_adapter(policy_dir), save_strategy="steps", save_steps=2, **changes)
    start = logits(first._scorer.tools.anchor)
    first.train()
    del changes["beta"], changes["learning_rate"]
    torch.manual_seed(2)
    again = make_trainer(trained_adapter(policy_dir), args=first.args, **changes)
    assert not torch.equal(logits(again._scorer.tools.anchor), start)  # its adapter is random, and another
    again.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-2")
    assert torch.equal(logits(again._scorer.tools.anchor), start)
    assert kit.differing(kit.weights(first.model), kit.weights(again.model)) == []


def test_an_anchor_without_room_for_the_rollouts_is_refused_before_training(make_trainer, tiny_llama_dir):
    with pytest.raises(ValueError, match="4 rollouts do not fit into the anchor's context of 512 tokens"):
        make_trainer(str(tiny_llama_dir), aggregator="synthesis")


def test_a_copy_of_a_policy_that_trl_patched_computes_with_its_own_weights(make_trainer, policy_dir):
    # TRL binds the inner forward of an instance to that very instance: a plain deep copy would follow the policy.
    trainer = make_trainer(LlamaForCausalLM.from_pretrained(policy_dir), aggregator="synthesis", beta=0.0)
    naive = copy.deepcopy(trainer.model)
    before = logits(naive), logits(trainer._scorer.tools.anchor)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(2)
    assert not torch.equal(logits(naive), before[0])  # so the pitfall is real
    assert torch.equal(logits(trainer._scorer.tools.anchor), before[1])
