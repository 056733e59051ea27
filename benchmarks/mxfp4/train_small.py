"""Train the second model of the benchmark: a small Llama whose weights never were on a 4-bit grid.

The weights of SmolLM2 reach this benchmark through a 4-bit GGUF file, so one may ask whether what is measured on them
is an artefact. This model answers from the other side: about four million parameters, trained from scratch in float32
for a few minutes on Wikipedia articles and Python source, evaluated on articles it has not seen.

    python -m hf_ext.benchmarks.mxfp4.train_small
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import sysconfig
import time
from pathlib import Path

import torch
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_ext.benchmarks.language_model import cache_folder, load_text
from hf_ext.runlog import write_json

__all__ = ["SmallModel", "held_out_text", "train_small"]

_HELD_OUT = 0.15  # of the Wikipedia text, at its end
_SOURCE_CHARACTERS = 2_500_000


@dataclasses.dataclass(frozen=True)
class SmallModel:
    """What is trained and how; the checkpoint's folder carries a hash of this and of the training text.

    Attributes:
        vocabulary: Tokens of the byte-level BPE, which is trained too.
        hidden: Width. Inner width is three times this.
        layers: Decoder layers.
        heads: Attention heads.
        steps: Optimiser steps.
        batch: Sequences a step.
        length: Tokens a sequence.
        learning_rate: Of Muon, for matrices inside the layers; AdamW takes the rest at a tenth.
        seed: For weights and order of sequences.
    """

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    steps: int = 360
    batch: int = 16
    length: int = 256
    learning_rate: float = 0.02
    seed: int = 0


def held_out_text() -> str:
    """The Wikipedia articles that training never sees."""
    text = load_text("wikipedia").text
    return text[int(len(text) * (1 - _HELD_OUT)) :]


def _training_text() -> str:
    wikipedia = load_text("wikipedia").text
    wikipedia = wikipedia[: int(len(wikipedia) * (1 - _HELD_OUT))]
    parts, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if path.name == "argparse.py":  # the text to calibrate on
            continue
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        total += len(parts[-1])
        if total > _SOURCE_CHARACTERS:
            break
    return wikipedia + "\n\n\n" + "\n\n\n".join(parts)


def _train_tokenizer(text: str, vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split("\n\n"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def train_small(plan: SmallModel = SmallModel(), folder: str | os.PathLike[str] | None = None) -> Path:
    """Train the model unless its checkpoint exists.

    Args:
        plan: What to train.
        folder: The checkpoint's folder; in `cache_folder()` by default, named by the hash of plan and text.

    Returns:
        A transformers folder with weights, tokenizer and `training.json` (plan, hash, final loss, seconds).
    """
    text = _training_text()
    facts = dataclasses.asdict(plan) | {"text_sha256": hashlib.sha256(text.encode()).hexdigest()}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    folder = Path(folder) if folder is not None else cache_folder() / f"small-llama-{digest[:12]}"
    if (folder / "training.json").exists():
        return folder
    start = time.perf_counter()
    torch.manual_seed(plan.seed)
    tokenizer = _train_tokenizer(text, plan.vocabulary)
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=plan.hidden,
            intermediate_size=3 * plan.hidden,
            num_hidden_layers=plan.layers,
            num_attention_heads=plan.heads,
            num_key_value_heads=plan.heads,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    loss = _optimise(model, ids, plan)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    seconds = round(time.perf_counter() - start, 1)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts |= {"sha256": digest, "final_loss": loss, "parameters": parameters, "tokens": len(ids), "seconds": seconds}
    write_json(partial / "training.json", facts)
    partial.rename(folder)
    return folder


def _optimise(model: LlamaForCausalLM, ids: torch.Tensor, plan: SmallModel) -> float:
    """Train in place; returns the mean loss of the last twentieth of the steps."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    optimizers = [
        torch.optim.Muon(inner, lr=plan.learning_rate, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=plan.learning_rate / 10, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    warm_up = plan.steps // 20

    def share(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (plan.steps - warm_up)))

    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, share) for optimizer in optimizers]
    generator = torch.Generator().manual_seed(plan.seed)
    losses = []
    with Progress(transient=True) as progress:
        task = progress.add_task("training a small Llama", total=plan.steps)
        for _ in range(plan.steps):
            starts = torch.randint(len(ids) - plan.length, (plan.batch,), generator=generator).tolist()
            batch = torch.stack([ids[begin : begin + plan.length] for begin in starts])
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                scheduler.step()
            losses.append(loss.item())
            progress.update(task, advance=1, description=f"training a small Llama, loss {losses[-1]:.2f}")
    tail = losses[-max(1, plan.steps // 20) :]
    return sum(tail) / len(tail)


if __name__ == "__main__":
    path = train_small()
    print(path, json.loads((path / "training.json").read_text()), sep="\n")
