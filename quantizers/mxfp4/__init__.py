"""MXFP4 with overflow-aware and macro-block scaling (arXiv 2603.08713). See README.md in this folder."""

from hf_ext._lazy import attach

_EXPORTS = {
    "hf_ext.quantizers.mxfp4.calibration": ["collect_channel_stats"],
    "hf_ext.quantizers.mxfp4.configuration": ["MXFP4Config"],
    "hf_ext.quantizers.mxfp4.conversion": ["quantize_model"],
    "hf_ext.quantizers.mxfp4.export": ["export_compressed_tensors"],
    "hf_ext.quantizers.mxfp4.linear": ["MXFP4Linear"],
    "hf_ext.quantizers.mxfp4.peft": ["load_adapter", "prepare_lora_config"],
    "hf_ext.quantizers.mxfp4.quantizer": ["MXFP4HfQuantizer"],
}
_NEEDS = {"peft": ["load_adapter", "prepare_lora_config"]}
__getattr__, __dir__, __all__ = attach(__name__, _EXPORTS, submodules=["numerics", "reference"], needs=_NEEDS)
