"""`hf-ext list`."""

import dataclasses
import json
from typing import Annotated

import typer

from hf_ext.registry import list_methods


def list_command(
    wing: Annotated[str | None, typer.Argument(help="Only this extension point, for example `quantizers`.")] = None,
    status: Annotated[str | None, typer.Option(help="Only `available` or only `planned` methods.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with titles and arXiv numbers.")] = False,
) -> None:
    """List the methods: what each does, which paper it is from, where it lives.

    Examples:

    - `hf-ext list`

    - `hf-ext list quantizers`

    - `hf-ext list --status available --json`
    """
    methods = list_methods(wing, status)
    if as_json:
        print(json.dumps([dataclasses.asdict(method) for method in methods], indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Methods of hf-ext", title_justify="left")
    table.add_column("method", style="bold")
    table.add_column("extension point")
    table.add_column("what it does", overflow="fold")
    table.add_column("paper", overflow="fold", style="dim")
    table.add_column("status")
    for method in methods:
        paper = method.title + (f" (arXiv {method.arxiv})" if method.arxiv else "") if method.venue else ""
        colour = "green" if method.status == "available" else "yellow"
        table.add_row(method.name, method.wing, method.summary, paper, f"[{colour}]{method.status}[/{colour}]")
    Console().print(table)
