"""Launchers: pick a configuration, allocate outputs, run the kernels. Inputs are checked and contiguous already."""

import functools
import os

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from . import configs
from .elementwise import dequantize_kernel, quantize_kernel, reduce_splits_kernel
from .w4a4 import w4a4_kernel
from .w4a16 import w4a16_kernel

INTERPRETED = isinstance(w4a16_kernel, InterpretedFunction)
# The interpreter has no processors; this many make small products take the split path too.
INTERPRETER_PROCESSORS = 4

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_DOT_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@functools.cache
def target_of(device: torch.device) -> str:
    """Which of the targets compiled ahead of time stands for a device."""
    if device.type == "cuda" and torch.version.hip:
        return "gfx942"
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        # Capability 12 has neither wgmma nor tcgen05, and sm_80's shared memory.
        return {9: "sm_90", 10: "sm_100", 11: "sm_100"}.get(major, "sm_80")
    return "sm_80"


@functools.cache
def processors_of(device: torch.device) -> int:
    """Streaming multiprocessors (compute units, Xe cores) of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    return INTERPRETER_PROCESSORS


def _on(device: torch.device):
    """Context in which Triton launches on ``device``."""
    module = torch.get_device_module(device) if device.type != "cpu" else None
    return module.device(device) if module is not None else torch.device("cpu")


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if its address is not a multiple of 16: codes are read as 32-bit words, in vectors."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _tuning() -> bool:
    return not INTERPRETED and os.environ.get("HF_EXT_KERNELS_AUTOTUNE", "1") != "0"


@functools.cache
def _tuner(kernel, names: tuple, entries: tuple):
    """Autotuner over entries; ``names``: the arguments a new value of which asks for a new measurement."""
    choices = [triton.Config(dict(meta), num_warps=warps, num_stages=stages) for meta, warps, stages in entries]
    return triton.autotune(configs=choices, key=list(names))(kernel)


def _launch(kernel, entries: list[dict], grid_of, key: tuple, arguments: dict) -> None:
    """Run ``kernel`` with the first entry, or with the fastest when tuning is on and there is a choice."""
    if len(entries) > 1 and _tuning():
        frozen = tuple(
            (tuple(configs.constexprs(entry).items()), entry["num_warps"], entry["num_stages"]) for entry in entries
        )
        _tuner(kernel, key, frozen)[grid_of](**arguments)
        return
    entry = entries[0]
    kernel[grid_of](**arguments, **configs.constexprs(entry), **configs.launch_options(entry))


def quantize(x: torch.Tensor, rule: str, macro: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K] to packed u8 [M, K/2], scale u8 [M, K/32], macro u8 [M, ceil(K/macro)], or [M, 0] where macro is 0."""
    m, k = x.shape
    macros = -(-k // macro) if macro else 0
    packed, scale, macro_bytes = (x.new_empty((m, size), dtype=torch.uint8) for size in (k // 2, k // 32, macros))
    if x.numel():
        cols = macro or 128
        options = configs.QUANTIZE
        with _on(x.device):
            quantize_kernel[(-(-m // options["ROWS"]), -(-k // cols))](
                x,
                packed,
                scale,
                macro_bytes if macro else scale,
                m,
                k // 2,
                k // 32,
                macros,
                MACRO=macro,
                THRESHOLD=configs.THRESHOLDS[rule],
                ROWS=options["ROWS"],
                COLS=cols,
                **configs.launch_options(options),
                **({} if INTERPRETED else {"enable_fp_fusion": False}),
            )
    return packed, scale, macro_bytes


def dequantize(packed, scale, macro_bytes, macro: int, dtype: torch.dtype) -> torch.Tensor:
    """Packed rows [N, K/2] to [N, K] in ``dtype``."""
    n, half_k = packed.shape
    w = packed.new_empty((n, 2 * half_k), dtype=dtype)
    if w.numel():
        options = configs.DEQUANTIZE
        with _on(packed.device):
            dequantize_kernel[(-(-n // options["ROWS"]), -(-2 * half_k // options["COLS"]))](
                packed,
                scale,
                scale if macro_bytes is None else macro_bytes,
                w,
                n,
                half_k,
                scale.shape[1],
                0 if macro_bytes is None else macro_bytes.shape[1],
                MACRO=0 if macro_bytes is None else macro,
                LIMIT=torch.finfo(dtype).max,
                ROWS=options["ROWS"],
                COLS=options["COLS"],
                **configs.launch_options(options),
            )
    return w


def gemm(x, packed, scale, macro_bytes, bias, macro: int) -> torch.Tensor:
    """x [M, K] times packed [N, K/2] transposed, plus bias [N]: [M, N] in x's dtype."""
    (m, k), n = x.shape, packed.shape[0]
    y = x.new_empty((m, n))
    if not y.numel():
        return y
    x, packed = _aligned(x), _aligned(packed)
    splits, chunk = configs.split_count(m, n, k, processors_of(x.device))
    out = y if splits == 1 else x.new_empty((splits, m, n), dtype=torch.float32)
    arguments = {
        "x_ptr": x,
        "packed_ptr": packed,
        "scale_ptr": scale,
        "macro_ptr": scale if macro_bytes is None else macro_bytes,
        "bias_ptr": x if bias is None else bias,
        "y_ptr": out,
        "m": m,
        "n": n,
        "half_k": k // 2,
        "blocks_k": scale.shape[1],
        "macros_k": 0 if macro_bytes is None else macro_bytes.shape[1],
        "chunk": chunk,
        "MACRO": 0 if macro_bytes is None else macro,
        "HAS_BIAS": bias is not None,
        "SPLIT": splits > 1,
        "DOT": _DOT_TYPES[x.dtype],
        "PRECISION": "ieee",
    }

    def grid(meta):
        return triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]), splits

    entries = configs.w4a16_candidates(target_of(x.device), _DTYPE_NAMES[x.dtype], m)
    with _on(x.device):
        _launch(w4a16_kernel, entries, grid, ("n", "half_k", "MACRO", "SPLIT"), arguments)
        if splits > 1:
            block = configs.REDUCE["BLOCK"]
            reduce_splits_kernel[(triton.cdiv(m * n, block),)](
                out,
                x if bias is None else bias,
                y,
                m * n,
                n,
                splits,
                HAS_BIAS=bias is not None,
                BLOCK=block,
                **configs.launch_options(configs.REDUCE),
            )
    return y


def gemm_w4a4(x, packed, scale, macro_bytes, bias, macro: int, rule: str, x_macro: int) -> torch.Tensor:
    """The same with x [M, K] quantised to MXFP4 first; ``x_macro``: its macro block, 0 for none."""
    (m, k), n = x.shape, packed.shape[0]
    y = x.new_empty((m, n))
    if not y.numel():
        return y
    packed = _aligned(packed)
    xq, x_scale, x_macro_bytes = quantize(x, rule, x_macro)
    macro = 0 if macro_bytes is None else macro
    arguments = {
        "xq_ptr": xq,
        "x_scale_ptr": x_scale,
        "x_macro_ptr": x_macro_bytes if x_macro else x_scale,
        "packed_ptr": packed,
        "scale_ptr": scale,
        "macro_ptr": macro_bytes if macro else scale,
        "bias_ptr": x if bias is None else bias,
        "y_ptr": y,
        "m": m,
        "n": n,
        "half_k": k // 2,
        "blocks_k": scale.shape[1],
        "x_macros_k": x_macro_bytes.shape[1],
        "macros_k": macro_bytes.shape[1] if macro else 0,
        "X_MACRO": x_macro,
        "MACRO": macro,
        "HAS_BIAS": bias is not None,
    }

    def grid(meta):
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    entries = configs.w4a4_candidates(target_of(x.device), x_macro, macro, m)
    with _on(x.device):
        _launch(w4a4_kernel, entries, grid, ("n", "half_k", "X_MACRO", "MACRO"), arguments)
    return y
