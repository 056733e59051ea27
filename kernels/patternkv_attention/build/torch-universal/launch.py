"""Launchers: cut the work into parts, allocate outputs, run the kernels. Arguments are checked already."""

import functools
import math

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


def _strides(name: str, x: torch.Tensor, axes: str = "bh") -> dict[str, int]:
    """Strides of the leading axes by the names of the kernel's arguments; one bank for all rows has batch stride 0."""
    strides = dict(zip((f"{name}_{axis}" for axis in axes), x.stride()))
    if x.shape[0] == 1:
        strides[f"{name}_b"] = 0
    return strides


def _last_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def decode_attention(
    query,
    key_codes,
    key_scale,
    key_zero,
    key_ids,
    key_bank,
    value_codes,
    value_scale,
    value_zero,
    value_ids,
    value_bank,
    dense_key,
    dense_value,
    key_bits: int,
    value_bits: int,
    group_size: int,
    value_group_size: int,
    scaling: float,
    softcap: float | None,
    lengths,
    mask,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [B, Hq, D]: output in its dtype and lse float32 [B, Hq]. Shapes: `functional`."""
    query = query.contiguous()
    batch, heads, head_dim = query.shape
    kv_heads, packed = key_codes.shape[1:3]
    dense = dense_key.shape[2]
    out = torch.empty_like(query)
    lse = query.new_empty((batch, heads), dtype=torch.float32)
    if not out.numel():
        return out, lse

    groups = heads // kv_heads
    programs = batch * kv_heads * triton.cdiv(groups, configs.BLOCK_G)
    parts, chunk = configs.split_count(programs, packed, dense, processors_of(query.device))
    part_out, part_lse = out, lse
    if parts > 1:
        part_out = query.new_empty((parts, batch * heads, head_dim), dtype=torch.float32)
        part_lse = query.new_empty((parts, batch * heads), dtype=torch.float32)
    tensors = {
        "key_codes": key_codes,
        "key_scale": key_scale,
        "key_zero": key_zero,
        "key_ids": key_ids,
        "key_bank": key_bank,
        "value_codes": value_codes,
        "value_scale": value_scale,
        "value_zero": value_zero,
        "value_ids": value_ids,
        "value_bank": value_bank,
    }
    rows = {"dense_key": _last_contiguous(dense_key), "dense_value": _last_contiguous(dense_value)}
    arguments = {f"{name}_ptr": x for name, x in {"query": query, **tensors, **rows}.items()}
    for name, x in tensors.items():
        # One byte may stand for the ids of all tokens.
        arguments |= _strides(name, x, "bht" if name.endswith("ids") else "bh")
    for name, x in rows.items():
        arguments |= _strides(name, x, "bht")
    if mask is not None:
        mask = _last_contiguous(mask).view(torch.uint8)
    # Base-2 logits are products * outer, or with a soft cap tanh(products * inner) * outer.
    inner, outer = (scaling, 1.0) if softcap is None else (scaling / softcap, softcap)
    arguments |= {
        "lengths_ptr": query if lengths is None else lengths.contiguous(),
        "mask_ptr": query if mask is None else mask,
        "mask_b": 0 if mask is None else mask.stride(0),
        "out_ptr": part_out,
        "lse_ptr": part_lse,
        "inner": float(inner),
        "outer": float((scaling if softcap is None else outer) / math.log(2)),
        "rows": batch * heads,
        "kv_heads": kv_heads,
        "packed": packed,
        "dense": dense,
        "chunk": chunk,
        "GROUPS": groups,
        "HEAD_DIM": head_dim,
        "KEY_BITS": key_bits,
        "VALUE_BITS": value_bits,
        "GROUP_SIZE": group_size,
        "VALUE_GROUP_SIZE": value_group_size,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_LENGTHS": lengths is not None,
        "HAS_MASK": mask is not None,
        "HAS_DENSE": dense > 0,
        "DOT": _DOT_TYPES[query.dtype],
        "BLOCK_G": configs.BLOCK_G,
        "KEY_BLOCK": configs.plane_block(head_dim, key_bits),
        "VALUE_BLOCK": configs.plane_block(head_dim, value_bits),
    }
    dtype = _DTYPE_NAMES[query.dtype]
    entry = configs.attend_entry(target_of(query.device), dtype, head_dim, key_bits, value_bits, group_size)
    with _on(query.device):
        attend_kernel[(programs, parts)](**arguments, BLOCK_T=entry["BLOCK_T"], **configs.launch_options(entry))
        if parts > 1:
            merge_kernel[(batch * heads,)](
                part_out,
                part_lse,
                out,
                lse,
                batch * heads,
                parts,
                HEAD_DIM=head_dim,
                BLOCK_D=triton.next_power_of_2(head_dim),
                BLOCK_S=configs.MERGE["BLOCK_S"],
                **configs.launch_options(configs.MERGE),
            )
    return out, lse
