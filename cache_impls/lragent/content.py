"""What states belong to: hashes of an adapter's content and of the base weights, never of a name."""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

__all__ = ["Survey", "Watch", "adapter_key", "base_fingerprint", "sampled", "versions"]

# Elements of a base weight that its fingerprint looks at, evenly spaced; smaller tensors are looked at whole.
SAMPLE = 4096


def _bytes(tensor: torch.Tensor) -> memoryview | bytes:
    data = tensor.detach().cpu().contiguous()
    return data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else b""


def _describe(name: str, tensor: torch.Tensor) -> bytes:
    return f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode()


class Survey:
    """One walk over a model: its modules, by path. Everything below is read off it, since walks are what costs.

    Args:
        model: The base model, with peft's layers in it.
    """

    def __init__(self, model: nn.Module):
        self.modules = list(model.named_modules())
        self.tuned = [(path, module) for path, module in self.modules if hasattr(module, "adapter_layer_names")]

    def adapter_tensors(self, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of an adapter, by the module it sits in and its kind; the adapter's name is no part of it."""
        for path, module in self.tuned:
            for kind in module.adapter_layer_names:
                holder = getattr(module, kind, None)
                if holder is None or not hasattr(holder, "keys") or adapter not in holder:
                    continue
                found = holder[adapter]
                if isinstance(found, torch.Tensor):
                    yield f"{path}.{kind}", found
                elif isinstance(found, nn.Module):
                    for name, tensor in found.state_dict(keep_vars=True).items():
                        yield f"{path}.{kind}.{name}", tensor

    def scalings(self, adapter: str) -> list[tuple[str, dict[str, float]]]:
        """Where the scaling of an adapter is kept, by module."""
        return [
            (path, module.scaling)
            for path, module in self.tuned
            if isinstance(getattr(module, "scaling", None), dict) and adapter in module.scaling
        ]

    def base_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers of the base model, by their names without peft."""
        for path, module in self.modules:
            parts = path.split(".")
            if any(part.startswith("lora_") or part == "modules_to_save" for part in parts):
                continue
            path = ".".join(part for part in parts if part not in ("base_layer", "original_module"))
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and not name.startswith("lora_"):
                    yield f"{path}.{name}", tensor

    def wrapped_weights(self) -> list[torch.Tensor]:
        """Base weights under adapters, which peft may merge into."""
        bases = [getattr(module, "base_layer", getattr(module, "original_module", None)) for _, module in self.tuned]
        weights = [getattr(base, "weight", None) for base in bases]
        return [weight for weight in weights if isinstance(weight, torch.Tensor)]


def adapter_key(survey: Survey, adapter: str, base: str) -> str:
    """Hash of all that decides an agent's states beside the tokens: 32 hex digits.

    Covers every element of every tensor of the adapter (not only of cached projections: the states of a layer depend
    on all layers below), its scaling in every module, and the fingerprint of the base weights.

    Args:
        survey: Of the base model.
        adapter: The adapter's name, which is not hashed.
        base: What `base_fingerprint` gave.
    """
    digest = hashlib.sha256(base.encode())
    for name, tensor in survey.adapter_tensors(adapter):
        digest.update(_describe(name, tensor))
        digest.update(_bytes(tensor))
    for path, scaling in survey.scalings(adapter):
        digest.update(f"{path}|{float(scaling[adapter])!r}|".encode())
    return digest.hexdigest()[:32]


def _spaced(tensor: torch.Tensor, count: int) -> torch.Tensor:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    return flat if len(flat) <= count else flat[:: max(1, len(flat) // count)][:count]


def base_fingerprint(survey: Survey) -> str:
    """Hash of the base weights: names, shapes, dtypes, and up to 4,096 evenly spaced elements of each tensor."""
    digest = hashlib.sha256()
    for name, tensor in survey.base_tensors():
        digest.update(_describe(name, tensor))
        digest.update(_bytes(_spaced(tensor, SAMPLE)))
    return digest.hexdigest()[:32]


def versions(tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Where tensors lie and how often they were written to: cheap, and blind to writes through `.data`."""
    return tuple((t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors)


class Watch:
    """Tells, at the price of a step's bookkeeping, whether an adapter was written to since this was made.

    Args:
        survey: Of the base model.
        adapter: The adapter.
    """

    def __init__(self, survey: Survey, adapter: str):
        self.adapter = adapter
        self.tensors = [tensor for _, tensor in survey.adapter_tensors(adapter)]
        self.scalings = [scaling for _, scaling in survey.scalings(adapter)]
        self.seen = self._look()

    def _look(self) -> tuple:
        return versions(self.tensors), [scaling.get(self.adapter) for scaling in self.scalings]

    def changed(self) -> bool:
        """Whether it was, as far as version counters tell; the next `agent()` hashes every element."""
        return self._look() != self.seen


def sampled(tensors: Iterable[torch.Tensor]) -> bytes:
    """A few elements of each tensor: tells of writes through `.data`, such as peft's merging."""
    return b"".join(bytes(_bytes(_spaced(tensor, 16))) for tensor in tensors)
