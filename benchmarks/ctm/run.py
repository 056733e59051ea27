"""Merge four trained adapters of SmolLM2-135M into one by CtM and its peers, and weigh a layer: `hf-ext bench ctm`.

`adapters`: LoRAs for four tasks are trained (and kept in the cache folder) and merged into one of rank 16; each task's
accuracy is compared with that of its own adapter. The scale and the density of every method are chosen on validation
words. `energy`: the share of each adapter that the result has room for. `layer`: time and peak memory of one layer's
merge. `gauge`: what the same adapters give in other factors. A row that is there already is not measured again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.ctm.layer import measure_apart
from hf_ext.benchmarks.ctm.methods import METHODS, Method, merge
from hf_ext.benchmarks.ctm.study import Evaluator, adapters_of, kept, measure_merge
from hf_ext.benchmarks.ctm.synthetic import LAYER, half_shared_adapters, random_adapters, regauge
from hf_ext.benchmarks.ctm.tasks import TASKS, Task, make_task
from hf_ext.benchmarks.ctm.training import Training
from hf_ext.benchmarks.report import refresh, results_folder
from hf_ext.extras import require
from hf_ext.runlog import RunLog

__all__ = ["KEY", "main"]

KEY = ("part", "case", "name", "rank", "seed")
PARTS = ("layer", "gauge", "energy", "adapters")
CASES = ("common", "own")
SEEDS = 3
RANK = 16
SIZES = (576, 1536, 4096)
SHOWN = 8  # examples in the prompt of the base
COUNT = 8  # adapters of a layer whose merge is timed
LAYER_METHODS = (
    "CtM linear",
    "CtM ties",
    "CtM auto, ties",
    "core linear",
    "core ties",
    "full ties",
    "peft linear",
    "peft ties",
    "peft svd",
    "peft ties_svd",
    "peft dare_ties_svd",
)
GAUGE_METHODS = (
    "peft linear",
    "peft ties",
    "peft svd",
    "peft ties_svd",
    "core ties",
    "CtM linear",
    "CtM ties",
    "CtM dare_ties",
    "CtM tsv",
    "CtM auto, ties",
)
ENERGY_METHODS = ("core linear", "core ties", "CtM linear, beta 0", "CtM linear", "CtM linear, beta 1")
SYNTHETIC = {"equal norms": (1.0, 1.0, 1.0, 1.0), "norms 1:2:4:8": (1.0, 2.0, 4.0, 8.0)}


def main(
    parts: Annotated[str, typer.Option(help="Of layer, gauge, energy, adapters.")] = ",".join(PARTS),
    cases: Annotated[
        str, typer.Option(help="Start of the adapters' A: common (to the tasks of a seed, as in the paper), own.")
    ] = "common",
    methods: Annotated[str, typer.Option(help="Only methods whose name contains one of these (semicolons).")] = "",
    seeds: Annotated[int, typer.Option(help="Seeds of the study.")] = SEEDS,
    rank: Annotated[int, typer.Option(help="Rank of the merged adapter.")] = RANK,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Data file; rows are appended. [default: benchmarks/ctm/data/results.jsonl]"),
    ] = None,
) -> None:
    """CtM beside peft's merges: four trained adapters into one, kept energy, time and memory; an hour and a half.

    Examples:

    - `hf-ext bench ctm --parts layer,gauge` trains nothing and takes minutes

    - `hf-ext bench ctm --parts adapters --cases common --methods "CtM ties;svd"`
    """
    chosen = {name: method for name, method in METHODS.items() if any(part in name for part in methods.split(";"))}
    if not chosen:
        raise ValueError(f"--methods {methods!r} matches none of: {', '.join(METHODS)}")
    wanted = _known("--parts", parts, PARTS)
    starts = _known("--cases", cases, CASES)
    for name, value in (("--seeds", seeds), ("--rank", rank), ("--threads", threads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    require("peft", extra="adapters")
    torch.set_num_threads(threads)
    console = Console()
    log = RunLog(out or results_folder() / "ctm" / "data" / "results.jsonl", key=KEY)
    facts = {"command": "hf-ext bench ctm", **lm.environment_facts(("torch", "transformers", "peft", "hf-ext"))}

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    def record(key: dict[str, Any], measure: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        if not log.done(**key):
            say(", ".join(f"{name} {value}" for name, value in key.items()))
            log.append({**key, **measure(*arguments), **facts})

    if "layer" in wanted:
        _layers(chosen, rank, threads, log, facts, say)
    if "gauge" in wanted:
        _gauge(chosen, rank, seeds, record)
    if "energy" in wanted:
        _synthetic(chosen, rank, seeds, record)
    if {"energy", "adapters"} & set(wanted):
        _real(wanted, starts, chosen, seeds, rank, log, say, record)
    console.print(f"rows are in {log.path}", soft_wrap=True)
    refresh(out)


def _known(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    found = text.split(",")
    if unknown := set(found) - set(known):
        raise ValueError(f"{option} {', '.join(sorted(unknown))}: known are {', '.join(known)}")
    return found


def _layers(
    chosen: dict[str, Method], rank: int, threads: int, log: RunLog, facts: dict[str, Any], say: Callable[[str], None]
) -> None:
    names = [name for name in LAYER_METHODS if name in chosen]
    for size in SIZES:
        key = {"part": "layer", "case": f"{size}x{size}, T={COUNT}", "rank": rank, "seed": 0}
        if all(log.done(**key, name=name) for name in names):
            continue
        # Ratios are of one run: if one is to be measured, all are.
        for name in names:
            say(f"layer {size}x{size}, {name}")
            log.append({**key, "name": name, **measure_apart(name, size, size, COUNT, rank, threads), **facts})


def _gauge(chosen: dict[str, Method], rank: int, seeds: int, record: Callable[..., None]) -> None:
    """||merge of the same updates in other factors - merge|| / ||merge||."""

    def change(method: Method, seed: int) -> dict[str, Any]:
        adapters = random_adapters(576, 576, 4, rank, seed)
        given = (adapters, regauge(adapters, seed))
        before, after = (b @ a for a, b in (merge(method, some, rank, 0.5, seed)[LAYER] for some in given))
        return {"change": ((after - before).norm() / before.norm()).item()}

    for name in (name for name in GAUGE_METHODS if name in chosen):
        for seed in range(seeds):
            key = {"part": "gauge", "case": "576x576, T=4", "name": name, "rank": rank, "seed": seed}
            record(key, change, METHODS[name], seed)


def _synthetic(chosen: dict[str, Method], rank: int, seeds: int, record: Callable[..., None]) -> None:
    """Kept energy of four adapters 576 x 576 that share half of their spaces."""
    tasks = [Task(str(number), [], [], []) for number in range(4)]
    for case, norms in SYNTHETIC.items():
        for seed in range(seeds):
            adapters = half_shared_adapters(576, rank, norms, seed)
            for name in (name for name in ENERGY_METHODS if name in chosen):
                key = {"part": "energy", "case": case, "name": name, "rank": rank, "seed": seed}
                record(key, kept, tasks, METHODS[name], adapters, rank, seed)


def _real(
    parts: list[str],
    cases: list[str],
    chosen: dict[str, Method],
    seeds: int,
    rank: int,
    log: RunLog,
    say: Callable[[str], None],
    record: Callable[..., None],
) -> None:
    """What needs the trained adapters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = lm.fetch_smollm2(say=say)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tasks = [make_task(name) for name in TASKS]
    training = Training()

    def load() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    evaluator = Evaluator(load(), tokenizer, tasks)
    for case in cases:
        for seed in range(seeds):
            adapters, facts = adapters_of(case, seed, tasks, training, load, tokenizer, folder.name, say)
            key = {"case": case, "seed": seed}
            if "energy" in parts:
                for name in (name for name in ENERGY_METHODS if name in chosen):
                    its = key | {"part": "energy", "name": name, "rank": rank}
                    record(its, kept, tasks, METHODS[name], adapters, rank, seed)
            if "adapters" not in parts:
                continue
            alone = key | {"part": "adapters", "name": "own", "rank": training.rank}
            record(alone, evaluator.own, adapters, facts)
            own = log.get(**alone)
            for name, method in chosen.items():
                if rank != training.rank and method.keeps_rank:
                    continue
                its = key | {"part": "adapters", "name": name, "rank": rank}
                record(its, measure_merge, evaluator, method, adapters, own, rank, seed)
    if "adapters" in parts:
        for name, shown in (("base", 0), (f"base, {SHOWN} examples shown", SHOWN)):
            record({"part": "adapters", "case": "none", "name": name, "rank": 0, "seed": 0}, evaluator.base, shown)


if __name__ == "__main__":
    typer.run(main)
