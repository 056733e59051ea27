"""A linear layer on packed MXFP4 weights."""

import os
from dataclasses import replace
from types import ModuleType

import torch
from torch import nn

from hf_ext.kernel_lookup import ENVIRONMENT_VARIABLE, load_kernel

from . import numerics, reference
from .configuration import MXFP4Config

__all__ = ["KERNEL_BLOCK_SIZE", "MXFP4Linear", "PackedLayout", "packed_shapes"]

KERNEL_BLOCK_SIZE = 32  # the only block that hardware and the Triton kernels know
_KERNEL = "mxfp4_gemm"
_TRITON_DEVICES = ("cuda", "xpu")  # ROCm calls itself cuda
_loaded: dict[tuple[str, bool, str], ModuleType] = {}


@torch.compiler.assume_constant_result
def _resolve(source: str, device_type: str) -> tuple[str, bool, str]:
    """Key in `_loaded` of the module for a device: `load_kernel`, remembered.

    Tensors of a CPU are left to the reference unless a source is forced. A function apart, which returns a key and not
    the module, so that torch.compile takes it as a constant.
    """
    on_triton = device_type in _TRITON_DEVICES
    forced = os.environ.get(ENVIRONMENT_VARIABLE, "")
    key = (source, on_triton, forced)
    if key not in _loaded:
        automatic = source == "auto" and not on_triton and not forced
        _loaded[key] = load_kernel(_KERNEL, source="reference" if automatic else source)
    return key


def packed_shapes(rows: int, columns: int, config: MXFP4Config) -> dict[str, tuple[int, int]]:
    """Shapes of the uint8 tensors that hold a ``[rows, columns]`` weight, by the suffix of their name."""
    shapes = {"packed": (rows, columns // 2), "scale": (rows, columns // config.block_size)}
    if config.macro_block_size is not None:
        shapes["mbs"] = (rows, -(-columns // config.macro_block_size))
    return shapes


class PackedLayout:
    """How to read and multiply packed weights of one configuration: the block sizes, the rule, and which kernel."""

    def __init__(self, config: MXFP4Config):
        self.config = config
        self.block_size = config.block_size
        self.macro_block_size = config.macro_block_size or 128  # unused without macro bytes
        self.activation = config.activation
        self.scale_rule = config.scale_rule
        self.activation_macro_block_size = config.activation_macro_block_size
        self.compute_dtype = config.torch_compute_dtype
        self.kernel = config.kernel

    def operations(self, device: torch.device) -> ModuleType:
        """The kernel, or the PyTorch reference, that multiplies on ``device``.

        Raises:
            ValueError: if a kernel is asked for by name with a layout that it does not have.
        """
        if lacking := self._lacking_in_kernel():
            if self.kernel in ("bundled", "hub"):
                raise ValueError(f"kernel={self.kernel!r} does not have {lacking}; use kernel='reference' or 'auto'")
            return reference
        return _loaded[_resolve(self.kernel, device.type)]

    def _lacking_in_kernel(self) -> str | None:
        if self.block_size != KERNEL_BLOCK_SIZE:
            return f"block_size={self.block_size}"
        if self.activation and self.scale_rule == "mse":
            return "scale_rule='mse' for activations"
        if self.activation and self.activation_macro_block_size == 32:
            return "activation_macro_block_size=32"
        return None

    @property
    def sizes(self) -> dict[str, int]:
        """The keyword arguments that every operation takes."""
        return {"block_size": self.block_size, "macro_block_size": self.macro_block_size}

    def matmul(self, x, packed, scale, macro, bias):
        """``x @ W.T + bias`` without gradients to anything packed; result in the dtype of ``x``."""
        operations = self.operations(x.device)
        dtype = x.dtype
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
            bias = None if bias is None else bias.to(self.compute_dtype)
        if self.activation is None:
            out = operations.gemm(x, packed, scale, macro, bias, **self.sizes)
        else:
            out = operations.gemm_w4a4(
                x,
                packed,
                scale,
                macro,
                bias,
                **self.sizes,
                scale_rule=self.scale_rule,
                activation_macro_block_size=self.activation_macro_block_size,
            )
        return out.to(dtype)

    def matmul_transposed(self, grad, packed, scale, macro):
        """``grad @ W``, the gradient of `matmul` with respect to its input, one row tile of W at a time."""
        operations = self.operations(grad.device)
        dtype = self.compute_dtype or grad.dtype
        total = None
        for rows in reference.row_tiles(packed):
            tile = None if macro is None else macro[rows]
            weight = operations.dequantize(packed[rows], scale[rows], tile, **self.sizes, dtype=dtype)
            part = grad[..., rows].to(dtype) @ weight
            total = part if total is None else total.add_(part)
        return total.to(grad.dtype)

    def dequantize(self, packed, scale, macro, dtype):
        """The dense weight."""
        return self.operations(packed.device).dequantize(packed, scale, macro, **self.sizes, dtype=dtype)


class _PackedMatmul(torch.autograd.Function):
    """`PackedLayout.matmul` with a gradient to the input: straight through the rounding of activations, none to W.

    Only the packed weight is kept for the backward pass; its tiles are expanded again there.
    """

    @staticmethod
    def forward(ctx, x, packed, scale, macro, bias, layout):
        ctx.save_for_backward(packed, scale, macro)
        ctx.layout = layout
        return layout.matmul(x, packed, scale, macro, bias)

    @staticmethod
    def backward(ctx, grad):
        packed, scale, macro = ctx.saved_tensors
        grad_x = ctx.layout.matmul_transposed(grad, packed, scale, macro) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[4] else None
        return grad_x, None, None, None, grad_bias, None


class MXFP4Linear(nn.Module):
    """`nn.Linear` on a packed weight: 4 bits a value and 8 bits a block and a macro block.

    Attributes:
        weight_packed: frozen uint8 parameter ``[out_features, in_features / 2]``, the even input in the low nibble. A
            parameter and not a buffer because peft looks for a parameter of the layers that it wraps.
        weight_scale: uint8 buffer ``[out_features, in_features / block_size]``.
        weight_mbs: uint8 buffer ``[out_features, ceil(in_features / macro_block_size)]``, or None.
        bias: dense parameter ``[out_features]``, or None.

    Gradients reach the input and the bias, never the weight.

    Args:
        in_features: a multiple of ``config.block_size``.
        out_features: rows of the weight.
        bias: whether there is one.
        config: the layout, rules and kernel.
        device, dtype: of the bias; the packed tensors are always uint8.

    Raises:
        ValueError: if ``in_features`` is not a multiple of the block size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        config: MXFP4Config | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        config = MXFP4Config() if config is None else config
        numerics.check_layout(in_features, config.block_size, config.macro_block_size)
        self.in_features = in_features
        self.out_features = out_features
        self.layout = PackedLayout(config)
        self.source_class: type[nn.Module] = nn.Linear  # what `model.dequantize()` puts back
        shapes = packed_shapes(out_features, in_features, config)
        empty = {name: torch.zeros(shape, dtype=torch.uint8, device=device) for name, shape in shapes.items()}
        self.weight_packed = nn.Parameter(empty["packed"], requires_grad=False)
        self.register_buffer("weight_scale", empty["scale"])
        self.register_buffer("weight_mbs", empty.get("mbs"))
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_weight(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        config: MXFP4Config,
        channel_weights: torch.Tensor | None = None,
    ) -> "MXFP4Linear":
        """Quantise a dense ``[out_features, in_features]`` weight.

        Raises:
            ValueError: if the weight has NaNs or infinities.
        """
        rows, columns = weight.shape
        layer = cls(columns, rows, bias is not None, config, device="meta")
        for name, tensor in pack_weight(weight, config, channel_weights).items():
            layer.set_packed(name, tensor)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        return layer

    def set_packed(self, name: str, tensor: torch.Tensor) -> None:
        """Replace one of the packed tensors, by the suffix ``"packed"``, ``"scale"`` or ``"mbs"``."""
        if name == "packed":
            tensor = nn.Parameter(tensor, requires_grad=False)
        setattr(self, f"weight_{name}", tensor)

    def packed_state(self) -> dict[str, torch.Tensor]:
        """Copies of the packed tensors and of the bias, by attribute name."""
        names = ("weight_packed", "weight_scale", "weight_mbs", "bias")
        return {name: getattr(self, name).detach().clone() for name in names if getattr(self, name) is not None}

    @torch.no_grad()
    def load_packed_state(self, state: dict[str, torch.Tensor]) -> None:
        """Write back what `packed_state` returned."""
        for name, tensor in state.items():
            getattr(self, name).copy_(tensor)

    def pack_(self, weight: torch.Tensor) -> None:
        """Quantise another dense weight into this layer's tensors, in place.

        By the configuration's search; the weighted one is static here, since its statistics are not kept.

        Raises:
            ValueError: if the weight has NaNs or infinities.
        """
        config = self.layout.config
        search = "dynamic" if config.weight_search == "dynamic" else "static"
        packed = pack_weight(weight, replace(config, weight_search=search, channel_stats=None))
        self.load_packed_state({f"weight_{suffix}": tensor for suffix, tensor in packed.items()})

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "weight":
                raise
        raise AttributeError(
            "an MXFP4Linear has no dense `weight`: `dequantize()` gives it. Where the code of a model reads the "
            "weight of this layer itself, add the layer's name to `modules_to_not_convert` (--skip)"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]`` in the dtype of ``x``."""
        packed = (self.weight_packed, self.weight_scale, self.weight_mbs)
        if torch.is_grad_enabled() and (x.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            return _PackedMatmul.apply(x, *packed, self.bias, self.layout)
        return self.layout.matmul(x, *packed, self.bias)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dense weight ``[out_features, in_features]`` that the packed tensors stand for."""
        return self.layout.dequantize(self.weight_packed, self.weight_scale, self.weight_mbs, dtype)

    def extra_repr(self) -> str:
        """Shape and layout, for `print(model)`."""
        macro = None if self.weight_mbs is None else self.layout.macro_block_size
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"block_size={self.layout.block_size}, macro_block_size={macro}, activation={self.layout.activation}"
        )


def add_dense_stub(module: nn.Module, name: str) -> None:
    """Stand an empty tensor where a packed module's dense weight was, until `remove_dense_stub`.

    While it loads, transformers lets each block initialise its children's weights (GPT-2's does so by name) and skips
    those marked as initialised, but they must exist.
    """
    stub = torch.empty(0)
    stub._is_hf_initialized = True
    module.__dict__[name] = stub


def remove_dense_stub(module: nn.Module, name: str) -> None:
    """Undo `add_dense_stub`."""
    module.__dict__.pop(name, None)


def check_weight(weight: torch.Tensor) -> None:
    """Raise ValueError unless a dense weight can be packed: it is there, and its values are finite in float32."""
    if weight.is_meta:
        raise ValueError("the weight is on the meta device: it is offloaded, or was never loaded")
    if weight.dtype == torch.float64:
        weight = weight.to(torch.float32)
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the weight has NaN or infinite values, which MXFP4 cannot hold")


@torch.no_grad()
def pack_weight(
    weight: torch.Tensor, config: MXFP4Config, channel_weights: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Quantise a weight ``[..., N, K]`` by ``config``: uint8 tensors by their suffixes, see `packed_shapes`.

    Args:
        weight: any float dtype.
        config: layout, rule and search.
        channel_weights: mean squares of the K inputs, for the weighted search.

    Raises:
        ValueError: if the weight has NaNs or infinities, in float32 too, or is on the meta device.
    """
    check_weight(weight)
    search = config.resolve_search(channel_weights is not None)
    codes, scale, macro = numerics.quantize(
        weight,
        **config.quantize_arguments,
        search=search,
        channel_weights=channel_weights if search == "weighted" else None,
    )
    packed = {"packed": numerics.pack(codes), "scale": scale}
    return packed if macro is None else packed | {"mbs": macro}
