"""The mathematics of LRAgent: states in a base part and a low-rank part, and attention that keeps them apart.

An adapted projection of a token x is W x + s B (A x). Stored are the base part W x (of keys: rotated) and u = A x, r
numbers for all heads; B and s are applied on reading. Section numbers are those of the method's notes, formulas
follow from the linearity of the projection and of the rotation.
"""

from typing import Literal

import torch
import torch.nn.functional as F

__all__ = ["attend", "causal_mask", "common_prefix", "expand", "rebuild_keys", "rotate"]

Layout = Literal["half", "interleaved"]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout = "half") -> torch.Tensor:
    """Rotary embedding of the first R channels; the others stay (partial rotary).

    Args:
        x: [B, H, T, D].
        cos, sin: [B or 1, T, R], R even, scaled as the model's own `rotary_emb` gave them.
        layout: Which channels turn together: `"half"` i and i + R/2, `"interleaved"` 2i and 2i + 1.

    Returns:
        [B, H, T, D] in the dtype of x.
    """
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    partner = _partner(turned, layout)
    turned = turned * cos + partner * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def _partner(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What the sine of a rotation multiplies: of two channels (a, b) that turn together, (-b, a)."""
    if layout == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def _by_head(b: torch.Tensor, scale: float, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """s B^T of each head, [heads, r, D]."""
    scaled = (scale * b.to(torch.promote_types(torch.float32, dtype))).to(dtype)
    return scaled.unflatten(0, (heads, -1)).transpose(-1, -2)


def expand(u: torch.Tensor, b: torch.Tensor, scale: float, heads: int) -> torch.Tensor:
    """The adapter's part in full dimension, s u B^T.

    Args:
        u: [B, T, r], A x of each token, unscaled.
        b: [heads * D, r], the adapter's second matrix.
        scale: s, alpha / r for plain LoRA.
        heads: KV heads.

    Returns:
        [B, heads, T, D] in the dtype of u.
    """
    return u[:, None] @ _by_head(b, scale, heads, u.dtype)


def rebuild_keys(
    base: torch.Tensor,
    u: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    layout: Layout = "half",
) -> torch.Tensor:
    """Keys k_t = K0_t + R_t (s B u_t): the rotation comes after B and is that of the token's own position (2.3).

    Args:
        base: [B, H, T, D], rotated.
        u, b, scale: As in `expand`.
        cos, sin: [B or 1, T, R] of the tokens; None: a model without rotary embedding.
        layout: As in `rotate`.

    Returns:
        [B, H, T, D] in the dtype of base.
    """
    weight = _by_head(b, scale, base.shape[1], u.dtype)
    if cos is None:
        return base + (u[:, None] @ weight).to(base.dtype)
    # As the rotation is linear, its partner channels can be taken of B, once, and not of every token: in PyTorch that
    # leaves two small products, and nothing else is allocated.
    width = cos.shape[-1]
    partner = _partner(weight[..., :width], layout)
    if rest := weight.shape[-1] - width:
        partner, sin = F.pad(partner, (0, rest)), F.pad(sin, (0, rest))
        cos = F.pad(cos, (0, rest), value=1.0)
    cos, sin = cos[:, None].to(base.dtype), sin[:, None].to(base.dtype)
    part = (u[:, None] @ weight).to(base.dtype).mul_(cos)
    return part.addcmul_((u[:, None] @ partner).to(base.dtype), sin).add_(base)


def attend(
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
    lora_scale_k: float = 1.0,
    lora_scale_v: float = 1.0,
    mask: torch.Tensor | None = None,
    layout: Layout = "half",
    tile: int = 1024,
) -> torch.Tensor:
    """Attention in the order of Flash-LoRA-Attention (2.2), a tile of tokens at a time.

    With P the softmax weights: O_h = P V0 + s (P U) B_h^T. The sums P V0 and P U are kept apart and rescaled alike
    as the maximum grows; B is applied once, at the end. Keys get their part tile by tile.

    Args:
        query: float [B, Hq, S, D], rotated; head h reads KV head h // (Hq / Hk).
        key, value: base parts [B, Hk, T, D].
        u_k, u_v: [B, T, r] or None where there is no adapter.
        b_k, b_v: [Hk * D, r] or None.
        cos, sin: [B or 1, T, R], or None.
        scale: Of the logits.
        lora_scale_k, lora_scale_v: The adapter's s.
        mask: bool [B or 1, 1, S, T], True where a query sees a token; None: all.
        layout: As in `rotate`.
        tile: Tokens at a time.

    Returns:
        [B, Hq, S, D] in the dtype of query. A query that sees nothing: zeros.
    """
    rows, heads, queries, size = query.shape
    kv_heads, tokens = key.shape[1:3]
    # float32 sums, or the dtype of the states if that is finer
    exact = torch.promote_types(torch.float32, query.dtype)
    grouped = query.reshape(rows, kv_heads, -1, size).to(exact)
    maximum = grouped.new_full((*grouped.shape[:3], 1), torch.finfo(exact).min)
    total = torch.zeros_like(maximum)
    output = grouped.new_zeros(*grouped.shape[:3], value.shape[-1])
    reduced = None if u_v is None else grouped.new_zeros(*grouped.shape[:3], u_v.shape[-1])
    for start in range(0, tokens, tile):
        part = slice(start, start + tile)
        keys = key[:, :, part]
        if u_k is not None:
            turn = (None, None) if cos is None else (cos[:, part], sin[:, part])
            keys = rebuild_keys(keys, u_k[:, part].to(key.dtype), b_k, lora_scale_k, *turn, layout)
        logits = grouped @ keys.to(exact).transpose(-1, -2) * scale
        if mask is not None:
            seen = mask[..., part].expand(rows, 1, queries, -1)
            seen = seen[:, :, None].expand(-1, kv_heads, heads // kv_heads, -1, -1).flatten(2, 3)
            logits = logits.masked_fill(~seen, torch.finfo(exact).min)
        highest = torch.maximum(maximum, logits.amax(-1, keepdim=True))
        weights = (logits - highest).exp()
        if mask is not None:
            weights = weights * seen  # a query that has seen nothing yet has no weights either
        shrink = (maximum - highest).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        output = output * shrink + weights @ value[:, :, part].to(exact)
        if reduced is not None:
            reduced = reduced * shrink + weights @ u_v[:, None, part].to(exact)
        maximum = highest
    total = total.clamp(min=torch.finfo(exact).tiny)
    output = output / total
    if reduced is not None:
        per_head = b_v.to(exact).unflatten(0, (kv_heads, -1))  # [Hk, D, r]
        output = output + lora_scale_v * (reduced / total) @ per_head.transpose(-1, -2)
    return output.reshape(rows, heads, queries, -1).to(query.dtype)


def causal_mask(queries: int, tokens: int, kv_start: torch.Tensor | None, *, device, window: int | None = None):
    """Which tokens queries at the last positions see.

    Args:
        queries, tokens: S and T; query i stands at position T - S + i.
        kv_start: int [B], a row's first token that is none of its padding; None: 0.
        window: If given, a query at position p sees only tokens behind p - window.

    Returns:
        bool [B or 1, 1, S, T].
    """
    column = torch.arange(tokens, device=device)
    position = torch.arange(tokens - queries, tokens, device=device)[:, None]
    seen = column <= position
    if window is not None:
        seen = seen & (column > position - window)
    seen = seen[None, None]
    return seen if kv_start is None else seen & (column >= kv_start[:, None, None, None])


def common_prefix(held: torch.Tensor, given: torch.Tensor) -> int:
    """How many first columns of two tensors of token ids [B, n] and [B, m] are equal in every row."""
    length = min(held.shape[1], given.shape[1])
    same = (held[:, :length] == given[:, :length].to(held.device)).all(0)
    return length if bool(same.all()) else int(same.int().argmin())
