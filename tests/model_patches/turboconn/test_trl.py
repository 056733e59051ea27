"""TRL's trainers replace the causal model's forward: the links must be at work in what they compute all the same."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ext.model_patches.turboconn import TurboConnConfig, patch

pytestmark = pytest.mark.slow
COMMON = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "logging_steps": 1,
    "max_steps": 1,
    "learning_rate": 1e-3,
    "disable_tqdm": True,
    "seed": 0,
}
TEXTS = ["the links carry state", "from one token to the next", "and a state that is carried", "goes a long way"]


@pytest.fixture
def model(tiny_llama_dir, fill):
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    return fill(patch(base, TurboConnConfig()), scale=0.2)


@pytest.fixture
def tokenizer(tiny_llama_dir):
    return AutoTokenizer.from_pretrained(tiny_llama_dir)


def log_probabilities(model, tokens, mask) -> torch.Tensor:
    """Of each token but the first, by the model's own forward."""
    with torch.no_grad():
        logits = model.eval()(tokens, attention_mask=mask).logits.float()
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["padded", "packed"])
def test_sft_logs_the_loss_of_the_linked_model_and_moves_the_links(checkpointing, mode, model, tokenizer, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(tmp_path),
        gradient_checkpointing=checkpointing,
        per_device_train_batch_size=4,
        packing=mode == "packed",
        max_length=64,
        **COMMON,
    )
    before = copy.deepcopy(model)
    trainer = SFTTrainer(
        model, args=config, train_dataset=Dataset.from_dict({"text": TEXTS}), processing_class=tokenizer
    )
    if mode == "packed":  # rows of several documents, whose positions start again
        batch = next(iter(trainer.get_train_dataloader()))
        assert batch["input_ids"].shape[0] == 1 and (batch["position_ids"] == 0).sum() == len(TEXTS)
    trainer.train()
    logged = trainer.state.log_history[0]["loss"]

    total = off = count = 0
    for text in TEXTS:
        ids = tokenizer(text + tokenizer.eos_token, return_tensors="pt").input_ids
        mask = torch.ones_like(ids)
        total, count = total - log_probabilities(before, ids, mask).sum(), count + ids.shape[1] - 1
        before.set_links(False)
        off -= log_probabilities(before, ids, mask).sum()
        before.set_links(True)
    assert logged == pytest.approx((total / count).item(), rel=1e-5)
    assert abs((off / count).item() - logged) > 1e-3  # with the links off it would have been another
    assert not torch.equal(model.model.turbo_links.into_0.weight, before.model.turbo_links.into_0.weight)


def test_grpo_computes_the_log_probabilities_of_the_linked_model(model, tokenizer, tmp_path):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    seen = []

    def reward(completions, **_):
        return [float(len(set(text))) for text in completions]

    class Spy(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
            found = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **kwargs
            )
            seen.append((input_ids, attention_mask, logits_to_keep, found[0].detach(), copy.deepcopy(before)))
            return found

    config = GRPOConfig(
        output_dir=str(tmp_path),
        gradient_checkpointing=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        beta=0.0,
        **COMMON,
    )
    before = copy.deepcopy(model)
    trainer = Spy(
        model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
        processing_class=tokenizer,
    )
    trainer.train()
    assert seen
    for tokens, mask, kept, found, reference in seen[:1]:
        expected = log_probabilities(reference, tokens, mask)[:, -kept:]
        valid = mask[:, -kept:].bool()
        assert (found - expected)[valid].abs().max() < 1e-4
        reference.set_links(False)
        assert (found - log_probabilities(reference, tokens, mask)[:, -kept:])[valid].abs().max() > 1e-3
    assert not torch.equal(model.model.turbo_links.into_0.weight, before.model.turbo_links.into_0.weight)


def test_dpo_computes_the_loss_of_the_linked_model(model, tokenizer, tmp_path):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = {"prompt": ["the ", "and "], "chosen": ["links", "state"], "rejected": ["attention", "cache"]}
    config = DPOConfig(output_dir=str(tmp_path), gradient_checkpointing=True, per_device_train_batch_size=2, **COMMON)
    reference = copy.deepcopy(model)
    with torch.no_grad():  # so that policy and reference differ
        model.model.turbo_links.into_0.weight.mul_(-1)
    before = copy.deepcopy(model)
    trainer = DPOTrainer(
        model,
        ref_model=copy.deepcopy(reference),
        args=config,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
    )
    trainer.train()

    def score(model, prompt, completion) -> torch.Tensor:
        start = tokenizer(prompt).input_ids
        ids = torch.tensor([start + tokenizer(completion).input_ids + [tokenizer.eos_token_id]])
        return log_probabilities(model, ids, torch.ones_like(ids))[0, len(start) - 1 :].sum()

    losses = []
    for prompt, chosen, rejected in zip(*rows.values(), strict=True):
        margin = sum(
            sign * (score(before, prompt, text) - score(reference, prompt, text))
            for sign, text in ((1, chosen), (-1, rejected))
        )
        losses.append(-torch.nn.functional.logsigmoid(config.beta * margin))
    assert trainer.state.log_history[0]["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    assert abs(trainer.state.log_history[0]["loss"] - 0.6931) > 1e-4
    assert not torch.equal(model.model.turbo_links.into_0.weight, before.model.turbo_links.into_0.weight)


def test_sft_with_lora_and_links(model, tokenizer, tmp_path):
    from datasets import Dataset
    from peft import LoraConfig, PeftModel
    from trl import SFTConfig, SFTTrainer

    base = copy.deepcopy(model)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", modules_to_save=["turbo_links"])
    config = SFTConfig(output_dir=str(tmp_path), per_device_train_batch_size=4, **COMMON)
    trainer = SFTTrainer(
        model,
        args=config,
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer,
        peft_config=lora,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    trained = trainer.model.eval()
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    with torch.no_grad():
        expected = trained(ids).logits
        links = trained.base_model.model.model.turbo_links
        assert not torch.equal(links.modules_to_save["default"].into_0.weight, base.model.turbo_links.into_0.weight)
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert torch.equal(loaded(ids).logits, expected)
