"""The Markdown of the static kernel benchmark."""

from pathlib import Path
from typing import Any

from hf_ext.benchmarks.report import markdown_table

__all__ = ["instructions_per_code", "macro_cost", "section"]


def instructions_per_code(row: dict[str, Any]) -> float | None:
    """Instructions of all threads in a step along K, per 4-bit code of the weight in it; None where no loop has a dot.

    That is loop * threads / (BLOCK_N * BLOCK_K): loads, decoding, the dot and the loop itself together.
    """
    tile = row["tile"]
    if not row.get("loop") or not {"BLOCK_N", "BLOCK_K"} <= set(tile):
        return None
    return row["loop"] * row["threads"] / (tile["BLOCK_N"] * tile["BLOCK_K"])


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


def section(rows: list[dict[str, Any]], plots: Path) -> str:
    """A table of the default configurations, and one of what macro blocks cost.

    Args:
        rows: all rows of the data file.
        plots: unused; there are none.
    """
    spilled = sum(row["spilled_bytes"] for row in rows)
    most = max(row["shared_bytes"] for row in rows) / 1024
    targets = list(dict.fromkeys(row["target"] for row in rows))
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
                    row.get("loop") or "",
                    "" if per_code is None else f"{per_code:.1f}",
                    ", ".join(row["matrix_instructions"]),
                ]
            )
    head = ["configuration", "target", "registers", "spilled bytes", "shared KiB", "instructions", "in a step"]
    parts = [
        "## Kernels, compiled ahead of time\n",
        f"Made by `hf-ext bench static_kernels` with triton {rows[0]['triton']}, without a GPU: {len(rows)} "
        f"compilations (every shipped configuration for {', '.join(targets)}), {spilled} bytes spilled, at most "
        f"{most:.1f} KiB of shared memory. Below are the default configurations. A name holds the macro block (W4A4: "
        "of the inputs and of the weight), the tile M x N x K, warps and stages; *in a step* counts one iteration of "
        "the loop along K, and *per code* spreads it over the weight codes that the iteration decodes.\n",
        markdown_table([*head, "per code", "matrix instruction"], cells),
    ]
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
    return "\n".join(parts) + "\n"
