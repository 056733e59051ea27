"""Compress then Merge: several LoRA adapters into one of rank r (arXiv 2606.03723). See README.md in this folder."""

from hf_ext._lazy import attach

_EXPORTS = {
    "hf_ext.adapters.ctm.config": ["CtMConfig"],
    "hf_ext.adapters.ctm.core": ["merge_lora_tensors"],
    "hf_ext.adapters.ctm.folders": ["merge_adapter_folders"],
    "hf_ext.adapters.ctm.merging": ["add_ctm_adapter"],
    "hf_ext.adapters.ctm.report": ["CtMReport", "LayerReport"],
}
_NEEDS = {"peft": ["add_ctm_adapter", "merge_adapter_folders"]}
__getattr__, __dir__, __all__ = attach(__name__, _EXPORTS, submodules=["core", "rules"], needs=_NEEDS)
