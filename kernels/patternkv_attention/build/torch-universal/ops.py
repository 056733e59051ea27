"""The launcher as a PyTorch operator with a shape function, so that torch.compile traces through it. Forward only.

The namespace carries the kernel's name and version. Loading a second copy of the same version (bundled and from the
Hub, say) finds the operator registered and uses it.
"""

import torch

from . import launch

NAMESPACE = "hf_ext_patternkv_attention_1"

_TENSORS = (
    "query, key_codes, key_scale, key_zero, key_ids, key_bank, "
    "value_codes, value_scale, value_zero, value_ids, value_bank, dense_key, dense_value"
)
_SCHEMA = (
    f"({', '.join(f'Tensor {name}' for name in _TENSORS.split(', '))}, int key_bits, int value_bits, int group_size, "
    "int value_group_size, float scaling, float? softcap, Tensor? lengths, Tensor? mask) -> (Tensor, Tensor)"
)


def _decode_attention_fake(query, *_):
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        query.shape[:2], dtype=torch.float32
    )


def _operator(name, function, schema, fake):
    """Register ``NAMESPACE::name`` unless it is there, and return it."""
    namespace = getattr(torch.ops, NAMESPACE)
    if not hasattr(namespace, name):
        operator = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
    return getattr(namespace, name).default


decode_attention = _operator("decode_attention", launch.decode_attention, _SCHEMA, _decode_attention_fake)
