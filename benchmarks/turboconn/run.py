"""Measure TurboConn beside its base: accuracy at every length, cost, Jacobi's error: `hf-ext bench turboconn`.

A small Llama is pretrained on text that needs no state, then fine-tuned on tasks of 16 tokens as it is or with links,
on the same data, for the same steps, at the same learning rates, and tested on 128 tokens (`accuracy`).
Ratios of time are measured in turns: training steps on a small Llama (`training`), generated tokens on SmolLM2-135M
(`tokens`). `jacobi` is the error of the parallel passes with random links; with trained ones it is in the rows of
`accuracy`. A row that is there already is not measured again.
"""

import resource
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.report import refresh, results_folder
from hf_ext.benchmarks.turboconn import cost, jacobi, training
from hf_ext.benchmarks.turboconn.tasks import TASKS, batch_of
from hf_ext.runlog import RunLog

__all__ = ["KEY", "main"]

KEY = ("kind", "task", "model", "lr", "seed")
KINDS = ("accuracy", "training", "tokens", "jacobi")
STEPS, ROWS, LENGTH = 300, 32, 16
TEST_LENGTH, TEST_ROWS = 128, 512
RATES = (1e-3, 2e-3)
MODELS = ("base", "base, attention kept", "sparse", "dense")  # the others of training.MODELS by --models
PASSES = [1, 2, 3, 4, 6, 8, 12, 16]
LINK_SIZES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2)
CONTEXT, TOKEN_ROUNDS = 64, 20
TRAINING_LENGTH, TRAINING_ROUNDS, TRAINING_ROWS = 64, 5, (1, 8)
# Of the `training` rows: a base whose links and attention take their share of a step.
TRAINED = training.BASE | {"layers": 8, "hidden": 256}
TRAINING_SETTINGS: dict[str, dict[str, Any]] = {
    "exact, g = 1": {},
    "exact, g = 4": {"group_size": 4},
    "exact, g = 16": {"group_size": 16},
    "jacobi, 2 passes": {"train_mode": "jacobi", "n_iters": 2, "gap_every": 10**9, "gap_tol": 1e9},
    "jacobi, 4 passes": {"train_mode": "jacobi", "n_iters": 4, "gap_every": 10**9, "gap_tol": 1e9},
}
TOKEN_SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, rank 64": {"rank": 64},
    "sparse": {"links": "sparse"},
}


def main(
    kinds: Annotated[str, typer.Option(help="Of accuracy, training, tokens, jacobi.")] = ",".join(KINDS),
    tasks: Annotated[str, typer.Option(help="Tasks, separated by semicolons.")] = ";".join(TASKS),
    models: Annotated[str, typer.Option(help="Models, separated by semicolons.")] = ";".join(MODELS),
    rates: Annotated[str, typer.Option(help="Learning rates.")] = ",".join(f"{rate:g}" for rate in RATES),
    seeds: Annotated[str, typer.Option(help="Seeds of the data.")] = "0,1,2",
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Data file; rows are appended. [default: benchmarks/turboconn/data/results.jsonl]"),
    ] = None,
) -> None:
    """Base, sparse and dense links on tasks that need a state; about an hour on one core.

    Example: `hf-ext bench turboconn --kinds accuracy --tasks "parity;S3" --seeds 0`
    """
    parts = _chosen("--kinds", kinds.split(","), KINDS)
    task_names = _chosen("--tasks", tasks.split(";"), TASKS)
    model_names = _chosen("--models", models.split(";"), training.MODELS)
    try:
        learning_rates = [float(rate) for rate in rates.split(",")]
        seed_numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ValueError(
            f"--rates {rates!r} must be numbers separated by commas, such as 1e-3,2e-3; --seeds {seeds!r} whole ones"
        ) from None
    torch.set_num_threads(threads)
    console = Console()
    log = RunLog(out or results_folder() / "turboconn" / "data" / "results.jsonl", key=KEY)
    facts = {"command": "hf-ext bench turboconn", **lm.environment_facts()}

    def missing(kind: str, name: str, model: str, lr: float | None = None, seed: int = 0) -> dict[str, Any] | None:
        key = {"kind": kind, "task": name, "model": model, "lr": lr, "seed": seed}
        if kind not in parts or log.done(**key):
            return None
        console.print(f"{kind}: {name}, {model}" + (f", {lr:g}, seed {seed}" if lr else ""), soft_wrap=True)
        return key

    for rows in TRAINING_ROWS:
        for name, setting in TRAINING_SETTINGS.items():
            where = f"{TRAINED['layers']} layers, d {TRAINED['hidden']}, {rows} sequence{'s' * (rows > 1)}"
            if key := missing("training", where, name):
                found = cost.training_ratio(_trained, rows, TRAINING_LENGTH, setting, TRAINING_ROUNDS)
                log.append({**key, "tokens": TRAINING_LENGTH, **found, **facts})
    for name, setting in TOKEN_SETTINGS.items():
        if key := missing("tokens", "SmolLM2-135M", name):
            model = training.load(lm.fetch_smollm2(say=console.print))
            log.append({**key, "tokens": CONTEXT, **cost.token_ratio(model, CONTEXT, setting, TOKEN_ROUNDS), **facts})
    for size in LINK_SIZES:
        if key := missing("jacobi", "random links", f"{size:g}"):
            ids = batch_of(TASKS["parity"], ROWS, LENGTH, torch.Generator().manual_seed(0))[0]
            model = jacobi.random_links(training.load(training.pretrained(0, say=console.print)), size, 0)
            log.append({**key, **jacobi.errors(model, ids, PASSES), **facts})
    # All models of a task, seed and rate after one another: a run that is stopped leaves what can be compared.
    for name in task_names:
        for seed in seed_numbers:
            for lr in learning_rates:
                for model in model_names:
                    if key := missing("accuracy", name, model, lr, seed):
                        log.append({**key, **_accuracy(name, model, lr, seed, console), **facts})
    console.print(f"rows are in {log.path}", soft_wrap=True)
    refresh(out)


def _chosen(option: str, names: list[str], known: Any) -> list[str]:
    """Names stripped of spaces, all of them known."""
    names = [name.strip() for name in names]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{option} {unknown[0]!r}: known are {'; '.join(known)}")
    return names


def _trained() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return training.base_model(TRAINED)


def _accuracy(name: str, model_name: str, lr: float, seed: int, console: Console) -> dict[str, Any]:
    """Fine-tune a model on a task and test it; with links also Jacobi's error on what they have become."""
    kind = training.MODELS[model_name]
    folder = training.pretrained(0, say=console.print)
    model, task = training.load(folder, kind), TASKS[name]
    start = resource.getrusage(resource.RUSAGE_SELF)
    found = training.fine_tune(model, task, kind.factor * STEPS, lr, seed, ROWS, LENGTH)
    used = resource.getrusage(resource.RUSAGE_SELF)
    right = training.accuracy(model, task, TEST_LENGTH, TEST_ROWS, seed)
    row = {
        "base": folder.name,
        "steps": kind.factor * STEPS,
        "rows": ROWS,
        "length": LENGTH,
        "accuracy": [round(value, 4) for value in right],
        "losses": [round(sum(part) / len(part), 4) for part in _parts(found["losses"], 30)],
        "largest_norm": max(found["norms"]),
        "median_norm": median(found["norms"]),
        "seconds": round(found["seconds"], 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime - start.ru_utime - start.ru_stime, 2),
    }
    if kind.links is not None:
        ids = batch_of(task, ROWS, LENGTH, torch.Generator().manual_seed(0))[0]
        row["jacobi"] = jacobi.errors(model, ids, PASSES)
    return row


def _parts(values: list[float], number: int) -> Iterator[list[float]]:
    size = max(1, len(values) // number)
    return (values[start : start + size] for start in range(0, len(values), size))


if __name__ == "__main__":
    typer.run(main)
