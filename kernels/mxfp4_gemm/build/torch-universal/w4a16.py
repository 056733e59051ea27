"""Triton kernels of the W4A16 product: decode a weight tile in registers, dot, optionally split along K."""

import triton
import triton.language as tl

from .codec import apply_scale, decode_macro, decode_scale, decode_words


@triton.jit
def tile_of(pid, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column tile of a program; GROUP_M row tiles share their weight tiles in the L2 cache."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    inside = pid % (GROUP_M * tiles_n)
    return first + inside % height, inside // height


@triton.jit(do_not_specialize=["m", "macros_k"])
def w4a16_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    macro_ptr,
    bias_ptr,
    y_ptr,
    m,
    n,
    half_k,
    blocks_k,
    macros_k,
    chunk,
    MACRO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
):
    """y[M, N] = x[M, K] @ w[N, K]^T for K in [split * chunk, (split + 1) * chunk).

    x, y: contiguous; packed u8 [N, half_k]; scale u8 [N, blocks_k]; macro u8 [N, macros_k] when MACRO > 0.
    With SPLIT, y is float32 [splits, M, N] and bias is left to the reduction.
    """
    pid_m, pid_n = tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    split = tl.program_id(1)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < m
    col_ok = cols < n
    k = 2 * half_k
    at_k = tl.arange(0, BLOCK_K)
    at_word = tl.arange(0, BLOCK_K // 8)
    at_block = tl.arange(0, BLOCK_K // 32)

    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        x_rows = x_ptr + (rows.to(tl.int64) * k)[None, :]
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        x_rows = x_ptr + (rows.to(tl.int64) * k)[:, None]
    packed_rows = packed_ptr.to(tl.pointer_type(tl.int32)) + (cols.to(tl.int64) * (half_k // 4))[:, None]
    scale_rows = scale_ptr + (cols.to(tl.int64) * blocks_k)[:, None]
    start = split * chunk
    for k0 in range(start, tl.minimum(start + chunk, k), BLOCK_K):
        word0 = k0 // 8
        block0 = k0 // 32
        codes = tl.load(
            packed_rows + (word0 + at_word)[None, :],
            mask=col_ok[:, None] & (word0 + at_word < half_k // 4)[None, :],
            other=0,
        )
        block_ok = col_ok[:, None] & (block0 + at_block < blocks_k)[None, :]
        scale = decode_scale(tl.load(scale_rows + (block0 + at_block)[None, :], mask=block_ok, other=127))
        if MACRO > 0:
            if MACRO % BLOCK_K == 0:
                macro = tl.load(macro_ptr + cols.to(tl.int64) * macros_k + k0 // MACRO, mask=col_ok, other=0)
                scale = scale * decode_macro(macro)[:, None]
            else:
                at_macro = (block0 + at_block) // (MACRO // 32)
                macro_rows = macro_ptr + (cols.to(tl.int64) * macros_k)[:, None]
                scale = scale * decode_macro(tl.load(macro_rows + at_macro[None, :], mask=block_ok, other=0))
        w = apply_scale(decode_words(codes), scale).to(DOT)
        if SWAP:
            x = tl.load(x_rows + (k0 + at_k)[:, None], mask=row_ok[None, :] & (k0 + at_k < k)[:, None], other=0.0)
            acc = tl.dot(w, x.to(DOT), acc, input_precision=PRECISION)
        else:
            x = tl.load(x_rows + (k0 + at_k)[None, :], mask=row_ok[:, None] & (k0 + at_k < k)[None, :], other=0.0)
            acc = tl.dot(x.to(DOT), tl.trans(w), acc, input_precision=PRECISION)

    if SWAP:
        acc = tl.trans(acc)
    if HAS_BIAS and not SPLIT:
        acc += tl.load(bias_ptr + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    y_rows = y_ptr + ((split.to(tl.int64) * m + rows) * n)[:, None]
    tl.store(y_rows + cols[None, :], acc.to(y_ptr.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])
