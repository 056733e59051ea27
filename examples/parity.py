"""Fine-tune a small model on parity, once as it is and once with TurboConn links, and test both far beyond.

    python examples/parity.py --out parity

After each bit the model says whether the ones so far are odd. No answer is ever an input, so the parity has to be
carried inside the model, step by step, and a decoder of a few layers runs out of them. Training sequences are short;
both models see the same ones. Needs the extra `demo`. Without --model a small Llama is pretrained first (and kept in
`~/.cache/hf_ext`). Three minutes on one core.
"""

import time
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_ext.benchmarks.turboconn.training import pretrained
from hf_ext.extras import require
from hf_ext.model_patches.turboconn import TurboConnConfig, patch

# Bits are the tokens 0 and 1, the answers 2 (even) and 3 (odd), whatever they meant to the model before.
ANSWERS = 2


def make_batch(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bits and the parity after each, [rows, length]."""
    bits = torch.randint(2, (rows, length))
    return bits, bits.cumsum(1) % 2 + ANSWERS


def train(model: PreTrainedModel, steps: int, length: int, learning_rate: float) -> None:
    """An ordinary training loop."""
    torch.manual_seed(0)
    # Attention stays as it was pretrained: fitted to 16 bits it would no longer be at home among 128.
    for layer in model.model.layers:
        layer.self_attn.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    model.train()
    for step in range(1, steps + 1):
        bits, answers = make_batch(32, length)
        logits = model(input_ids=bits, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # links need it
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"  step {step}: loss {loss.item():.3f}", flush=True)


@torch.inference_mode()
def test(model: PreTrainedModel, length: int) -> torch.Tensor:
    """Share of right answers after 1, 2, ... bits of 256 new sequences, [length]."""
    torch.manual_seed(1)
    bits, answers = make_batch(256, length)
    model.eval()
    return (model(input_ids=bits, use_cache=False).logits.argmax(-1) == answers).float().mean(0)


def plot(curves: dict[str, torch.Tensor], length: int, path: Path) -> None:
    """Accuracy against length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.8), layout="constrained")
    for (name, curve), colour in zip(curves.items(), ("#8a8a8a", "#1f6f9e")):
        axes.plot(range(1, len(curve) + 1), curve, color=colour, label=name)
    axes.axvspan(0.5, length, color="#eeeeee", zorder=0)
    axes.text(length / 2, 0.32, "trained", ha="center", color="#777777")
    axes.axhline(0.5, color="#bbbbbb", linewidth=0.8, linestyle="--")
    axes.set(xlabel="bits read", ylabel="accuracy", ylim=(0.3, 1.04), xlim=(0.5, max(map(len, curves.values()))))
    axes.set_title("Parity, far beyond the trained length", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(
    model: Annotated[str | None, typer.Option(help="Model to start from. [default: a small Llama]")] = None,
    links: Annotated[str, typer.Option(help="dense, cascade, all or sparse.")] = "dense",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of 32 sequences.")] = 300,
    length: Annotated[
        int, typer.Option(min=2, help="Bits of a training sequence; tested on eight times as many.")
    ] = 16,
    learning_rate: Annotated[float, typer.Option(help="For both models.")] = 2e-3,
    out: Annotated[Path, typer.Option(help="Where the plot and the trained model go.")] = Path("parity"),
) -> None:
    """Train the base and the base with links, compare them at every length, save the plot and the model."""
    require("matplotlib", extra="demo")
    source = model or str(pretrained(0, say=print))
    curves = {}
    for name in ("base", f"TurboConn, {links} links"):
        network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        if name != "base":
            network = patch(network, TurboConnConfig(links=links))
        print(name)
        start = time.perf_counter()
        train(network, steps, length, learning_rate)
        print(f"  {time.perf_counter() - start:.0f} s")
        curves[name] = test(network, 8 * length)
    lengths = sorted({max(1, length // 2), length, 2 * length, 4 * length, 8 * length})
    print("accuracy after bits " + "".join(f"{count:>8}" for count in lengths))
    for name, curve in curves.items():
        print(f"{name:20}" + "".join(f"{curve[count - 1].item():>8.1%}" for count in lengths))
    out.mkdir(parents=True, exist_ok=True)
    plot(curves, length, out / "accuracy.png")
    network.save_pretrained(out / "model")  # loads with trust_remote_code=True where hf_ext is not installed
    print(f"plot: {out / 'accuracy.png'}, model with links: {out / 'model'}")


if __name__ == "__main__":
    typer.run(main)
