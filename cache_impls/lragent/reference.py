"""Flash-LoRA-Attention in PyTorch, with the signature of the kernel: its reference, and what runs on a CPU."""

import torch

from .functional import attend, causal_mask

__all__ = ["flash_lora_attention"]


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
    """Attention to keys and values that are a base part plus an adapter's part of low rank, which is never expanded.

    Args:
        query: bf16, fp16, fp32 or fp64 [B, Hq, S, D], rotated; query i stands at position T - S + i.
        key, value: base parts [B, Hk, T, D], keys rotated.
        u_k, u_v: [B, T, r], unscaled and unrotated, one for all heads; None: no adapter there.
        b_k, b_v: [Hk * D, r], the adapter's second matrix; None where u is.
        cos, sin: [B or 1, T, R] of the tokens' own positions, channel i turning with i + R / 2; None where u_k is.
        scale: Of the logits.
        lora_scale_k, lora_scale_v: The adapter's scaling.
        causal: Whether a query sees no token behind its own position.
        kv_start: int [B], a row's first token that is none of its padding; None: 0.
        window: None, or w: a query at position p sees only tokens behind p - w.

    Returns:
        [B, Hq, S, D] in the dtype of query. A query that sees nothing: zeros.
    """
    queries, tokens = query.shape[2], key.shape[2]
    mask = None
    if causal or kv_start is not None or window is not None:
        mask = causal_mask(queries, tokens, kv_start, device=query.device, window=window)
        if not causal:
            column = torch.arange(tokens, device=query.device)
            mask = column >= (0 if kv_start is None else kv_start[:, None, None, None])
            mask = mask.expand(query.shape[0], 1, queries, tokens)
            if window is not None:
                position = torch.arange(tokens - queries, tokens, device=query.device)[:, None]
                mask = mask & (column > position - window)
    return attend(
        query,
        key,
        value,
        u_k,
        u_v,
        b_k,
        b_v,
        cos,
        sin,
        scale=scale,
        lora_scale_k=lora_scale_k,
        lora_scale_v=lora_scale_v,
        mask=mask,
    )
