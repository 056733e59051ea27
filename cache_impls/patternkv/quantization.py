"""The mathematics of PatternKV: mining, alignment, gates, residual quantization, packing. Pure functions on tensors.

Shapes: B rows, H key/value heads, T tokens, D channels, m patterns. Everything is computed in float32. Source:
PatternKV (arXiv 2510.05176); what is ours is marked [D].
"""

import math
from typing import NamedTuple

import torch

__all__ = [
    "Quantized",
    "assign_nearest",
    "assign_narrowest",
    "dequantize_groups",
    "gate_accepts",
    "gate_threshold",
    "mine_patterns",
    "new_pattern",
    "pack_codes",
    "quantize_groups",
    "unpack_codes",
]

# Quantile of the normal distribution at 95%, the level of the value gate.
Z_95 = 1.6448536269514722
# Distances between tokens and patterns held at once.
_BLOCK_ELEMENTS = 2**22
_HALF_MAX = 65504.0
# Where the fit of scales starts, as parts of a group's range, and how many turns it takes from each.
_FIT_WIDTHS = (1.0, 0.8, 0.6)
_FIT_STEPS = 4


# --- patterns -------------------------------------------------------------------------------------------------------


def mine_patterns(
    x: torch.Tensor, count: int, *, iterations: int = 30, seed: int = 0, tolerance: float = 1e-4
) -> torch.Tensor:
    """Patterns of each head by k-means (Lloyd, squared distance, centroid = mean).

    It starts from distinct tokens drawn without replacement; a cluster without tokens is drawn again from a random
    token; it stops when no centroid moves by more than `tolerance`, from the second iteration on. Rows are
    independent: a row's patterns do not depend on its neighbours.

    Args:
        x: float [B, H, N, D].
        count: Patterns per head; with N < `count` tokens, N.
        iterations: at most.
        seed: of the draws, which are made on the CPU and are the same for every row.
        tolerance: see above.

    Returns:
        float32 [B, H, min(count, N), D].
    """
    x = x.float()
    rows, heads, tokens, channels = x.shape
    count = min(count, tokens)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(heads, tokens, generator=generator).topk(count, dim=-1).indices.to(x.device)
    centers = x.gather(2, drawn[None, :, :, None].expand(rows, -1, -1, channels))
    moving = torch.ones(rows, dtype=torch.bool, device=x.device)
    for step in range(iterations):
        nearest = assign_nearest(x, centers)
        sums = torch.zeros_like(centers).scatter_add_(2, nearest[..., None].expand(-1, -1, -1, channels), x)
        sizes = torch.zeros(rows, heads, count, device=x.device).scatter_add_(2, nearest, torch.ones_like(x[..., 0]))
        # Drawn whether or not they are needed, so that the draws of a row do not depend on the other rows.
        again = torch.randint(tokens, (heads, count), generator=generator).to(x.device)
        fresh = x.gather(2, again[None, :, :, None].expand(rows, -1, -1, channels))
        found = torch.where(sizes[..., None] > 0, sums / sizes.clamp(min=1)[..., None], fresh)
        shift = (found - centers).abs().amax((1, 2, 3))
        centers = torch.where(moving[:, None, None, None], found, centers)
        if step:
            moving = moving & (shift > tolerance)
            if not moving.any():
                break
    return centers


def new_pattern(window: torch.Tensor, kind: str) -> torch.Tensor:
    """The pattern that a window adds, [..., D] from [..., R, D].

    "midrange": (min + max) / 2 per channel, the point with the least worst deviation; "mean" [D].
    """
    window = window.float()
    if kind == "mean":
        return window.mean(-2)
    low, high = window.aminmax(dim=-2)
    return (low + high) / 2


def assign_nearest(x: torch.Tensor, patterns: torch.Tensor) -> torch.Tensor:
    """Index of the pattern with the least squared distance, int64 [..., T] for x [..., T, D]; ties: the lowest."""
    shape = x.shape[:-1]
    x, patterns = (y.float().reshape(-1, *y.shape[-2:]) for y in (x, patterns))
    size = (patterns * patterns).sum(-1)[:, None]
    step = max(1, _BLOCK_ELEMENTS // max(1, size.numel()))
    # |x|^2 is the same for every pattern and is left out.
    parts = [
        torch.baddbmm(size.expand(-1, block.shape[1], -1), block, patterns.transpose(1, 2), alpha=-2).argmin(-1)
        for block in x.split(step, dim=1)
    ]
    return torch.cat(parts, -1).view(shape)


def assign_narrowest(x: torch.Tensor, patterns: torch.Tensor) -> torch.Tensor:
    """Index of the pattern whose residual x - c has the least range max - min; shapes as `assign_nearest`.

    For values with one group per token that range is the one that the quantizer divides.
    """
    x, patterns = x.float(), patterns.float()
    best = torch.full(x.shape[:-1], torch.inf, device=x.device)
    index = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    for j in range(patterns.shape[-2]):
        low, high = (x - patterns[..., j : j + 1, :]).aminmax(dim=-1)
        narrower = high - low < best
        best = torch.where(narrower, high - low, best)
        index = index.masked_fill(narrower, j)
    return index


def gate_threshold(channels: int) -> float:
    """Largest ratio of ranges rho at which a value uses its pattern: `gate_accepts`, solved for rho by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        accepted = 1 - middle**2 >= 2 * Z_95 / math.sqrt(5 * channels) * math.sqrt(1 + middle**4)
        low, high = (middle, high) if accepted else (low, middle)
    return low


def gate_accepts(rho: torch.Tensor, channels: int) -> torch.Tensor:
    """Whether subtracting a pattern lowers the rounding error significantly.

    1 - rho^2 >= 2 z / sqrt(5 D) sqrt(1 + rho^4), rho the range of the residual over the range of the value. A uniform
    error of step s has mean square s^2 / 12 with variance s^4 / 180; over D channels the saving s^2 (1 - rho^2) / 12
    has standard error s^2 sqrt(1 + rho^4) / sqrt(180 D), and z = 1.645 asks for 95%.
    """
    return 1 - rho.square() >= 2 * Z_95 / math.sqrt(5 * channels) * (1 + rho.square().square()).sqrt()


# --- residuals ------------------------------------------------------------------------------------------------------


class Quantized(NamedTuple):
    """Codes (uint8, shape of the input) and per group scale and zero (float16, or float32 where float16 overflows)."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


def quantize_groups(y: torch.Tensor, bits: int, *, group: int, axis: int, fit: str = "minmax") -> Quantized:
    """Round to nearest in groups along an axis: code = round((y - zero) / scale), clamped to 0 .. 2^bits - 1.

    zero = min y and scale = (max y - min y) / (2^bits - 1), both rounded to float16 before codes are computed, so that
    reader and writer agree. A constant group has scale 0 and codes 0.

    Args:
        y: float [..., T, D].
        bits: 2, 4 or 8.
        group: Members of a group; divides the axis.
        axis: -2 groups tokens per channel (keys), -1 groups channels per token (values).
        fit: "minmax", or "mse" [D]: scale and zero by least squares on the codes, in turns, from the range and from
            two narrower ones; the least squared error of all wins, so it is never above that of "minmax".

    Returns:
        codes uint8 [..., T, D]; scale and zero [..., T / group, D] for axis -2, [..., T, D / group] for axis -1.
    """
    y = y.float()
    grouped = y.unflatten(axis, (-1, group))
    along = -2 if axis == -2 else -1
    levels = 2**bits - 1
    low, high = grouped.aminmax(dim=along, keepdim=True)
    # By group, so that no group depends on another that float16 cannot hold.
    fits = (low.abs() <= _HALF_MAX) & (high.abs() <= _HALF_MAX)
    dtype = torch.float16 if fits.all() else torch.float32

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return torch.where(fits, x.half().float(), x)

    def encode(scale: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale, zero = rounded(scale), rounded(zero)
        code = ((grouped - zero) / scale).round().clamp(0, levels)
        return torch.where(scale > 0, code, 0), scale, zero

    scale, zero = (high - low) / levels, low
    code, scale, zero = encode(scale, zero)
    if fit == "mse":
        kept = (code, scale, zero)
        least = _squared_error(kept, grouped, along)
        for width in _FIT_WIDTHS:
            middle, half = (low + high) / 2, (high - low) * (width / 2)
            trial = encode(2 * half / levels, middle - half)
            for _ in range(_FIT_STEPS):
                trial = encode(*_regress(trial[0], grouped, along))
                error = _squared_error(trial, grouped, along)
                better = error < least
                least = torch.where(better, error, least)
                kept = tuple(torch.where(better, new, old) for new, old in zip(trial, kept))
        code, scale, zero = kept
    start = -3 if axis == -2 else -2
    return Quantized(
        code.to(torch.uint8).flatten(start, start + 1), scale.squeeze(along).to(dtype), zero.squeeze(along).to(dtype)
    )


def _squared_error(trial: tuple[torch.Tensor, ...], y: torch.Tensor, along: int) -> torch.Tensor:
    code, scale, zero = trial
    return (code * scale + zero - y).square().sum(along, keepdim=True)


def _regress(code: torch.Tensor, y: torch.Tensor, along: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slope and intercept of y on code by least squares; where all codes are equal, slope 0 and the mean."""
    mean_code, mean = code.mean(along, keepdim=True), y.mean(along, keepdim=True)
    spread = (code - mean_code).square().sum(along, keepdim=True)
    slope = ((code - mean_code) * (y - mean)).sum(along, keepdim=True) / spread.clamp(min=1e-12)
    slope = torch.where(spread > 0, slope, 0).clamp(min=0)
    return slope, mean - slope * mean_code


def dequantize_groups(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *, axis: int) -> torch.Tensor:
    """code * scale + zero in float32, [..., T, D]; the group's size follows from the shapes."""
    group = codes.shape[axis] // scale.shape[axis]
    grouped = codes.to(torch.float32, copy=True).unflatten(axis, (-1, group))
    along = -2 if axis == -2 else -1
    y = grouped.mul_(scale.float().unsqueeze(along)).add_(zero.float().unsqueeze(along))
    return y.flatten(-3, -2) if axis == -2 else y.flatten(-2, -1)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Planar bytes [..., D * bits / 8] of codes [..., D]: with p = 8 / bits, byte i has channels i, i + D/p, ...

    Low bits first. So every unpacked part is contiguous in D. Example: 2 bits, codes 1, 2, 3, 0 give 0x39.
    """
    planes = codes.unflatten(-1, (8 // bits, -1))
    packed = planes[..., 0, :].clone()
    for j in range(1, planes.shape[-2]):
        packed |= planes[..., j, :] << bits * j
    return packed


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [..., D] of what `pack_codes` gave."""
    if bits == 8:
        return packed
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-1)
