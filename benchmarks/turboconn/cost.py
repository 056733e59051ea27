"""Times of a training step and of a generated token with links over those without, measured in turns."""

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from hf_ext.model_patches.turboconn import TurboConnConfig, patch, unpatch

__all__ = ["paired_ratios", "token_ratio", "training_ratio"]


def paired_ratios(base: Callable[[], Any], other: Callable[[], Any], rounds: int) -> tuple[list[float], list[float]]:
    """Call both in turns, each first in every second round, so that what else the machine does meets both alike.

    Returns:
        Seconds of `base` and the ratio of `other` to it, of each round.
    """
    seconds, ratios = [], []
    base(), other()
    gc.collect()
    for turn in range(rounds):
        took = {}
        for call in (base, other) if turn % 2 == 0 else (other, base):
            start = time.perf_counter()
            call()
            took[call] = time.perf_counter() - start
        seconds.append(took[base])
        ratios.append(took[other] / took[base])
    return seconds, ratios


def _row(seconds: list[float], ratios: list[float]) -> dict[str, Any]:
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    return {
        "ratio": median(ratios),
        "ratio_quartiles": [ordered[quarter], ordered[-1 - quarter]],
        "base_seconds": median(seconds),
        "rounds": len(ratios),
    }


def training_ratio(
    make: Callable[[], torch.nn.Module], rows: int, length: int, settings: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """A training step (forward and backward) with links over the base's.

    Args:
        make: Gives the base; called twice.
        rows: Sequences of a step.
        length: Tokens of each.
        settings: Of `TurboConnConfig`.
        rounds: Pairs of steps.

    Returns:
        `ratio` (the median of pairs), `ratio_quartiles`, `base_seconds`, `rounds`.
    """
    base, other = make().train(), patch(make(), TurboConnConfig(**settings)).train()
    ids = torch.randint(base.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))

    def step(model: torch.nn.Module) -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return _row(*paired_ratios(lambda: step(base), lambda: step(other), rounds))


@torch.inference_mode()
def token_ratio(model: torch.nn.Module, context: int, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """A decoded token with links over one without, both after `context` tokens; one model, its links on and off.

    Returns:
        As `training_ratio`. The model is the base again afterwards.
    """
    model = patch(model.eval(), TurboConnConfig(**settings))
    ids = torch.randint(model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    caches = {}
    for on in (False, True):
        model.set_links(on)
        caches[on] = model(input_ids=ids, use_cache=True, logits_to_keep=1).cache
    token = ids[:, :1]

    def decode(on: bool) -> None:
        model.set_links(on)
        for _ in range(4):
            model(input_ids=token, cache=caches[on], use_cache=True)
        caches[on].crop(-4)

    found = _row(*paired_ratios(lambda: decode(False), lambda: decode(True), rounds))
    model.set_links(True)
    unpatch(model)
    return {**found, "base_seconds": found["base_seconds"] / 4}
