"""Merge rules: several matrices of one shape into one.

A rule sees the coordinates of the adapters in a common basis, in whatever space that is. Every rule here but `tsv` and
`iso` works entry by entry, and all of them give the same merged adapter when the sign of a basis vector is flipped.

Names and order of operations are peft's (`peft.utils.merge_utils`, 0.21): trim, elect signs, weigh, combine. So the
size of a weight does not vote. Three things differ, on purpose:

- a negative weight turns its adapter around before the signs are elected (peft: after), so that weight -1 on an
  adapter is weight 1 on its negative;
- as many entries are kept as `density` says, rounded to nearest and at least one (peft: rounded down, which is none in
  a small matrix);
- an entry whose votes cancel exactly is zero; with `majority_sign_method="frequency"` the total decides first (peft:
  plus wins, which would depend on the sign of a basis vector).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .config import CtMConfig

__all__ = ["RULES", "apply_rule", "dare_linear", "dare_ties", "iso", "linear", "magnitude_prune", "ties", "tsv"]

Matrices = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """What a rule needs beside matrices and weights.

    Attributes:
        config: The options.
        generators: One for each matrix, for the rules that draw.
        rank: Rank to which the result will be cut.
    """

    config: CtMConfig
    generators: Sequence[torch.Generator]
    rank: int


Rule = Callable[[Matrices, Sequence[float], Setting], torch.Tensor]


def apply_rule(
    tensors: Matrices,
    weights: Sequence[float],
    config: CtMConfig,
    layer_name: str = "",
    indices: Sequence[int] | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    """Merge by the rule that the configuration names, times its `scaling_coeff`.

    Args:
        tensors: T matrices of one shape, float.
        weights: T numbers.
        config: names the rule and its options.
        layer_name, indices: name of the layer, and place of each adapter in the user's list (default 0, 1, ...): with
            the seed they fix the random masks.
        rank: rank to which the result will be cut; default the smaller dimension.

    Raises:
        ValueError: a function of the user's own gave something other than a finite matrix of that shape.
    """
    rule = config.combination_type
    if callable(rule):
        merged = rule(list(tensors), list(weights))
        shape = tuple(tensors[0].shape)
        if not isinstance(merged, torch.Tensor) or tuple(merged.shape) != shape or not merged.isfinite().all():
            got = tuple(merged.shape) if isinstance(merged, torch.Tensor) else type(merged).__name__
            raise ValueError(
                f"layer {layer_name!r}: the merge rule {config.rule_name} must give a finite tensor of shape {shape}, "
                f"got {got}"
            )
        merged = merged.to(tensors[0])
    else:
        places = range(len(tensors)) if indices is None else indices
        generators = [mask_generator(config.seed, layer_name, place) for place in places]
        setting = Setting(config, generators, rank or min(tensors[0].shape))
        merged = RULES[rule](tensors, weights, setting)
    return merged * config.scaling_coeff


def mask_generator(seed: int, layer_name: str, index: int) -> torch.Generator:
    """A CPU generator for one adapter in one layer, whatever the device, the order of layers or the other adapters."""
    digest = hashlib.blake2b(f"{seed}\0{layer_name}\0{index}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


# --- the rules -----------------------------------------------------------------------------------------------------


def linear(tensors: Matrices, weights: Sequence[float], setting: Setting) -> torch.Tensor:
    """Task arithmetic: sum_t w_t C_t."""
    # One at a time: a stack of T would be larger than any matrix that need exist.
    merged = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights):
        merged.add_(tensor, alpha=weight)
    return merged


def ties(tensors: Matrices, weights: Sequence[float], setting: Setting) -> torch.Tensor:
    """TIES: keep the largest entries of each, elect a sign per entry, average those that have it."""
    config = setting.config
    return _disjoint_mean([_trim(tensor, config.density) for tensor in tensors], weights, config)


def magnitude_prune(tensors: Matrices, weights: Sequence[float], setting: Setting) -> torch.Tensor:
    """`linear` of the largest entries of each."""
    return linear([_trim(tensor, setting.config.density) for tensor in tensors], weights, setting)


def dare_linear(tensors: Matrices, weights: Sequence[float], setting: Setting) -> torch.Tensor:
    """`linear` of entries that were kept at random and divided by the density."""
    return linear(_drop_all(tensors, setting), weights, setting)


def dare_ties(tensors: Matrices, weights: Sequence[float], setting: Setting) -> torch.Tensor:
    """Entries kept at random and divided by the density; then signs are elected and what agrees is averaged.

    With `config.ties_density` the largest of the kept entries are taken first (the authors' version).
    """
    config = setting.config
    kept = _drop_all(tensors, setting)
    if config.ties_density is not None:
        kept = [_trim(tensor, config.ties_density, int(tensor.count_nonzero())) for tensor in kept]
    return _disjoint_mean(kept, weights, config)


def tsv(tensors: Matrices, weights: Sequence[float], setting: Setting) -> torch.Tensor:
    """Task singular vectors: the leading triplets of each, made orthogonal to those of the others.

    Each adapter gives floor(r / T) triplets of its SVD, at least one, r being the smaller dimension, but none beyond
    its numerical rank. If that makes more than r (T > r), the r largest are taken. The vectors of each side are
    replaced by the nearest orthonormal ones.
    """
    size = min(tensors[0].shape)
    each = max(1, size // len(tensors))
    lefts, values, rights = [], [], []
    for tensor, weight in zip(tensors, weights):
        left, value, right = torch.linalg.svd(tensor, full_matrices=False)
        count = min(each, _numerical_rank(value, tensor))
        lefts.append(left[:, :count])
        values.append(value[:count] * weight)
        rights.append(right[:count].mT)
    left, value, right = torch.cat(lefts, 1), torch.cat(values), torch.cat(rights, 1)
    if len(value) > size:
        largest = value.abs().argsort(descending=True, stable=True)[:size]
        left, value, right = left[:, largest], value[largest], right[:, largest]
    return (_nearest_orthonormal(left) * value) @ _nearest_orthonormal(right).mT


def iso(tensors: Matrices, weights: Sequence[float], setting: Setting) -> torch.Tensor:
    """Iso-C: `linear` with every singular value replaced by their mean, over the numerical rank.

    Of no more values than the rank that the result will have: a cut of a flat spectrum would be a cut at random.
    """
    merged = linear(tensors, weights, setting)
    left, value, right = torch.linalg.svd(merged, full_matrices=False)
    rank = min(setting.rank, _numerical_rank(value, merged))
    return left[:, :rank] @ right[:rank] * (value[:rank].mean() if rank else 0.0)


RULES: dict[str, Rule] = {
    "linear": linear,
    "ties": ties,
    "dare_linear": dare_linear,
    "dare_ties": dare_ties,
    "magnitude_prune": magnitude_prune,
    "tsv": tsv,
    "iso": iso,
}


# --- their parts ---------------------------------------------------------------------------------------------------


def _trim(tensor: torch.Tensor, density: float, count: int | None = None) -> torch.Tensor:
    """Keep the `density` share of largest magnitudes, of `count` entries (default all), at least one; zero others."""
    keep = max(1, round(density * (tensor.numel() if count is None else count)))
    if keep >= tensor.numel():
        return tensor
    flat = tensor.flatten()
    largest = flat.abs().topk(keep).indices
    trimmed = torch.zeros_like(flat)
    trimmed[largest] = flat[largest]
    return trimmed.view_as(tensor)


def _drop_all(tensors: Matrices, setting: Setting) -> list[torch.Tensor]:
    density = setting.config.density
    if density == 1:
        return list(tensors)
    dropped = []
    for tensor, generator in zip(tensors, setting.generators):
        kept = torch.rand(tensor.shape, generator=generator) < density
        dropped.append(tensor * kept.to(tensor.device) / density)
    return dropped


def _disjoint_mean(tensors: Matrices, weights: Sequence[float], config: CtMConfig) -> torch.Tensor:
    """Mean of |w_t| C_t over the adapters whose entry has the elected sign; zero where none has."""
    turned = [tensor if weight > 0 else -tensor for tensor, weight in zip(tensors, weights)]
    elected = _elect_signs(turned, config.majority_sign_method)
    merged, count = torch.zeros_like(elected), torch.zeros_like(elected)
    for tensor, weight in zip(turned, weights):
        agrees = tensor.sign() == elected
        merged += tensor * agrees * abs(weight)
        count += agrees
    return merged / count.clamp(min=1)


def _elect_signs(tensors: Matrices, method: str) -> torch.Tensor:
    """1 or -1 per entry, 0 where none wins."""
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total += tensor
    if method == "frequency":
        votes = torch.zeros_like(total)
        for tensor in tensors:
            votes += tensor.sign()
        total = torch.where(votes == 0, total, votes)
    return total.sign()


def _numerical_rank(values: torch.Tensor, matrix: torch.Tensor) -> int:
    # The updates come from products in float32 even where the coordinates are in float64.
    return int((values > values[0] * max(matrix.shape) * torch.finfo(torch.float32).eps).sum())


def _nearest_orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """The polar factor [n, k] of a tall matrix: orthonormal columns, nearest to the given ones."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right
