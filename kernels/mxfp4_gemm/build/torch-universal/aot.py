"""What the ahead-of-time check compiles: the configurations of `configs` with the arguments a launch would pass.

Never imported by the package itself; a compiler process imports it, and not under `TRITON_INTERPRET`.
"""

import itertools

import torch
import triton.language as tl

from . import configs
from .elementwise import dequantize_kernel, quantize_kernel, reduce_splits_kernel
from .w4a4 import w4a4_kernel
from .w4a16 import w4a16_kernel

_DOT = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
_LIMIT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def aot_configs() -> list[dict]:
    """One dict per configuration to compile.

    Keys: ``kernel`` (the jitted function), ``name``, ``signature`` (argument -> Triton type, constexprs left out),
    ``constexprs``, ``num_warps``, ``num_stages``, ``divisible`` (arguments that are multiples of 16 when K is a
    multiple of 32, N of 16 and tensors are aligned), ``default`` (of the quick check), ``targets`` and ``options``
    (passed to the compiler).
    """
    return [*_w4a16(), *_w4a4(), *_elementwise()]


def _shape_of(entry: dict) -> str:
    tile = "x".join(str(entry[key]) for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    return f"{tile}-w{entry['num_warps']}-s{entry['num_stages']}"


def _config(kernel, name, entry, types: dict, constants: dict, divisible=(), **more) -> dict:
    pointers = {key: f"*{value}" for key, value in types.items()}
    integers = [key for key in kernel.arg_names if key not in pointers and key not in constants]
    return {
        "kernel": kernel,
        "name": name,
        "signature": pointers | dict.fromkeys(integers, "i32"),
        "constexprs": constants,
        **configs.launch_options(entry),
        "divisible": [*pointers, *divisible],
        "targets": entry.get("targets", configs.ALL),
        "default": False,
        "options": {},
        **more,
    }


def _w4a16() -> list[dict]:
    found = []
    for entry in configs.W4A16:
        # Up to 64 rows may be cut along K: partial sums in float32, bias left to the reduction.
        splits = (True, False) if entry.get("max_m", configs.SPLIT_MAX_M + 1) <= configs.SPLIT_MAX_M else (False,)
        first = entry is next(e for e in configs.W4A16 if e.get("max_m") == entry.get("max_m"))
        kinds = [(entry["dtypes"][0], 128), (entry["dtypes"][0], 0), (entry["dtypes"][-1], 64)]
        for (dtype, macro), split in itertools.product(kinds, splits):
            name = f"w4a16-{dtype}-macro{macro}-{_shape_of(entry)}" + ("-split" if split else "")
            types = dict.fromkeys(("packed_ptr", "scale_ptr", "macro_ptr"), "u8")
            types |= {"x_ptr": dtype, "bias_ptr": dtype, "y_ptr": "fp32" if split else dtype}
            constants = {
                "MACRO": macro,
                "HAS_BIAS": not split,
                "SPLIT": split,
                "DOT": _DOT[dtype],
                "PRECISION": "ieee",
                **configs.constexprs(entry),
            }
            default = first and macro == 128 and dtype == "bf16" and split == splits[0]
            divisible = ("n", "half_k", "chunk")
            found.append(_config(w4a16_kernel, name, entry, types, constants, divisible, default=default))
    return found


def _w4a4() -> list[dict]:
    found = []
    for x_macro, macro in [(64, 128), (128, 128), (0, 0), (64, 32), (0, 128), (64, 0)]:
        tiles = configs.w4a4_entries(x_macro, macro)
        for tile in tiles:
            first = tile is next(other for other in tiles if other.get("max_m") == tile.get("max_m"))
            types = dict.fromkeys(
                ("xq_ptr", "x_scale_ptr", "x_macro_ptr", "packed_ptr", "scale_ptr", "macro_ptr"), "u8"
            )
            types |= {"bias_ptr": "bf16", "y_ptr": "bf16"}
            constants = {"X_MACRO": x_macro, "MACRO": macro, "HAS_BIAS": True, **configs.constexprs(tile)}
            name = f"w4a4-macro{x_macro}-{macro}-{_shape_of(tile)}"
            default = first and (x_macro, macro) == (64, 128)
            found.append(_config(w4a4_kernel, name, tile, types, constants, ("n", "half_k"), default=default))
    return found


def _elementwise() -> list[dict]:
    found = []
    for dtype, macro in [("bf16", 64), ("bf16", 128), ("bf16", 0), ("fp32", 128)]:
        entry = configs.QUANTIZE
        types = {"x_ptr": dtype, "packed_ptr": "u8", "scale_ptr": "u8", "macro_ptr": "u8"}
        constants = {"MACRO": macro, "THRESHOLD": configs.THRESHOLDS["oas"], "ROWS": entry["ROWS"]}
        constants["COLS"] = macro or 128
        found.append(
            _config(
                quantize_kernel,
                f"quantize-{dtype}-macro{macro}",
                entry,
                types,
                constants,
                ("half_k",),
                default=(dtype, macro) == ("bf16", 64),
                options={"enable_fp_fusion": False},
            )
        )
    for dtype, macro in [("bf16", 128), ("fp32", 0)]:
        entry = configs.DEQUANTIZE
        types = {"packed_ptr": "u8", "scale_ptr": "u8", "macro_ptr": "u8", "w_ptr": dtype}
        constants = {"MACRO": macro, "LIMIT": torch.finfo(_LIMIT[dtype]).max}
        constants |= {"ROWS": entry["ROWS"], "COLS": entry["COLS"]}
        name = f"dequantize-{dtype}-macro{macro}"
        default = dtype == "bf16"
        found.append(_config(dequantize_kernel, name, entry, types, constants, ("half_k",), default=default))
    types = {"part_ptr": "fp32", "bias_ptr": "bf16", "y_ptr": "bf16"}
    constants = {"HAS_BIAS": True, "BLOCK": configs.REDUCE["BLOCK"]}
    found.append(
        _config(
            reduce_splits_kernel, "reduce-splits-bf16", configs.REDUCE, types, constants, ("total", "n"), default=True
        )
    )
    return found
