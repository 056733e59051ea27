"""The configuration of MXFP4 quantisation."""

import re
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from .numerics import BLOCK_SIZES, MACRO_BLOCK_SIZES, SCALE_RULES, WEIGHT_SEARCHES

__all__ = ["QUANT_METHOD", "MXFP4Config"]

QUANT_METHOD = "hf_ext_mxfp4"


def check_module_pattern(argument: str, entry: str) -> None:
    """Raise ValueError unless ``entry`` can be matched against the names of modules, as transformers does."""
    try:
        re.compile(f"(?:{entry})")  # in a group, as transformers compiles it
    except re.error as error:
        raise ValueError(
            f"`{argument}`: {entry!r} is not a regular expression ({error.msg}); give a prefix or a suffix of the "
            "modules' names as it stands, such as 'q_proj', or a pattern such as '.*q_proj'"
        ) from None


@dataclass
class MXFP4Config(QuantizationConfigMixin):
    """MXFP4 with overflow-aware and macro-block scaling, for `from_pretrained` and `quantize_model`.

    Args:
        block_size (`int`, defaults to 32):
            Values that share one power-of-two scale: 32 (the OCP standard, what hardware and other readers take; our
            default) or 16 (the paper's experiments).
        scale_rule (`str`, defaults to `"oas"`):
            How a block's scale follows from its maximum: `"ocp"`, `"ceil"`, `"oas"` (the paper), `"even"` or `"mse"`;
            see `numerics.block_exponent`.
        macro_block_size (`int` or `None`, defaults to 128):
            Values that share one 8-bit scale mantissa: 128 (the paper), 64, 32, or `None` for plain MX blocks.
        weight_search (`str`, defaults to `"auto"`):
            How a macro block's mantissa is chosen for weights: `"static"` (from the maximum), `"dynamic"` (least
            squared error; the paper's hybrid uses it), `"weighted"` (least squared error weighted by the inputs the
            weight meets; needs `channel_stats` or a calibration) or `"auto"`: weighted when there are statistics of
            the inputs, else static.
        search_exponents (`bool`, defaults to `False`):
            Let the search also try each block's neighbouring exponents.
        channel_stats (`str`, *optional*):
            A safetensors file with one float tensor `[in_features]` a module, the mean square of its inputs, as
            `collect_channel_stats` gives and `hf-ext quantize --calibration` stores it.
        search_slots (`int`, defaults to 16):
            Mantissas tried by the searches, a divisor of 256 (the paper: 16).
        activation (`str`, *optional*):
            `"mxfp4"` rounds the inputs of the layers as well (W4A4); `None` leaves them (W4A16).
        activation_search (`str`, defaults to `"static"`):
            The mantissa search for activations; only `"static"`, which costs one pass.
        activation_macro_block_size (`int` or `None`, defaults to 64):
            Macro block of the inputs (the paper: 128; 64 costs no storage and is closer in our measurements).
        modules_to_not_convert (`list[str]`, *optional*):
            Modules left dense, with all that is in them: prefixes, suffixes or regular expressions of their names.
            `None` leaves the output head, as transformers does. Tied weights stay dense in any case. Resolved and
            stored when a model is quantised.
        dequantize (`bool`, defaults to `False`):
            Load a packed checkpoint into plain dense layers.
        compute_dtype (`str` or `torch.dtype`, *optional*):
            Dtype the weight is expanded to and multiplied in; `None` follows the layer's input.
        kernel (`str`, defaults to `"auto"`):
            Where the layers' kernels come from: `"auto"`, `"bundled"`, `"hub"` or `"reference"`; see
            `hf_ext.load_kernel`. A loading attribute: not a property of the checkpoint.

    Raises:
        ValueError: for any value that is not listed above.
    """

    block_size: int = 32
    scale_rule: str = "oas"
    macro_block_size: int | None = 128
    weight_search: str = "auto"
    search_exponents: bool = False
    channel_stats: str | None = None
    search_slots: int = 16
    activation: str | None = None
    activation_search: str = "static"
    activation_macro_block_size: int | None = 64
    modules_to_not_convert: list[str] | None = None
    dequantize: bool = False
    compute_dtype: str | torch.dtype | None = None
    kernel: str = "auto"
    quant_method: str = QUANT_METHOD

    def __post_init__(self):
        self.post_init()

    def post_init(self):
        """Check every field; see the class for what is allowed."""
        if self.quant_method != QUANT_METHOD:
            raise ValueError(f"`quant_method` must be {QUANT_METHOD!r}, got {self.quant_method!r}")
        self._check_choice("block_size", BLOCK_SIZES)
        self._check_choice("scale_rule", SCALE_RULES)
        self._check_choice("macro_block_size", (*MACRO_BLOCK_SIZES, None))
        self._check_choice("weight_search", ("auto", *WEIGHT_SEARCHES))
        self._check_choice("activation", ("mxfp4", None))
        self._check_choice("activation_search", ("static",))
        self._check_choice("activation_macro_block_size", (*MACRO_BLOCK_SIZES, None))
        self._check_choice("kernel", ("auto", "bundled", "hub", "reference"))
        if isinstance(self.search_slots, bool) or not isinstance(self.search_slots, int) or self.search_slots < 1:
            raise ValueError(f"`search_slots` must be a positive divisor of 256, got {self.search_slots!r}")
        if 256 % self.search_slots:
            raise ValueError(f"`search_slots` must divide 256, got {self.search_slots}")
        for name in ("search_exponents", "dequantize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be True or False, got {getattr(self, name)!r}")
        if self.channel_stats is not None and self.weight_search in ("static", "dynamic"):
            raise ValueError(
                f"`channel_stats` is only used by weight_search='auto' or 'weighted', got {self.weight_search!r}"
            )
        if self.weight_search in ("dynamic", "weighted") and self.macro_block_size is None:
            if not (self.search_exponents or self.scale_rule == "mse"):
                raise ValueError(
                    f"`weight_search={self.weight_search!r}` has nothing to search with macro_block_size=None and "
                    "search_exponents=False; set one of the two"
                )
        modules = self.modules_to_not_convert
        if modules is not None and (isinstance(modules, str) or not all(isinstance(entry, str) for entry in modules)):
            raise ValueError(f"`modules_to_not_convert` must be a list of names or None, got {modules!r}")
        for entry in modules or ():
            check_module_pattern("modules_to_not_convert", entry)
        self._normalise_compute_dtype()

    def _check_choice(self, name: str, allowed: tuple) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or value not in allowed:
            choices = ", ".join(repr(entry) for entry in allowed)
            raise ValueError(f"`{name}` must be one of {choices}; got {value!r}")

    def _normalise_compute_dtype(self) -> None:
        if isinstance(self.compute_dtype, torch.dtype):
            self.compute_dtype = str(self.compute_dtype).removeprefix("torch.")
        allowed = ("float32", "float16", "bfloat16")
        if self.compute_dtype is not None and self.compute_dtype not in allowed:
            raise ValueError(
                f"`compute_dtype` must be one of {', '.join(allowed)} or None, got {self.compute_dtype!r}"
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs):
        """As the base class, but an unknown key raises a `ValueError` that lists the known ones."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(config_dict) - known)
        if unknown:
            raise ValueError(f"unknown key(s) {', '.join(unknown)} in an MXFP4 configuration; known: {sorted(known)}")
        return super().from_dict(config_dict, return_unused_kwargs=return_unused_kwargs, **kwargs)

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a caller of `from_pretrained` may change about a checkpoint that is packed already."""
        return {name: getattr(self, name) for name in ("dequantize", "compute_dtype", "kernel")}

    def to_dict(self) -> dict[str, Any]:
        """The fields as stored in `config.json`, without what means nothing there: how to load, and a local file."""
        stored = super().to_dict()
        for name in ("dequantize", "kernel", "channel_stats"):
            stored.pop(name)
        return stored

    @property
    def torch_compute_dtype(self) -> torch.dtype | None:
        """`compute_dtype` as a `torch.dtype`."""
        return None if self.compute_dtype is None else getattr(torch, self.compute_dtype)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a weight, in rows that are whole macro blocks: 4 + 8 / block + 8 / macro block."""
        macro = 0.0 if self.macro_block_size is None else 8 / self.macro_block_size
        return 4 + 8 / self.block_size + macro

    @property
    def quantize_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `numerics.quantize` for weights, but for the search and its weights."""
        return {
            "block_size": self.block_size,
            "scale_rule": self.scale_rule,
            "macro_block_size": self.macro_block_size,
            "search_slots": self.search_slots,
            "search_exponents": self.search_exponents,
        }

    def resolve_search(self, has_stats: bool) -> str:
        """`weight_search` with `"auto"` decided.

        Raises:
            ValueError: if the weighted search is asked for and there are no statistics.
        """
        if self.weight_search == "weighted" and not has_stats:
            raise ValueError(
                "weight_search='weighted' needs the inputs' statistics: pass `channel_stats=FILE`, or quantise with a "
                "calibration (`quantize_model(..., calibration=...)`, `hf-ext quantize --calibration`)"
            )
        if self.weight_search != "auto":
            return self.weight_search
        return "weighted" if has_stats else "static"

    @classmethod
    def ocp(cls, **kwargs) -> "MXFP4Config":
        """The OCP standard as it stands: blocks of 32, rule `"ocp"`, no macro blocks."""
        return cls(**{"scale_rule": "ocp", "macro_block_size": None, "activation_macro_block_size": None} | kwargs)

    @classmethod
    def paper(cls, **kwargs) -> "MXFP4Config":
        """The paper's hybrid (MBS-H) on W4A4: blocks of 16, dynamic search for weights, static for activations."""
        preset = {
            "block_size": 16,
            "weight_search": "dynamic",
            "activation": "mxfp4",
            "activation_macro_block_size": 128,
        }
        return cls(**preset | kwargs)

    @classmethod
    def vllm(cls, **kwargs) -> "MXFP4Config":
        """What the compressed-tensors layout, and so vLLM, can hold: blocks of 32 by `"oas"`, no macro blocks."""
        return cls(**{"macro_block_size": None, "activation_macro_block_size": None} | kwargs)
