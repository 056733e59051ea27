"""Merging adapters of a `PeftModel` into one more adapter of it."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_ext.extras import require

from .config import CtMConfig
from .report import CtMReport
from .sources import (
    Factors,
    check_adapter_config,
    check_weights,
    matches,
    merge_layer,
    merged_config,
    result_dtype,
)

require("peft", extra="adapters")

from peft import LoraConfig, LoraModel, PeftModel  # noqa: E402 - after the check that names the extra
from peft.tuners.lora.layer import LoraLayer, MultiheadAttention, ParamWrapper  # noqa: E402

__all__ = ["add_ctm_adapter"]


@torch.no_grad()
def add_ctm_adapter(
    model: PeftModel,
    adapters: Sequence[str],
    weights: Sequence[float] | None,
    adapter_name: str,
    config: CtMConfig | None = None,
    **kwargs: Any,
) -> CtMReport:
    """Merge LoRA adapters of a model into a new one of one rank, in the manner of peft's `add_weighted_adapter`.

    Everything is computed before the model is touched. The new adapter is frozen and not active: `set_adapter` it. It
    has one rank in every layer, a scaling of 1 and no patterns, and so is what servers of LoRA take.

    Args:
        model: a `PeftModel` with the adapters.
        adapters: names of those to merge. One that does not touch a layer is absent from it, not zero in it; a layer
            that one adapter alone touches is kept, cut to the rank if need be.
        weights: one number each; negative subtracts, 0 leaves an adapter out. None: `config.default_weights`.
        adapter_name: name of the new adapter.
        config: default `CtMConfig()`.
        **kwargs: fields of `CtMConfig` that differ from `config`.

    Returns:
        What was kept, per layer and adapter.

    Raises:
        TypeError: not a `PeftModel` with LoRA.
        ValueError: an adapter that does not exist or is not plain LoRA, a name that is taken, weights that do not fit,
            entries that are not finite. The model is then as it was.

    Example:
        >>> report = add_ctm_adapter(model, ["sql", "math"], [1.0, 1.0], "both", rank=16, combination_type="ties")
        >>> model.set_adapter("both")
    """
    config = replace(config or CtMConfig(), **kwargs)
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, LoraModel):
        raise TypeError(
            f"`model` must be a PeftModel with LoRA adapters, got {type(model).__name__}; load the first adapter with "
            "PeftModel.from_pretrained(model, ..., adapter_name=...), the others with load_adapter"
        )
    weights = check_weights(weights, adapters, config)
    if not isinstance(adapter_name, str) or not adapter_name or "." in adapter_name:
        raise ValueError(f"`adapter_name` must be a name without dots, got {adapter_name!r}")
    if adapter_name in model.peft_config:
        raise ValueError(f"adapter {adapter_name!r} exists already; take another name or delete_adapter it first")
    for name in adapters:
        if name not in model.peft_config:
            raise ValueError(f"Adapter {name} does not exist; the model has {', '.join(model.peft_config)}")
        check_adapter_config(name, model.peft_config[name].to_dict())

    live = [(place, name, weight) for place, (name, weight) in enumerate(zip(adapters, weights)) if weight]
    base = model.base_model.model
    plan = {}
    for layer, module in base.named_modules():
        if isinstance(module, LoraLayer):
            parts = _parts(layer, module, live)
            if parts:
                plan[layer] = parts
    if not plan:
        raise ValueError(f"none of the adapters {', '.join(name for _, name, _ in live)} has a layer in the model")
    rank = config.rank or max(part.a.shape[0] for parts in plan.values() for part in parts)
    dtype = _result_dtype(config, plan, live[0][1])

    report = CtMReport(config, list(adapters), weights, rank, output=adapter_name)
    report.left_out = [name for name, weight in zip(adapters, weights) if not weight]
    merged = {}
    for layer, parts in plan.items():
        a, b, figures = merge_layer(layer, parts, config, rank, dtype)
        merged[layer] = a.to(parts[0].a.device), b.to(parts[0].b.device)
        report.layers.append(figures)

    configs = [model.peft_config[name] for _, name, _ in live]
    lora = merged_config([entry.to_dict() for entry in configs], plan, rank, configs[0].base_model_name_or_path)
    _narrow_targets(lora, base, plan)
    _inject(model, adapter_name, lora, merged)
    if report.warning:
        warnings.warn(report.warning, stacklevel=2)
    return report


def _parts(layer: str, module: LoraLayer, live: Sequence[tuple[int, str, float]]) -> list[Factors]:
    """What the adapters have of one layer."""
    parts = []
    for place, name, weight in live:
        if name in module.lora_A:
            a, b = module.lora_A[name].weight, module.lora_B[name].weight
        elif name in module.lora_embedding_A:
            a, b = module.lora_embedding_A[name], module.lora_embedding_B[name]
        else:
            continue
        if isinstance(module, MultiheadAttention | ParamWrapper):
            raise ValueError(
                f"layer {layer!r} is a {type(module).__name__} of peft, which holds several weights at once; adapters "
                "on it cannot be merged"
            )
        if a.is_meta or b.is_meta:
            raise ValueError(
                f"layer {layer!r} of adapter {name!r} is on the meta device (offloaded); load the adapters to memory, "
                "or merge their folders with merge_adapter_folders"
            )
        a, b = _off_mps(a.detach()), _off_mps(b.detach())
        parts.append(Factors(place, name, weight, float(module.scaling[name]), a, b))
    return parts


def _off_mps(tensor: torch.Tensor) -> torch.Tensor:
    # The small matrices are in float64, which MPS lacks.
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def _result_dtype(config: CtMConfig, plan: dict[str, list[Factors]], first: str) -> torch.dtype:
    parts = [part for entry in plan.values() for part in entry]
    part = next((part for part in parts if part.name == first), parts[0])
    return result_dtype(config, part.name, part.a.dtype)


def _narrow_targets(lora: LoraConfig, base: nn.Module, layers: Sequence[str]) -> None:
    """Name the layers in full where shorter names would find others too."""
    inside = tuple(f"{name}." for name, module in base.named_modules() if isinstance(module, LoraLayer))
    for name, _ in base.named_modules():
        if name and name not in layers and not name.startswith(inside):
            if any(matches(target, name) for target in lora.target_modules):
                lora.target_modules = set(layers)
                return


def _inject(
    model: PeftModel, name: str, lora: LoraConfig, merged: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    tuner = model.base_model
    model.peft_config[name] = lora
    try:
        tuner.inject_adapter(tuner.model, name)
        found = {
            layer: module
            for layer, module in tuner.model.named_modules()
            if isinstance(module, LoraLayer) and (name in module.lora_A or name in module.lora_embedding_A)
        }
        if found.keys() != merged.keys():
            differing = sorted(found.keys() ^ merged.keys())
            raise RuntimeError(f"peft put the new adapter in other layers than it has: {', '.join(differing[:3])}")
        for layer, (a, b) in merged.items():
            module = found[layer]
            if name in module.lora_A:
                pair = module.lora_A[name].weight, module.lora_B[name].weight
            else:
                pair = module.lora_embedding_A[name], module.lora_embedding_B[name]
            for parameter, value in zip(pair, (a, b)):
                parameter.data = value
                parameter.requires_grad_(False)
    except BaseException:
        if name in model.peft_config:
            model.delete_adapter(name)
        raise
