"""Helpers for training: a learning rate of the links' own, and Jacobi's error in the log."""

from typing import Any

from torch import nn
from transformers import TrainerCallback


def parameter_groups(
    model: nn.Module, learning_rate: float, link_lr_scale: float = 1.0, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, the links with a learning rate of their own.

    Weight decay is left off biases, norms and gates, as `Trainer` does. Trained links make the model recurrent, which
    stands lower learning rates than the base model does.

    Args:
        model: A patched model, with or without adapters around it.
        learning_rate: Of everything else.
        link_lr_scale: Learning rate of the links as a multiple of that; above 0.
        weight_decay: Of weights with at least two dimensions.

    Returns:
        Groups for `torch.optim.AdamW(...)`; only parameters that require gradients, empty groups left out.

    Raises:
        ValueError: No trainable link in the model, or a scale that is not above 0.
    """
    if not link_lr_scale > 0:
        raise ValueError(f"link_lr_scale is {link_lr_scale!r}; it must be above 0")
    found: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found.setdefault(("turbo_links" in name.split("."), parameter.ndim >= 2), []).append(parameter)
    if not any(link for link, _ in found):
        raise ValueError(
            f"{type(model).__name__} has no trainable links: patch it, and with peft name them in the adapter's "
            "configuration, modules_to_save=['turbo_links']"
        )
    return [
        {
            "params": parameters,
            "lr": learning_rate * (link_lr_scale if link else 1.0),
            "weight_decay": weight_decay if decays else 0.0,
        }
        for (link, decays), parameters in found.items()
    ]


class JacobiGapCallback(TrainerCallback):
    """Adds `turbo/jacobi_gap` to what `Trainer` logs, once the model has measured it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, model: Any = None, **kwargs: Any):
        """Put the last measured error into the logged values."""
        for module in model.modules() if model is not None and logs is not None else ():
            gap = getattr(module, "jacobi_gap", None) if hasattr(module, "turbo_run") else None
            if gap is not None:
                logs["turbo/jacobi_gap"] = gap
                state.log_history[-1]["turbo/jacobi_gap"] = gap
