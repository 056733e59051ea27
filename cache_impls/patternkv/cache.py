"""PatternKV as a transformers `Cache`."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, get_layer_types_and_kwargs

from .configuration import PatternKVConfig
from .files import FILES, read_layers, stored_config, tensors_of, write_cache
from .layer import PatternKVLayer

__all__ = ["PatternKVCache"]

# Models whose attention layers work on the keys or values that the cache returned: they get dense ones. So do those
# that cache latents and expand them (multi-head latent attention).
_DENSE_MODELS = (
    "diffllama",
    "doge",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "idefics",
    "inkling",
    "jetmoe",
    "minimax_m3_vl",
    "moonshine",
)


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
                f"{', '.join(sorted(set(kinds)))}), so there is nothing to quantize; use DynamicCache"
            )
        self.model_facts = _facts(decoder, kinds, config._name_or_path)
        # What `save_pretrained` was told of the tokens, once read again.
        self.token_ids: list | None = None
        works_on_them = decoder.model_type.removesuffix("_text") in _DENSE_MODELS
        attention = None if works_on_them or getattr(decoder, "kv_lora_rank", None) else decoder
        layers = [
            PatternKVLayer(self.patternkv_config, attention)
            if kind == "full_attention"
            else DYNAMIC_LAYER_TYPE_MAPPING[kind](**kwargs)
            for kind, kwargs in zip(kinds, arguments)
        ]
        super().__init__(layers=layers)
        self._packed = list(self.packed_layers)

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
        first, *others = self._packed
        if layer_idx == first:
            seen = self.layers[first].seen
            behind = [index for index in others if self.layers[index].seen != seen]
            if behind:
                raise ValueError(
                    f"layer {first} of the cache has seen {seen} tokens and layer {behind[0]} "
                    f"{self.layers[behind[0]].seen}: the cache belongs to a model of {len(self.layers)} layers, or a "
                    "forward pass was interrupted; call `reset()` or make a new cache"
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
            `bytes` (all storages on the device, spare room of growing buffers included), `host_bytes` (of offloaded
            layers), `full_bytes` (the same tokens in a `DynamicCache`), `ratio` (full over `bytes`),
            `bits_per_element` (of packed tokens: codes, scales, ids and patterns, in use), and by part:
            `packed_bytes`, `dense_bytes` (sinks and tails), `other_bytes` (layers of the host), `spare_bytes`;
            `tokens` and `packed_tokens` (per row, the most), `patterns` (per head, the most).
        """
        storages: dict[int, int] = {}
        offloaded: dict[int, int] = {}
        full = in_use = elements = dense = other = packed_total = 0
        for layer in self.layers:
            if not isinstance(layer, PatternKVLayer):
                held = [tensor for tensor in tensors_of(layer).values() if tensor.numel()]
                full += sum(tensor.numel() * tensor.element_size() for tensor in held)
                other += sum(tensor.untyped_storage().nbytes() for tensor in held)
                storages |= {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
                continue
            if not layer.is_initialized:
                continue
            rows = len(layer.start)
            for tensor in layer.tensors().values():
                if tensor.numel():
                    place = storages if tensor.device.type == torch.device(layer.device).type else offloaded
                    place[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            for side in (layer.keys, layer.values):
                full += rows * side.shape[1] * layer.seen * side.shape[3] * side.element_size()
            dense += sum(
                tensor.untyped_storage().nbytes()
                for name, tensor in layer.tensors().items()
                if name in ("keys", "values", "sink_keys", "sink_values") and tensor.numel()
            )
            longest = max(layer.packed, default=0)
            for states, counts in (
                (layer.key_states, layer.key_patterns),
                (layer.value_states, layer.value_patterns),
            ):
                if not longest:
                    continue
                in_use += states.bytes_in_use(longest, max(counts))
                packed_total += sum(tensor.untyped_storage().nbytes() for tensor in states.tensors.values())
                elements += rows * states.codes.shape[1] * longest * states.channels
        layers = self.packed_layers.values()
        kept = sum(storages.values())
        return {
            "bytes": kept,
            "host_bytes": sum(offloaded.values()),
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
            token_ids: Ids [B, T] that the cache was filled with; `from_pretrained` gives them back as `token_ids`.

        Raises:
            ValueError: A layer keeps a state that is not made of keys and values (linear attention).
        """
        write_cache(self, Path(save_directory), token_ids)

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
            device: Where the tensors go until the model's first states come, which take them along.
            patternkv_config: If given, the configuration that the file must have, but for `return_packed`.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: The files are damaged, of another model, configuration or version.
        """
        folder = Path(folder)
        stored = FILES.read_facts(folder)
        kept = stored_config(folder, stored)
        if patternkv_config is not None:
            other = patternkv_config.to_dict() | {"return_packed": kept.return_packed}
            _compare(f"{folder} was written with", kept.to_dict(), other)
            kept = patternkv_config
        cache = cls(config, kept)
        _compare(f"{folder} is of another model:", stored["model"], cache.model_facts)
        read_layers(cache, folder, stored, device)
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


def _compare(what: str, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    differing = [name for name, value in wanted.items() if stored.get(name) != value]
    if differing:
        listed = ", ".join(f"{name}={stored.get(name)!r}, not {wanted[name]!r}" for name in differing)
        raise ValueError(f"{what} {listed}")


def _facts(config: PreTrainedConfig, kinds: list[str], name: str) -> dict[str, Any]:
    """What tells one model's caches from another's."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "model_type": config.model_type,
        "name_or_path": Path(name).name if name else "",
        "hidden_size": config.hidden_size,
        "num_key_value_heads": heads,
        "head_dim": size,
        "layer_types": list(kinds),
    }
