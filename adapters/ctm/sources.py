"""What can be merged, and what the merged adapter's configuration is: shared by the in-memory and the folder route."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

import torch

from hf_ext.extras import require

from .config import DTYPES, CtMConfig
from .core import merge_lora_tensors
from .report import LayerReport

require("peft", extra="adapters")

from peft import LoraConfig  # noqa: E402 - after the check that names the extra
from peft.utils.other import get_pattern_key  # noqa: E402

__all__ = [
    "Factors",
    "check_adapter_config",
    "check_weights",
    "merge_layer",
    "merged_config",
    "result_dtype",
    "scaling_of",
]

# Fields of a LoraConfig that must be empty, and why. Those that peft marks as variants of LoRA come on top.
_REFUSED = {
    "use_dora": "uses DoRA, whose update is not a product of two factors; merge it into the model instead",
    "modules_to_save": "has whole modules beside LoRA (modules_to_save={value}), which have no low-rank update to "
    "merge and which servers of LoRA do not take; save the adapter without them",
    "target_parameters": "targets parameters of fused experts (target_parameters={value}), which peft cannot merge by "
    "layer either",
    "trainable_token_indices": "has trained rows of the embedding (trainable_token_indices), which are no low-rank "
    "update",
    "layer_replication": "runs on a model with replicated layers (layer_replication={value}), another base model",
    "lora_bias": "has biases in its LoRA layers (lora_bias=True), which servers of LoRA do not take; save it without",
    "use_qalora": "uses QA-LoRA, whose A sees pooled inputs",
    "alora_invocation_tokens": "is an activated LoRA (alora_invocation_tokens), which works on part of the tokens",
}
# Initialisations after which the update is relative to a base model that peft changed.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_VARIANTS = tuple(field.name for field in fields(LoraConfig) if field.metadata.get("is_lora_variant"))


def check_adapter_config(name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError unless an adapter's configuration describes plain LoRA on the base model as it is."""
    kind = str(getattr(config.get("peft_type"), "value", config.get("peft_type")))
    if kind != "LORA":
        raise ValueError(f"adapter {name!r} is of type {kind}; only LORA adapters can be merged")
    for field, reason in _REFUSED.items():
        if config.get(field):
            raise ValueError(f"adapter {name!r} {reason.format(value=_listed(config[field]))}")
    for field in _VARIANTS:
        if config.get(field):
            raise ValueError(f"adapter {name!r} uses a variant of LoRA ({field}), whose update is not s B A")
    if config.get("bias", "none") != "none":
        raise ValueError(
            f"adapter {name!r} trains biases of the base model (bias={config['bias']!r}), which are no low-rank "
            "update; train with bias='none'"
        )
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_CHANGED_BASE):
        raise ValueError(
            f"adapter {name!r} was made with init_lora_weights={init!r}: its update is relative to a base model that "
            "the initialisation changed. Convert it first: save the fresh adapter before training, and after training "
            "call save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )


def check_weights(weights: Sequence[float] | None, names: Sequence[str], config: CtMConfig) -> list[float]:
    """The weights as floats, the configuration's defaults where none are given.

    Raises:
        ValueError: no adapter, one named twice, another number of weights, a weight that is not finite, all zero.
    """
    if isinstance(names, str) or not names:
        raise ValueError(f"`adapters` must be a list of at least one adapter, got {names!r}")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ValueError(f"adapter {twice[0]!r} is named twice; name it once, with the sum of its weights")
    if weights is None:
        return config.default_weights(len(names))
    if not isinstance(weights, Iterable):
        raise ValueError(f"`weights` must be a list of one number per adapter, got {weights!r}")
    found = []
    for weight in weights.tolist() if isinstance(weights, torch.Tensor) else weights:
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise ValueError(f"`weights` must be finite numbers, got {weight!r}")
        found.append(float(weight))
    if len(found) != len(names):
        raise ValueError(
            f"`weights` has {len(found)} entries for {len(names)} adapters; give one each, or none at all"
        )
    if not any(found):
        raise ValueError("every weight is 0, so there is nothing to merge")
    return found


def result_dtype(config: CtMConfig, name: str, found: torch.dtype) -> torch.dtype:
    """Dtype of the result: the configuration's, else the one `found` in adapter `name`, the first.

    Raises:
        ValueError: it is the adapter's, and none that can be merged.
    """
    if config.dtype is not None:
        return getattr(torch, config.dtype)
    kind = str(found).removeprefix("torch.")
    if kind not in DTYPES:
        raise ValueError(f"adapter {name!r} is of {kind}; adapters of {', '.join(DTYPES)} can be merged")
    return found


def scaling_of(layer: str, config: Mapping[str, Any], name: str, rank: int) -> float:
    """s_t of a layer by an adapter's configuration, as peft computes it: alpha / r or alpha / sqrt(r).

    Args:
        layer: name of the layer in the base model.
        config: the adapter's configuration.
        name: the adapter, for the error message.
        rank: rank of the layer's factors.

    Raises:
        ValueError: the configuration gives the layer another rank, or none.
    """
    expected = _of_layer(layer, config, name, "rank_pattern", "r")
    if expected != rank:
        raise ValueError(
            f"adapter {name!r}: layer {layer!r} has factors of rank {rank}, but its configuration says {expected!r}"
        )
    alpha = _of_layer(layer, config, name, "alpha_pattern", "lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"adapter {name!r}: lora_alpha of layer {layer!r} is {alpha!r}; it must be a finite number")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _of_layer(layer: str, config: Mapping[str, Any], name: str, pattern: str, default: str) -> Any:
    patterns = config.get(pattern) or {}
    try:
        return patterns.get(get_pattern_key(patterns, layer), config.get(default))
    except (AttributeError, TypeError, re.error) as error:
        raise ValueError(
            f"adapter {name!r}: {pattern} is {patterns!r}; it must be a table from regular expressions to numbers "
            f"({error})"
        ) from None


def check_shapes(layer: str, name: str, a: Sequence[int], b: Sequence[int]) -> None:
    """Raise ValueError where factors have no rows and columns, as those of a sharded model that was saved in parts."""
    if min(len(a), len(b)) < 2 or 0 in (*a, *b):
        raise ValueError(
            f"layer {layer!r} of adapter {name!r} has factors of shape {tuple(a)} and {tuple(b)}: it was saved before "
            "its shards were gathered, or is damaged"
        )


@dataclass(frozen=True)
class Factors:
    """One adapter's part of a layer.

    Attributes:
        place: Its place in the user's list.
        name: Its name.
        weight: w_t, not 0.
        scaling: s_t.
        a: lora_A [r, in] or, of a convolution, [r, in, k...]; lora_embedding_A [r, vocabulary].
        b: lora_B [out, r] or [out, r, 1...]; lora_embedding_B [dim, r].
    """

    place: int
    name: str
    weight: float
    scaling: float
    a: torch.Tensor
    b: torch.Tensor


def merge_layer(
    layer: str, parts: Sequence[Factors], config: CtMConfig, rank: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, LayerReport]:
    """Merge what several adapters have of one layer; see `core.merge_lora_tensors`.

    A convolution's kernel dimensions are inputs like any other: A [r, in, k...] is flattened to [r, in k...].

    Returns:
        A and B in the shapes that peft gives them, with `rank` for r, and the figures.

    Raises:
        ValueError: as `merge_lora_tensors`; a grouped convolution.
    """
    for part in parts:
        check_shapes(layer, part.name, part.a.shape, part.b.shape)
        if part.a.dim() > 2 and part.b.dim() > 2 and part.b.shape[1] < part.a.shape[0]:
            raise ValueError(
                f"layer {layer!r} of adapter {part.name!r} is a grouped convolution, whose B is block structured; "
                "peft cannot merge it either"
            )
    kernels = {part.name: tuple(part.a.shape[1:]) for part in parts}
    if len(set(kernels.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in kernels.items())
        raise ValueError(
            f"layer {layer!r}: the adapters' inputs differ in shape ({listed}); they are not of one base model"
        )
    a, b, report = merge_lora_tensors(
        [part.a.flatten(1) for part in parts],
        [part.b.flatten(1) for part in parts],
        [part.weight for part in parts],
        replace(config, dtype=str(dtype).removeprefix("torch.")),
        layer,
        scalings=[part.scaling for part in parts],
        rank=rank,
        adapters=[part.name for part in parts],
        indices=[part.place for part in parts],
    )
    first = parts[0]
    return a.reshape(rank, *first.a.shape[1:]), b.reshape(first.b.shape[0], rank, *first.b.shape[2:]), report


def merged_config(
    configs: Sequence[Mapping[str, Any]], layers: Iterable[str], rank: int, base_model: str | None
) -> LoraConfig:
    """Configuration of the result: plain LoRA with a scaling of 1 in exactly the given layers.

    Nothing is taken over from the first adapter (peft's `add_weighted_adapter` takes all of it, `use_rslora` for one)
    but what describes the base model.

    Args:
        configs: configurations of the adapters that take part.
        layers: names of the layers that the result has.
        rank: its rank, in every layer.
        base_model: name or path of the base model.
    """
    tasks = {_value(config.get("task_type")) for config in configs} - {None}
    task = tasks.pop() if len(tasks) == 1 else None
    mappings = [config.get("auto_mapping") for config in configs]
    revisions = {config.get("revision") for config in configs}
    return LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=target_modules(configs, list(layers)),
        fan_in_fan_out=any(config.get("fan_in_fan_out") for config in configs),
        base_model_name_or_path=base_model,
        revision=revisions.pop() if len(revisions) == 1 else None,
        task_type=task,
        auto_mapping=mappings[0] if task is None and mappings.count(mappings[0]) == len(mappings) else None,
        inference_mode=True,
    )


def target_modules(configs: Sequence[Mapping[str, Any]], layers: Sequence[str]) -> list[str]:
    """Names by which peft finds exactly the given layers.

    The union of the adapters' own lists where they are plain lists of names: on one base model, together they match
    what each matched. Otherwise (a regular expression, a choice of layers) the layers' full names.
    """
    names: set[str] = set()
    for config in configs:
        targets = config.get("target_modules")
        # A choice of layers may be the number 0; peft takes an empty list for none.
        choice = config.get("layers_to_transform")
        plain = isinstance(targets, list | set | tuple) and choice in (None, []) and not config.get("exclude_modules")
        if not plain:
            return sorted(layers)
        names.update(targets)
    used = {name for name in names if any(matches(name, layer) for layer in layers)}
    if all(any(matches(name, layer) for name in used) for layer in layers):
        return sorted(used)
    return sorted(layers)


def matches(target: str, layer: str) -> bool:
    """Whether peft finds a layer by an entry of `target_modules`."""
    return layer == target or layer.endswith(f".{target}")


def natural_order(name: str) -> list[Any]:
    """Sorting key by which layer 10 comes after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _value(entry: Any) -> Any:
    return getattr(entry, "value", entry)


def _listed(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
