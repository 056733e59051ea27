"""Triton kernels of attention with low-rank parts: one part of the tokens a program, then the parts merged.

A program takes BLOCK_M rows of one KV head: the query heads that share it stand side by side, so that a decode step
fills a tile and a prefill reads each key for all of them. Keys are rebuilt as two halves that are rotated with each
other, and what is not rotated; the product with a query is the sum of the three.
"""

import triton
import triton.language as tl

# Logits are kept in base 2: 2**x is one instruction.
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load(ptr, row, column, row_stride, rows_ok, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """A tile [rows, columns] of rows ``row_stride`` apart; 0 in columns from WIDTH on, and where not ``rows_ok``."""
    at = ptr + row[:, None] * row_stride + column[None, :]
    PADDED: tl.constexpr = column.shape[0] > WIDTH
    if MASKED and PADDED:
        return tl.load(at, mask=rows_ok[:, None] & (column < WIDTH)[None, :], other=0.0)
    elif MASKED:
        return tl.load(at, mask=rows_ok[:, None], other=0.0)
    elif PADDED:
        return tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _load_angles(ptr, row, angle, column, row_stride, rows_ok, other, ROTARY: tl.constexpr, MASKED: tl.constexpr):
    """A tile [rows, columns] of cosines or sines as float32; ``other`` in columns from ROTARY on."""
    at = ptr + row[:, None] * row_stride + angle[None, :]
    PADDED: tl.constexpr = column.shape[0] > ROTARY
    if MASKED and PADDED:
        x = tl.load(at, mask=rows_ok[:, None] & (column < ROTARY)[None, :], other=other)
    elif MASKED:
        x = tl.load(at, mask=rows_ok[:, None], other=other)
    elif PADDED:
        x = tl.load(at, mask=(column < ROTARY)[None, :], other=other)
    else:
        x = tl.load(at)
    return x.to(tl.float32)


@triton.jit(do_not_specialize=["batch_rows", "kv_heads", "queries", "tokens", "origin", "chunk"])
def attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    u_k_ptr,
    u_v_ptr,
    b_k_ptr,
    b_v_ptr,
    cos_ptr,
    sin_ptr,
    kv_start_ptr,
    out_ptr,
    low_ptr,
    lse_ptr,
    scale,
    lora_scale_k,
    lora_scale_v,
    batch_rows,
    kv_heads,
    queries,
    tokens,
    origin,
    chunk,
    query_b,
    query_h,
    query_s,
    key_b,
    key_h,
    key_t,
    value_b,
    value_h,
    value_t,
    u_k_b,
    u_v_b,
    cos_b,
    cos_t,
    sin_b,
    sin_t,
    u_k_t: tl.constexpr,
    u_v_t: tl.constexpr,
    b_k_d: tl.constexpr,
    b_v_d: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RANK_K: tl.constexpr,
    RANK_V: tl.constexpr,
    ROTARY: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_START: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_RK: tl.constexpr,
    BLOCK_RV: tl.constexpr,
):
    """Attention of BLOCK_M rows of a KV head over the tokens [origin + part * chunk, origin + (part + 1) * chunk).

    Grid: (B * kv_heads * ceil(queries * GROUPS / BLOCK_M), parts), GROUPS being the query heads of a KV head, and
    batch_rows B * queries * kv_heads * GROUPS. Tensors as the public function takes them, with strides ``_b``, ``_h``,
    ``_s``, ``_t``, ``_d`` of batch, head, query, token, row; RANK_K = 0 or RANK_V = 0 where there is no adapter,
    ROTARY channels that are rotated, WINDOW = 0 for none.

    SPLIT: out float32 [parts, batch_rows, D], low float32 [parts, batch_rows, RANK_V] and lse float32 [parts,
    batch_rows] are the base's sum, the low-rank states' and their weight, each part normalised by itself, rows in the
    order [B, queries, heads]. Otherwise out [batch_rows, D] is the result, and the other two are not written.

    BLOCK_D, BLOCK_HALF, BLOCK_REST, BLOCK_RK and BLOCK_RV are D, R / 2, D - R and the ranks rounded up to a power of
    two that `tl.dot` takes.
    """
    HAS_K_LORA: tl.constexpr = RANK_K > 0
    HAS_V_LORA: tl.constexpr = RANK_V > 0
    HALF: tl.constexpr = ROTARY // 2
    REST: tl.constexpr = HEAD_DIM - ROTARY

    rows = queries * GROUPS
    blocks = tl.cdiv(rows, BLOCK_M)
    part = tl.program_id(1)
    b = (tl.program_id(0) // blocks // kv_heads).to(tl.int64)
    g = (tl.program_id(0) // blocks % kv_heads).to(tl.int64)
    # The last block sees the most tokens and starts first.
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    first_s = first_row // GROUPS
    # Of a row: its query after the first of the block, and its head in the group.
    row = first_row - first_s * GROUPS + tl.arange(0, BLOCK_M)
    row_ok = first_s * GROUPS + row < rows
    s = row // GROUPS
    j = row % GROUPS
    lowest = tokens - queries + first_s
    position = lowest + s

    channel = tl.arange(0, BLOCK_D)
    channel_ok = channel < HEAD_DIM
    PADDED: tl.constexpr = BLOCK_D > HEAD_DIM
    rank_k = tl.arange(0, BLOCK_RK)
    rank_v = tl.arange(0, BLOCK_RV)
    # Rows lie at 32-bit distances: 64 bits a row would be kept, and spilled, until the end.
    query_ptr += b * query_b + g * GROUPS * query_h + first_s.to(tl.int64) * query_s
    query_at = s * query_s + j * query_h
    if not HALVES:
        query = _load(query_ptr, query_at, channel, 1, row_ok, HEAD_DIM, True).to(DOT)
    if HAS_K_LORA:
        b_k_ptr += g * HEAD_DIM * b_k_d
    if HALVES:
        half = tl.arange(0, BLOCK_HALF)
        rest = tl.arange(0, BLOCK_REST)
        if HALF > 0:
            query_1 = _load(query_ptr, query_at, half, 1, row_ok, HALF, True).to(DOT)
            query_2 = _load(query_ptr + HALF, query_at, half, 1, row_ok, HALF, True).to(DOT)
            b_k_1 = _load(b_k_ptr, half, rank_k, b_k_d, half < HALF, RANK_K, BLOCK_HALF > HALF)
            b_k_2 = _load(b_k_ptr + HALF * b_k_d, half, rank_k, b_k_d, half < HALF, RANK_K, BLOCK_HALF > HALF)
            b_k_1, b_k_2 = tl.trans(b_k_1).to(DOT), tl.trans(b_k_2).to(DOT)
        if REST > 0:
            query_3 = _load(query_ptr + ROTARY, query_at, rest, 1, row_ok, REST, True).to(DOT)
            b_k_3 = _load(b_k_ptr + ROTARY * b_k_d, rest, rank_k, b_k_d, rest < REST, RANK_K, BLOCK_REST > REST)
            b_k_3 = tl.trans(b_k_3).to(DOT)
    elif HAS_K_LORA:
        b_k = _load(b_k_ptr, channel, rank_k, b_k_d, channel_ok, RANK_K, PADDED).to(DOT)
        if HALF > 0:
            # Of channel i: the channel that it is rotated with, in its row of b_k with the sign of the sine.
            partner = tl.where(channel < HALF, channel + HALF, channel - HALF)
            b_k_turned = _load(b_k_ptr, partner, rank_k, b_k_d, channel < ROTARY, RANK_K, BLOCK_D > ROTARY)
            b_k_turned = tl.where((channel < HALF)[:, None], -b_k_turned, b_k_turned).to(DOT)
            angle = tl.where(channel < HALF, channel, channel - HALF)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low = tl.zeros([BLOCK_M, BLOCK_RV], tl.float32)
    high = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    key_ptr += b * key_b + g * key_h
    value_ptr += b * value_b + g * value_h
    u_k_ptr += b * u_k_b
    u_v_ptr += b * u_v_b
    cos_ptr += b * cos_b
    sin_ptr += b * sin_b

    # Tokens that some row of the block sees: [first, last). Of these, all rows see those before `middle`.
    first = origin + part * chunk
    last = tl.minimum(first + chunk, tokens)
    if HAS_START:
        first = tl.maximum(first, tl.load(kv_start_ptr + b).to(tl.int32))
    if WINDOW > 0:
        first = tl.maximum(first, lowest - WINDOW + 1)
    if CAUSAL:
        last = tl.minimum(last, tl.max(tl.where(row_ok, position, 0), axis=0) + 1)
    seen_by_all = last
    if CAUSAL:
        seen_by_all = tl.minimum(last, lowest + 1)
    middle = first
    if WINDOW == 0:
        middle = first + tl.maximum(seen_by_all - first, 0) // BLOCK_N * BLOCK_N
    # In base 2.
    scale = scale / _LN_2

    for MASKED in tl.static_range(1 if WINDOW > 0 else 0, 2):
        begin = middle if MASKED else first
        end = last if MASKED else middle
        for start in range(begin, end, BLOCK_N):
            token = tl.arange(0, BLOCK_N)
            token_ok = start + token < end
            offset = tl.full([], 0, tl.int64) + start
            key_at = key_ptr + offset * key_t
            u_at = u_k_ptr + offset * u_k_t
            cos_at = cos_ptr + offset * cos_t
            sin_at = sin_ptr + offset * sin_t
            if HALVES:
                u = _load(u_at, token, rank_k, u_k_t, token_ok, RANK_K, MASKED).to(DOT)
                if HALF > 0:
                    cos = _load(cos_at, token, half, cos_t, token_ok, HALF, MASKED).to(tl.float32) * lora_scale_k
                    sin = _load(sin_at, token, half, sin_t, token_ok, HALF, MASKED).to(tl.float32) * lora_scale_k
                    part_1 = tl.dot(u, b_k_1, input_precision="ieee")
                    part_2 = tl.dot(u, b_k_2, input_precision="ieee")
                    key = _load(key_at, token, half, key_t, token_ok, HALF, MASKED).to(tl.float32)
                    key = (key + part_1 * cos - part_2 * sin).to(DOT)
                    logits = tl.dot(query_1, tl.trans(key), input_precision="ieee")
                    key = _load(key_at + HALF, token, half, key_t, token_ok, HALF, MASKED).to(tl.float32)
                    key = (key + part_2 * cos + part_1 * sin).to(DOT)
                    logits = tl.dot(query_2, tl.trans(key), logits, input_precision="ieee")
                else:
                    logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                if REST > 0:
                    part_3 = tl.dot(u, b_k_3, input_precision="ieee")
                    key = _load(key_at + ROTARY, token, rest, key_t, token_ok, REST, MASKED).to(tl.float32)
                    key = (key + part_3 * lora_scale_k).to(DOT)
                    logits = tl.dot(query_3, tl.trans(key), logits, input_precision="ieee")
            else:
                key = tl.trans(_load(key_at, token, channel, key_t, token_ok, HEAD_DIM, MASKED))
                if HAS_K_LORA:
                    u = tl.trans(_load(u_at, token, rank_k, u_k_t, token_ok, RANK_K, MASKED)).to(DOT)
                    part_1 = tl.dot(b_k, u, input_precision="ieee")
                    if HALF > 0:
                        part_2 = tl.dot(b_k_turned, u, input_precision="ieee")
                        cos = _load_angles(cos_at, token, angle, channel, cos_t, token_ok, 1.0, ROTARY, MASKED)
                        sin = _load_angles(sin_at, token, angle, channel, sin_t, token_ok, 0.0, ROTARY, MASKED)
                        part_1 = part_1 * tl.trans(cos) + part_2 * tl.trans(sin)
                    key = key.to(tl.float32) + part_1 * lora_scale_k
                logits = tl.dot(query, key.to(DOT), input_precision="ieee")

            if MASKED:
                visible = token_ok[None, :]
                if CAUSAL:
                    visible = visible & (start + token[None, :] <= position[:, None])
                if WINDOW > 0:
                    visible = visible & (start + token[None, :] > position[:, None] - WINDOW)
                logits = tl.where(visible, logits, -float("inf"))
            new_high = tl.maximum(high, tl.max(logits, axis=1) * scale)
            # A row that has seen nothing yet has -inf here: subtract 0, so that its weights are 0 and not NaN.
            base = tl.where(new_high == -float("inf"), 0.0, new_high) if MASKED else new_high
            weights = tl.exp2(logits * scale - base[:, None])
            factor = tl.exp2(high - base)
            high = new_high
            total = total * factor + tl.sum(weights, axis=1)
            weights = weights.to(DOT)

            value = _load(value_ptr + offset * value_t, token, channel, value_t, token_ok, HEAD_DIM, MASKED).to(DOT)
            acc = tl.dot(weights, value, acc * factor[:, None], input_precision="ieee")
            if HAS_V_LORA:
                u = _load(u_v_ptr + offset * u_v_t, token, rank_v, u_v_t, token_ok, RANK_V, MASKED).to(DOT)
                low = tl.dot(weights, u, low * factor[:, None], input_precision="ieee")

    # Rows that saw nothing: 0 / 1 and -inf + 0.
    some = tl.where(total > 0.0, total, 1.0)
    inverse = 1.0 / some
    acc = acc * inverse[:, None]
    low = low * inverse[:, None]
    first_out = (b * queries + first_s) * (kv_heads * GROUPS) + g * GROUPS
    out_row = s * (kv_heads * GROUPS) + j
    if SPLIT:
        first_out += part.to(tl.int64) * batch_rows
        tl.store(lse_ptr + first_out + out_row, high + tl.log2(some), mask=row_ok)
        if HAS_V_LORA:
            low_at = low_ptr + first_out * RANK_V + out_row[:, None] * RANK_V + rank_v[None, :]
            tl.store(low_at, low, mask=row_ok[:, None] & (rank_v < RANK_V)[None, :])
    elif HAS_V_LORA:
        b_v_ptr += g * HEAD_DIM * b_v_d
        b_v = _load(b_v_ptr, channel, rank_v, b_v_d, channel < HEAD_DIM, RANK_V, BLOCK_D > HEAD_DIM).to(DOT)
        acc += lora_scale_v * tl.dot(low.to(DOT), tl.trans(b_v), input_precision="ieee")
    out_at = out_ptr + first_out * HEAD_DIM + out_row[:, None] * HEAD_DIM + channel[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (channel < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["batch_rows", "heads", "parts"])
def merge_kernel(
    part_out_ptr,
    part_low_ptr,
    part_lse_ptr,
    b_v_ptr,
    out_ptr,
    lora_scale_v,
    batch_rows,
    heads,
    parts,
    b_v_d: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RANK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_RV: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One row out of its parts, always in this order; the adapter's second matrix is applied to the merged low part.

    part_out float32 [parts, batch_rows, D], part_low float32 [parts, batch_rows, RANK_V] and part_lse float32, base 2,
    [parts, batch_rows] to out [batch_rows, D]; b_v [Hk * D, RANK_V], its rows b_v_d apart.
    """
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    rank = tl.arange(0, BLOCK_RV)
    high = -float("inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    low = tl.zeros([BLOCK_RV], tl.float32)
    for start in range(0, parts, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)
        part_ok = part < parts
        part_row = part.to(tl.int64) * batch_rows + row
        lse = tl.load(part_lse_ptr + part_row, mask=part_ok, other=-float("inf"))
        new_high = tl.maximum(high, tl.max(lse, axis=0))
        base = tl.where(new_high == -float("inf"), 0.0, new_high)
        weights = tl.exp2(lse - base)
        factor = tl.exp2(high - base)
        values = _load(part_out_ptr, part_row, channel, HEAD_DIM, part_ok, HEAD_DIM, True)
        acc = acc * factor + tl.sum(weights[:, None] * values, axis=0)
        if RANK_V > 0:
            values = _load(part_low_ptr, part_row, rank, RANK_V, part_ok, RANK_V, True)
            low = low * factor + tl.sum(weights[:, None] * values, axis=0)
        total = total * factor + tl.sum(weights, axis=0)
        high = new_high
    if RANK_V > 0:
        b_v_ptr += (row % heads // GROUPS) * HEAD_DIM * b_v_d
        b_v = _load(b_v_ptr, channel, rank, b_v_d, channel < HEAD_DIM, RANK_V, BLOCK_D > HEAD_DIM).to(tl.float32)
        acc += lora_scale_v * tl.sum(b_v * low[None, :], axis=1)
    some = tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + channel, (acc / some).to(out_ptr.dtype.element_ty), mask=channel < HEAD_DIM)
