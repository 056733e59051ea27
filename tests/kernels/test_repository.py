"""Every kernel folder as others see it: the `kernels` library, a process without hf_ext, the reference's callers."""

import inspect
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

from hf_ext.cli import main
from hf_ext.kernel_lookup import KERNELS, kernel_folder, kernel_folders, load_kernel
from hf_ext.kernel_tools import check_kernel

NAMES = sorted(KERNELS)


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of mxfp4_gemm that a test may spoil."""
    folder = tmp_path / "mxfp4_gemm"
    shutil.copytree(kernel_folder("mxfp4_gemm"), folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def problems(folder: Path) -> dict[str, str]:
    return {finding.name: finding.detail for finding in check_kernel(folder) if not finding.ok}


def test_the_bundled_folders_are_those_that_the_lookup_knows():
    assert sorted(kernel_folders()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_folder_is_a_repository_that_stands_on_its_own(name):
    findings = check_kernel(kernel_folder(name))
    assert {finding.name for finding in findings} == {
        "layout", "README.md", "metadata.json", "build.toml", "imports", "kernels library", "without hf_ext",
    }  # fmt: skip
    assert [finding for finding in findings if not finding.ok] == []


@pytest.mark.parametrize("name", NAMES)
def test_kernel_and_reference_have_the_same_functions_with_the_same_signatures(name):
    def signatures(module) -> dict[str, list[tuple]]:
        public = {key: getattr(module, key) for key in module.__all__ if inspect.isfunction(getattr(module, key))}
        return {
            key: [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
            for key, function in public.items()
        }

    ours = signatures(get_local_kernel(kernel_folder(name)))
    assert ours and ours == signatures(load_kernel(name, "reference"))


def test_get_kernel_finds_the_folder_through_the_librarys_own_redirection(fresh_python, tmp_path):
    code = (
        "from kernels import get_kernel\nkernel = get_kernel('hf-ext/mxfp4_gemm', version=1, trust_remote_code=True)\n"
        "import torch\npacked, scale, macro = kernel.quantize(torch.ones(1, 32))\n"
        "print(packed[0, 0].item(), scale.item())"
    )
    environment = {"LOCAL_KERNELS": f"hf-ext/mxfp4_gemm={kernel_folder('mxfp4_gemm')}", "TRITON_INTERPRET": "1"}
    # OAS with a macro block brings 1.0 to 6 (code 7, 0x77 in a pair) under 2**-3 and the factor 1.5.
    assert fresh_python(code, env=environment, cwd=tmp_path).split() == ["119", "125"]


def decode(kernel):
    """Attention of one head over 32 packed tokens and a dense one, all zero."""

    def zeros(*shape, dtype=torch.uint8):
        return torch.zeros(1, 1, *shape, dtype=dtype)

    half, full = torch.float16, torch.float32
    side = (zeros(32, 8), zeros(1, 32, dtype=half), zeros(1, 32, dtype=half), zeros(32), zeros(1, 32, dtype=full))
    values = (side[0], zeros(32, 1, dtype=half), zeros(32, 1, dtype=half), *side[3:])
    dense = zeros(1, 32, dtype=full)
    sizes = {"key_bits": 2, "value_bits": 2, "group_size": 32, "value_group_size": 32, "scaling": 1.0}
    return kernel.decode_attention(dense[:, 0], *side, *values, dense, dense, **sizes)


def attend(kernel):
    """Attention of one query to one token, with an adapter of rank 1 on keys and values, all ones."""
    ones, u, b, angles = torch.ones(1, 1, 1, 16), torch.ones(1, 1, 1), torch.ones(16, 1), torch.ones(1, 1, 16)
    return kernel.flash_lora_attention(
        ones, ones, ones, u, u, b, b, angles, angles, scale=1.0, lora_scale_k=1.0, lora_scale_v=0.5
    )


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("flash_lora_attention", attend),
        ("mxfp4_gemm", lambda kernel: kernel.quantize(torch.ones(1, 32))),
        ("patternkv_attention", decode),
    ],
    ids=NAMES,
)
def test_a_tensor_on_the_cpu_is_refused_without_the_interpreter(name, call):
    kernel = get_local_kernel(kernel_folder(name))
    with pytest.raises(RuntimeError, match="^Triton kernels need an accelerator; use source='reference'$"):
        call(kernel)


def test_the_attention_to_one_token_is_its_value_with_the_adapters_part():
    assert attend(load_kernel("flash_lora_attention", "reference")).eq(1.5).all()


def test_the_attention_of_zeros_is_the_logarithm_of_their_number():
    out, lse = decode(load_kernel("patternkv_attention", "reference"))
    assert not out.any() and lse.item() == pytest.approx(math.log(33))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("flash_lora_attention", 3), ("mxfp4_gemm", 6), ("patternkv_attention", 3)], ids=NAMES
)
def test_the_librarys_own_runner_takes_the_benchmark_and_finds_its_results_right(name, count, tmp_path):
    folder = kernel_folder(name)
    command = [Path(sys.executable).parent / "kernels", "benchmark", folder, "--iterations", "1", "--warmup", "0"]
    result = subprocess.run(
        [*command, "--output", tmp_path / "out.json"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "out.json").read_text("utf-8"))["results"]
    assert len(results) == count and all(row["verified"] for row in results), results


def test_the_command_names_the_bundled_kernels_when_a_folder_does_not_exist(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["kernels", "check", "no-such-folder"])
    assert stopped.value.code == 1
    assert (
        "'no-such-folder' is no folder, and no bundled kernel; bundled are: flash_lora_attention, mxfp4_gemm"
        in capsys.readouterr().err
    )


def test_the_command_shows_the_checks_of_a_bundled_kernel(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["kernels", "check", "mxfp4_gemm"])
    assert not stopped.value.code
    assert "loads in an isolated interpreter" in capsys.readouterr().out


# --- the check itself can fail ---------------------------------------------------------------------------------------


def test_a_missing_file_is_named(copy):
    (copy / "build.toml").unlink()
    assert problems(copy) == {"layout": f"FileNotFoundError: {copy} lacks build.toml"}


def test_a_foreign_import_is_named_with_its_line(copy):
    file = copy / "build/torch-universal/layers.py"
    file.write_text("import numpy\n" + file.read_text("utf-8"))
    assert "layers.py, line 1 imports numpy" in problems(copy)["imports"]


def test_an_import_of_hf_ext_fails_twice(copy):
    file = copy / "build/torch-universal/__init__.py"
    file.write_text("import hf_ext\n" + file.read_text("utf-8"))
    found = problems(copy)
    assert "imports hf_ext" in found["imports"] and "hf_ext is not available" in found["without hf_ext"]


@pytest.mark.parametrize(
    ("key", "value", "check", "words"),
    [
        ("name", "mxfp4_gemm", "metadata.json", "lower-case letters, digits and dashes only"),
        ("version", "1", "metadata.json", "version='1': expected a int"),
        ("id", "4-gemm", "metadata.json", "must be an identifier"),
        ("backend", {"type": "universal"}, "metadata.json", "universal"),
        ("python-depends", ["triton"], "kernels library", "unsupported kernel dependency"),
        ("version", 2, "build.toml", "version is 1 here and 2 in metadata.json"),
    ],
)
def test_wrong_metadata_is_named(copy, key, value, check, words):
    file = copy / "build/torch-universal/metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), key: value}))
    assert words in problems(copy)[check]


def test_a_card_without_its_header_is_named(copy):
    (copy / "README.md").write_text("# no header\n")
    assert "no YAML header" in problems(copy)["README.md"]
