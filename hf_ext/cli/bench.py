"""`hf-ext bench NAME`: every folder of `hf_ext.benchmarks` with a `run.py` whose `main` is a typer function."""

import ast
import importlib.util
from pathlib import Path

from hf_ext.cli.lazy import lazy_app


def benchmarks() -> dict[str, tuple[str, str]]:
    """Find the benchmarks without importing them: name -> (target, first line of the module's docstring)."""
    found = {}
    spec = importlib.util.find_spec("hf_ext.benchmarks")
    for root in spec.submodule_search_locations:
        for file in sorted(Path(root).glob("*/run.py")):
            docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            name = file.parent.name
            found[name] = (f"hf_ext.benchmarks.{name}.run:main", docstring.split("\n\n")[0].replace("\n", " "))
    return found


app = lazy_app(
    benchmarks(),
    help="Measure a method beside its peers. Rows go to a data file; a killed run goes on where it stopped.",
    epilog="Examples: `hf-ext bench mxfp4`, `hf-ext bench mxfp4 --help`",
)
