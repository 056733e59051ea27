"""The launch configurations that ship, read by the launcher and the ahead-of-time check, and how work is cut.

Every entry compiles without spilling on each of its ``targets`` (all of ALL where the key is absent), but for float32
with 256 channels, which is correct and slow.
"""

ALL = ("sm_80", "sm_90", "sm_100", "gfx942")

# `tl.dot` multiplies at least 16 rows: query heads of a KV head are padded to so many, more take several programs.
BLOCK_G = 16

# The first entry that fits is used. `max_columns` bounds head_dim as it is padded, `max_plane` the padded plane
# (head_dim * bits / 8), `padded` is False where no plane may be padded; BLOCK_T must divide the key group.
ATTEND = [
    {"dtypes": ("bf16", "fp16"), "max_columns": 128, "max_plane": 64, "padded": False, "BLOCK_T": 64,
     "num_warps": 4, "num_stages": 2},
    {"dtypes": ("bf16", "fp16"), "max_columns": 64, "max_plane": 64, "padded": True, "BLOCK_T": 32,
     "num_warps": 4, "num_stages": 2},
    {"dtypes": ("bf16", "fp16"), "max_columns": 128, "max_plane": 128, "padded": True, "BLOCK_T": 32,
     "num_warps": 4, "num_stages": 3},
    {"dtypes": ("bf16", "fp16"), "max_columns": 256, "max_plane": 256, "padded": True, "BLOCK_T": 32,
     "num_warps": 8, "num_stages": 1, "targets": ("sm_80", "sm_90", "sm_100")},
    {"dtypes": ("bf16", "fp16"), "max_columns": 256, "max_plane": 256, "padded": True, "BLOCK_T": 32,
     "num_warps": 4, "num_stages": 1, "targets": ("gfx942",)},
    {"dtypes": ("fp32",), "max_columns": 256, "max_plane": 256, "padded": True, "BLOCK_T": 32,
     "num_warps": 8, "num_stages": 1},
]  # fmt: skip
MERGE = {"BLOCK_S": 16, "num_warps": 4, "num_stages": 1}

# Fewer packed tokens a program cost more in merging than they bring.
MIN_CHUNK = 128

_LAUNCH_KEYS = ("num_warps", "num_stages")


def launch_options(entry: dict) -> dict:
    """num_warps and num_stages of an entry."""
    return {key: entry[key] for key in _LAUNCH_KEYS}


def plane_block(head_dim: int, bits: int) -> int:
    """Channels of a plane, head_dim * bits / 8, rounded up to a power of two that `tl.dot` takes."""
    return max(16, 1 << (head_dim * bits // 8 - 1).bit_length())


def attend_entry(target: str, dtype: str, head_dim: int, key_bits: int, value_bits: int, group_size: int) -> dict:
    """The entry of ATTEND for a target, a dtype ("bf16", "fp16", "fp32") and a layout."""
    planes = {bits: plane_block(head_dim, bits) for bits in (key_bits, value_bits)}
    columns = max(plane * 8 // bits for bits, plane in planes.items())
    return next(
        entry
        for entry in ATTEND
        if target in entry.get("targets", ALL)
        and dtype in entry["dtypes"]
        and columns <= entry["max_columns"]
        and max(planes.values()) <= entry["max_plane"]
        and (columns == head_dim or entry["padded"])
        and group_size % entry["BLOCK_T"] == 0
    )


def split_count(programs: int, packed: int, dense: int, processors: int) -> tuple[int, int]:
    """Number of parts the tokens are cut into, and the packed tokens of a part (a multiple of 64).

    Args:
        programs: of one part: B * kv_heads * blocks of query heads.
        packed, dense: tokens. The last part takes the dense ones, and where there are several parts nothing else.
        processors: of the device. There are at least two programs a processor, tokens permitting.
    """
    wanted = -(-2 * processors // programs)
    if wanted == 1:
        return 1, max(64, -(-packed // 64) * 64)
    chunk = max(MIN_CHUNK, packed // wanted // 64 * 64)
    return max(1, -(-packed // chunk) + (dense > 0)), chunk


def bytes_per_token(
    head_dim: int,
    key_bits: int,
    value_bits: int,
    group_size: int,
    value_group_size: int,
    *,
    scale_bytes: int = 2,
    id_bytes: int = 1,
) -> float:
    """Bytes of one packed token in one KV head, key and value: what a decode step must read of it.

    Codes, scales, zeros and ids, each counted once; a key group's scales are spread over its tokens. Not counted: the
    banks (m * D values a head, read from the cache), the mask, the query, the dense tokens and the parts' results.
    """
    codes = head_dim * (key_bits + value_bits) / 8
    key_scales = 2 * scale_bytes * head_dim / group_size
    value_scales = 2 * scale_bytes * head_dim / value_group_size
    return codes + key_scales + value_scales + 2 * id_bytes
