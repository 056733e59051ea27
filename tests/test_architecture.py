"""The rules of the tree: who imports whom, what every method folder has, what a wheel holds, what a README promises.

They are for every method, those to come included: nothing here names one, but for the wheel's round trip.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_ext
from hf_ext.cli import VERBS
from hf_ext.registry import WINGS, list_methods

ROOT = Path(__file__).resolve().parents[1]
TRAVELLING = ("model_patches", "kernels", "metrics")  # their folders go to the Hub as they are
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

# What every method folder of a wing has. A wing's first method adds its line.
REQUIRED_FILES = {
    "quantizers": ("__init__.py", "README.md", "configuration.py", "linear.py", "numerics.py", "quantizer.py"),
    "kernels": ("README.md", "build.toml", "build/torch-universal/__init__.py", "build/torch-universal/metadata.json"),
    "cache_impls": ("__init__.py", "README.md", "cache.py", "configuration.py", "files.py", "layer.py"),
    "model_patches": ("__init__.py", "README.md", "patching.py"),
    "trainers": ("__init__.py", "README.md", "__main__.py"),
    "adapters": ("__init__.py", "README.md", "config.py", "core.py", "folders.py", "merging.py", "report.py"),
    "generation": ("__init__.py", "README.md"),
    "tasks": ("__init__.py", "README.md"),
    "metrics": ("__init__.py", "README.md"),
}


def method_folders(*wings: str) -> list[Path]:
    return [
        path
        for wing in wings or WINGS
        for path in sorted((ROOT / wing).iterdir())
        if path.is_dir() and not path.name.startswith((".", "_")) and any(path.rglob("*.py"))
    ]


def python_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- imports -------------------------------------------------------------------------------------------------------

HOME = {name: module for module, names in hf_ext._EXPORTS.items() for name in names}


def imported_modules(tree: ast.AST, package: str, *, inside_functions: bool = True) -> Iterator[str]:
    """Absolute dotted names that a module imports, however it does so, blocks for type checkers left out.

    Args:
        tree: The module.
        package: Package that the module is in, for relative imports.
        inside_functions: Whether imports in functions count.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if not inside_functions and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                # `from hf_ext import MXFP4Config` imports the wing that defines it.
                yield (
                    HOME.get(alias.name, f"{module}.{alias.name}") if module == "hf_ext" else f"{module}.{alias.name}"
                )
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function in ("import_module", "__import__", "require") and isinstance(node.args[0].value, str):
                yield node.args[0].value
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hf_ext":
            yield HOME.get(node.attr, f"hf_ext.{node.attr}")  # `import hf_ext` and then `hf_ext.trainers`
        yield from imported_modules(node, package, inside_functions=inside_functions)


def foreign_imports(source: str, wing: str, package: str) -> list[str]:
    """Imports of wings other than `wing`; bare names of our root folders count too, as they work in a checkout."""
    found = []
    for module in imported_modules(ast.parse(source), package):
        parts = module.split(".")
        other = parts[1] if parts[0] == "hf_ext" and len(parts) > 1 else parts[0]
        # Bare `kernels` is the Hugging Face library. Benchmarks are no wing, and nothing below them may import them.
        bare_library = parts[0] == "kernels"
        if other in (*WINGS, "benchmarks") and not bare_library and (other != wing or parts[0] != "hf_ext"):
            found.append(module)
    return found


def package_of(path: Path) -> str:
    return ".".join(("hf_ext", *path.relative_to(ROOT).parent.parts))


def test_a_wing_imports_only_core_and_itself():
    wrong = {
        name_of(path): found
        for wing in WINGS
        for path in python_files(ROOT / wing)
        if "tests" not in path.parts and (found := foreign_imports(path.read_text("utf-8"), wing, package_of(path)))
    }
    assert not wrong


def test_core_imports_no_wing_when_it_is_imported():
    wrong = {}
    for path in python_files(ROOT / "hf_ext"):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        modules = imported_modules(ast.parse(path.read_text("utf-8")), package, inside_functions=False)
        found = [module for module in modules if re.match(rf"hf_ext\.({'|'.join(WINGS)}|benchmarks)\b", module)]
        if found:
            wrong[name_of(path)] = found
    assert not wrong


def test_folders_that_travel_to_the_hub_do_not_import_hf_ext():
    wrong = {}
    for folder in method_folders(*TRAVELLING):
        travels = folder / "build" if folder.parent.name == "kernels" else folder
        for path in python_files(travels):
            modules = imported_modules(ast.parse(path.read_text("utf-8")), package_of(path))
            # A relative import resolves to our own name here; out of the folder it may not lead.
            inside = "hf_ext." + ".".join(folder.relative_to(ROOT).parts)
            found = [m for m in modules if m.split(".")[0] == "hf_ext" and not m.startswith(f"{inside}.")]
            if found or re.search(r"^\s*(from|import)\s+hf_ext\b", path.read_text("utf-8"), re.MULTILINE):
                wrong[name_of(path)] = found
    assert not wrong


def test_kernels_import_torch_triton_the_standard_library_and_their_siblings_only():
    wrong = {}
    for folder in method_folders("kernels"):
        for path in python_files(folder / "build"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module]
                for name in names:
                    if name.split(".")[0] not in {"torch", "triton", *sys.stdlib_module_names}:
                        wrong.setdefault(name_of(path), []).append(name)
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "import hf_ext.trainers.cat",
        "from hf_ext.trainers import cat",
        "from hf_ext import trainers",
        "def f():\n    from hf_ext.trainers.cat import x",
        "from ...trainers import cat",
        "import hf_ext\nhf_ext.trainers.cat",
        "import importlib\nimportlib.import_module('hf_ext.trainers.cat')",
        "import trainers",
        "try:\n    import hf_ext.benchmarks.mxfp4\nexcept ImportError:\n    pass",
    ],
)
def test_the_import_rule_catches_every_way_to_import(source):
    assert foreign_imports(source, "quantizers", "hf_ext.quantizers.mxfp4")


@pytest.mark.parametrize(
    "source",
    [
        "import torch, kernels, hf_ext.runlog",
        "from hf_ext.quantizers.mxfp4 import numerics",
        "from . import numerics\nfrom ..mxfp4 import linear",
        "from hf_ext import load_kernel, MXFP4Config",
        "if TYPE_CHECKING:\n    from hf_ext.trainers import cat",
    ],
)
def test_the_import_rule_lets_core_and_the_wing_itself_through(source):
    assert foreign_imports(source, "quantizers", "hf_ext.quantizers.mxfp4") == []


def test_kernels_has_no_init_at_its_root():
    # `import kernels`, started in a checkout, would find it instead of the library.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_import_hf_ext_is_quick_and_imports_neither_torch_nor_transformers(fresh_python):
    code = (
        "import sys, time\nstart = time.perf_counter()\nimport hf_ext\nprint(time.perf_counter() - start)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\nassert not heavy, heavy"
    )
    assert min(float(fresh_python(code)) for _ in range(3)) < 0.1  # s


# --- names and files -----------------------------------------------------------------------------------------------


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public functions, classes and methods without a docstring."""

    def walk(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If | ast.Try):
                yield from walk(child, prefix)
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            decorators = " ".join(ast.unparse(decorator) for decorator in child.decorator_list)
            if child.name.startswith("_") or "overload" in decorators or ".setter" in decorators:
                continue
            if ast.get_docstring(child) is None:
                yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")

    if ast.get_docstring(tree) is None and tree.body:
        yield "the module"
    yield from walk(tree, "")


def test_every_public_name_has_a_docstring():
    wrong = {}
    for folder in ("hf_ext", "benchmarks", "examples", *WINGS):
        for path in python_files(ROOT / folder):
            # Tests, and scripts of kernel folders for the runner of the `kernels` library, export no names.
            if "tests" in path.parts or (folder == "kernels" and "benchmarks" in path.parts):
                continue
            found = list(undocumented(ast.parse(path.read_text("utf-8"))))
            if found:
                wrong[name_of(path)] = found
    assert not wrong


def test_the_docstring_rule_catches_functions_classes_and_methods():
    source = (
        '"""m"""\ndef f(): pass\nclass C:\n    """c"""\n    def g(self): pass\n    def _h(self): pass\ndef _k(): pass'
    )
    assert list(undocumented(ast.parse(source))) == ["f", "C.g"]
    assert list(undocumented(ast.parse("x = 1"))) == ["the module"]


def test_an_available_method_is_an_attribute_of_its_wing(fresh_python):
    # `hf_ext.trainers.cat` after `import hf_ext` alone: the wing's __init__.py names its methods.
    names = [f"{m.wing}.{m.name}" for m in list_methods(status="available") if m.wing != "kernels"]
    fresh_python("import hf_ext\n" + "\n".join(f"hf_ext.{name}" for name in names))


def test_every_method_folder_has_its_wings_files():
    assert set(REQUIRED_FILES) == set(WINGS)
    missing = {
        name_of(folder): absent
        for folder in method_folders()
        if (absent := [name for name in REQUIRED_FILES[folder.parent.name] if not (folder / name).is_file()])
    }
    assert method_folders() and not missing


def test_gitignore_hides_no_kernel_and_does_hide_build_output(tmp_path):
    # In an empty repository of its own, so that what is tracked already does not count.
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)

    def ignored(path: str) -> bool:
        return subprocess.run(["git", "check-ignore", "--quiet", path], cwd=tmp_path).returncode == 0

    for folder in method_folders("kernels"):
        for file in (folder / "build" / "torch-universal").iterdir():
            if file.name != "__pycache__":
                assert not ignored(name_of(file)), f"{name_of(file)} is hidden by .gitignore"
    assert ignored("build/lib/x.py") and ignored(".venv/x") and ignored("demo/table.md")
    assert not ignored("benchmarks/demo.py") and not ignored("tests/benchmarks/test_demo.py")


# --- READMEs -------------------------------------------------------------------------------------------------------

READMES = [ROOT / "README.md", *(folder / "README.md" for folder in method_folders())]
OF_KERNELS = [path for path in READMES if "kernels" in path.relative_to(ROOT).parts]
RUNNABLE = [path for path in READMES if path not in OF_KERNELS]


def snippets(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNNABLE, ids=name_of)
def test_the_python_snippets_of_a_readme_run_in_order(path, tiny_llama_dir, tmp_path, fresh_python):
    code = "\n".join(snippets(path, "python"))
    assert code.strip(), f"{name_of(path)} has no Python snippet"
    fresh_python(code.replace(MODEL_ID, str(tiny_llama_dir)), cwd=tmp_path)


@pytest.mark.parametrize("path", OF_KERNELS, ids=name_of)
def test_the_python_snippets_of_a_kernels_readme_compile(path):
    # They need a GPU, so they are not run here; the kernel's own tests run its functions in Triton's interpreter.
    found = snippets(path, "python")
    assert found, f"{name_of(path)} has no Python snippet"
    for code in found:
        ast.parse(code)


@pytest.mark.parametrize("path", [*READMES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "RESULTS.md"], ids=name_of)
def test_links_and_commands_of_a_page_exist(path):
    text = path.read_text("utf-8")
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    verbs = re.findall(r"\bhf-ext ([a-z][a-z-]*)", "\n".join(re.findall(r"`[^`\n]+`", text) + snippets(path, "bash")))
    assert [verb for verb in verbs if verb not in VERBS] == []


# --- the wheel -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without network in a copy of the tree: the build writes beside the sources."""
    work = tmp_path_factory.mktemp("wheel")
    left_out = (".git", ".*", "__pycache__", "build-*", "dist", "demo", "*.egg-info")
    shutil.copytree(ROOT, work / "tree", ignore=shutil.ignore_patterns(*left_out))
    for folder in method_folders("kernels"):
        (work / "tree" / name_of(folder) / "tests").mkdir(exist_ok=True)
        (work / "tree" / name_of(folder) / "tests" / "test_x.py").touch()  # which must not travel
    shutil.rmtree(work / "tree" / "build", ignore_errors=True)  # an earlier build's; kernels/*/build stays
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    built = subprocess.run([*command, "--wheel-dir", work, work / "tree"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return next(work.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_wing_the_kernels_and_the_benchmarks_and_no_bare_name(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"hf_ext", f"hf_ext-{hf_ext.__version__}.dist-info"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc") or "/tests/" in name]

    expected = {"hf_ext/py.typed", "hf_ext/quantizers/mxfp4/README.md", "hf_ext/benchmarks/mxfp4/data/results.jsonl"}
    expected |= {name_of(path) for path in python_files(ROOT / "hf_ext")}
    for wing in (*(wing for wing in WINGS if wing != "kernels"), "benchmarks"):
        assert f"hf_ext/{wing}/__init__.py" in names
        expected |= {f"hf_ext/{name_of(path)}" for path in python_files(ROOT / wing)}
    for folder in method_folders():
        if folder.parent.name != "kernels":
            expected.add(f"hf_ext/{name_of(folder)}/README.md")
    for folder in method_folders("kernels"):
        for path in (folder / "build" / "torch-universal").glob("*.*"):
            expected.add(f"hf_ext/_{name_of(path)}")
        expected.add(f"hf_ext/_{name_of(folder)}/build.toml")
    assert expected <= names, sorted(expected - names)


@pytest.mark.slow
def test_the_installed_wheel_works_from_an_empty_folder(wheel, tiny_llama_dir, tmp_path, fresh_python):
    target, empty, packed = tmp_path / "site", tmp_path / "empty", tmp_path / "packed"
    empty.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    installed = subprocess.run(command, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    assert sorted(path.name for path in target.iterdir() if not path.name.endswith(".dist-info")) == ["bin", "hf_ext"]

    # The checkout that the tests themselves run on must not answer instead.
    prologue = (
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '').lower()]\n"
        f"sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}]\n"
    )
    out = fresh_python(
        prologue + "import hf_ext, hf_ext.quantizers.mxfp4, hf_ext.benchmarks, hf_ext.trainers\n"
        "from hf_ext.kernel_lookup import kernel_folders\n"
        "from hf_ext.cli.bench import benchmarks\n"
        "from transformers import AutoModelForCausalLM\n"
        "files = [m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'hf_ext']\n"
        f"assert all(file.startswith({str(target)!r}) for file in files), files\n"
        f"assert all(str(folder).startswith({str(target)!r}) for folder in kernel_folders().values())\n"
        "assert 'mxfp4_gemm' in kernel_folders() and 'mxfp4' in benchmarks()\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tiny_llama_dir)!r}, "
        "quantization_config=hf_ext.MXFP4Config())\n"
        f"model.save_pretrained({str(packed)!r})\n"
        f"model, info = AutoModelForCausalLM.from_pretrained({str(packed)!r}, output_loading_info=True)\n"
        "assert not info['missing_keys'] and not info['unexpected_keys'], info\n"
        "print(type(model.model.layers[0].mlp.up_proj).__module__)\n",
        env={"PYTHONPATH": str(target)},
        cwd=empty,
    )
    assert out == "hf_ext.quantizers.mxfp4.linear\n"
    listed = subprocess.run(
        [target / "bin" / "hf-ext", "list", "--json"],
        env={**os.environ, "PYTHONPATH": str(target)},
        cwd=empty,
        capture_output=True,
        text=True,
    )
    assert listed.returncode == 0 and '"mxfp4_gemm"' in listed.stdout, listed.stderr
    assert not any(empty.iterdir())
