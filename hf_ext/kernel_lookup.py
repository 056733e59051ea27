"""Which implementation of a kernel runs: from the Hub when asked, bundled Triton, or the PyTorch reference.

A kernel is named by its folder in `kernels/`. `load_kernel` returns a module with the kernel's public functions; the
reference has functions of the same names and signatures. `source="auto"` takes the bundled Triton kernel when Triton
and an accelerator (CUDA, ROCm, XPU) are there and the reference otherwise. The argument wins over the environment
variable `HF_EXT_KERNELS`, which wins over the automatic choice. A forced choice that cannot be met raises.

The `kernels` library is called directly, not through transformers, whose version test of it is narrower than need be.
"""

import importlib
import importlib.util
import json
import logging
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from hf_ext.extras import is_installed, require

logger = logging.getLogger(__name__)

Source = Literal["auto", "hub", "bundled", "reference"]
SOURCES = ("auto", "hub", "bundled", "reference")
ENVIRONMENT_VARIABLE = "HF_EXT_KERNELS"


class KernelEntry(NamedTuple):
    """What the lookup knows of a kernel: its Hub repository, that repository's version, and the reference's module."""

    repo_id: str
    version: int
    reference: str


KERNELS: dict[str, KernelEntry] = {
    "flash_lora_attention": KernelEntry("hf-ext/flash_lora_attention", 1, "hf_ext.cache_impls.lragent.reference"),
    "mxfp4_gemm": KernelEntry("hf-ext/mxfp4_gemm", 1, "hf_ext.quantizers.mxfp4.reference"),
    "patternkv_attention": KernelEntry("hf-ext/patternkv_attention", 1, "hf_ext.cache_impls.patternkv.reference"),
}


class KernelChoice(NamedTuple):
    """The outcome of the lookup: which source runs, why, and where it is (a folder, a repository or a module)."""

    name: str
    source: Literal["hub", "bundled", "reference"]
    reason: str
    location: str


_lock = threading.Lock()
_logged: set[tuple[str, str]] = set()


def load_kernel(
    name: str,
    source: Source = "auto",
    *,
    repo_id: str | None = None,
    revision: str | None = None,
    version: int | None = None,
    trust_remote_code: bool = False,
) -> ModuleType:
    """Load a kernel, or its PyTorch reference, as a module of functions.

    Args:
        name: Folder name of the kernel, for example `"mxfp4_gemm"`.
        source: `"hub"`, `"bundled"` or `"reference"` force a source; `"auto"` obeys `HF_EXT_KERNELS` if it is set and
            else chooses (see the module's text).
        repo_id: Hub repository to use instead of the kernel's own; only with the Hub.
        revision: Branch, tag or commit of the Hub repository; only with the Hub, not together with `version`.
        version: Version of the Hub kernel; only with the Hub. Default: the version that this release was tested with.
        trust_remote_code: Passed to `kernels.get_kernel`, which asks for it for publishers that it does not know.

    Returns:
        The module. The same call returns the same module.

    Raises:
        ValueError: Unknown kernel or source, or Hub arguments where the Hub is not used.
        ImportError: The forced source needs a library that is not installed; the message names the extra.
        RuntimeError: The bundled kernel is forced where there is no accelerator and Triton's interpreter is off.
    """
    choice = explain_kernel(name, source, repo_id=repo_id)
    if choice.source != "hub" and (repo_id, revision, version, trust_remote_code) != (None, None, None, False):
        raise ValueError(
            f"repo_id, revision, version and trust_remote_code need source='hub', but kernel {name!r} comes from "
            f"{choice.source!r} ({choice.reason})"
        )
    if choice.source == "hub":
        if revision is None and version is None:
            version = KERNELS[name].version
        module = require("kernels", extra="kernels").get_kernel(
            choice.location, revision=revision, version=version, trust_remote_code=trust_remote_code
        )
    elif choice.source == "bundled":
        _require_triton(name)
        module = import_kernel_folder(Path(choice.location))
    else:
        module = importlib.import_module(choice.location)
    _log_once(choice)
    return module


def explain_kernel(name: str, source: Source = "auto", *, repo_id: str | None = None) -> KernelChoice:
    """Say which source `load_kernel` would use and why, without loading it.

    Raises:
        ValueError: Unknown kernel, source or value of `HF_EXT_KERNELS`.
    """
    if name not in KERNELS:
        raise ValueError(f"name is {name!r}; known kernels: {', '.join(KERNELS)}")
    if source not in SOURCES:
        raise ValueError(f"source is {source!r}; it must be one of {', '.join(SOURCES)}")
    reason = f"source={source!r} was passed"
    if source == "auto":
        source = os.environ.get(ENVIRONMENT_VARIABLE) or "auto"  # type: ignore[assignment]
        if source not in SOURCES:
            raise ValueError(f"{ENVIRONMENT_VARIABLE} is {source!r}; it must be one of {', '.join(SOURCES)}")
        reason = f"{ENVIRONMENT_VARIABLE}={source}"
    if source == "auto":
        source, reason = _choose(name)
    if source == "hub":
        return KernelChoice(name, "hub", reason, repo_id or KERNELS[name].repo_id)
    if source == "bundled":
        return KernelChoice(name, "bundled", reason, str(kernel_folder(name)))
    return KernelChoice(name, "reference", reason, KERNELS[name].reference)


def kernel_folders() -> dict[str, Path]:
    """The kernel repositories that came with this installation: name -> folder."""
    found: dict[str, Path] = {}
    package = Path(__file__).resolve().parent
    # A wheel carries them inside the package, a checkout beside it.
    for root in (package / "_kernels", package.parent / "kernels"):
        for metadata in sorted(root.glob("*/build/torch-universal/metadata.json")):
            found.setdefault(metadata.parents[2].name, metadata.parents[2])
    return found


def kernel_folder(name: str) -> Path:
    """Folder of a bundled kernel repository.

    Raises:
        ValueError: There is none of that name.
    """
    folders = kernel_folders()
    if name not in folders:
        raise ValueError(f"no bundled kernel {name!r}; this installation has: {', '.join(folders) or 'none'}")
    return folders[name]


def import_kernel_folder(folder: Path) -> ModuleType:
    """Import a kernel repository's `torch-universal` build, through the `kernels` library if it is installed.

    Without the library the package is executed under the module name that the library would use (`id` in
    metadata.json), so both ways give one module.

    Raises:
        FileNotFoundError: The folder has no such build.
    """
    # The variant's own folder is accepted by every version of the library, whatever it thinks of universal variants.
    variant = Path(folder).resolve() / "build" / "torch-universal"
    if not (variant / "metadata.json").is_file():
        raise FileNotFoundError(f"{folder} is not a kernel repository: it has no build/torch-universal/metadata.json")
    if _kernels_library_installed():
        return importlib.import_module("kernels").get_local_kernel(variant)
    module_name = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
    init = variant / "__init__.py"
    with _lock:
        loaded = sys.modules.get(module_name)
        if loaded is not None and getattr(loaded, "__file__", None) == str(init):
            return loaded
        spec = importlib.util.spec_from_file_location(module_name, init)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(module_name, None)
            raise
        return module


def accelerator() -> str | None:
    """Name of the accelerator that Triton kernels could run on: `"cuda"`, `"rocm"`, `"xpu"`, or None."""
    import torch

    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return "xpu"
    return None


def interpreter_enabled() -> bool:
    """Whether Triton's interpreter is switched on (`TRITON_INTERPRET`), which runs kernels on a CPU, slowly."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "yes", "on", "y")


def _kernels_library_installed() -> bool:
    # Started in a checkout, Python also finds our `kernels/` folder, as a namespace package without an origin.
    spec = importlib.util.find_spec("kernels")
    return spec is not None and spec.origin is not None


def _choose(name: str) -> tuple[Literal["bundled", "reference"], str]:
    device = accelerator()
    if device is None:
        return "reference", "no accelerator found"
    if not is_installed("triton"):
        return "reference", f"an accelerator ({device}) but no triton found; it comes with the extra 'kernels'"
    if name not in kernel_folders():
        return "reference", f"an accelerator ({device}) and triton found, but no bundled copy of the kernel"
    return "bundled", f"an accelerator ({device}) and triton found"


def _require_triton(name: str) -> None:
    require("triton", extra="kernels")
    if accelerator() is None and not interpreter_enabled():
        raise RuntimeError(
            f"kernel {name!r} was forced to its bundled Triton copy, but Triton kernels need an accelerator (cuda, "
            "rocm or xpu) and none was found; use source='reference', or set TRITON_INTERPRET=1 before Python starts "
            "to run them in Triton's interpreter"
        )


def _log_once(choice: KernelChoice) -> None:
    with _lock:
        if (choice.name, choice.source) in _logged:
            return
        _logged.add((choice.name, choice.source))
    logger.info("kernel %s: %s, from %s (%s)", choice.name, choice.source, choice.location, choice.reason)
