"""Merge rules; the oracles are peft's own functions, and brute force in numpy."""

import numpy
import pytest
import torch
from peft.utils import merge_utils

from hf_ext.adapters.ctm import CtMConfig
from hf_ext.adapters.ctm.rules import RULES, apply_rule, mask_generator

GENERATOR = torch.Generator().manual_seed(0)
MATRICES = [torch.randn(6, 8, generator=GENERATOR, dtype=torch.float64) * (t + 1) for t in range(3)]
WEIGHTS = [1.0, 0.5, 2.0]


def merged(rule, matrices=MATRICES, weights=WEIGHTS, layer="layer", indices=None, **options):
    return apply_rule(matrices, weights, CtMConfig(combination_type=rule, **options), layer, indices)


def pefts(rule, matrices=MATRICES, weights=WEIGHTS, **options):
    return getattr(merge_utils, rule)(list(matrices), torch.tensor(weights, dtype=torch.float64), **options)


def test_linear_is_pefts_task_arithmetic():
    torch.testing.assert_close(merged("linear"), pefts("task_arithmetic"))
    torch.testing.assert_close(merged("linear", weights=[1, -2, 0.5]), pefts("task_arithmetic", weights=[1, -2, 0.5]))


@pytest.mark.parametrize("method", ["total", "frequency"])
@pytest.mark.parametrize("density", [0.25, 0.5])
def test_ties_is_pefts(method, density):
    # 48 entries: both densities keep whole numbers, where peft rounds down and we to nearest.
    expected = pefts("ties", density=density, majority_sign_method=method)
    found = merged("ties", density=density, majority_sign_method=method)
    votes = sum(merge_utils.magnitude_based_pruning(matrix, density).sign() for matrix in MATRICES)
    drawn = (votes == 0) & (method == "frequency")  # where peft says plus and we go by the total
    assert drawn.float().mean() < 0.7
    torch.testing.assert_close(found[~drawn], expected[~drawn])
    by_total = pefts("ties", density=density)
    torch.testing.assert_close(found[drawn], by_total[drawn])


def test_magnitude_prune_is_pefts():
    torch.testing.assert_close(merged("magnitude_prune", density=0.25), pefts("magnitude_prune", density=0.25))


@pytest.mark.parametrize("rule", ["dare_linear", "dare_ties"])
def test_dare_is_pefts_given_the_same_masks(rule, monkeypatch):
    masks = [torch.rand(6, 8, generator=mask_generator(7, "layer", t)) < 0.5 for t in range(3)]
    drawn = iter(masks)
    monkeypatch.setattr(merge_utils.torch, "bernoulli", lambda input: next(drawn).to(input))
    expected = pefts(rule, density=0.5)
    torch.testing.assert_close(merged(rule, density=0.5, seed=7), expected)


def test_dare_keeps_the_mean():
    ones = [torch.ones(200, 200, dtype=torch.float64)]
    kept = merged("dare_linear", ones, [1.0], density=0.3)
    assert set(kept.unique().tolist()) == {0.0, 1 / 0.3}
    assert abs(float(kept.mean()) - 1) < 0.03  # five standard errors


def test_a_mask_depends_on_seed_layer_and_place_alone():
    def mask(*arguments):
        return torch.rand(4, 4, generator=mask_generator(*arguments))

    assert torch.equal(mask(0, "a", 1), mask(0, "a", 1))
    for other in ((1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a1", 1)):
        assert not torch.equal(mask(0, "a", 1), mask(*other))
    assert not torch.equal(merged("dare_ties", seed=0), merged("dare_ties", seed=1))
    # The third adapter has the same mask whether or not the second is there.
    with_all = merged("dare_linear", weights=[0.0, 0.0, 1.0], density=0.5)
    alone = merged("dare_linear", MATRICES[2:], [1.0], indices=[2], density=0.5)
    assert torch.equal(with_all, alone)


def test_dare_ties_with_ties_density_trims_what_was_kept():
    density, ties_density = 0.5, 0.25
    kept = [
        torch.where(torch.rand(6, 8, generator=mask_generator(0, "layer", t)) < density, matrix, 0) / density
        for t, matrix in enumerate(MATRICES)
    ]
    trimmed = []
    for matrix in kept:
        count = round(ties_density * int((matrix != 0).sum()))
        threshold = matrix.abs().flatten().sort(descending=True).values[count - 1]
        trimmed.append(torch.where(matrix.abs() >= threshold, matrix, 0))
    expected = pefts("ties", trimmed, density=1.0)
    found = merged("dare_ties", density=density, ties_density=ties_density)
    torch.testing.assert_close(found, expected)


def test_a_trim_keeps_at_least_one_entry():
    # peft's rounds down: of a 1 x 1 matrix nothing is left.
    one = [torch.full((1, 1), 3.0)]
    assert merged("ties", one, [1.0], density=0.3).item() == 3
    assert merge_utils.magnitude_based_pruning(one[0], 0.3).item() == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_negative_weight_is_a_weight_on_the_negative(rule):
    turned = [MATRICES[0], -MATRICES[1], MATRICES[2]]
    torch.testing.assert_close(merged(rule, weights=[1, -0.5, 2]), merged(rule, turned, [1, 0.5, 2]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [2, 3])
def test_the_sign_of_a_basis_vector_does_not_matter(rule, count):
    rows, columns = (
        torch.tensor([1, -1, 1, 1, -1, -1.0]).double(),
        torch.tensor([-1, 1, 1, -1, 1, 1, -1, -1.0]).double(),
    )
    matrices, weights = MATRICES[:count], WEIGHTS[:count]
    flipped = [rows[:, None] * matrix * columns for matrix in matrices]
    for method in ("total", "frequency"):
        back = rows[:, None] * merged(rule, flipped, weights, majority_sign_method=method) * columns
        torch.testing.assert_close(back, merged(rule, matrices, weights, majority_sign_method=method))


def test_votes_that_cancel_give_zero():
    # peft's: plus wins, so that W and -W make |W|.
    assert not merged("ties", [MATRICES[0], -MATRICES[0]], [1.0, 1.0], density=1.0).any()
    assert pefts("ties", [MATRICES[0], -MATRICES[0]], [1.0, 1.0], density=1.0).min() >= 0


def test_tsv_against_brute_force():
    sizes, lefts, values, rights = min(MATRICES[0].shape), [], [], []
    for matrix, weight in zip(MATRICES, WEIGHTS):
        u, s, vt = numpy.linalg.svd(matrix.numpy(), full_matrices=False)
        each = sizes // len(MATRICES)
        lefts.append(u[:, :each])
        values.append(weight * s[:each])
        rights.append(vt[:each].T)

    def polar(matrix):  # by the root of the Gram matrix
        gram = matrix.T @ matrix
        w, v = numpy.linalg.eigh(gram)
        return matrix @ (v / numpy.sqrt(w)) @ v.T

    expected = polar(numpy.hstack(lefts)) @ numpy.diag(numpy.concatenate(values)) @ polar(numpy.hstack(rights)).T
    numpy.testing.assert_allclose(merged("tsv").numpy(), expected, atol=1e-10)


def test_tsv_of_one_adapter_is_the_adapter_and_of_many_has_the_rank():
    torch.testing.assert_close(merged("tsv", MATRICES[:1], [1.0]), MATRICES[0])
    many = [torch.randn(2, 5, generator=GENERATOR, dtype=torch.float64) for _ in range(6)]
    found = merged("tsv", many, [1.0] * 6)
    assert found.shape == (2, 5) and torch.linalg.matrix_rank(found) == 2


def test_iso_has_a_flat_spectrum_of_the_same_sum():
    low = [torch.randn(6, 2, generator=GENERATOR) @ torch.randn(2, 8, generator=GENERATOR) for _ in range(2)]
    values = torch.linalg.svdvals(sum(low))
    found = torch.linalg.svdvals(merged("iso", low, [1.0, 1.0]))
    torch.testing.assert_close(found[:4], values[:4].mean().expand(4))
    assert found[4:].max() < 1e-5  # the rank stays 4
    assert not merged("iso", [torch.zeros(3, 3)], [1.0]).any()


def test_a_scale_multiplies_every_rule():
    for rule in RULES:
        torch.testing.assert_close(merged(rule, scaling_coeff=0.75), 0.75 * merged(rule))


def test_a_rule_of_ones_own_sees_matrices_and_weights():
    def heaviest(matrices, weights):
        assert len(matrices) == 3 and weights == WEIGHTS
        return matrices[max(range(3), key=weights.__getitem__)]

    assert torch.equal(merged(heaviest, scaling_coeff=2.0), 2 * MATRICES[2])


@pytest.mark.parametrize("wrong", [None, torch.zeros(2, 2), torch.full((6, 8), float("nan"))])
def test_a_rule_of_ones_own_that_gives_something_else_is_named(wrong):
    with pytest.raises(ValueError, match=r"layer 'x': the merge rule callable:.* must give a finite tensor of shape"):
        merged(lambda matrices, weights: wrong, layer="x")
