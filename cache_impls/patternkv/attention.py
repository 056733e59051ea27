"""The attention implementation "patternkv": a decode step attends to packed states without dequantizing them."""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_ext.kernel_lookup import interpreter_enabled, load_kernel

__all__ = ["PackedKV", "packed_attention", "register"]

NAME = "patternkv"
KERNEL = "patternkv_attention"


class PackedKV:
    """What `PatternKVLayer.update` returns in place of keys and of values, for the attention function "patternkv".

    It is a snapshot: the packed tensors of the layer, its sinks and tail in one dense part, and where the columns of a
    mask lie in them. It is no tensor; whatever treats it as one gets an error that says what to do.
    """

    def __init__(self, layer: Any):
        longest = max(layer.packed)
        sinks, tail = layer.config.sink_length, layer.keys.shape[2]
        self.keys, self.values = layer.key_states.view(longest), layer.value_states.view(longest)
        self.dense_keys = torch.cat([layer.sink_keys, layer.keys], dim=2)
        self.dense_values = torch.cat([layer.sink_values, layer.values], dim=2)
        self.bits = layer.key_states.bits, layer.value_states.bits
        self.groups = layer.key_states.group, layer.value_states.group
        even = not any(layer.start) and len(set(layer.packed)) == 1 and sinks + longest + tail == layer.seen
        device = layer.keys.device
        self.lengths = None if even else torch.tensor(layer.packed, dtype=torch.int32, device=device)
        self._even = even
        self._geometry = (list(layer.start), list(layer.packed), sinks, longest, tail, layer.seen)

    def take_banks(self, layer: Any) -> None:
        """Show the banks as they are now.

        A flush that follows writes ids of new patterns behind the tokens in use of a shorter row, into the very buffer
        that this object shows. They are masked, but whoever looks them up must find a row of the bank.
        """
        self.keys = self.keys._replace(bank=layer.key_states.bank)
        self.values = self.values._replace(bank=layer.value_states.bank)

    def visible(self, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
        """Visibility of packed and dense tokens, bool [B, P + E], from a mask over columns [B, 1, 1, seen] or None."""
        start, packed, sinks, longest, tail, seen = self._geometry
        if attention_mask is not None:
            if attention_mask.ndim != 4 or attention_mask.shape[1] != 1:
                raise ValueError(
                    'the attention implementation "patternkv" takes masks [rows, 1, queries, columns], one for all '
                    f"heads, and got {list(attention_mask.shape)}"
                )
            attention_mask = _visible(attention_mask)[:, 0, -1, :seen]
        if self._even:
            # Sinks are the first columns, but stand behind the packed tokens here.
            if attention_mask is None:
                return None
            return torch.cat(
                [attention_mask[:, sinks : sinks + longest], attention_mask[:, :sinks], attention_mask[:, -tail:]], 1
            )
        device = self.keys.codes.device
        first = torch.tensor(start, device=device)[:, None]
        length = torch.tensor(packed, device=device)[:, None]
        token = torch.arange(longest, device=device)[None]
        column = torch.cat(
            [
                first + sinks + token,
                first + torch.arange(sinks, device=device)[None],
                (seen - tail + torch.arange(tail, device=device))[None].expand(len(start), -1),
            ],
            dim=1,
        )
        in_use = torch.cat(
            [
                token < length,
                (length > 0).expand(-1, sinks),
                column[:, longest + sinks :] >= first + torch.where(length > 0, sinks + length, 0),
            ],
            dim=1,
        )
        if attention_mask is None:
            return in_use
        return in_use & attention_mask.expand(len(start), -1).gather(1, column.clamp(max=seen - 1))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that copy and pickle look for
            raise AttributeError(name)
        raise TypeError(_NO_TENSOR.format(use=f"its `{name}`"))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Refuse torch functions."""
        raise TypeError(_NO_TENSOR.format(use=f"`{getattr(function, '__name__', function)}`"))


_NO_TENSOR = (
    "packed keys and values are no tensors, and {use} was asked of them: call "
    'model.set_attn_implementation("patternkv") if another one is set; for a model that works on them before it '
    "attends, build the cache with PatternKVConfig(return_packed=False)"
)


def _refuse(name: str) -> Any:
    def operator(self, *args):
        raise TypeError(_NO_TENSOR.format(use=f"`{name}`"))

    return operator


# Python looks operators up on the class, past `__getattr__`.
for _operator in "getitem len iter neg matmul rmatmul add radd sub rsub mul rmul truediv".split():
    setattr(PackedKV, f"__{_operator}__", _refuse(f"__{_operator}__"))


def _visible(mask: torch.Tensor) -> torch.Tensor:
    """A mask as booleans. An additive one may only hold zeros and the most negative numbers."""
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not (visible | (mask <= torch.finfo(mask.dtype).min / 2)).all():
        raise ValueError(
            'the attention implementation "patternkv" takes masks that show or hide, and this one adds a bias; use '
            'attn_implementation="sdpa"'
        )
    return visible


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | PackedKV,
    value: torch.Tensor | PackedKV,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers: over packed states for one query token, SDPA otherwise.

    Args:
        module: The attention layer.
        query: [B, Hq, T, D].
        key, value: `PackedKV`, or tensors [B, Hk, S, D].
        attention_mask: bool [B, 1, T, S] or None.
        scaling: Of the logits. Default: D ** -0.5.
        dropout: Only in plain attention, without packed states, softcap and s_aux.
        softcap, s_aux: Cap of the logits, and one extra logit per head that takes weight and has no value.

    Returns:
        [B, T, Hq, D], and None.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not isinstance(key, PackedKV):
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        _check_dropout(dropout)
        return _dense_attention(query, key, value, attention_mask, scaling, softcap, s_aux), None
    _check_dropout(dropout)
    kernel = _kernel(query.device.type)
    output, lse = kernel.decode_attention(
        query[:, :, 0],
        *key.keys,
        *key.values,
        key.dense_keys,
        key.dense_values,
        key_bits=key.bits[0],
        value_bits=key.bits[1],
        group_size=key.groups[0],
        value_group_size=key.groups[1],
        scaling=scaling,
        softcap=softcap,
        lengths=key.lengths,
        mask=key.visible(attention_mask),
    )
    if s_aux is not None:
        output = output * torch.sigmoid(lse - s_aux.float().view(1, -1))[..., None].to(output.dtype)
    return output[:, None], None


def _check_dropout(dropout: float) -> None:
    if dropout:
        raise ValueError(
            f'the attention implementation "patternkv" has no dropout ({dropout}) over packed states, softcap or '
            "s_aux: call model.eval()"
        )


def _dense_attention(query, key, value, mask, scaling: float, softcap: float | None, s_aux) -> torch.Tensor:
    """Attention with what SDPA lacks, scores materialised: [B, T, Hq, D]."""
    groups = query.shape[1] // key.shape[1]
    logits = query.float() @ key.float().repeat_interleave(groups, dim=1).transpose(-1, -2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    queries, keys = logits.shape[-2:]
    if mask is None:  # causal, and left out by the mask function for that reason
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    logits = logits.masked_fill(~_visible(mask)[..., :keys], torch.finfo(torch.float32).min)
    if s_aux is not None:
        extra = s_aux.float().view(1, -1, 1, 1).expand(logits.shape[0], -1, queries, 1)
        logits = torch.cat([logits, extra], dim=-1)
    weights = logits.softmax(-1)[..., :keys]
    return (weights @ value.float().repeat_interleave(groups, dim=1)).transpose(1, 2).to(query.dtype).contiguous()


def _kernel(device: str):
    # A machine with a GPU may still run a model on its CPU, where Triton cannot.
    return load_kernel(KERNEL, "reference" if device == "cpu" and not interpreter_enabled() else "auto")


def register() -> None:
    """Make "patternkv" an attention implementation of transformers, with the masks of "sdpa"."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


register()
