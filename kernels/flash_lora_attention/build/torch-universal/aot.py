"""What the ahead-of-time check compiles: the configurations of `configs` with the arguments a launch would pass.

Never imported by the package itself; a compiler process imports it, and not under `TRITON_INTERPRET`.
"""

import triton.language as tl

from . import configs
from .attention import attend_kernel, merge_kernel

_DOT = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
# Arguments that `attend_kernel` does not specialise on, and those that are no multiple of 16.
_FREE = ("scale", "lora_scale_k", "lora_scale_v", "batch_rows", "kv_heads", "queries", "tokens", "origin", "chunk")
# Rows of a KV head that stand for a decode step and for a prefill, with 4 query heads a KV head.
DECODE, PREFILL = 4, 4096


def attend_config(
    dtype: str,
    rows: int,
    head_dim: int,
    rank_k: int,
    rank_v: int,
    entry: dict,
    *,
    rotary: int | None = None,
    causal: bool = True,
    window: int = 0,
    split: bool = False,
    default: bool = False,
) -> dict:
    """One configuration, for the targets of ``entry`` (a launch entry as `configs` has them)."""
    rotary = head_dim if rotary is None else rotary
    types = {name: dtype for name in ("query", "key", "value", "u_k", "u_v", "b_k", "b_v", "cos", "sin")}
    types |= {"kv_start": "i64", "out": "fp32" if split else dtype, "low": "fp32", "lse": "fp32"}
    constants = {
        # Rows of u and of b follow each other.
        "u_k_t": rank_k,
        "u_v_t": rank_v,
        "b_k_d": rank_k,
        "b_v_d": rank_v,
        "GROUPS": 4,
        "HEAD_DIM": head_dim,
        "RANK_K": rank_k,
        "RANK_V": rank_v,
        "ROTARY": rotary if rank_k else 0,
        "CAUSAL": causal,
        "WINDOW": window,
        "HAS_START": True,
        "SPLIT": split,
        "DOT": _DOT[dtype],
        "BLOCK_M": entry["BLOCK_M"],
        "BLOCK_N": entry["BLOCK_N"],
        **configs.blocks(head_dim, rank_k, rank_v, rotary if rank_k else 0),
    }
    pointers = {f"{name}_ptr": f"*{kind}" for name, kind in types.items()}
    scalars = {
        name: "fp32" if "scale" in name else "i32"
        for name in attend_kernel.arg_names
        if name not in pointers and name not in constants
    }
    name = f"{'decode' if rows == DECODE else 'prefill'}-{dtype}-d{head_dim}-k{rank_k}-v{rank_v}"
    name += f"-rot{rotary}" if rank_k and rotary != head_dim else ""
    name += ("" if causal else "-full") + (f"-window{window}" if window else "") + ("-split" if split else "")
    name += f"-{entry['BLOCK_M']}x{entry['BLOCK_N']}-w{entry['num_warps']}-s{entry['num_stages']}"
    return {
        "kernel": attend_kernel,
        "name": name,
        "signature": pointers | scalars,
        "constexprs": constants,
        **configs.launch_options(entry),
        "divisible": [*pointers, *(name for name in scalars if name not in _FREE)],
        "targets": entry.get("targets", configs.ALL),
        "default": default,
        "options": {},
    }
