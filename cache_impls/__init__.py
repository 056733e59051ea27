"""Key/value caches: subclasses of transformers' `Cache`, one folder per method."""

from hf_ext._lazy import attach

_EXPORTS = {
    "hf_ext.cache_impls.lragent": [
        "LRAgentCache",
        "LRAgentConfig",
        "create_shared_a_adapter",
        "disable_lragent",
        "enable_lragent",
    ],
    "hf_ext.cache_impls.patternkv": ["PatternKVCache", "PatternKVConfig"],
}
_NEEDS = {"peft": ["LRAgentCache", "create_shared_a_adapter", "disable_lragent", "enable_lragent"]}
__getattr__, __dir__, __all__ = attach(__name__, _EXPORTS, submodules=["lragent", "patternkv"], needs=_NEEDS)
