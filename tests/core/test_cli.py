"""The `hf-ext` command: what it lists, what it imports, how it fails."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from hf_ext.cli import VERBS, main
from hf_ext.cli.bench import benchmarks
from hf_ext.registry import METHODS, WINGS


def hf_ext(*arguments: str, env: dict[str, str] | None = None, cwd=None) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hf_ext.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        timeout=120,
    )


@pytest.fixture
def run(monkeypatch, capsys):
    """`run("list", columns=80)` -> (exit code, standard output, standard error), in this process."""

    def call(*arguments: str, columns: int = 100) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return call


# --- help ----------------------------------------------------------------------------------------------------------


def test_help_lists_every_verb_and_imports_no_heavy_library(fresh_python):
    out = fresh_python(
        "import sys\nfrom hf_ext.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'kernels', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy\n",
        env={"COLUMNS": "100"},
    )
    listed = {line.split()[1] for line in out.splitlines() if line.startswith("│ ") and line[2] != " "}
    assert set(VERBS) <= listed, out


def test_list_imports_no_heavy_library(fresh_python):
    fresh_python(
        "import sys\nfrom hf_ext.cli import main\n"
        "try: main(['list'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )


@pytest.mark.parametrize("verb", [*(verb for verb in VERBS if verb != "kernels"), "kernels check", "kernels compile"])
def test_every_verb_has_help_with_an_example(run, verb):
    code, out, _ = run(*verb.split(), "--help")
    assert code == 0
    usage, _, rest = out.partition(f"Usage: hf-ext {verb}")
    assert not usage.strip() and f"hf-ext {verb}" in rest, f"no example in the help of {verb}:\n{out}"


def test_no_verb_at_all_prints_the_help(run):
    code, out, err = run()
    assert code == 2  # as click has it for every group
    assert "quantize" in out + err


def test_version(run):
    import hf_ext

    assert run("--version") == (0, f"hf-ext {hf_ext.__version__}\n", "")


# --- errors --------------------------------------------------------------------------------------------------------


def test_an_error_is_one_line_on_standard_error_and_exit_code_1():
    result = hf_ext("list", "nonsense")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and "'nonsense'" in result.stderr


@pytest.mark.parametrize("arguments", [("--debug", "list", "nonsense"), ("list", "nonsense", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(arguments):
    result = hf_ext(*arguments)
    assert result.returncode == 1
    assert "Traceback (most recent call last)" in result.stderr and "ValueError: 'nonsense'" in result.stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\nlines   here"), "error: two lines here\n"),
        (FileNotFoundError(2, "No such file", "x.txt"), "error: [Errno 2] No such file: 'x.txt'\n"),
        (ImportError("trl is not installed"), "error: trl is not installed\n"),
        (RuntimeError(), "error: RuntimeError\n"),
    ],
)
def test_expected_kinds_of_errors_become_one_line(run, monkeypatch, error, line):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("hf_ext.cli.methods.list_methods", fail)
    assert run("list") == (1, "", line)


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a bug")

    monkeypatch.setattr("hf_ext.cli.methods.list_methods", fail)
    with pytest.raises(AssertionError, match="a bug"):
        main(["list"])


def test_ctrl_c_exits_with_130(run, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_ext.cli.methods.list_methods", interrupt)
    assert run("list")[0] == 130


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nonsense",), "nonsense"),
        (("list", "--nonsense"), "--nonsense"),
        (("list", "quantizers", "surplus"), "surplus"),
        (("quantize",), "src"),
        (("bench", "nonsense"), "nonsense"),
        (("quantize", "a", "b", "--block-size", "x"), "--block-size"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_what_is_wrong(run, arguments, named):
    code, _, err = run(*arguments)
    assert code == 2 and named in err.lower() and "Traceback" not in err


@pytest.mark.parametrize("group", [(), ("bench",)])
def test_an_unknown_verb_is_answered_with_the_verbs_that_there_are(run, group):
    _, _, err = run(*group, "nonsense", columns=200)
    assert all(name in err for name in (benchmarks() if group else VERBS)), err


def test_a_reader_that_stops_early_gets_no_traceback():
    command = f"{sys.executable} -m hf_ext.cli list --json | head -n 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert result.stdout == "[\n" and result.stderr == ""


# --- list ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
def test_list_names_every_method_whole_and_fits_the_terminal(run, columns):
    code, out, _ = run("list", columns=columns)
    assert code == 0 and max(map(len, out.splitlines())) <= columns
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "] == [
        method.name for method in sorted(METHODS, key=lambda m: WINGS.index(m.wing))
    ]
    # Wrapped, but never to the narrow strip that a column for the paper would leave.
    assert len(out.splitlines()) <= 2.6 * len(METHODS) + 12


def test_list_of_one_method_shows_its_paper(run):
    _, out, _ = run("list", "mxfp4", columns=200)
    assert "Unveiling the Potential of Quantization with MXFP4" in out and "arXiv 2603.08713" in out


def test_list_filters_and_prints_json(run):
    _, out, _ = run("list", "quantizers", "--status", "available", "--json")
    assert [method["name"] for method in json.loads(out)] == ["mxfp4"]
    code, _, err = run("list", "--status", "soon")
    assert code == 1 and "available, planned" in err


# --- env and bench -------------------------------------------------------------------------------------------------


def test_env_prints_versions_and_why_a_kernel_runs_and_no_empty_table(run, monkeypatch):
    from hf_ext.cli.environment import VARIABLES

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    code, out, _ = run("env", columns=120)
    assert code == 0 and "transformers" in out and "mxfp4_gemm" in out and "because" in out
    assert "Environment variables" not in out


def test_env_json_has_the_forced_kernel_and_its_reason(run, monkeypatch):
    monkeypatch.setenv("HF_EXT_KERNELS", "bundled")
    facts = json.loads(run("env", "--json")[1])
    assert facts["Kernels"]["mxfp4_gemm"]["source"] == "bundled"
    assert facts["Kernels"]["mxfp4_gemm"]["reason"] == "HF_EXT_KERNELS=bundled"
    assert facts["Environment variables"]["HF_EXT_KERNELS"] == "bundled"
    assert facts["Versions"]["transformers"] == importlib.metadata.version("transformers")


def test_bench_lists_its_benchmarks_without_importing_them(fresh_python):
    out = fresh_python(
        "import sys\nfrom hf_ext.cli import main\n"
        "try: main(['bench', '--help'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules\n",
        env={"COLUMNS": "120"},
    )
    assert "mxfp4" in benchmarks()
    for name, (_, line) in benchmarks().items():
        assert name in out and line, f"benchmark {name} is not listed, or has no line of help"


# --- publish -------------------------------------------------------------------------------------------------------


def test_publish_dry_run_lists_the_files_and_sends_nothing(run, tiny_llama_dir, tmp_path):
    packed = str(tmp_path / "packed")
    assert run("quantize", str(tiny_llama_dir), packed, "--base-model", "org/tiny")[0] == 0
    code, out, _ = run("publish", packed, "--repo-id", "me/tiny", "--dry-run", columns=160)
    assert code == 0 and "me/tiny (model)" in out and "model.safetensors" in out and "would be uploaded" in out


def test_publish_of_a_folder_that_is_not_there_names_it(run, tmp_path):
    code, _, err = run("publish", str(tmp_path / "nothing"))
    assert (
        code == 1 and "nothing is neither a folder nor the name of a bundled kernel (" in err and "mxfp4_gemm" in err
    )
