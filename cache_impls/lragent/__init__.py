"""LRAgent: one key/value store for many LoRA agents over one trajectory. See README.md in this folder."""

from hf_ext._lazy import attach

_EXPORTS = {
    "hf_ext.cache_impls.lragent.cache": ["LRAgentCache"],
    "hf_ext.cache_impls.lragent.configuration": ["LRAgentConfig"],
    "hf_ext.cache_impls.lragent.layer": ["LRAgentLayer"],
    "hf_ext.cache_impls.lragent.lora": ["create_shared_a_adapter", "disable_lragent", "enable_lragent"],
}
_NEEDS = {"peft": ["LRAgentCache", "create_shared_a_adapter", "disable_lragent", "enable_lragent"]}
__getattr__, __dir__, __all__ = attach(__name__, _EXPORTS, submodules=["functional", "reference"], needs=_NEEDS)
