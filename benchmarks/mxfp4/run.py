"""Measure the MXFP4 formats and their peers on language models: `hf-ext bench mxfp4`.

One row a model, text, format and treatment of activations is appended to one data file; a row that is there already
is not measured again, so a run that was stopped goes on where it was. Plots and RESULTS.md are made from
the file at the end, and by `python -m hf_ext.benchmarks.report`.

Three models: SmolLM2-135M-Instruct; the same with its weights dithered off the 4-bit grid that they come from; and a
small Llama trained from scratch (`train_small`). Each dense model is the baseline of its own formats.
"""

import gc
import hashlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.mxfp4.formats import DENSE, FORMATS, MAIN, NVFP4, OCP, Format, Prepared, prepare
from hf_ext.benchmarks.mxfp4.train_small import held_out_text, train_small
from hf_ext.benchmarks.report import refresh, results_folder
from hf_ext.runlog import RunLog

__all__ = ["KEY", "derived", "dither", "main"]

KEY = ("model", "text", "windows", "format", "activation")
_SMALL_FACTOR = 4  # the small model's losses differ little between formats, and its windows cost little
_QUICK = (DENSE, OCP, NVFP4, "oas + mbs static 32/128", "weighted 32/128")
_PACKAGES = ("torch", "transformers", "hf-ext")


class _Model(NamedTuple):
    folder: Path
    dense: nn.Module
    tokenizer: Any
    texts: dict[str, str]


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def _load(folder: Path) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


@torch.no_grad()
def dither(model: nn.Module, block: int = 32, levels: int = 16, seed: int = 0) -> nn.Module:
    """Move the weights of linear layers off a grid of `levels` values a block, in place.

    A Q4_1 block of 32 holds 16 equally spaced values between its smallest and its largest, so its step is their
    distance over 15; every weight gets uniform noise of plus or minus half a step.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and "lm_head" not in name:
            blocks = module.weight.view(len(module.weight), -1, block)
            step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / (levels - 1)
            blocks.add_(step * (torch.rand(blocks.shape, generator=generator) - 0.5))
    return model


def _smollm2(say: Callable[[str], None], texts: list[str]) -> _Model:
    folder = lm.fetch_smollm2(say=say)
    return _Model(folder, *_load(folder), {name: lm.load_text(name).text for name in texts})


def _dithered(say: Callable[[str], None], texts: list[str]) -> _Model:
    model = _smollm2(say, texts[:1])
    dither(model.dense)
    return model


def _small(say: Callable[[str], None], texts: list[str]) -> _Model:
    say("training the small Llama (once, about ten minutes)")
    folder = train_small()
    return _Model(folder, *_load(folder), {"wikipedia, held out": held_out_text()})


_MODELS = {"smollm2": _smollm2, "smollm2 dithered": _dithered, "small llama": _small}


def _texts_of(model_name: str, texts: list[str]) -> list[str]:
    """Names of the texts that a model is measured on, known before it is loaded (or trained)."""
    return {"smollm2 dithered": texts[:1], "small llama": ["wikipedia, held out"]}.get(model_name, texts)


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def derived(row: dict[str, Any], ocp: dict[str, Any] | None, nvfp4: dict[str, Any] | None) -> dict[str, Any]:
    """Comparisons of a row with the two baselines under the same treatment of activations, as value and error.

    Returns:
        `versus_ocp`, `versus_nvfp4`: paired difference of NLL `[mean, se]`; `gap_closed`: share of the loss between
        the two that the row gains `[share, se]`; `gap_closed_kl`: the same of the divergence. None where a baseline is
        missing or the row is the baseline itself.
    """
    facts: dict[str, Any] = dict.fromkeys(("versus_ocp", "versus_nvfp4", "gap_closed", "gap_closed_kl"))
    if ocp is not None and row["format"] != OCP:
        facts["versus_ocp"] = list(lm.paired_difference(row["nlls"], ocp["nlls"]))
    if nvfp4 is not None and row["format"] != NVFP4:
        facts["versus_nvfp4"] = list(lm.paired_difference(row["nlls"], nvfp4["nlls"]))
    if ocp is not None and nvfp4 is not None and row["format"] not in (OCP, NVFP4, DENSE, "bf16"):
        facts["gap_closed"] = list(lm.gap_closed(row["nlls"], ocp["nlls"], nvfp4["nlls"]))
        facts["gap_closed_kl"] = list(lm.gap_closed(row["kls"], ocp["kls"], nvfp4["kls"]))
    return facts


class _Options(NamedTuple):
    texts: list[str]
    windows: int
    formats: str
    quick: bool
    only: str | None
    overwrite: bool
    command: str

    def wants(self, entry: Format, activation: str, model: str, text: str) -> bool:
        """Whether a format is measured on a text."""
        if self.only is not None:
            return entry.name == self.only
        if self.quick:
            return entry.name in _QUICK
        if self.formats == "all" or (self.formats == "auto" and model == "smollm2" and text == "wikipedia"):
            return True
        return entry.name in MAIN and activation not in ("macro 32", "dynamic 128")


def main(
    windows: Annotated[int, typer.Option(help="Windows of 512 tokens a text, evenly spaced.")] = 12,
    texts: Annotated[str, typer.Option(help="Texts, by comma: wikipedia, pydoc, news.")] = "wikipedia,pydoc",
    models: Annotated[
        str, typer.Option(help="Models, by comma: smollm2, smollm2 dithered, small llama.")
    ] = "smollm2,smollm2 dithered,small llama",
    threads: Annotated[int, typer.Option(help="Threads of PyTorch.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Data file; rows are appended. [default: results.jsonl]")] = None,
    quick: Annotated[bool, typer.Option(help="Two windows of one text, five formats: two minutes.")] = False,
    formats: Annotated[
        str, typer.Option(help="main, all, or auto: all of them on SmolLM2's first text, the main ones elsewhere.")
    ] = "auto",
    only: Annotated[str | None, typer.Option(help="One format, by its name in the rows.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Measure rows again that are in the file.")] = False,
) -> None:
    """Losses, bits and times of MXFP4 formats and their peers; resumable, about 45 minutes in full on two threads."""
    if only is not None and only not in FORMATS:
        raise ValueError(f"`--only` must be one of: {'; '.join(FORMATS)}; got {only!r}")
    model_names = [name.strip() for name in models.split(",")]
    text_names = [name.strip() for name in texts.split(",")]
    for option, names, known in (("--models", model_names, _MODELS), ("--texts", text_names, lm.TEXTS)):
        if unknown := set(names) - set(known):
            raise ValueError(f"`{option}` knows {', '.join(known)}; got {', '.join(sorted(unknown))}")
    if formats not in ("auto", "main", "all"):
        raise ValueError(f"`--formats` must be auto, main or all; got {formats!r}")
    if windows < 2:
        raise ValueError(f"`--windows` must be at least 2, or there is no standard error; got {windows}")
    if quick:
        windows, text_names, model_names = 2, text_names[:1], model_names[:1]
        out = out or lm.cache_folder() / "bench-mxfp4-quick.jsonl"
    log = RunLog(out or results_folder() / "mxfp4" / "data" / "results.jsonl", KEY)
    torch.set_num_threads(threads)
    console = Console()
    arguments = sys.argv[sys.argv.index("mxfp4") + 1 :] if "mxfp4" in sys.argv else sys.argv[1:]
    command = f"hf-ext bench mxfp4 {shlex.join(arguments)}"
    options = _Options(text_names, windows, formats, quick, only, overwrite, command.strip())
    count = sum(_measure_model(name, options, log, console) for name in model_names)
    console.print(f"{count} rows measured; all rows are in {log.path}", soft_wrap=True)
    refresh(out)


def _measure_model(model_name: str, options: _Options, log: RunLog, console: Console) -> int:
    """Measure what is missing on one model; returns the number of rows written."""
    windows = options.windows * (_SMALL_FACTOR if model_name == "small llama" else 1)
    # (format, activation) -> texts, so that a model is quantised once for all its texts.
    work: dict[tuple[str, str], list[str]] = {}
    for entry in FORMATS.values():
        for activation in entry.activations:
            for text in _texts_of(model_name, options.texts):
                key = {"model": model_name, "text": text, "windows": windows, "format": entry.name}
                if options.wants(entry, activation, model_name, text) and (
                    options.overwrite or not log.done(**key, activation=activation)
                ):
                    work.setdefault((entry.name, activation), []).append(text)
    if not work:
        return 0
    with console.status(f"loading {model_name}") as status:
        model = _MODELS[model_name](status.update, options.texts)
    batches = {text: lm.windows(lm.tokenize(model.tokenizer, model.texts[text]), windows) for text in model.texts}
    hashes = {text: hashlib.sha256(content.encode()).hexdigest() for text, content in model.texts.items()}
    calibration = lm.calibration_windows(model.tokenizer)
    needed = sorted({text for pending in work.values() for text in pending})
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    written = 0
    with Progress(*columns, console=console) as progress:
        total = windows * (len(needed) + sum(len(pending) for (name, _), pending in work.items() if name != DENSE))
        task = progress.add_task(model_name, total=total)

        def tick(done: int) -> None:
            progress.advance(task, done)

        dense: dict[str, lm.Evaluation] = {}
        references: dict[str, lm.Reference] = {}
        for text in needed:
            progress.update(task, description=f"{model_name}: dense on {text}")
            found, reference = lm.evaluate(model.dense, batches[text], keep_reference=True, tick=tick)
            dense[text] = lm.Evaluation(found.nlls, [0.0] * windows, found.seconds)
            references[text] = reference
        for (name, activation), pending in work.items():
            entry = FORMATS[name]
            progress.update(task, description=f"{model_name}: {name}, inputs {activation}")
            facts = {
                "activation": activation,
                "group": entry.group,
                "command": options.command,
                "calibration": "stdlib, 2 windows" if entry.calibrated else None,
                **lm.environment_facts((*_PACKAGES, *entry.packages)),
            }
            keys = [{"model": model_name, "text": text, "windows": windows, "format": name} for text in pending]
            begin = progress.tasks[task].completed
            try:
                with prepare(model.dense, entry, activation, calibration, str(model.folder)) as prepared:
                    for key, text in zip(keys, pending):
                        found = dense[text]
                        if name != DENSE:
                            found, _ = lm.evaluate(prepared.model, batches[text], references[text], tick=tick)
                        row = key | facts | _figures(prepared, found, dense[text]) | {"text_sha256": hashes[text]}
                        log.append(row | derived(row, *_baselines(log, key, activation)))
                        written += 1
            except Exception as error:
                if entry.group != "peer":
                    raise
                # What a peer says on this machine is a result too.
                said = str(error).strip().partition("\n")[0]
                for key in keys:
                    log.append(key | facts | {"error": f"{type(error).__name__}: {said}"[:400]})
                    written += 1
                progress.update(task, completed=begin + windows * len(pending))
            gc.collect()
    return written


def _figures(prepared: Prepared, found: lm.Evaluation, dense: lm.Evaluation) -> dict[str, Any]:
    """What was measured of one format on one text."""
    return {
        "bits_per_weight": prepared.bits_per_weight,
        "relative_mse": prepared.relative_mse,
        "nll": found.nll,
        "kl": found.kl,
        "nlls": found.nlls,
        "kls": found.kls,
        # The best of all windows: the machine may have other work now and then.
        "time_ratio": min(found.seconds) / min(dense.seconds) if prepared.timed else None,
        "seconds_to_prepare": prepared.seconds,
        "note": prepared.note,
    }


def _baselines(
    log: RunLog, key: dict[str, Any], activation: str
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    own = "none" if activation == "none" else "own"

    def find(name: str) -> dict[str, Any] | None:
        return log.get(**{**key, "format": name, "activation": own})

    return find(OCP), find(NVFP4)


if __name__ == "__main__":
    typer.run(main)
