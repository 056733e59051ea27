"""PatternKV as a transformers `Cache`."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from hf_ext.runlog import write_json

from .configuration import PatternKVConfig
from .layer import PatternKVLayer

__all__ = ["PatternKVCache"]

CONFIG_NAME = "patternkv_config.json"
TENSORS_NAME = "patternkv_cache.safetensors"
FORMAT = 1
# Models whose attention layers work on the keys or values that the cache returned: they get dense ones.
_DENSE_MODELS = ("gemma3n", "gemma4", "doge", "jetmoe", "diffllama", "moonshine")


class PatternKVCache(Cache):
    """A key/value cache of 2, 4 or 8 bits: residuals to mined patterns, packed once and never again.

    Full-attention layers are quantized; sliding, linear and shared layers of hybrid models keep the host's layer.

    Args:
        config (`PreTrainedConfig`):
            The model's config.
        patternkv_config (`PatternKVConfig`, *optional*):
            How to quantize. Default: `PatternKVConfig()`.
        fields:
            Fields of `PatternKVConfig`, in place of `patternkv_config`.

    Raises:
        ValueError: The model is an encoder-decoder or has no full-attention layer, or both kinds of options are given.

    Example:
        >>> cache = PatternKVCache(model.config, nbits=2)
        >>> model.generate(**inputs, cache=cache, max_new_tokens=64)
        >>> cache.memory_report()["ratio"]

    With `model.set_attn_implementation("patternkv")` a decode step attends to the packed states; with any other
    implementation they are dequantized, one layer at a time.
    """

    def __init__(self, config: PreTrainedConfig, patternkv_config: PatternKVConfig | None = None, **fields: Any):
        if patternkv_config is not None and fields:
            raise ValueError(f"give `patternkv_config` or its fields ({', '.join(sorted(fields))}), not both")
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(f"`config` must be the model's config, got {type(config).__name__}: pass `model.config`")
        if config.is_encoder_decoder:
            raise ValueError(
                f"PatternKVCache is for decoder-only models, and model_type={config.model_type!r} is an "
                "encoder-decoder; use transformers' EncoderDecoderCache"
            )
        self.patternkv_config = patternkv_config or PatternKVConfig.from_dict(fields)
        decoder = config.get_text_config(decoder=True)
        kinds, arguments = get_layer_types_and_kwargs(decoder)
        if "full_attention" not in kinds:
            raise ValueError(
                f"no layer of model_type={decoder.model_type!r} has full attention (found "
                f"{', '.join(sorted(set(kinds)))}): its states are bounded already; use DynamicCache"
            )
        # Ids that a cache from a file was filled with, if they were kept.
        self.token_ids: list[list[int]] | None = None
        self.model_facts = _facts(decoder, kinds)
        attention = None if decoder.model_type.removesuffix("_text") in _DENSE_MODELS else decoder
        layers = [
            PatternKVLayer(self.patternkv_config, attention)
            if kind == "full_attention"
            else DYNAMIC_LAYER_TYPE_MAPPING[kind](**kwargs)
            for kind, kwargs in zip(kinds, arguments)
        ]
        super().__init__(layers=layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append the states of a layer; see `PatternKVLayer.update`.

        Raises:
            ValueError: The cache has no such layer: it was built for another model.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer {layer_idx} of a cache that was built for {len(self.layers)} layers of "
                f"model_type={self.model_facts['model_type']!r}: it belongs to another model"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def packed_layers(self) -> dict[int, PatternKVLayer]:
        """The layers that are quantized, by index."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, PatternKVLayer)}

    # --- memory ---

    def memory_report(self) -> dict[str, Any]:
        """Bytes that the cache keeps allocated, beside those of full states.

        Returns:
            `bytes` (all storages, spare room of growing buffers included), `full_bytes` (the same tokens in a
            `DynamicCache`), `ratio` (full over kept), `bits_per_element` (of packed tokens: codes, scales, ids and
            patterns, in use), and by part: `packed_bytes`, `dense_bytes` (sinks and tails), `other_bytes` (layers of
            the host), `spare_bytes`; `tokens` and `packed_tokens` (per row, the most), `patterns` (per head, the
            most).
        """
        storages: dict[int, int] = {}
        full = in_use = elements = dense = other = packed_total = 0
        for layer in self.layers:
            if not getattr(layer, "is_initialized", False):
                continue
            if not isinstance(layer, PatternKVLayer):
                held = [tensor for tensor in _tensors_of(layer).values()]
                other += sum(tensor.numel() * tensor.element_size() for tensor in held)
                full += sum(tensor.numel() * tensor.element_size() for tensor in held)
                storages |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t.numel()}
                continue
            rows = len(layer.start)
            for tensor in layer.tensors().values():
                if tensor.numel():
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            for side in (layer.keys, layer.values):
                full += rows * side.shape[1] * layer.seen * side.shape[3] * side.element_size()
            dense += sum(
                tensor.numel() * tensor.element_size()
                for name, tensor in layer.tensors().items()
                if name in ("keys", "values", "sink_keys", "sink_values")
            )
            longest = max(layer.packed, default=0)
            for states, counts in (
                (layer.key_states, layer.key_patterns),
                (layer.value_states, layer.value_patterns),
            ):
                if not longest:
                    continue
                for name, tensor in states.view(longest)._asdict().items():
                    used = tensor[:, :, : max(counts)] if name == "bank" else tensor
                    in_use += _bytes(used)
                packed_total += sum(_bytes(tensor) for tensor in states.tensors.values())
                elements += rows * states.codes.shape[1] * longest * states.channels
        layers = self.packed_layers.values()
        kept = sum(storages.values())
        return {
            "bytes": kept,
            "full_bytes": full,
            "ratio": full / kept if kept else 1.0,
            "bits_per_element": 8 * in_use / elements if elements else None,
            "packed_bytes": in_use,
            "dense_bytes": dense,
            "other_bytes": other,
            "spare_bytes": packed_total - in_use,
            "tokens": max((layer.seen for layer in layers), default=0),
            "packed_tokens": max((max(layer.packed, default=0) for layer in layers), default=0),
            "patterns": max((max(layer.key_patterns, default=1) - 1 for layer in layers), default=0),
        }

    # --- files ---

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *, token_ids: torch.Tensor | list | None = None
    ) -> None:
        """Write the cache: packed tensors as safetensors, the rest as JSON.

        Args:
            save_directory: Folder; made if need be.
            token_ids: Ids [B, T] that the cache was filled with, kept so that a reader can tell what it holds.

        Raises:
            ValueError: A layer keeps a state that is not made of keys and values (linear attention).
        """
        folder = Path(save_directory)
        tensors, layers = {}, []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, PatternKVLayer):
                facts = {name: getattr(layer, name) for name in _LAYER_FACTS}
                found = layer.tensors() if layer.is_initialized else {}
            elif isinstance(layer, CacheLayerMixin) and type(layer) in (
                DYNAMIC_LAYER_TYPE_MAPPING["full_attention"],
                DynamicSlidingWindowLayer,
            ):
                facts = {"cumulative_length": getattr(layer, "cumulative_length", None)}
                found = _tensors_of(layer)
            elif not _tensors_of(layer) and not getattr(layer, "is_initialized", False):
                facts, found = {}, {}
            else:
                raise ValueError(f"layer {index} is a {type(layer).__name__}, whose state is not written to files")
            layers.append({"kind": type(layer).__name__, **facts})
            tensors |= {f"layers.{index}.{name}": tensor.detach().cpu().contiguous() for name, tensor in found.items()}
        folder.mkdir(parents=True, exist_ok=True)
        ids = torch.as_tensor(token_ids).tolist() if token_ids is not None else self.token_ids
        # The configuration goes last: a folder with one is whole.
        (folder / CONFIG_NAME).unlink(missing_ok=True)
        save_file(tensors, folder / TENSORS_NAME, metadata={"format": "pt"})
        write_json(
            folder / CONFIG_NAME,
            {
                "format": FORMAT,
                "model": self.model_facts,
                "patternkv_config": self.patternkv_config.to_dict(),
                "layers": layers,
                "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
                "token_ids": ids,
            },
        )

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        config: PreTrainedConfig,
        *,
        device: torch.device | str = "cpu",
        patternkv_config: PatternKVConfig | None = None,
    ) -> "PatternKVCache":
        """Read a cache that `save_pretrained` wrote.

        Args:
            folder: The folder.
            config: Config of the model that will use it.
            device: Where the tensors go.
            patternkv_config: If given, the configuration that the file must have, but for `return_packed`.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: The files are damaged, of another model, configuration or version.
        """
        folder = Path(folder)
        for name in (CONFIG_NAME, TENSORS_NAME):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} has no {name}: it is not a cache that `save_pretrained` finished")
        try:
            stored = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
            version, facts, layers = stored["format"], stored["model"], stored["layers"]
            shapes, fields = stored["tensors"], stored["patternkv_config"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / CONFIG_NAME} is not a PatternKV cache: {error!r}") from None
        if version != FORMAT:
            raise ValueError(f"{folder} has format {version!r}, and this version of hf_ext reads {FORMAT}")
        kept = PatternKVConfig.from_dict(fields)
        if patternkv_config is not None:
            other = patternkv_config.to_dict() | {"return_packed": kept.return_packed}
            differing = [name for name, value in kept.to_dict().items() if other[name] != value]
            if differing:
                listed = ", ".join(f"{name}={fields[name]!r}, not {other[name]!r}" for name in differing)
                raise ValueError(f"{folder} was written with {listed}")
            kept = patternkv_config
        cache = cls(config, kept)
        differing = [name for name, value in cache.model_facts.items() if facts.get(name) != value]
        if differing:
            listed = ", ".join(f"{name}={facts.get(name)!r}, not {cache.model_facts[name]!r}" for name in differing)
            raise ValueError(f"{folder} is of another model: {listed}")
        try:
            with safe_open(folder / TENSORS_NAME, framework="pt", device=str(device)) as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except Exception as error:
            raise ValueError(f"{folder / TENSORS_NAME} cannot be read: {error}") from None
        if {name: list(tensor.shape) for name, tensor in tensors.items()} != shapes:
            raise ValueError(f"{folder / TENSORS_NAME} does not hold the tensors that {CONFIG_NAME} lists")
        for index, (layer, facts) in enumerate(zip(cache.layers, layers)):
            prefix = f"layers.{index}."
            found = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            _restore(layer, facts, found)
        cache.token_ids = stored.get("token_ids")
        return cache

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None, **options: Any) -> str:
        """Save to a temporary folder and upload that as a dataset repository; returns its address."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, **options)
            url = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repo_id, folder_path=folder, repo_type="dataset", commit_message="PatternKV cache"
            )
        return str(url)


_LAYER_FACTS = ("start", "packed", "key_patterns", "value_patterns", "seen", "record_past", "is_initialized")


def _facts(config: PreTrainedConfig, kinds: list[str]) -> dict[str, Any]:
    """What tells one model's caches from another's."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "model_type": config.model_type,
        "name_or_path": Path(config._name_or_path).name if config._name_or_path else "",
        "hidden_size": config.hidden_size,
        "num_key_value_heads": heads,
        "head_dim": size,
        "layer_types": list(kinds),
    }


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of what a tensor shows; one that repeats an element without storing it counts that element."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _tensors_of(layer: Any) -> dict[str, torch.Tensor]:
    """Tensors among the attributes of a layer of the host."""
    found: dict[str, torch.Tensor] = {}
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor) and not name.startswith("_"):
            found[name] = value
        elif isinstance(value, (list, tuple)):
            found |= {f"{name}.{i}": item for i, item in enumerate(value) if isinstance(item, torch.Tensor)}
    return found


def _restore(layer: Any, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Put what a file holds of a layer into a new one."""
    if facts["kind"] != type(layer).__name__:
        raise ValueError(f"the file has a {facts['kind']} where this model has a {type(layer).__name__}")
    if not tensors:
        return
    if not isinstance(layer, PatternKVLayer):
        layer.lazy_initialization(tensors["keys"], tensors["values"])
        layer.keys, layer.values = tensors["keys"], tensors["values"]
        if facts["cumulative_length"] is not None:
            layer.cumulative_length = facts["cumulative_length"]
        return
    layer.lazy_initialization(tensors["keys"], tensors["values"])
    for name in _LAYER_FACTS:
        setattr(layer, name, facts[name])
    for name in ("keys", "values", "sink_keys", "sink_values"):
        setattr(layer, name, tensors.get(name))
    for states, side, like in (
        (layer.key_states, "key", layer.keys),
        (layer.value_states, "value", layer.values),
    ):
        if f"{side}_codes" in tensors:
            states.adopt(like, {name: tensors[f"{side}_{name}"] for name in states.NAMES})
