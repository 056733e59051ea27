"""The Markdown of the memory benchmark."""

from pathlib import Path
from typing import Any

from hf_ext.benchmarks.report import markdown_table

__all__ = ["section"]


def section(rows: list[dict[str, Any]], plots: Path) -> str:
    """A table of the last row of each way of loading.

    Args:
        rows: all rows of the data file.
        plots: unused; there are none.
    """
    latest = {row["load"]: row for row in rows}
    keys = ("peak_mib", "model_mib", "largest_tensor_mib", "peak_over_model", "seconds")
    table = markdown_table(
        ["load", "peak, MiB", "model, MiB", "largest tensor, MiB", "peak / model", "seconds"],
        [[load, *(f"{row[key]:.2f}" for key in keys)] for load, row in latest.items()],
    )
    return (
        "## Memory of loading, MXFP4\n\nMade by `hf-ext bench mxfp4_memory`: SmolLM2-135M-Instruct in float32, one "
        "thread, anonymous memory above what the imports take, sampled every 2 ms. A dense or packed checkpoint is "
        "mapped from its file, so it takes almost none; quantising holds the packed model, the tensors that stay "
        "dense (the embedding is the largest), and the temporaries of one weight.\n\n" + table + "\n"
    )
