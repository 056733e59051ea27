"""The operations of ``kernels/mxfp4_gemm`` in PyTorch: same names, same signatures, any device, blocks of 16 or 32.

This is what the Triton kernels are tested against and what runs where they do not.
"""

import torch
import torch.nn.functional as F

from . import numerics

__all__ = ["dequantize", "gemm", "gemm_w4a4", "quantize"]

# A weight with more values than this is dequantised in row tiles, so that a forward pass never holds it whole.
TILE_ELEMENTS = 2**24


def quantize(
    x: torch.Tensor, *, block_size: int = 32, scale_rule: str = "oas", macro_block_size: int | None = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise along the last axis with static macro blocks.

    Args:
        x: float ``[..., K]``, K a multiple of ``block_size``.

    Returns:
        ``(packed, scale, macro)``: uint8 ``[..., K / 2]``, ``[..., K / block_size]``, and
        ``[..., ceil(K / macro_block_size)]`` or None; see `numerics.quantize`.
    """
    codes, scale, macro = numerics.quantize(
        x, block_size=block_size, scale_rule=scale_rule, macro_block_size=macro_block_size
    )
    return numerics.pack(codes), scale, macro


def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None = None,
    *,
    block_size: int = 32,
    macro_block_size: int = 128,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Dense ``[..., K]`` of ``dtype`` from packed codes; see `numerics.dequantize_packed`."""
    return numerics.dequantize_packed(
        packed, scale, macro, block_size=block_size, macro_block_size=macro_block_size, dtype=dtype
    )


def row_tiles(packed: torch.Tensor) -> list[slice]:
    """Row slices of a packed weight ``[N, K / 2]`` with at most ``TILE_ELEMENTS`` values each."""
    rows, half = packed.shape
    step = max(1, TILE_ELEMENTS // (2 * half))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def gemm(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    block_size: int = 32,
    macro_block_size: int = 128,
) -> torch.Tensor:
    """``x @ W.T + bias`` with a packed weight and dense activations (W4A16).

    Args:
        x: float ``[..., K]``; the weight is rounded to its dtype.
        packed, scale, macro: the weight ``[N, K]`` as `quantize` gives it.
        bias: ``[N]`` or None.

    Returns:
        ``[..., N]`` in the dtype of ``x``.
    """

    def tile(rows: slice) -> torch.Tensor:
        weight = numerics.dequantize_packed(
            packed[rows],
            scale[rows],
            None if macro is None else macro[rows],
            block_size=block_size,
            macro_block_size=macro_block_size,
            dtype=x.dtype,
            saturate=False,
        )
        return F.linear(x, weight, None if bias is None else bias[rows])

    tiles = row_tiles(packed)
    if len(tiles) == 1:
        return tile(tiles[0])
    out = x.new_empty(*x.shape[:-1], packed.shape[0])
    for rows in tiles:
        out[..., rows] = tile(rows)
    return out


def gemm_w4a4(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    block_size: int = 32,
    macro_block_size: int = 128,
    scale_rule: str = "oas",
    activation_macro_block_size: int | None = 64,
) -> torch.Tensor:
    """``x @ W.T + bias`` with ``x`` rounded to MXFP4 too (W4A4), by ``scale_rule`` and static macro blocks of its own.

    Computed in float32, as the hardware's block-scaled product does; arguments and result as for `gemm`.
    """
    rounded = numerics.fake_quantize(
        x.to(torch.float32),
        block_size=block_size,
        scale_rule=scale_rule,
        macro_block_size=activation_macro_block_size,
    )
    bias = None if bias is None else bias.to(torch.float32)
    out = gemm(rounded, packed, scale, macro, bias, block_size=block_size, macro_block_size=macro_block_size)
    return out.to(x.dtype)
