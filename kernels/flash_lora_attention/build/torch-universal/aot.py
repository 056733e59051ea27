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


def aot_configs() -> list[dict]:
    """One dict per configuration to compile.

    Keys: ``kernel`` (the jitted function), ``name``, ``signature`` (argument -> Triton type, constexprs left out),
    ``constexprs``, ``num_warps``, ``num_stages``, ``divisible`` (arguments that are multiples of 16 when D is one and
    tensors are aligned), ``default`` (of the quick check), ``targets`` and ``options`` (passed to the compiler).
    """
    found = []
    for rows in (DECODE, PREFILL):
        # The same tile without an adapter is what the others are compared with.
        for rank_k, rank_v in ((16, 16), (0, 16), (0, 0)):
            found += _attend("bf16", rows, 128, rank_k, rank_v, default=True)
        found += _attend("bf16", rows, 64, 16, 16, default=True)
        found += _attend("bf16", rows, 64, 0, 16)
        for rank in (8, 32, 64):
            found += _attend("bf16", rows, 128, rank, rank)
        for rank_k, rank_v in ((32, 32), (64, 64)):
            found += _attend("bf16", rows, 64, rank_k, rank_v)
        for rank_k, rank_v in ((0, 64), (64, 0), (8, 64)):
            found += _attend("bf16", rows, 128, rank_k, rank_v)
        for head_dim, rotary in ((128, 96), (80, 32), (64, 16)):
            for rank in (16, 32, 64):
                found += _attend("bf16", rows, head_dim, rank, rank, rotary=rotary)
        found += _attend("bf16", rows, 96, 16, 16)
        found += _attend("bf16", rows, 128, 16, 16, rotary=0)
        for rank in (16, 64):
            found += _attend("bf16", rows, 128, rank, rank, window=1024)
            found += _attend("bf16", rows, 64, rank, rank, window=1024)
        found += _attend("bf16", rows, 128, 0, 16, window=1024)
        found += _attend("bf16", rows, 128, 16, 16, causal=False)
        found += _attend("fp16", rows, 128, 16, 16)
    for rank in (16, 32):
        found += _attend("fp32", DECODE, 128, rank, rank)
    found += _attend("fp32", DECODE, 64, 64, 64)
    for rank in (16, 64):
        found += _attend("bf16", DECODE, 128, rank, rank, split=True)
    for rank_k, rank_v in ((16, 16), (64, 64), (0, 16)):
        found += _attend("bf16", PREFILL, 128, rank_k, rank_v, split=True)
    found += _attend("bf16", PREFILL, 64, 16, 16, split=True)
    return [*found, *_merge()]


def _attend(dtype, rows, head_dim, rank_k, rank_v, *, rotary=None, **options) -> list[dict]:
    """The configuration for every target, one dict for those that share an entry."""
    rotary = head_dim if rotary is None else rotary
    sizes = (rows, head_dim, rank_k, rank_v, rotary if rank_k else 0)
    entries = {}
    for target in configs.ALL:
        entry = configs.attend_entry(target, dtype, *sizes)
        tile = tuple(entry[key] for key in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "HALVES"))
        entries.setdefault(tile, (entry, []))[1].append(target)
    return [
        attend_config(dtype, *sizes[:-1], {**entry, "targets": tuple(targets)}, rotary=rotary, **options)
        for entry, targets in entries.values()
    ]


def _merge() -> list[dict]:
    found = []
    for head_dim, rank in ((128, 16), (64, 16), (128, 64)):
        entry = {"BLOCK_M": 16, "BLOCK_N": 16, "HALVES": False}
        padded = configs.constants(entry, head_dim, 0, rank, 0)
        constants = {"b_v_d": rank, "GROUPS": 4, "HEAD_DIM": head_dim, "RANK_V": rank}
        constants |= {"BLOCK_S": configs.MERGE["BLOCK_S"], **{name: padded[name] for name in ("BLOCK_D", "BLOCK_RV")}}
        types = {"part_out_ptr": "*fp32", "part_low_ptr": "*fp32", "part_lse_ptr": "*fp32"}
        types |= {"b_v_ptr": "*bf16", "out_ptr": "*bf16"}
        scalars = {"lora_scale_v": "fp32", "batch_rows": "i32", "heads": "i32", "parts": "i32"}
        found.append(
            {
                "kernel": merge_kernel,
                "name": f"merge-bf16-d{head_dim}-v{rank}",
                "signature": types | scalars,
                "constexprs": constants,
                **configs.launch_options(configs.MERGE),
                "divisible": list(types),
                "targets": configs.ALL,
                "default": (head_dim, rank) == (128, 16),
                "options": {},
            }
        )
    return found


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
        **configs.constants(entry, head_dim, rank_k, rank_v, rotary if rank_k else 0),
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
    name += "-halves" if constants["HALVES"] else ""
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
