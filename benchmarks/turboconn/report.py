"""The part of RESULTS.md about TurboConn, and its plots."""

from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from hf_ext.benchmarks.report import markdown_table
from hf_ext.benchmarks.turboconn.tasks import TASKS
from hf_ext.benchmarks.turboconn.training import BASE, MODELS

__all__ = ["at_length", "best_rate", "section"]

_COLOURS = {
    "base": "#8a8a8a",
    "base, 4 x the steps": "#444444",
    "sparse": "#b2541a",
    "dense, attention trained": "#7fb4d1",
    "dense": "#1f6f9e",
    "cascade": "#5b8c3a",
}
# Curves that lie on one another: the one drawn first is wider.
_WIDTHS = {"sparse": 3.6}
_LENGTHS = (8, 16, 32, 64, 128)
_SOLVED = 0.99


def section(rows: list[dict[str, Any]], plots: Path) -> str:
    """Tables and plots of all kinds of rows.

    Args:
        rows: all rows of the data file; of the same key the last counts.
        plots: where to write PNG files.
    """
    latest = list({(r["kind"], r["task"], r["model"], r["lr"], r["seed"]): r for r in rows}.values())
    runs = [row for row in latest if row["kind"] == "accuracy"]
    plots.mkdir(exist_ok=True)
    facts = latest[0]
    parts = [
        "## TurboConn\n",
        f"Made by `hf-ext bench turboconn` (torch {facts['versions']['torch']}, transformers "
        f"{facts['versions']['transformers']}, {facts['threads']} thread).\n",
    ]
    if runs:
        parts += _accuracy(runs, plots)
    parts += _jacobi(latest, runs, plots)
    parts += _cost(latest, runs)
    if runs:
        parts += _stability(runs)
        parts += ["\n### Every run\n", _every_run(runs)]
    return "\n".join(parts) + "\n"


def at_length(row: dict[str, Any], length: int) -> float:
    """Accuracy of a run after `length` tokens: the mean over the last four of them."""
    part = row["accuracy"][max(0, length - 4) : length]
    return sum(part) / len(part)


def best_rate(runs: list[dict[str, Any]]) -> float:
    """Of one model's runs on a task the learning rate with the lowest training loss in the end.

    Nothing that is tested has a say.
    """
    found = defaultdict(list)
    for row in runs:
        found[row["lr"]].append(row["losses"][-1])
    return min(found, key=lambda lr: mean(found[lr]))


def _groups(runs: list[dict[str, Any]]) -> dict[tuple[str, str, float], list[dict[str, Any]]]:
    """(task, model, learning rate) -> runs by seed, in the order of tasks and models."""
    order = {name: place for place, name in enumerate([*TASKS, *MODELS])}
    found = defaultdict(list)
    for row in sorted(runs, key=lambda r: (order[r["task"]], order[r["model"]], r["lr"], r["seed"])):
        found[row["task"], row["model"], row["lr"]].append(row)
    return dict(found)


def _accuracy(runs: list[dict[str, Any]], plots: Path) -> list[str]:
    groups = _groups(runs)
    tasks = [task for task in TASKS if any(key[0] == task for key in groups)]
    rates = {t: best_rate([r for r in runs if r["task"] == t and r["model"] == "base"] or runs) for t in tasks}
    shown = {(task, model): group for (task, model, rate), group in groups.items() if rate == rates[task]}
    _plot_accuracy(shown, tasks, plots / "accuracy.png")
    first = runs[0]
    lengths = [n for n in _LENGTHS if n <= len(first["accuracy"])]
    cells = []
    for (task, model, rate), group in groups.items():
        cells.append([task, model, f"{rate:g}", len(group)])
        cells[-1] += [_spread([at_length(row, n) for row in group]) for n in lengths]
    return [
        f"A Llama of {BASE['layers']} layers, d {BASE['hidden']}, pretrained for {BASE['steps']} steps on a made-up "
        f"language and repeated phrases ({BASE['length']} tokens, no state needed). Fine-tuned on sequences of "
        f"{first['length']} tokens, {first['rows']} a step (the seed is of this data), with links of whole matrices "
        "(*sparse*: the last layer to the first; *dense*: each upper layer to the one half the depth below) or as it "
        "is. Attention's matrices are kept as pretrained but in *base*, *base, 4 x the steps* (about the time that "
        "links take) and *dense, attention trained*, where all weights are trained. Every model of a task saw the "
        f"same data at the same learning rates, for {first['steps']} steps but for the one named. Tested on "
        f"{len(first['accuracy'])} tokens; accuracy at a length is that of the answers to its last "
        "four tokens. The recipe was found in pilots whose long tests were looked at (see the card of TurboConn).\n",
        *(f"- *{task}* (chance {TASKS[task].chance:.0%}): {TASKS[task].about}." for task in tasks),
        "\n### Accuracy against length\n",
        "Mean over the seeds (lowest to highest, where they differ).\n",
        markdown_table(["task", "model", "lr", "seeds", *(f"{n}" for n in lengths)], cells),
        "\nThe plot shows all models at the learning rate whose training loss was lowest for the *base*.\n",
        "![Accuracy against length](turboconn/plots/accuracy.png)\n",
    ]


def _spread(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{mean(values):.0%}" + (f" ({low:.0%} to {high:.0%})" if f"{low:.0%}" != f"{high:.0%}" else "")


def _every_run(runs: list[dict[str, Any]]) -> str:
    cells = []
    for row in (row for group in _groups(runs).values() for row in group):
        lengths = [f"{at_length(row, n):.1%}" if n <= len(row["accuracy"]) else "" for n in _LENGTHS]
        norm = f"{row['largest_norm']:.0f}"
        cells.append([row["task"], row["model"], f"{row['lr']:g}", row["seed"], f"{row['losses'][-1]:.3f}", *lengths])
        cells[-1] += [norm, f"{row['cpu_seconds']:.0f}"]
    head = ["task", "model", "lr", "seed", "loss", *(f"{n}" for n in _LENGTHS), "largest norm", "CPU s"]
    return markdown_table(head, cells)


def _stability(runs: list[dict[str, Any]]) -> list[str]:
    groups = defaultdict(list)
    for row in runs:
        groups[row["model"], row["lr"]].append(row)
    cells = []
    for model in MODELS:
        for rate in sorted({key[1] for key in groups if key[0] == model}):
            group = groups[model, rate]
            solved = sum(at_length(row, row["length"]) >= _SOLVED for row in group)
            norms = [row["largest_norm"] for row in group]
            middle = median(row["median_norm"] for row in group)
            cells.append([model, f"{rate:g}", f"{solved} of {len(group)}", f"{middle:.2f}"])
            cells[-1] += [f"{median(norms):.0f}", f"{max(norms):.0f}"]
    return [
        "\n### Stability\n",
        f"Gradient norms before clipping at 1, over all tasks and seeds. *Solved*: at least {_SOLVED:.0%} right at "
        "the trained length.\n",
        markdown_table(["model", "lr", "solved", "median norm", "largest norm, median run", "largest norm"], cells),
    ]


def _jacobi(latest: list[dict], runs: list[dict], plots: Path) -> list[str]:
    weak = sorted((row for row in latest if row["kind"] == "jacobi"), key=lambda row: float(row["model"]))
    trained = defaultdict(list)
    for row in runs:
        if row["model"] in ("sparse", "dense") and at_length(row, row["length"]) >= _SOLVED:
            trained[row["model"]].append(row)
    curves = {f"random, {float(row['model']):g}": row["relative"] for row in weak}
    passes = weak[0]["passes"] if weak else None
    for model, group in trained.items():
        passes = passes or group[0]["jacobi"]["passes"]
        columns = zip(*(row["jacobi"]["relative"] for row in group))
        curves[f"trained, {model} ({len(group)} run{'s' * (len(group) > 1)})"] = [median(column) for column in columns]
    if not curves:
        return []
    _plot_jacobi(curves, passes, plots / "jacobi.png")
    cells = [[name, *(f"{value:.0e}" for value in curve)] for name, curve in curves.items()]
    return [
        "\n### Jacobi's error\n",
        f"Largest error of a logit after so many parallel passes over {passes[-1]} tokens, over the exact logits' "
        "standard deviation. *random*: dense links on the pretrained base whose entries have that standard deviation; "
        "*trained*: the links of all those runs that solved their task, the median run.\n",
        markdown_table(["links", *map(str, passes)], cells),
        "\n![Jacobi's error](turboconn/plots/jacobi.png)\n",
    ]


def _cost(latest: list[dict], runs: list[dict]) -> list[str]:
    cells = []
    for kind, what in (("training", "a training step"), ("tokens", "a generated token")):
        for row in latest:
            if row["kind"] == kind:
                low, high = row["ratio_quartiles"]
                cells.append(
                    [what, row["task"], row["model"], f"**{row['ratio']:.2f} x**", f"{low:.2f} to {high:.2f}"]
                )
                cells[-1] += [f"{1000 * row['base_seconds']:.0f} ms", row["tokens"]]
    parts = []
    if cells:
        head = ["what", "on", "links", "over the base", "quartiles", "the base takes", "tokens"]
        parts = [
            "\n### Cost\n",
            "Base and links in turns in one process, the median of the ratios of pairs; float32; "
            "tokens are generated for one sequence. *Tokens*: of a training sequence, or before the generated token. "
            "In training the links are *dense*.\n",
            markdown_table(head, cells),
        ]
    seconds = defaultdict(list)
    for row in runs:
        seconds[row["model"]].append(row["cpu_seconds"] / row["steps"])
    if "base" in seconds:
        base = median(seconds["base"])
        told = ", ".join(f"{model} {median(v) / base:.1f} x" for model, v in seconds.items() if model != "base")
        parts.append(
            f"\nProcessor time a step of the runs above over that of the base's ({base * 1000:.0f} ms): {told}.\n"
        )
    return parts


def _axes(columns: int, rows: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **options
    )
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plot_accuracy(shown: dict, tasks: list[str], path: Path) -> None:
    from matplotlib import pyplot

    columns = 2 if len(tasks) in (2, 4) else min(3, len(tasks))
    lines = -(-len(tasks) // columns)
    figure, axes = _axes(columns, lines, 3.6 * columns + 0.4, 2.6 * lines + 0.7, sharey=True)
    for one in axes.flat[len(tasks) :]:
        one.set_visible(False)
    handles: dict[str, Any] = {}
    for one, task in zip(axes.flat, tasks):
        for model, colour in _COLOURS.items():
            group = shown.get((task, model))
            if not group:
                continue
            curves = [_smooth(row["accuracy"]) for row in group]
            places = range(1, len(curves[0]) + 1)
            style = "--" if model == "base, 4 x the steps" else "-"
            (handles[model],) = one.plot(
                places, [mean(v) for v in zip(*curves)], style, color=colour, linewidth=_WIDTHS.get(model, 1.8)
            )
            low, high = [min(v) for v in zip(*curves)], [max(v) for v in zip(*curves)]
            one.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
        row = next(group[0] for (name, _), group in shown.items() if name == task)
        one.axvspan(0.9, row["length"], color="#eeeeee", zorder=0)
        one.axhline(TASKS[task].chance, color="#bbbbbb", linewidth=0.8, linestyle=":")
        one.set_title(task, loc="left", fontsize=10)
        one.set_xscale("log", base=2)
        one.set_xlim(1, len(row["accuracy"]))
        ticks = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= len(row["accuracy"])]
        one.set_xticks(ticks, [str(n) for n in ticks])
        one.set_ylim(0, 1.03)
    for one in axes[:, 0]:
        one.set_ylabel("accuracy")
    for one in axes.flat:
        one.set_xlabel("tokens read (grey: trained lengths)")
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _smooth(values: list[float]) -> list[float]:
    """Means of a token and its two neighbours: 512 sequences leave 2% of noise."""
    return [mean(values[max(0, i - 1) : i + 2]) for i in range(len(values))]


def _plot_jacobi(curves: dict[str, list[float]], passes: list[int], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = _axes(1, 1, 7, 3.8)
    (one,) = axes.flat
    weak = [name for name in curves if name.startswith("random")]
    shades = dict(
        zip(weak, pyplot.get_cmap("Greys")([0.35 + 0.5 * i / max(1, len(weak) - 1) for i in range(len(weak))]))
    )
    for name, curve in curves.items():
        colour = shades[name] if name in shades else _COLOURS[name.split(", ")[1].split(" (")[0]]
        style = {
            "marker": "o",
            "markersize": 3,
            "linewidth": 1.2 if name in shades else 3.6 if "sparse" in name else 1.8,
        }
        one.plot(passes, [max(value, 1e-8) for value in curve], color=colour, label=name, **style)
    one.set_yscale("log")
    one.set_xticks(passes)
    one.set_xlabel(f"parallel passes over {passes[-1]} tokens")
    one.set_ylabel("largest error of a logit / their spread")
    one.set_title("Jacobi is exact after as many passes as chunks", loc="left")
    one.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
