"""Launchers: cut the work into parts, allocate outputs, run the kernels. Arguments are checked already."""

import functools

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from . import configs
from .attention import attend_kernel, merge_kernel

INTERPRETED = isinstance(attend_kernel, InterpretedFunction)
# The interpreter has no processors; this many make small problems take several parts too.
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
        # Capability 12 has sm_80's matrix instructions and less shared memory.
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


def _strides(name: str, x: torch.Tensor | None, axes: str) -> dict[str, int]:
    """Strides by the names of the kernel's arguments; of what one row has for all, the batch stride is 0."""
    if x is None:
        return {f"{name}_{axis}": 0 for axis in axes}
    strides = dict(zip((f"{name}_{axis}" for axis in axes), x.stride()))
    if axes[0] == "b" and x.shape[0] == 1:
        strides[f"{name}_b"] = 0
    return strides


def new_output(query: torch.Tensor) -> torch.Tensor:
    """An empty [B, Hq, S, D] whose memory has the order [B, S, Hq, D], which a model's next layer reads."""
    rows, heads, queries, head_dim = query.shape
    return query.new_empty((rows, queries, heads, head_dim)).transpose(1, 2)


def flash_lora_attention(
    query,
    key,
    value,
    u_k,
    u_v,
    b_k,
    b_v,
    cos,
    sin,
    scale: float,
    lora_scale_k: float,
    lora_scale_v: float,
    causal: bool,
    kv_start,
    window: int | None,
) -> torch.Tensor:
    """Attention of query [B, Hq, S, D] in its dtype. Shapes: `functional`."""
    batch, heads, queries, head_dim = query.shape
    kv_heads, tokens = key.shape[1:3]
    groups = heads // kv_heads
    out = new_output(query)
    if not out.numel():
        return out

    rank_k, rank_v = (0 if u is None else u.shape[2] for u in (u_k, u_v))
    rotary = cos.shape[2] if cos is not None and rank_k else 0
    target, dtype = target_of(query.device), _DTYPE_NAMES[query.dtype]
    sizes = (queries * groups, head_dim, rank_k, rank_v, rotary)
    entry = configs.attend_entry(target, dtype, *sizes)
    programs = batch * kv_heads * triton.cdiv(queries * groups, entry["BLOCK_M"])
    # Tokens before `origin` are in nobody's window.
    origin = 0 if window is None else max(0, tokens - queries - window + 1)
    parts, chunk = configs.split_count(programs, tokens - origin, processors_of(query.device))
    batch_rows = batch * heads * queries
    part_out = part_low = part_lse = out
    if parts > 1:
        part_out, part_low, part_lse = (
            query.new_empty((parts, batch_rows, *width), dtype=torch.float32) for width in ((head_dim,), (rank_v,), ())
        )
    constants = configs.constants(entry, head_dim, rank_k, rank_v, rotary)
    tensors = {
        "query": (query, "bhs"),
        "key": (key, "bht"),
        "value": (value, "bht"),
        "u_k": (u_k, "bt"),
        "u_v": (u_v, "bt"),
        "b_k": (b_k, "d"),
        "b_v": (b_v, "d"),
        "cos": (cos, "bt"),
        "sin": (sin, "bt"),
        "kv_start": (None if kv_start is None else kv_start.contiguous(), ""),
    }
    arguments = {f"{name}_ptr": query if x is None else x for name, (x, _) in tensors.items()}
    for name, (x, axes) in tensors.items():
        if axes:
            arguments |= _strides(name, x, axes)
    arguments |= {
        "out_ptr": part_out,
        "low_ptr": part_low,
        "lse_ptr": part_lse,
        "scale": float(scale),
        "lora_scale_k": float(lora_scale_k),
        "lora_scale_v": float(lora_scale_v),
        "batch_rows": batch_rows,
        "kv_heads": kv_heads,
        "queries": queries,
        "tokens": tokens,
        "origin": origin,
        "chunk": chunk,
        "GROUPS": groups,
        "HEAD_DIM": head_dim,
        "RANK_K": rank_k,
        "RANK_V": rank_v,
        "ROTARY": rotary,
        "CAUSAL": causal,
        "WINDOW": window or 0,
        "HAS_START": kv_start is not None,
        "SPLIT": parts > 1,
        "DOT": _DOT_TYPES[query.dtype],
        **constants,
    }
    with _on(query.device):
        attend_kernel[(programs, parts)](**arguments, **configs.launch_options(entry))
        if parts > 1:
            merge_kernel[(batch_rows,)](
                part_out,
                part_low,
                part_lse,
                query if b_v is None else b_v,
                out,
                float(lora_scale_v),
                batch_rows,
                heads,
                parts,
                b_v_d=arguments["b_v_d"],
                GROUPS=groups,
                HEAD_DIM=head_dim,
                RANK_V=rank_v,
                BLOCK_D=constants["BLOCK_D"],
                BLOCK_RV=constants["BLOCK_RV"],
                BLOCK_S=configs.MERGE["BLOCK_S"],
                **configs.launch_options(configs.MERGE),
            )
    return out
