"""The mathematics of one layer: shared subspaces of LoRA adapters, and a merge inside them.

Adapter t of a layer is the update W_t = s_t B_t A_t, with B_t [m, r_t] and A_t [r_t, n]; R = sum_t r_t. Formulas are
those of *Compress then Merge* (arXiv 2606.03723), step numbers those of the card. Nothing here makes an m x n matrix,
except for `space="full"`, the peer that does so by definition.

Tall matrices are factored in float32 (float64 if any factor is float64); what is left, [k, r_t] with k <= R, is small
and in float64, so that Gram matrices lose no digits. A core M_t = L_t N_t^T [k_B, k_A] is kept as its two factors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .config import CtMConfig
from .report import LayerReport, effective_rank
from .rules import apply_rule

__all__ = [
    "Cores",
    "coordinates",
    "core_spaces",
    "hooi",
    "hosvd",
    "merge_lora_tensors",
    "principal_axes",
    "projected_energy",
    "rescaling",
    "split_product",
]

AUTO_SHARE = 0.9  # sides="auto" takes "both" where it keeps this share of what the better single side keeps


@dataclass(frozen=True)
class Cores:
    """Adapters of a layer in coordinates of the spaces that they span: W_t = left @ L_t @ N_t^T @ right^T, exactly.

    Attributes:
        left: [m, k_B], orthonormal columns.
        right: [n, k_A], orthonormal columns.
        lefts: L_t [k_B, r_t], float64, one per adapter.
        rights: N_t [k_A, r_t], float64.
    """

    left: torch.Tensor
    right: torch.Tensor
    lefts: list[torch.Tensor]
    rights: list[torch.Tensor]

    def norms(self) -> list[float]:
        """f_t = ||W_t||, the Frobenius norms."""
        pairs = zip(self.lefts, self.rights)
        return [math.sqrt(max(0.0, float(((a.mT @ a) * (b.mT @ b)).sum()))) for a, b in pairs]


def core_spaces(a_list: Sequence[torch.Tensor], b_list: Sequence[torch.Tensor]) -> Cores:
    """Steps 1 and 2: orthonormal bases of all columns of the B_t and rows of the A_t, and the adapters in them.

    The bases have k_B = min(m, R) and k_A = min(n, R) columns and lose nothing.
    """
    ranks = [a.shape[0] for a in a_list]
    left, left_factor = torch.linalg.qr(torch.cat(list(b_list), 1))
    right, right_factor = torch.linalg.qr(torch.cat(list(a_list), 0).mT)
    return Cores(left, right, list(left_factor.double().split(ranks, 1)), list(right_factor.double().split(ranks, 1)))


def rescaling(norms: Sequence[float], beta: float) -> list[float]:
    """Step 3: factors that take norms f_t to beta f_t + (1 - beta) mean(f). Zero norms stay out of the mean."""
    live = [norm for norm in norms if norm > 0]
    mean = math.fsum(live) / max(1, len(live))
    return [0.0 if norm == 0 else beta + (1 - beta) * mean / norm for norm in norms]


def principal_axes(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvectors [k_B, k_B] of sum_t X_t X_t^T and [k_A, k_A] of sum_t X_t^T X_t, X_t = L_t N_t^T, largest first.

    Unlike the columns of a QR factorisation they depend on the updates alone, not on how they are factored.
    """
    return _axes(lefts, rights), _axes(rights, lefts)


def hosvd(
    lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor], rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `rank` principal axes of each side: the start of the sweeps, [k_B, r] and [k_A, r]."""
    left, right = principal_axes(lefts, rights)
    return left[:, :rank].contiguous(), right[:, :rank].contiguous()


def projected_energy(
    lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor], left: torch.Tensor, right: torch.Tensor
) -> list[float]:
    """||U^T X_t V||^2 for each adapter."""
    return [float(((left.mT @ a) @ (right.mT @ b).mT).square().sum()) for a, b in zip(lefts, rights)]


def hooi(
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    total: float,
    max_iter: int = 100,
    tol: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Step 4: U [k_B, r] and V [k_A, r] that maximise J = sum_t ||U^T X_t V||^2, by alternating eigenvectors.

    Args:
        lefts, rights: factors of X_t = L_t N_t^T.
        left, right: where to start, orthonormal columns.
        total: sum_t ||X_t||^2.
        max_iter: most sweeps.
        tol: a sweep that lowers sqrt(1 - J / total) by less is the last.

    Returns:
        U, V, and J at the start and after each sweep, which never falls. The columns are ordered eigenvectors for the
        final pair of subspaces, so that they do not depend on where the search came from.
    """
    rank = left.shape[1]
    history = [math.fsum(projected_energy(lefts, rights, left, right))]
    for _ in range(max_iter):
        left = _axes(lefts, [right.mT @ b for b in rights], rank)
        right = _axes(rights, [left.mT @ a for a in lefts], rank)
        history.append(math.fsum(projected_energy(lefts, rights, left, right)))
        if _residual(history[-2], total) - _residual(history[-1], total) < tol:
            break
    inner_lefts, inner_rights = [left.mT @ a for a in lefts], [right.mT @ b for b in rights]
    turn_left, turn_right = principal_axes(inner_lefts, inner_rights)
    return left @ turn_left, right @ turn_right, history


def coordinates(cores: Cores, left: torch.Tensor, right: torch.Tensor) -> list[torch.Tensor]:
    """Step 5: C_t = U^T M_t V, of the adapters as they are."""
    return [(left.mT @ a) @ (right.mT @ b).mT for a, b in zip(cores.lefts, cores.rights)]


def split_product(
    merged: torch.Tensor, left: torch.Tensor, right: torch.Tensor, rank: int, factor: str = "balanced"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step 6: factors of the best rank-`rank` approximation of U C V^T.

    Args:
        merged: C [p, q], float64.
        left, right: U [m, p] and V [n, q], orthonormal columns.
        rank: at most this many columns.
        factor: "balanced" or "left".

    Returns:
        A [r, n], B [m, r], the singular values [r], and the singular vectors of C, [p, r] and [q, r]. The largest
        entry of each column of B is positive.
    """
    p, values, q = torch.linalg.svd(merged, full_matrices=False)
    p, values, q = p[:, :rank], values[:rank], q[:rank].mT
    b, a = left @ p.to(left.dtype), right @ q.to(right.dtype)
    largest = b.gather(0, b.abs().argmax(0, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(b.dtype)
    roots = values.to(b.dtype)
    if factor == "balanced":
        roots = roots.sqrt()
        a = a * roots
    return (a * signs).mT, b * roots * signs, values, p, q


def merge_lora_tensors(
    A_list: Sequence[torch.Tensor],
    B_list: Sequence[torch.Tensor],
    weights: Sequence[float],
    config: CtMConfig | None = None,
    layer_name: str = "",
    *,
    scalings: Sequence[float] | None = None,
    rank: int | None = None,
    adapters: Sequence[str] | None = None,
    indices: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, LayerReport]:
    """Merge the adapters of one layer into one pair of factors.

    Args:
        A_list: A_t [r_t, n], any float dtype, all on one device.
        B_list: B_t [m, r_t].
        weights: w_t. An adapter of weight 0 is left out, as if it had not been given.
        config: default `CtMConfig()`.
        layer_name: for error messages, and for the masks of the `dare` rules.
        scalings: s_t, by which each product is multiplied; default 1 each.
        rank: rank of the result; default `config.rank`, and if that is None the largest r_t.
        adapters: names for the report; default "0", "1", ...
        indices: place of each adapter in the user's list, for the masks; default 0, 1, ...

    Returns:
        A [r, n] and B [m, r], contiguous, padded with zeros to r = `rank`, in the configuration's dtype (default that
        of the first A): the merged update is B A, with a scaling of 1. Then the figures.

    Raises:
        ValueError: numbers of arguments that differ, shapes that do not fit, entries that are not finite (before or
            after the merge), no adapter with a weight.
    """
    config = CtMConfig() if config is None else config
    count = len(A_list)
    names = [str(t) for t in range(count)] if adapters is None else list(adapters)
    places = list(range(count)) if indices is None else list(indices)
    scalings = [1.0] * count if scalings is None else list(scalings)
    given = {"A_list": A_list, "B_list": B_list, "weights": weights, "scalings": scalings}
    lengths = {name: len(values) for name, values in (given | {"adapters": names, "indices": places}).items()}
    if not count or len(set(lengths.values())) > 1:
        raise ValueError(f"layer {layer_name!r}: one entry per adapter is needed in each list, got {lengths}")
    if rank is not None and rank < 1:
        raise ValueError(f"`rank` must be at least 1, got {rank}")
    live = [t for t in range(count) if weights[t] != 0]
    if not live:
        raise ValueError(f"layer {layer_name!r}: every weight is 0, so there is nothing to merge")
    dtype = A_list[0].dtype if config.dtype is None else getattr(torch, config.dtype)
    _check_factors(A_list, B_list, names, layer_name)

    pick = [list(values) for values in (A_list, B_list, weights, scalings, names, places)]
    a_list, b_list, weights, scalings, names, places = ([values[t] for t in live] for values in pick)
    wide = torch.float64 if any(x.dtype == torch.float64 for x in (*a_list, *b_list)) else torch.float32
    a_list = [a.detach().to(wide) for a in a_list]
    b_list = [b.detach().to(wide) * s for b, s in zip(b_list, scalings)]
    if rank is None:
        rank = config.rank or max(a.shape[0] for a in a_list)

    if len(a_list) == 1:
        a, b, facts = _keep_one(a_list[0], b_list[0], weights[0] * config.scaling_coeff, rank, config)
    elif config.space == "full":
        a, b, facts = _merge_full(a_list, b_list, weights, rank, config, layer_name, places)
    else:
        a, b, facts = _merge_in_cores(a_list, b_list, weights, rank, config, layer_name, places)

    a, b = _pad(a.to(dtype), rank, 0), _pad(b.to(dtype), rank, 1)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError(
            f"layer {layer_name!r}: the merged factors are not finite in {str(dtype).removeprefix('torch.')}; pass "
            "dtype='float32' if that is wider, or smaller weights"
        )
    report = LayerReport(
        layer=layer_name,
        shape=(b.shape[0], a.shape[1]),
        adapters=tuple(names),
        ranks=tuple(x.shape[0] for x in a_list),
        **facts,
    )
    return a, b, report


# --- the spaces ----------------------------------------------------------------------------------------------------


def _merge_in_cores(
    a_list: list[torch.Tensor],
    b_list: list[torch.Tensor],
    weights: list[float],
    rank: int,
    config: CtMConfig,
    layer_name: str,
    places: list[int],
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    cores = core_spaces(a_list, b_list)
    norms = cores.norms()
    lossless = rank >= min(cores.left.shape[1], cores.right.shape[1])
    if config.space == "core" or lossless:
        # Nothing to compress before the merge: the rule works on whole cores, in axes that the updates alone fix.
        left, right = principal_axes(cores.lefts, cores.rights)
        found = {"sides": "none", "sweeps": 0, "residual": 0.0}
    else:
        left, right, found = _shared_subspaces(cores, norms, weights, rank, config)
    merged = apply_rule(coordinates(cores, left, right), weights, config, layer_name, places, rank)
    wide = cores.left.dtype
    lifted_left, lifted_right = cores.left @ left.to(wide), cores.right @ right.to(wide)
    a, b, values, p, q = split_product(merged, lifted_left, lifted_right, rank, config.factor)
    if config.space == "core" and not lossless:
        left, right = left @ p, right @ q  # what the cut left over
        found["sides"] = "both"
        found["residual"] = _residual_of(projected_energy(cores.lefts, cores.rights, left, right), norms)
    kept = _shares(projected_energy(cores.lefts, cores.rights, left, right), norms)
    return a, b, _facts(norms, kept, values, found)


def _shared_subspaces(
    cores: Cores, norms: list[float], weights: list[float], rank: int, config: CtMConfig
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """U and V of step 4 in the bases of `cores`, [k_B, r] and [k_A, r]; a side left whole has a full basis."""
    factors = rescaling(norms, config.beta)
    if config.weight_subspace:
        factors = [factor * abs(weight) for factor, weight in zip(factors, weights)]
    lefts = [a * factor for a, factor in zip(cores.lefts, factors)]
    rights = cores.rights
    total = math.fsum((factor * norm) ** 2 for factor, norm in zip(factors, norms))
    axes_left, axes_right = principal_axes(lefts, rights)

    def one_sided(side: str) -> tuple[torch.Tensor, torch.Tensor, dict]:
        # The best subspace of one side alone is the leading axes of that side: no sweeps.
        left = axes_left[:, :rank] if side == "left" else axes_left
        right = axes_right[:, :rank] if side == "right" else axes_right
        energy = math.fsum(projected_energy(lefts, rights, left, right))
        return left, right, {"sides": side, "sweeps": 0, "residual": _residual(energy, total)}

    def two_sided() -> tuple[torch.Tensor, torch.Tensor, dict]:
        start = axes_left[:, :rank].contiguous(), axes_right[:, :rank].contiguous()
        left, right, history = hooi(lefts, rights, *start, total=total, max_iter=config.max_iter, tol=config.tol)
        found = {"sides": "both", "sweeps": len(history) - 1, "residual": _residual(history[-1], total)}
        return left, right, found

    if config.sides == "both":
        return two_sided()
    if config.sides in ("left", "right"):
        return one_sided(config.sides)
    candidates = [two_sided(), one_sided("left"), one_sided("right")]
    means = []
    for left, right, _ in candidates:
        shares = _shares(projected_energy(cores.lefts, rights, left, right), norms)
        means.append(math.fsum(shares) / len(shares))
    if means[0] >= AUTO_SHARE * max(means[1:]):
        return candidates[0]
    return candidates[1] if means[1] >= means[2] else candidates[2]


def _keep_one(
    a: torch.Tensor, b: torch.Tensor, weight: float, rank: int, config: CtMConfig
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """A layer that one adapter alone touches: there is nothing to merge, it is kept, cut to the rank if need be."""
    cores = core_spaces([a], [b])
    norms = cores.norms()
    core = cores.lefts[0] @ cores.rights[0].mT
    if a.shape[0] <= rank:
        values = torch.linalg.svdvals(core)
        facts = _facts(norms, [1.0], values * abs(weight), {"sides": "none", "sweeps": 0, "residual": 0.0})
        return a, b * weight, facts | {"rank": a.shape[0]}
    new_a, new_b, values, p, q = split_product(core * weight, cores.left, cores.right, rank, config.factor)
    energy = projected_energy(cores.lefts, cores.rights, p, q)
    found = {"sides": "both", "sweeps": 0, "residual": _residual_of(energy, norms)}
    return new_a, new_b, _facts(norms, _shares(energy, norms), values, found)


def _merge_full(
    a_list: list[torch.Tensor],
    b_list: list[torch.Tensor],
    weights: list[float],
    rank: int,
    config: CtMConfig,
    layer_name: str,
    places: list[int],
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """The peer: the rule on dense updates, then an SVD."""
    merged = apply_rule([b @ a for a, b in zip(a_list, b_list)], weights, config, layer_name, places, rank)
    left, values, right = torch.linalg.svd(merged, full_matrices=False)
    left, values, right = left[:, :rank], values[:rank], right[:rank].mT
    a, b, *_ = split_product(torch.diag(values), left, right, rank, config.factor)
    norms = core_spaces(a_list, b_list).norms()
    energy = [float(((left.mT @ b_t) @ (a_t @ right)).square().sum()) for a_t, b_t in zip(a_list, b_list)]
    found = {"sides": "both", "sweeps": 0, "residual": _residual_of(energy, norms)}
    return a, b, _facts(norms, _shares(energy, norms), values, found)


# --- their parts ---------------------------------------------------------------------------------------------------


def _axes(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor], rank: int | None = None) -> torch.Tensor:
    """Leading eigenvectors of sum_t L_t (N_t^T N_t) L_t^T, largest first."""
    gram = sum(a @ (b.mT @ b) @ a.mT for a, b in zip(lefts, rights))
    vectors = torch.linalg.eigh(gram).eigenvectors.flip(1)
    return vectors if rank is None else vectors[:, :rank].contiguous()


def _residual(energy: float, total: float) -> float:
    return math.sqrt(max(0.0, 1 - energy / total)) if total > 0 else 0.0


def _residual_of(energy: Sequence[float], norms: Sequence[float]) -> float:
    return _residual(math.fsum(energy), math.fsum(norm**2 for norm in norms))


def _shares(energy: Sequence[float], norms: Sequence[float]) -> list[float]:
    return [1.0 if norm == 0 else min(1.0, part / norm**2) for part, norm in zip(energy, norms)]


def _facts(norms: list[float], kept: list[float], values: torch.Tensor, found: dict) -> dict:
    return {
        "norms": tuple(norms),
        "retained_energy": tuple(kept),
        "rank": len(values),
        "effective_rank": effective_rank(values.tolist()),
        **found,
    }


def _pad(tensor: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    if tensor.shape[dim] < size:
        shape = list(tensor.shape)
        shape[dim] = size - shape[dim]
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return tensor.contiguous()


def _check_factors(
    a_list: Sequence[torch.Tensor], b_list: Sequence[torch.Tensor], names: Sequence[str], layer: str
) -> None:
    for a, b, name in zip(a_list, b_list, names):
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise ValueError(
                f"layer {layer!r}: the factors of adapter {name!r} do not fit, A {tuple(a.shape)} and B "
                f"{tuple(b.shape)}; they must be [r, n] and [m, r]"
            )
        for letter, tensor in (("A", a), ("B", b)):
            if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                raise ValueError(
                    f"layer {layer!r}: {letter} of adapter {name!r} is {str(tensor.dtype).removeprefix('torch.')}; "
                    "adapters of float32, float16, bfloat16 or float64 can be merged"
                )
            if not tensor.isfinite().all():
                raise ValueError(f"layer {layer!r}: {letter} of adapter {name!r} has entries that are not finite")
    shapes = {name: (b.shape[0], a.shape[1]) for a, b, name in zip(a_list, b_list, names)}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape[0]} x {shape[1]}" for name, shape in shapes.items())
        raise ValueError(
            f"layer {layer!r}: the adapters' updates differ in shape ({listed}); they are not of one base model"
        )
