"""Triton kernels that quantise to MXFP4, dequantise, and add up the partial sums of a split product."""

import triton
import triton.language as tl

from .codec import apply_scale, decode_codes, decode_macro, decode_scale, encode_block


@triton.jit(do_not_specialize=["m", "blocks_k", "macros_k"])
def quantize_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    macro_ptr,
    m,
    half_k,
    blocks_k,
    macros_k,
    MACRO: tl.constexpr,
    THRESHOLD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """x [M, 2 * half_k] to packed u8 [M, half_k], scale u8 [M, blocks_k] and, when MACRO > 0, macro u8 [M, macros_k].

    A program takes ROWS rows and COLS columns, COLS being MACRO where there is one. Launch it without floating-point
    fusion: a product contracted into an addition would not be the reference's.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    at = part * COLS + tl.arange(0, COLS)
    half_at = part * (COLS // 2) + tl.arange(0, COLS // 2)
    block_at = part * (COLS // 32) + tl.arange(0, COLS // 32)
    row_ok = (rows < m)[:, None]
    wide = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + wide * (2 * half_k) + at[None, :], mask=row_ok & (at < 2 * half_k)[None, :], other=0.0)
    code, scale, macro = encode_block(x.to(tl.float32), THRESHOLD, MACRO > 0)
    low, high = tl.split(tl.reshape(code, [ROWS, COLS // 2, 2]))
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(packed_ptr + wide * half_k + half_at[None, :], packed, mask=row_ok & (half_at < half_k)[None, :])
    tl.store(
        scale_ptr + wide * blocks_k + block_at[None, :],
        scale.to(tl.uint8),
        mask=row_ok & (block_at < blocks_k)[None, :],
    )
    if MACRO > 0:
        tl.store(macro_ptr + rows.to(tl.int64) * macros_k + part, macro.to(tl.uint8), mask=rows < m)


@triton.jit(do_not_specialize=["n", "blocks_k", "macros_k"])
def dequantize_kernel(
    packed_ptr,
    scale_ptr,
    macro_ptr,
    w_ptr,
    n,
    half_k,
    blocks_k,
    macros_k,
    MACRO: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Packed rows to w [N, 2 * half_k] in w's dtype, saturating at +-LIMIT, NaN kept."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    at = part * COLS + tl.arange(0, COLS)
    half_at = part * (COLS // 2) + tl.arange(0, COLS // 2)
    block_at = part * (COLS // 32) + tl.arange(0, COLS // 32)
    row_ok = (rows < n)[:, None]
    wide = rows.to(tl.int64)[:, None]
    block_ok = row_ok & (block_at < blocks_k)[None, :]
    codes = tl.load(packed_ptr + wide * half_k + half_at[None, :], mask=row_ok & (half_at < half_k)[None, :], other=0)
    scale = decode_scale(tl.load(scale_ptr + wide * blocks_k + block_at[None, :], mask=block_ok, other=127))
    if MACRO > 0:
        macro_at = block_at // (MACRO // 32)
        macro = tl.load(macro_ptr + wide * macros_k + macro_at[None, :], mask=block_ok, other=0)
        scale = scale * decode_macro(macro)
    w = apply_scale(decode_codes(codes), scale)
    # Two selects rather than minimum/maximum: a NaN fails both comparisons and stays.
    w = tl.where(w > LIMIT, LIMIT, w)
    w = tl.where(w < -LIMIT, -LIMIT, w)
    tl.store(
        w_ptr + wide * (2 * half_k) + at[None, :],
        w.to(w_ptr.dtype.element_ty),
        mask=row_ok & (at < 2 * half_k)[None, :],
    )


@triton.jit(do_not_specialize=["splits"])
def reduce_splits_kernel(part_ptr, bias_ptr, y_ptr, total, n, splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """y[i] = sum over s of part[s, i] (+ bias), float32 [splits, total] to y's dtype; the order of s is fixed."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < total
    acc = tl.zeros([BLOCK], tl.float32)
    part = part_ptr + at
    for _ in range(splits):
        acc += tl.load(part, mask=ok, other=0.0)
        part += total
    if HAS_BIAS:
        acc += tl.load(bias_ptr + at % n, mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=ok)
