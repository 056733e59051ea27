"""The launch configurations that ship: literal lists, read by the launcher, the autotuner and the ahead-of-time check.

Every entry compiles without spilling on each of its ``targets`` (all of ALL where the key is absent). ``max_m`` bounds
the number of rows of x an entry is tried for; the first entry that fits is the one used when nothing is tuned.
"""

ALL = ("sm_80", "sm_90", "sm_100", "gfx942")

# Scale rule -> mantissa field of a block's maximum above which its exponent goes up by one: see codec.encode_block.
THRESHOLDS = {"ocp": 0x7FFFFF, "oas": 0x600000, "even": 0x5FFFFF, "ceil": 0x400000}

QUANTIZE = {"ROWS": 16, "num_warps": 4, "num_stages": 1}
DEQUANTIZE = {"ROWS": 16, "COLS": 128, "num_warps": 4, "num_stages": 1}
REDUCE = {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}

# SWAP computes (w x^T)^T: the decoded weight is then the first operand, which Hopper's wgmma and Blackwell's tcgen05
# take from 64 rows on, so that 16 rows of x waste nothing.
W4A16 = [
    {"dtypes": ("bf16", "fp16"), "max_m": 16, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 1, "SWAP": True,
     "num_warps": 4, "num_stages": 3},
    {"dtypes": ("bf16", "fp16"), "max_m": 16, "BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 1, "SWAP": True,
     "num_warps": 4, "num_stages": 4},
    {"dtypes": ("bf16", "fp16"), "max_m": 64, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8, "SWAP": False,
     "num_warps": 4, "num_stages": 3},
    {"dtypes": ("bf16", "fp16"), "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "SWAP": False,
     "num_warps": 8, "num_stages": 3},
    {"dtypes": ("bf16", "fp16"), "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "SWAP": False,
     "num_warps": 8, "num_stages": 3},
    {"dtypes": ("fp32",), "max_m": 16, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 1, "SWAP": False,
     "num_warps": 4, "num_stages": 2},
    {"dtypes": ("fp32",), "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8, "SWAP": False,
     "num_warps": 8, "num_stages": 2},
]  # fmt: skip

# BLOCK_K of a W4A4 tile is the shorter macro block, at most 128. Blackwell multiplies the codes as they are
# (`kind::mxf4`) from 128 rows on, 64 values of K an instruction: the compiler fails on 32 there, and steps of 32 keep
# to 64 rows.
W4A4 = [
    {"max_m": 16, "BLOCK_M": 16, "BLOCK_N": 64, "GROUP_M": 1, "num_warps": 4, "num_stages": 3},
    {"max_m": 64, "BLOCK_M": 64, "BLOCK_N": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 2},
    {"steps": (32,), "BLOCK_M": 64, "BLOCK_N": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 2},
    {"steps": (64, 128), "BLOCK_M": 128, "BLOCK_N": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 3},
    {"steps": (64, 128), "BLOCK_M": 128, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 3,
     "targets": ("sm_90", "sm_100")},
]  # fmt: skip

_LAUNCH_KEYS = ("num_warps", "num_stages")
_META_KEYS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "SWAP")


def constexprs(entry: dict) -> dict:
    """The tile constants of an entry, as the kernel names them."""
    return {key: entry[key] for key in _META_KEYS if key in entry}


def launch_options(entry: dict) -> dict:
    """num_warps and num_stages of an entry."""
    return {key: entry[key] for key in _LAUNCH_KEYS}


def w4a16_candidates(target: str, dtype: str, m: int) -> list[dict]:
    """Entries of W4A16 for a target, a dtype ("bf16", "fp16", "fp32") and a number of rows; never empty."""
    fitting = [entry for entry in W4A16 if target in entry.get("targets", ALL) and dtype in entry["dtypes"]]
    return _by_rows(fitting, m)


def w4a4_block_k(x_macro: int, macro: int) -> int:
    """Step of the W4A4 kernel along K for two macro-block sizes, 0 meaning none."""
    return min([128, *(size for size in (x_macro, macro) if size)])


def w4a4_candidates(target: str, x_macro: int, macro: int, m: int) -> list[dict]:
    """Entries of W4A4 for a target, two macro-block sizes (0: none) and a number of rows; never empty."""
    fitting = [entry for entry in w4a4_entries(x_macro, macro) if target in entry.get("targets", ALL)]
    return _by_rows(fitting, m)


def w4a4_entries(x_macro: int, macro: int) -> list[dict]:
    """Entries of W4A4 that step along K as two macro-block sizes ask for, with BLOCK_K filled in."""
    step = w4a4_block_k(x_macro, macro)
    return [{**entry, "BLOCK_K": step} for entry in W4A4 if step in entry.get("steps", (step,))]


def _by_rows(entries: list[dict], m: int) -> list[dict]:
    """Entries whose row tile suits m: the bounded ones that hold m with the least bound, else the unbounded ones."""
    bounds = sorted({entry["max_m"] for entry in entries if entry.get("max_m", 0) >= m})
    if bounds:
        return [entry for entry in entries if entry.get("max_m") == bounds[0]]
    return [entry for entry in entries if "max_m" not in entry]


# Up to this many rows a product may be cut along K.
SPLIT_MAX_M = 64


def split_count(m: int, n: int, k: int, processors: int) -> tuple[int, int]:
    """Number of pieces K is cut into, and their length (a multiple of 128), for y [m, n] on that many processors.

    Few rows give few tiles: K is cut until there are about two programs per processor, but a piece keeps 256 values at
    least, or the partial sums cost more than they save.
    """
    tiles = -(-m // 16) * -(-n // 64) if m <= 16 else -(-m // 64) * -(-n // 64)
    if m > SPLIT_MAX_M or tiles >= 2 * processors:
        return 1, -(-k // 128) * 128
    wanted = min(-(-2 * processors // tiles), max(1, k // 256), 32)
    chunk = -(-k // (wanted * 128)) * 128
    return -(-k // chunk), chunk
