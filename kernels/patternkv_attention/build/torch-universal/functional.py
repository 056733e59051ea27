"""The public function of the kernel: check the arguments, call the operator."""

import torch

from . import launch, ops

BITS = (2, 4, 8)
MAX_HEAD_DIM = 256
# Tiles hold at least 32 tokens and lie inside a key group.
GROUP_UNIT = 32
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_SCALE_TYPES = (torch.float16, torch.float32)
_ID_TYPES = (torch.uint8, torch.int16)


def decode_attention(
    query: torch.Tensor,
    key_codes: torch.Tensor,
    key_scale: torch.Tensor,
    key_zero: torch.Tensor,
    key_ids: torch.Tensor,
    key_bank: torch.Tensor,
    value_codes: torch.Tensor,
    value_scale: torch.Tensor,
    value_zero: torch.Tensor,
    value_ids: torch.Tensor,
    value_bank: torch.Tensor,
    dense_key: torch.Tensor,
    dense_value: torch.Tensor,
    *,
    key_bits: int,
    value_bits: int,
    group_size: int,
    value_group_size: int,
    scaling: float,
    softcap: float | None = None,
    lengths: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token a row over P packed and E dense tokens, without forming dense keys or values.

    A packed key is key_scale * code + key_zero + key_bank[id], a value likewise. With p = 8 / bits codes a byte, byte
    i of a token holds channels i, i + D/p, i + 2D/p, ..., low bits first. Query head h reads KV head h // (Hq / Hk).
    The packed tensors and banks may be views of longer buffers: only their rows are contiguous, and nothing is copied;
    one id may stand for all (`expand`). Forward only.

    Args:
        query: bf16, fp16 or fp32 [B, Hq, D].
        key_codes: u8 [B, Hk, P, D * key_bits / 8].
        key_scale, key_zero: fp16 or fp32 [B, Hk, P / group_size, D]: per channel, over groups of tokens.
        key_ids: u8 or int16 [B, Hk, P]: rows of the bank.
        key_bank: bf16, fp16 or fp32 [B or 1, Hk, m, D]; row 0 of a bank is the zero vector.
        value_codes: u8 [B, Hk, P, D * value_bits / 8].
        value_scale, value_zero: fp16 or fp32 [B, Hk, P, D / value_group_size]: per token, over groups of channels.
        value_ids, value_bank: as those of the keys.
        dense_key, dense_value: [B, Hk, E, D] in the dtype of query: full-precision tokens; E may be 0, as may P.
        key_bits, value_bits: 2, 4 or 8.
        group_size: tokens that share a key scale; a multiple of 32 that divides P.
        value_group_size: channels that share a value scale; divides D.
        scaling: of the logits.
        softcap: None, or c for logits c * tanh(logits / c), after scaling.
        lengths: int32 [B]: the first so many packed tokens of a row are in use; None: all P.
        mask: bool [B, P + E], True where a token is visible; None: everything in use is.

    Returns:
        output [B, Hq, D] in the dtype of query, and lse fp32 [B, Hq], the natural logarithm of the sum of
        exponentials. A row that sees nothing: zeros and -inf.

    Raises:
        TypeError: a dtype is not one of those named.
        ValueError: a size, shape, layout or device is not.
        RuntimeError: query is on the CPU and Triton's interpreter is off.
    """
    _check_numbers(key_bits, value_bits, group_size, value_group_size, softcap)
    _check_query(query, key_codes)
    batch, _, head_dim = query.shape
    kv_heads, packed = key_codes.shape[1:3]
    _check_sizes(head_dim, packed, key_bits, value_bits, group_size, value_group_size)
    dense_sizes = (batch, kv_heads, dense_key.shape[2] if dense_key.ndim == 4 else 0, head_dim)
    by_token = (batch, kv_heads, packed)
    by_group = (batch, kv_heads, packed // group_size, head_dim)
    by_channels = (*by_token, head_dim // value_group_size)
    for name, tensor, shape, dtypes in (
        ("key_codes", key_codes, (*by_token, head_dim * key_bits // 8), (torch.uint8,)),
        ("key_scale", key_scale, by_group, _SCALE_TYPES),
        ("key_zero", key_zero, by_group, _SCALE_TYPES),
        ("key_ids", key_ids, by_token, _ID_TYPES),
        ("value_codes", value_codes, (*by_token, head_dim * value_bits // 8), (torch.uint8,)),
        ("value_scale", value_scale, by_channels, _SCALE_TYPES),
        ("value_zero", value_zero, by_channels, _SCALE_TYPES),
        ("value_ids", value_ids, by_token, _ID_TYPES),
        ("dense_key", dense_key, dense_sizes, (query.dtype,)),
        ("dense_value", dense_value, dense_sizes, (query.dtype,)),
    ):
        _check_tensor(name, tensor, shape, dtypes, query)
        if not name.startswith("dense") and not name.endswith("ids"):
            _check_rows(name, tensor)
    _check_bank("key_bank", key_bank, query, kv_heads)
    _check_bank("value_bank", value_bank, query, kv_heads)
    if lengths is not None:
        _check_tensor("lengths", lengths, (batch,), (torch.int32,), query)
    if mask is not None:
        _check_tensor("mask", mask, (batch, packed + dense_sizes[2]), (torch.bool,), query)
    if query.device.type == "cpu" and not launch.INTERPRETED:
        raise RuntimeError("Triton kernels need an accelerator; use source='reference'")
    return ops.decode_attention(
        query,
        key_codes,
        key_scale,
        key_zero,
        key_ids,
        key_bank,
        value_codes,
        value_scale,
        value_zero,
        value_ids,
        value_bank,
        dense_key,
        dense_value,
        key_bits,
        value_bits,
        group_size,
        value_group_size,
        scaling,
        softcap,
        lengths,
        mask,
    )


def _check_numbers(key_bits, value_bits, group_size, value_group_size, softcap) -> None:
    for name, bits in (("key_bits", key_bits), ("value_bits", value_bits)):
        if bits not in BITS:
            raise ValueError(f"{name}={bits}: expected 2, 4 or 8, so that a byte holds whole codes")
    if group_size <= 0 or group_size % GROUP_UNIT:
        raise ValueError(
            f"group_size={group_size}: the Triton kernel takes multiples of {GROUP_UNIT}; use source='reference'"
        )
    if value_group_size <= 0:
        raise ValueError(f"value_group_size={value_group_size}: expected a divisor of the head dimension")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap}: expected a positive number, or None for none")


def _check_query(query, key_codes) -> None:
    if query.dtype not in _FLOATS:
        raise TypeError(f"query has dtype {query.dtype}: expected torch.bfloat16, torch.float16 or torch.float32")
    if query.ndim != 3:
        raise ValueError(f"query has shape {tuple(query.shape)}: expected [B, Hq, D], one token a row")
    if key_codes.ndim != 4:
        raise ValueError(f"key_codes has shape {tuple(key_codes.shape)}: expected [B, Hk, P, D * key_bits / 8]")
    heads, kv_heads = query.shape[1], key_codes.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query has {heads} heads: expected a multiple of the {kv_heads} KV heads of key_codes")


def _check_sizes(head_dim, packed, key_bits, value_bits, group_size, value_group_size) -> None:
    if not 0 < head_dim <= MAX_HEAD_DIM or head_dim * min(key_bits, value_bits) % 8:
        raise ValueError(
            f"query has D={head_dim}: the Triton kernel takes up to {MAX_HEAD_DIM} channels that fill whole bytes at "
            f"{min(key_bits, value_bits)} bits; use source='reference'"
        )
    if packed % group_size:
        raise ValueError(f"key_codes has P={packed} tokens: expected a multiple of group_size={group_size}")
    if head_dim % value_group_size:
        raise ValueError(f"value_group_size={value_group_size}: expected a divisor of D={head_dim}")


def _check_tensor(name, tensor, shape: tuple, dtypes: tuple, query) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected {' or '.join(map(str, dtypes))}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {shape}")
    if tensor.device != query.device:
        raise ValueError(f"{name} is on {tensor.device}: expected {query.device}, where query is")


def _check_bank(name, bank, query, kv_heads) -> None:
    batch, _, head_dim = query.shape
    if bank.ndim != 4 or bank.shape[0] not in (1, batch) or bank.shape[2] == 0:
        raise ValueError(
            f"{name} has shape {tuple(bank.shape)}: expected ({batch} or 1, {kv_heads}, m, {head_dim}) with m >= 1"
        )
    _check_tensor(name, bank, (bank.shape[0], kv_heads, bank.shape[2], head_dim), _FLOATS, query)
    _check_rows(name, bank)


def _check_rows(name, tensor) -> None:
    """Refuse a tensor whose tokens do not follow each other without gaps: a copy could be as large as the cache."""
    tokens, width = tensor.shape[2:]
    gaps = tokens > 1 and tensor.stride(2) != width
    if tensor.numel() and (gaps or (width > 1 and tensor.stride(3) != 1)):
        raise ValueError(
            f"{name} has strides {tensor.stride()}: its last two dimensions must be contiguous; batch and heads are "
            "free"
        )
