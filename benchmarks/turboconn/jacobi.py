"""Error of Jacobi's parallel passes against the exact recurrence, by the number of passes."""

from typing import Any

import torch

from hf_ext.model_patches.turboconn import TurboConnConfig, patch

__all__ = ["errors", "random_links"]


@torch.no_grad()
def errors(model: torch.nn.Module, ids: torch.Tensor, passes: list[int]) -> dict[str, Any]:
    """How far the logits of so many parallel passes are from the exact ones.

    Args:
        model: Patched; its settings and mode are put back.
        ids: [rows, length].
        passes: Numbers of passes.

    Returns:
        For each number: `largest` difference of a logit, the same over the standard deviation of the exact logits
        (`relative`), and `changed`, the share of tokens with another most likely answer.
    """
    settings, training = model.model.turbo_config, model.training
    kept = settings.train_mode, settings.n_iters
    found: dict[str, Any] = {"passes": passes, "largest": [], "relative": [], "changed": []}
    try:
        exact = model.eval()(input_ids=ids, use_cache=False).logits
        model.model.training = True  # evaluation is always exact; the layers' dropout stays off
        for count in passes:
            settings.train_mode, settings.n_iters = "jacobi", count
            logits = model(input_ids=ids, use_cache=False).logits
            largest = (logits - exact).abs().max().item()
            found["largest"].append(largest)
            found["relative"].append(largest / exact.std().item())
            found["changed"].append((logits.argmax(-1) != exact.argmax(-1)).float().mean().item())
    finally:
        settings.train_mode, settings.n_iters = kept
        model.train(training)
    return found


def random_links(model: torch.nn.Module, size: float, seed: int) -> torch.nn.Module:
    """Put dense links on a model, their matrices' entries normal with standard deviation `size`."""
    model = patch(model, TurboConnConfig())
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.model.turbo_links.parameters():
        torch.nn.init.normal_(parameter, std=size, generator=generator)
    return model
