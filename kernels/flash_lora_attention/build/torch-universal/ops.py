"""The launcher as a PyTorch operator with a shape function, so that torch.compile traces through it. Forward only.

The namespace carries the kernel's name and version. Loading a second copy of the same version (bundled and from the
Hub, say) finds the operator registered and uses it.
"""

import torch

from . import launch

NAMESPACE = "hf_ext_flash_lora_attention_1"

_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? u_k, Tensor? u_v, Tensor? b_k, Tensor? b_v, Tensor? cos, "
    "Tensor? sin, float scale, float lora_scale_k, float lora_scale_v, bool causal, Tensor? kv_start, int? window) "
    "-> Tensor"
)


def _operator(name, function, schema, fake):
    """Register ``NAMESPACE::name`` unless it is there, and return it."""
    namespace = getattr(torch.ops, NAMESPACE)
    if not hasattr(namespace, name):
        operator = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
    return getattr(namespace, name).default


flash_lora_attention = _operator(
    "flash_lora_attention", launch.flash_lora_attention, _SCHEMA, lambda query, *_: launch.new_output(query)
)
