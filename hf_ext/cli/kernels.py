"""`hf-ext kernels list | check | compile`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from hf_ext.kernel_lookup import kernel_folders

app = typer.Typer(
    help="List, check and compile kernel repositories.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
Folder = Annotated[str, typer.Argument(help="A kernel folder, or the name of a bundled kernel.")]


def _folder(text: str) -> Path:
    folder = Path(text)
    if folder.is_dir():
        return folder
    if text not in kernel_folders():
        raise ValueError(f"{text!r} is no folder, and no bundled kernel; bundled are: {', '.join(kernel_folders())}")
    return kernel_folders()[text]


@app.command("list")
def list_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the kernel repositories of this installation.

    Example: `hf-ext kernels list`
    """
    rows = []
    for name, folder in kernel_folders().items():
        metadata = json.loads((folder / "build/torch-universal/metadata.json").read_text(encoding="utf-8"))
        rows.append({"name": name, "version": metadata["version"], "id": metadata["id"], "folder": str(folder)})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("name", "version", "id", Column("folder", overflow="fold"))
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


@app.command()
def check(folder: Folder) -> None:
    """Check that a folder is a valid, self-contained kernel repository; exit with 1 if it is not.

    Looks at the layout, metadata.json, build.toml, what is imported, and loads it with the `kernels` library and again
    in a process that cannot import hf_ext.

    Examples:

    - `hf-ext kernels check kernels/mxfp4_gemm`

    - `hf-ext kernels check mxfp4_gemm`
    """
    from hf_ext.kernel_tools import check_kernel

    console = Console()
    where = _folder(folder)
    with console.status(f"checking {where}"):
        findings = check_kernel(where)
    table = Table("check", "result", "detail")
    for finding in findings:
        table.add_row(finding.name, "[green]ok[/green]" if finding.ok else "[red]failed[/red]", escape(finding.detail))
    console.print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command()
def compile(
    folder: Folder,
    target: Annotated[
        list[str] | None, typer.Option(help="Architecture; may be repeated. Default: sm_80, sm_90, sm_100, gfx942.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All configurations, not only the default ones.")] = False,
    out: Annotated[Path | None, typer.Option(help="Append a JSON line per compiled configuration.")] = None,
) -> None:
    """Compile a kernel ahead of time, without a GPU; exit with 1 if a configuration spills or wants too much memory.

    Examples:

    - `hf-ext kernels compile kernels/mxfp4_gemm`

    - `hf-ext kernels compile mxfp4_gemm --target sm_90 --target gfx942 --all --out static.jsonl`
    """
    from hf_ext.kernel_tools import DEFAULT_TARGETS, aot_configs, check_target, compile_config, is_for
    from hf_ext.runlog import RunLog

    targets = [check_target(name) for name in target or DEFAULT_TARGETS]
    configs = [config for config in aot_configs(_folder(folder)) if every or config["default"]]
    jobs = [(config, name) for config in configs for name in targets if is_for(config, name)]
    if not jobs:
        raise ValueError(f"{folder} has no such configuration for {', '.join(targets)}; --all compiles every one")
    log = RunLog(out, key=("name", "target")) if out else None
    console = Console()
    table = Table(Column("configuration", overflow="fold"), "target", "registers", "spilled", "shared KiB", "result")
    failed = 0
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(jobs))
        for config, name in jobs:
            progress.update(task, description=f"{config['name']} for {name}")
            report = compile_config(config, name)
            failed += not report.ok
            if log is not None:
                log.append(report.to_dict())
            result = "[green]ok[/green]" if report.ok else f"[red]{escape('; '.join(report.problems))}[/red]"
            numbers = (str(report.registers), str(report.spilled_bytes), f"{report.shared_bytes / 1024:.1f}")
            table.add_row(config["name"], name, *numbers, result)
            progress.advance(task)
    console.print(table)
    if out is not None:
        console.print(f"rows appended to {out}", soft_wrap=True)
    if failed:
        console.print(f"{failed} of {len(jobs)} compilations failed their limits")
        raise typer.Exit(1)
