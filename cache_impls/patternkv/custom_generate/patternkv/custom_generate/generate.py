"""Generation with a PatternKV cache, for `model.generate(..., custom_generate=..., trust_remote_code=True)`."""

import dataclasses
from typing import Any

from hf_ext import PatternKVCache, PatternKVConfig

_FIELDS = {field.name for field in dataclasses.fields(PatternKVConfig)}


def generate(
    model: Any, patternkv_config: PatternKVConfig | dict | None = None, cache: Any = None, **kwargs: Any
) -> Any:
    """`model.generate`, with keys and values kept in 2, 4 or 8 bits.

    Args:
        model: Decoder-only model.
        patternkv_config: How to quantize: a `PatternKVConfig` or a dict of its fields. Or give the fields themselves,
            such as `nbits=4`.
        cache: A `PatternKVCache` of an earlier call, to go on from. Default: a new one.
        kwargs: Fields of `PatternKVConfig`, and whatever `generate` takes.

    Returns:
        What `model.generate` returns.

    Raises:
        ValueError: The model is an encoder-decoder or has no full attention, the cache is of another kind, or options
            are given twice.
    """
    fields = {name: kwargs.pop(name) for name in _FIELDS & set(kwargs)}
    if isinstance(patternkv_config, dict):
        patternkv_config = PatternKVConfig.from_dict(patternkv_config)
    if cache is None:
        cache = PatternKVCache(model.config, patternkv_config, **fields)
    elif not isinstance(cache, PatternKVCache):
        raise ValueError(f"`cache` must be a PatternKVCache, got {type(cache).__name__}; leave it out for a new one")
    elif fields or patternkv_config is not None:
        given = ", ".join(sorted(fields)) or "patternkv_config"
        raise ValueError(f"`cache` has its options already; {given} cannot be given with it")
    return model.generate(cache=cache, **kwargs)
