"""How a sequence is cut into chunks: the attention mask of each, which tokens a link may join, one output of many.

Functions and a record; no weights. Shapes: `B` sequences, `n` tokens of this call after `past` in the cache, `d` the
width of the model, `g` tokens that a link reaches back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate, find_packed_sequence_indices

MASKED = -1e3  # what is added to a score to forbid it, or less: exp() of it is zero in every type
SLICED = ("sdpa", "eager")  # attention that takes a ready 4-D mask, so that a chunk's is a slice of the whole
VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")  # how callers tell flash attention of packed rows


@dataclass
class Tokens:
    """The tokens of one call, and what of the call goes with each of them.

    Attributes:
        embeds: `[B, n, d]`.
        position_ids: `[B or 1, n]`, or None for the base's own count.
        masks: (first, last) of a chunk -> its attention mask.
        padding: `[B, n]`, True where the token is padding, or None for nowhere.
        valid: `[B or 1, n]`, True where a link may be read, or None for everywhere.
        options: Further arguments for the base's forward.
    """

    embeds: torch.Tensor
    position_ids: torch.Tensor | None
    masks: Callable[[int, int], Any]
    padding: torch.Tensor | None
    valid: torch.Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self, first: int, last: int) -> dict[str, Any]:
        """Arguments of the base's forward for the tokens `first` to `last`."""
        return {
            "inputs_embeds": self.embeds[:, first:last],
            "attention_mask": self.masks(first, last),
            "position_ids": None if self.position_ids is None else self.position_ids[:, first:last],
            **self.options,
        }


def is_packed(mask: Any, position_ids: torch.Tensor | None, options: dict[str, Any]) -> bool:
    """Whether rows hold several documents, which the library tells by positions where there is neither mask nor cache.

    Args:
        mask: Attention mask of the call.
        position_ids: Of the call.
        options: Its further arguments.
    """
    if any(options.get(name) is not None for name in VARLEN):
        return True
    return position_ids is not None and mask is None and find_packed_sequence_indices(position_ids) is not None


def refuse_packed(attention: str, position_ids: torch.Tensor | None) -> None:
    """Refuse packed rows that an attention implementation cannot keep apart chunk by chunk.

    Raises:
        ValueError: That is so, or nothing says where documents begin.
    """
    if attention not in SLICED:
        raise ValueError(
            f"the rows are packed (several documents in one) and attn_implementation is {attention!r}, which cannot "
            "keep them apart when tokens run in chunks; use 'sdpa' or 'eager', train_mode='jacobi', or rows that are "
            "not packed (in SFTConfig packing=False, padding_free=False)"
        )
    if position_ids is None:
        raise ValueError("packed rows need position_ids that start again at 0 with each document; got None")


def allowed_by_mask(mask: torch.Tensor, past: int, group_size: int) -> torch.Tensor:
    """Whether each token may attend to the one `group_size` places before it.

    Args:
        mask: `[B, 1 or H, n, past + n]`: True where attention is allowed, or a float that is added to the scores,
            `MASKED` or less where it is not.
        past: Tokens before the `n`.
        group_size: `g`.

    Returns:
        `[B, n]`, False too where there is no such token.
    """
    allowed = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > MASKED
    keys = torch.arange(mask.shape[2], device=mask.device) + past - group_size
    found = allowed.gather(-1, keys.clamp(min=0)[None, :, None].expand(mask.shape[0], -1, 1))[..., 0]
    return found & (keys >= 0)


def links_between(
    mask: Any, position_ids: torch.Tensor | None, past: int, group_size: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Which tokens are padding, and which may read the token `group_size` before them.

    Returns:
        `padding` and `valid` of `Tokens`.
    """
    padding, valid = None, None if position_ids is None else position_ids >= group_size
    if isinstance(mask, dict):
        mask = mask.get("full_attention", next(iter(mask.values())))
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        padding = mask[:, past:] == 0
    elif isinstance(mask, torch.Tensor):
        # A ready mask says who may attend to whom; a link is no way round it.
        reads = allowed_by_mask(mask, past, group_size)
        valid = reads if valid is None else valid & reads
    return padding, valid


def is_padding_mask(mask: Any) -> bool:
    """Whether a mask tells padding only (2-D, or none at all); else it is ready to be used as it is."""
    return mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)


def chunk_masks(
    config: PreTrainedConfig,
    embeds: torch.Tensor,
    mask: Any,
    documents: torch.Tensor | None,
    cache: Cache,
    past: int,
    group_size: int,
) -> Callable[[int, int], Any]:
    """What to hand the base's forward as attention mask, for the chunk of the tokens `first` to `last`.

    Made once for all chunks and sliced where that can be: making one costs as much as a small layer.

    Args:
        config: Of the model; says which layers have windows.
        embeds: `[B, n, d]`.
        mask: Of the call: None, `[B, past + n]`, or ready: 4-D, or a dictionary of such by kind of layer.
        documents: Positions that start again with each document, `[B or 1, n]`, where rows are packed.
        cache: Of the call, before its first chunk.
        past: Tokens in it.
        group_size: `g`.

    Raises:
        ValueError: A ready mask of another kind or shape than chunks can be cut from.
    """
    length = embeds.shape[1]
    single, ready = length <= group_size, not is_padding_mask(mask)
    if ready and not single:
        _check_ready(mask, past + length, cache)
    if single and (ready or documents is None):
        return lambda first, last: mask
    if ready:
        return lambda first, last: _mapped(mask, lambda part: part[:, :, first:last, : past + last])
    if config._attn_implementation not in SLICED or past or any(cache.is_sliding):
        return lambda first, last: None if mask is None else mask[:, : past + last]
    whole = create_masks_for_generate(
        config=config, inputs_embeds=embeds, attention_mask=mask, cache=None, position_ids=documents
    )
    if group_size == 1 and all(part is None for part in _parts(whole)):
        return lambda first, last: None  # one query sees all keys: the base finds that out by itself
    causal = torch.ones(length, length, dtype=torch.bool, device=embeds.device).tril()[None, None]
    whole = _mapped(whole, lambda part: causal if part is None else part)
    return lambda first, last: _mapped(whole, lambda part: part[:, :, first:last, :last])


def _check_ready(mask: Any, columns: int, cache: Cache) -> None:
    parts = _parts(mask)
    if any(not isinstance(part, torch.Tensor) or part.ndim != 4 or part.shape[-1] != columns for part in parts):
        raise ValueError(
            f"a ready attention mask must be a 4-D tensor (or a dictionary of them) with a column for each of the "
            f"{columns} tokens, to be cut into chunks; give a 2-D mask instead"
        )
    if any(cache.is_sliding):
        raise ValueError(
            "a ready 4-D attention mask cannot be cut into chunks beside a cache with sliding windows; give a 2-D "
            "mask, or a DynamicCache() made without config"
        )


def _parts(masks: Any) -> list[Any]:
    return list(masks.values()) if isinstance(masks, dict) else [masks]


def _mapped(masks: Any, change: Callable[[Any], Any]) -> Any:
    return {name: change(part) for name, part in masks.items()} if isinstance(masks, dict) else change(masks)


def joined(outputs: list[Any], past: int) -> Any:
    """One output of the base for all chunks: tokens in a row, attention padded to the keys of the last chunk.

    Args:
        outputs: Of each chunk; the last one is changed and returned.
        past: Tokens that were in the cache.

    Raises:
        ValueError: Attention of layers whose cache has dropped keys, so that the columns do not match.
    """
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    last["last_hidden_state"] = torch.cat([output.last_hidden_state for output in outputs], dim=1)
    if last.get("hidden_states") is not None:
        layers = zip(*(output.hidden_states for output in outputs), strict=True)
        last["hidden_states"] = tuple(None if parts[0] is None else torch.cat(parts, dim=1) for parts in layers)
    if last.get("attentions"):  # sdpa records none
        total = past
        for output in outputs:
            total += output.attentions[0].shape[-2]
            if any(part.shape[-1] != total for part in output.attentions):
                raise ValueError(
                    "output_attentions: a sliding-window cache has dropped keys, so the chunks' columns do not match; "
                    "pass use_cache=False"
                )
        layers = zip(*(output.attentions for output in outputs), strict=True)
        last["attentions"] = tuple(
            torch.cat([F.pad(part, (0, total - part.shape[-1])) for part in parts], dim=2) for parts in layers
        )
    return last
