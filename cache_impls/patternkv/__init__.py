"""PatternKV: a KV cache of 2, 4 or 8 bits over mined patterns (arXiv 2510.05176). See README.md in this folder."""

from hf_ext._lazy import attach

_EXPORTS = {
    "hf_ext.cache_impls.patternkv.cache": ["PatternKVCache"],
    "hf_ext.cache_impls.patternkv.configuration": ["PatternKVConfig"],
    "hf_ext.cache_impls.patternkv.layer": ["PatternKVLayer"],
}
__getattr__, __dir__, __all__ = attach(__name__, _EXPORTS, submodules=["quantization", "reference"])
