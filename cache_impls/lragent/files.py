"""Caches on disk: states as safetensors, all else as JSON; nothing is read that is not what it says."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..saved import SavedFormat
from .configuration import LRAgentConfig
from .layer import SHARED, Base, Growing, LowRank
from .lora import enabled_of

if TYPE_CHECKING:
    from .cache import LRAgentCache

__all__ = ["read_cache", "write_cache"]

CONFIG_NAME = "lragent_config.json"
TENSORS_NAME = "lragent_cache.safetensors"
_DICTS = ("lragent_config", "model", "agents", "tracks", "read", "tensors")
FILES = SavedFormat("an LRAgent", CONFIG_NAME, TENSORS_NAME, version=1, fields=dict.fromkeys(_DICTS, dict))


def write_cache(cache: "LRAgentCache", folder: Path) -> None:
    """Write a cache; see `LRAgentCache.save_pretrained`."""
    parts: dict[str, Growing] = {}
    for index, layer in enumerate(cache.layers):
        parts |= {f"layers.{index}.{name}": part for name, part in layer.holdings().items()}
    for lane, track in cache.tracks.items():
        parts |= {f"track.{lane}.{name}": part for name, part in track.parts().items()}
    tensors = {name: part.view().detach().cpu().contiguous() for name, part in parts.items()}
    facts = {
        "lragent_config": cache.config.to_dict(),
        "mode": cache.mode,
        "model": _model_facts(cache.model),
        "base_weights": enabled_of(cache.model).fingerprint(),
        "agents": cache.agents,
        "tracks": {
            lane: {"tokens": track.length, "turn": track.turn, "owners": track.owners}
            for lane, track in cache.tracks.items()
        },
        # By agent, the tokens whose low-rank states it has.
        "read": {key: low.length for key, low in (cache.layers[0].low_rank if cache.layers else {}).items()},
    }
    FILES.write(folder, facts, tensors)


def _model_facts(model: Any) -> dict[str, Any]:
    config = model.get_base_model().config.get_text_config(decoder=True)
    name = model.get_base_model().config._name_or_path
    return {
        "model_type": config.model_type,
        "name_or_path": Path(name).name if name else "",
        "num_hidden_layers": config.num_hidden_layers,
    }


def read_cache(
    cls: type["LRAgentCache"], folder: Path, model: Any, device: torch.device | str | None
) -> "LRAgentCache":
    """Read a cache; see `LRAgentCache.from_pretrained`."""
    stored = FILES.read_facts(folder)
    enabled = enabled_of(model)
    try:
        config = LRAgentConfig.from_dict(stored["lragent_config"])
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_NAME}: {error}") from None
    facts = _model_facts(model)
    for name in ("model_type", "num_hidden_layers"):
        if stored["model"].get(name) != facts[name]:
            raise ValueError(
                f"{folder} is of another model: {name}={stored['model'].get(name)!r}, not {facts[name]!r}"
            )
    if stored.get("base_weights") != enabled.fingerprint():
        raise ValueError(
            f"{folder} was written with other base weights ({stored['model'].get('name_or_path') or 'unnamed'}, "
            f"fingerprint {stored.get('base_weights')}) than this model's ({enabled.fingerprint()})"
        )
    here = {enabled.key(name): name for name in model.peft_config}
    for name, key in stored["agents"].items():
        if key not in here:
            what = "has other weights or another scaling here" if name in model.peft_config else "is not loaded here"
            raise ValueError(
                f"{folder} holds states of adapter {name!r} (content {key}), which {what}: load the one that it was "
                "written with, or read the tokens again"
            )
    cache = cls(model, config)
    device = model.get_base_model().get_input_embeddings().weight.device if device is None else device
    tensors = FILES.read_tensors(folder, stored, device)
    try:
        _fill(cache, stored, tensors)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG_NAME} is damaged: {error!r}") from None
    return cache


def _fill(cache: "LRAgentCache", stored: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Put what the files hold into a new cache.

    Raises:
        ValueError: It does not fit together.
    """
    from .cache import Track

    if stored["mode"] not in (None, "base_shared", "base_lr_shared", "full", "none"):
        raise ValueError(f"`mode` is {stored['mode']!r}")
    cache.mode, cache.agents = stored["mode"], dict(stored["agents"])
    for lane, facts in stored["tracks"].items():
        if lane != SHARED and lane not in cache.agents.values():
            raise ValueError(f"lane {lane!r} is no agent's")
        track = cache.tracks[lane] = Track()
        for name in ("ids", "visible", "cos", "sin"):
            if (tensor := tensors.get(f"track.{lane}.{name}")) is not None:
                getattr(track, name).write(0, tensor)
        track.owners = [(int(end), str(key)) for end, key in facts["owners"]]
        track.turn = int(facts["turn"])
        rows = track.ids.data.shape[0]
        if track.length != facts["tokens"] or track.visible.length != track.length:
            raise ValueError(f"lane {lane!r} has {track.length} ids for {facts['tokens']} tokens")
        if not track.owners or track.owners[-1][0] != track.length:
            raise ValueError(f"the owners of lane {lane!r} do not end with its {track.length} tokens")
        for index, layer in enumerate(cache.layers):
            base = layer.lanes[lane] = Base()
            for name, part in base.parts().items():
                part.write(0, tensors[f"layers.{index}.base.{lane}.{name}"])
            if {base.keys.length, base.values.length} != {track.length} or base.keys.data.shape[0] != rows:
                raise ValueError(f"layer {index} holds {base.length} of {track.length} tokens")
            layer.lazy_initialization(base.keys.data, base.values.data)
    for key, length in stored["read"].items():
        for index, layer in enumerate(cache.layers):
            low = layer.low_rank[key] = LowRank()
            for name, part in low.parts().items():
                if (tensor := tensors.get(f"layers.{index}.low.{key}.{name}")) is not None:
                    part.write(0, tensor)
                    if part.length != length:
                        raise ValueError(f"layer {index} holds {part.length} low-rank states of {length} tokens")
            low.length = int(length)
    known = sum(len(layer.holdings()) for layer in cache.layers)
    known += sum(len(track.parts()) for track in cache.tracks.values())
    if known != len(tensors):
        raise ValueError(f"{len(tensors)} tensors, of which {known} have a place")
