"""The part of RESULTS.md about MXFP4, and its plots."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_ext.benchmarks.language_model import TEXTS
from hf_ext.benchmarks.mxfp4.formats import DENSE, NVFP4, OCP
from hf_ext.benchmarks.mxfp4.run import KEY, derived
from hf_ext.benchmarks.report import markdown_table

__all__ = ["section"]

_TEXT_ORDER = (*TEXTS, "wikipedia, held out")
_COLOURS = {"dense": "#555555", "baseline": "#b2541a", "paper": "#7a5195", "ours": "#1f6f9e", "peer": "#5b8c3a"}
_GROUP_NAMES = {
    "baseline": "baselines",
    "paper": "the paper: OAS, MBS",
    "ours": "ours: search weighted by the inputs",
    "peer": "other packages",
}
# What the project set out to reach: (what, rows that count, activations, least share of the gap).
_GOALS = (
    ("4.3125 bits, W4A16", ("oas + mbs static 32/128", "oas + mbs dynamic 32/128"), "none", 0.75),
    ("4.3125 bits, W4A4", ("oas + mbs static 32/128", "oas + mbs dynamic 32/128"), "macro 128", 0.75),
    ("block 16, W4A16", ("oas + mbs static 16/128", "oas + mbs dynamic 16/128"), "none", 0.80),
    ("block 16, W4A4", ("oas + mbs static 16/128", "oas + mbs dynamic 16/128"), "macro 128", 0.88),
    ("our extras, 4.3125 bits, W4A16", ("weighted + exponents 32/128",), "none", 1.00),
    ("our extras, 4.3125 bits, W4A4", ("weighted + exponents 32/128",), "macro 64", 0.90),
    ("our extras, 4.375 bits, W4A4", ("weighted + exponents 32/64",), "macro 64", 0.90),
    ("our extras, 4.5 bits, W4A16", ("weighted + exponents 32/32",), "none", 1.00),
    ("our extras, 4.5 bits, W4A4", ("weighted + exponents 32/32",), "macro 64", 0.90),
)
_LABELLED = {
    "W4A16": (
        (OCP, "none"),
        (NVFP4, "none"),
        ("oas 32", "none"),
        ("oas + mbs static 32/128", "none"),
        ("oas + mbs dynamic 32/128", "none"),
        ("oas + mbs static 16/128", "none"),
        ("oas + mbs dynamic 16/128", "none"),
        ("weighted 32/128", "none"),
        ("weighted + exponents 32/128", "none"),
        ("weighted + exponents 32/64", "none"),
        ("weighted + exponents 32/32", "none"),
        ("bitsandbytes nf4", "none"),
        ("hqq 4 bit, groups of 64", "none"),
        ("quanto int4, groups of 128", "none"),
        ("torchao mxfp4 (rceil)", "none"),
    ),
    "W4A4": (
        (OCP, "own"),
        (NVFP4, "own"),
        ("oas 32", "own"),
        ("oas + mbs static 32/128", "macro 128"),
        ("oas + mbs dynamic 32/128", "macro 128"),
        ("oas + mbs static 16/128", "macro 128"),
        ("oas + mbs dynamic 16/128", "macro 128"),
        ("weighted 32/128", "macro 128"),
        ("weighted 32/128", "macro 64"),
        ("weighted + exponents 32/128", "macro 64"),
        ("weighted + exponents 32/64", "macro 64"),
        ("weighted + exponents 32/32", "macro 64"),
        ("torchao mxfp4 (rceil)", "own"),
    ),
}


class _Rows:
    """The last row of each key, from the run with most windows of each model and text."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        latest = {tuple(json.dumps(row[name]) for name in KEY): row for row in rows}.values()
        most: dict[tuple[str, str], int] = {}
        for row in latest:
            place = (row["model"], row["text"])
            most[place] = max(most.get(place, 0), row["windows"])
        self._rows = {
            (row["model"], row["text"], row["format"], row["activation"]): row
            for row in latest
            if row["windows"] == most[row["model"], row["text"]]
        }
        self.places = sorted(
            most, key=lambda place: (place[0] != "smollm2", place[0] != "smollm2 dithered", _order(place[1]))
        )

    def find(self, model: str, text: str, name: str, activation: str) -> dict[str, Any] | None:
        row = self._rows.get((model, text, name, activation))
        return None if row is None or "error" in row else row

    def of(self, model: str, text: str) -> list[dict[str, Any]]:
        """Measured rows, each with its comparisons made anew (its baselines may have been measured later)."""
        found = []
        for (m, t, _, activation), row in self._rows.items():
            if (m, t) == (model, text) and "error" not in row:
                own = "none" if activation == "none" else "own"
                baselines = self.find(model, text, OCP, own), self.find(model, text, NVFP4, own)
                found.append(row | derived(row, *baselines))
        return found

    def errors(self) -> list[tuple[str, str, str]]:
        found = {
            (row["format"], json.dumps(row["versions"]), row["error"]) for row in self._rows.values() if "error" in row
        }
        return sorted(found)


def _order(text: str) -> int:
    return _TEXT_ORDER.index(text) if text in _TEXT_ORDER else len(_TEXT_ORDER)


def _share(estimate: Sequence[float] | None) -> str:
    return "" if estimate is None else f"{100 * estimate[0]:.0f}% ± {100 * estimate[1]:.0f}"


def _difference(estimate: Sequence[float] | None) -> str:
    return "" if estimate is None else f"{estimate[0]:+.3f} ± {estimate[1]:.3f}"


def _activation(activation: str) -> str:
    return {"none": "-", "own": "as weights"}.get(activation, f"static, {activation}").replace(
        "static, dynamic", "search,"
    )


def _table(rows: list[dict[str, Any]], w4a4: bool) -> str:
    chosen = [row for row in rows if (row["activation"] != "none") == w4a4]
    chosen.sort(key=lambda row: -row["nll"])
    columns = [
        "format",
        "bits",
        "inputs",
        "weight error",
        "NLL",
        "perplexity",
        "KL",
        "to NVFP4",
        "gap closed",
        "of KL",
        "time",
    ]
    if not w4a4:
        columns.remove("inputs")
    body = []
    for row in chosen:
        cells = [
            f"**{row['format']}**" if row["group"] == "ours" else row["format"],
            f"{row['bits_per_weight']:.4g}",
            _activation(row["activation"]),
            f"{row['relative_mse']:.5f}",
            f"{row['nll']:.4f}",
            f"{math.exp(row['nll']):.2f}",
            f"{row['kl']:.3f}",
            _difference(row["versus_nvfp4"]),
            _share(row["gap_closed"]),
            _share(row["gap_closed_kl"]),
            "" if row["time_ratio"] is None else f"{row['time_ratio']:.2f}",
        ]
        if not w4a4:
            del cells[2]
        body.append(cells)
    return markdown_table(columns, body)


def _goals(rows: _Rows) -> str:
    places = rows.places
    body = []
    for what, names, activation, least in _GOALS:
        cells = [what, " or ".join(names), f"{100 * least:.0f}%"]
        for model, text in places:
            found = [row for row in rows.of(model, text) if row["format"] in names and row["activation"] == activation]
            shares = [row["gap_closed"] for row in found if row["gap_closed"]]
            reached = bool(shares) and max(shares)[0] >= least
            cells.append(f"**{_share(max(shares))}**" if reached else _share(max(shares)) if shares else "")
        body.append(cells)
    return markdown_table(["goal", "rows (the better one)", "share", *(f"{m}: {t}" for m, t in places)], body)


# ---------------------------------------------------------------------------------------------------------------------
# Plots
# ---------------------------------------------------------------------------------------------------------------------


def _spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near `wanted` (ascending), at least `gap` apart, within `[low, high]` where they fit."""
    placed: list[float] = []
    for value in wanted:
        placed.append(max(value, placed[-1] + gap if placed else low))
    ceiling = high
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def _label(name: str, activation: str) -> str:
    name = name.replace("weighted + exponents", "weighted, exponents")
    return name + (f"; inputs {activation.removeprefix('macro ')}" if activation.startswith("macro") else "")


def _plot_bits(rows: _Rows, model: str, texts: list[str], path: Path) -> None:
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, len(texts), figsize=(6.4 * len(texts), 9.6), layout="constrained", squeeze=False)
    for column, text in enumerate(texts):
        dense = rows.find(model, text, DENSE, "none")
        for line, kind in enumerate(("W4A16", "W4A4")):
            axes = grid[line][column]
            points = [
                row
                for row in rows.of(model, text)
                if row["group"] != "dense" and (row["activation"] != "none") == (kind == "W4A4")
            ]
            if dense is None or not points:
                axes.set_visible(False)
                continue
            for row in points:
                marker = {"baseline": "s", "paper": "o", "ours": "D", "peer": "^"}[row["group"]]
                axes.plot(
                    row["bits_per_weight"],
                    row["nll"] - dense["nll"],
                    marker,
                    color=_COLOURS[row["group"]],
                    markersize=6,
                )
            heights = [row["nll"] - dense["nll"] for row in points]
            low, high = min(heights), max(heights)
            margin = 0.06 * (high - low or 1)
            low, high = low - margin, high + margin
            right = max(row["bits_per_weight"] for row in points)
            labelled = [row for row in points if (row["format"], row["activation"]) in _LABELLED[kind]]
            labelled.sort(key=lambda row: row["nll"])
            wanted = [row["nll"] - dense["nll"] for row in labelled]
            for row, y, at in zip(labelled, wanted, _spread(wanted, (high - low) / 22, low, high)):
                colour = _COLOURS[row["group"]]
                axes.plot([row["bits_per_weight"], right + 0.02], [y, at], color=colour, linewidth=0.5, alpha=0.6)
                label = _label(row["format"], row["activation"])
                axes.text(right + 0.024, at, label, va="center", color=colour, fontsize=9)
            axes.set_xlim(4.23, right + 0.31)
            axes.set_ylim(low, high)
            axes.set_xticks([4.25, 4.3125, 4.375, 4.5, 4.5625], ["4.25", "4.31", "4.375", "4.5", "4.56"], rotation=30)
            axes.set_title(f"{kind}, {text}", loc="left", fontsize=12)
            axes.set_xlabel("bits a weight")
            if column == 0:
                axes.set_ylabel("loss above the dense model (nats a token)")
            axes.spines[["top", "right"]].set_visible(False)
    handles = [
        pyplot.Line2D([], [], marker=marker, linestyle="", color=_COLOURS[group], label=_GROUP_NAMES[group])
        for group, marker in (("baseline", "s"), ("paper", "o"), ("ours", "D"), ("peer", "^"))
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


_BARS = (
    ("oas 32", "none", "own"),
    ("oas + mbs static 32/128", "none", "macro 128"),
    ("oas + mbs dynamic 32/128", "none", "macro 128"),
    ("oas + mbs static 16/128", "none", "macro 128"),
    ("oas + mbs dynamic 16/128", "none", "macro 128"),
    ("weighted 32/128", "none", "macro 64"),
    ("weighted + exponents 32/128", "none", "macro 64"),
    ("weighted + exponents 32/64", "none", "macro 64"),
)


def _plot_gap(rows: _Rows, path: Path) -> None:
    """Share of the gap closed, one colour a model and text, with standard errors."""
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, 2, figsize=(14, 7), layout="constrained", sharey=True)
    palette = pyplot.get_cmap("tab10").colors
    for axes, kind in zip(grid, ("W4A16", "W4A4")):
        for index, (model, text) in enumerate(rows.places):
            found = {(row["format"], row["activation"]): row for row in rows.of(model, text)}
            for place, bar in enumerate(_BARS):
                row = found.get((bar[0], bar[1] if kind == "W4A16" else bar[2]))
                if row is None or row["gap_closed"] is None:
                    continue
                y = place + 0.13 * (index - (len(rows.places) - 1) / 2)
                share, error = (100 * value for value in row["gap_closed"])
                axes.errorbar(share, y, xerr=error, fmt="o", color=palette[index], markersize=5, elinewidth=1.2)
        axes.axvline(0, color="#999999", linewidth=0.8)
        axes.axvline(100, color="#999999", linewidth=0.8)
        top = -0.75
        axes.text(0, top, "OCP MXFP4", ha="center", va="bottom", color="#666666")
        axes.text(100, top, "NVFP4", ha="center", va="bottom", color="#666666")
        axes.set_title(kind, loc="left", fontsize=13, pad=22)
        axes.set_xlabel("share of the loss between OCP MXFP4 and NVFP4 that is closed, %")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    grid[0].set_yticks(range(len(_BARS)), [bar[0] for bar in _BARS], fontsize=11)
    grid[0].set_ylim(len(_BARS) - 0.4, -0.7)
    handles = [
        pyplot.Line2D([], [], marker="o", linestyle="", color=palette[index], label=f"{model}: {text}")
        for index, (model, text) in enumerate(rows.places)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ---------------------------------------------------------------------------------------------------------------------
# The section
# ---------------------------------------------------------------------------------------------------------------------

_INTRO = """## MXFP4

Made by `hf-ext bench mxfp4` (the rows give their exact commands). All linear layers but the output head are converted
(210 in SmolLM2-135M-Instruct); losses are the mean negative log-likelihood (nats) of 511 predictions in each of the
evenly spaced windows of 512 tokens; ± is the standard error over windows, of the paired difference or, for shares, by
the delta method. *Gap closed* is the share of the loss between OCP MXFP4 (blocks of 32) and NVFP4, inputs treated
alike, that a format wins back. *Bits* are counted from what is stored; rows of 576 inputs are four and a half macro
blocks of 128, which makes 4.3125 bits 4.318. *KL* is the divergence of the format's predictions from the dense
model's, at every fourth position. *Weight error* is |W - W^|² / |W|². *Time* is the best forward pass over one window
against that of the dense float32 model, in one process on a CPU, by the PyTorch reference path; blank where a format
is only emulated.

Names: rule, then block / macro block; *static*, *dynamic*: how the macro block's factor is chosen; *weighted*: by the
error weighted with the mean square of each input channel, calibrated on Python source code (two windows of
`argparse.py`), never on the text measured; *exponents*: the search may also move each block's exponent. *Inputs*: the
macro block of the rounded inputs (W4A4). Paper: arXiv 2603.08713.

Texts: {texts}.

The weights of SmolLM2 come from a Q4_1 GGUF file, that is from 16 levels a block of 32. Two controls answer whether
this decides anything: *smollm2 dithered* has uniform noise of plus or minus half a level added to every weight and is
its own dense baseline; *small llama* (4.5 million parameters, own tokenizer) was trained from scratch in float32 by
`python -m hf_ext.benchmarks.mxfp4.train_small` and is measured on articles that it has not seen. So small a model
loses little by 4 bits, and its shares of the loss are uncertain; *of KL*, the share of the divergence between OCP
MXFP4 and NVFP4 that is closed, says more there.
"""


def section(rows: list[dict[str, Any]], plots: Path) -> str:
    """The Markdown of this benchmark; writes its plots.

    Args:
        rows: All rows of the data file.
        plots: Folder for the plots.
    """
    import matplotlib

    matplotlib.use("Agg")
    table = _Rows(rows)
    texts = "; ".join(f"*{name}*: {source}" for name, (_, source) in TEXTS.items() if name != "stdlib")
    parts = [_INTRO.format(texts=texts), "### Goals\n", _goals(table), "\nBold: reached. Empty: not measured.\n"]
    _plot_gap(table, plots / "gap_closed.png")
    parts.append("![Share of the gap closed](mxfp4/plots/gap_closed.png)\n")
    texts_of_model = [text for model, text in table.places if model == "smollm2"]
    if texts_of_model:
        _plot_bits(table, "smollm2", texts_of_model, plots / "loss_against_bits.png")
        parts.append("![Loss against bits a weight](mxfp4/plots/loss_against_bits.png)\n")
    for model, text in table.places:
        found = table.of(model, text)
        dense = table.find(model, text, DENSE, "none")
        parts.append(f"### {model}, {text}\n")
        if dense is not None:
            parts.append(
                f"{dense['windows']} windows; dense float32: NLL {dense['nll']:.4f}, perplexity "
                f"{math.exp(dense['nll']):.2f}. Text SHA-256 `{dense['text_sha256'][:16]}…`, Python "
                f"{dense['python']}, {dense['threads']} threads, torch {dense['versions']['torch']}, transformers "
                f"{dense['versions']['transformers']}. Command: `{dense['command']}`.\n"
            )
        for title, w4a4 in (("W4A16", False), ("W4A4", True)):
            if any((row["activation"] != "none") == w4a4 for row in found):
                parts += [f"{title}:\n", _table(found, w4a4), ""]
    if errors := table.errors():
        parts += [
            "### Peers that do not run here\n",
            markdown_table(
                ["peer", "what it says"],
                [[name, f"`{error}` (versions {versions})"] for name, versions, error in errors],
            ),
            "",
        ]
    return "\n".join(parts)
