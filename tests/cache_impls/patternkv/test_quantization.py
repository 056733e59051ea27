"""The mathematics against oracles in NumPy and float64 that share no code with it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ext.cache_impls.patternkv.quantization import (
    assign_narrowest,
    assign_nearest,
    dequantize_groups,
    gate_accepts,
    gate_threshold,
    mine_patterns,
    new_pattern,
    pack_codes,
    quantize_groups,
    unpack_codes,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- residual quantization -----------------------------------------------------------------------------------------


def round_to_nearest(group: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.float16, np.float16]:
    """Codes, values read back, scale and zero of one group, as KIVI's formulas say, with float16 scales."""
    low, high = np.float32(group.min()), np.float32(group.max())
    levels = np.float32(2**bits - 1)
    scale, zero = np.float16((high - low) / levels), np.float16(low)
    if scale == 0:
        codes = np.zeros(len(group), dtype=np.uint8)
    else:
        # np.rint rounds halves to even, as torch.round does.
        codes = np.clip(np.rint((group - np.float32(zero)) / np.float32(scale)), 0, levels).astype(np.uint8)
    return codes, codes.astype(np.float32) * np.float32(scale) + np.float32(zero), scale, zero


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("axis", [-2, -1])
def test_groups_are_quantized_as_a_loop_over_them_says_bit_for_bit(bits, axis):
    y = (normal(2, 96, 64) * 3 + 1).numpy()
    group = 32
    found = quantize_groups(torch.from_numpy(y), bits, group=group, axis=axis)
    back = dequantize_groups(*found, axis=axis)
    for head in range(2):
        for start in range(0, y.shape[axis], group):
            for other in range(y.shape[-1 if axis == -2 else -2]):
                at = (
                    (head, slice(start, start + group), other)
                    if axis == -2
                    else (head, other, slice(start, start + 32))
                )
                scale_at = (head, start // group, other) if axis == -2 else (head, other, start // group)
                codes, values, scale, zero = round_to_nearest(y[at], bits)
                assert (found.codes[at].numpy() == codes).all() and (back[at].numpy() == values).all()
                assert found.scale[scale_at].item() == scale and found.zero[scale_at].item() == zero


def test_worked_example_has_codes_0_1_2_3():
    y = torch.tensor([[-0.3, 0.0, 0.3, 0.6]])
    found = quantize_groups(y, 2, group=4, axis=-1)
    assert found.codes.tolist() == [[0, 1, 2, 3]]
    assert (dequantize_groups(*found, axis=-1) - y).abs().max() < 4 * 2**-11 * 0.6


def test_a_constant_group_has_scale_0_and_codes_0():
    found = quantize_groups(torch.full((1, 8), 1.5), 2, group=8, axis=-1)
    assert found.scale.item() == 0 and not found.codes.any()
    assert (dequantize_groups(*found, axis=-1) == 1.5).all()


@given(
    seed=st.integers(0, 2**20),
    bits=st.sampled_from([2, 4, 8]),
    offset=st.floats(-50, 50),
    spread=st.floats(0.01, 100),
    fit=st.sampled_from(["minmax", "mse"]),
)
@settings(max_examples=60, deadline=None)
def test_error_is_half_a_step_and_the_rounding_of_scale_and_zero(seed, bits, offset, spread, fit):
    y = (offset + spread * normal(4, 32, seed=seed)).double()
    found = quantize_groups(y, bits, group=32, axis=-1, fit=fit)
    back = dequantize_groups(*found, axis=-1).double()
    low, high = y.aminmax(dim=-1, keepdim=True)
    if fit == "minmax":
        half = (high - low) / (2**bits - 1) / 2
        # float16 rounds zero by |zero| 2^-11, and the scale by as much, times the largest code.
        assert ((back - y).abs() <= half * 1.001 + (low.abs() + high - low) * 2**-11 + 1e-6).all()
    assert (back - y).abs().max() <= (high - low).max() * 1.1 + low.abs().max() * 2**-9


@given(seed=st.integers(0, 2**20), bits=st.sampled_from([2, 4, 8]), kind=st.sampled_from(["normal", "heavy", "two"]))
@settings(max_examples=60, deadline=None)
def test_fitted_scales_have_no_more_squared_error_than_the_range_in_any_group(seed, bits, kind):
    y = normal(2, 64, 16, seed=seed)
    if kind == "heavy":
        y = y**3
    if kind == "two":
        y = y.sign()
    for axis in (-2, -1):
        group = 16

        def error(fit, axis=axis, group=group):
            back = dequantize_groups(*quantize_groups(y, bits, group=group, axis=axis, fit=fit), axis=axis)
            along = -2 if axis == -2 else -1
            return (back - y).square().unflatten(axis, (-1, group)).sum(along)

        assert (error("mse") <= error("minmax") * (1 + 1e-5) + 1e-9).all()


def test_fitting_lowers_the_error_at_2_bits():
    y = normal(8, 128, 32)
    error = {
        fit: (dequantize_groups(*quantize_groups(y, 2, group=128, axis=-2, fit=fit), axis=-2) - y).square().mean()
        for fit in ("minmax", "mse")
    }
    assert error["mse"] < 0.8 * error["minmax"]


def test_groups_beyond_float16_get_scales_in_float32():
    y = torch.tensor([[0.0, 1e5, 2e5, 3e5]])
    found = quantize_groups(y, 2, group=4, axis=-1)
    assert found.scale.dtype == found.zero.dtype == torch.float32
    assert torch.equal(dequantize_groups(*found, axis=-1), y)


# --- bytes ---------------------------------------------------------------------------------------------------------


def test_byte_of_codes_1_2_3_0_is_0x39():
    assert pack_codes(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [0x39]


def test_codes_of_4_bits_put_the_second_half_of_the_channels_into_the_high_bits():
    assert pack_codes(torch.tensor([1, 2, 3, 15], dtype=torch.uint8), 4).tolist() == [0x31, 0xF2]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("channels", [32, 64, 80, 96, 128, 256])
def test_packing_loses_nothing_and_is_planar(bits, channels):
    codes = torch.randint(2**bits, (3, 5, channels), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, 5, channels * bits // 8) and packed.dtype == torch.uint8
    assert torch.equal(unpack_codes(packed, bits), codes)
    parts = 8 // bits
    for i, byte in enumerate(packed[0, 0].tolist()):
        assert byte == sum(int(codes[0, 0, i + j * channels // parts]) << bits * j for j in range(parts))


# --- alignment -----------------------------------------------------------------------------------------------------


def test_nearest_and_narrowest_agree_with_all_differences_in_float64():
    x, patterns = normal(2, 3, 40, 16), normal(2, 3, 7, 16, seed=1)
    differences = x.double()[..., :, None, :] - patterns.double()[..., None, :, :]
    assert torch.equal(assign_nearest(x, patterns), differences.square().sum(-1).argmin(-1))
    assert torch.equal(assign_narrowest(x, patterns), (differences.amax(-1) - differences.amin(-1)).argmin(-1))


def test_a_block_of_tokens_at_a_time_gives_the_same_assignment(monkeypatch):
    x, patterns = normal(1, 2, 50, 8), normal(1, 2, 5, 8, seed=1)
    whole = assign_nearest(x, patterns)
    monkeypatch.setattr("hf_ext.cache_impls.patternkv.quantization._BLOCK_ELEMENTS", 70)
    assert torch.equal(assign_nearest(x, patterns), whole)


def test_midrange_has_the_least_worst_deviation_and_mean_the_least_mean_square():
    window = normal(2, 32, 8)
    middle, mean = new_pattern(window, "midrange"), new_pattern(window, "mean")
    torch.testing.assert_close(middle, (window.amin(-2) + window.amax(-2)) / 2)
    torch.testing.assert_close(mean, window.mean(-2))

    def worst(pattern: torch.Tensor) -> torch.Tensor:
        return (window - pattern[:, None]).abs().amax(-2)

    assert (worst(middle) <= worst(mean) + 1e-6).all()


# --- the gate ------------------------------------------------------------------------------------------------------

THRESHOLDS = {32: 0.82752, 64: 0.87642, 80: 0.88901, 96: 0.89836, 128: 0.91155, 256: 0.93683}


@pytest.mark.parametrize("channels", THRESHOLDS)
def test_gate_has_the_thresholds_of_the_method(channels):
    # The closed form: with u = rho^2 and k = 2 z / sqrt(5 D), (1 - u)^2 = k^2 (1 + u^2), z from Python's own quantile.
    from statistics import NormalDist

    k2 = (2 * NormalDist().inv_cdf(0.95)) ** 2 / (5 * channels)
    root = (2 - math.sqrt(4 - 4 * (1 - k2) ** 2)) / (2 * (1 - k2))
    assert gate_threshold(channels) == pytest.approx(math.sqrt(root), abs=1e-9)
    assert gate_threshold(channels) == pytest.approx(THRESHOLDS[channels], abs=6e-6)
    rho = torch.tensor([gate_threshold(channels) - 1e-4, gate_threshold(channels) + 1e-4, 1.0])
    assert gate_accepts(rho, channels).tolist() == [True, False, False]


def test_threshold_grows_with_the_channels_and_stays_below_1():
    thresholds = [gate_threshold(channels) for channels in (8, 16, 32, 64, 128, 256, 1024)]
    assert thresholds == sorted(thresholds) and thresholds[-1] < 1


def test_values_that_pass_the_gate_have_less_rounding_error():
    channels, patterns = 64, normal(8, 64)
    which = torch.randint(8, (4000,), generator=torch.Generator().manual_seed(1))
    x = patterns[which] + normal(4000, 64, seed=2) * torch.linspace(0.05, 2, 4000)[:, None]
    residual = x - patterns[which]

    def spread(y):
        return y.amax(-1) - y.amin(-1)

    def errors(y):
        return (dequantize_groups(*quantize_groups(y, 2, group=64, axis=-1), axis=-1) - y).square().mean(-1)

    accepted = gate_accepts(spread(residual) / spread(x), channels)
    assert 0.1 < accepted.float().mean() < 0.95
    saved = (errors(x) - torch.where(accepted, errors(residual), errors(x))).double()
    assert saved.mean() > 3 * saved.std() / math.sqrt(len(saved))
    # and where it says no, patterns would not have helped by more than noise
    refused = (errors(x) - errors(residual))[~accepted].double()
    assert refused.mean() < 0.1 * errors(x)[~accepted].mean()


# --- mining --------------------------------------------------------------------------------------------------------


def test_clusters_are_found_when_k_means_starts_in_each():
    centers = normal(1, 1, 4, 8) * 20
    x = centers[:, :, torch.arange(200) % 4] + normal(1, 1, 200, 8, seed=1) * 0.01
    best = min(
        (mine_patterns(x, 4, seed=seed) for seed in range(8)),
        key=lambda found: (x[..., None, :] - found[:, :, None]).square().sum(-1).amin(-1).sum(),
    )
    distance = (best[..., None, :] - centers[:, :, None]).square().sum(-1).sqrt()
    assert distance.amin(-1).max() < 0.01 and sorted(distance.argmin(-1).flatten().tolist()) == [0, 1, 2, 3]


def test_centroids_are_the_means_of_their_tokens_and_no_iteration_adds_error():
    x = normal(1, 2, 300, 8)

    def error(patterns):
        return (x[..., :, None, :] - patterns[..., None, :, :]).square().sum(-1).amin(-1).sum((-1, -2)).item()

    errors = [error(mine_patterns(x, 6, iterations=n)) for n in (1, 2, 4, 8, 64)]
    assert errors == sorted(errors, reverse=True)
    found = mine_patterns(x, 6, iterations=200, tolerance=0)
    nearest = assign_nearest(x, found)
    for head in range(2):
        for j in range(6):
            members = x[0, head][nearest[0, head] == j]
            torch.testing.assert_close(found[0, head, j], members.mean(0), atol=1e-4, rtol=0)


def test_fewer_tokens_than_patterns_become_the_patterns():
    x = normal(1, 1, 5, 8)
    found = mine_patterns(x, 32)
    assert found.shape == (1, 1, 5, 8)
    torch.testing.assert_close(found.sum(2), x.sum(2))


def test_mining_is_repeatable_differs_by_seed_and_a_rows_does_not_depend_on_its_neighbours():
    x = normal(3, 2, 60, 8)
    found = mine_patterns(x, 5)
    assert torch.equal(found, mine_patterns(x.clone(), 5))
    assert not torch.equal(found, mine_patterns(x, 5, seed=1))
    changed = x.clone()
    changed[1:] = normal(2, 2, 60, 8, seed=9)
    assert torch.equal(mine_patterns(changed, 5)[0], found[0])
    torch.testing.assert_close(mine_patterns(x[:1], 5)[0], found[0])


def test_an_empty_cluster_is_drawn_again_and_nothing_becomes_nan():
    x = torch.zeros(1, 1, 40, 4)
    x[..., 20:, :] = 1
    found = mine_patterns(x, 8)
    assert torch.isfinite(found).all()
    assert {tuple(row) for row in found[0, 0].tolist()} <= {(0.0,) * 4, (1.0,) * 4}


# --- what patterns are for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4])
def test_residuals_of_clustered_tokens_are_bounded_by_the_noise_whatever_the_patterns_size(bits):
    noise = 0.05
    for size in (1.0, 10.0, 100.0):
        patterns = (normal(32, 64) * size).half().float()
        which = torch.randint(32, (256,), generator=torch.Generator().manual_seed(1))
        draws = torch.rand(256, 64, generator=torch.Generator().manual_seed(2))
        x = patterns[which] + noise * (2 * draws - 1)
        residual = x - patterns[assign_nearest(x, patterns)]
        found = quantize_groups(residual, bits, group=64, axis=-1)
        step = 2 * noise / (2**bits - 1)
        assert found.scale.max() <= step * 1.001
        error = (dequantize_groups(*found, axis=-1) - residual).abs().max()
        # Beside half a step: scale and zero in float16, and the float32 difference of large numbers.
        assert error <= step / 2 + 3 * noise * 2**-11 + 4 * size * 2**-21
        plain = quantize_groups(x, bits, group=64, axis=-1)
        plain_error = (dequantize_groups(*plain, axis=-1) - x).abs().max()
        assert plain_error / error > 0.3 * (x.amax(-1) - x.amin(-1)).max() / (2 * noise)
