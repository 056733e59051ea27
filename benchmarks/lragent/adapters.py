"""Small LoRA adapters of SmolLM2-135M, trained on different texts and kept in the cache folder."""

import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from hf_ext.benchmarks import language_model as lm
from hf_ext.cache_impls.lragent import create_shared_a_adapter

__all__ = ["ALPHA", "RANK", "STEPS", "TARGETS", "TEXTS", "adapter_folder", "load_pair", "train", "trajectory"]

# Written by Python's own tools, newsmen and Wikipedians: unlike enough for adapters that differ.
TEXTS = ("stdlib", "news", "wikipedia")
TARGETS = {"qkv": ("q_proj", "k_proj", "v_proj"), "qv": ("q_proj", "v_proj")}
RANK, ALPHA = 8, 16
STEPS, WINDOW, RATE = 32, 48, 2e-3
# Of a text: adapters learn from its first part, trajectories are taken from the rest.
LEARNT = 0.6


def adapter_folder(root: Path, targets: str, text: str, seed: int, like: str | None = None) -> Path:
    """Where an adapter is kept; `like` is the text whose adapter's A it shares."""
    return root / f"{targets}-{text}-seed{seed}{f'-a-of-{like}' if like else ''}"


def train(base: Any, ids: torch.Tensor, folder: Path, targets: str, seed: int, like: Path | None = None) -> float:
    """Train one adapter on windows of a text and save it; returns the mean loss of the last quarter of the steps.

    Args:
        base: SmolLM2, or any causal language model; comes back without adapters.
        ids: int64 [T], the text.
        folder: Where it is saved; complete, or not there.
        targets: Key of `TARGETS`.
        seed: Of the initial A and of the windows.
        like: Folder of an adapter whose A of cached projections is shared and frozen.
    """
    torch.manual_seed(seed)
    if like is None:
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS[targets]))
        model = get_peft_model(base, config, adapter_name="new")
    else:
        model = PeftModel.from_pretrained(base, like, adapter_name="like")
        create_shared_a_adapter(model, "new", like="like", targets=TARGETS[targets][1:])
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(wanted, lr=RATE)
    learnt = ids[: int(LEARNT * len(ids))]
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        start = int(torch.randint(len(learnt) - WINDOW, (1,), generator=generator))
        window = learnt[None, start : start + WINDOW]
        loss = model(input_ids=window, labels=window, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    partial = folder.with_name(f".{folder.name}.partial")
    model.save_pretrained(partial, selected_adapters=["new"])
    (partial / "new").rename(folder)
    shutil.rmtree(partial)
    model.unload()
    tail = losses[-STEPS // 4 :]
    return sum(tail) / len(tail)


def load_pair(base: Any, first: Path, second: Path) -> PeftModel:
    """The model with two saved adapters, `"first"` and `"second"`, for inference."""
    model = PeftModel.from_pretrained(base, first, adapter_name="first")
    model.load_adapter(second, adapter_name="second")
    return model.eval().requires_grad_(False)


def trajectory(first: torch.Tensor, second: torch.Tensor, number: int, prefix: int, scored: int) -> torch.Tensor:
    """Tokens [1, prefix + scored] that no adapter has learnt: half of the prefix of one text, the rest of the other.

    Raises:
        ValueError: A text is too short.
    """
    rest = [ids[int(LEARNT * len(ids)) :] for ids in (first, second)]
    half = prefix // 2
    starts = [number * (prefix + scored), number * (prefix + scored)]
    if any(start + prefix + scored > len(ids) for start, ids in zip(starts, rest)):
        raise ValueError(f"trajectory {number} needs {(number + 1) * (prefix + scored)} tokens behind those learnt")
    one = rest[0][starts[0] : starts[0] + half]
    other = rest[1][starts[1] : starts[1] + prefix - half + scored]
    return torch.cat([one, other])[None]


def token_ids(tokenizer: Any, name: str) -> tuple[torch.Tensor, str]:
    """A text's token ids [T], at most 60,000, and the text's SHA-256."""
    text = lm.load_text(name)
    return lm.tokenize(tokenizer, text.text[:240_000])[:60_000], text.sha256
