"""The part of RESULTS.md about CaT, and its plots."""

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hf_ext.benchmarks.cat.open_domain import REFERENCES
from hf_ext.benchmarks.report import markdown_table

__all__ = ["section"]

# Method -> colour; in the order of the tables.
_TRAINED = {
    "GRPO, true labels": "#5b8c3a",
    "CaT, scripted anchor": "#8a8a8a",
    "CaT, synthesis": "#1f6f9e",
    "CaT, twice the steps": "#123f5c",
    "TTRL, majority vote": "#b2541a",
}
_LABELS, _SCRIPTED, _CAT, _LONGER, _VOTE = _TRAINED
_RULES = ("one sample", "vote of 8", "synthesis of 8")
_ERRS = {
    "systematic": "a carry is left out in most samples of some sums (20% of all), and any sum may slip",
    "spread": "any sum may slip, each sample in its own way",
}
_KEY = ("kind", "noise", "method", "seed")
Rows = dict[tuple, dict[str, Any]]


def section(rows: list[dict[str, Any]], plots: Path) -> str:
    """Tables and plots of all kinds of rows.

    Args:
        rows: all rows of the data file; of the same key the last counts.
        plots: where to write PNG files.
    """
    latest: Rows = {tuple(row[name] for name in _KEY): row for row in rows}
    versions = rows[-1]["versions"]
    plots.mkdir(exist_ok=True)
    parts = [
        "## CaT\n",
        f"Made by `hf-ext bench cat` (torch {versions['torch']}, transformers {versions['transformers']}, trl "
        f"{versions['trl']}, one thread of a CPU).\n",
        "### Goals\n",
        _goals(latest),
    ]
    if any(key[0] in ("train", "inference") for key in latest):
        parts += _sums(latest, plots)
    if any(key[0] == "statements" for key in latest):
        parts += _statements(latest)
    if any(key[0] in ("judge", "smollm2") for key in latest):
        parts += _smollm2(latest)
    return "\n".join(parts) + "\n"


def _seeds(rows: Rows, noise: str, method: str) -> list[dict[str, Any]]:
    found = [row for key, row in rows.items() if key[:3] == ("train", noise, method)]
    return sorted(found, key=lambda row: row["seed"])


def _accuracies(rows: Rows, noise: str, method: str) -> list[float]:
    return [row["accuracy"] for row in _seeds(rows, noise, method)]


def _spread(values: list[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def _goals(rows: Rows) -> str:
    cells: list[list[str]] = []

    def add(goal: str, measured: str, reached: bool) -> None:
        cells.append([goal, f"**{measured}**" if reached else measured, "yes" if reached else "no"])

    def ratio(goal: str, noise: str, one: str, other: str, least: float) -> None:
        a, b = _accuracies(rows, noise, one), _accuracies(rows, noise, other)
        if a and b and mean(b):
            add(goal, f"{mean(a):.3f} / {mean(b):.3f} = {mean(a) / mean(b):.2f}", mean(a) / mean(b) >= least)

    merged = rows.get(("inference", "systematic", "synthesis of 8", 0))
    for method in (_CAT, _LONGER):
        trained = _seeds(rows, "systematic", method)
        if merged and trained:
            spent = mean(row["tokens_read"] + row["tokens_written"] for row in trained)
            full = merged["tokens_read"] + merged["tokens_written"]
            accuracy = mean(row["accuracy"] for row in trained)
            add(
                f"one sample after {method} at least as right as 8 samples and a synthesis before it, at 1/9 of the "
                "compute",
                f"{_spread([row['accuracy'] for row in trained])} against {merged['accuracy']:.3f} ± "
                f"{merged['standard_error']:.3f}, with 1/{full / spent:.1f} of the tokens",
                accuracy >= merged["accuracy"] and full / spent >= 9,
            )
    ratio("CaT's own synthesis at least 1.2 x the vote", "systematic", _CAT, _VOTE, 1.2)
    ratio("an anchor right 85% of the time: at least .95 of true labels", "systematic", _SCRIPTED, _LABELS, 0.95)
    ratio("the same: at least 1.2 x the vote", "systematic", _SCRIPTED, _VOTE, 1.2)
    ratio("where errors are only spread, the vote reaches .97 of true labels", "spread", _VOTE, _LABELS, 0.97)
    precision = {
        method: mean(rows["statements", "", method, 0]["precision"])
        for method in REFERENCES
        if ("statements", "", method, 0) in rows
    }
    if len(precision) == len(REFERENCES):
        frozen = precision["synthesis, frozen anchor"]
        for other, least in (("whole-answer score", 1.15), ("synthesis by counting", 1.3)):
            add(
                f"statements: precision with a frozen anchor at least {least} x that of the {other}",
                f"{frozen:.2f} / {precision[other]:.2f} = {frozen / precision[other]:.2f}",
                frozen / precision[other] >= least,
            )
    shared = rows.get(("judge", "", "prefix shared", 0))
    single = rows.get(("judge", "", "one at a time", 0))
    if shared and single:
        times = single["seconds"] / shared["seconds"]
        add(
            "8 verdicts on an answer of 512 tokens at least 3 x faster with a shared prefix",
            f"{times:.1f} x",
            times >= 3,
        )
    whole = rows.get(("smollm2", "", "CaT, rubric", 0))
    if whole:
        add(
            "a step of CaT with SmolLM2 as its own anchor and judge at most 2 x GRPO's",
            f"{whole['ratio']:.2f} x",
            whole["ratio"] <= 2,
        )
    return markdown_table(["goal", "measured", "reached"], cells)


def _sums(rows: Rows, plots: Path) -> list[str]:
    parts = [
        "\n### Sums\n",
        "A Llama of three layers, trained by us from nothing in minutes, adds two numbers of two digits, digit by "
        "digit, with errors like those in its training data; it has also been trained to merge eight such workings of "
        "a sum that it does not see, with CaT's own prompt. That it merges better than it solves is built in, as it "
        "would be in an instruction-tuned model; how often a policy that is trained on the merged answers is right is "
        "not. Accuracy is that of one sample at temperature 1 on 400 held-out sums (two samples each), ± the spread "
        "over seeds of the training; labels are used by the rows that say so only.\n",
    ]
    for noise, errs in _ERRS.items():
        trained = [method for method in _TRAINED if _seeds(rows, noise, method)]
        base = rows.get(("inference", noise, "one sample", 0))
        if not trained and not base:
            continue
        parts.append(f"\n*{noise.capitalize()} errors*: {errs}.\n")
        cells = []
        if base:
            cells.append(["no training", f"{base['accuracy']:.3f} ± {base['standard_error']:.3f}", "", "", ""])
        for method in trained:
            found = _seeds(rows, noise, method)

            def of(end: str, name: str, found: list = found) -> str:
                values = [row[end][name] for row in found if name in row[end]]
                return f"{mean(values):.3f}" if values else ""

            cells.append(
                [
                    f"{method}, {len(found)} seeds",
                    _spread(_accuracies(rows, noise, method)),
                    f"{of('first', 'reward')} to {of('last', 'reward')}",
                    f"{of('first', 'reference_accuracy')} to {of('last', 'reference_accuracy')}".removeprefix(" to "),
                    f"{of('first', 'differs_from_vote')} to {of('last', 'differs_from_vote')}".removeprefix(" to "),
                ]
            )
        columns = ["training", "accuracy", "reward", "reference right", "is not the vote's"]
        parts.append(markdown_table(columns, cells))
    budget = next((row["budget"] for key, row in rows.items() if key[0] == "train" and key[2] != _LONGER), None)
    if budget:
        parts.append(
            f"\n{budget['steps']} steps of {budget['prompts']} sums and 8 rollouts each, learning rate "
            f"{budget['learning_rate']:g}, beta 0.04; no sum twice. Reward and reference: means over the first and "
            "the last ten steps.\n"
        )
        parts += _drift(rows)
        _plot_curves(rows, plots / "accuracy.png")
        parts.append("\n![Accuracy while training](cat/plots/accuracy.png)\n")
    parts += _compute(rows, plots)
    return parts


def _drift(rows: Rows) -> list[str]:
    """What a longer training does to the references, if it does."""
    found = _seeds(rows, "systematic", _LONGER)
    means = {
        (end, name): mean(row[end][name] for row in found)
        for end in ("first", "last")
        for name in ("reward", "reference_accuracy", "differs_from_vote")
        if found and all(name in row[end] for row in found)
    }
    if not means or means["last", "reference_accuracy"] >= means["first", "reference_accuracy"]:
        return []

    def change(name: str) -> str:
        return f"{means['first', name]:.2f} to {means['last', name]:.2f}"

    return [
        f"Trained for {found[0]['budget']['steps']} steps, the policy drags its references along: the reward goes "
        f"from {change('reward')}, while fewer references are right ({change('reference_accuracy')}) and fewer are "
        f"not the vote's ({change('differs_from_vote')}). Rollouts that agree on an error leave the anchor nothing to "
        "compare. Without labels only the last of these can be seen: `cat/disagree_majority`.\n"
    ]


def _compute(rows: Rows, plots: Path) -> list[str]:
    cells, points = [], []
    for rule in _RULES:
        row = rows.get(("inference", "systematic", rule, 0))
        if row:
            points.append((f"{rule}, untrained", row, "#8a8a8a"))
    for method in (_CAT, _LONGER, _VOTE, _LABELS):
        found = _seeds(rows, "systematic", method)
        if found:
            names = ("accuracy", "tokens_read", "tokens_written")
            averaged = {name: mean(row[name] for row in found) for name in names}
            points.append((f"one sample after {method}", averaged, _TRAINED[method]))
    for name, row, _ in points:
        total = row["tokens_read"] + row["tokens_written"]
        cells.append([name, f"{row['accuracy']:.3f}", f"{row['tokens_written']:.0f}", f"{total:.0f}"])
    if not cells:
        return []
    _plot_compute(points, plots / "compute.png")
    parts = [
        "\n*Compute at inference* (systematic errors): tokens for one answer.\n",
        markdown_table(["answer", "accuracy", "tokens written", "tokens read and written"], cells),
        "\n![Accuracy against tokens](cat/plots/compute.png)\n",
    ]
    merged = rows.get(("inference", "systematic", "synthesis of 8", 0))
    if merged:
        parts.append(
            f"The untrained model's synthesis differs from the vote on {merged['differs_from_vote']:.0%} of the sums "
            f"and is right on {merged['right_where_it_differs']:.0%} of those (paper: 5 to 15%, 70 to 86%); on "
            f"{merged['right_with_all_wrong']:.1%} of all sums it is right with no sample right (paper: about 1%).\n"
        )
    return parts


def _axes(title: str, x: str):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.2, 4.4), layout="constrained")
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel("accuracy of one answer, held-out sums")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _plot_curves(rows: Rows, file: Path) -> None:
    figure, axes = _axes("Training by each kind of reference, systematic errors", "step")
    base = rows.get(("inference", "systematic", "one sample", 0))
    for method, colour in _TRAINED.items():
        found = _seeds(rows, "systematic", method)
        if not found:
            continue
        start = [[0, base["accuracy"]]] if base else []
        curves = [start + row["curve"] for row in found]
        steps = [step for step, _ in curves[0]]
        values = [[point[1] for point in curve] for curve in curves]
        middle = [mean(column) for column in zip(*values)]
        axes.plot(steps, middle, color=colour, marker="o", markersize=3, label=method)
        axes.fill_between(
            steps, [min(c) for c in zip(*values)], [max(c) for c in zip(*values)], color=colour, alpha=0.15
        )
    merged = rows.get(("inference", "systematic", "synthesis of 8", 0))
    if merged:
        axes.axhline(merged["accuracy"], color="black", linestyle="--", linewidth=1, label="8 samples and a synthesis")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8.5)
    figure.savefig(file, dpi=130)


def _plot_compute(points: list, file: Path) -> None:
    figure, axes = _axes("Accuracy against compute at inference", "tokens read and written for one answer")
    below = 0.0
    for name, row, colour in sorted(points, key=lambda point: -point[1]["accuracy"]):
        total, accuracy = row["tokens_read"] + row["tokens_written"], row["accuracy"]
        axes.scatter(total, accuracy, color=colour, s=45, zorder=3)
        # Names of neighbours would cover each other.
        lower = 9 if 0 < below - accuracy < 0.012 else 3
        axes.annotate(name, (total, accuracy), xytext=(7, -lower), textcoords="offset points", fontsize=8.5)
        below = accuracy
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 4)  # room for the last names
    figure.savefig(file, dpi=130)


def _statements(rows: Rows) -> list[str]:
    cells = []
    for method in REFERENCES:
        row = rows.get(("statements", "", method, 0))
        if row:
            recall, false = mean(row["recall"]), mean(row["false_rate"])
            cells.append(
                [
                    method,
                    f"{recall:.3f}",
                    f"{false:.3f}",
                    f"{mean(row['precision']):.2f} ± {stdev(row['precision']):.2f}",
                ]
            )
    return [
        "\n### A world of statements\n",
        "Numpy, no model (`benchmarks/cat/open_domain.py`): an answer states some of ten true and ten false things "
        "(in the beginning .49 of the true and .16 of the false ones), and criteria come from the reference. Means "
        "after 300 steps, ± the spread over 20 seeds. An anchor that only counts what rollouts state lets falsehoods "
        "grow; one with frozen knowledge of its own holds most of them back.\n",
        markdown_table(["reference", "recall", "false rate", "precision"], cells),
        "",
    ]


def _smollm2(rows: Rows) -> list[str]:
    parts = ["\n### SmolLM2-135M-Instruct as judge and anchor\n"]
    cells = []
    for way in ("one at a time", "prefix shared"):
        row = rows.get(("judge", "", way, 0))
        if row:
            cells.append(
                [way, f"{row['seconds']:.2f}", f"{row['tokens_fed']:,.0f}", f"{row['largest_difference']:.1e}"]
            )
    if cells:
        columns = [
            "8 verdicts on 512 tokens",
            "s of processor time",
            "tokens fed",
            "largest difference of the log-odds",
        ]
        parts.append(markdown_table(columns, cells))
    whole = rows.get(("smollm2", "", "CaT, rubric", 0))
    if whole:
        log = whole["log"]

        def share(name: str) -> str:
            values = [entry[name] for entry in log if name in entry]
            return f"{mean(values):.2f}" if values else "none"

        parts.append(
            f"\nEnd to end with LoRA, {whole['steps']} steps of one open prompt, {whole['group']} rollouts of "
            f"{whole['length']} tokens, the frozen start as anchor and judge: {whole['seconds_a_step_cat']:.0f} s a "
            f"step of processor time, GRPO with a trivial reward {whole['seconds_a_step_grpo']:.0f} s. Share "
            f"of rubrics that could not be read or were too short: {share('cat/rubric_fail')}; criteria a rubric: "
            f"{share('cat/n_rubrics')}; share of verdicts that were neither yes nor no: {share('cat/judge_none')}; "
            f"share of criteria that told rollouts apart: {share('cat/criterion_discrimination')}. The audit has "
            f"{whole['groups_audited']} groups and {whole['verdicts_audited']} rows of verdicts.\n"
        )
    return parts
