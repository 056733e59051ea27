"""Measure CaT beside majority vote, true labels and inference-time aggregation: `hf-ext bench cat`.

A small model that errs at sums, partly always in the same way, is trained without labels (`train`) and merged at
inference (`inference`); a world of statements shows what open-domain rubrics need (`statements`); SmolLM2 judges
(`judge`) and goes through one training with rubrics (`smollm2`). A row that is there already is not measured again.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.cat import open_domain
from hf_ext.benchmarks.cat.sums import NOISES, Recipe, base_model, problems
from hf_ext.benchmarks.report import refresh, results_folder
from hf_ext.runlog import RunLog

__all__ = ["KEY", "KINDS", "main"]

KEY = ("kind", "noise", "method", "seed")
KINDS = ("statements", "inference", "train", "judge", "smollm2")
WORLDS = 20  # seeds of the world of statements


def main(
    kinds: Annotated[str, typer.Option(help=f"Of {', '.join(KINDS)}.")] = ",".join(KINDS),
    noises: Annotated[str, typer.Option(help="How the model errs: systematic, spread.")] = ",".join(NOISES),
    methods: Annotated[str, typer.Option(help="Only methods whose name contains one of these (commas).")] = "",
    seeds: Annotated[int, typer.Option(help="Seeds of each training.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 80,
    base_steps: Annotated[int, typer.Option(help="Steps of the model that is trained before.")] = 900,
    held_out: Annotated[int, typer.Option(help="Held-out sums to measure on.")] = 400,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Data file; rows are appended. [default: benchmarks/cat/data/results.jsonl]")
    ] = None,
) -> None:
    """CaT, TTRL's vote, GRPO with labels and inference-time aggregation on sums; three quarters of an hour.

    Example: `hf-ext bench cat --kinds statements,inference`
    """
    chosen = kinds.split(",")
    if unknown := sorted(set(chosen) - set(KINDS)):
        raise ValueError(f"--kinds {', '.join(unknown)}: known are {', '.join(KINDS)}")
    if unknown := sorted(set(noises.split(",")) - set(NOISES)):
        raise ValueError(f"--noises {', '.join(unknown)}: known are {', '.join(NOISES)}")
    torch.set_num_threads(threads)
    console = Console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    log = RunLog(out or results_folder() / "cat" / "data" / "results.jsonl", key=KEY)
    facts = {"command": "hf-ext bench cat", **lm.environment_facts(("torch", "transformers", "trl", "hf-ext"))}

    def row(kind: str, noise: str, method: str, seed: int, found: dict[str, Any]) -> None:
        log.append({"kind": kind, "noise": noise, "method": method, "seed": seed, **found, **facts})

    if "statements" in chosen:
        _statements(log, row)
    # Seed by seed, so that a run that is stopped early has something of every method.
    for noise in noises.split(","):
        recipe = Recipe(noise=noise, steps=base_steps)
        if "inference" in chosen and not log.done(kind="inference", noise=noise, method="synthesis of 8", seed=0):
            _inference(noise, recipe, held_out, row, say)
    if "train" in chosen:
        for seed in range(seeds):
            for noise in noises.split(","):
                _train(noise, Recipe(noise=noise, steps=base_steps), methods, seed, steps, held_out, log, row, say)
    if "judge" in chosen and not log.done(kind="judge", noise="", method="one at a time", seed=0):
        from hf_ext.benchmarks.cat.judging import throughput

        say("verdicts of SmolLM2 on answers of 512 tokens")
        for found in throughput(lm.fetch_smollm2(say=say)):
            row("judge", "", found["way"], 0, found)
    if "smollm2" in chosen and not log.done(kind="smollm2", noise="", method="CaT, rubric", seed=0):
        from hf_ext.benchmarks.cat.judging import end_to_end

        say("SmolLM2 end to end, and plain GRPO beside it")
        row("smollm2", "", "CaT, rubric", 0, end_to_end(lm.fetch_smollm2(say=say)))
    say(f"rows are in {log.path}")
    refresh(out)


def _statements(log: RunLog, row) -> None:
    for reference in open_domain.REFERENCES:
        if log.done(kind="statements", noise="", method=reference, seed=0):
            continue
        outcomes = [open_domain.simulate(reference, seed) for seed in range(WORLDS)]
        found = {
            name: [getattr(outcome, name) for outcome in outcomes] for name in ("recall", "false_rate", "precision")
        }
        row("statements", "", reference, 0, found)


def _inference(noise: str, recipe: Recipe, held_out: int, row, say) -> None:
    from hf_ext.benchmarks.cat.training import accuracy, aggregate, load

    say(f"{noise}: the untrained model, one sample and eight")
    model, tokenizer = load(base_model(recipe, say))
    pairs = problems(held_out, seed=1, held_out=True)
    row("inference", noise, "one sample", 0, accuracy(model, tokenizer, pairs, seed=0))
    for rule, found in aggregate(model, tokenizer, pairs, seed=0).items():
        row("inference", noise, rule, 0, found)


def _train(noise: str, recipe: Recipe, methods: str, seed: int, steps: int, held_out: int, log: RunLog, row, say):
    from hf_ext.benchmarks.cat.training import LABELS, LONGER, METHODS, VOTE, Budget, train

    # Where errors are only spread, the question is what the vote reaches of the labels' gain.
    names = list(METHODS) if noise == "systematic" else [LABELS, VOTE]
    for name in names:
        wanted = any(part in name for part in methods.split(","))
        if not wanted or log.done(kind="train", noise=noise, method=name, seed=seed):
            continue
        say(f"{noise}, seed {seed}: {name}")
        budget = Budget(steps=2 * steps if name == LONGER else steps, held_out=held_out)
        found = train(base_model(recipe, say), name, seed, budget)
        row("train", noise, name, seed, found)
        shown = f"{found['accuracy']:.3f} ± {found['standard_error']:.3f}"
        say(f"  accuracy {shown}, {found['seconds_a_step']:.2f} s a step")


if __name__ == "__main__":
    typer.run(main)
