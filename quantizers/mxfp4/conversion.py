"""Quantising a model that is in memory already."""

from typing import TYPE_CHECKING, Any

from torch import nn

from .calibration import collect_channel_stats, token_batches
from .configuration import MXFP4Config
from .experts import fused_names, make_packed_experts, set_packed_expert_tensors
from .linear import MXFP4Linear, check_weight
from .quantizer import MXFP4HfQuantizer, linear_shape, load_channel_stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["quantize_model"]


def quantize_model(
    model: "PreTrainedModel",
    config: MXFP4Config | None = None,
    calibration: Any = None,
    tokenizer: Any = None,
) -> "PreTrainedModel":
    """Quantise a loaded model in place, one weight at a time, as `from_pretrained(quantization_config=...)` would.

    Args:
        model: a dense `PreTrainedModel`.
        config: default `MXFP4Config()`; not modified.
        calibration: texts, dataset rows or token ids (see `calibration.token_batches`). With it the search weighs each
            input channel by its mean square over that text.
        tokenizer: needed when the calibration is text.

    Returns:
        The same model; `save_pretrained`, `generate`, `dequantize` and adapters work as after `from_pretrained`.

    Raises:
        ValueError: if the model is quantised already, nothing in it can be converted, a weight is not finite or not in
            memory (its name is given), or the calibration does not fit the configuration. The model is then as it was.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"`model` must be a PreTrainedModel of transformers, got {type(model).__name__}")
    if config is not None and not isinstance(config, MXFP4Config):
        raise ValueError(f"`config` must be an MXFP4Config or None, got {type(config).__name__}")
    config = MXFP4Config() if config is None else config
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("`model` is quantised already; load it dense, or call model.dequantize() first")
    if config.dequantize:
        raise ValueError("`dequantize=True` is for loading packed checkpoints; it has no meaning in quantize_model")
    if calibration is not None and config.channel_stats is not None:
        raise ValueError("pass `calibration` or `config.channel_stats`, not both")
    if calibration is not None and config.weight_search in ("static", "dynamic"):
        raise ValueError(
            f"`calibration` is only used by weight_search='auto' or 'weighted', got {config.weight_search!r}"
        )
    quantizer = MXFP4HfQuantizer(config, pre_quantized=False)
    names = quantizer.plan(model)
    _check_weights(model, names)  # before anything is replaced, so that an error leaves the model as it was
    if calibration is not None:
        batches = token_batches(calibration, tokenizer)
        quantizer.channel_stats = collect_channel_stats(model, batches, modules=names)
    elif config.channel_stats is not None:
        quantizer.channel_stats = load_channel_stats(config.channel_stats)
    quantizer.check_stats(model, names)
    for name in names:
        _quantize_module(model, name, quantizer)
    model.is_quantized = True
    model.quantization_method = quantizer.quantization_config.quant_method
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    return model


def _check_weights(model: nn.Module, names: list[str]) -> None:
    for name in names:
        module = model.get_submodule(name)
        for key in ("weight",) if linear_shape(module) is not None else fused_names(module):
            try:
                check_weight(getattr(module, key))
            except ValueError as error:
                raise ValueError(f"{name}.{key}: {error}") from None


def _quantize_module(model: nn.Module, name: str, quantizer: MXFP4HfQuantizer) -> None:
    module, config = model.get_submodule(name), quantizer.quantization_config
    shape = linear_shape(module)
    if shape is None:
        dense = {key: getattr(module, key) for key in fused_names(module)}
        packed = {key: quantizer.pack(f"{name}.{key}", weight) for key, weight in dense.items()}
        make_packed_experts(module, config)
        for key, tensors in packed.items():
            set_packed_expert_tensors(module, key, tensors)
        return
    rows, columns = shape
    weight = module.weight if type(module) is nn.Linear else module.weight.t()
    layer = MXFP4Linear(columns, rows, bias=False, config=config, device="meta")
    for suffix, tensor in quantizer.pack(f"{name}.weight", weight).items():
        layer.set_packed(suffix, tensor)
    layer.bias = module.bias
    layer.source_class = type(module)
    model.set_submodule(name, layer.train(module.training))
