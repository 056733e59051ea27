"""How much memory `from_pretrained` takes above the imports: dense, quantising while it loads, and packed.

Each load runs in a process of its own, which samples its anonymous resident memory every two milliseconds. Pages of
the mapped checkpoint file are the kernel's to drop, and are left out.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.report import refresh, results_folder
from hf_ext.runlog import RunLog

__all__ = ["main"]

_CHILD = """
import json, re, sys, threading, time
import torch
import hf_ext
from hf_ext import MXFP4Config
from transformers import AutoModelForCausalLM
import transformers.models.llama.modeling_llama

torch.set_num_threads(1)
how, source, target = sys.argv[1:]

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

base, peak, done = anonymous(), 0.0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
start = time.perf_counter()
arguments = {"quantization_config": MXFP4Config()} if how == "quantise while loading" else {}
model = AutoModelForCausalLM.from_pretrained(source, **arguments)
seconds = time.perf_counter() - start
done = True
thread.join()
if target:
    model.save_pretrained(target)
sizes = [tensor.numel() * tensor.element_size() / 2**20 for tensor in model.state_dict().values()]
print(json.dumps({"peak_mib": peak - base, "model_mib": model.get_memory_footprint() / 2**20, "seconds": seconds,
                  "largest_tensor_mib": max(sizes)}))
"""


def main(
    out: Annotated[
        Path | None,
        typer.Option(help="Data file; rows are appended. [default: benchmarks/mxfp4_memory/data/results.jsonl]"),
    ] = None,
) -> None:
    """Peak memory of three ways of loading SmolLM2-135M, in MiB above the imports; half a minute."""
    if not Path("/proc/self/status").exists():
        raise OSError("this benchmark reads /proc/self/status, which this system does not have")
    console = Console()
    log = RunLog(out or results_folder() / "mxfp4_memory" / "data" / "results.jsonl", key=("load",))
    source = lm.fetch_smollm2(say=console.print)
    table = Table("load", "peak MiB", "model MiB", "peak / model", "seconds")
    with tempfile.TemporaryDirectory() as folder:
        packed = str(Path(folder) / "packed")
        for how, path, target in (
            ("dense", str(source), ""),
            ("quantise while loading", str(source), packed),
            ("packed checkpoint", packed, ""),
        ):
            result = subprocess.run(
                [sys.executable, "-c", _CHILD, how, path, target], capture_output=True, text=True, check=False
            )
            if result.returncode:
                raise RuntimeError(f"loading {how} failed: {result.stderr.strip().splitlines()[-1]}")
            row = json.loads(result.stdout.splitlines()[-1])
            row["peak_over_model"] = row["peak_mib"] / row["model_mib"]
            log.append({"load": how, **row, "command": "hf-ext bench mxfp4_memory", **lm.environment_facts()})
            cells = (f"{row[key]:.2f}" for key in ("peak_mib", "model_mib", "peak_over_model", "seconds"))
            table.add_row(how, *cells)
    console.print(table)
    console.print(f"rows are in {log.path}", soft_wrap=True)
    refresh(out)
