"""Model repositories for `trust_remote_code`: each folder travels to the Hub and imports no hf_ext."""

from hf_ext._lazy import attach

_EXPORTS = {"hf_ext.model_patches.turboconn": ["TurboConnConfig"]}
__getattr__, __dir__, __all__ = attach(__name__, _EXPORTS, submodules=["turboconn"])
