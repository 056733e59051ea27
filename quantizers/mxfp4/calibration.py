"""What a layer's inputs look like: the statistics behind the weighted search."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .experts import PackedExperts, fused_names, is_fused_experts

__all__ = ["collect_channel_stats", "token_batches"]

DEFAULT_LENGTH = 512  # tokens a calibration window
DEFAULT_WINDOWS = 2


def token_batches(
    calibration: Any, tokenizer: Any = None, *, length: int = DEFAULT_LENGTH, windows: int | None = None
) -> Iterator[torch.Tensor]:
    """Token ids ``[1, T]`` from whatever a caller has at hand.

    Args:
        calibration: a tensor of token ids ``[T]`` or ``[B, T]``; or an iterable of such tensors, of lists of ids, of
            strings, or of dataset rows with a ``"text"`` or ``"input_ids"`` field.
        tokenizer: needed for strings.
        length: texts and rows are joined and cut to windows of this many tokens; tensors are taken as they are.
        windows: how many windows of joined text to take, evenly spaced; None takes two.

    Raises:
        ValueError: for text without a tokenizer, rows without a known field, what is no text or ids, or nothing to
            read.
    """
    if isinstance(calibration, torch.Tensor):
        calibration = [calibration]
    if isinstance(calibration, str):
        calibration = [calibration]
    if not isinstance(calibration, Iterable):
        raise ValueError(f"`calibration` must be text, rows or token ids, got {calibration!r}")
    joined: list[int] = []
    tensors = False
    for item in calibration:
        if isinstance(item, dict):
            item = item["input_ids"] if "input_ids" in item else item.get("text")
            if item is None:
                raise ValueError("a row of `calibration` has neither 'input_ids' nor 'text'")
        if isinstance(item, torch.Tensor):
            if item.is_floating_point() or item.dim() == 0:
                raise ValueError(f"token ids of `calibration` must be integers, got {item.dtype} {tuple(item.shape)}")
            if item.numel() == 0:
                continue
            tensors = True
            yield from item.view(-1, item.shape[-1]).split(1)
            continue
        if isinstance(item, str):
            if tokenizer is None:
                raise ValueError("`calibration` holds text, so `tokenizer` is needed")
            item = tokenizer(item, add_special_tokens=False)["input_ids"]
        if not isinstance(item, Iterable):
            raise ValueError(f"`calibration` must hold text, rows or lists of token ids, got {item!r}")
        joined.extend(item)
    if not joined:
        if not tensors:
            raise ValueError("`calibration` is empty")
        return
    ids = torch.tensor(joined)
    if ids.is_floating_point() or ids.dim() != 1:
        raise ValueError(f"token ids of `calibration` must be integers, got {joined[0]!r}")
    windows = DEFAULT_WINDOWS if windows is None else windows
    count = min(windows, max(1, len(ids) // length))
    span = min(length, len(ids))
    for start in torch.linspace(0, len(ids) - span, count).long().tolist():
        yield ids[None, start : start + span]


@torch.no_grad()
def collect_channel_stats(
    model: nn.Module, batches: Iterable[torch.Tensor], modules: list[str] | None = None
) -> dict[str, torch.Tensor]:
    """Mean square of every input channel of a model's linear layers and fused experts, over some tokens.

    Args:
        model: dense, in any dtype; it is run forward, once a batch, in evaluation mode.
        batches: token ids ``[B, T]`` each.
        modules: names of the modules to watch; None watches all that could be converted.

    Returns:
        float32 ``[in_features]`` by module name; for fused experts by parameter name, averaged over the experts'
        tokens. Modules that no token reached are left out.

    Raises:
        ValueError: if a token is not in the model's vocabulary, as when the tokenizer is another model's.
    """
    from .quantizer import linear_shape

    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def add(name: str, x: torch.Tensor) -> None:
        x = x.detach().to(torch.float32).flatten(0, -2)
        if len(x):
            sums[name] = sums.get(name, 0) + x.square().sum(0)
            counts[name] = counts.get(name, 0) + len(x)

    handles = []
    for name, module in model.named_modules():
        if modules is not None and name not in modules:
            continue
        if linear_shape(module) is not None:
            handles.append(module.register_forward_pre_hook(lambda _, args, name=name: add(name, args[0])))
        elif is_fused_experts(module) and not isinstance(module, PackedExperts):
            handles.append(module.register_forward_pre_hook(_expert_hook(name, add), with_kwargs=True))
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    embeddings = getattr(model.get_input_embeddings(), "num_embeddings", None)
    try:
        for batch in batches:
            if embeddings is not None and not 0 <= int(batch.min()) <= int(batch.max()) < embeddings:
                raise ValueError(
                    f"`calibration` has the token {int(batch.max())}, and the model's vocabulary has {embeddings}; "
                    "is the tokenizer that of the model?"
                )
            model(input_ids=batch.to(device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    return {name: total / counts[name] for name, total in sums.items()}


def _expert_hook(name: str, add):
    """Inputs of the two fused weights of an experts module: the first are its tokens, the second are recomputed."""

    def hook(module, args, kwargs):
        hidden_states, top_k_index = (*args, *kwargs.values())[:2]
        first, second = fused_names(module)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= module.num_experts:
                continue
            x = hidden_states[torch.where(top_k_index == expert)[0]]
            add(f"{name}.{first}", x)
            inner = nn.functional.linear(x, getattr(module, first)[expert])
            if module.has_bias:
                inner = inner + getattr(module, f"{first}_bias")[expert]
            add(f"{name}.{second}", module._apply_gate(inner) if module.has_gate else module.act_fn(inner))

    return hook
