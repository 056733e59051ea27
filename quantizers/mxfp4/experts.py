"""Mixture-of-experts layers on packed MXFP4 weights.

transformers keeps the experts of a layer as fused parameters ``[experts, out, in]`` and lets one function per
implementation compute them from a handful of flags (`transformers.integrations.moe`). `packed_experts_forward` is such
a function for packed weights: it multiplies the tokens of each expert that is hit by that expert's packed rows.
"""

import torch
from torch import nn

from .configuration import MXFP4Config
from .linear import PackedLayout, _PackedMatmul, packed_shapes

__all__ = ["PackedExperts", "fused_names", "is_fused_experts", "make_packed_experts", "packed_parameters"]

_FLAGS = ("is_transposed", "is_concatenated", "has_gate", "has_bias", "has_post_expert_norm")


def is_fused_experts(module: nn.Module) -> bool:
    """Whether a module holds the fused, floating-point weights of many experts."""
    return any(
        parameter.dim() == 3 and parameter.is_floating_point()
        for name, parameter in module.named_parameters(recurse=False)
        if name.endswith("_proj")
    )


def fused_names(module: nn.Module) -> tuple[str, str]:
    """Names of the two fused weights of an experts module."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def packed_parameters(module: nn.Module, config: MXFP4Config) -> tuple[dict[str, torch.Size], str | None]:
    """The fused parameters that would be packed, and why they cannot be (None if they can)."""
    if not all(hasattr(module, flag) for flag in _FLAGS):
        return {}, "fused experts that do not use transformers' experts interface"
    if module.is_transposed:
        return {}, "fused experts stored with their inputs on the second axis (is_transposed) are not supported"
    shapes = {name: getattr(module, name).shape for name in fused_names(module)}
    for name, shape in shapes.items():
        if shape[-1] % config.block_size:
            return {}, f"{shape[-1]} inputs of {name} are not a multiple of block_size={config.block_size}"
    return shapes, None


class PackedExperts:
    """Mixed into the class of an experts module whose weights are packed.

    For each fused weight, ``gate_up_proj`` say, the module has frozen uint8 parameters ``gate_up_proj_packed``,
    ``gate_up_proj_scale`` and ``gate_up_proj_mbs`` (or None), shaped as in a linear layer with the experts in front.
    Parameters all, because a conversion of transformers (Qwen3-VL-MoE's) looks the tensors that it loads up as such.
    """

    layout: PackedLayout
    packed_names: tuple[str, ...]

    def __reduce__(self):
        return _new_packed, (self.dense_class,), self.__dict__  # pickle cannot find a class that was made at run time

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the experts implementations of transformers: ``[tokens, hidden]`` to the same, summed over top k."""
        return packed_experts_forward(self, hidden_states, top_k_index, top_k_weights)

    def multiply(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        """``x @ W[expert].T`` (plus the expert's bias) for the fused weight ``name``."""
        macro = getattr(self, f"{name}_mbs")
        packed = (
            getattr(self, f"{name}_packed")[expert],
            getattr(self, f"{name}_scale")[expert],
            None if macro is None else macro[expert],
        )
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        if torch.is_grad_enabled():
            return _PackedMatmul.apply(x, *packed, bias, self.layout)
        return self.layout.matmul(x, *packed, bias)

    def dequantize(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dense fused weight ``[experts, out, in]``."""
        parts = (getattr(self, f"{name}_{suffix}") for suffix in ("packed", "scale", "mbs"))
        return self.layout.dequantize(*parts, dtype)

    def restore_dense(self, dtype: torch.dtype) -> None:
        """Become the class that the module was before, with dense weights of ``dtype``."""
        dense = {name: self.dequantize(name, dtype) for name in self.packed_names}
        for name in self.packed_names:
            for suffix in ("packed", "scale", "mbs"):
                delattr(self, f"{name}_{suffix}")
        self.__class__ = self.dense_class
        for name, weight in dense.items():
            setattr(self, name, nn.Parameter(weight))


def packed_experts_forward(
    self: PackedExperts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Sum over each token's experts of ``weight * expert(token)``, expert by expert; never a dense fused weight.

    Args:
        hidden_states: ``[tokens, hidden]``.
        top_k_index: int ``[tokens, k]``; an index of ``num_experts`` (an expert of another process) counts as nothing.
        top_k_weights: ``[tokens, k]``.
    """
    out = torch.zeros_like(hidden_states, dtype=torch.promote_types(hidden_states.dtype, torch.float32))
    up, down = fused_names(self)
    for expert in torch.unique(top_k_index).tolist():
        if expert >= self.num_experts:
            continue
        token, slot = torch.where(top_k_index == expert)
        inner = self.multiply(up, expert, hidden_states[token])
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        inner = self.multiply(down, expert, inner)
        if self.has_post_expert_norm:
            inner = self.post_expert_norm(inner)
        out.index_add_(0, token, (inner * top_k_weights[token, slot, None]).to(out.dtype))
    return out.to(hidden_states.dtype)


_classes: dict[type, type] = {}


def _packed_class(base: type) -> type:
    if base not in _classes:
        _classes[base] = type(f"MXFP4{base.__name__}", (PackedExperts, base), {"dense_class": base})
    return _classes[base]


def _new_packed(base: type) -> nn.Module:
    cls = _packed_class(base)
    return cls.__new__(cls)


def make_packed_experts(module: nn.Module, config: MXFP4Config) -> None:
    """Turn an experts module into one with packed weights, on the meta device, in place; its dense weights go."""
    shapes, _ = packed_parameters(module, config)
    for name, (experts, rows, columns) in shapes.items():
        tensors = {
            suffix: torch.zeros((experts, *shape), dtype=torch.uint8, device="meta")
            for suffix, shape in packed_shapes(rows, columns, config).items()
        }
        delattr(module, name)
        set_packed_expert_tensors(module, name, tensors)
    module.layout = PackedLayout(config)
    module.packed_names = tuple(shapes)
    module.__class__ = _packed_class(type(module))


def set_packed_expert_tensors(module: nn.Module, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Register (or replace) the packed tensors of one fused weight."""
    for suffix in ("packed", "scale", "mbs"):
        tensor = tensors.get(suffix)
        module.register_parameter(
            f"{name}_{suffix}", None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        )
