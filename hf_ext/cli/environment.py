"""`hf-ext env`."""

import importlib.metadata
import json
import os
import platform
import sys
from typing import Annotated, Any

import typer

LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "huggingface_hub",
    "tokenizers",
    "numpy",
    "kernels",
    "triton",
    "peft",
    "trl",
    "datasets",
    "evaluate",
    "gguf",
    "compressed-tensors",
    "torchao",
)
VARIABLES = ("HF_EXT_KERNELS", "TRITON_INTERPRET", "LOCAL_KERNELS", "HF_HUB_OFFLINE", "HF_HOME", "OMP_NUM_THREADS")


def env_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, to be pasted into a report.")] = False,
) -> None:
    """Show versions, devices, extras, and for each kernel which source would run and why.

    Examples:

    - `hf-ext env`

    - `hf-ext env --json`

    - `HF_EXT_KERNELS=reference hf-ext env`
    """
    facts = gather()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for title, rows in facts.items():
        if not rows:
            continue
        table = Table(title=title, title_justify="left", show_header=False, min_width=60)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(escape(name), escape(_text(value)))
        console.print(table)


def gather() -> dict[str, dict[str, Any]]:
    """Collect what `hf-ext env` prints: title of a section -> name -> value (plain JSON)."""
    import torch

    import hf_ext
    from hf_ext.extras import extras_status
    from hf_ext.kernel_lookup import KERNELS, accelerator, explain_kernel, kernel_folders

    versions = {
        "hf-ext": hf_ext.__version__,
        "Python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        **{name: _version(name) for name in LIBRARIES},
    }
    devices: dict[str, Any] = {"accelerator": accelerator() or "none", "torch threads": torch.get_num_threads()}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
        architecture = architecture or f"sm_{properties.major}{properties.minor}"
        devices[f"device {index}"] = f"{properties.name}, {architecture}, {properties.total_memory / 2**30:.0f} GiB"
    kernels = {}
    for name in KERNELS:
        choice = explain_kernel(name)
        kernels[name] = {**choice._asdict(), "bundled": str(kernel_folders().get(name) or "no")}
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {
        "Versions": versions,
        "Devices": devices,
        "Kernels": kernels,
        "Extras": extras_status(),
        "Environment variables": variables,
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _text(value: Any) -> str:
    if isinstance(value, dict):  # a kernel
        return f"{value['source']}, because: {value['reason']}\n{value['location']}\nbundled copy: {value['bundled']}"
    if isinstance(value, list):  # an extra
        return f"missing: {', '.join(value)}" if value else "complete"
    return str(value)
