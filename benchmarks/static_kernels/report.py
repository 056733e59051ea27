"""The Markdown of the static kernel benchmark."""

from pathlib import Path
from typing import Any

from hf_ext.benchmarks.report import markdown_table

__all__ = ["adapter_cost", "instructions_per_code", "macro_cost", "section"]


# What a configuration's name holds, and what a step is, kernel by kernel.
_NAMES = {
    "flash_lora_attention": (
        "A name holds the ranks of the adapter on keys and on values (0: none), the rows of queries and the tokens of "
        "a tile, warps and stages; *in a step* counts one tile of tokens that every row sees. *halves*: keys are "
        "rebuilt as two halves that are rotated with each other."
    ),
    "mxfp4_gemm": (
        "A name holds the macro block (W4A4: of the inputs and of the weight), the tile M x N x K, warps and stages; "
        "*in a step* counts one iteration of the loop along K, and *per code* spreads it over the weight codes that "
        "the iteration decodes."
    ),
    "patternkv_attention": (
        "A name holds the head dimension, the bits of keys and values, the tokens of a key group, the tokens of a "
        "tile, warps and stages; *packed* is the kernel without the dense tokens, the only loop of which is the one "
        "over packed tokens: *in a step* counts one tile, and *per code* spreads it over the tile's codes, keys and "
        "values together."
    ),
}


def instructions_per_code(row: dict[str, Any]) -> float | None:
    """Instructions of all threads in a step, per code that the step decodes; None where that loop was not counted.

    A step along K of a product decodes BLOCK_N * BLOCK_K codes, a tile of attention BLOCK_T keys and as many values.
    Loads, decoding, the dot and the loop itself are counted together.
    """
    tile, loop = row["tile"], _loop(row)
    if loop and {"BLOCK_N", "BLOCK_K"} <= set(tile):
        return loop * row["threads"] / (tile["BLOCK_N"] * tile["BLOCK_K"])
    if loop and {"BLOCK_T", "HEAD_DIM"} <= set(tile):
        return loop * row["threads"] / (2 * tile["BLOCK_T"] * tile["HEAD_DIM"])
    return None


def _loop(row: dict[str, Any]) -> int | None:
    """Instructions of a step; None where the shortest loop, the one counted, is not the one over codes."""
    if row.get("kernel") == "patternkv_attention" and "-packed-" not in row["name"]:
        return None
    return row.get("loop") or None


def macro_cost(rows: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """What macro blocks add to a step: (configuration, target, instructions with them / without).

    Only configurations that step by the same tile are compared.
    """
    loops = {(row["name"], row["target"]): row["loop"] for row in rows if row.get("loop")}
    found = []
    for (name, target), loop in loops.items():
        plain = (
            name.replace("macro128-128", "macro0-0") if name.startswith("w4a4") else name.replace("macro128", "macro0")
        )
        if plain != name and (plain, target) in loops:
            found.append((name, target, loop / loops[plain, target]))
    return found


def adapter_cost(rows: list[dict[str, Any]]) -> list[tuple[str, str, float, int]]:
    """What an adapter adds to the same tile without one: (configuration, target, ratio of instructions, bytes).

    Instructions are those of a step, a ratio of with to without; bytes those of shared memory that are added.
    """

    def tile(row: dict[str, Any]) -> tuple:
        return (*(row["tile"].get(key) for key in ("BLOCK_M", "BLOCK_N", "HEAD_DIM")), row["threads"])

    known = {
        (row["name"].partition("-k")[0], row["target"], tile(row)): row for row in rows if "-k0-v0-" in row["name"]
    }
    found = []
    for row in rows:
        plain = known.get((row["name"].partition("-k")[0], row["target"], tile(row)))
        if plain and row is not plain and row["default"] and row.get("loop") and plain.get("loop"):
            shared = row["shared_bytes"] - plain["shared_bytes"]
            found.append((row["name"], row["target"], row["loop"] / plain["loop"], shared))
    return found


def section(rows: list[dict[str, Any]], plots: Path) -> str:
    """A table of the default configurations of each kernel, and one of what macro blocks cost.

    Args:
        rows: all rows of the data file.
        plots: unused; there are none.
    """
    targets = list(dict.fromkeys(row["target"] for row in rows))
    parts = [
        "## Kernels, compiled ahead of time\n",
        f"Made by `hf-ext bench static_kernels` with triton {rows[0]['triton']}, without a GPU: every shipped "
        f"configuration is compiled for {', '.join(targets)}, and the machine code is counted. The tables have the "
        "default configurations.",
    ]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        parts.append(_kernel_section(kernel, [row for row in rows if row["kernel"] == kernel]))
    return "\n".join(parts) + "\n"


def _kernel_section(kernel: str, rows: list[dict[str, Any]]) -> str:
    targets = list(dict.fromkeys(row["target"] for row in rows))
    spilled = sum(row["spilled_bytes"] for row in rows)
    most = max(row["shared_bytes"] for row in rows) / 1024
    cells = []
    for row in rows:
        if row["default"]:
            per_code = instructions_per_code(row)
            cells.append(
                [
                    f"`{row['name']}`",
                    row["target"],
                    row["registers"],
                    row["spilled_bytes"],
                    f"{row['shared_bytes'] / 1024:.1f}",
                    row.get("total", ""),
                    _loop(row) or "",
                    "" if per_code is None else f"{per_code:.1f}",
                    ", ".join(row["matrix_instructions"]),
                ]
            )
    head = ["configuration", "target", "registers", "spilled bytes", "shared KiB", "instructions", "in a step"]
    text = f"{len(rows)} compilations, {spilled} bytes spilled, at most {most:.1f} KiB of shared memory."
    parts = [
        f"\n### {kernel}\n",
        f"{text} {_NAMES.get(kernel, '')}".rstrip() + "\n",
        markdown_table([*head, "per code", "matrix instruction"], cells),
    ]
    added = adapter_cost(rows)
    if added:
        table = markdown_table(
            ["configuration", "target", "instructions in a step", "shared KiB"],
            [[f"`{name}`", target, f"{ratio:.2f}", f"{shared / 1024:+.1f}"] for name, target, ratio, shared in added],
        )
        parts.append(
            "\nWhat an adapter adds to the same tile without one: instructions in a step as a ratio, and shared "
            "memory.\n\n" + table
        )
    costs = macro_cost(rows)
    if costs:
        names = list(dict.fromkeys(name for name, _, _ in costs))
        found = {(name, target): ratio for name, target, ratio in costs}

        def show(name: str, target: str) -> str:
            return f"{found[name, target]:.2f}" if (name, target) in found else ""

        table = markdown_table(
            ["configuration", *targets], [[f"`{name}`", *(show(name, target) for target in targets)] for name in names]
        )
        parts.append(
            "\nWhat macro blocks of 128 add to a step, as a ratio of instructions to the same tile without them. "
            "Loads of codes and matrix instructions stay the same, so time grows by less wherever those are what it "
            "goes to; it has not been measured.\n\n" + table
        )
    return "\n".join(parts)
