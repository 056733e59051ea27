"""Triton kernel of the W4A4 product: block scales go into the dot, macro factors onto its partial sums."""

import triton
import triton.language as tl

from .codec import approximate_macro
from .w4a16 import tile_of


@triton.jit(do_not_specialize=["m", "x_macros_k", "macros_k"])
def w4a4_kernel(
    xq_ptr,
    x_scale_ptr,
    x_macro_ptr,
    packed_ptr,
    scale_ptr,
    macro_ptr,
    bias_ptr,
    y_ptr,
    m,
    n,
    half_k,
    blocks_k,
    x_macros_k,
    macros_k,
    X_MACRO: tl.constexpr,
    MACRO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """y[M, N] = x[M, K] @ w[N, K]^T over packed operands, float32 accumulation.

    A step is BLOCK_K values of K, which divides both macro blocks (0: no macro scale on that side), so that one factor
    per row and one per column scale the step's partial sum: sum_t 1/(fx_mt fw_nt) * sum_k xq wq 2**(ex + ew).
    """
    pid_m, pid_n = tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < m
    col_ok = cols < n
    at_half = tl.arange(0, BLOCK_K // 2)
    at_block = tl.arange(0, BLOCK_K // 32)

    xq_rows = xq_ptr + (rows.to(tl.int64) * half_k)[:, None]
    x_scale_rows = x_scale_ptr + (rows.to(tl.int64) * blocks_k)[:, None]
    packed_rows = packed_ptr + (cols.to(tl.int64) * half_k)[:, None]
    scale_rows = scale_ptr + (cols.to(tl.int64) * blocks_k)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, 2 * half_k, BLOCK_K):
        half_at = k0 // 2 + at_half
        block_at = k0 // 32 + at_block
        half_ok = (half_at < half_k)[None, :]
        block_ok = (block_at < blocks_k)[None, :]
        xq = tl.load(xq_rows + half_at[None, :], mask=row_ok[:, None] & half_ok, other=0)
        wq = tl.load(packed_rows + half_at[None, :], mask=col_ok[:, None] & half_ok, other=0)
        xs = tl.load(x_scale_rows + block_at[None, :], mask=row_ok[:, None] & block_ok, other=127)
        ws = tl.load(scale_rows + block_at[None, :], mask=col_ok[:, None] & block_ok, other=127)
        if X_MACRO == 0 and MACRO == 0:
            acc = tl.dot_scaled(xq, xs, "e2m1", tl.trans(wq), ws, "e2m1", acc)
        else:
            part = tl.dot_scaled(xq, xs, "e2m1", tl.trans(wq), ws, "e2m1")
            if X_MACRO > 0:
                at_m = (rows.to(tl.int64) * x_macros_k)[:, None] + block_at[None, :] // (X_MACRO // 32)
                xm = tl.load(x_macro_ptr + at_m, mask=row_ok[:, None] & block_ok, other=0)
                part *= approximate_macro(tl.max(xm.to(tl.int32), axis=1))[:, None]
            if MACRO > 0:
                at_n = (cols.to(tl.int64) * macros_k)[:, None] + block_at[None, :] // (MACRO // 32)
                wm = tl.load(macro_ptr + at_n, mask=col_ok[:, None] & block_ok, other=0)
                part *= approximate_macro(tl.max(wm.to(tl.int32), axis=1))[None, :]
            acc += part

    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    y_rows = y_ptr + (rows.to(tl.int64) * n)[:, None]
    tl.store(y_rows + cols[None, :], acc.to(y_ptr.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])
