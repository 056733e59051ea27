"""Typer groups whose commands are imported when they are called, and listed from a table until then."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import TyperGroup


def lazy_app(
    table: Mapping[str, tuple[str, str]], *, help: str, root: bool = False, epilog: str | None = None
) -> typer.Typer:
    """Make a Typer app from a table.

    Args:
        table: Command name -> (`"module:attribute"`, one line of help). The attribute is a function annotated for
            typer, or a `typer.Typer` app.
        help: Help of the group.
        root: Whether this is the program itself, which has `--debug`, `--version` and shell completion.
        epilog: Text under the help, for examples.
    """

    class LazyGroup(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
            # The listing uses `get_command`, which finds the stubs; only a call comes through here.
            if args and args[0] not in table and not ctx.resilient_parsing:
                ctx.fail(f"No such command {args[0]!r}; there are {', '.join(table)}.")
            name, command, rest = super().resolve_command(ctx, args)
            return name, load_command(name, table[name][0]) if name in table else command, rest

    app = typer.Typer(
        cls=LazyGroup,
        help=help,
        epilog=epilog,
        no_args_is_help=True,
        add_completion=root,
        pretty_exceptions_enable=False,  # errors are shown by `hf_ext.cli.main`
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, (_, line) in table.items():
        app.command(name, help=line)(_stub)
    if root:
        app.callback()(_root_options)
    else:
        app.callback()(_no_options)
    return app


def load_command(name: str, target: str) -> Any:
    """Import `"module:attribute"` and turn it into a command for the parser.

    Raises:
        ImportError: The module cannot be imported; a missing optional dependency says which extra brings it.
    """
    module, _, attribute = target.partition(":")
    found: Callable[..., Any] | typer.Typer = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(
            pretty_exceptions_enable=False,
            rich_markup_mode="markdown",
            add_completion=False,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        app.command(name)(found)
        found = app
    command = typer.main.get_command(found)
    command.name = name
    return command


def _stub() -> None:
    raise AssertionError("a lazy command is replaced by its module's before it runs")


def _no_options() -> None:
    pass


def _show_version(wanted: bool) -> None:
    if wanted:
        import hf_ext

        print(f"hf-ext {hf_ext.__version__}")
        raise typer.Exit


def _root_options(
    # For the help only: `hf_ext.cli.main` takes it out of the arguments, wherever it stands.
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    # Eager: without a verb there would be a usage error first.
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_show_version
    ),
) -> None:
    pass
