"""`hf-ext cache`: commands of the caches."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_ext.cli.lazy import lazy_app

__all__ = ["app", "inspect"]


def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder that a cache's `save_pretrained` wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a saved cache holds: its model and options, tokens, bytes and bits by layer. Needs no model.

    Examples:

    - `hf-ext cache inspect long-context-cache`

    - `hf-ext cache inspect long-context-cache --json`
    """
    from hf_ext.cache_impls.patternkv.files import describe

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; name one that `save_pretrained` of a cache wrote")
    found = describe(folder)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    model, options = found["model"], found["patternkv_config"]
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    name = f"{model.get('name_or_path') or 'unnamed'} ({model.get('model_type')})"
    facts.add_row("model", escape(name))
    facts.add_row("options", escape(_options(options)))
    ids = "their ids are kept" if found["token_ids"] else "without their ids"
    facts.add_row("tokens", f"{found['tokens']:,} in each of {found['rows']} row(s), {ids}")
    facts.add_row("bytes", f"{found['bytes']:,}")

    table = Table()
    table.add_column("layers")
    table.add_column("kind", overflow="fold")
    for column in ("bytes each", "packed tokens", "patterns", "key bits", "value bits"):
        table.add_column(column, justify="right")
    for numbers, layer in _runs(found["layers"]):
        bits = ("-" if layer[side] is None else f"{layer[side]:.3f}" for side in ("bits_key", "bits_value"))
        counts = (f"{layer[column]:,}" for column in ("bytes", "packed_tokens", "patterns"))
        table.add_row(numbers, escape(layer["kind"]), *counts, *bits)
    console = Console()
    console.print(facts)
    console.print(table)
    console.print(f"cache in {found['folder']}", soft_wrap=True, markup=False)


def _options(fields: dict[str, Any]) -> str:
    """The fields that differ from the defaults, and always the bits."""
    from hf_ext.cache_impls.patternkv import PatternKVConfig

    usual = PatternKVConfig(nbits=fields["nbits"]).to_dict()
    differing = [f"{name}={value!r}" for name, value in fields.items() if name != "nbits" and value != usual[name]]
    return ", ".join([f"nbits={fields['nbits']}", *differing])


def _runs(layers: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Layers that are alike in one row: ("0-29", layer)."""
    runs: list[list[dict[str, Any]]] = []
    for layer in layers:
        facts = {name: value for name, value in layer.items() if name != "layer"}
        if runs and all(runs[-1][0][name] == value for name, value in facts.items()):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [(f"{run[0]['layer']}-{run[-1]['layer']}" if run[1:] else str(run[0]["layer"]), run[0]) for run in runs]


app = lazy_app(
    {"inspect": ("hf_ext.cache_impls.cli:inspect", "What a saved cache holds.")},
    help="Look at saved key/value caches.",
    epilog="Example: `hf-ext cache inspect long-context-cache`",
)
