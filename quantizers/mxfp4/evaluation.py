"""One figure for a quantised model: its perplexity on a text."""

from typing import TYPE_CHECKING, Any

import torch

from .calibration import DEFAULT_LENGTH, token_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["perplexity"]


@torch.no_grad()
def perplexity(
    model: "PreTrainedModel", tokenizer: Any, text: str, *, length: int = DEFAULT_LENGTH, windows: int = 16
) -> float:
    """``exp`` of the mean negative log likelihood (nats) of the next token, over windows evenly spaced in a text.

    Args:
        length: tokens a window; the first of each is not predicted.
        windows: how many, at most.

    Raises:
        ValueError: for a text of fewer than two tokens.
    """
    total, count = 0.0, 0
    for ids in token_batches(text, tokenizer, length=length, windows=windows):
        if ids.shape[1] < 2:
            raise ValueError("the text to evaluate on has fewer than two tokens")
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:].to(logits.device), reduction="sum").item()
        count += ids.shape[1] - 1
    return float(torch.tensor(total / count).exp())
