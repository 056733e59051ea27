"""The launchers as PyTorch operators with shape functions and gradients, so that torch.compile traces through them.

The namespace carries the kernel's name and version. Loading a second copy of the same version (bundled and from the
Hub, say) finds the operators registered and uses them.
"""

import torch

from . import launch

NAMESPACE = "hf_ext_mxfp4_gemm_1"


def _quantize(x: torch.Tensor, rule: str, macro: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return launch.quantize(x, rule, macro)


def _quantize_fake(x, rule, macro):
    m, k = x.shape
    macros = -(-k // macro) if macro else 0
    return tuple(x.new_empty((m, size), dtype=torch.uint8) for size in (k // 2, k // 32, macros))


def _dequantize(
    packed: torch.Tensor, scale: torch.Tensor, macro_bytes: torch.Tensor | None, macro: int, dtype: torch.dtype
) -> torch.Tensor:
    return launch.dequantize(packed, scale, macro_bytes, macro, dtype)


def _dequantize_fake(packed, scale, macro_bytes, macro, dtype):
    return packed.new_empty((packed.shape[0], 2 * packed.shape[1]), dtype=dtype)


def _gemm(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    macro_bytes: torch.Tensor | None,
    bias: torch.Tensor | None,
    macro: int,
) -> torch.Tensor:
    return launch.gemm(x, packed, scale, macro_bytes, bias, macro)


def _gemm_w4a4(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    macro_bytes: torch.Tensor | None,
    bias: torch.Tensor | None,
    macro: int,
    rule: str,
    x_macro: int,
) -> torch.Tensor:
    return launch.gemm_w4a4(x, packed, scale, macro_bytes, bias, macro, rule, x_macro)


def _gemm_fake(x, packed, *_):
    return x.new_empty((x.shape[0], packed.shape[0]))


def _setup_context(ctx, inputs, output):
    _, packed, scale, macro_bytes, bias, macro = inputs[:6]
    ctx.save_for_backward(packed, scale, macro_bytes)
    ctx.macro = macro
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.inputs = len(inputs)


def _backward(ctx, grad):
    """Gradients to x (straight through the rounding of activations, if any) and to bias; none to anything packed."""
    packed, scale, macro_bytes = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        operator = getattr(torch.ops, NAMESPACE).dequantize
        grad_x = grad @ operator(packed, scale, macro_bytes, ctx.macro, grad.dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
        grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return grad_x, None, None, None, grad_bias, *([None] * (ctx.inputs - 5))


_GEMM = "Tensor x, Tensor packed, Tensor scale, Tensor? macro_bytes, Tensor? bias, int macro"


def _operator(name, function, schema, fake, backward=None):
    """Register ``NAMESPACE::name`` unless it is there, and return it."""
    namespace = getattr(torch.ops, NAMESPACE)
    if not hasattr(namespace, name):
        operator = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        if backward is not None:
            operator.register_autograd(backward, setup_context=_setup_context)
    return getattr(namespace, name).default


quantize = _operator(
    "quantize", _quantize, "(Tensor x, str rule, int macro) -> (Tensor, Tensor, Tensor)", _quantize_fake
)
dequantize = _operator(
    "dequantize",
    _dequantize,
    "(Tensor packed, Tensor scale, Tensor? macro_bytes, int macro, ScalarType dtype) -> Tensor",
    _dequantize_fake,
)
gemm = _operator("gemm", _gemm, f"({_GEMM}) -> Tensor", _gemm_fake, _backward)
gemm_w4a4 = _operator("gemm_w4a4", _gemm_w4a4, f"({_GEMM}, str rule, int x_macro) -> Tensor", _gemm_fake, _backward)
