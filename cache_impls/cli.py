"""`hf-ext cache`: commands of the caches."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_ext.cli.lazy import lazy_app

__all__ = ["agents", "app", "inspect"]


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


def agents(
    model: Annotated[str, typer.Option(help="The base model: folder or Hub name.")],
    adapters: Annotated[
        list[str], typer.Option(metavar="NAME=FOLDER", help="An agent's adapter; more may follow, or be repeated.")
    ],
    trace: Annotated[Path, typer.Option(help="Recorded trajectory, as examples/data/trace.json.")],
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=FOLDER]...", help="Further adapters, after --adapters.")
    ] = None,
    targets: Annotated[str, typer.Option(help="Cached projections kept apart, by commas.")] = "k_proj,v_proj",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play a recorded trajectory of agents over the four modes of the LRAgent cache: memory, time, divergence.

    Examples:

    - `hf-ext cache agents --model M --adapters plan=A act=B --trace examples/data/trace.json`

    - `hf-ext cache agents --model M --adapters plan=A --adapters act=B --trace trace.json --json`
    """
    named: dict[str, str] = {}
    for given in [*adapters, *(more or [])]:
        name, _, folder = given.partition("=")
        if not name or not folder:
            raise ValueError(f"--adapters takes NAME=FOLDER, got {given!r}")
        if name in named:
            raise ValueError(f"--adapters names {name!r} twice: {named[name]} and {folder}")
        named[name] = folder
    if len(named) < 2:
        raise ValueError(f"--adapters names {len(named)} agent, and sharing takes two or more")
    if not trace.is_file():
        raise FileNotFoundError(f"--trace {trace} is no file; examples/data/trace.json shows what one holds")
    from hf_ext.cache_impls.lragent.trace import COMPARED, play, read_trace, token_turns

    turns = read_trace(trace)  # before anything is loaded
    if missing := sorted({turn.agent for turn in turns} - set(named)):
        raise ValueError(
            f"{trace} has agents without an adapter: {', '.join(missing)}; --adapters names {', '.join(named)}"
        )
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_ext.cache_impls.lragent import LRAgentConfig, enable_lragent

    base = AutoModelForCausalLM.from_pretrained(model).eval()
    (first, folder), *others = named.items()
    tuned = PeftModel.from_pretrained(base, folder, adapter_name=first)
    for name, folder in others:
        tuned.load_adapter(folder, adapter_name=name)
    tuned.eval()
    enable_lragent(tuned, LRAgentConfig(targets=tuple(targets.split(","))))
    ids = token_turns(AutoTokenizer.from_pretrained(model), turns)
    rows, exact = [], None
    for mode in COMPARED:
        try:
            row, kept = play(tuned, ids, mode, exact)
        except ValueError as error:
            if mode != "base_lr_shared" or "needs adapters of one A" not in str(error):
                raise
            row = {"mode": mode, "error": str(error)}
        exact = kept if exact is None else exact
        rows.append(row)
    if as_json:
        print(json.dumps({"tokens": ids[-1][1].shape[1], "turns": len(ids), "modes": rows}, indent=2))
    else:
        _show_modes(rows, ids)


def _show_modes(rows: list[dict[str, Any]], turns: list[tuple[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    names = list(dict.fromkeys(agent for agent, _ in turns))
    console.print(
        f"{len(turns)} turns of {', '.join(names)}; {turns[-1][1].shape[1]:,} tokens", soft_wrap=True, markup=False
    )
    table = Table()
    table.add_column("mode", no_wrap=True)
    for column in ("MiB", "tokens read", "s to a token", "new agent, s", "KL to none"):
        table.add_column(column, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(row["mode"], "-", "-", "-", "-", "-")
            continue
        first = "-" if row["new_agent_ttft"] is None else f"{row['new_agent_ttft']:.2f}"
        kl = "0" if row["kl"] is None else f"{row['kl']:.4f}"
        cells = (f"{row['bytes'] / 2**20:.1f}", f"{row['read']:,}", f"{row['ttft']:.2f}", first, kl)
        table.add_row(row["mode"], *cells)
    console.print(table)
    for row in rows:
        if "error" in row:
            console.print(f"{row['mode']}: {row['error']}", soft_wrap=True, markup=False)


app = lazy_app(
    {
        "agents": ("hf_ext.cache_impls.cli:agents", "LoRA agents over a recorded trajectory: what sharing costs."),
        "inspect": ("hf_ext.cache_impls.cli:inspect", "What a saved cache holds."),
    },
    help="Look at saved key/value caches, and at caches that agents share.",
    epilog="Example: `hf-ext cache inspect long-context-cache`",
)
