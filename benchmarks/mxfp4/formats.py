"""The formats that the MXFP4 benchmark compares, and how a dense model is put into each.

Our formats go through the product, `hf_ext.quantize_model`. A peer's weights are quantised and expanded by its own
package; NVFP4 is the reference arithmetic of `quantizers.mxfp4.numerics` (which a test compares with torchao's).
"""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_ext import MXFP4Config, quantize_model
from hf_ext.quantizers.mxfp4 import MXFP4Linear, numerics
from hf_ext.quantizers.mxfp4.linear import PackedLayout

__all__ = ["FORMATS", "MAIN", "Format", "Prepared", "packed_bits", "prepare", "set_layout"]

OCP, NVFP4, DENSE = "ocp 32", "nvfp4", "fp32"
_RULE = {"macro_block_size": None, "activation_macro_block_size": None}


@dataclass(frozen=True, eq=False)
class Format:
    """One row of the comparison.

    Attributes:
        name: What rows call it.
        group: `"dense"`, `"baseline"`, `"paper"`, `"ours"` or `"peer"`; decides the colour in plots.
        config: Arguments of `MXFP4Config` for our formats, None for the others.
        activations: How inputs are rounded, one measurement each: `"none"` (W4A16), `"macro 64"` (W4A4 by our config,
            with that macro block), `"own"` (W4A4 in the format of the weights), `"dynamic 128"` (W4A4 with a search
            for activations, which is too slow to be offered as an option).
        calibrated: Whether the search weighs input channels, calibrated on another domain.
        packages: Packages whose versions the row records.
    """

    name: str
    group: str
    config: dict[str, Any] | None = None
    activations: tuple[str, ...] = ("none",)
    calibrated: bool = False
    packages: tuple[str, ...] = field(default=())


def _ours(name: str, group: str, activations: str, calibrated: bool = False, **config: Any) -> Format:
    return Format(name, group, config, tuple(activations.split(", ")), calibrated)


_ALL = (
    Format(DENSE, "dense"),
    _ours(OCP, "baseline", "none, own", scale_rule="ocp", **_RULE),
    Format(NVFP4, "baseline", activations=("none", "own")),
    Format("bf16", "dense"),
    _ours("oas 32", "paper", "none, own", **_RULE),
    _ours("oas + mbs static 32/128", "paper", "none, macro 128, macro 64, macro 32"),
    _ours("oas + mbs dynamic 32/128", "paper", "none, macro 128, macro 64, dynamic 128", weight_search="dynamic"),
    _ours("oas + mbs static 16/128", "paper", "none, macro 128", block_size=16),
    _ours("oas + mbs dynamic 16/128", "paper", "none, macro 128", block_size=16, weight_search="dynamic"),
    _ours("weighted 32/128", "ours", "none, macro 128, macro 64, macro 32", True),
    _ours("weighted + exponents 32/128", "ours", "none, macro 64, macro 32", True, search_exponents=True),
    _ours(
        "weighted + exponents 32/64",
        "ours",
        "none, macro 64, macro 32",
        True,
        search_exponents=True,
        macro_block_size=64,
    ),
    _ours(
        "weighted + exponents 32/32",
        "ours",
        "none, macro 64, macro 32",
        True,
        search_exponents=True,
        macro_block_size=32,
    ),
    Format("torchao mxfp4 (rceil)", "peer", activations=("none", "own"), packages=("torchao",)),
    Format("torchao mxfp4 (even)", "peer", packages=("torchao",)),
    Format("torchao mxfp4 (kernel)", "peer", packages=("torchao",)),
    Format("compressed-tensors mxfp4", "peer", packages=("compressed-tensors",)),
    Format("bitsandbytes nf4", "peer", packages=("bitsandbytes",)),
    Format("hqq 4 bit, groups of 64", "peer", packages=("hqq",)),
    Format("quanto int4, groups of 128", "peer", packages=("optimum-quanto",)),
    Format("transformers Mxfp4Config", "peer", packages=("kernels",)),
    Format("transformers NVFP4Config", "peer", packages=("kernels",)),
    _ours("weighted 16/128", "ours", "none, macro 128", True, block_size=16),
    _ours("weighted 32/128, 64 slots", "ours", "none", True, search_slots=64),
    _ours("ceil 32", "baseline", "none, own", scale_rule="ceil", **_RULE),
    _ours("even 32", "baseline", "none, own", scale_rule="even", **_RULE),
    _ours("mse 32", "baseline", "none, own", scale_rule="mse", **_RULE),
    _ours("ocp 16", "baseline", "none, own", scale_rule="ocp", block_size=16, **_RULE),
    _ours("oas 16", "paper", "none, own", block_size=16, **_RULE),
    _ours("ocp + mbs static 32/128", "paper", "none, macro 128", scale_rule="ocp"),
    _ours("oas + mbs static 32/64", "paper", "none, macro 64", macro_block_size=64),
    _ours("oas + mbs dynamic 32/64", "paper", "none, macro 64", macro_block_size=64, weight_search="dynamic"),
    _ours("oas + mbs static 32/32", "paper", "none, macro 32", macro_block_size=32),
    _ours("oas + mbs dynamic 32/32", "paper", "none, macro 32", macro_block_size=32, weight_search="dynamic"),
)
FORMATS: dict[str, Format] = {entry.name: entry for entry in _ALL}
MAIN = (
    DENSE,
    OCP,
    NVFP4,
    "bf16",
    "oas 32",
    "oas + mbs static 32/128",
    "oas + mbs dynamic 32/128",
    "oas + mbs static 16/128",
    "oas + mbs dynamic 16/128",
    "weighted 32/128",
    "weighted + exponents 32/128",
    "weighted + exponents 32/64",
)


@dataclass
class Prepared:
    """A model in one format, ready to be measured.

    Attributes:
        model: The model.
        bits_per_weight: Counted from what is stored for the converted layers.
        relative_mse: `|W - W^|^2 / |W|^2` over the converted layers.
        timed: Whether a forward pass runs the format's own path, so that its time means something.
        note: A remark for the row.
        hooks: Removed when the measurement is over.
        seconds: It took our product to quantise the model (None for others).
    """

    model: nn.Module
    bits_per_weight: float
    relative_mse: float
    timed: bool
    note: str = ""
    hooks: list[Any] = field(default_factory=list)
    seconds: float | None = None


def _linear_names(dense: nn.Module) -> list[str]:
    """The layers that every format converts: all but the output head, which shares its weight with the embedding."""
    return [name for name, module in dense.named_modules() if type(module) is nn.Linear and "lm_head" not in name]


@contextlib.contextmanager
def prepare(
    dense: nn.Module, entry: Format, activation: str, calibration: torch.Tensor, folder: str
) -> Iterator[Prepared]:
    """A copy of `dense` in a format; `dense` is left as it is.

    Args:
        dense: The model in float32.
        entry: The format.
        activation: One of `entry.activations`.
        calibration: Token ids `[B, T]` for the calibrated formats.
        folder: The dense model's folder, for peers that only quantise while they load.
    """
    if entry.name == DENSE:
        yield Prepared(dense, 32.0, 0.0, timed=True)
        return
    names = _linear_names(dense)
    if entry.config is not None:
        prepared = _prepare_ours(dense, names, entry, activation, calibration)
        try:
            yield prepared
        finally:
            for handle in prepared.hooks:
                handle.remove()
        return
    if entry.name.startswith("transformers"):
        yield _load_by_transformers(dense, entry.name, folder)
        return
    if entry.name == "torchao mxfp4 (kernel)":
        yield _torchao_kernel(dense, names)
        return
    model = copy.deepcopy(dense)
    if entry.name == "bf16":
        original = {name: model.get_submodule(name).weight.detach().clone() for name in names}
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
        error = _relative_mse((original[name], model.get_submodule(name).weight) for name in names)
        yield Prepared(model, 16.0, error, timed=False, note="weights rounded to bf16, computed in float32")
        return
    rounding = _nvfp4 if entry.name == NVFP4 else _PEERS[entry.name]
    rule = _SAME_RULE.get(entry.name)
    bits = count = signal = noise = 0.0
    equal = True
    for name in names:
        layer = model.get_submodule(name)
        weight, stored = rounding(layer.weight.detach())
        noise += (weight.float() - layer.weight.detach()).square().sum(dtype=torch.float64).item()
        signal += layer.weight.detach().square().sum(dtype=torch.float64).item()
        if rule is not None:
            equal &= torch.equal(
                weight.float(), numerics.fake_quantize(layer.weight.detach(), scale_rule=rule, **_PLAIN)
            )
        bits, count = bits + stored, count + layer.weight.numel()
        layer.weight = nn.Parameter(weight.float(), requires_grad=False)
        if activation == "own":
            layer.register_forward_pre_hook(lambda _, args: (_by_sample(rounding, args[0]),))
    note = "expanded weights in dense layers"
    if rule is not None:
        note += f"; all weights {'equal' if equal else 'do not equal'} those of our rule {rule} bit for bit"
    yield Prepared(model, bits / count, noise / signal, timed=False, note=note)


class _LastPacked:
    """The model packed last: the treatments of activations of one format share their weights."""

    def __init__(self) -> None:
        self.key: Any = None
        self.model: nn.Module | None = None
        self.relative_mse = 0.0
        self.seconds = 0.0


_last = _LastPacked()


def _prepare_ours(
    dense: nn.Module, names: list[str], entry: Format, activation: str, calibration: torch.Tensor
) -> Prepared:
    key = (id(dense), entry)
    if _last.key != key:
        _last.key = _last.model = None
        config = MXFP4Config(**entry.config)
        model = copy.deepcopy(dense)
        start = time.perf_counter()
        quantize_model(model, config, calibration if entry.calibrated else None)
        _last.seconds = time.perf_counter() - start
        converted = [name for name, module in model.named_modules() if isinstance(module, MXFP4Linear)]
        if converted != names:
            raise RuntimeError(f"{entry.name}: converted {len(converted)} layers, expected {len(names)}")
        _last.relative_mse = _relative_mse(
            (dense.get_submodule(name).weight, model.get_submodule(name).dequantize()) for name in names
        )
        _last.key, _last.model = key, model
    kind, _, size = activation.partition(" ")
    config = MXFP4Config(**entry.config)
    if kind in ("own", "macro"):
        config.activation, config.activation_macro_block_size = "mxfp4", int(size) if size else None
        config.post_init()
    set_layout(_last.model, config)
    note, hooks = "", []
    if kind == "dynamic":
        note = "activations by numerics.fake_quantize with the dynamic search"

        def hook(_: nn.Module, args: tuple) -> tuple:
            return (numerics.fake_quantize(args[0], search="dynamic", macro_block_size=int(size)),)

        hooks = [_last.model.get_submodule(name).register_forward_pre_hook(hook) for name in names]
    timed = kind != "dynamic"
    return Prepared(_last.model, packed_bits(_last.model), _last.relative_mse, timed, note, hooks, _last.seconds)


def set_layout(model: nn.Module, config: MXFP4Config) -> None:
    """Let the packed layers of a model treat their inputs as `config` says, without packing the weights again."""
    for module in model.modules():
        if isinstance(module, MXFP4Linear):
            module.layout = PackedLayout(config)


def packed_bits(model: nn.Module) -> float:
    """Stored bits a weight of a model's `MXFP4Linear` layers, counted from their tensors."""
    layers = [module for module in model.modules() if isinstance(module, MXFP4Linear)]
    stored = sum(
        tensor.numel() * tensor.element_size() * 8
        for layer in layers
        for tensor in (layer.weight_packed, layer.weight_scale, layer.weight_mbs)
        if tensor is not None
    )
    return stored / sum(layer.in_features * layer.out_features for layer in layers)


def _relative_mse(pairs: Any) -> float:
    noise = signal = 0.0
    for weight, rounded in pairs:
        weight = weight.detach()
        noise += (rounded.float() - weight).square().sum(dtype=torch.float64).item()
        signal += weight.square().sum(dtype=torch.float64).item()
    return noise / signal


def _by_sample(rounding: Callable, x: torch.Tensor) -> torch.Tensor:
    # One sequence at a time: NVFP4's scale of the whole tensor must not depend on what else is in the batch.
    return torch.stack([rounding(sample.contiguous())[0].float() for sample in x])


# ---------------------------------------------------------------------------------------------------------------------
# Roundings: a float32 matrix to its rounded self and the number of bits that are stored
# ---------------------------------------------------------------------------------------------------------------------


def _nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    return numerics.nvfp4_fake_quantize(weight), weight.numel() // 16 * (16 * 4 + 8) + 32


def _bits(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() * 8 for tensor in tensors)


def _torchao(mode: str) -> Callable[[torch.Tensor], tuple[torch.Tensor, int]]:
    def rounding(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

        packed = MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode(mode))
        return packed.dequantize(torch.float32), _bits(packed.qdata, packed.scale)

    return rounding


def _compressed_tensors(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    groups = weight.view(len(weight), -1, 32)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    packed = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return MXFP4PackedCompressor.decompress(dict(packed), scheme)["weight"], _bits(*packed.values())


def _bitsandbytes(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    return dequantize_4bit(packed, state), _bits(packed, state.absmax)


def _hqq(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    from hqq.core.quantize import Quantizer

    packed, meta = Quantizer.quantize(
        weight, nbits=4, group_size=64, axis=1, optimize=True, device="cpu", compute_dtype=torch.float32
    )
    # Scale and zero point are kept in the compute dtype; count them as the float16 that its checkpoints hold.
    bits = _bits(packed) + 16 * (meta["scale"].numel() + meta["zero"].numel())
    return Quantizer.dequantize(packed, meta).view_as(weight), bits


def _quanto(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    from optimum.quanto import MaxOptimizer, qint4, quantize_weight

    group = next(size for size in (128, 64, 32) if weight.shape[1] % size == 0)
    scale, shift = MaxOptimizer()(weight, qtype=qint4, axis=0, group_size=group)
    packed = quantize_weight(weight, qtype=qint4, axis=0, scale=scale, shift=shift, group_size=group)
    # Scale and shift as the 16-bit values of a half-precision model.
    return packed.dequantize(), 4 * weight.numel() + 16 * (scale.numel() + shift.numel())


_PEERS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, int]]] = {
    "torchao mxfp4 (rceil)": _torchao("rceil"),
    "torchao mxfp4 (even)": _torchao("even"),
    "compressed-tensors mxfp4": _compressed_tensors,
    "bitsandbytes nf4": _bitsandbytes,
    "hqq 4 bit, groups of 64": _hqq,
    "quanto int4, groups of 128": _quanto,
}


_SAME_RULE = {
    "torchao mxfp4 (rceil)": "ceil",
    "torchao mxfp4 (even)": "even",
    "compressed-tensors mxfp4": "even",
}
_PLAIN = {"macro_block_size": None}


# ---------------------------------------------------------------------------------------------------------------------
# Peers that are tried as their users would call them
# ---------------------------------------------------------------------------------------------------------------------


def _load_by_transformers(dense: nn.Module, name: str, folder: str) -> Prepared:
    import transformers

    config = getattr(transformers, name.split()[1])()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, local_files_only=True
    )
    untouched = sum(type(model.get_submodule(layer)) is nn.Linear for layer in _linear_names(dense))
    if untouched:
        raise RuntimeError(f"loaded without an error, but {untouched} of {untouched} linear layers are still dense")
    return Prepared(model, float("nan"), 0.0, timed=True)


def _torchao_kernel(dense: nn.Module, names: list[str]) -> Prepared:
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
    from torchao.quantization import quantize_

    kind = torch.float4_e2m1fn_x2
    model = copy.deepcopy(dense).to(torch.bfloat16)
    config = MXDynamicActivationMXWeightConfig(activation_dtype=kind, weight_dtype=kind)
    quantize_(model, config, lambda module, name: name in names)
    model(input_ids=torch.zeros(1, 32, dtype=torch.int64))
    error = _relative_mse((dense.get_submodule(n).weight, model.get_submodule(n).weight.dequantize()) for n in names)
    return Prepared(model, 4.25, error, timed=True, note="W4A4 by torchao's own kernels")
