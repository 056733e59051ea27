"""Caches on disk: packed tensors as safetensors, all else as JSON; nothing is read that is not what it says."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..saved import SavedFormat
from .configuration import PatternKVConfig
from .layer import PatternKVLayer
from .packed import PackedStates

if TYPE_CHECKING:
    from .cache import PatternKVCache

__all__ = ["describe", "read_layers", "stored_config", "tensors_of", "write_cache"]

CONFIG_NAME = "patternkv_config.json"
TENSORS_NAME = "patternkv_cache.safetensors"
FILES = SavedFormat(
    "a PatternKV",
    CONFIG_NAME,
    TENSORS_NAME,
    version=1,
    fields={"model": dict, "patternkv_config": dict, "layers": list, "tensors": dict},
)
_LAYER_FACTS = ("start", "packed", "key_patterns", "value_patterns", "seen", "record_past", "is_initialized")
_BY_ROW = ("start", "packed", "key_patterns", "value_patterns")


# --- writing --------------------------------------------------------------------------------------------------------


def write_cache(cache: "PatternKVCache", folder: Path, token_ids: torch.Tensor | list | None = None) -> None:
    """Write a cache; see `PatternKVCache.save_pretrained`."""
    tensors, layers = {}, []
    # Before anything is touched: ids that make no tensor must not cost the files that are there.
    ids = torch.as_tensor(token_ids).tolist() if token_ids is not None else None
    for index, layer in enumerate(cache.layers):
        facts, found = _state(layer, index)
        layers.append({"kind": type(layer).__name__, **facts})
        tensors |= {f"layers.{index}.{name}": tensor.detach().cpu().contiguous() for name, tensor in found.items()}
    facts = {
        "model": cache.model_facts,
        "patternkv_config": cache.patternkv_config.to_dict(),
        "layers": layers,
        "token_ids": ids,
    }
    FILES.write(folder, facts, tensors)


def _state(layer: Any, index: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a file keeps of a layer: facts and tensors."""
    if isinstance(layer, PatternKVLayer):
        tensors = layer.tensors() if layer.is_initialized else {}
        for name in ("key_ids", "value_ids"):
            if name in tensors and not layer.config.num_patterns:
                tensors[name] = tensors[name][:1, :1, :1]
        return {name: getattr(layer, name) for name in _LAYER_FACTS}, tensors
    tensors = tensors_of(layer)
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return {"cumulative_length": getattr(layer, "cumulative_length", None)}, tensors
    if not tensors:
        return {}, {}
    raise ValueError(
        f"layer {index} is a {type(layer).__name__}, whose state is not written to files; caches of models with only "
        "full and sliding attention are"
    )


def tensors_of(layer: Any) -> dict[str, torch.Tensor]:
    """Tensors among the attributes of a layer of the host, by name."""
    found: dict[str, torch.Tensor] = {}
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor) and not name.startswith("_"):
            found[name] = value
        elif isinstance(value, dict):  # the states of linear attention, by number
            found |= {f"{name}.{key}": item for key, item in value.items() if isinstance(item, torch.Tensor)}
    return found


# --- reading --------------------------------------------------------------------------------------------------------


def stored_config(folder: Path, stored: dict[str, Any]) -> PatternKVConfig:
    """The configuration in what `FILES.read_facts` gave.

    Raises:
        ValueError: It is not one of this version.
    """
    try:
        return PatternKVConfig.from_dict(stored["patternkv_config"])
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_NAME}: {error}") from None


def read_layers(cache: "PatternKVCache", folder: Path, stored: dict[str, Any], device: torch.device | str) -> None:
    """Fill the layers of a new cache from the files.

    Raises:
        ValueError: The tensors cannot be read, or are not those that the JSON file tells of.
    """
    tensors = FILES.read_tensors(folder, stored, device, only_header=str(device) == "meta")
    if len(stored["layers"]) != len(cache.layers):
        raise ValueError(f"{folder} holds {len(stored['layers'])} layers, and the model has {len(cache.layers)}")
    for index, (layer, facts) in enumerate(zip(cache.layers, stored["layers"])):
        prefix = f"layers.{index}."
        found = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        try:
            _restore(layer, facts, found)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise ValueError(f"{folder / CONFIG_NAME} is damaged at layer {index}: {error!r}") from None


def _restore(layer: Any, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Put what a file holds of a layer into a new one."""
    if facts["kind"] != type(layer).__name__:
        raise ValueError(f"the file has a {facts['kind']} where this model has a {type(layer).__name__}")
    if not tensors:
        return
    layer.lazy_initialization(tensors["keys"], tensors["values"])
    layer.keys, layer.values = tensors["keys"], tensors["values"]
    if not isinstance(layer, PatternKVLayer):
        if facts["cumulative_length"] is not None:
            layer.cumulative_length = facts["cumulative_length"]
        return
    if type(facts["seen"]) is not int or facts["is_initialized"] is not True or type(facts["record_past"]) is not bool:
        raise ValueError("`seen`, `is_initialized` or `record_past` is not what a layer with states has")
    for name in _LAYER_FACTS:
        setattr(layer, name, facts[name])
    layer.sink_keys, layer.sink_values = tensors.get("sink_keys"), tensors.get("sink_values")
    for states, side, like in ((layer.key_states, "key", layer.keys), (layer.value_states, "value", layer.values)):
        if f"{side}_codes" in tensors:
            found = {name: tensors[f"{side}_{name}"] for name in states.NAMES}
            _check_shapes(states, like, found)
            states.adopt(like, found)
    _check(layer)


def _check_shapes(states: PackedStates, like: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    """Whether tensors have the shapes that the configuration asks for."""
    wanted = PackedStates(states.config, states.side)
    wanted.allocate(like[:, :, :0].to("meta"), tensors["codes"].shape[2])
    for name, tensor in tensors.items():
        shape = list(wanted.tensors[name].shape)
        if name == "bank":
            shape[2] = tensor.shape[2]
        elif name == "ids" and not states.config.num_patterns:
            shape = [1, 1, 1]
        if list(tensor.shape) != shape:
            raise ValueError(f"{states.side} {name} of {list(tensor.shape)} where the options ask for {shape}")


def _check(layer: PatternKVLayer) -> None:
    """Whether the counts of a layer are such as its tensors allow."""
    rows, room = layer.keys.shape[0], 0 if layer.key_states.codes is None else layer.key_states.codes.shape[2]
    for name in _BY_ROW:
        if len(getattr(layer, name)) != rows:
            raise ValueError(f"`{name}` is for {len(getattr(layer, name))} rows, and the tensors have {rows}")
    sinks, window = layer.config.sink_length, layer.config.residual_length
    for start, packed in zip(layer.start, layer.packed):
        first = start + (sinks + packed if packed else 0)
        in_tail = layer.seen - layer.keys.shape[2] <= first <= layer.seen
        if not in_tail or not 0 <= packed <= room or packed % window:
            raise ValueError(f"{packed} packed of {layer.seen} tokens do not fit the tensors")
    for counts, bank in (
        (layer.key_patterns, layer.key_states.bank),
        (layer.value_patterns, layer.value_states.bank),
    ):
        if max(counts) > (1 if bank is None else bank.shape[2]) or min(counts) < 1:
            raise ValueError(f"{max(counts)} patterns do not fit the bank")


def describe(folder: Path) -> dict[str, Any]:
    """What a saved cache holds, without its model or its tensors: for `hf-ext cache inspect`.

    Returns:
        `folder`; `model` and `patternkv_config` as they were written; `rows`, `tokens` (columns, padding included),
        `token_ids` (whether they are there), `bytes` (of the tensors), and `layers`: per layer its `layer` (number),
        `kind`, `bytes`, `packed_tokens` and `patterns` (of the longest row), `bits_key` and `bits_value` (of packed
        elements, spare room left out; None if nothing is packed).

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: The files are damaged, or of another version.
    """
    stored = FILES.read_facts(folder)
    config = stored_config(folder, stored)
    tensors = FILES.read_tensors(folder, stored, "meta", only_header=True)
    layers, rows, tokens = [], 0, 0
    for index, facts in enumerate(stored["layers"]):
        prefix = f"layers.{index}."
        found = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        try:
            row = _layer_row(config, facts, found)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise ValueError(f"{folder / CONFIG_NAME} is damaged at layer {index}: {error!r}") from None
        rows, tokens = max(rows, row.pop("rows")), max(tokens, row.pop("tokens"))
        layers.append({"layer": index, **row})
    return {
        "folder": str(folder),
        "model": stored["model"],
        "patternkv_config": config.to_dict(),
        "rows": rows,
        "tokens": tokens,
        "token_ids": stored.get("token_ids") is not None,
        "bytes": sum(layer["bytes"] for layer in layers),
        "layers": layers,
    }


def _layer_row(config: PatternKVConfig, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    row = {
        "kind": facts["kind"],
        "bytes": size,
        "packed_tokens": 0,
        "patterns": 0,
        "bits_key": None,
        "bits_value": None,
        "rows": tensors["keys"].shape[0] if tensors else 0,
        "tokens": facts.get("seen") or facts.get("cumulative_length") or 0,
    }
    if facts["kind"] != PatternKVLayer.__name__ or not tensors:
        return row
    layer = PatternKVLayer(config)
    _restore(layer, facts, tensors)
    row["packed_tokens"] = max(layer.packed)
    row["patterns"] = max(layer.key_patterns + layer.value_patterns) - 1
    if row["packed_tokens"]:
        row["bits_key"] = layer.key_states.bits_in_use(row["packed_tokens"], max(layer.key_patterns))
        row["bits_value"] = layer.value_states.bits_in_use(row["packed_tokens"], max(layer.value_patterns))
    return row
