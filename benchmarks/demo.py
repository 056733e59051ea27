"""The main job from beginning to end: `hf-ext demo`, or `make demo`.

Fetches SmolLM2-135M-Instruct, quantises it while loading, measures it beside its dense self and the formats around it,
writes the packed checkpoint and two plots, and shows that a fresh process reads the checkpoint and writes the same
text.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import nn

from hf_ext import MXFP4Config, quantize_model
from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.mxfp4.formats import FORMATS, NVFP4, packed_bits, prepare, set_layout
from hf_ext.extras import require
from hf_ext.runlog import write_json

__all__ = ["main"]

_MARKER = ".hf-ext-demo"
_CHECKPOINT = "smollm2-mxfp4"
_TEXT, _CALIBRATION = "pydoc", "stdlib"
_PROMPT = "What is the capital of France, and what is it known for?"
_NEW_TOKENS = 48
# What the fresh process runs: nothing but `import hf_ext` before transformers.
_FRESH = """
import json, sys
import hf_ext, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_ext.benchmarks.demo import generate
folder, prompt, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
print(json.dumps(generate(model, AutoTokenizer.from_pretrained(folder, local_files_only=True), prompt)))
"""


@dataclass
class _Row:
    name: str
    bits: float
    evaluation: lm.Evaluation
    megabytes: float | None
    layer_errors: list[float]
    activations: bool = False

    @property
    def perplexity(self) -> float:
        return float(torch.tensor(self.evaluation.nll).exp())


def generate(model: nn.Module, tokenizer: Any, prompt: str) -> str:
    """The model's answer to one message, greedily, at most 48 tokens."""
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        tokens = model.generate(
            **inputs, max_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def _claim(out: Path, overwrite: bool) -> None:
    """Make the folder ours, or refuse."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / _MARKER).exists() and not overwrite:
        raise ValueError(f"--out {out} is not empty and not from an earlier demo; name another or pass --overwrite")
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARKER).write_text("Made by `hf-ext demo`, which replaces its own files here when it runs again.\n")


def _size(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def _layer_errors(dense: nn.Module, model: nn.Module) -> list[float]:
    """|W - W^|^2 / |W|^2 of each decoder layer's converted weights."""
    from hf_ext.quantizers.mxfp4 import MXFP4Linear

    signal: dict[int, float] = {}
    noise: dict[int, float] = {}
    for name, module in model.named_modules():
        if not isinstance(module, MXFP4Linear):
            continue
        layer = int(name.split(".layers.")[1].split(".")[0])
        weight = dense.get_submodule(name).weight.detach()
        noise[layer] = noise.get(layer, 0.0) + (module.dequantize() - weight).square().sum().item()
        signal[layer] = signal.get(layer, 0.0) + weight.square().sum().item()
    return [noise[layer] / signal[layer] for layer in sorted(noise)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No bars of transformers among ours."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    bar = gguf.tqdm  # tqdm's own, which the switch above does not reach
    gguf.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        gguf.tqdm = bar
        if enabled:
            logging.enable_progress_bar()


def main(
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint, the plots and the table.")] = Path("demo"),
    prompt: Annotated[str, typer.Option(help="What to ask the model.")] = _PROMPT,
    windows: Annotated[int, typer.Option(help="Windows of 512 tokens to measure on.")] = 4,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch; 0 takes its default.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Write into a folder that holds other things.")] = False,
) -> None:
    """Quantise a real language model, measure it beside its peers, save it, and reload it in a fresh process.

    Examples:

    - `hf-ext demo`

    - `hf-ext demo --out /tmp/demo --windows 12 --prompt "Why is the sky blue?"`
    """
    if windows < 2:
        raise ValueError(f"--windows must be at least 2, got {windows}")
    for library in ("matplotlib", "gguf"):
        require(library, extra="demo")
    _claim(out, overwrite)
    if threads:
        torch.set_num_threads(threads)
    console = Console()
    begin = time.perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with _quiet(), Progress(*columns, console=console, transient=True) as progress:
        rows, texts = _measure(out, prompt, windows, progress)
        last = "a fresh process loads the checkpoint and generates"
        task = progress.add_task(last, total=None)
        _say_if_piped(progress, last)
        fresh = _in_fresh_process(out / _CHECKPOINT, prompt)
        progress.remove_task(task)
        _plot_perplexity(rows, out / "perplexity.png")
        _plot_layers(rows, out / "weight_error.png")
    write_json(
        out / "table.json",
        [
            {
                "format": row.name,
                "bits_per_weight": row.bits,
                "perplexity": row.perplexity,
                "kl": row.evaluation.kl,
                "megabytes": row.megabytes,
                "nlls": row.evaluation.nlls,
            }
            for row in rows
        ],
    )
    console.print(_table(rows, windows))
    console.print(
        "Bits a weight of the linear layers; the embedding, which is also the output head, stays in float32 (113 MB). "
        "W4A4: the inputs of the layers are rounded too, else W4A16. Calibrated on Python source code. KL: of the "
        "dense model's predictions, nats a token."
    )
    # What the user and the models wrote may hold [brackets], which are no markup.
    console.print(Panel(Text(texts["dense"]), title=f"dense: {escape(prompt)}", title_align="left"))
    console.print(Panel(Text(texts["packed"]), title="MXFP4, calibrated", title_align="left"))
    same = fresh == texts["packed"]
    if not same:
        console.print(Panel(Text(fresh), title="[red]the fresh process wrote another text", title_align="left"))
        raise SystemExit(1)
    console.print("[green]A fresh process loaded the checkpoint and wrote the same text.")
    plots = f"{out / 'perplexity.png'}, {out / 'weight_error.png'}"
    console.print(
        Text(f"Checkpoint: {out / _CHECKPOINT}\nPlots: {plots}\nFigures: {out / 'table.json'}"), soft_wrap=True
    )
    console.print(f"Done in {time.perf_counter() - begin:.0f} s.")


def _say_if_piped(progress: Progress, text: str) -> None:
    # Bars show in a terminal only; a log should not stay empty for minutes.
    if not progress.console.is_terminal:
        progress.console.print(Text(text), soft_wrap=True)


def _measure(out: Path, prompt: str, windows: int, progress: Progress) -> tuple[list[_Row], dict[str, str]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    task = progress.add_task("fetching SmolLM2-135M-Instruct", total=9 * windows + 4)

    def step(text: str) -> None:
        progress.update(task, description=text)
        _say_if_piped(progress, text)

    def tick(done: int = 1) -> None:
        progress.advance(task, done)

    folder = lm.fetch_smollm2(say=step)
    step("loading the dense model")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    batch = lm.windows(lm.tokenize(tokenizer, lm.load_text(_TEXT).text), windows)
    texts = {"dense": generate(dense, tokenizer, prompt)}
    tick()
    step("measuring the dense model")
    evaluation, reference = lm.evaluate(dense, batch, keep_reference=True, tick=tick)
    zero = lm.Evaluation(evaluation.nlls, [0.0] * windows, evaluation.seconds)
    rows = [_Row("dense float32", 32.0, zero, _size(folder), [])]

    def measure(name: str, model: nn.Module, bits: float, megabytes: float | None, activations: bool = False) -> None:
        step(f"measuring {name}")
        found, _ = lm.evaluate(model, batch, reference, tick=tick)
        rows.append(_Row(name, bits, found, megabytes, _layer_errors(dense, model), activations))

    def measure_packed(name: str, model: nn.Module, config: MXFP4Config, saved: Path) -> None:
        bits = packed_bits(model)
        measure(name, model, bits, _size(saved))
        # The same packed weights with inputs rounded too.
        set_layout(model, dataclasses.replace(config, activation="mxfp4"))
        measure(f"{name}, W4A4", model, bits, None, True)
        set_layout(model, config)
        tick()

    # What a user writes is this one line; the rest of the function measures what it does.
    for name, config in (("OCP MXFP4", MXFP4Config.ocp()), ("OAS + MBS", MXFP4Config())):
        step(f"quantising while loading: {name}")
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=torch.float32, local_files_only=True
        )
        with tempfile.TemporaryDirectory(dir=out, prefix=".size-") as scratch:
            model.save_pretrained(scratch)
            measure_packed(name, model, config, Path(scratch))
        del model
        gc.collect()

    step("quantising with calibration")
    config = MXFP4Config(search_exponents=True)
    model = quantize_model(copy.deepcopy(dense), config, lm.calibration_windows(tokenizer, _CALIBRATION))
    step("saving the packed checkpoint")
    partial = out / f"{_CHECKPOINT}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(out / _CHECKPOINT, ignore_errors=True)
    partial.rename(out / _CHECKPOINT)
    measure_packed("OAS + MBS, calibrated", model, config, out / _CHECKPOINT)
    step("generating with the packed model")
    texts["packed"] = generate(model, tokenizer, prompt)
    del model
    for name, activation in (("NVFP4 (emulated)", "none"), ("NVFP4 (emulated), W4A4", "own")):
        with prepare(dense, FORMATS[NVFP4], activation, batch[:0], str(folder)) as prepared:
            measure(name, prepared.model, prepared.bits_per_weight, None, activation == "own")
    progress.remove_task(task)
    return rows, texts


def _in_fresh_process(folder: Path, prompt: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", _FRESH, str(folder), prompt, str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the fresh process failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _table(rows: list[_Row], windows: int) -> Table:
    table = Table(title=f"SmolLM2-135M-Instruct, Python's language reference, {windows} x 512 tokens")
    for name in ("format", "bits", "perplexity", "KL", "on disk"):
        table.add_column(name, justify="left" if name == "format" else "right", no_wrap=True)
    for row in rows:
        size = "" if row.megabytes is None else f"{row.megabytes:.0f} MB"
        table.add_row(row.name, f"{row.bits:.3f}", f"{row.perplexity:.2f}", f"{row.evaluation.kl:.3f}", size)
    return table


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


_COLOURS = {"OCP": "#b2541a", "OAS": "#1f6f9e", "dense": "#555555", "NVFP4": "#5b8c3a"}


def _colour(name: str) -> str:
    return _COLOURS[name.split()[0]]


def _plot_perplexity(rows: list[_Row], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = _figure(8, 0.5 * len(rows) + 1.2)
    shown = sorted(rows, key=lambda row: -row.perplexity)
    bars = axes.barh(
        [row.name for row in shown], [row.perplexity for row in shown], color=[_colour(row.name) for row in shown]
    )
    axes.bar_label(bars, [f"{row.perplexity:.1f}  ({row.bits:.2f} bits)" for row in shown], padding=4)
    axes.set_xlim(0, 1.3 * shown[0].perplexity)
    axes.set_xlabel("perplexity (lower is better)")
    axes.set_title("SmolLM2-135M-Instruct on Python's language reference", loc="left")
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _plot_layers(rows: list[_Row], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = _figure(8.5, 4.2)
    shown = [row for row in rows if row.layer_errors and not row.activations]
    for row in shown:
        style = "--" if "calibrated" in row.name else "-"
        axes.plot(row.layer_errors, style, color=_colour(row.name), marker="o", markersize=3, label=row.name)
    every = [error for row in shown for error in row.layer_errors]
    axes.set_ylim(0.9 * min(every), 1.05 * max(every))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set_xlabel("decoder layer\n(the calibrated search lowers the error weighted by the inputs, not this one)")
    axes.set_ylabel("relative squared error of the weights")
    axes.set_title("What rounding does to the weights, layer by layer", loc="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
