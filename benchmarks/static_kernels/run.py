"""Registers, spilled bytes, shared memory and instruction counts of the bundled kernels, compiled for real GPUs.

Nothing runs: every configuration that a kernel ships is compiled ahead of time for every target it is for, and the
machine code is counted. The data file is written anew each time.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from hf_ext.benchmarks.report import refresh, results_folder
from hf_ext.benchmarks.static_kernels.instructions import count_instructions
from hf_ext.kernel_lookup import kernel_folders
from hf_ext.kernel_tools import DEFAULT_TARGETS, TARGETS, aot_configs, compile_config, is_for
from hf_ext.runlog import write_text

__all__ = ["DATA", "main", "measure"]

# The table that this version ships.
DATA = Path(__file__).parent / "data" / "kernel_static.jsonl"


def measure(kernel: str, config: dict[str, Any], target: str) -> dict[str, Any]:
    """Compile a configuration and count its instructions.

    Args:
        kernel: name of the kernel folder, for the row.
        config: as `hf_ext.kernel_tools.aot_configs` gives them.
        target: a key of `hf_ext.kernel_tools.TARGETS`.

    Returns:
        The row of the data file: what `CompileReport.to_dict` has, without the seconds, and the counts of
        `InstructionCounts`; `tile` has the integer constants of the configuration, `threads` those of a program.
    """
    report = compile_config(config, target)
    counts = count_instructions(report)._asdict() if report.binary else {}
    row = report.to_dict()
    del row["seconds"]
    tile = {key: value for key, value in config["constexprs"].items() if type(value) is int}
    threads = config["num_warps"] * TARGETS[target].warp_size
    return {"kernel": kernel, **row, **counts, "tile": tile, "threads": threads, "default": config["default"]}


def main(
    out: Annotated[
        Path | None,
        typer.Option(help="Data file to write. [default: benchmarks/static_kernels/data/kernel_static.jsonl]"),
    ] = None,
) -> None:
    """Compile the bundled kernels for four GPUs and count; no GPU needed, over ten minutes the first time.

    Example: `hf-ext bench static_kernels`
    """
    console = Console()
    jobs = [
        (kernel, config, target)
        for kernel, folder in kernel_folders().items()
        for config in aot_configs(folder)
        for target in DEFAULT_TARGETS
        if is_for(config, target)
    ]
    rows = [measure(*job) for job in track(jobs, "compiling", console=console, transient=True)]
    path = out or results_folder() / "static_kernels" / "data" / DATA.name
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    wrong = [row for row in rows if row["problems"]]
    for row in wrong:
        console.print(f"{row['name']} for {row['target']}: {'; '.join(row['problems'])}", soft_wrap=True)
    most = max(rows, key=lambda row: row["shared_bytes"])
    console.print(
        f"{len(rows)} compilations, {len(wrong)} outside their limits; {sum(row['spilled_bytes'] for row in rows)} "
        f"bytes spilled; at most {most['shared_bytes'] / 1024:.1f} KiB of shared memory ({most['name']})",
        soft_wrap=True,
    )
    console.print(f"rows are in {path}", soft_wrap=True)
    refresh(out)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
