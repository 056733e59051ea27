"""Methods from recent papers at the extension points of the Hugging Face libraries.

Importing this package costs milliseconds and imports neither torch nor transformers: public names resolve when they
are used. It is also all that `AutoModelForCausalLM.from_pretrained` needs to load a checkpoint that a quantizer of
this package wrote, whether transformers was imported before or is imported later (see `hf_ext.registration`).
"""

from typing import TYPE_CHECKING

from hf_ext import registration as _registration
from hf_ext._lazy import attach

__version__ = "0.1.0"

# Module that defines them -> public names. One line per method.
_EXPORTS = {
    "hf_ext.adapters.ctm": ["CtMConfig", "add_ctm_adapter", "merge_adapter_folders", "merge_lora_tensors"],
    "hf_ext.cache_impls.lragent": [
        "LRAgentCache",
        "LRAgentConfig",
        "create_shared_a_adapter",
        "disable_lragent",
        "enable_lragent",
    ],
    "hf_ext.cache_impls.patternkv": ["PatternKVCache", "PatternKVConfig"],
    "hf_ext.model_patches.turboconn": ["TurboConnConfig"],
    "hf_ext.quantizers.mxfp4": [
        "MXFP4Config",
        "MXFP4HfQuantizer",
        "MXFP4Linear",
        "export_compressed_tensors",
        "load_adapter",
        "prepare_lora_config",
        "quantize_model",
    ],
    "hf_ext.trainers.cat": ["CaTConfig", "CaTTrainer"],
    "hf_ext.kernel_lookup": ["load_kernel"],
    "hf_ext.publishing": ["publish_kernel", "publish_model"],
    "hf_ext.registry": ["list_methods"],
}
# Optional library -> names above that need it. Where it is missing, `from hf_ext import *` goes without them.
_NEEDS = {
    "peft": [
        "LRAgentCache",
        "add_ctm_adapter",
        "create_shared_a_adapter",
        "disable_lragent",
        "enable_lragent",
        "load_adapter",
        "merge_adapter_folders",
        "prepare_lora_config",
    ],
    "trl": ["CaTConfig", "CaTTrainer"],
}
_WINGS = [
    "adapters",
    "benchmarks",
    "cache_impls",
    "generation",
    "metrics",
    "model_patches",
    "quantizers",
    "tasks",
    "trainers",
]

__getattr__, __dir__, __all__ = attach(__name__, _EXPORTS, submodules=_WINGS, needs=_NEEDS)

_registration.install()

if TYPE_CHECKING:  # for editors and type checkers only; a test keeps it equal to _EXPORTS
    from hf_ext.adapters.ctm import CtMConfig as CtMConfig
    from hf_ext.adapters.ctm import add_ctm_adapter as add_ctm_adapter
    from hf_ext.adapters.ctm import merge_adapter_folders as merge_adapter_folders
    from hf_ext.adapters.ctm import merge_lora_tensors as merge_lora_tensors
    from hf_ext.cache_impls.lragent import LRAgentCache as LRAgentCache
    from hf_ext.cache_impls.lragent import LRAgentConfig as LRAgentConfig
    from hf_ext.cache_impls.lragent import create_shared_a_adapter as create_shared_a_adapter
    from hf_ext.cache_impls.lragent import disable_lragent as disable_lragent
    from hf_ext.cache_impls.lragent import enable_lragent as enable_lragent
    from hf_ext.cache_impls.patternkv import PatternKVCache as PatternKVCache
    from hf_ext.cache_impls.patternkv import PatternKVConfig as PatternKVConfig
    from hf_ext.kernel_lookup import load_kernel as load_kernel
    from hf_ext.model_patches.turboconn import TurboConnConfig as TurboConnConfig
    from hf_ext.publishing import publish_kernel as publish_kernel
    from hf_ext.publishing import publish_model as publish_model
    from hf_ext.quantizers.mxfp4 import MXFP4Config as MXFP4Config
    from hf_ext.quantizers.mxfp4 import MXFP4HfQuantizer as MXFP4HfQuantizer
    from hf_ext.quantizers.mxfp4 import MXFP4Linear as MXFP4Linear
    from hf_ext.quantizers.mxfp4 import export_compressed_tensors as export_compressed_tensors
    from hf_ext.quantizers.mxfp4 import load_adapter as load_adapter
    from hf_ext.quantizers.mxfp4 import prepare_lora_config as prepare_lora_config
    from hf_ext.quantizers.mxfp4 import quantize_model as quantize_model
    from hf_ext.registry import list_methods as list_methods
    from hf_ext.trainers.cat import CaTConfig as CaTConfig
    from hf_ext.trainers.cat import CaTTrainer as CaTTrainer
