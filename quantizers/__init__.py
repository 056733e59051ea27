"""Weight quantizers for transformers: an `HfQuantizer` and its configuration in every folder."""

from hf_ext._lazy import attach

_EXPORTS = {
    "hf_ext.quantizers.mxfp4": [
        "MXFP4Config",
        "MXFP4HfQuantizer",
        "MXFP4Linear",
        "export_compressed_tensors",
        "load_adapter",
        "prepare_lora_config",
        "quantize_model",
    ]
}
_NEEDS = {"peft": ["load_adapter", "prepare_lora_config"]}
__getattr__, __dir__, __all__ = attach(__name__, _EXPORTS, submodules=["mxfp4"], needs=_NEEDS)
