"""`hf-ext list`."""

import dataclasses
import json
from typing import Annotated

import typer

from hf_ext.registry import METHODS, WINGS, Method, list_methods


def list_command(
    what: Annotated[
        str | None, typer.Argument(help="An extension point (`quantizers`) or one method (`mxfp4`).")
    ] = None,
    status: Annotated[str | None, typer.Option(help="Only `available` or only `planned` methods.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with titles and arXiv numbers.")] = False,
) -> None:
    """List the methods: what each does and where it lives; of one method, also the paper.

    Examples:

    - `hf-ext list`

    - `hf-ext list quantizers`

    - `hf-ext list mxfp4`

    - `hf-ext list --status available --json`
    """
    one = next((method for method in METHODS if method.name == what), None)
    if what is not None and what not in WINGS and one is None:
        names = ", ".join(method.name for method in METHODS)
        raise ValueError(f"{what!r} is neither an extension point ({', '.join(WINGS)}) nor a method ({names})")
    methods = list_methods(None if one else what, status)
    if one:
        methods = [method for method in methods if method is one]
    if as_json:
        print(json.dumps([dataclasses.asdict(method) for method in methods], indent=2, ensure_ascii=False))
    elif one and methods:
        _print_one(one)
    else:
        _print_table(methods)


def _print_table(methods: list[Method]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("what it does")
    wing = None
    for method in methods:
        if method.wing != wing:
            if wing is not None:
                table.add_row("")
            wing = method.wing
            table.add_row(f"[cyan]{wing}[/cyan]")
        colour = "green" if method.status == "available" else "dim"
        table.add_row(f"  {method.name}", f"[{colour}]{method.status}[/{colour}]", method.summary)
    console = Console()
    console.print(table)
    console.print("\n[dim]`hf-ext list METHOD` shows its paper and folders.[/dim]")


def _print_one(method: Method) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    source = ", ".join(text for text in (method.venue, f"arXiv {method.arxiv}" if method.arxiv else "") if text)
    rows = {
        "status": method.status,
        "what it does": method.summary,
        "paper" if method.venue else "subject": method.title,
        "published": source,
        "folders": ", ".join((method.folder, *method.also)),
        "import name": "" if method.wing == "kernels" else f"hf_ext.{method.wing}.{method.name}",
    }
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("method", f"{method.name} ({method.wing})")
    for name, value in rows.items():
        if value:
            table.add_row(name, escape(value))
    Console().print(table)
