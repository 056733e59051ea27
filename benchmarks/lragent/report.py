"""The part of RESULTS.md about LRAgent, and its plot."""

from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hf_ext.benchmarks.report import markdown_table

__all__ = ["divergences", "section"]

_NAMES = {
    "base_lr_shared": "base and low-rank states shared",
    "base_shared": "base states shared",
    "full": "full sharing",
    "none": "no sharing",
    "DynamicCache": "one DynamicCache, plain peft",
}
_TARGETS = {"qkv": "q, k, v", "qv": "q, v"}
_KEY = ("kind", "targets", "pair", "trajectory", "seed", "a", "mode")


def section(rows: list[dict[str, Any]], plots: Path) -> str:
    """Tables and the plot of all kinds of rows.

    Args:
        rows: All rows of the data file; of the same key the last counts.
        plots: Where to write PNG files.
    """
    latest = list({tuple(str(row[name]) for name in _KEY): row for row in rows}.values())
    versions = latest[0]["versions"]
    parts = [
        "## LRAgent\n",
        f"Made by `hf-ext bench lragent` (torch {versions['torch']}, transformers {versions['transformers']}, peft "
        f"{versions['peft']}).\n",
    ]
    by_kind = defaultdict(list)
    for row in latest:
        by_kind[row["kind"]].append(row)
    if by_kind["kl"]:
        plots.mkdir(exist_ok=True)
        _plot(by_kind["kl"], plots / "kl_by_pair.png")
        parts += _divergence(by_kind["kl"])
    if by_kind["ttft"]:
        parts += _first_token(by_kind["ttft"])
    if by_kind["memory"]:
        parts += _memory(by_kind["memory"])
    return "\n".join(parts) + "\n"


def divergences(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[tuple, float]]:
    """(targets, a, mode) -> (pair, trajectory, seed) -> KL."""
    found: dict[tuple[str, str, str], dict[tuple, float]] = defaultdict(dict)
    for row in rows:
        found[row["targets"], row["a"], row["mode"]][row["pair"], row["trajectory"], row["seed"]] = row["kl"]
    return found


def _divergence(rows: list[dict[str, Any]]) -> list[str]:
    found, cells = divergences(rows), []
    for (targets, a, mode), kls in found.items():
        full = found.get((targets, a, "full"), {})
        common = [key for key in kls if key in full]
        ratios = [kls[key] / full[key] for key in common]
        group = [row for row in rows if (row["targets"], row["a"], row["mode"]) == (targets, a, mode)]
        error = stdev(kls.values()) / len(kls) ** 0.5 if len(kls) > 1 else 0.0
        cells.append(
            [
                _NAMES[mode],
                _TARGETS[targets],
                "one A" if a == "shared" else "an A each",
                len(kls),
                f"{mean(kls.values()):.4f} ± {error:.4f}",
                f"{mean(ratios):.2f}" if ratios and mode != "full" else "",
                f"{max(ratios):.2f}" if ratios and mode != "full" else "",
                f"{mean(row['loss'] - row['loss_of_none'] for row in group):+.4f}",
                f"{mean(row['agreement'] for row in group):.1%}",
            ]
        )
    columns = ["cache", "adapters on", "they have", "cases", "KL", "of full sharing", "at most", "loss", "same"]
    return [
        "### A second agent on what a first one read\n",
        "SmolLM2-135M-Instruct in float32 with LoRA adapters of rank 8, 32 steps each on different texts. The first "
        "agent reads 192 tokens, half of them of its own text and half of the second agent's, and the second predicts "
        "the next 48. *KL*: of its predictions from those over a cache of its own, nats a token, mean and standard "
        "error over cases (pairs of adapters × trajectories × seeds); *of full sharing*: mean and greatest ratio to "
        "it, case by case; *loss*: change of the mean negative log-likelihood; *same*: positions with the same best "
        "token.\n",
        markdown_table(columns, cells),
        "\n![KL of each case](lragent/plots/kl_by_pair.png)\n",
    ]


def _first_token(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        [_NAMES[row["mode"]], *(f"{row[name]:.2f}" for name in ("median", "least", "over_full", "over_none"))]
        for row in rows
    ]
    what = rows[0]["trajectory"]
    return [
        "### Time to the first token of a new agent\n",
        f"A trajectory of {what}, of which the first agent has read the first part; processor seconds, on one thread, "
        "of `generate` for one token by the second one, adapter switching and hashing included. Ratios are medians "
        "over repeats that were taken in turn.\n",
        markdown_table(["cache", "median s", "least s", "of full sharing", "of no sharing"], cells),
        "",
    ]


def _memory(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        [
            f"{row['pair']}, {row['trajectory']}",
            _NAMES[row["mode"]],
            f"{row['bytes'] / 2**20:.1f}",
            f"{row['bytes'] / row['one_full_bytes']:.3f}",
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    columns = ["agents", "cache", "MiB", "of one full cache", "a cache for each, of it"]
    return [
        "### Memory on the shape of Llama 3.1 8B\n",
        "32 layers, 8 KV heads of 128 channels, bfloat16, adapters on k_proj and v_proj; all storages of the cache "
        "counted, room for growth, ids and rotations included.\n",
        markdown_table(columns, cells),
        "",
    ]


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = divergences(rows)
    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    styles = {
        ("qkv", "shared", "base_lr_shared"): ("one A, q k v: low-rank states shared", "#1f6f9e", "o"),
        ("qkv", "shared", "base_shared"): ("one A, q k v: own low-rank states", "#7fb3d0", "s"),
        ("qv", "shared", "base_lr_shared"): ("one A, q v: low-rank states shared", "#5b8c3a", "^"),
        ("qkv", "own", "base_shared"): ("an A each, q k v: own low-rank states", "#b2541a", "D"),
    }
    highest = 0.0
    for (targets, a, mode), (label, colour, marker) in styles.items():
        full, kls = found.get((targets, a, "full"), {}), found.get((targets, a, mode), {})
        common = [key for key in kls if key in full]
        if common:
            axes.scatter(
                [full[k] for k in common], [kls[k] for k in common], 26, colour, marker, label=label, alpha=0.8
            )
            highest = max(highest, *(full[k] for k in common))
    for slope, style, label in ((1, "-", "as full sharing"), (0.5, "--", "half of it, the goal")):
        axes.plot([0, highest], [0, slope * highest], style, color="#8a8a8a", linewidth=1, label=label)
    axes.set_xlabel("KL of full sharing, nats a token")
    axes.set_ylabel("KL of LRAgent, nats a token")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    plt.close(figure)
