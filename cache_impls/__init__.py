"""Key/value caches: subclasses of transformers' `Cache`, one folder per method."""

from hf_ext._lazy import attach

_EXPORTS = {"hf_ext.cache_impls.patternkv": ["PatternKVCache", "PatternKVConfig"]}
__getattr__, __dir__, __all__ = attach(__name__, _EXPORTS, submodules=["patternkv"])
