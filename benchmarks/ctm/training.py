"""Training of the study's adapters, and the share of answers that a model gets right."""

import hashlib
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.ctm.tasks import Example, Task

__all__ = ["Training", "accuracy", "adapter_folder", "batch_of", "train_adapter"]


@dataclass(frozen=True)
class Training:
    """Settings of an adapter's training; the same for all tasks.

    Attributes:
        rank: Of the LoRA.
        alpha: Its lora_alpha.
        targets: Modules that get one.
        learning_rate: Of AdamW at its peak, after a tenth of the tokens; then a cosine to zero.
        batch: Examples of a step.
        tokens: Training ends with the step that reaches this many; the examples are repeated as needed.
    """

    rank: int = 16
    alpha: int = 32
    targets: tuple[str, ...] = ("q_proj", "v_proj", "up_proj", "down_proj")
    learning_rate: float = 5e-4
    batch: int = 16
    tokens: int = 16_000


def batch_of(tokenizer: Any, examples: Sequence[Example]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Model inputs [B, T] padded on the left, and labels [B, K]: the answers at the end, -100 elsewhere.

    Prompts and answers are tokenized apart: at test time the prompt is all there is.
    """
    rows = []
    for example in examples:
        prompt = tokenizer(example.prompt, add_special_tokens=False).input_ids
        rows.append((prompt, tokenizer(example.answer, add_special_tokens=False).input_ids))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    kept = max(len(answer) for _, answer in rows)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), kept), -100)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, width - len(prompt) - len(answer) :] = torch.tensor(prompt + answer)
        mask[row, width - len(prompt) - len(answer) :] = 1
        labels[row, kept - len(answer) :] = torch.tensor(answer)
    return {"input_ids": ids, "attention_mask": mask}, labels


def _answer_logits(model: nn.Module, inputs: dict[str, torch.Tensor], kept: int) -> torch.Tensor:
    """Logits [B, K, V] (float32) of the last K tokens, in bfloat16 arithmetic: three times as fast here as float32."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(**inputs, logits_to_keep=kept + 1, use_cache=False).logits[:, :-1].float()


@torch.inference_mode()
def accuracy(model: nn.Module, tokenizer: Any, examples: Sequence[Example], batch: int = 150) -> float:
    """Share of examples whose answer, newline included, is what greedy decoding writes.

    One call with the answer in place says the same: greedy decoding writes the answer if and only if each of its
    tokens is the most likely one after those before.
    """
    model.eval()
    ordered = sorted(examples, key=lambda example: len(example.prompt))
    right = 0
    for begin in range(0, len(ordered), batch):
        inputs, labels = batch_of(tokenizer, ordered[begin : begin + batch])
        best = _answer_logits(model, inputs, labels.shape[1]).argmax(-1)
        right += ((best == labels) | (labels == -100)).all(dim=1).sum().item()
    return right / len(ordered)


def adapter_folder(training: Training, task: Task, seed: int, init_seed: int, model: str) -> Path:
    """Where an adapter is kept: named by everything that it depends on."""
    settings = {**asdict(training), "model": model, "examples": task.training, "seed": seed, "init_seed": init_seed}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    return lm.cache_folder() / "ctm-adapters" / f"{task.name}-{seed}-{init_seed}-{digest}"


def _steps(examples: list[Example], batch: int, seed: int) -> Iterator[list[Example]]:
    """Batches without end: the examples in a new order each time round."""
    order = random.Random(seed)
    while True:
        shuffled = order.sample(examples, len(examples))
        for begin in range(0, len(shuffled), batch):
            yield shuffled[begin : begin + batch]


def _schedule(share: float) -> float:
    """Factor on the learning rate after a share of the training's tokens."""
    if share < 0.1:
        return 0.1 + 0.9 * share / 0.1
    return 0.5 * (1 + math.cos(math.pi * (min(share, 1) - 0.1) / 0.9))


def train_adapter(
    load: Callable[[], nn.Module],
    tokenizer: Any,
    task: Task,
    training: Training,
    seed: int,
    init_seed: int,
    folder: Path,
) -> dict[str, Any]:
    """Train a LoRA on a task and save it; one that is there already is left alone.

    Args:
        load: Gives the base model, fresh.
        seed: Of the order of the examples.
        init_seed: Of the A factors; B starts at zero.
        folder: Where it goes; appears only when it is complete.

    Returns:
        What is kept beside it: tokens, seconds, the last loss.
    """
    facts = folder / "training.json"
    if facts.exists():
        return json.loads(facts.read_text())
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(init_seed)
    config = LoraConfig(
        r=training.rank, lora_alpha=training.alpha, target_modules=list(training.targets), task_type="CAUSAL_LM"
    )
    model = get_peft_model(load(), config)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=training.learning_rate, weight_decay=0.0)
    tokens, losses, begin = 0, [], time.perf_counter()
    for examples in _steps(task.training, training.batch, seed):
        inputs, labels = batch_of(tokenizer, examples)
        optimizer.param_groups[0]["lr"] = training.learning_rate * _schedule(tokens / training.tokens)
        logits = _answer_logits(model, inputs, labels.shape[1])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens += inputs["attention_mask"].sum().item()
        if tokens >= training.tokens:
            break
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    last = losses[-10:]
    row = {
        "tokens": tokens,
        "seconds": time.perf_counter() - begin,
        "loss": sum(last) / len(last),
        "steps": len(losses),
    }
    (partial / "training.json").write_text(json.dumps(row))
    partial.rename(folder)
    return row
