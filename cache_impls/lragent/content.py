"""What states belong to: hashes of an adapter's content and of the base weights, never of a name."""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

__all__ = ["adapter_key", "adapter_tensors", "base_fingerprint", "base_tensors", "sampled", "versions"]

# Elements of a base weight that its fingerprint looks at, evenly spaced; smaller tensors are looked at whole.
SAMPLE = 4096


def _bytes(tensor: torch.Tensor) -> memoryview | bytes:
    data = tensor.detach().cpu().contiguous()
    return data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else b""


def _describe(name: str, tensor: torch.Tensor) -> bytes:
    return f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode()


def adapter_tensors(model: nn.Module, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of an adapter, by the module it sits in and its kind; the adapter's name is no part of it."""
    for path, module in model.named_modules():
        for kind in getattr(module, "adapter_layer_names", ()):
            holder = getattr(module, kind, None)
            if holder is None or not hasattr(holder, "keys") or adapter not in holder.keys():
                continue
            found = holder[adapter]
            if isinstance(found, torch.Tensor):
                yield f"{path}.{kind}", found
            elif isinstance(found, nn.Module):
                for name, tensor in found.state_dict(keep_vars=True).items():
                    yield f"{path}.{kind}.{name}", tensor


def adapter_scalings(model: nn.Module, adapter: str) -> list[tuple[str, float]]:
    """The scaling of an adapter in every module."""
    return [
        (path, float(module.scaling[adapter]))
        for path, module in model.named_modules()
        if isinstance(getattr(module, "scaling", None), dict) and adapter in module.scaling
    ]


def adapter_key(model: nn.Module, adapter: str, base: str) -> str:
    """Hash of all that decides an agent's states beside the tokens: 32 hex digits.

    Covers every element of every tensor of the adapter (not only of cached projections: the states of a layer depend
    on all layers below), its scaling in every module, and the fingerprint of the base weights.

    Args:
        model: The base model, with peft's layers in it.
        adapter: The adapter's name, which is not hashed.
        base: What `base_fingerprint` gave.
    """
    digest = hashlib.sha256(base.encode())
    for name, tensor in adapter_tensors(model, adapter):
        digest.update(_describe(name, tensor))
        digest.update(_bytes(tensor))
    for path, scaling in adapter_scalings(model, adapter):
        digest.update(f"{path}|{scaling!r}|".encode())
    return digest.hexdigest()[:32]


def base_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of the base model, by their names without peft."""
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        parts = name.split(".")
        if any(part.startswith("lora_") or part == "modules_to_save" for part in parts):
            continue
        yield ".".join(part for part in parts if part not in ("base_layer", "original_module")), tensor


def _spaced(tensor: torch.Tensor, count: int) -> torch.Tensor:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    return flat if len(flat) <= count else flat[:: max(1, len(flat) // count)][:count]


def base_fingerprint(model: nn.Module) -> str:
    """Hash of the base weights: names, shapes, dtypes, and up to 4,096 evenly spaced elements of each tensor."""
    digest = hashlib.sha256()
    for name, tensor in base_tensors(model):
        digest.update(_describe(name, tensor))
        digest.update(_bytes(_spaced(tensor, SAMPLE)))
    return digest.hexdigest()[:32]


def versions(tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Where tensors lie and how often they were written to: cheap, and blind to writes through `.data`."""
    return tuple((t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors)


def sampled(tensors: Iterable[torch.Tensor]) -> bytes:
    """A few elements of each tensor: tells of writes through `.data`, such as peft's merging."""
    return b"".join(bytes(_bytes(_spaced(tensor, 16))) for tensor in tensors)
