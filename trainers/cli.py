"""Commands of the trainers: `hf-ext audit rewards`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["audit_rewards"]


def audit_rewards(
    file: Annotated[Path, typer.Argument(help="The `cat_audit.jsonl` in a run's output folder.")],
    limit: Annotated[int, typer.Option(help="Criteria and steps to print; 0 for all.", min=0)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """What CaT's verdict log says: criteria by how well they separate rollouts, failures, rewards by step.

    A criterion discriminates in a group if one rollout meets it and another does not; one that never does gives no
    gradient.

    Examples:

    - `hf-ext audit rewards out/cat_audit.jsonl`

    - `hf-ext audit rewards out/cat_audit.jsonl --json`
    """
    from hf_ext.trainers.cat.audit import summarise

    found = summarise(file)
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _show(found, limit or None)


def _show(found: dict[str, Any], limit: int | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if found["criteria"]:
        table = Table("criterion", title="criteria, the most discriminating first", title_justify="left")
        for column in ("discriminates", "met", "groups", "unreadable"):
            table.add_column(column, justify="right")
        for row in found["criteria"][:limit]:
            counts = (str(row["groups"]), str(row["unreadable"]))
            table.add_row(escape(row["criterion"]), _share(row["discrimination"]), _share(row["met"]), *counts)
        console.print(table)
        _rest(console, found["criteria"], limit, "criteria")
    else:
        console.print("no criteria: every reward was an answer compared with another, or a grade")
    if found["failures"]:
        table = Table("failure", title="verdicts that are missing or were not asked for", title_justify="left")
        table.add_column("verdicts", justify="right")
        for text, count in list(found["failures"].items())[:limit]:
            table.add_row(escape(text), str(count))
        console.print(table)
    table = Table("step", "mode", title="rewards by step", title_justify="left")
    for column in ("reward", "rollouts", "scored", "verdicts", "without"):
        table.add_column(column, justify="right")
    steps = found["steps"] if limit is None else found["steps"][-limit:]
    for row in steps:
        reward = "-" if row["reward"] is None else f"{row['reward']:.3f}"
        counts = (row["rollouts"], row["scored"], row["verdicts"], row["without_verdict"])
        table.add_row(str(row["step"]), row["mode"], reward, *map(str, counts))
    console.print(table)
    _rest(console, found["steps"], limit, "earlier steps")
    console.print(f"{found['verdicts']:,} verdicts in {found['file']}", soft_wrap=True, markup=False)


def _rest(console: Any, rows: list[Any], limit: int | None, what: str) -> None:
    if limit is not None and len(rows) > limit:
        console.print(f"and {len(rows) - limit} more {what}; --limit 0 shows all")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
