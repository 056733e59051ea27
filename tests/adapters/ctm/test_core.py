"""The mathematics of a layer, beside brute force in float64 and peft's own merges."""

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_ext.adapters.ctm import CtMConfig, merge_lora_tensors
from hf_ext.adapters.ctm.core import core_spaces, hooi, hosvd, projected_energy, rescaling
from hf_ext.adapters.ctm.rules import RULES, apply_rule

SPACES = ("ctm", "core", "full")


def merge(a, b, weights=None, *, layer="layer", scalings=None, **options):
    config = CtMConfig(**{"combination_type": "linear"} | options)
    return merge_lora_tensors(a, b, weights or [1.0] * len(a), config, layer, scalings=scalings)


def product(a, b, *rest):
    return b.double() @ a.double()


def total(a, b, weights):
    return sum(w * product(x, y) for x, y, w in zip(a, b, weights))


def unit(name: int, size: int = 4) -> torch.Tensor:
    return torch.eye(size)[name]


def subspaces(a, b, rank, beta=0.25, max_iter=100, tol=1e-6):
    """U [m, r], V [n, r], J and sum of squares, of the rescaled adapters."""
    cores = core_spaces(a, b)
    factors = rescaling(cores.norms(), beta)
    lefts = [left * factor for left, factor in zip(cores.lefts, factors)]
    energy = sum((f * n) ** 2 for f, n in zip(factors, cores.norms()))
    start = hosvd(lefts, cores.rights, rank)
    left, right, history = hooi(lefts, cores.rights, *start, total=energy, max_iter=max_iter, tol=tol)
    return cores.left.double() @ left, cores.right.double() @ right, history, energy


# --- what must come out exactly --------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("rule", RULES)
def test_one_adapter_is_kept_as_it_is_by_every_rule(factors, relative_error, rule, space):
    a, b = factors(20, 30, [4])
    for weight in (1.0, 2.0, -1.0):
        found = product(*merge(a, b, [weight], scalings=[0.5], combination_type=rule, space=space))
        assert relative_error(found, weight * 0.5 * product(a[0], b[0])) < 1e-6


def test_one_adapter_of_too_high_a_rank_is_cut_as_well_as_can_be(factors):
    a, b = factors(20, 30, [8])
    new_a, new_b, report = merge(a, b, rank=3)
    values = numpy.linalg.svd(product(a[0], b[0]).numpy(), compute_uv=False)
    error = (product(new_a, new_b) - product(a[0], b[0])).norm()
    assert float(error) == pytest.approx(numpy.sqrt((values[3:] ** 2).sum()), rel=1e-5)
    assert report.retained_energy[0] == pytest.approx((values[:3] ** 2).sum() / (values**2).sum(), rel=1e-5)


@pytest.mark.parametrize("space", SPACES)
def test_with_room_for_all_ranks_the_sum_is_exact(factors, relative_error, space):
    a, b = factors(20, 30, [2, 3, 4])
    weights = [1.0, -0.5, 2.0]
    for rank in (9, 12):
        new_a, new_b, report = merge(a, b, weights, rank=rank, space=space)
        assert new_a.shape == (rank, 30) and new_b.shape == (20, rank)
        assert relative_error(product(new_a, new_b), total(a, b, weights)) < 1e-5
        assert report.retained_energy == pytest.approx([1, 1, 1], abs=1e-5)
        if space != "full":
            assert not new_a[9:].any() and not new_b[:, 9:].any()  # padding


def test_with_room_for_all_ranks_ties_is_ties_on_the_cores(factors, relative_error):
    a, b = factors(20, 30, [2, 3, 4])
    options = {"rank": 9, "combination_type": "ties", "density": 1.0}
    assert relative_error(product(*merge(a, b, **options)), product(*merge(a, b, space="core", **options))) < 1e-6


@pytest.mark.parametrize("beta", [0, 0.25, 1])
def test_adapters_that_share_both_spaces_lose_nothing(relative_error, beta):
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(size, 5, generator=generator)).Q for size in (30, 24))
    inner = [torch.randn(5, 5, generator=generator) * (1 + 9 * t) for t in range(3)]
    a, b = [d @ right.mT for d in inner], [left for _ in inner]
    new_a, new_b, report = merge(a, b, rank=5, beta=beta)
    assert relative_error(product(new_a, new_b), total(a, b, [1, 1, 1])) < 1e-5
    assert report.retained_energy == pytest.approx([1, 1, 1], abs=1e-5)
    assert report.sides == "both" and report.residual < 1e-3


def test_the_full_space_is_pefts_svd_type(factors, relative_error):
    from peft.utils import merge_utils

    a, b = factors(12, 16, [3, 3])
    updates = [product(x, y) for x, y in zip(a, b)]
    for rule, merged in {
        "linear": merge_utils.task_arithmetic(updates, torch.tensor([1.0, 2.0])),
        "ties": merge_utils.ties(updates, torch.tensor([1.0, 2.0]), 0.5),
    }.items():
        u, s, vt = torch.linalg.svd(merged)
        expected = u[:, :3] @ torch.diag(s[:3]) @ vt[:3]
        found = product(*merge(a, b, [1.0, 2.0], rank=3, space="full", combination_type=rule))
        assert relative_error(found, expected) < 1e-5


def test_the_core_space_is_the_dense_merge_for_linear(factors, relative_error):
    a, b = factors(40, 30, [4, 4, 4])
    core, full = (product(*merge(a, b, rank=4, space=space)) for space in ("core", "full"))
    assert relative_error(core, full) < 1e-5


def test_the_core_space_is_the_rule_in_principal_axes(factors, relative_error):
    # In float64, from the dense updates: axes, coordinates, rule, SVD.
    a, b = factors(20, 15, [3, 4], dtype=torch.float64)
    updates = [product(x, y) for x, y in zip(a, b)]
    left = torch.linalg.eigh(sum(w @ w.mT for w in updates)).eigenvectors.flip(1)[:, :7]
    right = torch.linalg.eigh(sum(w.mT @ w for w in updates)).eigenvectors.flip(1)[:, :7]
    config = CtMConfig(combination_type="ties", density=0.4)
    merged = left @ apply_rule([left.mT @ w @ right for w in updates], [1.0, 1.0], config) @ right.mT
    u, s, vt = torch.linalg.svd(merged)
    found = product(*merge(a, b, rank=4, space="core", combination_type="ties", density=0.4))
    assert relative_error(found, u[:, :4] @ torch.diag(s[:4]) @ vt[:4]) < 1e-8


# --- the subspaces ---------------------------------------------------------------------------------------------------


def dense_hooi(updates, rank, beta, sweeps):
    """The method on the dense stack, in numpy, with an SVD per step."""
    norms = numpy.array([numpy.linalg.norm(w) for w in updates])
    stack = [w / f * (beta * f + (1 - beta) * norms.mean()) for w, f in zip(updates, norms)]
    left = numpy.linalg.svd(numpy.hstack(stack))[0][:, :rank]
    right = numpy.linalg.svd(numpy.hstack([x.T for x in stack]))[0][:, :rank]
    energies = [sum(numpy.linalg.norm(left.T @ x @ right) ** 2 for x in stack)]
    for _ in range(sweeps):
        left = numpy.linalg.svd(numpy.hstack([x @ right for x in stack]))[0][:, :rank]
        right = numpy.linalg.svd(numpy.hstack([x.T @ left for x in stack]))[0][:, :rank]
        energies.append(sum(numpy.linalg.norm(left.T @ x @ right) ** 2 for x in stack))
    return left, right, energies, stack


def chordal(one, other):
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    return float((one.shape[1] - (one.mT @ other).square().sum()).clamp(min=0).sqrt())


@pytest.mark.parametrize(("dtype", "distance"), [(torch.float64, 1e-4), (torch.float32, 0.05)])
@pytest.mark.parametrize("beta", [0, 0.25, 1])
def test_the_subspaces_are_those_of_the_dense_stack(factors, dtype, distance, beta):
    a, b = factors(40, 30, [3, 4, 5], dtype=dtype)
    b[2] = b[2] * 4
    left, right, energies, _ = dense_hooi([product(x, y).numpy() for x, y in zip(a, b)], 4, beta, 400)
    found_left, found_right, history, _ = subspaces(a, b, 4, beta, max_iter=400, tol=1e-14)
    assert history[0] == pytest.approx(energies[0], rel=1e-6)
    assert history[-1] == pytest.approx(energies[-1], rel=1e-6)
    assert chordal(found_left, left) < distance and chordal(found_right, right) < distance


def test_the_energy_never_falls_and_is_bounded_by_each_adapters_own(factors):
    for seed in range(5):
        a, b = factors(40, 30, [4, 6, 8], seed)
        _, _, history, _ = subspaces(a, b, 5, beta=0.5, max_iter=60, tol=0)
        assert all(after >= before * (1 - 1e-12) for before, after in zip(history, history[1:]))
        *_, stack = dense_hooi([product(x, y).numpy() for x, y in zip(a, b)], 5, 0.5, 0)
        bound = sum((numpy.linalg.svd(x, compute_uv=False)[:5] ** 2).sum() for x in stack)
        assert history[0] < history[-1] <= bound


def test_they_hold_more_than_the_subspaces_of_the_cut_sum(factors):
    for seed in range(20):
        ranks = [[4, 4, 4], [2, 8, 4]][seed % 2]
        a, b = factors(30, 40, ranks, seed)
        b[0] = b[0] * (1 + seed)
        *_, history, _ = subspaces(a, b, 4, beta=1)
        u, _, vt = numpy.linalg.svd(total(a, b, [1] * 3).numpy())
        cut = sum(numpy.linalg.norm(u[:, :4].T @ product(x, y).numpy() @ vt[:4].T) ** 2 for x, y in zip(a, b))
        assert history[-1] >= cut * (1 - 1e-9)


def test_of_one_adapter_they_hold_the_leading_singular_values(factors):
    a, b = factors(30, 40, [8])
    *_, history, _ = subspaces(a, b, 3, beta=1)
    values = numpy.linalg.svd(product(a[0], b[0]).numpy(), compute_uv=False)
    assert history[-1] == pytest.approx((values[:3] ** 2).sum(), rel=1e-6)  # Eckart and Young


@pytest.mark.parametrize(
    ("beta", "kept", "share"),
    [
        (0, (0, 1, 1), 2 / 3),
        (0.161, (0, 1, 1), None),
        (0.162, (1, 0, 0), None),
        (0.25, (1, 0, 0), 0.5888),
        (1, (1, 0, 0), 0.9804),
    ],
)
def test_worked_numbers_one_large_adapter_against_two_small_ones(beta, kept, share):
    # W_1 = 10 e1 e1', W_2 = W_3 = e2 e2', rank 1. The choice turns at beta = 0.16176.
    a = [unit(0)[None], unit(1)[None], unit(1)[None]]
    b = [10 * unit(0)[:, None], unit(1)[:, None], unit(1)[:, None]]
    new_a, new_b, report = merge(a, b, rank=1, beta=beta)
    expected = 2 * torch.outer(unit(1), unit(1)) if kept[1] else 10 * torch.outer(unit(0), unit(0))
    torch.testing.assert_close(new_b @ new_a, expected)
    assert report.retained_energy == pytest.approx(kept, abs=1e-9)
    if share is not None:
        assert 1 - report.residual**2 == pytest.approx(share, abs=1e-4)
    cut = merge(a, b, rank=1, space="core")[2]
    assert cut.retained_energy == pytest.approx((1, 0, 0), abs=1e-9)


def test_beta_0_does_not_see_how_large_an_adapter_is(factors):
    a, b = factors(30, 40, [4, 4, 4], dtype=torch.float64)
    larger = [b[0] * 100, *b[1:]]
    exact = {"max_iter": 500, "tol": 1e-14}
    for one, other in zip(subspaces(a, b, 4, 0, **exact)[:2], subspaces(a, larger, 4, 0, **exact)[:2]):
        assert chordal(one, other) < 1e-4
    u, _, vt = numpy.linalg.svd(product(a[0], b[0]).numpy())
    left, right, *_ = subspaces(a, larger, 4, 1)
    assert chordal(left, u[:, :4]) < 0.02 and chordal(right, vt[:4].T) < 0.02


def test_weights_count_in_the_subspaces_only_when_asked(factors):
    a, b = factors(30, 40, [4, 4])
    plain, weighted = ({"rank": 4, "weight_subspace": flag} for flag in (False, True))
    even, uneven = merge(a, b, [1, 1], **plain)[2], merge(a, b, [1, 9], **plain)[2]
    assert even.retained_energy == uneven.retained_energy
    assert merge(a, b, [1, 9], **weighted)[2].retained_energy[1] > even.retained_energy[1] + 0.1


def test_a_single_side_keeps_no_less_and_has_the_rank(factors, relative_error):
    for seed in range(5):
        a, b = factors(30, 40, [4, 4, 4], seed)
        both = merge(a, b, rank=4)[2]
        for side in ("left", "right"):
            new_a, new_b, report = merge(a, b, rank=4, sides=side)
            assert sum(report.retained_energy) >= sum(both.retained_energy)
            assert report.sides == side and new_a.shape[0] == 4
            # The best subspace of one side alone: the leading singular vectors of the rescaled updates, side by side.
            *_, stack = dense_hooi([product(x, y).numpy() for x, y in zip(a, b)], 4, 0.25, 0)
            wide = numpy.hstack(stack if side == "left" else [x.T for x in stack])
            basis = numpy.linalg.svd(wide)[0][:, :4]
            projector = torch.from_numpy(basis @ basis.T)
            expected = total(a, b, [1] * 3)
            expected = projector @ expected if side == "left" else expected @ projector
            assert relative_error(product(new_a, new_b), expected) < 1e-5


def test_adapters_of_a_common_left_space_are_merged_exactly_from_the_left(factors, relative_error):
    a, _ = factors(30, 40, [4, 4, 4])
    left = factors(30, 40, [4])[1][0]
    b = [left] * 3
    report = merge(a, b, rank=4)[2]
    assert min(report.retained_energy) < 0.7
    new_a, new_b, report = merge(a, b, rank=4, sides="auto")
    assert report.sides == "left" and min(report.retained_energy) > 1 - 1e-6
    assert relative_error(product(new_a, new_b), total(a, b, [1, 1, 1])) < 1e-5


def test_auto_takes_both_sides_where_little_is_lost(factors):
    a, b = factors(30, 40, [4])
    report = merge([a[0], a[0] + 0.01], [b[0], b[0] * 2], rank=4, sides="auto")[2]
    assert report.sides == "both"


# --- what must not matter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("rule", RULES)
def test_how_an_update_is_factored_does_not_matter(factors, relative_error, rule, space):
    a, b = factors(20, 24, [4, 4, 4])
    generator = torch.Generator().manual_seed(5)
    turns = [torch.linalg.qr(torch.randn(4, 4, generator=generator)).Q * (t + 1) for t in range(3)]
    other_a = [torch.linalg.solve(g, x) for g, x in zip(turns, a)]
    other_b = [x @ g for g, x in zip(turns, b)]
    options = {"rank": 5, "combination_type": rule, "space": space, "tol": 1e-12, "max_iter": 500}
    one, other = (product(*merge(x, y, [1, 2, -0.5], **options)) for x, y in ((a, b), (other_a, other_b)))
    assert relative_error(other, one) < 1e-4


def test_pefts_merges_of_factors_do_depend_on_it(factors, relative_error):
    from peft.utils import merge_utils

    a, b = factors(20, 24, [4, 4])
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(5))).Q
    for rule, options in ((merge_utils.task_arithmetic, ()), (merge_utils.ties, (0.5,))):
        one = [rule(x, torch.ones(2), *options) for x in (a, b)]
        other = [rule(x, torch.ones(2), *options) for x in ([turn.mT @ a[0], a[1]], [b[0] @ turn, b[1]])]
        assert relative_error(product(*other), product(*one)) > 0.5


@pytest.mark.parametrize("space", ["ctm", "core"])
@pytest.mark.parametrize("rule", ["linear", "ties", "magnitude_prune", "tsv", "iso"])
def test_the_order_of_adapters_does_not_matter(factors, relative_error, rule, space):
    a, b = factors(20, 24, [2, 4, 6])
    order, weights = [2, 0, 1], [1.0, 2.0, 0.5]
    options = {"rank": 4, "combination_type": rule, "space": space, "tol": 1e-12, "max_iter": 500}
    one = merge(a, b, weights, **options)
    other = merge([a[t] for t in order], [b[t] for t in order], [weights[t] for t in order], **options)
    assert relative_error(product(*other), product(*one)) < 1e-5
    for t, place in enumerate(order):
        assert other[2].retained_energy[t] == pytest.approx(one[2].retained_energy[place], rel=1e-5)


def test_a_scaling_and_a_larger_factor_are_the_same(factors, relative_error):
    a, b = factors(20, 24, [8, 8])
    one = product(*merge(a, b, rank=8, scalings=[2.0, 1.0]))
    other = product(*merge(a, [b[0] * 2, b[1]], rank=8))
    assert relative_error(one, other) < 1e-6


@pytest.mark.parametrize("space", SPACES)
def test_a_weight_of_0_leaves_an_adapter_out(factors, space):
    a, b = factors(20, 24, [4, 4, 4])
    for rule in RULES:
        options = {"rank": 4, "combination_type": rule, "space": space}
        new_a, new_b, report = merge(a, b, [1.0, 0.0, 2.0], **options)
        config = CtMConfig(**options)
        expected = merge_lora_tensors(
            [a[0], a[2]], [b[0], b[2]], [1.0, 2.0], config, "layer", adapters=["0", "2"], indices=[0, 2]
        )
        assert torch.equal(new_a, expected[0]) and torch.equal(new_b, expected[1]) and report == expected[2]


def test_a_zero_adapter_is_counted_and_loses_nothing(factors):
    a, b = factors(20, 24, [4, 4])
    new_a, new_b, report = merge(a, [b[0], torch.zeros(20, 4)], rank=4)
    assert new_a.isfinite().all() and report.retained_energy == pytest.approx((1.0, 1.0), abs=1e-5)
    for rule in RULES:
        for space in SPACES:
            zero = merge(a, [torch.zeros(20, 4)] * 2, rank=4, combination_type=rule, space=space)
            assert not (zero[1] @ zero[0]).any() and zero[2].effective_rank == 0


def test_a_layer_narrower_than_the_ranks(factors, relative_error):
    a, b = factors(3, 24, [4, 4])  # m < r
    for space in SPACES:
        new_a, new_b, _ = merge(a, b, rank=4, space=space)
        assert new_a.shape == (4, 24) and new_b.shape == (3, 4)
        assert relative_error(product(new_a, new_b), total(a, b, [1, 1])) < 1e-5


# --- the factors -----------------------------------------------------------------------------------------------------


def test_a_balanced_split_has_factors_of_one_size(factors):
    a, b = factors(20, 24, [4, 4])
    new_a, new_b, _ = merge(a, [x * 50 for x in b], rank=4)
    torch.testing.assert_close(new_a.norm(dim=1), new_b.norm(dim=0))
    left_a, left_b, _ = merge(a, [x * 50 for x in b], rank=4, factor="left")
    torch.testing.assert_close(left_a @ left_a.mT, torch.eye(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(left_b @ left_a, new_b @ new_a)
    assert (new_b.gather(0, new_b.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adapters(factors, relative_error, dtype):
    a, b = factors(64, 48, [4, 4, 4], dtype=dtype)
    wide = product(*merge([x.float() for x in a], [x.float() for x in b], rank=4))
    errors = {}
    for factor in ("balanced", "left"):
        new_a, new_b, _ = merge(a, b, rank=4, factor=factor)
        assert new_a.dtype == new_b.dtype == dtype
        errors[factor] = relative_error(product(new_a, new_b), wide)
    assert errors["balanced"] < 1e-2 and errors["balanced"] < errors["left"] * 1.2
    assert merge(a, b, rank=4, dtype="float32")[0].dtype == torch.float32


def test_what_does_not_fit_the_dtype_is_an_error(factors):
    a, b = factors(8, 8, [2, 2], dtype=torch.float16)
    with pytest.raises(ValueError, match="layer 'x': the merged factors are not finite in float16; pass dtype="):
        merge(a, b, [1e9, 1e9], rank=2, layer="x", factor="left")


# --- never an m x n matrix -------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


@pytest.mark.parametrize("sides", ["both", "left", "right", "auto"])
@pytest.mark.parametrize("rule", RULES)
def test_no_dense_update_is_ever_made(factors, rule, sides):
    m, n, ranks = 160, 200, [8] * 8  # R = 64 < 160 / 2
    a, b = factors(m, n, ranks)
    spaces = ("ctm", "core") if sides == "both" else ("ctm",)
    for space in spaces:
        with Largest() as seen:
            merge(a, b, rank=8, combination_type=rule, space=space, sides=sides)
        assert seen.numel <= sum(ranks) * max(m, n) < m * n
    if sides == "both":
        with Largest() as seen:
            merge(a, b, rank=8, combination_type=rule, space="full")
        assert seen.numel >= m * n  # the peer does, and the watch sees it


def test_one_wide_adapter_is_cut_without_a_dense_update(factors):
    a, b = factors(160, 200, [64])
    with Largest() as seen:
        merge(a, b, rank=8)
    assert seen.numel <= 64 * 200


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda a, b: b[1].__setitem__((0, 0), float("nan")),
            "layer 'x': B of adapter 'math' has entries that are not",
        ),
        (lambda a, b: a[0].__setitem__((0, 0), float("inf")), "layer 'x': A of adapter 'sql'"),
        (lambda a, b: a.__setitem__(1, a[1][:, :5]), r"updates differ in shape \(sql 6 x 8, math 6 x 5\)"),
        (lambda a, b: b.__setitem__(1, b[1][:, :1]), "the factors of adapter 'math' do not fit"),
        (lambda a, b: a.__setitem__(0, a[0].to(torch.int8)), "A of adapter 'sql' is int8"),
    ],
)
def test_bad_factors_are_named(factors, spoil, message):
    a, b = factors(6, 8, [2, 2])
    spoil(a, b)
    with pytest.raises(ValueError, match=message):
        merge_lora_tensors(a, b, [1, 1], CtMConfig(), "x", adapters=["sql", "math"])


def test_lists_of_different_length_and_no_weight_are_refused(factors):
    a, b = factors(6, 8, [2, 2])
    with pytest.raises(ValueError, match="one entry per adapter is needed.*'weights': 1"):
        merge_lora_tensors(a, b, [1], CtMConfig())
    with pytest.raises(ValueError, match="`rank` must be at least 1, got 0"):
        merge_lora_tensors(a, b, [1, 1], CtMConfig(), rank=0)
    with pytest.raises(ValueError, match="every weight is 0"):
        merge_lora_tensors(a, b, [0, 0], CtMConfig())
    with pytest.raises(ValueError, match="one entry per adapter"):
        merge_lora_tensors([], [], [], CtMConfig())


def test_the_inputs_are_not_changed(factors):
    a, b = factors(12, 16, [3, 3])
    before = [x.clone() for x in (*a, *b)]
    for space in SPACES:
        for weights in ([1.0, 2.0], [1.0, 0.0]):
            merge(a, b, weights, rank=3, space=space, scalings=[2.0, 3.0])
    assert all(torch.equal(x, y) for x, y in zip((*a, *b), before))
    energy = projected_energy([b[0].double()], [a[0].mT.double()], torch.eye(12).double(), torch.eye(16).double())
    assert energy[0] == pytest.approx(float(product(a[0], b[0]).square().sum()))
