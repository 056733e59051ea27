"""Measure the LRAgent cache beside full sharing and no sharing: `hf-ext bench lragent`.

On SmolLM2-135M with LoRA adapters that are trained here, on different texts: how far a second agent's predictions are
from those over a cache of its own, when it goes on from what a first agent has read (`kl`); how long a new agent takes
to its first token on a trajectory of 1,024 tokens (`ttft`); and the bytes of a cache of the shape of Llama 3.1 8B
(`memory`). Adapters are trained once, 20 seconds each, and kept. A row that is there already is not measured again.
"""

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.lragent import adapters, measure
from hf_ext.benchmarks.lragent.adapters import TEXTS
from hf_ext.benchmarks.report import refresh, results_folder
from hf_ext.cache_impls.lragent import disable_lragent, enable_lragent
from hf_ext.runlog import RunLog

__all__ = ["KEY", "main"]

KEY = ("kind", "targets", "pair", "trajectory", "seed", "a", "mode")
PREFIX, SCORED = 192, 48  # tokens that the first agent reads, and tokens that the second one predicts
TRAJECTORIES = 3
HELD, NEW = 1024, 16  # of a trajectory whose new agent is timed: tokens held, tokens that nobody has read
REPEATS = 5
# Who shares what: (targets, whether the second adapter has the first one's A, modes). The first is measured with all
# seeds, in the order of what matters; `base_shared` and the others with one.
SETTINGS = [
    ("qkv", "shared", ("base_lr_shared", "full")),
    ("qkv", "shared", ("base_shared",)),
    ("qv", "shared", ("base_lr_shared", "full")),
    ("qkv", "own", ("base_shared", "full")),
]
# (agents, rank, tokens, generated)
MEMORY = [(4, 16, 512, 0), (4, 16, 512, 40), (3, 8, 512, 0)]
_KINDS = ("memory", "kl", "ttft")


def main(
    kinds: Annotated[str, typer.Option(help="Of memory, kl, ttft.")] = ",".join(_KINDS),
    seeds: Annotated[int, typer.Option(help="Seeds of the adapters in the main comparison; others have one.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Data file; rows are appended. [default: benchmarks/lragent/data/results.jsonl]"),
    ] = None,
) -> None:
    """LRAgent, full sharing and no sharing on three pairs of trained adapters; half an hour on a core of its own.

    Example: `hf-ext bench lragent --kinds kl,ttft --seeds 1`
    """
    parts = kinds.split(",")
    if unknown := set(parts) - set(_KINDS):
        raise ValueError(f"--kinds {', '.join(sorted(unknown))}: known are {', '.join(_KINDS)}")
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")
    torch.set_num_threads(threads)
    console = Console()
    log = RunLog(out or results_folder() / "lragent" / "data" / "results.jsonl", key=KEY)
    facts = {"command": "hf-ext bench lragent", **lm.environment_facts(("torch", "transformers", "peft", "hf-ext"))}
    if "memory" in parts:
        _memory(log, facts, console)
    if {"kl", "ttft"} & set(parts):
        _Agents(log, facts, console).run(parts, seeds)
    console.print(f"rows are in {log.path}", soft_wrap=True)
    refresh(out)


def _memory(log: RunLog, facts: dict[str, Any], console: Console) -> None:
    for agents, rank, tokens, generated in MEMORY:
        for mode in ("base_lr_shared", "base_shared"):
            key = {"kind": "memory", "targets": "kv", "pair": f"{agents} agents of rank {rank}", "a": mode}
            key |= {"trajectory": f"{tokens} + {generated} tokens", "seed": 0, "mode": mode}
            if log.done(**key):
                continue
            console.print(f"memory: {agents} agents, rank {rank}, {tokens} + {generated} tokens, {mode}")
            log.append({**key, **measure.llama_8b_report(agents, rank, tokens, generated, mode), **facts})


class _Agents:
    """The rows that need the language model, loaded when the first of them is missing."""

    def __init__(self, log: RunLog, facts: dict[str, Any], console: Console):
        self.log, self.facts, self.console = log, facts, console
        self.root = lm.cache_folder() / "lragent-adapters"
        self.base = None

    def run(self, parts: list[str], seeds: int) -> None:
        """Measure what is missing, seed by seed."""
        pairs = [(TEXTS[i], TEXTS[(i + 1) % len(TEXTS)]) for i in range(len(TEXTS))]
        if "ttft" in parts:
            self._ttft("qkv", 0, pairs[0])
        if "kl" in parts:
            for number, (targets, a, modes) in enumerate(SETTINGS):
                for seed in range(1 if number else seeds):
                    for pair in pairs:
                        self._kl(targets, seed, pair, a, modes)

    def _load(self) -> None:
        if self.base is None:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            folder = lm.fetch_smollm2(say=self.console.print)
            self.base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder)
            self.ids = {name: adapters.token_ids(tokenizer, name) for name in TEXTS}

    def _adapter(self, targets: str, text: str, seed: int, like: str | None = None) -> Path:
        folder = adapters.adapter_folder(self.root, targets, text, seed, like)
        if not folder.exists():
            shared = None if like is None else self._adapter(targets, like, seed)
            loss = adapters.train(self.base, self.ids[text][0], folder, targets, seed, shared)
            self.console.print(f"trained {folder.name}: loss {loss:.2f}", soft_wrap=True)
        return folder

    def _pair(self, targets: str, seed: int, pair: tuple[str, str], a: str) -> Any:
        first = self._adapter(targets, pair[0], seed)
        second = self._adapter(targets, pair[1], seed, pair[0] if a == "shared" else None)
        model = adapters.load_pair(self.base, first, second)
        enable_lragent(model)
        return model

    def _release(self, model: Any) -> None:
        disable_lragent(model)
        model.unload()

    def _kl(self, targets: str, seed: int, pair: tuple[str, str], a: str, modes: tuple[str, ...]) -> None:
        key = {"kind": "kl", "targets": targets, "pair": "-".join(pair), "seed": seed, "a": a}
        missing = [
            (number, mode)
            for number in range(TRAJECTORIES)
            for mode in modes
            if not self.log.done(**key, trajectory=number, mode=mode)
        ]
        if not missing:
            return
        self._load()
        model = self._pair(targets, seed, pair, a)
        for number in sorted({number for number, _ in missing}):
            ids = adapters.trajectory(self.ids[pair[0]][0], self.ids[pair[1]][0], number, PREFIX, SCORED)
            targets_of = ids[0, PREFIX + 1 :]
            exact, _ = measure.log_probs_of(model, "none", ids, PREFIX)
            for mode in (mode for n, mode in missing if n == number):
                found, read = measure.log_probs_of(model, mode, ids, PREFIX)
                row = {**key, "trajectory": number, "mode": mode, **measure.compare(found, exact, targets_of)}
                row |= {"loss_of_none": measure.compare(exact, exact, targets_of)["loss"], "read": read}
                row |= {"text_sha256": [self.ids[name][1] for name in pair]}
                self.log.append({**row, **self.facts})
                self.console.print(
                    f"{targets}, {'-'.join(pair)}, {a} A, {number}, seed {seed}, {mode}: {row['kl']:.4f}"
                )
        self._release(model)

    def _ttft(self, targets: str, seed: int, pair: tuple[str, str]) -> None:
        key = {"kind": "ttft", "targets": targets, "pair": "-".join(pair), "seed": seed, "a": "shared"}
        key["trajectory"] = f"{HELD} + {NEW} tokens"
        modes = ["full", "base_lr_shared", "DynamicCache", "base_shared", "none"]
        # Ratios are of one run: if one is to be measured, all are.
        if all(self.log.done(**key, mode=mode) for mode in modes):
            return
        self._load()
        model = self._pair(targets, seed, pair, "shared")
        text = adapters.trajectory(self.ids[pair[0]][0], self.ids[pair[1]][0], 0, HELD, NEW)
        found = measure.times_to_first_token(model, modes, text, HELD, REPEATS, self.console.print)
        for mode in modes:
            seconds, clock = map(list, zip(*found[mode]))
            # Of neighbours in time: the machine may have been busier with one repeat than with another.
            ratios = {
                f"over_{other}": median(s / o for s, (o, _) in zip(seconds, found[other]))
                for other in ("full", "none")
            }
            row = {**key, "mode": mode, "seconds": seconds, "median": median(seconds), "least": min(seconds), **ratios}
            row["clock_seconds"] = clock
            self.log.append({**row, **self.facts})
        self._release(model)


if __name__ == "__main__":
    typer.run(main)
