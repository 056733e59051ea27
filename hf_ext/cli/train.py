"""`hf-ext train METHOD`: every folder of `hf_ext.trainers` with a `__main__.py`, run as `python -m` would."""

import ast
import importlib.util
import runpy
import sys
from pathlib import Path

import typer

from hf_ext.cli.lazy import lazy_app
from hf_ext.extras import require


def scripts() -> dict[str, tuple[str, str]]:
    """Find the training scripts without importing them: name -> (target, first line of the module's docstring)."""
    found = {}
    spec = importlib.util.find_spec("hf_ext.trainers")
    for root in spec.submodule_search_locations:
        for file in sorted(Path(root).glob("*/__main__.py")):
            docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            name = file.parent.name
            found[name] = (f"{__name__}:{name}", docstring.split("\n\n")[0].replace("\n", " "))
    return found


def run(method: str, arguments: list[str]) -> None:
    """Run a method's script in this process with these arguments.

    Args:
        method: A name of `scripts`.
        arguments: As they would follow `python -m hf_ext.trainers.METHOD`.

    Raises:
        ImportError: trl is not installed, with the extra that brings it.
    """
    require("trl", extra="trainers")
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        runpy.run_module(f"hf_ext.trainers.{method}", run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before


def _command(method: str) -> typer.Typer:
    """A command that hands everything, `--help` too, to the script's own parser."""
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @command.command(
        method,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
    )
    def _run(context: typer.Context) -> None:
        run(method, context.args)

    return command


def __getattr__(name: str) -> typer.Typer:
    # The table names a command for each method, `hf_ext.cli.train:cat`, made when it is called.
    if name not in scripts():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _command(name)


app = lazy_app(
    scripts(),
    help="Train with a method's own script, from a YAML file and flags that override it. In several processes: "
    "`accelerate launch -m hf_ext.trainers.METHOD` or `torchrun -m hf_ext.trainers.METHOD` with the same arguments.",
    epilog="Examples: `hf-ext train cat --config examples/configs/cat_tiny.yaml`, `hf-ext train cat --help`",
)
