"""Measure the PatternKV cache beside its peers on SmolLM2-135M: `hf-ext bench patternkv`.

Per text, a prompt of 4,100 tokens fills each cache and the next 256 are scored against the full cache (`quality`).
Some caches are also filled as if all but 516 tokens had been decoded, a window at a time (`decoded`), or write on from
the prompt until their text is no longer the full cache's (`greedy`). The time of a decode step is measured at 8,196
tokens of random states (`speed`). A row that is there already is not measured again.
"""

import importlib.metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.patternkv.measure import (
    Prompt,
    Score,
    decode_seconds,
    fill,
    greedy,
    prefill,
    score,
    window_seconds,
)
from hf_ext.benchmarks.patternkv.settings import FULL, SETTINGS, TEXTS, Setting, load_text
from hf_ext.benchmarks.report import refresh, results_folder
from hf_ext.extras import is_installed
from hf_ext.runlog import RunLog

__all__ = ["KEY", "main"]

KEY = ("kind", "text", "tokens", "setting", "seed", "attention")
PROMPT, SCORED = 4100, 256  # 4 sinks and 32 windows: no tail, so that every prompt token is read back from codes
GREEDY = 64  # tokens written after a prompt
FIRST = 516  # of a prompt whose other tokens are decoded
SPEED_TOKENS = 8196
STEPS, WINDOW = 5, 128
_GREEDY = (
    "transformers quanto 2 bit",
    "KIVI 2 bit, g 128",
    "KIVI 2 bit, g 32",
    "PatternKV paper()",
    "PatternKV default",
    "PatternKV default, K4 V2",
    "PatternKV default, 4 bit",
)
_KINDS = ("quality", "decoded", "greedy", "speed")
_MODULES = {"optimum-quanto": "optimum.quanto", "hqq": "hqq"}
_SPEED = ("transformers quanto 2 bit", "transformers hqq 2 bit", "KIVI 2 bit, g 128", "PatternKV default")


def main(
    texts: Annotated[str, typer.Option(help="Texts, separated by commas.")] = ",".join(TEXTS),
    settings: Annotated[str, typer.Option(help="Only settings whose name contains one of these (commas).")] = "",
    kinds: Annotated[str, typer.Option(help="Of quality, decoded, greedy, speed.")] = ",".join(_KINDS),
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = PROMPT,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Data file; rows are appended. [default: benchmarks/patternkv/data/results.jsonl]"),
    ] = None,
) -> None:
    """PatternKV, KIVI, transformers' quantized caches and a rotated codebook on five texts; half an hour.

    Example: `hf-ext bench patternkv --texts news --settings default,KIVI`
    """
    chosen = {name: s for name, s in SETTINGS.items() if any(part in name for part in settings.split(","))}
    if not chosen:
        raise ValueError(f"--settings {settings!r} matches none of: {', '.join(SETTINGS)}")
    wanted = [load_text(name) for name in texts.split(",")]
    parts = kinds.split(",")
    if unknown := set(parts) - set(_KINDS):
        raise ValueError(f"--kinds {', '.join(sorted(unknown))}: known are {', '.join(_KINDS)}")
    torch.set_num_threads(threads)
    console = Console()
    log = RunLog(out or results_folder() / "patternkv" / "data" / "results.jsonl", key=KEY)
    model, tokenizer = _load(lm.fetch_smollm2(say=console.print))
    facts = {"command": "hf-ext bench patternkv", **lm.environment_facts()}
    for text in wanted:
        jobs = [
            (kind, name, setting, seed)
            for kind in _KINDS[:3]
            if kind in parts
            for name, setting in chosen.items()
            if {"quality": True, "decoded": setting.decoded, "greedy": name in _GREEDY}[kind]
            for seed in range(setting.seeds if kind == "quality" else 1)
            if not log.done(kind=kind, text=text.name, tokens=prompt, setting=name, seed=seed, attention="sdpa")
        ]
        if jobs:
            ids = lm.tokenize(tokenizer, text.text)[: prompt + SCORED]
            if len(ids) < prompt + SCORED:
                raise ValueError(f"text {text.name!r} has {len(ids)} tokens, fewer than {prompt + SCORED}")
            console.print(f"{text.name}: prefill of {prompt} tokens", soft_wrap=True)
            states = prefill(model, ids, prompt)
            written: list[int] = []
            if any(kind == "greedy" for kind, *_ in jobs):
                written = greedy(model, SETTINGS[FULL].make(model.config, 0), states, GREEDY)
            with _progress(console) as progress:
                task = progress.add_task(text.name, total=len(jobs))
                for kind, name, setting, seed in jobs:
                    progress.update(task, description=f"{text.name}, {kind}: {name}")
                    row = {"kind": kind, "text": text.name, "tokens": prompt, "setting": name, "seed": seed}
                    row |= {"attention": "sdpa", "group": setting.group, "text_sha256": text.sha256}
                    if kind == "greedy":
                        row |= _greedy(model, states, setting, written)
                    else:
                        row |= _quality(model, states, setting, seed, kind == "decoded")
                    log.append({**row, **facts})
                    progress.advance(task)
    if "speed" in parts:
        _speed(model, chosen, log, facts, console)
    console.print(f"rows are in {log.path}", soft_wrap=True)
    refresh(out)


def _load(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _missing(setting: Setting) -> str | None:
    """Why a peer cannot run here, or None."""
    if setting.package and not is_installed(_MODULES[setting.package]):
        return f"{setting.package} is not installed (extra 'bench')"
    return None


def _quality(model, states: Prompt, setting: Setting, seed: int, decoded: bool) -> dict[str, Any]:
    if missing := _missing(setting):
        return {"error": missing}

    pieces = [FIRST, *[128] * ((states.length - FIRST) // 128)] if decoded else [states.length]
    try:
        found, cache = score(model, states, setting.make(model.config, seed), pieces)
    except Exception as error:  # a peer that fails is a row that says how
        if not setting.package:
            raise
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {**_row_of(found, states), "bits": _bits(setting, cache), **_versions(setting)}


def _greedy(model, states: Prompt, setting: Setting, written: list[int]) -> dict[str, Any]:
    """How far the greedy text is the full cache's."""
    if missing := _missing(setting):
        return {"error": missing}
    found = greedy(model, setting.make(model.config, 0), states, len(written))
    same = [a == b for a, b in zip(found, written)]
    return {"until": same.index(False) if False in same else len(same), "of": len(same), **_versions(setting)}


def _row_of(found: Score, states: Prompt) -> dict[str, Any]:
    return {
        "kl": found.kl,
        "loss": found.loss,
        "loss_of_full": states.loss,
        "agreement": found.agreement,
        "key_error": found.key_error,
        "value_error": found.value_error,
        "seconds": found.seconds,
    }


def _bits(setting: Setting, cache: Any) -> float:
    return cache.memory_report()["bits_per_element"] if setting.bits is None else setting.bits


def _versions(setting: Setting) -> dict[str, Any]:
    return {"package_version": importlib.metadata.version(setting.package)} if setting.package else {}


def _speed(model, chosen: dict[str, Setting], log: RunLog, facts: dict[str, Any], console: Console) -> None:
    key = {"kind": "speed", "text": "random states", "tokens": SPEED_TOKENS, "seed": 0}
    names = [name for name in _SPEED if name in chosen]
    jobs = [(name, "sdpa") for name in names]
    jobs += [(name, "patternkv") for name in names if SETTINGS[name].bits is None]
    if all(log.done(**key, setting=name, attention=attention) for name, attention in jobs):
        return
    generator = torch.Generator().manual_seed(0)
    config = model.config
    shape = (1, config.num_key_value_heads, SPEED_TOKENS, config.head_dim)
    states = [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in range(config.num_hidden_layers)
    ]
    # What a step takes whatever the cache: nothing to attend to but a few tokens of its own.
    floor = decode_seconds(model, SETTINGS[FULL].make(config, 0))
    # Ratios are of one run: if one is to be measured, all are.
    for name, attention in [(FULL, "sdpa"), *jobs]:
        setting = SETTINGS[name]
        row: dict[str, Any] = {**key, "setting": name, "attention": attention, "group": setting.group}
        if missing := _missing(setting):
            log.append({**row, "error": missing, **facts})
            continue
        console.print(f"speed of {name}, attention {attention}", soft_wrap=True)
        model.set_attn_implementation(attention)
        try:
            cache = fill(setting.make(config, 0), states)
            seconds = decode_seconds(model, cache, STEPS)
            # All but the last token of the window that those steps began.
            more = [tuple(side[:, :, : WINDOW - 2 - STEPS] for side in layer) for layer in states]
            window = window_seconds(model, cache, more)
            report = cache.memory_report() if hasattr(cache, "memory_report") else {}
            log.append(
                {
                    **row,
                    "seconds_a_step": seconds,
                    "seconds_empty": floor,
                    "seconds_window": window,
                    "memory": report,
                    **_versions(setting),
                    **facts,
                }
            )
        except Exception as error:
            if not setting.package:
                raise
            log.append({**row, "error": f"{type(error).__name__}: {error}"[:300], **facts})
        finally:
            model.set_attn_implementation("sdpa")


if __name__ == "__main__":
    typer.run(main)
