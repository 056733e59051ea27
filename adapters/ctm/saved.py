"""Reading saved adapters: what of a file is a layer's factor, and what cannot be merged."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .card import is_repository
from .sources import Factors, check_adapter_config, check_shapes, scaling_of

__all__ = ["CONFIG", "PICKLE", "WEIGHTS", "SavedAdapter", "open_adapter", "servable_problems"]

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
# The largest rank that vLLM's --max-lora-rank takes.
LARGEST_SERVED_RANK = 512
# The factors of embeddings are parameters, those of other layers the weights of modules.
_FACTOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<bare>embedding_)?(?P<kind>[AB])(?(bare)|\.weight)")


@dataclass
class SavedAdapter:
    """A saved adapter, opened.

    Attributes:
        name: For messages.
        config: `adapter_config.json`.
        read: Tensor by key.
        shape: Its shape by key.
        layers: Layer -> keys of its A and B.
        embeddings: Keys of the base's own embeddings that peft saved beside factors of them.
    """

    name: str
    config: dict[str, Any]
    read: Callable[[str], torch.Tensor]
    shape: Callable[[str], Sequence[int]]
    layers: dict[str, tuple[str, str]] = field(default_factory=dict)
    embeddings: list[str] = field(default_factory=list)

    def rank(self, layer: str) -> int:
        """Rank of a layer's factors."""
        return self.shape(self.layers[layer][0])[0]

    def dtype(self) -> torch.dtype:
        """Dtype of its first factor."""
        return self.read(next(iter(self.layers.values()))[0]).dtype

    def factors(self, layer: str, place: int, weight: float) -> Factors:
        """Read a layer; `place` and `weight` are those of the adapter in the merge."""
        a, b = (self.read(key) for key in self.layers[layer])
        scaling = scaling_of(layer, self.config, self.name, a.shape[0])
        return Factors(place, self.name, weight, scaling, a, b)


@contextlib.contextmanager
def open_adapter(path: str | os.PathLike[str], name: str) -> Iterator[SavedAdapter]:
    """Open an adapter and check all that can be checked without its values.

    Args:
        path: a folder, or ORG/NAME[/FOLDER] of the Hub.
        name: what to call it in messages.

    Raises:
        FileNotFoundError: it or a file of it is not there.
        OSError: a file is damaged, or holds more than tensors.
        ValueError: it is not plain LoRA, or its files do not fit together.
    """
    folder = _locate(path)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is not an adapter of peft: it has no {CONFIG}") from None
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{folder / CONFIG} is not an adapter's configuration: it holds a {type(config).__name__}")
    check_adapter_config(name, config)
    with _open_weights(folder, path) as (keys, read, shape):
        adapter = SavedAdapter(name, config, read, shape)
        _sort_keys(adapter, keys)
        for layer, pair in adapter.layers.items():
            check_shapes(layer, name, *map(shape, pair))
            scaling_of(layer, config, name, adapter.rank(layer))
        yield adapter


def _locate(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{folder} is a file; name the folder of an adapter")
    name = str(path)
    owner, _, rest = name.partition("/")
    repository, _, subfolder = rest.partition("/")
    if not is_repository(f"{owner}/{repository}"):
        raise FileNotFoundError(f"{name} does not exist; pass a folder or an adapter of the Hub (ORG/NAME[/FOLDER])")
    from huggingface_hub import snapshot_download

    patterns = [f"{subfolder}/{file}".lstrip("/") for file in (CONFIG, WEIGHTS, PICKLE)]
    try:
        return Path(snapshot_download(f"{owner}/{repository}", allow_patterns=patterns)) / subfolder
    except Exception as error:  # the Hub client has a dozen kinds of failure; to the user they are one
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(f"{name} is neither a folder nor an adapter that the Hub gives: {reason}") from error


@contextlib.contextmanager
def _open_weights(
    folder: Path, path: Any
) -> Iterator[tuple[list[str], Callable[[str], torch.Tensor], Callable[[str], Sequence[int]]]]:
    if (folder / WEIGHTS).is_file():
        try:
            file = safe_open(folder / WEIGHTS, "pt")
        except Exception as error:
            raise OSError(f"{folder / WEIGHTS} is not a complete safetensors file: {error}") from error
        with file:
            yield list(file.keys()), file.get_tensor, lambda key: file.get_slice(key).get_shape()
    elif (folder / PICKLE).is_file():
        try:
            # weights_only: nothing in the file is executed.
            state = torch.load(folder / PICKLE, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise OSError(f"{folder / PICKLE} cannot be read safely, as tensors alone: {reason}") from error
        if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise ValueError(f"{folder / PICKLE} does not hold a table of tensors")
        yield list(state), state.__getitem__, lambda key: tuple(state[key].shape)
    else:
        raise FileNotFoundError(f"{path} has no weights: neither {WEIGHTS} nor {PICKLE}")


def _sort_keys(adapter: SavedAdapter, keys: Sequence[str]) -> None:
    """Fill `layers` and `embeddings`, or name what is neither.

    Raises:
        ValueError: something that has no low-rank update, or half a layer.
    """
    halves: dict[str, dict[str, str]] = {}
    name, others = adapter.name, []
    for key in keys:
        match = _FACTOR.fullmatch(key)
        if match is None:
            others.append(key)
        elif ".base_layer" in f".{match['layer']}":
            raise ValueError(
                f"adapter {name!r}: {key} is inside another layer of LoRA (an attention module or fused experts), "
                "which cannot be merged"
            )
        else:
            halves.setdefault(match["layer"], {})[match["kind"]] = key
    for key in others:
        layer = key.removeprefix(PREFIX).removesuffix(".base_layer.weight")
        if key.endswith(".base_layer.weight") and layer in halves:
            adapter.embeddings.append(key)
        elif "lora_magnitude_vector" in key:
            raise ValueError(f"adapter {name!r} uses DoRA ({key}), whose update is not a product of two factors")
        elif re.search(r"\.lora_B\.bias$", key):
            raise ValueError(f"adapter {name!r} has biases in its LoRA layers ({key}); save it without lora_bias")
        elif ".lora_" in key:
            raise ValueError(
                f"adapter {name!r}: {key} is not a key as peft saves it, {PREFIX}LAYER.lora_A.weight; save the "
                "adapter with PeftModel.save_pretrained"
            )
        else:
            raise ValueError(
                f"adapter {name!r} holds the whole tensor {key} (a resized embedding, modules_to_save or a bias), "
                "which has no low-rank update; save the adapter without it (save_embedding_layers=False)"
            )
    for layer, pair in halves.items():
        if len(pair) < 2:
            raise ValueError(
                f"adapter {name!r}: layer {layer!r} has only one of its two factors, {[*pair.values()][0]}"
            )
        adapter.layers[layer] = pair["A"], pair["B"]
    if not adapter.layers:
        raise ValueError(f"adapter {name!r} has no layer of LoRA")


def servable_problems(folder: str | os.PathLike[str]) -> list[str]:
    """What keeps a saved adapter from being served as a plain LoRA, by the constraints that vLLM documents.

    Only factors of linear layers and embeddings, of one rank, `bias="none"`, no patterns, no whole modules, no DoRA.
    """
    folder = Path(folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    problems = [
        f"{name} is {config[name]!r}"
        for name in ("modules_to_save", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias")
        if config.get(name)
    ]
    if config.get("bias", "none") != "none":
        problems.append(f"bias is {config['bias']!r}")
    if config["r"] > LARGEST_SERVED_RANK:
        problems.append(f"the rank is {config['r']}, above {LARGEST_SERVED_RANK}")
    with safe_open(folder / WEIGHTS, "pt") as file:
        for key in file.keys():
            match, shape = _FACTOR.fullmatch(key), file.get_slice(key).get_shape()
            if match is None:
                # vLLM passes over the base's own embedding, which peft saves beside factors of it.
                if not key.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")):
                    problems.append(f"{key} is no factor of a layer")
            elif len(shape) != 2:
                problems.append(f"{match['layer']} is a convolution")
            elif config["r"] != shape["AB".index(match["kind"])]:
                problems.append(f"{key} has another rank than {config['r']}")
    return problems
