"""TRL trainers with their scripts, one folder per method."""

from hf_ext._lazy import attach

_EXPORTS = {"hf_ext.trainers.cat": ["CaTConfig", "CaTTrainer"]}
_NEEDS = {"trl": ["CaTConfig", "CaTTrainer"]}
__getattr__, __dir__, __all__ = attach(__name__, _EXPORTS, submodules=["answers", "cat"], needs=_NEEDS)
