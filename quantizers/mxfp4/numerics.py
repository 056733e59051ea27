"""MXFP4 arithmetic: E2M1 elements, E8M0 block scales, macro-block factors and the NVFP4 yardstick.

Pure functions on tensors; nothing here knows of layers, models or files. All arithmetic is float32 whatever the input
dtype, and block exponents are taken out before anything is multiplied, so that neither values next to the float32
maximum nor subnormal blocks overflow or underflow on the way.

Notation. A tensor ``x [..., K]`` is cut along its last axis into blocks of ``block_size`` values and macro blocks of
``macro_block_size`` values (the last macro block of a row may be shorter). A block holds a byte ``b`` for the scale
``2**(b - 127)``, a macro block a byte ``m`` for the factor ``f = 1 + m / 256`` by which its values were multiplied
before they were rounded, so a value reads back as ``grid * 2**(b - 127) / f``.

Sources: OCP Microscaling Formats 1.0 for E2M1 and E8M0; arXiv 2603.08713 for overflow-aware scaling (``"oas"``) and
macro-block scaling; the weighted search and the exponent search are ours.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "SCALE_RULES",
    "MXFP4Tensor",
    "block_exponent",
    "block_scales",
    "dequantize",
    "dequantize_packed",
    "e2m1_codes",
    "e2m1_round",
    "fake_quantize",
    "macro_factor",
    "nvfp4_fake_quantize",
    "pack",
    "quantize",
    "unpack",
]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
SCALE_RULES = ("ocp", "ceil", "oas", "even", "mse")
BLOCK_SIZES = (16, 32)
MACRO_BLOCK_SIZES = (32, 64, 128)
WEIGHT_SEARCHES = ("static", "dynamic", "weighted")

_NAN_BYTE = 255
_MIN_EXPONENT, _MAX_EXPONENT = -126, 127  # byte 0 (2**-127) is subnormal in float32 and flushed by some devices
_CHUNK_ELEMENTS = 2**20  # rows are quantised in chunks of about this many values, so temporaries stay in cache


class MXFP4Tensor(NamedTuple):
    """A quantised tensor whose last axis held ``K`` values.

    Attributes:
        codes: uint8 ``[..., K]``, one E2M1 code a value (bit 3 is the sign); see `pack` for two codes a byte.
        scales: uint8 ``[..., K / block_size]``, ``2**(byte - 127)``; 255 means NaN.
        macro: uint8 ``[..., ceil(K / macro_block_size)]``, ``f = 1 + byte / 256``, or None without macro blocks.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    macro: torch.Tensor | None


# ---------------------------------------------------------------------------------------------------------------------
# E2M1
# ---------------------------------------------------------------------------------------------------------------------


def _round_to_grid(v: torch.Tensor) -> torch.Tensor:
    """`e2m1_round` of float32 values without the sign of zero (one pass less in the searches)."""
    # 2**floor(log2|v|), at least 1, is twice the spacing of the grid around v. Adding and subtracting 1.5 * 2**23
    # spacings makes the float32 adder itself round to a multiple of the spacing, ties to even.
    magic = (v.view(torch.int32) & 0x7F800000).clamp_(min=0x3F800000).view(torch.float32).mul_(1.5 * 2.0**22)
    return v.add(magic).sub_(magic).clamp_(-E2M1_MAX, E2M1_MAX)


def e2m1_round(v: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E2M1 value (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), ties to the even code.

    Values beyond 6 saturate; the sign of zero is kept; NaN stays NaN.

    Args:
        v: any float dtype and shape.

    Returns:
        float32, the shape of ``v``.
    """
    v = v.to(torch.float32).contiguous()
    return torch.copysign(_round_to_grid(v), v)


def _codes_of_grid_values(q: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    magnitude = q.abs()
    # The code is a concave piecewise linear function of the value: 2q up to 2, q + 2 up to 4, q / 2 + 4 up to 6.
    code = torch.minimum(torch.minimum(2 * magnitude, magnitude + 2), magnitude / 2 + 4).to(torch.uint8)
    return code | (negative.to(torch.uint8) << 3)


def e2m1_codes(v: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0..15 of the values nearest to ``v`` (see `e2m1_round`); uint8, the shape of ``v``."""
    q = e2m1_round(v)
    return _codes_of_grid_values(q, torch.signbit(q))


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the even index in the low nibble: uint8 ``[..., K]`` to uint8 ``[..., K / 2]``.

    Raises:
        ValueError: if K is odd or the dtype is not uint8.
    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise ValueError(f"`codes` must be uint8 with an even last axis, got {codes.dtype} {tuple(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack`: uint8 ``[..., K / 2]`` to uint8 codes ``[..., K]``."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"`packed` must be uint8, got {packed.dtype}")
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


# ---------------------------------------------------------------------------------------------------------------------
# Scales
# ---------------------------------------------------------------------------------------------------------------------


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """``2.0 ** exponent`` in float32, exactly, for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def _multiply_by_power_of_two(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """``x * 2**exponent`` for exponents in [-252, 254]: in two steps, since 2**149 itself is not a float32."""
    half = exponent >> 1
    return x * _power_of_two(half) * _power_of_two(exponent - half)


def _floor_log2(a: torch.Tensor) -> torch.Tensor:
    """``floor(log2 a)`` as int32 by the exponent bits (a float ``log2`` is wrong next to powers of two); 0 for 0."""
    return torch.where(a > 0, torch.frexp(a).exponent - 1, 0)


def _rule_offset(mantissa: torch.Tensor, rule: str) -> torch.Tensor:
    """The rule's exponent for values in [1, 2), as an int32 tensor of -2s and -1s."""
    if rule == "ocp":
        above = torch.zeros_like(mantissa, dtype=torch.bool)
    elif rule == "oas":
        above = mantissa > 1.75
    elif rule == "even":
        above = mantissa >= 1.75
    else:  # ceil, and the start of mse
        above = mantissa > 1.5
    return above.to(torch.int32) - 2


def _check_rule(rule: str) -> None:
    if rule not in SCALE_RULES:
        raise ValueError(f"`scale_rule` must be one of {', '.join(SCALE_RULES)}; got {rule!r}")


def block_exponent(amax: torch.Tensor, rule: str) -> torch.Tensor:
    """Exponent ``e`` of a block's scale ``2**e`` from its largest magnitude ``a``.

    With ``E = floor(log2 a)``: ``"ocp"`` is E - 2, so ``a / 2**e`` lies in [4, 8) and up to a quarter of the maximum
    is clipped; ``"ceil"`` the smallest e with ``a <= 6 * 2**e``; ``"oas"`` (arXiv 2603.08713) the smallest with
    ``a <= 7 * 2**e``, which puts ``a / 2**e`` in (3.5, 7]; ``"even"`` rounds the maximum to one mantissa bit first,
    [3.5, 7). ``"mse"`` needs the whole block and is refused here: `quantize` searches it.

    Args:
        amax: non-negative, any float dtype and shape.
        rule: one of ``SCALE_RULES`` but ``"mse"``.

    Returns:
        int32 in [-126, 127], the shape of ``amax``; 0 where ``amax`` is 0.
    """
    _check_rule(rule)
    if rule == "mse":
        raise ValueError("`rule='mse'` has no closed form: use quantize(..., scale_rule='mse')")
    amax = amax.to(torch.float32)
    exponent = _floor_log2(amax)
    mantissa = _multiply_by_power_of_two(amax, -exponent)
    exponent = (exponent + _rule_offset(mantissa, rule)).clamp_(_MIN_EXPONENT, _MAX_EXPONENT)
    return torch.where(amax > 0, exponent, 0)


def macro_factor(amax: torch.Tensor) -> torch.Tensor:
    """Static macro-block byte: the top eight mantissa bits, truncated, of ``6 / amax`` (arXiv 2603.08713).

    ``amax * (1 + m / 256)`` is then ``6 * 2**-k * (1 - eps)`` with ``eps < 1/256``: the macro block's largest value
    meets the grid point 6.

    Args:
        amax: largest magnitude of each macro block, any float dtype and shape.

    Returns:
        uint8, the shape of ``amax``; 0 where ``amax`` is 0 or not finite.
    """
    amax = amax.to(torch.float32)
    usable = torch.isfinite(amax) & (amax > 0)
    amax = torch.where(usable, amax, 1.0)
    # Only the mantissa counts, so divide by the mantissa: 6 / amax itself overflows for subnormal maxima.
    ratio = 6.0 / _multiply_by_power_of_two(amax, -_floor_log2(amax))
    return torch.where(usable, (ratio.view(torch.int32) >> 15) & 0xFF, 0).to(torch.uint8)


def block_scales(
    scales: torch.Tensor, macro: torch.Tensor | None, block_size: int = 32, macro_block_size: int = 128
) -> torch.Tensor:
    """What each block's grid values are multiplied by: ``2**(b - 127) * (256 / (256 + m))`` in float32.

    One definition for the reference and the kernels: the quotient is rounded first, then scaled exactly.

    Args:
        scales: uint8 ``[..., K / block_size]``; 255 gives NaN, 0 gives 2**-127.
        macro: uint8 ``[..., ceil(K / macro_block_size)]`` or None.

    Returns:
        float32 ``[..., K / block_size]``.
    """
    byte = scales.to(torch.int32)
    power = torch.where(byte == 0, 0x00400000, torch.where(byte == _NAN_BYTE, 0x7FC00000, byte << 23))
    power = power.to(torch.int32).view(torch.float32)
    if macro is None:
        return power
    per_macro = macro_block_size // block_size
    reciprocal = 256.0 / (256.0 + macro.to(torch.float32))
    return power * reciprocal.repeat_interleave(per_macro, dim=-1)[..., : power.shape[-1]]


# ---------------------------------------------------------------------------------------------------------------------
# Quantise
# ---------------------------------------------------------------------------------------------------------------------


def check_layout(length: int, block_size: int, macro_block_size: int | None) -> None:
    """Raise ValueError unless ``block_size`` and ``macro_block_size`` are supported and fit rows of ``length``."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"`block_size` must be 16 or 32, got {block_size!r}")
    if macro_block_size is not None and macro_block_size not in MACRO_BLOCK_SIZES:
        raise ValueError(f"`macro_block_size` must be 32, 64, 128 or None, got {macro_block_size!r}")
    if length % block_size:
        raise ValueError(f"the last axis has {length} values, not a multiple of `block_size`={block_size}")


def _exponent_candidates(scaled_amax: torch.Tensor, rule: str, neighbours: bool) -> list[torch.Tensor]:
    """Exponents to try, relative to the block's own and best guess first, for normalised maxima in [1, 4)."""
    top = (scaled_amax >= 2).to(torch.int32)
    base = top + _rule_offset(torch.where(scaled_amax >= 2, scaled_amax / 2, scaled_amax), rule)
    if rule == "mse":
        return [base, base - 1, base - 2]
    return [base, base + 1, base - 1] if neighbours else [base]


class _Blocks(NamedTuple):
    """Rows cut into macro blocks and blocks, exponents taken out: ``x = values * 2**exponent``."""

    values: torch.Tensor  # float32 [R, T, B, block], |values| < 2
    amax: torch.Tensor  # float32 [R, T, B, 1], in [1, 2), or 0
    exponent: torch.Tensor  # int32 [R, T, B, 1]
    finite: torch.Tensor  # bool [R, T, B, 1]


def _cut(x: torch.Tensor, block_size: int, macro_block_size: int | None) -> _Blocks:
    span = macro_block_size or block_size
    x = x.to(torch.float32)
    x = F.pad(x, (0, -x.shape[-1] % span))
    x = x.view(x.shape[0], x.shape[1] // span, span // block_size, block_size)
    amax = x.abs().amax(dim=-1, keepdim=True)
    finite = torch.isfinite(amax)
    x = torch.where(finite, x, 0.0)
    amax = torch.where(finite, amax, 0.0)
    exponent = _floor_log2(amax)
    return _Blocks(
        _multiply_by_power_of_two(x, -exponent), _multiply_by_power_of_two(amax, -exponent), exponent, finite
    )


def _static_macro(blocks: _Blocks) -> torch.Tensor:
    """uint8 [R, T, 1, 1]: `macro_factor` of the largest block, 0 where any block is not finite."""
    exponent = torch.where(blocks.amax > 0, blocks.exponent, -(2**20))
    largest = exponent.amax(dim=2, keepdim=True)
    mantissa = torch.where(exponent == largest, blocks.amax, 0.0).amax(dim=2, keepdim=True)
    return torch.where(blocks.finite.all(dim=2, keepdim=True), macro_factor(mantissa), 0).to(torch.uint8)


def _relative_exponent(blocks: _Blocks, offset: torch.Tensor) -> torch.Tensor:
    """``offset`` moved so that ``exponent + offset`` stays a scale that a byte can hold."""
    return (blocks.exponent + offset).clamp_(_MIN_EXPONENT, _MAX_EXPONENT) - blocks.exponent


def _squared_error(
    blocks: _Blocks, factor: torch.Tensor, offset: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """(Weighted) squared error of each block in units of its own exponent, float32 [R, T, B, 1]."""
    grid = _round_to_grid(blocks.values * (factor * _power_of_two(-offset)))
    error = grid.mul_(_power_of_two(offset) / factor).sub_(blocks.values).square_()
    return (error if weights is None else error.mul_(weights)).sum(dim=-1, keepdim=True)


def _choose(
    blocks: _Blocks,
    rule: str,
    has_macro: bool,
    search: str,
    search_slots: int,
    search_exponents: bool,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The macro bytes (uint8 [R, T, 1, 1] or None) and relative exponents (int32 [R, T, B, 1])."""
    if not has_macro:
        candidates_of_macro = [None]
    elif search == "static":
        candidates_of_macro = [_static_macro(blocks)]
    else:
        shape = (*blocks.values.shape[:2], 1, 1)
        step = 256 // search_slots
        candidates_of_macro = [
            torch.full(shape, step * j, dtype=torch.uint8, device=blocks.values.device) for j in range(search_slots)
        ]
    searching = len(candidates_of_macro) > 1 or search_exponents or rule == "mse"
    largest = blocks.exponent.masked_fill(blocks.amax == 0, -(2**20)).amax(dim=2, keepdim=True)
    # Blocks of one macro block are compared in units of its largest exponent; far smaller ones count as nothing.
    unit = torch.ldexp(
        torch.ones_like(largest, dtype=torch.float64).expand_as(blocks.exponent), 2 * (blocks.exponent - largest)
    )
    best_error = best_macro = best_offset = None
    for macro in candidates_of_macro:
        factor = 1.0 if macro is None else 1.0 + macro.to(torch.float32) / 256
        offset = block_error = None
        for candidate in _exponent_candidates(blocks.amax * factor, rule, search_exponents):
            candidate = _relative_exponent(blocks, candidate)
            if not searching:
                return macro, candidate
            error = _squared_error(blocks, factor, candidate, weights)
            if offset is None:
                offset, block_error = candidate, error
            else:
                better = error < block_error
                offset, block_error = torch.where(better, candidate, offset), torch.where(better, error, block_error)
        error = (block_error.to(torch.float64) * unit).sum(dim=2, keepdim=True)
        if best_error is None:
            best_error, best_macro, best_offset = error, macro, offset
        else:
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_macro = torch.where(better, macro, best_macro)
            best_offset = torch.where(better, offset, best_offset)
    return best_macro, best_offset


def _quantize_rows(x: torch.Tensor, block_size, macro_block_size, rule, search, slots, search_exponents, weights):
    """Grid values [R, K'], signs [R, K'] (K' padded to macro blocks), scale bytes [R, ...] and macro bytes."""
    blocks = _cut(x, block_size, macro_block_size)
    macro, offset = _choose(blocks, rule, macro_block_size is not None, search, slots, search_exponents, weights)
    scaled = blocks.values if macro is None else blocks.values * (1.0 + macro.to(torch.float32) / 256)
    scaled = scaled * _power_of_two(-offset)
    byte = torch.where(blocks.amax > 0, blocks.exponent + offset + 127, 127)
    byte = torch.where(blocks.finite, byte, _NAN_BYTE).to(torch.uint8)
    negative = torch.signbit(scaled) & (blocks.amax > 0)
    return (
        _round_to_grid(scaled).flatten(1),
        negative.flatten(1),
        byte.flatten(1),
        None if macro is None else macro.flatten(1),
    )


def _prepare(x, block_size, macro_block_size, scale_rule, search, search_slots, channel_weights):
    _check_rule(scale_rule)
    if not x.is_floating_point():
        raise ValueError(f"`x` must be a float tensor, got {x.dtype}")
    check_layout(x.shape[-1], block_size, macro_block_size)
    if search not in WEIGHT_SEARCHES:
        raise ValueError(f"`search` must be one of {', '.join(WEIGHT_SEARCHES)}; got {search!r}")
    if search_slots < 1 or 256 % search_slots:
        raise ValueError(f"`search_slots` must divide 256, got {search_slots!r}")
    if (search == "weighted") != (channel_weights is not None):
        raise ValueError("`channel_weights` goes with search='weighted', and that search needs it")
    if channel_weights is None:
        return None
    if channel_weights.shape != x.shape[-1:]:
        raise ValueError(
            f"`channel_weights` must have one value for each of {x.shape[-1]} inputs, "
            f"got shape {tuple(channel_weights.shape)}"
        )
    weights = channel_weights.to(device=x.device, dtype=torch.float32)
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise ValueError("`channel_weights` must be finite and not negative")
    peak = weights.max()
    # Relative to the largest: a constant weight becomes exactly one, and leaves the bytes as without weights.
    weights = torch.ones_like(weights) if peak == 0 else weights / peak
    span = macro_block_size or block_size
    return F.pad(weights, (0, -len(weights) % span)).view(-1, span // block_size, block_size)


def quantize(
    x: torch.Tensor,
    *,
    block_size: int = 32,
    scale_rule: str = "oas",
    macro_block_size: int | None = 128,
    search: str = "static",
    search_slots: int = 16,
    search_exponents: bool = False,
    channel_weights: torch.Tensor | None = None,
) -> MXFP4Tensor:
    """Quantise along the last axis.

    Args:
        x: any float dtype, ``[..., K]`` with K a multiple of ``block_size``; need not be contiguous.
        block_size: 32 (the OCP standard) or 16.
        scale_rule: how a block's exponent follows from its maximum, see `block_exponent`; ``"mse"`` takes, of the
            ``"ceil"`` exponent and the two below it, the one with the least squared error (the larger on ties).
        macro_block_size: 128, 64, 32, or None for plain MX blocks.
        search: how a macro block's factor is found. ``"static"``: from its maximum, see `macro_factor`.
            ``"dynamic"``: the least squared error over ``1 + j / search_slots`` (the smallest on ties; j = 0 is "no
            macro block", so it is never worse than without). ``"weighted"``: the same, each input's squared error
            weighted by ``channel_weights``.
        search_slots: number of factors tried by the two searches; divides 256.
        search_exponents: let each block also try the exponents next to the rule's, for every factor.
        channel_weights: non-negative ``[K]``, for example the mean square of each input of a linear layer.

    Returns:
        MXFP4Tensor. A block that holds a NaN or an infinity gets scale byte 255 and codes 0.

    Raises:
        ValueError: for an unknown rule, a size that does not fit, or weights that do not match.
    """
    weights = _prepare(x, block_size, macro_block_size, scale_rule, search, search_slots, channel_weights)
    lead, length = x.shape[:-1], x.shape[-1]
    rows = x.reshape(-1, length)
    macro_length = None if macro_block_size is None else -(-length // macro_block_size)
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty((len(rows), length // block_size), dtype=torch.uint8, device=x.device)
    macro = (
        None if macro_length is None else torch.empty((len(rows), macro_length), dtype=torch.uint8, device=x.device)
    )
    step = max(1, _CHUNK_ELEMENTS // max(length, 1))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        grid, negative, byte, macro_byte = _quantize_rows(
            rows[part], block_size, macro_block_size, scale_rule, search, search_slots, search_exponents, weights
        )
        codes[part] = _codes_of_grid_values(grid, negative)[:, :length]
        scales[part] = byte[:, : scales.shape[1]]
        if macro is not None:
            macro[part] = macro_byte
    return MXFP4Tensor(
        codes.view(*lead, length),
        scales.view(*lead, scales.shape[1]),
        None if macro is None else macro.view(*lead, macro_length),
    )


def fake_quantize(
    x: torch.Tensor,
    *,
    block_size: int = 32,
    scale_rule: str = "oas",
    macro_block_size: int | None = 128,
    search: str = "static",
    search_slots: int = 16,
    search_exponents: bool = False,
    channel_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """``dequantize(quantize(x))`` in the dtype of ``x``, without forming the codes. Arguments as for `quantize`."""
    weights = _prepare(x, block_size, macro_block_size, scale_rule, search, search_slots, channel_weights)
    lead, length = x.shape[:-1], x.shape[-1]
    grid, _, byte, macro = _quantize_rows(
        x.reshape(-1, length),
        block_size,
        macro_block_size,
        scale_rule,
        search,
        search_slots,
        search_exponents,
        weights,
    )
    byte = byte[:, : length // block_size]
    values = _apply_scales(grid[:, :length], byte, macro, block_size, macro_block_size, x.dtype, saturate=True)
    return values.view(*lead, length)


# ---------------------------------------------------------------------------------------------------------------------
# Dequantise
# ---------------------------------------------------------------------------------------------------------------------


def _apply_scales(grid, scales, macro, block_size, macro_block_size, dtype, saturate) -> torch.Tensor:
    scale = block_scales(scales, macro, block_size, macro_block_size)
    values = (grid.reshape(*scale.shape, block_size) * scale.unsqueeze(-1)).flatten(-2)
    if saturate:  # 4 * 2**126 / f can pass the float32 maximum where the value it stands for did not
        limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        values = values.clamp_(-limit, limit)
    return values.to(dtype)


def dequantize(
    tensor: MXFP4Tensor, *, block_size: int = 32, macro_block_size: int = 128, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values of a quantised tensor: ``grid * block_scales(...)`` in float32, then rounded to ``dtype``.

    Saturates at the largest finite value of ``dtype``; blocks with scale byte 255 are NaN.
    """
    table = torch.tensor(E2M1_VALUES, device=tensor.codes.device)
    grid = torch.cat((table, -table))[tensor.codes.to(torch.int32)]
    return _apply_scales(grid, tensor.scales, tensor.macro, block_size, macro_block_size, dtype, saturate=True)


def dequantize_packed(
    packed: torch.Tensor,
    scales: torch.Tensor,
    macro: torch.Tensor | None = None,
    *,
    block_size: int = 32,
    macro_block_size: int = 128,
    dtype: torch.dtype = torch.float32,
    saturate: bool = True,
) -> torch.Tensor:
    """`dequantize` from two codes a byte, ``[..., K / 2]`` to ``[..., K]``, by a table of the 256 bytes' pairs."""
    values = torch.tensor(E2M1_VALUES, device=packed.device)
    values = torch.cat((values, -values))
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    grid = F.embedding(packed.to(torch.int32), pairs).flatten(-2)
    return _apply_scales(grid, scales, macro, block_size, macro_block_size, dtype, saturate)


# ---------------------------------------------------------------------------------------------------------------------
# NVFP4, for comparison
# ---------------------------------------------------------------------------------------------------------------------


def nvfp4_fake_quantize(x: torch.Tensor) -> torch.Tensor:
    """Round ``x`` to NVFP4 and back: E2M1 in blocks of 16 with an E4M3 scale each and one float32 scale a tensor.

    ``g = amax(x) / (6 * 448)``, ``s = E4M3(clamp(amax(block) / (6 g), 2**-9, 448))``, ``x^ = E2M1(x / (s g)) s g``.

    Args:
        x: any float dtype, ``[..., K]`` with K a multiple of 16.

    Returns:
        The dtype and shape of ``x``.
    """
    check_layout(x.shape[-1], 16, None)
    blocks = x.to(torch.float32).reshape(-1, 16)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    tensor_scale = amax.max() / (E2M1_MAX * 448.0)
    if tensor_scale == 0:
        return x.clone()
    scale = (amax / (E2M1_MAX * tensor_scale)).clamp_(2.0**-9, 448.0).to(torch.float8_e4m3fn).to(torch.float32)
    scale = scale * tensor_scale
    return (e2m1_round(blocks / scale) * scale).view(x.shape).to(x.dtype)
