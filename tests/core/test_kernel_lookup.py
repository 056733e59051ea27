"""Which implementation of a kernel is chosen, by whom, and what happens when a forced choice cannot be met."""

import json
import logging

import pytest

from hf_ext import kernel_lookup
from hf_ext.kernel_lookup import explain_kernel, kernel_folder, kernel_folders, load_kernel
from hf_ext.quantizers.mxfp4 import reference

NAME = "mxfp4_gemm"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.delenv("HF_EXT_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(kernel_lookup, "_logged", set())
    monkeypatch.setattr(kernel_lookup, "accelerator", lambda: None)


def test_without_an_accelerator_the_reference_is_chosen_and_loaded():
    choice = explain_kernel(NAME)
    assert choice.source == "reference" and choice.reason == "no accelerator found"
    assert load_kernel(NAME) is reference


@pytest.mark.parametrize("device", ["cuda", "rocm", "xpu"])
def test_with_an_accelerator_and_triton_the_bundled_copy_is_chosen(monkeypatch, device):
    monkeypatch.setattr(kernel_lookup, "accelerator", lambda: device)
    choice = explain_kernel(NAME)
    assert choice.source == "bundled" and device in choice.reason
    assert choice.location == str(kernel_folder(NAME))


def test_with_an_accelerator_and_no_triton_the_reference_is_chosen_and_the_extra_named(monkeypatch):
    monkeypatch.setattr(kernel_lookup, "accelerator", lambda: "cuda")
    monkeypatch.setattr(kernel_lookup, "is_installed", lambda module: False)
    choice = explain_kernel(NAME)
    assert choice.source == "reference" and "extra 'kernels'" in choice.reason


@pytest.mark.parametrize("source", ["hub", "bundled", "reference"])
def test_the_variable_wins_over_the_automatic_choice_and_the_argument_over_the_variable(monkeypatch, source):
    monkeypatch.setenv("HF_EXT_KERNELS", source)
    choice = explain_kernel(NAME)
    assert choice.source == source and choice.reason == f"HF_EXT_KERNELS={source}"
    for argument in ("hub", "bundled", "reference"):
        assert explain_kernel(NAME, argument).source == argument


def test_the_hub_is_never_the_automatic_choice(monkeypatch):
    for device in (None, "cuda", "rocm", "xpu"):
        monkeypatch.setattr(kernel_lookup, "accelerator", lambda device=device: device)
        assert explain_kernel(NAME).source != "hub"


def test_unknown_names_and_sources_are_errors_that_say_what_would_work(monkeypatch):
    with pytest.raises(ValueError, match=r"'mxfp8'; known kernels: .*mxfp4_gemm"):
        load_kernel("mxfp8")
    with pytest.raises(ValueError, match="source is 'gpu'; it must be one of auto, hub, bundled, reference"):
        load_kernel(NAME, "gpu")
    monkeypatch.setenv("HF_EXT_KERNELS", "gpu")
    with pytest.raises(ValueError, match="HF_EXT_KERNELS is 'gpu'; it must be one of"):
        load_kernel(NAME)


def test_a_forced_bundled_kernel_without_accelerator_and_interpreter_raises():
    with pytest.raises(RuntimeError, match="need an accelerator .* set TRITON_INTERPRET=1"):
        load_kernel(NAME, "bundled")


def test_a_forced_bundled_kernel_without_triton_names_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-ext\[kernels\]'"):
        load_kernel(NAME, "bundled")


@pytest.mark.parametrize("library", [True, False])
def test_the_bundled_kernel_loads_in_the_interpreter_with_and_without_the_kernels_library(fresh_python, library):
    out = fresh_python(
        "import sys\n"
        "from hf_ext import kernel_lookup, load_kernel\n"
        f"if not {library}: kernel_lookup._kernels_library_installed = lambda: False\n"
        "module = load_kernel('mxfp4_gemm', 'bundled')\n"
        "assert load_kernel('mxfp4_gemm', 'bundled') is module\n"
        f"assert ('kernels' in sys.modules) == {library}\n"
        "import torch\n"
        "from hf_ext.quantizers.mxfp4 import reference\n"
        "for name in reference.__all__: assert callable(getattr(module, name)), name\n"
        "print(module.__name__)\n",
        env={"TRITON_INTERPRET": "1"},
    )
    assert out.strip()


def test_hub_arguments_where_the_hub_is_not_used_are_refused():
    for argument in ({"repo_id": "a/b"}, {"revision": "main"}, {"version": 2}, {"trust_remote_code": True}):
        with pytest.raises(ValueError, match="need source='hub'"):
            load_kernel(NAME, **argument)


def test_the_hub_source_asks_the_kernels_library_for_our_repository_and_version(fresh_python):
    # LOCAL_KERNELS is the library's own redirection of a repository to a folder.
    folder = kernel_folder(NAME)
    fresh_python(
        "from hf_ext import load_kernel\n"
        "module = load_kernel('mxfp4_gemm', 'hub')\n"
        f"assert module.__file__.startswith({str(folder)!r}), module.__file__\n",
        env={"TRITON_INTERPRET": "1", "LOCAL_KERNELS": f"{kernel_lookup.KERNELS[NAME].repo_id}={folder}"},
    )


def test_repository_and_version_of_the_lookup_are_those_of_the_kernel_folder():
    for name, entry in kernel_lookup.KERNELS.items():
        metadata = json.loads((kernel_folder(name) / "build/torch-universal/metadata.json").read_text())
        assert metadata["version"] == entry.version
        assert f'repo-id = "{entry.repo_id}"' in (kernel_folder(name) / "build.toml").read_text()


def test_a_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="hf_ext.kernel_lookup"):
        for _ in range(3):
            load_kernel(NAME)
    assert [record.getMessage() for record in caplog.records] == [
        f"kernel {NAME}: reference, from hf_ext.quantizers.mxfp4.reference (no accelerator found)"
    ]


def test_every_known_kernel_is_bundled_and_an_unknown_one_is_named():
    assert set(kernel_lookup.KERNELS) <= set(kernel_folders())
    with pytest.raises(ValueError, match="no bundled kernel 'mxfp8'; this installation has: .*mxfp4_gemm"):
        kernel_folder("mxfp8")
