"""The section on CtM of RESULTS.md, and its plots."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from hf_ext.benchmarks.ctm.methods import METHODS
from hf_ext.benchmarks.report import markdown_table

__all__ = ["Score", "difference", "score", "section"]

_CASES = {
    "common": "The adapters of a seed start from one A, as in the paper.",
    "own": "Every adapter starts from an A of its own.",
}
_COLOURS = {"peft": "#b2541a", "full": "#b2541a", "core": "#5b8c3a", "ctm both": "#1f6f9e", "ctm auto": "#7a4fa3"}


class Score(NamedTuple):
    """A mean over seeds and its standard error; None with a single seed."""

    value: float
    se: float | None

    def percent(self) -> str:
        """In percent."""
        return f"{100 * self.value:.1f}" + ("" if self.se is None else f" ± {100 * self.se:.1f}")


def score(values: Iterable[float]) -> Score:
    """Mean of one value a seed, with the standard error of the mean (sample deviation / sqrt(seeds))."""
    values = list(values)
    return Score(mean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else None)


def difference(rows: Sequence[dict], others: Sequence[dict], of: Any) -> Score | None:
    """Mean over the seeds that both have of `of(row) - of(other)`."""
    by_seed = {row["seed"]: of(row) for row in others}
    pairs = [of(row) - by_seed[row["seed"]] for row in rows if row["seed"] in by_seed]
    return score(pairs) if pairs else None


def average(row: dict[str, Any]) -> float:
    """Mean over tasks of the normalised accuracy."""
    return mean(row["normalised"].values())


def worst(row: dict[str, Any]) -> float:
    """The least of the tasks' normalised accuracies."""
    return min(row["normalised"].values())


def section(rows: Iterable[dict[str, Any]], plots: Path) -> str:
    """Markdown of all rows; writes the plots that they allow."""
    latest = list({(row["part"], row["case"], row["name"], row["rank"], row["seed"]): row for row in rows}.values())
    plots.mkdir(exist_ok=True)
    versions = latest[-1]["versions"]
    found: dict[tuple[str, str, int], dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in latest:
        found[row["part"], row["case"], row["rank"]][row["name"]].append(row)
    merges = {
        (case, rank): {name: group[name] for name in METHODS if name in group}
        for (part, case, rank), group in found.items()
        if part == "adapters" and any(name in METHODS for name in group)
    }
    parts = [
        "## CtM\n",
        f"Made by `hf-ext bench ctm` (torch {versions['torch']}, peft {versions['peft']}, "
        f"transformers {versions['transformers']}, {latest[-1]['threads']} thread of a CPU).\n",
        "### Goals\n",
        _goals(merges, found),
    ]
    parts += _accuracies(merges, latest, plots)
    parts += _energies(found, plots)
    parts += _layers(found)
    parts += _gauge(found)
    return "\n".join(parts) + "\n"


Merges = dict[tuple[str, int], dict[str, list[dict]]]
Found = dict[tuple[str, str, int], dict[str, list[dict]]]


def _goals(merges: Merges, found: Found) -> str:
    cells: list[list[str]] = []

    def add(goal: str, what: str, measured: str, reached: bool) -> None:
        cells.append([goal, what, f"**{measured}**" if reached else measured, "yes" if reached else "no"])

    for (case, rank), group in merges.items():
        for rule in ("ties", "dare_ties", "linear", "tsv"):
            ours, where = group.get(f"CtM {rule}", []), f"CtM {rule}, {case} start, rank {rank}"
            for peer, rows in _peers(group, rule).items():
                if least := difference(ours, rows, worst):
                    add(f"worst task at least that of {peer}", where, f"{_signed(least)} points", least.value >= 0)
                if middle := difference(ours, rows, average):
                    measured = f"{_signed(middle)} points"
                    add(f"mean over tasks at most 0.5 points below {peer}", where, measured, middle.value >= -0.005)
    for (part, case, _), group in found.items():
        if part == "energy" and {"core linear", "CtM linear"} <= set(group):
            ours, peer = (score(map(_least_kept, group[name])) for name in ("CtM linear", "core linear"))
            where = f"CtM linear, {_energy_case(case)}"
            measured = f"{ours.value:.2f} against {peer.value:.2f}"
            add("worst adapter keeps more energy than in a cut of the sum", where, measured, ours.value > peer.value)
            ours, peer = (score(map(_spread_kept, group[name])) for name in ("CtM linear", "core linear"))
            measured = f"{ours.value:.3f} against {peer.value:.3f}"
            add("spread over adapters at most half", where, measured, ours.value <= 0.5 * peer.value)
    for (part, case, rank), group in found.items():
        if part == "layer" and case.startswith("4096x4096") and {"CtM ties", "peft svd"} <= set(group):
            ours, peer = group["CtM ties"][-1], group["peft svd"][-1]
            where = f"CtM ties, {case}, rank {rank}"
            ratio = peer["seconds"] / ours["seconds"]
            add("at least 20 x faster than peft svd", where, f"{ratio:.0f} x", ratio >= 20)
            share = ours["peak_bytes"] / peer["peak_bytes"]
            add("at most a tenth of its memory", where, f"1/{1 / share:.0f}", share <= 0.1)
    return markdown_table(["goal", "merge", "measured", "reached"], cells)


def _peers(group: dict[str, list[dict]], rule: str) -> dict[str, list[dict]]:
    """Merge-then-compress by the same rule: in our core space, and by peft in the full space (for a sum the same)."""
    names = {"the core space": f"core {rule}", f"peft's {rule}_svd": f"peft {rule}_svd"}
    return {label: group[name] for label, name in names.items() if name in group}


def _signed(found: Score) -> str:
    return f"{100 * found.value:+.1f}" + ("" if found.se is None else f" ± {100 * found.se:.1f}")


def _least_kept(row: dict[str, Any]) -> float:
    return min(kept["mean"] for kept in row["kept"].values())


def _spread_kept(row: dict[str, Any]) -> float:
    return stdev(kept["mean"] for kept in row["kept"].values())


def _energy_case(case: str) -> str:
    return f"trained, {case} start" if case in _CASES else f"half-shared spaces, {case}"


def _accuracies(merges: Merges, rows: list[dict], plots: Path) -> list[str]:
    own = [row for row in rows if row["part"] == "adapters" and row["name"] == "own"]
    if not merges or not own:
        return []
    tasks = list(own[0]["test"])
    training = [facts for row in own for facts in row["training"]]
    parts = [
        "\n### Four trained adapters into one\n",
        f"LoRAs of rank {own[0]['rank']} on SmolLM2-135M-Instruct for four tasks: the past tense of verbs, the "
        "sentiment of a word, the language of a word (one of seven), digits of numbers in words. Prompts such as "
        "`past tense: carry =`; training on at most 1,600 words, "
        f"{min(f['tokens'] for f in training):,} to {max(f['tokens'] for f in training):,} tokens each; test on 300 "
        "other words a task. An answer is right when greedy decoding writes exactly it and a newline. *Normalised*: "
        "accuracy of the merge over that of the task's own adapter, in percent; means ± standard error over seeds of "
        "start and order (the words stay the same). Every method merges with weights of 1; a factor on the result, "
        "and the density where there is one, are chosen for each seed on 60 validation words a task from the same "
        "small grid. Weights are float32, products bfloat16 (autocast). DARE follows peft: no trimming.\n",
        _own_table(own, [row for row in rows if row["part"] == "adapters" and row["case"] == "none"], tasks),
    ]
    for (case, rank), group in merges.items():
        parts += [
            f"\n#### Rank {rank}, {case} start\n",
            f"{_CASES[case]} *Against core*: the difference of the mean to merge-then-compress in the core space by "
            "the same rule, paired by seed. *Kept*: share of an adapter's squared norm that lies in the column and "
            "row space of the result, least of the four means over layers. A row with fewer seeds than others is not "
            "to be compared with them.\n",
            _merge_table(group, tasks),
        ]
    if plot := _plot_accuracy(merges, plots / "accuracy.png"):
        parts.append(f"\n![Normalised accuracy](ctm/plots/{plot})\n")
    return parts


def _own_table(own: list[dict], base: list[dict], tasks: list[str]) -> str:
    cells = [[row["name"], *(f"{100 * row['test'][task]:.1f}" for task in tasks), ""] for row in base]
    by_case: dict[str, list[dict]] = defaultdict(list)
    for row in own:
        by_case[row["case"]].append(row)
    for case, group in by_case.items():
        cells.append(
            [
                f"own adapters, {case} start",
                *(score(row["test"][task] for row in group).percent() for task in tasks),
                len(group),
            ]
        )
    return markdown_table(["accuracy, %", *tasks, "seeds"], cells)


def _merge_table(group: dict[str, list[dict]], tasks: list[str]) -> str:
    cells = []
    for name, rows in group.items():
        peer = group.get(f"core {METHODS[name].rule}", [])
        against = difference(rows, peer, average) if METHODS[name].group.startswith("ctm") else None
        cells.append(
            [
                name,
                score(map(average, rows)).percent(),
                score(map(worst, rows)).percent(),
                "" if against is None else _signed(against),
                *(f"{100 * mean(row['normalised'][task] for row in rows):.0f}" for task in tasks),
                f"{mean(map(_least_kept, rows)):.2f}",
                ", ".join(f"{row['scale']:g}" for row in rows),
                len(rows),
            ]
        )
    return markdown_table(["merge", "mean", "worst", "against core", *tasks, "kept", "factors chosen", "seeds"], cells)


def _energies(found: Found, plots: Path) -> list[str]:
    groups = {key: group for key, group in found.items() if key[0] == "energy"}
    if not groups:
        return []
    cells = []
    for (_, case, rank), group in groups.items():
        for name, rows in group.items():
            mean_kept = score(mean(kept["mean"] for kept in row["kept"].values()) for row in rows)
            least, spread = score(map(_least_kept, rows)), score(map(_spread_kept, rows))
            single = mean(min(kept["min"] for kept in row["kept"].values()) for row in rows)
            cells.append(
                [
                    _energy_case(case),
                    _NAMES.get(name, name),
                    rank,
                    f"{mean_kept.value:.3f}",
                    f"{least.value:.3f}" + ("" if least.se is None else f" ± {least.se:.3f}"),
                    f"{spread.value:.3f}",
                    f"{single:.3f}",
                ]
            )
    _plot_energy(groups, plots / "kept_energy.png")
    return [
        "\n### Kept energy\n",
        "Share of an adapter's squared norm that lies in the column and row space of the merged adapter, from the "
        "factors alone; of four adapters, the mean over layers of each. *Spread* is the standard deviation over the "
        "adapters, *single layer* the least of all adapters and layers. Merge-then-compress is the truncated SVD of "
        "the merged core: for a sum the same as peft's `svd`. CtM's subspaces do not depend on the merge rule. Made "
        "up adapters (576 x 576) share half of their column and row spaces.\n",
        markdown_table(["adapters", "merge", "rank", "mean", "worst adapter", "spread", "single layer"], cells),
        "\n![Kept energy](ctm/plots/kept_energy.png)\n",
    ]


_NAMES = {
    "core linear": "merge-then-compress, sum",
    "core ties": "merge-then-compress, ties",
    "CtM linear, beta 0": "CtM, beta 0",
    "CtM linear": "CtM, beta 0.25",
    "CtM linear, beta 1": "CtM, beta 1",
}


def _layers(found: Found) -> list[str]:
    groups = {key: group for key, group in found.items() if key[0] == "layer"}
    if not groups:
        return []
    cells = []
    for (_, case, rank), group in groups.items():
        peer = group["peft svd"][-1] if "peft svd" in group else None
        for name, rows in group.items():
            row = rows[-1]
            cells.append(
                [
                    case,
                    name,
                    rank,
                    _seconds(row["seconds"]) + ("" if row["runs"] > 1 else " (once)"),
                    f"{row['peak_bytes'] / 2**20:,.0f}",
                    "" if peer is None else f"{peer['seconds'] / row['seconds']:.3g}",
                    "" if peer is None or not row["peak_bytes"] else f"{peer['peak_bytes'] / row['peak_bytes']:.3g}",
                ]
            )
    return [
        "\n### One layer: time and memory\n",
        "Random adapters of rank 16, float32, each merge in a process of its own on one thread, all of a size in one "
        "run. Time of the processor: the best of five, or the only one where it takes more than 10 s. Memory: the "
        "peak of what the process holds beyond the inputs (for peft: its model of one layer). *Faster* and "
        "*smaller*: than peft's `svd`, called with its defaults.\n",
        markdown_table(["layer", "merge", "rank", "time", "MiB", "faster", "smaller"], cells),
    ]


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _gauge(found: Found) -> list[str]:
    groups = {key: group for key, group in found.items() if key[0] == "gauge"}
    if not groups:
        return []
    cells = [
        [name, f"{mean(row['change'] for row in rows):.1e}", f"{max(row['change'] for row in rows):.1e}"]
        for group in groups.values()
        for name, rows in group.items()
    ]
    return [
        "\n### The same adapters in other factors\n",
        "Relative change of the merged update when every (B, A) is replaced by (B G, G⁻¹ A), which is the same "
        "adapter: 576 x 576, four random adapters of rank 16. Merges that work on the factors one by one do not have "
        "one answer; the others differ by rounding.\n",
        markdown_table(["merge", "mean change", "largest"], cells),
    ]


def _plot_accuracy(merges: Merges, path: Path) -> str:
    """One panel a study: mean and worst of each method, from the best down."""
    plt = _pyplot()
    panels = list(merges.items())
    height = 0.27 * max(len(group) for _, group in panels) + 1.4
    figure, axes = plt.subplots(
        1, len(panels), figsize=(7.6 * len(panels), height), squeeze=False, layout="constrained"
    )
    for ax, ((case, rank), group) in zip(axes[0], panels):
        names = sorted(group, key=lambda name: mean(map(average, group[name])))
        for place, name in enumerate(names):
            colour = "#555555" if METHODS[name].whole else _COLOURS[METHODS[name].group]
            for of, marker, filled in ((average, "o", True), (worst, "v", False)):
                found = score(map(of, group[name]))
                ax.errorbar(
                    100 * found.value,
                    place,
                    xerr=None if found.se is None else 100 * found.se,
                    marker=marker,
                    color=colour,
                    markerfacecolor=colour if filled else "white",
                    capsize=2,
                    markersize=6,
                    linewidth=1,
                )
        most = max(len(rows) for rows in group.values())
        short = {name: f" ({len(group[name])} of {most} seeds)" for name in names if len(group[name]) < most}
        ax.set_yticks(range(len(names)), [name + short.get(name, "") for name in names], fontsize=9)
        ax.set_ylim(-0.7, len(names) - 0.3)
        ax.grid(True, axis="x", alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xlabel("accuracy, % of the task's own adapter's (± s.e. over seeds)")
        ax.set_title(f"{case} start, rank {rank}: mean task (dot), worst task (triangle)", loc="left", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path.name


def _plot_energy(groups: Found, path: Path) -> None:
    """One panel a case: the four adapters of each merge, means over seeds."""
    plt = _pyplot()
    figure, axes = plt.subplots(
        1, len(groups), figsize=(3.6 * len(groups) + 1.6, 3.6), squeeze=False, sharey=True, layout="constrained"
    )
    for ax, ((_, case, _), group) in zip(axes[0], groups.items()):
        labels = list(next(iter(group.values()))[0]["kept"])
        width = 0.8 / len(group)
        for place, (name, rows) in enumerate(group.items()):
            values = [mean(row["kept"][label]["mean"] for row in rows) for label in labels]
            at = [x + (place - (len(group) - 1) / 2) * width for x in range(len(labels))]
            ax.bar(at, values, width, color=_BARS.get(name, "#888888"), label=_NAMES.get(name, name))
        if case in _CASES:
            ax.set_xticks(range(len(labels)), labels)
        else:
            ax.set_xticks(range(len(labels)), [f"norm {norm:g}" for norm in _norms_of(group)])
        ax.set_title(_energy_case(case), fontsize=10, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("kept energy")
    axes[0][0].set_ylim(0, 1)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


_BARS = {
    "core linear": "#b2541a",
    "core ties": "#e0a878",
    "CtM linear, beta 0": "#9ecae1",
    "CtM linear": "#1f6f9e",
    "CtM linear, beta 1": "#08306b",
}


def _norms_of(group: dict[str, list[dict]]) -> list[float]:
    return [kept["norm"] for kept in next(iter(group.values()))[0]["kept"].values()]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
