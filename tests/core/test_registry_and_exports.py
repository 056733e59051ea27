"""The registry, lazy exports, and optional dependencies."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

import hf_ext
from hf_ext import extras
from hf_ext._lazy import attach
from hf_ext.registry import METHODS, STATUSES, WINGS, list_methods

ROOT = Path(__file__).resolve().parents[2]

# --- registry ------------------------------------------------------------------------------------------------------


def test_the_nineteen_papers_and_three_kernels_are_there_under_unique_names():
    assert len({method.name for method in METHODS}) == len(METHODS)
    papers = [method for method in METHODS if method.venue]
    assert len({method.title for method in papers}) == len(papers) == 19
    assert sorted(method.name for method in METHODS if not method.venue) == [
        "flash_lora_attention",
        "mxfp4_gemm",
        "patternkv_attention",
    ]


def test_every_row_is_well_formed():
    for method in METHODS:
        assert method.wing in WINGS and method.status in STATUSES
        assert re.fullmatch(r"[a-z][a-z0-9_]*", method.name)
        assert method.title and method.summary and "\n" not in method.summary and not method.summary.endswith(".")
        assert re.fullmatch(r"(\d{4}\.\d{5})?", method.arxiv)
        assert all(folder.split("/")[0] in WINGS and folder.count("/") == 1 for folder in method.also)


def test_a_method_is_available_exactly_when_its_folder_is_there():
    listed = {folder for method in METHODS for folder in (method.folder, *method.also)}
    for method in METHODS:
        folder = ROOT / method.folder
        is_there = folder.is_dir() and any(folder.rglob("*.py"))
        assert is_there == (method.status == "available"), f"{method.name} is {method.status}, its folder says not so"
    present = {
        f"{wing}/{path.name}"
        for wing in WINGS
        for path in (ROOT / wing).iterdir()
        if path.is_dir() and any(path.rglob("*.py")) and not path.name.startswith((".", "__"))
    }
    assert present <= listed, f"folders without a row in hf_ext/registry.py: {present - listed}"


def test_methods_come_in_the_order_of_the_wings_and_filters_name_bad_values():
    assert [WINGS.index(method.wing) for method in list_methods()] == sorted(WINGS.index(m.wing) for m in METHODS)
    assert {method.status for method in list_methods(status="planned")} <= {"planned"}
    with pytest.raises(ValueError, match="wing is 'quantisers'; it must be one of quantizers"):
        list_methods("quantisers")
    with pytest.raises(ValueError, match="status is 'soon'; it must be one of available, planned"):
        list_methods(status="soon")


# --- lazy exports --------------------------------------------------------------------------------------------------

EXPORTED = [(module, name) for module, names in hf_ext._EXPORTS.items() for name in names]


@pytest.mark.parametrize(("module", "name"), EXPORTED, ids=[name for _, name in EXPORTED])
def test_every_exported_name_resolves_to_its_modules_object(module, name):
    assert getattr(hf_ext, name) is getattr(importlib.import_module(module), name)
    assert name in dir(hf_ext) and name in hf_ext.__all__


def test_star_import_gives_the_table():
    namespace: dict = {}
    exec("from hf_ext import *", namespace)
    assert {name for _, name in EXPORTED} == set(namespace) - {"__builtins__"}


def test_star_import_goes_without_the_names_whose_library_is_missing(tmp_path, monkeypatch):
    package = tmp_path / "needy_pkg"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from hf_ext._lazy import attach\n"
        "exports = {'needy_pkg.plain': ['a'], 'needy_pkg.needy': ['b'], 'needy_pkg.met': ['c']}\n"
        "needs = {'no_such_library': ['b'], 'json': ['c']}\n"
        "__getattr__, __dir__, __all__ = attach(__name__, exports, needs=needs)\n"
    )
    (package / "plain.py").write_text("a = 1\n")
    (package / "needy.py").write_text("import no_such_library\nb = 2\n")
    (package / "met.py").write_text("import json\nc = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict = {}
    exec("from needy_pkg import *", namespace)
    assert (namespace["a"], namespace["c"]) == (1, 3) and "b" not in namespace
    import needy_pkg

    assert "b" in dir(needy_pkg)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        needy_pkg.b  # noqa: B018


def test_star_import_of_hf_ext_works_without_any_extra(fresh_python):
    libraries = {*hf_ext._NEEDS, "trl", "datasets", "evaluate", "kernels", "triton", "gguf", "matplotlib"}
    assert {name for names in hf_ext._NEEDS.values() for name in names} <= {name for _, name in EXPORTED}
    fresh_python(
        "import importlib.abc, importlib.util, sys\n"
        f"missing = {sorted(libraries)!r}\n"
        "class Missing(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in missing:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name in missing else find(name, *rest)\n"
        "from hf_ext import *\nfrom hf_ext.quantizers import *\nfrom hf_ext.quantizers.mxfp4 import *\n"
        "assert MXFP4Config and 'load_adapter' not in globals()\n"
        "import hf_ext\n"
        "try: hf_ext.load_adapter\n"
        "except ImportError as error: assert \"pip install 'hf-ext[adapters]'\" in str(error), error\n"
        "else: raise AssertionError('no ImportError')\n"
    )


def test_the_block_for_type_checkers_equals_the_table():
    tree = ast.parse((ROOT / "hf_ext" / "__init__.py").read_text())
    block = next(
        node.body for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    found = [(node.module, alias.name) for node in block for alias in node.names]
    assert sorted(found) == sorted(EXPORTED)
    assert all(alias.asname == alias.name for node in block for alias in node.names)  # marks a re-export


def test_wings_are_reachable_as_attributes_and_unknown_names_are_not(fresh_python):
    fresh_python("import hf_ext; hf_ext.quantizers.mxfp4.MXFP4Config")
    for wing in hf_ext._WINGS:
        assert importlib.import_module(f"hf_ext.{wing}") is getattr(hf_ext, wing)
    with pytest.raises(AttributeError, match="module 'hf_ext' has no attribute 'MXFP5Config'"):
        hf_ext.MXFP5Config  # noqa: B018
    with pytest.raises(ImportError):
        from hf_ext import MXFP5Config  # noqa: F401


def test_a_name_is_resolved_once(tmp_path, monkeypatch):
    (tmp_path / "lazy_pkg").mkdir()
    (tmp_path / "lazy_pkg" / "__init__.py").write_text(
        "from hf_ext._lazy import attach\n"
        "__getattr__, __dir__, __all__ = attach(__name__, {'lazy_pkg.inner': ['value']}, submodules=['inner'])\n"
    )
    (tmp_path / "lazy_pkg" / "inner.py").write_text("value = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lazy_pkg

    assert "lazy_pkg.inner" not in sys.modules
    assert lazy_pkg.value is lazy_pkg.inner.value and vars(lazy_pkg)["value"] is lazy_pkg.value
    assert lazy_pkg.__all__ == ["value"] and {"inner", "value"} <= set(dir(lazy_pkg))


def test_an_error_inside_a_lazily_imported_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_inner.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    getattribute, _, _ = attach(__name__, {"broken_inner": ["value"]})
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        getattribute("value")


# --- optional dependencies -----------------------------------------------------------------------------------------


def test_a_missing_library_names_the_extra_that_brings_it():
    with pytest.raises(ImportError) as caught:
        extras.require("no_such_library.part", extra="trainers")
    assert str(caught.value) == "no_such_library is not installed; it comes with: pip install 'hf-ext[trainers]'"
    assert caught.value.__suppress_context__


def test_a_library_that_fails_to_import_keeps_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import its_own_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="half_installed is installed but fails to import .*its_own_dep") as caught:
        extras.require("half_installed", extra="bench")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_an_installed_library_is_returned():
    assert extras.require("json", extra="dev") is sys.modules["json"]
    assert extras.is_installed("json") and not extras.is_installed("no_such_library")


def test_the_extras_are_those_of_the_wings_and_all_leaves_out_bench_and_dev():
    status = extras.extras_status()
    wings = {"caches", "trainers", "adapters", "metrics", "kernels", "tasks", "endpoints", "demo"}
    assert set(status) == wings | {"bench", "all", "dev"}
    assert status["dev"] == []  # what these tests run in
    for wing in wings:
        assert set(status[wing]) <= set(status["all"])
