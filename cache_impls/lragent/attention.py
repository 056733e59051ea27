"""The attention implementation "lragent": base states and low-rank states, put together where they are read."""

import logging
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_ext.kernel_lookup import KERNELS, explain_kernel, interpreter_enabled, load_kernel

from .functional import Layout, attend, causal_mask, expand, rebuild_keys

__all__ = ["LowRankView", "lragent_attention", "register"]

logger = logging.getLogger(__name__)

NAME = "lragent"
KERNEL = "flash_lora_attention"
# Up to so many queries a row the low-rank part is never expanded, in PyTorch either. Beyond, expanding one layer for
# the call costs less than an explicit softmax.
FEW_QUERIES = 8
_said: set[str] = set()


class LowRankView(NamedTuple):
    """What the agent adds to the base states that `LRAgentCache.update` returned, by side; None: nothing.

    Attributes:
        u_k, u_v: [B, T, r].
        b_k, b_v: [Hk * D, r].
        scale_k, scale_v: The adapter's scaling.
        cos, sin: [B or 1, T, R] of the tokens, or None.
        layout: How the model rotates; None: not at all.
    """

    u_k: torch.Tensor | None
    u_v: torch.Tensor | None
    b_k: torch.Tensor | None
    b_v: torch.Tensor | None
    scale_k: float
    scale_v: float
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    layout: Layout | None


def lragent_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers: with the agent's low-rank states where there are any, SDPA otherwise.

    Args:
        module: The attention layer; its record has the low-rank states of this call.
        query: [B, Hq, S, D].
        key, value: base states [B, Hk, T, D], or complete ones.
        attention_mask: bool [B, 1, S, T] or None (causal).
        scaling: Of the logits. Default: D ** -0.5.
        dropout: None, this is for inference.

    Returns:
        [B, S, Hq, D], and None.
    """
    record = getattr(module, "_lragent_record", None)
    low = None if record is None else record.low_rank
    if low is None or (low.u_k is None and low.u_v is None):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    record.low_rank = None
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError('the attention implementation "lragent" has no softcap and no sinks (s_aux)')
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _uses_kernel(query, low):
        start, causal = _padding(attention_mask, query.shape[2], key.shape[2])
        if causal:
            output = load_kernel(KERNEL, "bundled" if query.device.type == "cpu" else "auto").flash_lora_attention(
                query,
                key,
                value,
                *low[:4],
                low.cos if low.u_k is not None else None,
                low.sin if low.u_k is not None else None,
                scale=scaling,
                lora_scale_k=low.scale_k,
                lora_scale_v=low.scale_v,
                causal=True,
                kv_start=start,
            )
            return output.transpose(1, 2), None
        _say_once("a mask that is not causal with padding on the left")
    if query.shape[2] <= FEW_QUERIES:
        mask = attention_mask
        if mask is None and query.shape[2] > 1:
            mask = causal_mask(query.shape[2], key.shape[2], None, device=query.device)
        output = attend(
            query,
            key,
            value,
            *low[:4],
            *((low.cos, low.sin) if low.layout else (None, None)),
            scale=scaling,
            lora_scale_k=low.scale_k,
            lora_scale_v=low.scale_v,
            mask=mask if mask is None else _visible(mask)[..., : key.shape[2]],
            layout=low.layout or "half",
        )
        return output.transpose(1, 2).contiguous(), None
    if low.u_k is not None:
        turn = (low.cos, low.sin) if low.layout else (None, None)
        key = rebuild_keys(key, low.u_k, low.b_k, low.scale_k, *turn, low.layout or "half")
    if low.u_v is not None:
        value = expand(low.u_v, low.b_v, low.scale_v, value.shape[1]).to(value.dtype).add_(value)
    if attention_mask is None and query.shape[2] != key.shape[2]:
        # SDPA's own causal mask begins at the first token, not at the first that is new.
        attention_mask = causal_mask(query.shape[2], key.shape[2], None, device=query.device)
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _uses_kernel(query: torch.Tensor, low: LowRankView) -> bool:
    """Whether the Triton kernel runs, and can: it knows the common rotation and multiples of 16 channels."""
    if KERNEL not in KERNELS or (query.device.type == "cpu" and not interpreter_enabled()):
        return False
    if explain_kernel(KERNEL).source == "reference":
        return False
    if low.u_k is not None and low.layout != "half":
        _say_once(f"keys that rotate by {low.layout!r}")
        return False
    if query.shape[-1] % 16 or query.dtype == torch.float64:
        _say_once(f"head_dim={query.shape[-1]} in {query.dtype}")
        return False
    return True


def _say_once(what: str) -> None:
    if what not in _said:
        _said.add(what)
        logger.warning("the Triton kernel %s does not take %s: attention runs in PyTorch", KERNEL, what)


def _visible(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def _padding(mask: torch.Tensor | None, queries: int, tokens: int) -> tuple[torch.Tensor | None, bool]:
    """A mask as each row's first token [B], and whether it is causal with padding on the left, and nothing else."""
    if mask is None:
        return None, True
    seen = _visible(mask)[:, 0, :, :tokens]
    start = seen[:, -1].int().argmax(-1)
    expected = causal_mask(queries, tokens, start, device=mask.device)[:, 0]
    return start, bool(torch.equal(seen, expected.expand_as(seen)))


def register() -> None:
    """Make "lragent" an attention implementation of transformers, with the masks of "sdpa"."""
    AttentionInterface.register(NAME, lragent_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


register()
