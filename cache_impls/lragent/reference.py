"""Flash-LoRA-Attention in PyTorch: the reference of the kernel `flash_lora_attention`, and what runs on a CPU.

Keys are rebuilt a block of tokens at a time, values are not: the weights of a block multiply the base values and the
low-rank states, both sums run along, and the adapter's second matrix is applied to the second sum once, at the end.
"""

import torch

__all__ = ["flash_lora_attention"]

# Tokens whose keys are rebuilt, and scored against all queries, at once.
BLOCK_TOKENS = 512


def flash_lora_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    u_k: torch.Tensor | None,
    u_v: torch.Tensor | None,
    b_k: torch.Tensor | None,
    b_v: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    scale: float,
    lora_scale_k: float,
    lora_scale_v: float,
    causal: bool = True,
    kv_start: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention to keys and values that are a base part plus an adapter's part of low rank.

    Keys are key + rotate(lora_scale_k * u_k b_k^T, cos, sin), values value + lora_scale_v * u_v b_v^T, with rows
    [g * D, (g + 1) * D) of b for KV head g; query head h reads KV head h // (Hq / Hk). Computed in float32, in float64
    where `query` is.

    Args:
        query: float [B, Hq, S, D], rotated; query i stands at position T - S + i.
        key, value: [B, Hk, T, D]; `key` is rotated.
        u_k, u_v: [B, T, r], one for all heads, unscaled and unrotated; None: no adapter there.
        b_k, b_v: [Hk * D, r]; None where u is.
        cos, sin: [B or 1, T, R] of the tokens' own positions, from the model's `rotary_emb`: channel i is rotated with
            channel i + R / 2, the first half of a row is read, and channels from R on stay; None where u_k is.
        scale: Of the logits.
        lora_scale_k, lora_scale_v: Of the adapter.
        causal: Whether a query sees no token behind its own position.
        kv_start: int [B], a row's first token that is none of its padding; None: 0.
        window: None, or w: a query at position p sees the tokens behind p - w only.

    Returns:
        [B, Hq, S, D] in the dtype of `query`. A query that sees nothing gets zeros.
    """
    rows, heads, queries, channels = query.shape
    kv_heads, tokens = key.shape[1:3]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    q = query.to(wide).unflatten(1, (kv_heads, heads // kv_heads)) * scale  # [B, Hk, G, S, D]
    position = torch.arange(tokens - queries, tokens, device=query.device)
    second_k, second_v = (None if b is None else b.to(wide).view(kv_heads, channels, -1) for b in (b_k, b_v))
    rank = 0 if u_v is None else u_v.shape[-1]

    high = q.new_full(q.shape[:-1], torch.finfo(wide).min)
    total = torch.zeros_like(high)
    base, low = torch.zeros_like(q), q.new_zeros(*q.shape[:-1], rank)
    for start in range(0, tokens, BLOCK_TOKENS):
        end = min(start + BLOCK_TOKENS, tokens)
        # Queries that stand before the block see none of it.
        first = max(0, start - (tokens - queries)) if causal else 0
        k = key[:, :, start:end].to(wide)
        if u_k is not None:
            part = lora_scale_k * (u_k[:, None, start:end].to(wide) @ second_k.transpose(-1, -2))
            k = k + _rotate(part, cos[:, None, start:end].to(wide), sin[:, None, start:end].to(wide))
        logits = q[:, :, :, first:] @ k[:, :, None].transpose(-1, -2)
        token = torch.arange(start, end, device=query.device)
        hidden = torch.zeros(1, queries - first, end - start, dtype=torch.bool, device=query.device)
        if causal:
            hidden = hidden | (token > position[first:, None])
        if window is not None:
            hidden = hidden | (token <= position[first:, None] - window)
        if kv_start is not None:
            hidden = hidden | (token < kv_start[:, None])[:, None]
        logits = logits.masked_fill(hidden[:, None, None], -torch.inf)

        # A row that has seen nothing has the least number as its maximum, so that no difference is NaN.
        new_high = torch.maximum(high[..., first:], logits.amax(-1))
        factor = torch.exp(high[..., first:] - new_high)
        weights = torch.exp(logits - new_high[..., None])
        high[..., first:] = new_high
        total[..., first:] = total[..., first:] * factor + weights.sum(-1)
        v = value[:, :, None, start:end].to(wide)
        base[..., first:, :] = base[..., first:, :] * factor[..., None] + weights @ v
        if u_v is not None:
            u = u_v[:, None, None, start:end].to(wide)
            low[..., first:, :] = low[..., first:, :] * factor[..., None] + weights @ u
    if u_v is not None:
        base = base + lora_scale_v * (low @ second_v[:, None].transpose(-1, -2))
    output = base / torch.where(total > 0, total, 1)[..., None]
    return output.flatten(1, 2).to(query.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channels i and i + R / 2 of x [..., D] by the angles of cos and sin [..., R]; the rest stay."""
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
