"""Decode attention over packed keys and values in PyTorch: the kernel's reference, and what runs on a CPU.

`k^ = scale * code + zero + pattern` makes the product with a query fall into three: the codes against the query times
the group's scale, the query against the group's zero, and the query against each pattern once. So neither keys nor
values are dequantized; codes are unpacked a block of tokens at a time.
"""

import torch

from .quantization import unpack_codes

__all__ = ["decode_attention"]

# Packed tokens unpacked at once: 16 windows of 128.
BLOCK_TOKENS = 2048


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
    """Attention of one query token per row over packed and dense tokens; query head h reads KV head h // (Hq / Hk).

    Args:
        query: float [B, Hq, D].
        key_codes: uint8 [B, Hk, P, D * key_bits / 8], planar (see `quantization.pack_codes`).
        key_scale, key_zero: float16 or float32 [B, Hk, P / group_size, D].
        key_ids: uint8 or int16 [B, Hk, P], rows of the bank; row 0 is the zero vector.
        key_bank: [B or 1, Hk, m, D].
        value_codes: uint8 [B, Hk, P, D * value_bits / 8].
        value_scale, value_zero: float16 or float32 [B, Hk, P, D / value_group_size].
        value_ids, value_bank: As those of the keys.
        dense_key, dense_value: [B, Hk, E, D] in the dtype of `query`: sinks and tail.
        key_bits, value_bits: 2, 4 or 8.
        group_size: Tokens that share a key scale.
        value_group_size: Channels that share a value scale.
        scaling: Of the logits.
        softcap: If given, logits become softcap * tanh(logits / softcap).
        lengths: int32 [B], packed tokens in use; None: all.
        mask: bool [B, P + E], True where a token is visible; None: all in use.

    Returns:
        Output [B, Hq, D] in the dtype of `query`, and the logarithm of the sum of exponentials, float32 [B, Hq]. A row
        that sees nothing gets zeros and -inf.
    """
    rows, heads, tokens = key_codes.shape[:3]
    groups = query.shape[1] // heads
    channels, value_channels = query.shape[-1], dense_value.shape[-1]
    q = query.float().view(rows, heads, groups, channels) * scaling

    if not tokens and not dense_key.shape[2]:
        empty = query.new_zeros(rows, query.shape[1], value_channels)
        return empty, torch.full_like(empty[..., 0], -torch.inf, dtype=torch.float32)
    if lengths is not None:
        # Beyond a row's length may stand anything, ids of other banks too.
        key_ids = key_ids.clamp(max=key_bank.shape[2] - 1)
        value_ids = value_ids.clamp(max=value_bank.shape[2] - 1)
    packed = _packed_logits(q, key_codes, key_scale, key_zero, key_ids, key_bank, key_bits, group_size)
    logits = torch.cat([packed, q @ dense_key.float().transpose(-1, -2)], dim=-1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    hidden = None if mask is None else ~mask
    if lengths is not None:
        beyond = torch.arange(logits.shape[-1], device=logits.device) >= lengths[:, None]
        beyond[:, tokens:] = False
        hidden = beyond if hidden is None else hidden | beyond
    if hidden is not None:
        logits = logits.masked_fill(hidden[:, None, None], -torch.inf)
    # Where nothing is visible the maximum is -inf, and -inf - -inf would be NaN.
    most = logits.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = (logits - most).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (most + total.log()).squeeze(-1)

    output = weights[..., tokens:] @ dense_value.float()
    output = output + _packed_values(
        weights[..., :tokens], value_codes, value_scale, value_zero, value_ids, value_bank, value_bits, value_channels
    )
    output = output / total.clamp(min=torch.finfo(torch.float32).tiny)
    return output.reshape(rows, -1, value_channels).to(query.dtype), lse.reshape(rows, -1)


def _packed_logits(q, codes, scale, zero, ids, bank, bits: int, group: int) -> torch.Tensor:
    """q . k^ for all packed tokens: float32 [B, Hk, G, P] from q [B, Hk, G, D]."""
    rows, heads, groups, _ = q.shape
    tokens = codes.shape[2]
    if not tokens:
        return q.new_zeros(rows, heads, groups, 0)
    per_pattern = q @ bank.float().transpose(-1, -2)
    logits = per_pattern.gather(-1, ids.long()[:, :, None].expand(-1, -1, groups, -1))
    step = max(group, BLOCK_TOKENS // group * group)
    for start in range(0, tokens, step):
        end = min(start + step, tokens)
        block = slice(start // group, end // group)
        q_scaled = q[:, :, None] * scale[:, :, block, None].float()  # [B, Hk, groups of the block, G, D]
        code = unpack_codes(codes[:, :, start:end], bits).float().unflatten(2, (-1, group))
        part = q_scaled @ code.transpose(-1, -2) + (q[:, :, None] * zero[:, :, block, None].float()).sum(-1)[..., None]
        logits[..., start:end] += part.transpose(2, 3).flatten(3, 4)
    return logits


def _packed_values(weights, codes, scale, zero, ids, bank, bits: int, channels: int) -> torch.Tensor:
    """sum_t weights_t v^_t: float32 [B, Hk, G, D] from weights [B, Hk, G, P]."""
    tokens = codes.shape[2]
    per_pattern = weights.new_zeros(*weights.shape[:3], bank.shape[2])
    if not tokens:
        return weights.new_zeros(*weights.shape[:3], channels)
    per_pattern.scatter_add_(-1, ids.long()[:, :, None].expand_as(weights), weights)
    output = per_pattern @ bank.float()
    parts = scale.shape[-1]
    zeros = (weights @ zero.float()).repeat_interleave(channels // parts, dim=-1)
    output = output + zeros
    for start in range(0, tokens, BLOCK_TOKENS):
        end = min(start + BLOCK_TOKENS, tokens)
        code = unpack_codes(codes[:, :, start:end], bits).float().unflatten(-1, (parts, -1))
        for part in range(parts):
            scaled = weights[..., start:end] * scale[:, :, None, start:end, part].float()
            width = channels // parts
            output[..., part * width : (part + 1) * width] += scaled @ code[..., part, :]
    return output
