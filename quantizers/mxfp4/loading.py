"""Conversions that transformers runs on tensors while a checkpoint loads."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import ConversionOps

from . import numerics
from .linear import MXFP4Linear, add_dense_stub

if TYPE_CHECKING:
    from .quantizer import MXFP4HfQuantizer

__all__ = ["MXFP4Dequantize", "MXFP4Quantize"]


def _single(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, list) else value


def is_transposed(module: torch.nn.Module) -> bool:
    """Whether a layer keeps its weight as ``[in_features, out_features]`` (GPT-2's Conv1D)."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D) or getattr(module, "source_class", None) is Conv1D


class MXFP4Quantize(ConversionOps):
    """A dense weight of the checkpoint to the packed tensors of its layer; the dense placeholder goes."""

    def __init__(self, hf_quantizer: "MXFP4HfQuantizer"):
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        model: torch.nn.Module | None = None,
        full_layer_name: str | None = None,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Packed tensors by their full names; see `ConversionOps`."""
        weight = _single(next(iter(input_dict.values())))
        path, _, parameter = full_layer_name.rpartition(".")
        module = model.get_submodule(path)
        transposed = isinstance(module, MXFP4Linear) and is_transposed(module)
        packed = self.hf_quantizer.pack_while_loading(full_layer_name, weight.t() if transposed else weight)
        del module._parameters[parameter]
        add_dense_stub(module, parameter)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {f"{full_layer_name}_{suffix}": tensor for suffix, tensor in packed.items()}


class MXFP4Dequantize(ConversionOps):
    """Packed tensors of a checkpoint to the dense weight of a plain layer."""

    def __init__(self, hf_quantizer: "MXFP4HfQuantizer"):
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        model: torch.nn.Module | None = None,
        full_layer_name: str | None = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """The dense weight by its full name; a weight that is dense in the checkpoint passes unchanged.

        Before the operations of one of the model's own converters (which merge experts that are stored one by one) the
        names are that converter's source patterns, each with a list of tensors, and lists go on to the merge.
        """
        if any("." in name for name in input_dict):
            dtype = model.get_parameter(full_layer_name).dtype
            return {
                name: [self._dequantize(*parts, dtype=dtype) for parts in self._companions(input_dict, name)]
                for name in input_dict
                if name.endswith("_packed")
            }
        by_suffix = {name.rpartition("_")[2]: _single(value) for name, value in input_dict.items()}
        if "packed" not in by_suffix:
            return {full_layer_name: _single(next(iter(input_dict.values())))}
        path, _, parameter = full_layer_name.rpartition(".")
        module = model.get_submodule(path)
        weight = self._dequantize(
            by_suffix["packed"], by_suffix["scale"], by_suffix.get("mbs"), dtype=getattr(module, parameter).dtype
        )
        return {full_layer_name: weight.t().contiguous() if is_transposed(module) else weight}

    @staticmethod
    def _companions(input_dict: dict[str, Any], name: str) -> Iterator[tuple[torch.Tensor, ...]]:
        base = name.removesuffix("_packed")
        macro = input_dict.get(f"{base}_mbs") or itertools.repeat(None)
        return zip(input_dict[name], input_dict[f"{base}_scale"], macro)

    def _dequantize(
        self, packed: torch.Tensor, scale: torch.Tensor, macro: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        config = self.hf_quantizer.quantization_config
        return numerics.dequantize_packed(
            packed,
            scale,
            macro,
            block_size=config.block_size,
            macro_block_size=config.macro_block_size or 128,
            dtype=dtype,
        )
