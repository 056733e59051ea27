"""`patch` and `unpatch`: put links on a loaded model, and take them off again. In place; the weights are shared."""

import copy
import os
from typing import Any

import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .configuration_turboconn import FAMILIES, TurboConnConfig, model_config_class, supported
from .modeling_turboconn import backbone_class, causal_class


def patch(model: PreTrainedModel | str | os.PathLike, config: TurboConnConfig | None = None, **kwargs: Any) -> Any:
    """Put TurboConn links on a causal language model.

    The model changes its class in place and keeps its weights; with the links' weights at their start it computes
    what it computed before.

    Args:
        model: A model, or the Hub name or folder of one.
        config: Settings; default `TurboConnConfig()`.
        **kwargs: For `AutoModelForCausalLM.from_pretrained`, when `model` is a name or a folder.

    Returns:
        The same model, patched.

    Raises:
        ValueError: Unsupported architecture, a model that is patched or quantized already, or settings that do not
            fit the model.
    """
    config = TurboConnConfig() if config is None else config
    if not isinstance(config, TurboConnConfig):
        raise ValueError(f"config is {config!r}; it must be a TurboConnConfig, such as TurboConnConfig(rank=64)")
    if isinstance(model, str | os.PathLike):
        model = AutoModelForCausalLM.from_pretrained(model, **kwargs)
    elif kwargs:
        raise ValueError(f"{', '.join(kwargs)}: loading options need the name or folder of a model, not a loaded one")
    model_type = check(model, config)
    reference = model.get_input_embeddings().weight
    own = copy.deepcopy(model.config)  # the given one may be that of other models too
    for module in [module for module in model.modules() if getattr(module, "config", None) is model.config]:
        module.config = own
    _set_config_class(own, model_config_class(model_type))
    own.turboconn = config.to_dict()
    model.__class__ = causal_class(type(model))
    model.model.__class__ = backbone_class(type(model.model))
    model.model.setup_links()
    links = model.model.turbo_links.to(device=reference.device, dtype=reference.dtype).train(model.training)
    for into in links.children():
        into.reset_parameters()
    return model


def check(model: Any, config: TurboConnConfig) -> str:
    """Refuse a model that cannot be patched.

    Returns:
        The `model_type` of the base.

    Raises:
        ValueError: As `patch`.
    """
    name, settings = type(model).__name__, getattr(model, "config", None)
    if hasattr(model, "peft_config"):
        raise ValueError(f"{name} has adapters; patch the base model first and add the adapters to that")
    if not isinstance(settings, PreTrainedConfig):
        raise ValueError(f"{name} is not a transformers model; TurboConn patches {supported()}")
    check_config({**settings.to_dict(), "architectures": [name]}, config)
    model_type = settings.model_type
    if type(model) is not getattr(transformers, name, None):
        raise ValueError(f"{name} is a class of {type(model).__module__}; TurboConn patches transformers' own {name}")
    return model_type


def check_config(values: dict[str, Any], config: TurboConnConfig) -> None:
    """Refuse a checkpoint by the content of its `config.json`, before its weights are read.

    Raises:
        ValueError: As `patch`.
    """
    model_type = values.get("model_type")
    name = (values.get("architectures") or [f"a model of type {model_type!r}"])[0]
    if "turboconn" in values:
        raise ValueError(f"{name} has TurboConn links already; unpatch(model) first, or start from the base model")
    if values.get("quantization_config") is not None:
        raise ValueError(
            f"{name} is quantized; patch the model in full precision (load it without quantization_config, or with "
            "dequantize=True where the method has that)"
        )
    if model_type not in FAMILIES or name != f"{FAMILIES[model_type][1]}ForCausalLM":
        raise ValueError(f"{name} (model_type {model_type!r}) is not supported; TurboConn patches {supported()}")
    config.check_model(model_config_class(model_type).turboconn_base.from_dict(values))


def unpatch(model: Any) -> Any:
    """Take the links off a patched model; their weights are lost. In place.

    Returns:
        The same model, which is what it was before `patch`.

    Raises:
        ValueError: The model has no links.
    """
    if hasattr(model, "peft_config"):
        raise ValueError(f"{type(model).__name__} has adapters; unpatch what merge_and_unload() or unload() returns")
    backbone = getattr(model, "model", None)
    if not hasattr(backbone, "remove_links"):
        raise ValueError(f"{type(model).__name__} has no TurboConn links to remove")
    backbone.remove_links()
    backbone.__class__ = type(backbone).turboconn_base
    model.__class__ = type(model).turboconn_base
    config = model.config
    del config.turboconn
    config.__dict__.pop("auto_map", None)  # which saving has written, for the patched classes
    _set_config_class(config, type(config).turboconn_base)
    return model


def _set_config_class(config: PreTrainedConfig, cls: type) -> None:
    config.__class__ = cls
    config.__dict__.pop("model_type", None)  # which loading writes over the class's own
