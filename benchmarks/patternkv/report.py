"""The part of RESULTS.md about PatternKV, and its plots."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from hf_ext.benchmarks.patternkv.settings import FULL, SETTINGS, TEXTS
from hf_ext.benchmarks.report import markdown_table
from hf_ext.cache_impls.patternkv import PatternKVConfig

__all__ = ["against_curve", "section"]

_SERIES = {
    "transformers": ("transformers QuantizedCache", "#5b8c3a", "s"),
    "rotation": ("rotation + codebook (emulated)", "#8a8a8a", "D"),
    "kivi": ("KIVI (patterns off)", "#b2541a", "o"),
    "fitted kivi": ("patterns off, fitted scales", "#d9a15b", "o"),
    "paper": ("PatternKV paper()", "#7a5195", "^"),
    "range": ("PatternKV, range scales", "#4a3b8f", "v"),
    "default": ("PatternKV default", "#1f6f9e", "*"),
}
_CURVE = "kivi"
_HOST_2 = ("transformers quanto 2 bit", "transformers hqq 2 bit")
_STATED = 8196


def section(rows: list[dict[str, Any]], plots: Path) -> str:
    """Tables and plots of all kinds of rows.

    Args:
        rows: all rows of the data file; of the same key the last counts.
        plots: where to write PNG files.
    """
    keyed = {(r["kind"], r["text"], r["tokens"], r["setting"], r["seed"], r["attention"]): r for r in rows}
    latest = list(keyed.values())
    quality = _mean_of_seeds(row for row in latest if row["kind"] == "quality" and "error" not in row)
    texts = [text for text in TEXTS if any(key[0] == text for key in quality)]
    facts = next(row for row in latest if row["kind"] == "quality")
    plots.mkdir(exist_ok=True)
    _plot_divergence(quality, texts, plots / "kl_against_bits.png")
    hashes = {row["text"]: row["text_sha256"][:12] for row in latest if "text_sha256" in row}
    described = "; ".join(f"*{text}*: {TEXTS[text]} (`{hashes[text]}…`)" for text in texts)
    parts = [
        "## PatternKV\n",
        "Made by `hf-ext bench patternkv` on SmolLM2-135M-Instruct (head_dim 64, 3 KV heads, float32, "
        f"torch {facts['versions']['torch']}, transformers {facts['versions']['transformers']}): a prompt of "
        f"{facts['tokens']:,} tokens fills the cache, the next 256 are scored in one call against the full cache. "
        "*KL* is the mean divergence of the predictions (nats a token), *loss* the change of the mean negative "
        "log-likelihood, *same* the share of positions with the same most likely token, errors are |x - x^|²/|x|² of "
        "the prompt's states. Bits an element are what the cache reports of its packed tokens in the end, scales "
        "and patterns included; of peers, by their layout with 16-bit scales. Sinks (4 tokens, except paper() and the "
        "peers) are apart. Means over the texts; ± is the spread over three seeds of k-means. The default was chosen "
        "on two other texts (argparse.py and IDLE's help page).\n",
        f"Texts: {described}.\n",
        "### Goals\n",
        _goals(quality, latest, texts),
        "\n![KL against bits](patternkv/plots/kl_against_bits.png)\n",
        "### All caches, mean over texts\n",
        _table(quality, texts, latest),
        "\n### KL by text\n",
        _by_text(quality, texts),
    ]
    decoded = _mean_of_seeds(row for row in latest if row["kind"] == "decoded" and "error" not in row)
    if decoded:
        parts += [
            "\n### Decoded windows\n",
            "The same, but only 516 tokens are a prompt and the others come a window at a time, as in decoding: the "
            "bank is mined from 512 tokens and grows by a pattern a window.\n",
            _table(decoded, texts, []),
        ]
    parts += _greedy(latest, texts)
    parts += _speed(latest)
    failed = {row["setting"]: row for row in latest if "error" in row}
    if failed:
        parts += [
            "\n### Peers that did not run\n",
            markdown_table(["setting", "what it says"], [[name, f"`{row['error']}`"] for name, row in failed.items()]),
        ]
    return "\n".join(parts) + "\n"


def _mean_of_seeds(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """(text, setting) -> means over seeds, with the spread of KL as `kl_spread`."""
    found = defaultdict(list)
    for row in rows:
        found[row["text"], row["setting"]].append(row)
    names = ("kl", "loss", "loss_of_full", "agreement", "key_error", "value_error", "bits")
    means = {}
    for key, group in found.items():
        means[key] = {name: mean(row[name] for row in group) for name in names}
        means[key]["kl_spread"] = stdev(row["kl"] for row in group) if len(group) > 1 else 0.0
    return means


def _curve(quality: dict, text: str) -> list[tuple[float, float]]:
    """KIVI's points (bits, KL) on a text, from few bits to many."""
    names = [name for name, setting in SETTINGS.items() if setting.group == _CURVE]
    return sorted((q["bits"], q["kl"]) for name in names if (q := quality.get((text, name))))


def against_curve(bits: float, kl: float, curve: list[tuple[float, float]]) -> float | None:
    """KL as a ratio to a curve's at the same bits, by straight lines between its points; None outside them."""
    for (low, a), (high, b) in zip(curve, curve[1:]):
        if low <= bits <= high:
            return kl / (a + (b - a) * (bits - low) / (high - low))
    return None


def _ratios(quality: dict, texts: list[str], name: str) -> list[float]:
    found = [against_curve(q["bits"], q["kl"], _curve(quality, t)) for t in texts if (q := quality.get((t, name)))]
    return [ratio for ratio in found if ratio is not None]


def _goals(quality: dict, rows: list[dict], texts: list[str]) -> str:
    cells: list[list[str]] = []

    def add(goal: str, what: str, measured: str, reached: bool) -> None:
        cells.append([goal, what, f"**{measured}**" if reached else measured, "yes" if reached else "no"])

    for name in ("PatternKV, range scales", "PatternKV default"):
        worst = [
            quality[t, name]["kl"] / min(quality[t, host]["kl"] for host in _HOST_2 if (t, host) in quality)
            for t in texts
            if (t, name) in quality and any((t, host) in quality for host in _HOST_2)
        ]
        if worst:
            goal = "KL at 2 bits at most 0.3 x transformers' quantized cache (the better of two)"
            add(goal, name, f"{min(worst):.2f} to {max(worst):.2f} x", max(worst) <= 0.3)
    for name in ("PatternKV, range scales", "PatternKV default"):
        ratios = _ratios(quality, texts, name)
        if ratios:
            add("never above KIVI's curve of KL against bits", name, f"at most {max(ratios):.2f} x", max(ratios) <= 1)
            add(
                "10% below it on the mean, stretch 30%",
                name,
                f"{abs(1 - mean(ratios)):.0%} {'below' if mean(ratios) <= 1 else 'above'}",
                mean(ratios) <= 0.9,
            )
    for name in ("PatternKV, range scales, 4 bit", "PatternKV default, 4 bit"):
        change = [q["loss"] - q["loss_of_full"] for t in texts if (q := quality.get((t, name)))]
        if change:
            goal = "loss at 4 bits within 0.01 of the full cache on the mean"
            add(goal, name, f"{mean(change):+.4f}", abs(mean(change)) <= 0.01)
    for name in ("PatternKV, range scales", "PatternKV default"):
        shares = [
            quality[t, name]["value_error"] / quality[t, "KIVI 2 bit, g 128"]["value_error"]
            for t in texts
            if (t, name) in quality and (t, "KIVI 2 bit, g 128") in quality
        ]
        if shares:
            add(
                "error of values at most half of KIVI's, same groups", name, f"{max(shares):.2f} x", max(shares) <= 0.5
            )
    for size, bound in ((64, 2.6), (128, 2.4)):
        bits = mean(PatternKVConfig().bits_per_element(size, _STATED))
        goal = f"at most {bound} bits an element, head_dim {size}, {_STATED:,} tokens, bf16"
        add(goal, "PatternKV default", f"{bits:.3f}", bits <= bound)
    for speed in _speeds(rows):
        if speed.row["setting"] == "PatternKV default":
            what = f"PatternKV default, attention {speed.row['attention']}"
            if speed.host is not None:
                shown = f"{speed.host:.2f} x ({speed.host_alone:.2f} x without the model's own time)"
                add("a decode step at 8k at least 3 x faster than QuantizedCache", what, shown, speed.host >= 3)
            add(
                "a decode step at 8k at most 1.3 x that of DynamicCache",
                what,
                f"{speed.full:.2f} x",
                speed.full <= 1.3,
            )
    return markdown_table(["goal", "cache", "measured", "reached"], cells)


def _table(quality: dict, texts: list[str], rows: list[dict]) -> str:
    cells = []
    for name, setting in SETTINGS.items():
        found = [quality[t, name] for t in texts if (t, name) in quality]
        if not found or name == FULL:
            continue
        ratios = _ratios(quality, texts, name) if setting.group != _CURVE else []
        spread = mean(q["kl_spread"] for q in found)
        cells.append(
            [
                name,
                f"{mean(q['bits'] for q in found):.3f}",
                f"{mean(q['kl'] for q in found):.4f}" + (f" ± {spread:.4f}" if spread else ""),
                f"{mean(ratios):.2f}" if ratios else "",
                f"{mean(q['loss'] - q['loss_of_full'] for q in found):+.3f}",
                f"{mean(q['agreement'] for q in found):.1%}",
                f"{mean(q['key_error'] for q in found):.4f}",
                f"{mean(q['value_error'] for q in found):.4f}",
            ]
        )
    head = ["cache", "bits", "KL", "of KIVI's curve", "loss", "same", "key error", "value error"]
    return markdown_table(head, cells)


def _by_text(quality: dict, texts: list[str]) -> str:
    names = [name for name in SETTINGS if name != FULL and any((t, name) in quality for t in texts)]

    def show(text: str, name: str) -> str:
        return f"{quality[text, name]['kl']:.4f}" if (text, name) in quality else ""

    return markdown_table(["cache", *texts], [[name, *(show(text, name) for text in texts)] for name in names])


def _greedy(rows: list[dict], texts: list[str]) -> list[str]:
    found = {(row["text"], row["setting"]): row for row in rows if row["kind"] == "greedy" and "error" not in row}
    names = [name for name in SETTINGS if any((text, name) in found for text in texts)]
    if not names:
        return []
    cells = []
    for name in names:
        until = [found[text, name]["until"] if (text, name) in found else None for text in texts]
        known = [count for count in until if count is not None]
        cells.append([name, *("" if count is None else count for count in until), f"{mean(known):.0f}"])
    count = next(iter(found.values()))["of"]
    return [
        "\n### Greedy text\n",
        f"Tokens written after the prompt before the first that the full cache would not have written, of {count}.\n",
        markdown_table(["cache", *texts, "mean"], cells),
    ]


class _Speed(NamedTuple):
    """A row of speed beside the others of its run; times are means over the 128 steps of a window, in seconds.

    Attributes:
        row: As measured.
        mean: Its time.
        full: Over that of the full cache.
        host: The faster QuantizedCache's time over its own; None without one.
        host_alone: The same with the time of a step that has nothing to attend to taken from both.
    """

    row: dict[str, Any]
    mean: float
    full: float
    host: float | None
    host_alone: float | None


def _speeds(rows: list[dict]) -> list[_Speed]:
    rows = [row for row in rows if row["kind"] == "speed" and "seconds_a_step" in row]
    means = {id(row): (127 * row["seconds_a_step"] + row["seconds_window"]) / 128 for row in rows}
    full = [means[id(row)] for row in rows if row["setting"] == FULL]
    hosts = [means[id(row)] for row in rows if row["group"] == "transformers"]
    found = []
    for row in rows if full else []:
        own, empty = means[id(row)], row["seconds_empty"]
        host = (min(hosts) / own, (min(hosts) - empty) / (own - empty)) if hosts else (None, None)
        found.append(_Speed(row, own, own / full[-1], *host))
    return found


def _speed(rows: list[dict]) -> list[str]:
    found = _speeds(rows)
    if not found:
        return []
    cells = [
        [
            speed.row["setting"],
            speed.row["attention"],
            f"{1000 * speed.row['seconds_a_step']:.0f}",
            f"{1000 * speed.row['seconds_window']:.0f}",
            f"{1000 * speed.mean:.0f}",
            f"{speed.full:.2f}",
            "" if speed.host is None else f"{speed.host:.2f}",
            f"{report['ratio']:.1f}" if (report := speed.row["memory"]) else "",
        ]
        for speed in found
    ]
    head = [
        "cache",
        "attention",
        "a step, ms",
        "ends a window, ms",
        "mean, ms",
        "of full",
        "QuantizedCache",
        "smaller",
    ]
    empty = 1000 * found[0].row["seconds_empty"]
    return [
        "\n### A decode step at 8,196 tokens\n",
        f"On a CPU, {found[0].row['threads']} thread, float32, random states, all in one run. *A step*: the best of "
        f"five; a step that has nothing to attend to takes {empty:.0f} ms. *Ends a window*: the step, one in 128, "
        "that packs a window; QuantizedCache packs all tokens anew then. *Mean*: over the 128 steps of a window; "
        "*of full* and *QuantizedCache* are ratios of it to the full cache's, and of the faster QuantizedCache's to "
        "it. The attention `patternkv` reads the codes, `sdpa` dequantizes a layer at a time. *Smaller*: bytes of the "
        "full cache (float32 here) over those kept.\n",
        markdown_table(head, cells),
    ]


def _plot_divergence(quality: dict, texts: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 5.2), constrained_layout=True)
    for group, (label, colour, marker) in _SERIES.items():
        points = []
        for name, setting in SETTINGS.items():
            found = [quality[t, name] for t in texts if (t, name) in quality]
            if setting.group == group and found:
                points.append((mean(q["bits"] for q in found), mean(q["kl"] for q in found), name))
        points.sort()
        if not points:
            continue
        line = "-" if group in ("kivi", "fitted kivi", "default") else "none"
        bits, kls, _ = zip(*points)
        size = 11 if marker == "*" else 7
        axes.plot(bits, kls, linestyle=line, marker=marker, color=colour, label=label, markersize=size, linewidth=1.2)
    axes.set_yscale("log")
    axes.set_xlabel("bits an element (mean of keys and values; codes, scales, ids, patterns)")
    axes.set_ylabel("KL to the full cache, nats a token")
    axes.set_title(f"SmolLM2-135M, 4,100 tokens of prompt, mean over {len(texts)} texts")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
