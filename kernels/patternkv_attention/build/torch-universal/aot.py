"""What the ahead-of-time check compiles: the configurations of `configs` with the arguments a launch would pass.

Never imported by the package itself; a compiler process imports it, and not under `TRITON_INTERPRET`.
"""

import triton
import triton.language as tl

from . import configs
from .attention import attend_kernel, merge_kernel

_DOT = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
# Arguments that `attend_kernel` does not specialise on, and those that are no multiple of 16.
_FREE = ("rows", "kv_heads", "packed", "dense", "chunk", "mask_b", "inner", "outer")


def aot_configs() -> list[dict]:
    """One dict per configuration to compile.

    Keys: ``kernel`` (the jitted function), ``name``, ``signature`` (argument -> Triton type, constexprs left out),
    ``constexprs``, ``num_warps``, ``num_stages``, ``divisible`` (arguments that are multiples of 16 when D is one and
    tensors are aligned), ``default`` (of the quick check), ``targets`` and ``options`` (passed to the compiler).
    """
    found = []
    for bits in ((2, 2), (4, 4), (8, 8), (4, 2)):
        for head_dim in (64, 128):
            for group_size in (128, 32):
                for mask in (False, True):
                    default = head_dim == 128 and group_size == 128 and mask and bits != (8, 8)
                    found += _attend("bf16", head_dim, *bits, group_size, head_dim, mask, default=default)
            # Packed tokens alone: the only loop is then the one over them, whose instructions can be counted.
            default = bits in ((2, 2), (4, 4))
            found += _attend("bf16", head_dim, *bits, 128, head_dim, True, dense=False, default=default)
    # What else a model may ask for: other widths, several value groups a token, a soft cap, other dtypes.
    for head_dim, bits, value_group in (
        (128, 4, 32),
        (32, 2, 32),
        (80, 2, 80),
        (96, 4, 96),
        (256, 2, 256),
        (256, 4, 256),
        (256, 8, 256),
    ):
        found += _attend("bf16", head_dim, bits, bits, 128, value_group, True)
    found += _attend("bf16", 256, 2, 2, 128, 128, True, softcap=True)
    for dtype, head_dim, bits in (("fp16", 128, 2), ("fp32", 64, 2), ("fp32", 128, 4)):
        found += _attend(dtype, head_dim, bits, bits, 128, head_dim, True)
    return [*found, *_merge()]


def _attend(
    dtype,
    head_dim,
    key_bits,
    value_bits,
    group_size,
    value_group_size,
    mask,
    *,
    softcap=False,
    dense=True,
    default=False,
) -> list[dict]:
    """The configuration for every target, one dict for those that share an entry."""
    found = []
    for target in configs.ALL:
        entry = configs.attend_entry(target, dtype, head_dim, key_bits, value_bits, group_size)
        same = next((config for config in found if config["entry"] is entry), None)
        if same is not None:
            same["targets"] += (target,)
            continue
        types = {"query_ptr": dtype, "lengths_ptr": "i32", "mask_ptr": "u8", "out_ptr": "fp32", "lse_ptr": "fp32"}
        for side in ("key", "value"):
            types |= {f"{side}_codes_ptr": "u8", f"{side}_scale_ptr": "fp16", f"{side}_zero_ptr": "fp16"}
            types |= {f"{side}_ids_ptr": "u8", f"{side}_bank_ptr": dtype, f"dense_{side}_ptr": dtype}
        constants = {
            "GROUPS": 4,
            "HEAD_DIM": head_dim,
            "KEY_BITS": key_bits,
            "VALUE_BITS": value_bits,
            "GROUP_SIZE": group_size,
            "VALUE_GROUP_SIZE": value_group_size,
            "HAS_SOFTCAP": softcap,
            "HAS_LENGTHS": True,
            "HAS_MASK": mask,
            "HAS_DENSE": dense,
            "DOT": _DOT[dtype],
            "BLOCK_G": configs.BLOCK_G,
            "BLOCK_T": entry["BLOCK_T"],
            "KEY_BLOCK": configs.plane_block(head_dim, key_bits),
            "VALUE_BLOCK": configs.plane_block(head_dim, value_bits),
            # A launch specialises on ids that lie next to each other.
            "key_ids_t": 1,
            "value_ids_t": 1,
        }
        pointers = {name: f"*{kind}" for name, kind in types.items()}
        scalars = {
            name: "fp32" if name in ("inner", "outer") else "i32"
            for name in attend_kernel.arg_names
            if name not in pointers and name not in constants
        }
        bits = f"{key_bits}" if key_bits == value_bits else f"{key_bits}-{value_bits}"
        name = f"attend-{dtype}-d{head_dim}-b{bits}-g{group_size}"
        name += f"-v{value_group_size}" if value_group_size != head_dim else ""
        name += ("-mask" if mask else "") + ("-softcap" if softcap else "") + ("" if dense else "-packed")
        name += f"-t{entry['BLOCK_T']}-w{entry['num_warps']}-s{entry['num_stages']}"
        found.append(
            {
                "kernel": attend_kernel,
                "name": name,
                "signature": pointers | scalars,
                "constexprs": constants,
                **configs.launch_options(entry),
                "divisible": [*pointers, *(name for name in scalars if name not in _FREE)],
                "targets": (target,),
                "default": default,
                "options": {},
                "entry": entry,
            }
        )
    return [{key: value for key, value in config.items() if key != "entry"} for config in found]


def _merge() -> list[dict]:
    found = []
    for head_dim in (64, 128):
        constants = {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}
        constants["BLOCK_S"] = configs.MERGE["BLOCK_S"]
        types = {"part_out_ptr": "*fp32", "part_lse_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32"}
        found.append(
            {
                "kernel": merge_kernel,
                "name": f"merge-bf16-d{head_dim}",
                "signature": types | {"rows": "i32", "parts": "i32"},
                "constexprs": constants,
                **configs.launch_options(configs.MERGE),
                "divisible": list(types),
                "targets": configs.ALL,
                "default": head_dim == 128,
                "options": {},
            }
        )
    return found
