"""The configuration of a merge."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["CtMConfig"]

SPACES = ("ctm", "core", "full")
SIDES = ("both", "left", "right", "auto")
RULE_NAMES = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune", "tsv", "iso")
# Rules that thin the entries out before they combine them.
THINNING = ("ties", "dare_linear", "dare_ties", "magnitude_prune")
# Rules that add the adapters up: with weights of 1 what T adapters share would come out T times as strong.
SUMMING = ("linear", "dare_linear", "magnitude_prune", "iso")
DTYPES = ("float32", "float16", "bfloat16", "float64")
OWN_RULE = "callable:"


@dataclass
class CtMConfig:
    """How adapters are merged into one.

    Args:
        rank (`int`, *optional*):
            Rank of the result, the same in every layer (a layer that needs less is padded with zeros). `None`: the
            largest rank among the adapters.
        combination_type (`str` or callable, defaults to `"ties"`):
            The merge rule, in peft's names where peft has it: `"linear"`, `"ties"`, `"dare_linear"`, `"dare_ties"`,
            `"magnitude_prune"`, `"tsv"` (task singular vectors), `"iso"` (isotropic spectrum), or a function of a list
            of matrices and a list of weights that gives one matrix of their shape. See `rules`.
        space (`str`, defaults to `"ctm"`):
            Where the rule works. `"ctm"`: on the r x r coordinates in subspaces that all adapters share (the paper).
            `"core"`: on the coordinates in everything that the adapters span, then cut to the rank by an SVD.
            `"full"`: on the dense updates, then cut, as peft's `*_svd` types do: slow, and dense.
        beta (`float`, defaults to 0.25):
            How much the adapters' norms count when the subspaces are sought: 1 as they are, so that large adapters
            take the rank; 0 not at all. 0.25 is from the authors' code; the paper finds 0 to 0.75 alike, 1 worse.
        sides (`str`, defaults to `"both"`):
            Which sides are compressed, for `space="ctm"`: `"both"` (the paper), `"left"` or `"right"` alone, which
            keeps more and is enough for the rank, or `"auto"`: per layer `"both"` where its mean kept energy is at
            least 0.9 of that of the better single side.
        density (`float`, *optional*, defaults to 0.5):
            Share of entries that `"ties"` and `"magnitude_prune"` keep by magnitude and the `dare` rules at random, in
            (0, 1]. Other rules do not use it. (Authors: 0.25 to 0.8.)
        ties_density (`float`, *optional*):
            For `"dare_ties"`: also trim to this share of the entries that were kept at random, as the authors do.
            `None`: no trimming, as peft.
        majority_sign_method (`str`, defaults to `"total"`):
            How signs are elected: by the `"total"` of the values or by the `"frequency"` of the signs.
        scaling_coeff (`float`, defaults to 1.0):
            Factor on the result of the rule (the paper's lambda).
        max_iter (`int`, defaults to 100):
            Most sweeps of the subspace search. 0 stops at its start, the HOSVD.
        tol (`float`, defaults to 1e-6):
            A sweep that lowers the relative residual by less than this is the last (from the authors' code).
        seed (`int`, defaults to 0):
            Seed of the `dare` rules. A mask depends on the seed, the layer's name and the adapter's place in the list.
        factor (`str`, defaults to `"balanced"`):
            How the result is split: `"balanced"` gives both factors the roots of the singular values, `"left"` leaves
            A orthonormal.
        weight_subspace (`bool`, defaults to `False`):
            Let the weights' magnitudes count when the subspaces are sought. By default a weight is a wish about the
            result, not about where the knowledge lies.
        dtype (`str`, *optional*):
            Dtype of the result: `"float32"`, `"float16"`, `"bfloat16"` or `"float64"`. `None`: that of the first
            adapter.

    Raises:
        ValueError: for any value that is not listed above.
    """

    rank: int | None = None
    combination_type: str | Callable[..., Any] = "ties"
    space: str = "ctm"
    beta: float = 0.25
    sides: str = "both"
    density: float | None = 0.5
    ties_density: float | None = None
    majority_sign_method: str = "total"
    scaling_coeff: float = 1.0
    max_iter: int = 100
    tol: float = 1e-6
    seed: int = 0
    factor: str = "balanced"
    weight_subspace: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.rank is not None:
            self._check_int("rank", 1)
        if not callable(self.combination_type):
            self._check_choice("combination_type", RULE_NAMES, " or a function of (matrices, weights)")
        self._check_choice("space", SPACES)
        self._check_choice("sides", SIDES)
        self._check_choice("majority_sign_method", ("total", "frequency"))
        self._check_choice("factor", ("balanced", "left"))
        self._check_choice("dtype", (*DTYPES, None))
        self._check_number("beta", 0, 1)
        self._check_number("scaling_coeff", None, None)
        self._check_number("tol", 0, None)
        for name in ("density", "ties_density"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not 0 < value <= 1):
                raise ValueError(f"`{name}` is the share of entries to keep, in (0, 1], got {value!r}")
        self._check_int("max_iter", 0)
        self._check_int("seed", 0)
        if not isinstance(self.weight_subspace, bool):
            raise ValueError(f"`weight_subspace` must be True or False, got {self.weight_subspace!r}")
        if self.combination_type in THINNING and self.density is None:
            raise ValueError(f"`density` is None, but combination_type={self.combination_type!r} needs it, in (0, 1]")
        if self.ties_density is not None and self.combination_type != "dare_ties":
            raise ValueError(
                f"`ties_density` is only used by combination_type='dare_ties', got {self.combination_type!r}; "
                "for 'ties' set `density`"
            )
        if self.sides != "both" and self.space != "ctm":
            raise ValueError(f"`sides={self.sides!r}` is only used with space='ctm', got {self.space!r}")

    @property
    def rule_name(self) -> str:
        """Name of the merge rule; of a function of your own `"callable:module.name"`."""
        rule = self.combination_type
        if isinstance(rule, str):
            return rule
        return f"{OWN_RULE}{getattr(rule, '__module__', '?')}.{getattr(rule, '__qualname__', type(rule).__name__)}"

    def default_weights(self, count: int) -> list[float]:
        """Weights where none are given: 1 / `count` each for rules that add the adapters up, else 1 each.

        `"linear"`, `"dare_linear"`, `"magnitude_prune"` and `"iso"` add up. `"ties"` and `"dare_ties"` average what
        agrees, `"tsv"` takes the adapters' directions apart first; a rule of your own gets ones.
        """
        return [1 / count if self.combination_type in SUMMING else 1.0] * count

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON. Of a rule of your own only the name is kept."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"combination_type": self.rule_name}

    def to_json_string(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CtMConfig":
        """The inverse of `to_dict`.

        Raises:
            ValueError: an unknown key, a value that is not allowed, or a rule of your own, which JSON cannot hold.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown key(s) {', '.join(unknown)} in a CtM configuration; known: {sorted(known)}")
        if str(values.get("combination_type", "")).startswith(OWN_RULE):
            raise ValueError(
                f"combination_type is {values['combination_type']!r}, a function of its author's own, which a file "
                "does not hold; pass the function itself"
            )
        return cls(**values)

    def _check_choice(self, name: str, allowed: tuple, more: str = "") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or value not in allowed:
            choices = ", ".join(repr(entry) for entry in allowed)
            raise ValueError(f"`{name}` must be one of {choices}{more}; got {value!r}")

    def _check_int(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}")

    def _check_number(self, name: str, least: float | None, most: float | None) -> None:
        value = getattr(self, name)
        good = _is_number(value) and (least is None or value >= least) and (most is None or value <= most)
        if not good:
            bounds = "" if least is None else f" of at least {least}" if most is None else f" in [{least}, {most}]"
            raise ValueError(f"`{name}` must be a finite number{bounds}, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
