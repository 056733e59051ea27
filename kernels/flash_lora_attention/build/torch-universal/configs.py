"""The launch configurations that ship, read by the launcher and the ahead-of-time check, and how work is cut.

Every entry compiles without spilling on each of its ``targets`` (all of ALL where the key is absent), but for float32
with more than 64 channels and a rank above 32 on NVIDIA, which is correct and slow.
"""

ALL = ("sm_80", "sm_90", "sm_100", "gfx942")

MAX_HEAD_DIM = 128
HEAD_DIM_UNIT = 8
MAX_RANK = 64

# The first entry that fits is used. `max_rows` bounds the rows of a KV head (queries times the query heads that share
# it), `max_columns` the head dimension as it is padded, `max_rank` both ranks, `max_rank_k` that on keys; `part` is
# False where keys that are rotated in part do not fit. With HALVES, keys are rebuilt as two halves that are rotated
# with each other, tokens along the rows; without, channels lie along the rows and each is rotated by itself: more
# products, but spread over 8 warps where those of attention stand that way, and fewer instructions on CDNA3.
ATTEND = [
    {"dtypes": ("bf16", "fp16"), "max_rows": 16, "max_columns": 64, "part": False, "HALVES": True,
     "BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2},
    {"dtypes": ("bf16", "fp16"), "max_rows": 16, "HALVES": False,
     "BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2, "targets": ("gfx942",)},
    {"dtypes": ("bf16", "fp16"), "max_rows": 16, "part": False, "HALVES": True,
     "BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
    {"dtypes": ("bf16", "fp16"), "max_rows": 16, "max_rank": 32, "HALVES": True,
     "BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
    {"dtypes": ("bf16", "fp16"), "max_rows": 16, "HALVES": True,
     "BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2},
    {"dtypes": ("bf16", "fp16"), "max_columns": 64, "part": False, "HALVES": True,
     "BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2, "targets": ("sm_90", "sm_100")},
    {"dtypes": ("bf16", "fp16"), "part": False, "HALVES": True,
     "BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2, "targets": ("sm_90", "sm_100")},
    {"dtypes": ("bf16", "fp16"), "max_columns": 64, "HALVES": False,
     "BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2, "targets": ("sm_90", "sm_100")},
    {"dtypes": ("bf16", "fp16"), "max_rank": 16, "HALVES": False,
     "BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2, "targets": ("sm_90", "sm_100")},
    {"dtypes": ("bf16", "fp16"), "HALVES": False,
     "BLOCK_M": 128, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2, "targets": ("sm_90", "sm_100")},
    {"dtypes": ("bf16", "fp16"), "max_columns": 64, "max_rank": 16, "HALVES": False,
     "BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2, "targets": ("sm_80",)},
    {"dtypes": ("bf16", "fp16"), "max_columns": 64, "max_rank": 32, "HALVES": False,
     "BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2, "targets": ("sm_80",)},
    {"dtypes": ("bf16", "fp16"), "max_columns": 64, "HALVES": False,
     "BLOCK_M": 128, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2, "targets": ("sm_80",)},
    {"dtypes": ("bf16", "fp16"), "max_rank": 16, "max_rank_k": 0, "HALVES": False,
     "BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2, "targets": ("sm_80",)},
    {"dtypes": ("bf16", "fp16"), "max_rank": 32, "HALVES": False,
     "BLOCK_M": 128, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2, "targets": ("sm_80",)},
    {"dtypes": ("bf16", "fp16"), "HALVES": True,
     "BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2, "targets": ("sm_80",)},
    {"dtypes": ("bf16", "fp16"), "max_columns": 64, "max_rank": 32, "HALVES": False,
     "BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2, "targets": ("gfx942",)},
    {"dtypes": ("bf16", "fp16"), "max_rank_k": 0, "HALVES": False,
     "BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2, "targets": ("gfx942",)},
    {"dtypes": ("bf16", "fp16"), "HALVES": False,
     "BLOCK_M": 128, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2, "targets": ("gfx942",)},
    {"dtypes": ("fp32",), "HALVES": False,
     "BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 8, "num_stages": 1},
]  # fmt: skip
MERGE = {"BLOCK_S": 16, "num_warps": 4, "num_stages": 1}

# Fewer tokens a program cost more in merging than they bring.
MIN_CHUNK = 128

_LAUNCH_KEYS = ("num_warps", "num_stages")


def launch_options(entry: dict) -> dict:
    """num_warps and num_stages of an entry."""
    return {key: entry[key] for key in _LAUNCH_KEYS}


def block(size: int) -> int:
    """``size`` rounded up to a power of two that `tl.dot` takes."""
    return max(16, 1 << (size - 1).bit_length()) if size else 16


def constants(entry: dict, head_dim: int, rank_k: int, rank_v: int, rotary: int) -> dict[str, int | bool]:
    """The kernel's constants that follow from a launch entry and the sizes of a problem."""
    # A product that is no wider than it is high would spread the warps of a decode step over its 16 rows alone.
    least = 32 if entry["BLOCK_M"] == 16 else 16
    return {
        "HALVES": bool(rank_k) and entry["HALVES"],
        "BLOCK_M": entry["BLOCK_M"],
        "BLOCK_N": entry["BLOCK_N"],
        "BLOCK_D": block(head_dim),
        "BLOCK_HALF": block(rotary // 2),
        "BLOCK_REST": block(head_dim - rotary),
        "BLOCK_RK": block(rank_k),
        "BLOCK_RV": max(least, block(rank_v)),
    }


def attend_entry(target: str, dtype: str, rows: int, head_dim: int, rank_k: int, rank_v: int, rotary: int) -> dict:
    """The entry of ATTEND for a target and a problem.

    Args:
        target: of ALL.
        dtype: "bf16", "fp16" or "fp32".
        rows: of a KV head: queries times the query heads that share it.
        head_dim, rank_k, rank_v: D and the ranks, 0 where there is no adapter.
        rotary: channels that are rotated here, 0 without an adapter on keys.
    """
    part = 0 < rotary < head_dim
    return next(
        entry
        for entry in ATTEND
        if target in entry.get("targets", ALL)
        and dtype in entry["dtypes"]
        and rows <= entry.get("max_rows", rows)
        and block(head_dim) <= entry.get("max_columns", MAX_HEAD_DIM)
        and max(rank_k, rank_v) <= entry.get("max_rank", MAX_RANK)
        and rank_k <= entry.get("max_rank_k", MAX_RANK)
        and (not part or entry.get("part", True))
    )


def split_count(programs: int, tokens: int, processors: int) -> tuple[int, int]:
    """Number of parts the tokens are cut into, and the tokens of a part (a multiple of 64).

    Args:
        programs: of one part: B * kv_heads * blocks of rows.
        tokens: that a query may see.
        processors: of the device. There are at least two programs a processor, tokens permitting.
    """
    wanted = -(-2 * processors // programs)
    chunk = max(MIN_CHUNK, tokens // wanted // 64 * 64) if wanted > 1 else max(64, -(-tokens // 64) * 64)
    return -(-tokens // chunk), chunk
