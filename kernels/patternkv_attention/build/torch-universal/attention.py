"""Triton kernels of decode attention: one part of the tokens a program, then the parts merged by log-sum-exp.

With p = 8 / bits codes a byte, byte i of a token holds channels i, i + D/p, i + 2D/p, ... (low bits first). So the
codes of plane j, channels [j * D/p, (j + 1) * D/p), are one mask away from the bytes as they were loaded. Decoded
planes are set side by side by `tl.join`, which leaves every value in its thread: column i * p + j is channel
j * D/p + i. Queries are read, and outputs written, in that order.
"""

import triton
import triton.language as tl

# Logits are kept in base 2: 2**x is one instruction.
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _plane(codes, J: tl.constexpr, BITS: tl.constexpr):
    """The codes of plane J times 2**(J * BITS), u8 [T, C] to float32 [T, C]: masked where they stand, not shifted."""
    return (codes.to(tl.int32) & (((1 << BITS) - 1) << (J * BITS))).to(tl.float32)


@triton.jit
def _side_by_side(planes, PLANES: tl.constexpr):
    """Planes [T, C] to [T, C * PLANES], column i * PLANES + j being column i of plane j."""
    if PLANES == 4:
        joined = tl.join(tl.join(planes[0], planes[2]), tl.join(planes[1], planes[3]))
    elif PLANES == 2:
        joined = tl.join(planes[0], planes[1])
    else:
        joined = planes[0]
    return tl.reshape(joined, [planes[0].shape[0], planes[0].shape[1] * PLANES])


@triton.jit
def _logits(products, inner, outer, HAS_SOFTCAP: tl.constexpr):
    """Products of query and keys to logits in base 2: times ``outer``, with a soft cap tanh(times inner) * outer."""
    if HAS_SOFTCAP:
        x = products * inner
        # tanh from exp(-2|x|), which cannot overflow.
        e = tl.exp(-2.0 * tl.abs(x))
        products = tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
    return products * outer


@triton.jit
def _online_softmax(logits, high, total):
    """Take logits [G, T] (-inf: hidden) into a running maximum and sum [G].

    Returns the weights [G, T] against the new maximum, the factor [G] for what was summed before, and the two.
    """
    new_high = tl.maximum(high, tl.max(logits, axis=1))
    # A row that has seen nothing yet has -inf here: subtract 0, so that its weights are 0 and not NaN.
    base = tl.where(new_high == -float("inf"), 0.0, new_high)
    weights = tl.exp2(logits - base[:, None])
    factor = tl.exp2(high - base)
    return weights, factor, new_high, total * factor + tl.sum(weights, axis=1)


@triton.jit(do_not_specialize=["rows", "kv_heads", "packed", "dense", "chunk", "mask_b"])
def attend_kernel(
    query_ptr,
    key_codes_ptr,
    key_scale_ptr,
    key_zero_ptr,
    key_ids_ptr,
    key_bank_ptr,
    value_codes_ptr,
    value_scale_ptr,
    value_zero_ptr,
    value_ids_ptr,
    value_bank_ptr,
    dense_key_ptr,
    dense_value_ptr,
    lengths_ptr,
    mask_ptr,
    out_ptr,
    lse_ptr,
    inner,
    outer,
    rows,
    kv_heads,
    packed,
    dense,
    chunk,
    mask_b,
    key_codes_b,
    key_codes_h,
    key_scale_b,
    key_scale_h,
    key_zero_b,
    key_zero_h,
    key_ids_b,
    key_ids_h,
    key_ids_t,
    key_bank_b,
    key_bank_h,
    value_codes_b,
    value_codes_h,
    value_scale_b,
    value_scale_h,
    value_zero_b,
    value_zero_h,
    value_ids_b,
    value_ids_h,
    value_ids_t,
    value_bank_b,
    value_bank_h,
    dense_key_b,
    dense_key_h,
    dense_key_t,
    dense_value_b,
    dense_value_h,
    dense_value_t,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    VALUE_GROUP_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Attention of up to BLOCK_G query heads of one KV head over packed tokens [part * chunk, (part + 1) * chunk).

    The last part takes the dense tokens besides. Grid: (B * kv_heads * ceil(GROUPS / BLOCK_G), parts), GROUPS being
    the query heads of a KV head, and rows B * kv_heads * GROUPS. query [rows, D] contiguous; codes, scale, zero, ids
    and bank as the public function takes them, rows contiguous, with strides ``_b``, ``_h`` of batch and head; ids and
    dense tokens with stride ``_t`` besides; lengths i32 [B]; mask u8 [B, packed + dense] with contiguous rows. out
    [parts, rows, D], each part normalised by itself; lse float32 [parts, rows].

    A tile of BLOCK_T tokens lies inside one key group, so one row of scales serves it. KEY_BLOCK and VALUE_BLOCK are
    the channels of a plane rounded up to a power of two.
    """
    KEY_PLANES: tl.constexpr = 8 // KEY_BITS
    VALUE_PLANES: tl.constexpr = 8 // VALUE_BITS
    KEY_WIDTH: tl.constexpr = HEAD_DIM // KEY_PLANES
    VALUE_WIDTH: tl.constexpr = HEAD_DIM // VALUE_PLANES
    VALUE_GROUPS: tl.constexpr = HEAD_DIM // VALUE_GROUP_SIZE
    HEAD_BLOCKS: tl.constexpr = (GROUPS + BLOCK_G - 1) // BLOCK_G

    part = tl.program_id(1)
    row = tl.program_id(0) // HEAD_BLOCKS
    b = (row // kv_heads).to(tl.int64)
    h = (row % kv_heads).to(tl.int64)
    in_group = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_G + tl.arange(0, BLOCK_G)
    group_ok = in_group < GROUPS
    query_row = (b * kv_heads + h) * GROUPS + in_group

    at_key = tl.arange(0, KEY_BLOCK)
    at_value = tl.arange(0, VALUE_BLOCK)
    key_ok = (at_key < KEY_WIDTH)[None, :]
    value_ok = (at_value < VALUE_WIDTH)[None, :]
    # The channel of each column where the planes of a key, or of a value, stand side by side.
    key_column = tl.arange(0, KEY_BLOCK * KEY_PLANES)
    value_column = tl.arange(0, VALUE_BLOCK * VALUE_PLANES)
    key_channel = (key_column % KEY_PLANES * KEY_WIDTH + key_column // KEY_PLANES)[None, :]
    value_channel = (value_column % VALUE_PLANES * VALUE_WIDTH + value_column // VALUE_PLANES)[None, :]
    key_channel_ok = (key_column // KEY_PLANES < KEY_WIDTH)[None, :]
    value_channel_ok = (value_column // VALUE_PLANES < VALUE_WIDTH)[None, :]
    at = query_ptr + query_row[:, None] * HEAD_DIM + key_channel
    query = tl.load(at, mask=group_ok[:, None] & key_channel_ok, other=0.0).to(DOT)
    acc = tl.zeros([BLOCK_G, VALUE_BLOCK * VALUE_PLANES], tl.float32)
    high = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)

    key_codes_ptr += b * key_codes_b + h * key_codes_h
    key_scale_ptr += b * key_scale_b + h * key_scale_h
    key_zero_ptr += b * key_zero_b + h * key_zero_h
    key_ids_ptr += b * key_ids_b + h * key_ids_h
    key_bank_ptr += b * key_bank_b + h * key_bank_h
    value_codes_ptr += b * value_codes_b + h * value_codes_h
    value_scale_ptr += b * value_scale_b + h * value_scale_h
    value_zero_ptr += b * value_zero_b + h * value_zero_h
    value_ids_ptr += b * value_ids_b + h * value_ids_h
    value_bank_ptr += b * value_bank_b + h * value_bank_h
    mask_ptr += b * mask_b

    # Nothing is read of tokens that are not in use: their scales may be NaN and their ids outside the bank. Rows of
    # the banks, read again and again, are the only thing that L1 should keep.
    in_use = packed
    if HAS_LENGTHS:
        in_use = tl.minimum(tl.load(lengths_ptr + b), packed)
    end = tl.minimum((part + 1) * chunk, in_use)
    for start in range(part * chunk, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        t_ok = t < end
        visible = t_ok
        if HAS_MASK:
            visible = tl.load(mask_ptr + t, mask=t_ok, other=0) != 0

        codes_at = key_codes_ptr + t[:, None] * KEY_WIDTH + at_key[None, :]
        codes = tl.load(codes_at, mask=t_ok[:, None] & key_ok, other=0)
        ids = tl.load(key_ids_ptr + t * key_ids_t, mask=t_ok, other=0).to(tl.int32)
        group_row = (start // GROUP_SIZE) * HEAD_DIM
        planes = ()
        for j in tl.static_range(KEY_PLANES):
            channel = (j * KEY_WIDTH + at_key)[None, :]
            scale = tl.load(key_scale_ptr + group_row + channel, mask=key_ok, other=0.0).to(tl.float32)
            zero = tl.load(key_zero_ptr + group_row + channel, mask=key_ok, other=0.0).to(tl.float32)
            rows_at = key_bank_ptr + ids[:, None] * HEAD_DIM + channel
            pattern = tl.load(rows_at, mask=key_ok, other=0.0, cache_modifier=".ca")
            key = _plane(codes, j, KEY_BITS) * (scale * 2.0 ** (-j * KEY_BITS)) + zero + pattern.to(tl.float32)
            planes += (key.to(DOT),)
        products = tl.dot(query, tl.trans(_side_by_side(planes, KEY_PLANES)), input_precision="ieee")
        logits = tl.where(visible[None, :], _logits(products, inner, outer, HAS_SOFTCAP), -float("inf"))
        weights, factor, high, total = _online_softmax(logits, high, total)

        codes_at = value_codes_ptr + t[:, None] * VALUE_WIDTH + at_value[None, :]
        codes = tl.load(codes_at, mask=t_ok[:, None] & value_ok, other=0)
        ids = tl.load(value_ids_ptr + t * value_ids_t, mask=t_ok, other=0).to(tl.int32)
        planes = ()
        for j in tl.static_range(VALUE_PLANES):
            channel = (j * VALUE_WIDTH + at_value)[None, :]
            if VALUE_GROUP_SIZE % VALUE_WIDTH == 0:
                # The plane lies in one group: a scale a token.
                scale_at = (t * VALUE_GROUPS + (j * VALUE_WIDTH) // VALUE_GROUP_SIZE)[:, None]
                scale_ok = t_ok[:, None]
            else:
                scale_at = t[:, None] * VALUE_GROUPS + channel // VALUE_GROUP_SIZE
                scale_ok = t_ok[:, None] & value_ok
            scale = tl.load(value_scale_ptr + scale_at, mask=scale_ok, other=0.0).to(tl.float32)
            zero = tl.load(value_zero_ptr + scale_at, mask=scale_ok, other=0.0).to(tl.float32)
            rows_at = value_bank_ptr + ids[:, None] * HEAD_DIM + channel
            pattern = tl.load(rows_at, mask=value_ok, other=0.0, cache_modifier=".ca")
            value = _plane(codes, j, VALUE_BITS) * (scale * 2.0 ** (-j * VALUE_BITS)) + zero + pattern.to(tl.float32)
            planes += (value.to(DOT),)
        value = _side_by_side(planes, VALUE_PLANES)
        acc = tl.dot(weights.to(DOT), value, acc * factor[:, None], input_precision="ieee")

    if HAS_DENSE:
        dense_end = tl.where(part == tl.num_programs(1) - 1, dense, 0)
        for start in range(0, dense_end, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            t_ok = t < dense_end
            visible = t_ok
            if HAS_MASK:
                visible = tl.load(mask_ptr + packed + t, mask=t_ok, other=0) != 0
            key_rows = dense_key_ptr + b * dense_key_b + h * dense_key_h + (t.to(tl.int64) * dense_key_t)[:, None]
            value_rows = (
                dense_value_ptr + b * dense_value_b + h * dense_value_h + (t.to(tl.int64) * dense_value_t)[:, None]
            )
            planes = ()
            for j in tl.static_range(KEY_PLANES):
                channel = (j * KEY_WIDTH + at_key)[None, :]
                planes += (tl.load(key_rows + channel, mask=t_ok[:, None] & key_ok, other=0.0).to(DOT),)
            products = tl.dot(query, tl.trans(_side_by_side(planes, KEY_PLANES)), input_precision="ieee")
            logits = tl.where(visible[None, :], _logits(products, inner, outer, HAS_SOFTCAP), -float("inf"))
            weights, factor, high, total = _online_softmax(logits, high, total)
            planes = ()
            for j in tl.static_range(VALUE_PLANES):
                channel = (j * VALUE_WIDTH + at_value)[None, :]
                planes += (tl.load(value_rows + channel, mask=t_ok[:, None] & value_ok, other=0.0).to(DOT),)
            value = _side_by_side(planes, VALUE_PLANES)
            acc = tl.dot(weights.to(DOT), value, acc * factor[:, None], input_precision="ieee")

    # Rows that saw nothing: 0 / 1 and -inf + 0.
    some = tl.where(total > 0.0, total, 1.0)
    out_row = part.to(tl.int64) * rows + query_row
    tl.store(lse_ptr + out_row, (high + tl.log2(some)) * _LN_2, mask=group_ok)
    at = out_ptr + out_row[:, None] * HEAD_DIM + value_channel
    result = (acc / some[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(at, result, mask=group_ok[:, None] & value_channel_ok)


@triton.jit(do_not_specialize=["rows", "parts"])
def merge_kernel(
    part_out_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    rows,
    parts,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One row of attention out of its parts: out = sum over s of softmax(lse)_s * part_out_s, always in this order.

    part_out float32 [parts, rows, D] and part_lse float32 [parts, rows] to out [rows, D] in its dtype, lse [rows].
    """
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    channel_ok = (channel < HEAD_DIM)[None, :]
    high = -float("inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, parts, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)
        part_ok = part < parts
        lse = tl.load(part_lse_ptr + part * rows.to(tl.int64) + row, mask=part_ok, other=-float("inf"))
        new_high = tl.maximum(high, tl.max(lse, axis=0))
        base = tl.where(new_high == -float("inf"), 0.0, new_high)
        weights = tl.exp(lse - base)
        factor = tl.exp(high - base)
        at = part_out_ptr + (part * rows.to(tl.int64) + row)[:, None] * HEAD_DIM + channel[None, :]
        values = tl.load(at, mask=part_ok[:, None] & channel_ok, other=0.0)
        acc = acc * factor + tl.sum(weights[:, None] * values, axis=0)
        total = total * factor + tl.sum(weights, axis=0)
        high = new_high
    some = tl.where(total > 0.0, total, 1.0)
    tl.store(lse_ptr + row, high + tl.log(some))
    tl.store(out_ptr + row * HEAD_DIM + channel, (acc / some).to(out_ptr.dtype.element_ty), mask=channel < HEAD_DIM)
