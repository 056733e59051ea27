"""The small base and its pretraining; its fine-tuning with and without links; accuracy at every length."""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_ext.benchmarks.language_model import cache_folder
from hf_ext.benchmarks.turboconn.tasks import VOCABULARY, Task, batch_of, pretraining_batch
from hf_ext.model_patches.turboconn import TurboConnConfig, patch
from hf_ext.runlog import write_json

__all__ = ["BASE", "MODELS", "Kind", "accuracy", "base_model", "fine_tune", "load", "pretrained"]

BASE = {
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "steps": 200,
    "batch": 16,
    "length": 128,
    "lr": 2e-3,
    "init": 0.1,
}


class Kind(NamedTuple):
    """How a model is made of the base and fine-tuned.

    Attributes:
        links: As `TurboConnConfig` names them; None for the base.
        attention: Whether the attention's matrices are trained too.
        factor: Its steps as a multiple of the others'.
    """

    links: str | None = None
    attention: bool = False
    factor: int = 1


MODELS = {
    "base": Kind(attention=True),
    "base, attention kept": Kind(),
    "sparse": Kind("sparse"),
    "dense": Kind("dense"),
    "cascade": Kind("cascade"),
    "dense, attention trained": Kind("dense", attention=True),
    "base, 4 x the steps": Kind(attention=True, factor=4),
}


def base_model(plan: dict[str, Any]) -> LlamaForCausalLM:
    """A new Llama of the plan's size (see `BASE`), eager to be trained."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=plan["hidden"],
        intermediate_size=3 * plan["hidden"],
        num_hidden_layers=plan["layers"],
        num_attention_heads=plan["heads"],
        num_key_value_heads=plan["kv_heads"],
        head_dim=plan["hidden"] // plan["heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=plan["init"],
    )
    return LlamaForCausalLM(config)


def pretrained(seed: int, plan: dict[str, Any] = BASE, say: Callable[[str], None] | None = None) -> Path:
    """Folder of the base of a seed; trained unless it is in the cache, where its name is a hash of the plan.

    Args:
        seed: Of the weights and the text.
        plan: Sizes and steps, as `BASE`.
        say: Told before it is trained.
    """
    facts = {**plan, "seed": seed, "version": 3}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_folder() / f"turboconn-base-{digest}"
    if (folder / "training.json").exists():
        return folder
    if say:
        say(f"pretraining the base of seed {seed}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = base_model(plan)
    generator = torch.Generator().manual_seed(seed)

    def loss() -> torch.Tensor:
        ids = pretraining_batch(plan["batch"], plan["length"], generator)
        return model(input_ids=ids, labels=ids).loss

    facts |= _optimise(model, loss, plan["steps"], plan["lr"])
    # Its own name: another process may be at the same base.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    model.save_pretrained(partial)
    write_json(partial / "training.json", facts)
    if folder.exists():
        shutil.rmtree(partial)
    else:
        partial.rename(folder)
    return folder


def load(folder: Path, kind: Kind = MODELS["base"]) -> torch.nn.Module:
    """The base of a folder made ready for its fine-tuning."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if kind.links is not None:
        patch(model, TurboConnConfig(links=kind.links))
    for layer in () if kind.attention else model.model.layers:
        layer.self_attn.requires_grad_(False)
    return model


def fine_tune(
    model: torch.nn.Module, task: Task, steps: int, lr: float, seed: int, rows: int = 64, length: int = 16
) -> dict[str, Any]:
    """Train a model on a task in place: the loss at the tokens that are asked.

    Returns:
        `losses` and `norms` (of the gradient, before it is clipped at 1) of each step, and `seconds`.
    """
    generator = torch.Generator().manual_seed(1000 + seed)

    def loss() -> torch.Tensor:
        ids, answers = batch_of(task, rows, length, generator)
        return F.cross_entropy(model(input_ids=ids, use_cache=False).logits.flatten(0, 1), answers.flatten())

    return _optimise(model, loss, steps, lr)


def _optimise(
    model: torch.nn.Module, loss_of_batch: Callable[[], torch.Tensor], steps: int, lr: float
) -> dict[str, Any]:
    """AdamW, clipping at 1, a tenth of the steps to warm up, then a cosine down to a tenth of the rate."""
    start = time.perf_counter()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.01)
    warm_up = max(1, steps // 10)

    def share(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    losses, norms = [], []
    for _ in range(steps):
        loss = loss_of_batch()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    return {"losses": losses, "norms": norms, "seconds": time.perf_counter() - start}


@torch.inference_mode()
def accuracy(model: torch.nn.Module, task: Task, length: int, rows: int, seed: int = 0) -> list[float]:
    """Share of right answers at the first, second, ... token of new sequences.

    Attention is causal, so the answer at token `n` is that of a sequence of length `n`.
    """
    generator = torch.Generator().manual_seed(2_000_000 + seed)
    ids, answers = batch_of(task, rows, length, generator, training=False)
    model.eval()
    guesses = model(input_ids=ids, use_cache=False).logits.argmax(-1)
    return (guesses == answers).float().mean(0).tolist()
