"""The decisive figure: adapters for four tasks merged into one, and how much of each one's accuracy is left."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import nn

from hf_ext.benchmarks.ctm.methods import Factors, Method, kept_energy, merge, norm, read_adapter
from hf_ext.benchmarks.ctm.tasks import Task
from hf_ext.benchmarks.ctm.training import Training, accuracy, adapter_folder, train_adapter

__all__ = [
    "DENSITIES",
    "SCALES",
    "Evaluator",
    "adapters_of",
    "init_seed",
    "kept",
    "measure_merge",
    "normalised",
    "tune",
]

SCALES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
DENSITIES = (0.25, 0.5, 0.75)


def init_seed(case: str, seed: int, place: int) -> int:
    """Seed of an adapter's first A: that of the study in the case "common", another for every task in "own".

    Raises:
        ValueError: An unknown case.
    """
    if case not in ("common", "own"):
        raise ValueError(f"case {case!r} is unknown; known: common, own")
    return seed if case == "common" else 100 + 10 * seed + place


def adapters_of(
    case: str,
    seed: int,
    tasks: Sequence[Task],
    training: Training,
    load: Callable[[], nn.Module],
    tokenizer: Any,
    model_name: str,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[list[Factors], list[dict[str, Any]]]:
    """The adapters of a study, trained if they are not in the cache, and the facts of their training."""
    adapters, facts = [], []
    for place, task in enumerate(tasks):
        first = init_seed(case, seed, place)
        folder = adapter_folder(training, task, seed, first, model_name)
        if not folder.exists():
            say(f"training the adapter for {task.name}, seed {seed}, {case} start")
        facts.append(train_adapter(load, tokenizer, task, training, seed, first, folder))
        adapters.append(read_adapter(folder))
    return adapters, facts


@dataclass
class Evaluator:
    """Accuracies of the base model with an update, which is added to its weights for as long as it is measured.

    Attributes:
        model: The base model, float32.
        tokenizer: Its tokenizer.
        tasks: What is measured.
    """

    model: nn.Module
    tokenizer: Any
    tasks: Sequence[Task]

    def measure(self, update: Factors | None, scales: Sequence[float], part: str) -> list[dict[str, float]]:
        """Task -> accuracy on `part` ("validation" or "test"), for each factor on the update; None is the base."""
        deltas = {layer: b @ a for layer, (a, b) in (update or {}).items()}
        weights = {layer: self.model.get_submodule(layer).weight for layer in deltas}
        before = {layer: weight.detach().clone() for layer, weight in weights.items()}
        found = []
        try:
            for scale in scales:
                with torch.no_grad():
                    for layer, weight in weights.items():
                        torch.add(before[layer], deltas[layer], alpha=scale, out=weight)
                found.append(
                    {task.name: accuracy(self.model, self.tokenizer, getattr(task, part)) for task in self.tasks}
                )
        finally:
            with torch.no_grad():
                for layer, weight in weights.items():
                    weight.copy_(before[layer])
        return found

    def base(self, shown: int) -> dict[str, Any]:
        """A row: the base model on the test, with the first `shown` training examples before each prompt."""
        tasks = []
        for task in self.tasks:
            prefix = "".join(example.prompt + example.answer for example in task.training[:shown])
            test = [example._replace(prompt=prefix + example.prompt) for example in task.test]
            tasks.append(Task(task.name, [], [], test))
        return {"test": Evaluator(self.model, self.tokenizer, tasks).measure(None, [1.0], "test")[0]}

    def own(self, adapters: Sequence[Factors], facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A row: task -> accuracy of the adapter that was trained for it, on validation and test."""
        row: dict[str, Any] = {"validation": {}, "test": {}, "training": list(facts)}
        for task, adapter in zip(self.tasks, adapters, strict=True):
            alone = Evaluator(self.model, self.tokenizer, [task])
            for part in ("validation", "test"):
                row[part] |= alone.measure(adapter, [1.0], part)[0]
        return row


def normalised(accuracies: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
    """Task -> accuracy of the merge as a share of that of the task's own adapter.

    Raises:
        ValueError: An adapter that gets nothing right has no share.
    """
    if useless := [task for task, value in own.items() if value == 0]:
        raise ValueError(f"the adapters of {', '.join(useless)} get nothing right on their own task")
    return {task: value / own[task] for task, value in accuracies.items()}


def tune(
    score: Callable[[float, Sequence[float]], list[float]], thins: bool
) -> tuple[float, float, list[tuple[float, float, float]]]:
    """The scale and density with the best score, of one small grid that is the same for every method.

    All scales at density 0.5, and beyond an end of the grid for as long as that is better (peft's `linear`, whose
    factors grow with the number of adapters, needs less than the least); then the other densities, where they matter,
    at the best scale. Of equal scores the one with the scale closer to 1 is taken.

    Args:
        score: Scores at a density and several scales.
        thins: Whether the density matters.

    Returns:
        The scale, the density, and all that was tried: (scale, density, score).
    """

    def rank(entry: tuple[float, float, float]) -> tuple[float, float]:
        return entry[2], -abs(math.log(entry[0]))

    tried = [(scale, 0.5, value) for scale, value in zip(SCALES, score(0.5, SCALES), strict=True)]
    for end, step in ((SCALES[0], 0.5), (SCALES[-1], 1.5)):
        while max(tried, key=rank)[0] == end:
            end *= step
            tried.append((end, 0.5, score(0.5, [end])[0]))
    if thins:
        scale = max(tried, key=rank)[0]
        tried += [(scale, density, score(density, [scale])[0]) for density in DENSITIES if density != 0.5]
    best = max(tried, key=rank)
    return best[0], best[1], tried


def measure_merge(
    evaluator: Evaluator,
    method: Method,
    adapters: Sequence[Factors],
    own: Mapping[str, Mapping[str, float]],
    rank: int,
    seed: int,
) -> dict[str, Any]:
    """A row: what validation chose, the accuracies on the test, and the energy kept.

    Args:
        own: "validation" and "test" -> task -> the adapters' own accuracies.
    """
    made: dict[float, Factors] = {}

    def merged(density: float) -> Factors:
        if density not in made:
            made[density] = merge(method, adapters, rank, density, seed)
        return made[density]

    def score(density: float, scales: Sequence[float]) -> list[float]:
        found = evaluator.measure(merged(density), scales, "validation")
        return [mean(normalised(accuracies, own["validation"]).values()) for accuracies in found]

    scale, density, tried = tune(score, method.thins)
    (test,) = evaluator.measure(merged(density), [scale], "test")
    return {
        "scale": scale,
        "density": density if method.thins else None,
        "tried": tried,
        "test": test,
        "own": dict(own["test"]),
        "normalised": normalised(test, own["test"]),
        "kept": _summary(evaluator.tasks, adapters, merged(density)),
    }


def kept(tasks: Sequence[Task], method: Method, adapters: Sequence[Factors], rank: int, seed: int) -> dict[str, Any]:
    """A row: the energy that a merge (at density 0.5) keeps of each adapter."""
    return {"kept": _summary(tasks, adapters, merge(method, adapters, rank, 0.5, seed))}


def _summary(tasks: Sequence[Task], adapters: Sequence[Factors], merged: Factors) -> dict[str, dict[str, float]]:
    """Task -> the mean and the least over layers of the energy kept of its adapter, and the adapter's norm."""
    shares = kept_energy(adapters, merged)
    return {
        task.name: {"mean": mean(found), "min": min(found), "norm": norm(adapter)}
        for task, found, adapter in zip(tasks, shares, adapters, strict=True)
    }
