"""Merging and handling of PEFT adapters, one folder per method."""

from hf_ext._lazy import attach

_EXPORTS = {"hf_ext.adapters.ctm": ["CtMConfig", "add_ctm_adapter", "merge_adapter_folders", "merge_lora_tensors"]}
_NEEDS = {"peft": ["add_ctm_adapter", "merge_adapter_folders"]}
__getattr__, __dir__, __all__ = attach(__name__, _EXPORTS, submodules=["ctm"], needs=_NEEDS)
