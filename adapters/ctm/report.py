"""What a merge kept: figures per layer and adapter."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from .config import CtMConfig

__all__ = ["CtMReport", "LayerReport"]

LOW_ENERGY = 0.3  # below this an adapter is nearly orthogonal to the shared subspaces
GOOD_ENERGY = 0.7  # from here on the pilot study found the shared subspaces worth their price
UNEQUAL_NORMS = 2.0  # ratio of norms from which a cut of the sum neglects the smaller adapters


@dataclass(frozen=True)
class LayerReport:
    """One layer of a merge. Lists have an entry per adapter that touches the layer.

    Attributes:
        layer: Name of the layer in the base model.
        shape: (m, n): of the dense update.
        adapters: The adapters' names.
        ranks: Their ranks here.
        norms: f_t, the Frobenius norm of each update, in units of the base weight.
        retained_energy: e_t, the share of each update's squared norm that lies in the subspaces of the result (of
            "both" sides or one); 1 for an update that is zero.
        rank: Rank of the result before padding, at most.
        effective_rank: exp of the entropy of the result's normalised singular values.
        sides: "both", "left" or "right": what was compressed; "none" where nothing had to be.
        sweeps: Sweeps of the subspace search.
        residual: Relative residual of the (rescaled) adapters outside the subspaces, in [0, 1].
    """

    layer: str
    shape: tuple[int, int]
    adapters: tuple[str, ...]
    ranks: tuple[int, ...]
    norms: tuple[float, ...]
    retained_energy: tuple[float, ...]
    rank: int
    effective_rank: float
    sides: str
    sweeps: int
    residual: float

    @property
    def cosines(self) -> tuple[float, ...]:
        """Cosine between each update and its projection: the root of the energy kept."""
        return tuple(math.sqrt(share) for share in self.retained_energy)


@dataclass
class CtMReport:
    """What a whole merge kept.

    Attributes:
        config: The configuration it was made with.
        adapters: Names of the adapters, in the order given.
        weights: Their weights.
        rank: Rank of the result.
        layers: One entry per layer.
        left_out: Adapters of weight 0, which took no part.
        output: Folder or adapter name of the result.
    """

    config: CtMConfig
    adapters: list[str]
    weights: list[float]
    rank: int
    layers: list[LayerReport] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def retained_energy(self) -> dict[str, dict[str, float]]:
        """adapter -> layer -> share of the update's squared norm that the result's subspaces hold."""
        return self._by_adapter("retained_energy")

    @property
    def norms(self) -> dict[str, dict[str, float]]:
        """adapter -> layer -> Frobenius norm of the update."""
        return self._by_adapter("norms")

    def mean_energy(self, adapter: str) -> float:
        """Mean over an adapter's layers of the energy kept; 1 for an adapter that has none."""
        return fmean(self.retained_energy[adapter].values() or [1.0])

    def min_energy(self, adapter: str) -> float:
        """The least over an adapter's layers of the energy kept; 1 for an adapter that has none."""
        return min(self.retained_energy[adapter].values(), default=1.0)

    def norm(self, adapter: str) -> float:
        """Frobenius norm of an adapter over all of its layers."""
        return math.sqrt(sum(norm**2 for norm in self.norms[adapter].values()))

    @property
    def weakest(self) -> str:
        """The adapter that keeps the least, by `mean_energy`."""
        return min(self.adapters, key=self.mean_energy)

    @property
    def warning(self) -> str | None:
        """A sentence where an adapter keeps less than 0.3 of its energy, else None."""
        low = [name for name in self.adapters if self.mean_energy(name) < LOW_ENERGY]
        if not low:
            return None
        named = ", ".join(f"{name} ({self.mean_energy(name):.2f})" for name in low)
        return (
            f"less than {LOW_ENERGY} of the energy of {named} is in the merged adapter's subspaces: the adapters are "
            f"nearly orthogonal; raise the rank (now {self.rank})"
            + (", or try sides='auto'" if self.config.space == "ctm" and self.config.sides == "both" else "")
        )

    @property
    def recommended_space(self) -> str:
        """`"ctm"` where the mean kept energy is at least 0.7 or norms differ more than twofold, else `"core"`.

        A rule of thumb from a pilot study, meant for a report of `space="ctm"`: see the card.
        """
        norms = [norm for norm in map(self.norm, self.adapters) if norm > 0]
        unequal = bool(norms) and max(norms) > UNEQUAL_NORMS * min(norms)
        mean = fmean(self.mean_energy(name) for name in self.adapters)
        return "ctm" if mean >= GOOD_ENERGY or unequal else "core"

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON, with a summary per adapter."""
        return {
            "output": self.output,
            "rank": self.rank,
            "config": self.config.to_dict(),
            "adapters": [
                {
                    "name": name,
                    "weight": weight,
                    "layers": len(self.retained_energy[name]),
                    "norm": self.norm(name),
                    "mean_retained_energy": self.mean_energy(name),
                    "min_retained_energy": self.min_energy(name),
                }
                for name, weight in zip(self.adapters, self.weights)
            ],
            "left_out": self.left_out,
            "layers": [asdict(layer) for layer in self.layers],
        }

    def to_json_string(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def _by_adapter(self, name: str) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {adapter: {} for adapter in self.adapters}
        for layer in self.layers:
            for adapter, value in zip(layer.adapters, getattr(layer, name)):
                found[adapter][layer.layer] = value
        return found


def effective_rank(singular_values: Sequence[float]) -> float:
    """Exp of the entropy of the normalised singular values; 0 for a zero matrix."""
    total = sum(singular_values)
    if not total > 0:
        return 0.0
    shares = [value / total for value in singular_values if value > 0]
    return math.exp(-sum(share * math.log(share) for share in shares if share > 0))
