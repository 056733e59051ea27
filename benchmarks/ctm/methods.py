"""The merges that are compared: CtM, our other spaces, and peft's `add_weighted_adapter`; and what each kept."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from hf_ext.adapters.ctm import CtMConfig, merge_lora_tensors

__all__ = [
    "METHODS",
    "Factors",
    "Method",
    "kept_energy",
    "merge",
    "merge_by_peft",
    "norm",
    "one_layer_model",
    "read_adapter",
]

# Layer name -> A [r, n] and B [m, r]; the update is B A, scaling included.
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Method:
    """A way to merge.

    Attributes:
        group: "peft", "full", "core", "ctm both" or "ctm auto".
        rule: The combination type, in the names of peft (group "peft") or of CtMConfig.
        beta: Of CtM; not used by others.
        whole: The result is not cut to a rank: what the cut costs.
    """

    group: str
    rule: str
    beta: float = 0.25
    whole: bool = False

    @property
    def thins(self) -> bool:
        """Whether the density matters."""
        return "ties" in self.rule

    @property
    def keeps_rank(self) -> bool:
        """Whether the result has the rank of the adapters: peft's types that work on factors."""
        return self.group == "peft" and not self.rule.endswith("svd")

    def config(self, rank: int, density: float, seed: int) -> CtMConfig:
        """Ours, for a group other than peft's."""
        space, _, sides = self.group.partition(" ")
        return CtMConfig(
            rank=rank,
            combination_type=self.rule,
            space=space,
            sides=sides or "both",
            beta=self.beta,
            density=density,
            seed=seed,
            dtype="float32",
        )


METHODS: dict[str, Method] = {
    "core ties": Method("core", "ties"),
    "CtM ties": Method("ctm both", "ties"),
    "core linear": Method("core", "linear"),
    "CtM linear": Method("ctm both", "linear"),
    "CtM auto, ties": Method("ctm auto", "ties"),
    "core tsv": Method("core", "tsv"),
    "CtM tsv": Method("ctm both", "tsv"),
    "core dare_ties": Method("core", "dare_ties"),
    "CtM dare_ties": Method("ctm both", "dare_ties"),
    "sum, not cut": Method("core", "linear", whole=True),
    "peft linear": Method("peft", "linear"),
    "peft ties": Method("peft", "ties"),
    "peft svd": Method("peft", "svd"),
    "peft ties_svd": Method("peft", "ties_svd"),
    "peft dare_ties_svd": Method("peft", "dare_ties_svd"),
    "full ties": Method("full", "ties"),
    "CtM auto, linear": Method("ctm auto", "linear"),
    "CtM auto, tsv": Method("ctm auto", "tsv"),
    "CtM auto, dare_ties": Method("ctm auto", "dare_ties"),
    "CtM ties, beta 0": Method("ctm both", "ties", beta=0.0),
    "CtM ties, beta 1": Method("ctm both", "ties", beta=1.0),
    "CtM linear, beta 0": Method("ctm both", "linear", beta=0.0),
    "CtM linear, beta 1": Method("ctm both", "linear", beta=1.0),
}


def read_adapter(folder: Path) -> Factors:
    """The factors of a saved LoRA, float32, its scaling lora_alpha / r in B."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / config["r"]
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {}
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            layer = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            found[layer] = (a.float(), tensors[key.replace("lora_A", "lora_B")].float() * scaling)
    return found


def merge(
    method: Method,
    adapters: Sequence[Factors],
    rank: int,
    density: float,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> Factors:
    """One adapter of all, with weights of 1; every adapter has the same layers.

    peft's merges run on models of one layer each: the same arithmetic as on the whole model, without its weights.
    """
    torch.manual_seed(seed)  # the masks of peft's DARE come from torch's own generator
    merged = {}
    for layer in adapters[0]:
        a_list, b_list = zip(*(adapter[layer] for adapter in adapters))
        if method.group == "peft":
            model = one_layer_model(a_list, b_list)
            merged[layer] = merge_by_peft(model, len(a_list), method.rule, rank, density)
        else:
            size = sum(a.shape[0] for a in a_list) if method.whole else rank
            config = method.config(size, density, seed)
            merged[layer] = merge_lora_tensors(a_list, b_list, [1.0] * len(a_list), config, layer)[:2]
        tick()
    return merged


def one_layer_model(a_list: Sequence[torch.Tensor], b_list: Sequence[torch.Tensor]) -> nn.Module:
    """A PeftModel of one linear layer with adapters "0", "1", ..., scaling 1."""
    from peft import LoraConfig, get_peft_model

    (_, n), (m, _) = a_list[0].shape, b_list[0].shape
    base = nn.ModuleDict({"layer": nn.Linear(n, m, bias=False)})
    configs = [LoraConfig(r=a.shape[0], lora_alpha=a.shape[0], target_modules=["layer"]) for a in a_list]
    model = get_peft_model(base, configs[0], adapter_name="0")
    for number, config in enumerate(configs[1:], 1):
        model.add_adapter(str(number), config)
    layer = model.base_model.model["layer"]
    with torch.no_grad():
        for number, (a, b) in enumerate(zip(a_list, b_list)):
            layer.lora_A[str(number)].weight.copy_(a)
            layer.lora_B[str(number)].weight.copy_(b)
    return model


def merge_by_peft(
    model: nn.Module, count: int, rule: str, rank: int, density: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_weighted_adapter` of a model from `one_layer_model`, as its users call it; A and B of the result,
    which the model does not keep.

    Types that work on factors keep the adapters' rank and take no other.
    """
    names = [str(number) for number in range(count)]
    options = {"svd_rank": rank} if rule.endswith("svd") else {}
    if "ties" in rule:
        options["density"] = density
    model.base_model.add_weighted_adapter(names, [1.0] * count, "merged", combination_type=rule, **options)
    layer = model.base_model.model["layer"]
    a, b = layer.lora_A["merged"].weight.detach(), layer.lora_B["merged"].weight.detach()
    b = b * layer.scaling["merged"]
    model.base_model.delete_adapter("merged")
    return a, b


def kept_energy(adapters: Sequence[Factors], merged: Factors) -> list[list[float]]:
    """Per adapter and layer: the share of ||W_t||^2 that lies between the merged B's columns and A's rows.

    From the factors alone, so that it means the same for every method.
    """
    shares: list[list[float]] = [[] for _ in adapters]
    for layer, (a, b) in merged.items():
        left, right = _span(b), _span(a.mT)
        for found, adapter in zip(shares, adapters):
            a_t, b_t = (factor.double() for factor in adapter[layer])
            whole = ((b_t.mT @ b_t) * (a_t @ a_t.mT)).sum()
            kept = ((left.mT @ b_t) @ (a_t @ right)).square().sum()
            found.append((kept / whole).item() if whole > 0 else 1.0)
    return shares


def _span(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis, float64, of what columns span; directions below 1e-6 of the largest are rounding."""
    left, values, _ = torch.linalg.svd(columns.double(), full_matrices=False)
    return left[:, values > 1e-6 * values.max()]


def norm(adapter: Factors) -> float:
    """The Frobenius norm of an adapter's updates, over all layers."""
    total = sum(((b.mT @ b) * (a @ a.mT)).sum().item() for a, b in adapter.values())
    return total**0.5
