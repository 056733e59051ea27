"""`MXFP4HfQuantizer`: MXFP4 inside `from_pretrained` and `save_pretrained`.

This module is imported while transformers itself is half imported (see `hf_ext.registration`), so it imports only
`transformers.utils` and `transformers.quantizers` at its top level.
"""

import os
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils import logging

from .configuration import QUANT_METHOD, MXFP4Config
from .experts import fused_names, is_fused_experts, make_packed_experts, packed_parameters
from .linear import MXFP4Linear, add_dense_stub, pack_weight, packed_shapes, remove_dense_stub

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MXFP4HfQuantizer", "register"]

logger = logging.get_logger(__name__)


def register() -> None:
    """Make transformers know the method; does nothing when it does already."""
    if QUANT_METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(QUANT_METHOD)(MXFP4Config)
        auto.register_quantizer(QUANT_METHOD)(MXFP4HfQuantizer)
    if MXFP4Config not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
        # Without this a `quantization_config=MXFP4Config(dequantize=True)` for a packed checkpoint is ignored.
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (MXFP4Config,)


class MXFP4HfQuantizer(HfQuantizer):
    """Quantises linear layers to MXFP4 while a checkpoint loads, and loads and saves packed checkpoints.

    Not for direct use: `from_pretrained` makes it from an `MXFP4Config`.
    """

    requires_calibration = False
    quantization_config: MXFP4Config
    # "gate_up_proj" comes before "up_proj": transformers matches these as patterns and takes the first that fits.
    serialized_names = {
        name: [f"{name}_packed", f"{name}_scale", f"{name}_mbs"]
        for name in ("weight", "gate_up_proj", "up_proj", "down_proj")
    }

    def __init__(self, quantization_config: MXFP4Config, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.channel_stats: dict[str, torch.Tensor] = {}
        self.load_errors: list[str] = []
        if not self.pre_quantized:
            # The caller's object serves other models too; what is resolved for this one is kept in a copy.
            self.quantization_config = MXFP4Config(**quantization_config.__dict__)

    # -- what transformers asks ---------------------------------------------------------------------------------------

    def is_serializable(self) -> bool:
        """Packed tensors are plain uint8 tensors of the state dict."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on the packed weights can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """The layers compile in one graph."""
        return True

    @property
    def quantized_element_size(self) -> float:
        """Bytes a weight."""
        return self.quantization_config.bits_per_weight / 8

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what would fail later: `dequantize=True` without anything to dequantise."""
        if self.quantization_config.dequantize and not self.pre_quantized:
            raise ValueError(
                "`dequantize=True` is for a checkpoint that is packed already; this one is not. Drop it to quantise "
                "the checkpoint, or drop the quantization_config to load it dense."
            )

    def param_needs_quantization(self, model: "PreTrainedModel", param_name: str, **kwargs: Any) -> bool:
        """Whether ``param_name`` is the dense placeholder of a layer that is to be packed."""
        module, name = get_module_from_name(model, param_name)
        if isinstance(module, MXFP4Linear):
            return name == "weight"
        return name in getattr(module, "packed_names", ())

    def get_quantize_ops(self):
        """The conversion that packs one weight while it loads."""
        from .loading import MXFP4Quantize

        return MXFP4Quantize(self)

    def get_load_operations(self) -> dict:
        """Loading a packed checkpoint into dense layers; packed layers need no operation."""
        from .loading import MXFP4Dequantize

        return {"dequantize": MXFP4Dequantize}

    def update_weight_conversions(self, weight_conversions: list, model: "PreTrainedModel") -> list:
        """As the base class, and dense weights of a checkpoint keep their converters beside the dequantising ones."""
        updated = super().update_weight_conversions(weight_conversions, model)
        kept = {id(conversion) for conversion in updated}
        return [entry for entry in weight_conversions if id(entry) not in kept] + updated

    # -- the model ----------------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: "PreTrainedModel", checkpoint_files: list[str] | None = None, **kwargs: Any
    ):
        config = self.quantization_config
        keys = stored_keys(checkpoint_files or [])
        if self.pre_quantized and keys:
            check_packed_checkpoint(keys, config)
        if self.pre_quantized and config.dequantize:
            return model
        names = self.plan(model)
        if keys:
            absent = self.absent_from_checkpoint(model, names, keys)
            names = [name for name in names if name not in absent]
            config.modules_to_not_convert = sorted({*(config.modules_to_not_convert or ()), *absent})
        if not self.pre_quantized:
            if config.channel_stats is not None:
                self.channel_stats = load_channel_stats(config.channel_stats)
            self.check_stats(model, names)
        for name in names:
            replace_layer(model, name, config, placeholder=not self.pre_quantized)
        return model

    def plan(self, model: "PreTrainedModel") -> list[str]:
        """Names of the modules of a dense model that will be packed; says what else stays dense, and why.

        What `modules_to_not_convert=None` stands for is written into the configuration, so that a later version with
        other defaults still loads the checkpoint.

        Raises:
            ValueError: if there is nothing to pack.
        """
        config = self.quantization_config
        skip = self.get_modules_to_not_convert(model, config.modules_to_not_convert, model._keep_in_fp32_modules)
        if not self.pre_quantized:
            # Tied weights, whatever the caller's list: the checkpoint holds one of them, under the embedding's name.
            skip = config.modules_to_not_convert = sorted({*skip, *tied_modules(model)})
        names, left = convertible_layers(model, config, skip)
        if not self.pre_quantized:
            warn_about_dense(model, left)
        if not names:
            example = "".join(f"; {name}: {reason}" for name, reason in list(left.items())[:1])
            raise ValueError(
                "no layer of this model can be held in MXFP4: `modules_to_not_convert` leaves none, or none has an "
                f"input size that is a multiple of block_size={config.block_size} and a class that is known{example}"
            )
        return names

    def absent_from_checkpoint(self, model: "PreTrainedModel", names: list[str], keys: set[str]) -> set[str]:
        """Those of the modules to be packed that a checkpoint has nothing for: the fresh head of another task.

        They stay dense, so that transformers initialises and reports them as it does without quantisation, and they
        can be trained. Those that a key without a place may be meant for are not among them.

        Args:
            model: with its layers dense.
            names: of the modules to be packed.
            keys: of the checkpoint's tensors.
        """
        from .plan import Renaming, weights_of

        renaming = Renaming(model)
        found, homeless = set(), set()
        for key in keys:
            packed = key.endswith("_packed")
            dense_key = key.removesuffix("_packed")
            target = renaming(dense_key)[0]
            if target is None:
                homeless |= {_tail(dense_key, 2), _tail(dense_key, 3)}
            elif packed or not self.pre_quantized:
                found.add(target)
        absent = set()
        for name in names:
            weights = weights_of(model, [name])
            if not weights & found and not {_tail(weight, 3) for weight in weights} & homeless:
                absent.add(name)
        if absent:
            logger.warning(
                f"{len(absent)} layer(s) that the checkpoint has no weight for stay dense: "
                f"{', '.join(sorted(absent)[:5])}{', ...' if len(absent) > 5 else ''}"
            )
        return absent

    def check_stats(self, model: "PreTrainedModel", names: list[str]) -> None:
        """Raise ValueError if a weighted search lacks the statistics of a module to be packed, or they do not fit."""
        config = self.quantization_config
        if config.resolve_search(bool(self.channel_stats)) != "weighted":
            return
        expected = {key: size for name in names for key, size in stats_keys(name, model.get_submodule(name)).items()}
        missing = [key for key in expected if key not in self.channel_stats]
        if missing:
            raise ValueError(
                f"the channel statistics have nothing for {len(missing)} of {len(expected)} weights, for example "
                f"{missing[0]}; they must come from this model, on enough text to reach every expert"
            )
        for key, size in expected.items():
            if self.channel_stats[key].shape != (size,):
                raise ValueError(
                    f"the channel statistics of {key} have shape {tuple(self.channel_stats[key].shape)}, not ({size},)"
                )

    def pack(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Pack the weight of a parameter ``name``, inputs last; see `linear.pack_weight`.

        Raises:
            ValueError: if it has NaNs or infinities; the message names the parameter.
        """
        stats = self.channel_stats.get(name.removesuffix(".weight"))
        try:
            return pack_weight(weight, self.quantization_config, stats)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def pack_while_loading(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """`pack`, with errors kept until transformers has finished.

        It catches what a conversion raises and goes on, to end with an error that names nothing.
        """
        if not self.load_errors:
            try:
                return self.pack(name, weight)
            except ValueError as error:
                self.load_errors.append(str(error))
        rows, columns = weight.shape[-2:]
        return {
            suffix: torch.zeros((*weight.shape[:-2], *shape), dtype=torch.uint8, device=weight.device)
            for suffix, shape in packed_shapes(rows, columns, self.quantization_config).items()
        }

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **kwargs: Any):
        if self.load_errors:
            raise ValueError(self.load_errors[0])
        for name, module in model.named_modules():
            expected = ("weight",) if isinstance(module, MXFP4Linear) else getattr(module, "packed_names", ())
            for parameter in expected:
                if parameter in module._parameters:
                    raise ValueError(f"{name}.{parameter} is not in the checkpoint, so it could not be quantised")
                remove_dense_stub(module, parameter)
        if not self.quantization_config.dequantize:
            from .card import prepare_card

            prepare_card(model)
        return model

    def _dequantize(self, model: "PreTrainedModel", dtype: torch.dtype | str | None = None):
        from .card import remove_card

        remove_card(model)
        if isinstance(dtype, str):  # `save_pretrained` leaves the name of the dtype in the model's configuration
            dtype = getattr(torch, dtype)
        return dequantize_layers(model, dtype or model.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------------------------------------------


def _tail(name: str, parts: int) -> str:
    return ".".join(name.split(".")[-parts:])


def _conv1d_class() -> type:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """``(out_features, in_features)`` of an `nn.Linear` or a GPT-2 `Conv1D`; None for any other module.

    Subclasses of the two are left alone: what they do with their weight is not known.
    """
    if type(module) is nn.Linear:
        return module.out_features, module.in_features
    if type(module) is _conv1d_class():
        return module.weight.shape[1], module.weight.shape[0]
    return None


def tied_modules(model: "PreTrainedModel") -> set[str]:
    """Names of the modules whose weight is tied to another's."""
    keys = {key for pair in model.all_tied_weights_keys.items() for key in pair}
    return {key.removesuffix(".weight") for key in keys if key.endswith(".weight")}


def _prefixes(name: str) -> list[str]:
    """The names of a module and of those that it is in, but for the model itself."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def convertible_layers(model: nn.Module, config: MXFP4Config, skip: list[str]) -> tuple[list[str], dict[str, str]]:
    """Names of the modules that `MXFP4Config` converts, and why others of their kind stay dense.

    Returns:
        ``(names, left)``: ``left`` maps names to a reason. Modules that match ``skip`` are in neither.
    """
    names, left = [], {}
    places: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(name)
    skipped = {
        name for name, _ in model.named_modules(remove_duplicate=False) if not should_convert_module(name, skip)
    }
    for name, module in model.named_modules():
        # transformers matches a suffix with the whole name only, so that "vision_tower" would not leave what is in it.
        if any(part in skipped for place in places[module] for part in _prefixes(place)):
            continue
        shape = linear_shape(module)
        convertible = shape is not None or is_fused_experts(module)
        if convertible and len(places[module]) > 1:
            left[name] = f"the same module is also {places[module][1]}"
            continue
        if shape is not None:
            if shape[1] == 0:
                left[name] = "it has no inputs"
            elif shape[1] % config.block_size:
                left[name] = f"{shape[1]} inputs are not a multiple of block_size={config.block_size}"
            else:
                names.append(name)
        elif is_fused_experts(module):
            reason = packed_parameters(module, config)[1]
            if reason is None:
                names.append(name)
            else:
                left[name] = reason
        elif isinstance(module, (nn.Linear, _conv1d_class())):
            left[name] = f"{type(module).__name__} is a subclass whose own way with its weight is not known"
    return names, left


def stats_keys(name: str, module: nn.Module) -> dict[str, int]:
    """Under which names the inputs' statistics of a module are kept, and how many channels each has."""
    shape = linear_shape(module)
    if shape is not None:
        return {name: shape[1]}
    return {f"{name}.{key}": getattr(module, key).shape[-1] for key in fused_names(module)}


def replace_layer(model: nn.Module, name: str, config: MXFP4Config, placeholder: bool) -> None:
    """Put a packed layer, on the meta device, in the place of a dense one, for a checkpoint to be loaded into.

    Args:
        placeholder: keep the dense weight beside the packed tensors, for the checkpoint's key to land on; the
            conversion deletes it.
    """
    module = model.get_submodule(name)
    shape = linear_shape(module)
    if shape is None:
        dense = {key: getattr(module, key) for key in fused_names(module)}
        make_packed_experts(module, config)
    else:
        rows, columns = shape
        dense = {"weight": module.weight}
        bias = module.bias
        layer = MXFP4Linear(
            columns, rows, bias is not None, config, device="meta", dtype=None if bias is None else bias.dtype
        )
        layer.source_class = type(module)
        model.set_submodule(name, layer.train(module.training))
        module = layer
    for key, weight in dense.items():
        if placeholder:
            setattr(module, key, weight)
        else:
            add_dense_stub(module, key)


def warn_about_dense(model: nn.Module, left: dict[str, str]) -> None:
    """One warning that names what stays dense although it is of a kind that is converted, and how large it is."""
    if not left:
        return
    size = sum(
        parameter.numel() * parameter.element_size()
        for name in left
        for parameter in model.get_submodule(name).parameters()
    )
    listed = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:5])
    more = f"; and {len(left) - 5} more" if len(left) > 5 else ""
    logger.warning(f"{len(left)} layer(s) stay dense ({size / 2**20:.1f} MiB): {listed}{more}")


def dequantize_layers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Put dense layers of ``dtype`` back in the place of packed ones, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, MXFP4Linear):
            model.set_submodule(name, _dense_layer(module, dtype))
        elif hasattr(module, "restore_dense"):
            module.restore_dense(dtype)
    return model


def _dense_layer(module: MXFP4Linear, dtype: torch.dtype) -> nn.Module:
    weight = module.dequantize(dtype)
    with torch.device("meta"):
        if module.source_class is _conv1d_class():
            layer = _conv1d_class()(module.out_features, module.in_features)
            weight = weight.t().contiguous()
        else:
            layer = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
    layer.weight = nn.Parameter(weight)
    if module.bias is not None:
        layer.bias = nn.Parameter(module.bias.detach().to(dtype))
    return layer.train(module.training)


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def load_channel_stats(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a `channel_stats` file.

    Raises:
        ValueError: if the file does not exist or is not safetensors.
    """
    if not os.path.isfile(path):
        raise ValueError(f"`channel_stats={path!r}` is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:
        raise ValueError(f"`channel_stats={path!r}` is not a readable safetensors file: {error}") from error


def stored_keys(files: list[str]) -> set[str]:
    """Names of the tensors in safetensors files; none if one is of another format, which has no list of them.

    Raises:
        OSError: for a file that cannot be read, as when a download or a copy was cut short.
    """
    keys: set[str] = set()
    for path in files:
        if not str(path).endswith(".safetensors"):
            return set()
        try:
            with safe_open(path, framework="pt") as file:
                keys.update(file.keys())
        except Exception as error:
            raise OSError(f"{path} is not a complete safetensors file: {error}") from error
    return keys


def check_packed_checkpoint(names: set[str], config: MXFP4Config) -> None:
    """Raise unless each packed weight of a checkpoint has its scales.

    transformers would warn of a missing scale and go on with zeros.

    Args:
        names: of the checkpoint's tensors.
        config: that the checkpoint stores.

    Raises:
        ValueError: for a missing or surplus tensor, named.
    """
    for name in sorted(names):
        if not name.endswith("_packed"):
            continue
        base = name.removesuffix("_packed")
        if f"{base}_scale" not in names:
            raise ValueError(f"the checkpoint has {name} but not {base}_scale: it is damaged or incomplete")
        has_macro = f"{base}_mbs" in names
        if has_macro != (config.macro_block_size is not None):
            raise ValueError(
                f"the checkpoint {'has' if has_macro else 'lacks'} {base}_mbs, which does not go with "
                f"macro_block_size={config.macro_block_size} in its configuration"
            )


register()  # for a process that imports this module before transformers; see hf_ext.registration.Registration
