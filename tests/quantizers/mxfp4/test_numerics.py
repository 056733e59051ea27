"""MXFP4 arithmetic against the format's tables, float64 brute force and torch's own casts."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from hf_ext.quantizers.mxfp4 import numerics

GRID = torch.tensor(numerics.E2M1_VALUES, dtype=torch.float64)
positive_floats = st.floats(min_value=2.0**-149, max_value=3.4028234663852886e38, width=32)


def nearest_codes(values: torch.Tensor) -> torch.Tensor:
    """Brute force in float64: the nearest grid value, the even code on ties."""
    distance = (values.double().abs().unsqueeze(-1) - GRID).abs()
    best = distance.amin(-1, keepdim=True)
    tied = distance == best
    even = torch.arange(8) % 2 == 0
    return torch.where((tied & even).any(-1), (tied & even).int().argmax(-1), tied.int().argmax(-1))


def squared_error(x: torch.Tensor, tensor: numerics.MXFP4Tensor, **sizes: int) -> torch.Tensor:
    return (numerics.dequantize(tensor, **sizes).double() - x.double()).square()


def test_the_seven_midpoints_go_to_the_even_code():
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert numerics.e2m1_round(midpoints).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert numerics.e2m1_round(torch.tensor([5.0, 5.01, 7.9, 1e30])).tolist() == [4, 6, 6, 6]
    below = numerics.e2m1_round(torch.tensor([-0.25]))
    assert below.item() == 0 and torch.signbit(below).item()


def test_rounding_is_nearest_over_a_dense_range():
    values = torch.linspace(-9, 9, 20001)
    assert torch.equal(numerics.e2m1_codes(values).int() & 7, nearest_codes(values).int())
    assert torch.equal(numerics.e2m1_codes(values) >> 3 == 1, torch.signbit(values))
    assert torch.isnan(numerics.e2m1_round(torch.tensor(float("nan"))))


def test_all_codes_and_bytes_survive_packing():
    codes = torch.arange(16, dtype=torch.uint8)
    pairs = torch.cartesian_prod(codes, codes).flip(-1).reshape(1, -1)
    packed = numerics.pack(pairs)
    assert packed.tolist() == [list(range(256))]
    assert torch.equal(numerics.unpack(packed), pairs)
    with pytest.raises(ValueError, match="even last axis"):
        numerics.pack(codes[:3])
    with pytest.raises(ValueError, match="`packed` must be uint8"):
        numerics.unpack(torch.zeros(4))


def test_packed_bytes_are_torch_float4():
    """torch's `float4_e2m1fn_x2` is two codes a byte with the first value in the low nibble."""
    values = torch.tensor([[0.5, -6.0, 3.0, 1.5]])
    packed = numerics.pack(numerics.e2m1_codes(values))
    assert packed.tolist() == [[0x1 | 0xF << 4, 0x5 | 0x3 << 4]]
    assert packed.view(torch.float4_e2m1fn_x2).dtype == torch.float4_e2m1fn_x2


def test_the_exponent_table():
    amax = torch.tensor([1, 1.5, 1.7499999, 1.75, 1.7500001, 1.999, 2])
    assert numerics.block_exponent(amax, "ocp").tolist() == [-2, -2, -2, -2, -2, -2, -1]
    assert numerics.block_exponent(amax, "oas").tolist() == [-2, -2, -2, -2, -1, -1, -1]
    assert numerics.block_exponent(amax, "even").tolist() == [-2, -2, -2, -1, -1, -1, -1]
    # 1.7499999 > 1.5, so a <= 6 * 2**-2 fails there already.
    assert numerics.block_exponent(amax, "ceil").tolist() == [-2, -2, -1, -1, -1, -1, -1]
    assert numerics.block_exponent(torch.tensor([3.0, 3.0000002]), "ceil").tolist() == [-1, 0]
    assert numerics.block_exponent(torch.zeros(1), "oas").tolist() == [0]


@settings(max_examples=300, deadline=None)
@given(positive_floats)
def test_each_rule_puts_the_maximum_in_its_range(a):
    bounds = {"ocp": (4, 8), "ceil": (3, 6), "oas": (3.5, 7), "even": (3.5, 7)}
    for rule, (low, high) in bounds.items():
        e = numerics.block_exponent(torch.tensor([a]), rule).item()
        assert -126 <= e <= 127
        if e == -126:  # a scale that a byte can hold, whatever the block
            continue
        ratio = math.ldexp(a, -e)
        assert (low <= ratio < high) if rule in ("ocp", "even") else (low < ratio <= high), (rule, a, ratio)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=32, max_size=32))
def test_no_value_errs_by_more_than_half_its_spacing(values):
    x = torch.tensor([values])
    for rule in ("ceil", "oas"):
        tensor = numerics.quantize(x, scale_rule=rule, macro_block_size=None)
        unit = math.ldexp(1.0, int(tensor.scales) - 127)
        error = (numerics.dequantize(tensor).double() - x.double()).abs()
        bound = torch.full_like(error, unit) if rule == "oas" else (x.double().abs() / 4).clamp(min=unit / 4)
        assert bool((error <= bound * (1 + 1e-6)).all())


@pytest.mark.parametrize("shift", [-120, -60, 60, 120])
@pytest.mark.parametrize("search", ["static", "dynamic"])
def test_powers_of_two_only_move_the_scales(shift, search):
    x = torch.randn(4, 256).clamp(-3, 3)
    x[x.abs() < 2.0**-3] = 0.5
    base, moved = (numerics.quantize(v, search=search) for v in (x, x * 2.0**shift))
    assert torch.equal(base.codes, moved.codes) and torch.equal(base.macro, moved.macro)
    assert torch.equal(base.scales.int() + shift, moved.scales.int())


def test_static_macro_bytes_of_the_specification():
    amax = torch.tensor([6, 3, 12, 4, 5, 7, 0, float("inf"), float("nan")])
    assert numerics.macro_factor(amax).tolist() == [0, 0, 0, 128, 51, 182, 0, 0, 0]
    assert numerics.macro_factor(torch.tensor([4 * 2.0**-140])).tolist() == [128]  # 6 / amax is infinite


@settings(max_examples=100, deadline=None)
@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_static_macro_blocks_keep_their_maximum(a):
    x = torch.rand(1, 128) * a * 0.9
    x[0, 17] = -a
    back = numerics.dequantize(numerics.quantize(x))
    assert abs(back.abs().max().item() / a - 1) <= 1 / 256 + 1e-6


def test_dynamic_search_is_the_brute_force_argmin_and_never_worse_than_none():
    x = torch.randn(8, 320)
    best = numerics.quantize(x, search="dynamic")
    errors = []
    for j in range(16):
        scaled = x * (1 + j / 16)
        plain = numerics.quantize(scaled, macro_block_size=None)
        back = numerics.dequantize(plain).double() / (1 + j / 16)
        error = torch.nn.functional.pad((back - x.double()).square(), (0, 64)).view(8, 3, 128).sum(-1)
        errors.append(error)
    errors = torch.stack(errors)
    chosen = errors.gather(0, (best.macro.long() // 16)[None])[0]
    assert bool((chosen <= errors.amin(0) * (1 + 1e-5)).all())
    assert bool((chosen <= errors[0] * (1 + 1e-6)).all())
    assert len(best.macro.unique()) > 4


def test_weighted_search_lowers_the_weighted_error_and_constant_weights_change_nothing():
    x, weights = torch.randn(16, 576), torch.rand(576) ** 4
    plain = numerics.quantize(x, search="dynamic")
    weighted = numerics.quantize(x, search="weighted", channel_weights=weights)
    both = numerics.quantize(x, search="weighted", channel_weights=weights, search_exponents=True)
    loss = [(squared_error(x, tensor) * weights).sum().item() for tensor in (plain, weighted, both)]
    assert loss[2] < loss[1] < loss[0]
    constant = numerics.quantize(x, search="weighted", channel_weights=torch.full((576,), 0.3))
    assert all(torch.equal(a, b) for a, b in zip(plain, constant, strict=True))


def test_mse_rule_beats_every_closed_form_in_squared_error():
    x = torch.randn(64, 256)
    loss = {
        rule: squared_error(x, numerics.quantize(x, scale_rule=rule, macro_block_size=None)).sum().item()
        for rule in numerics.SCALE_RULES
    }
    assert min(loss, key=loss.get) == "mse"
    assert loss["oas"] < loss["ocp"]


def test_quantising_again_changes_nothing_without_macro_blocks():
    x = torch.randn(16, 128)
    first = numerics.quantize(x, macro_block_size=None)
    again = numerics.quantize(numerics.dequantize(first), macro_block_size=None)
    assert torch.equal(first.codes, again.codes) and torch.equal(first.scales, again.scales)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("macro_block_size", [None, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_three_ways_back_agree_on_ragged_and_strided_input(block_size, macro_block_size, dtype):
    x = torch.randn(3, 5, 2 * 608).to(dtype)[..., ::2]
    layout = {"block_size": block_size, "macro_block_size": macro_block_size}
    tensor = numerics.quantize(x, **layout)
    sizes = {"block_size": block_size, "macro_block_size": macro_block_size or 128, "dtype": dtype}
    assert tensor.codes.shape == x.shape and tensor.scales.shape == (3, 5, 608 // block_size)
    assert (None if tensor.macro is None else tensor.macro.shape[-1]) == (
        None if macro_block_size is None else -(-608 // macro_block_size)
    )
    dense = numerics.dequantize(tensor, **sizes)
    assert torch.equal(dense, numerics.dequantize_packed(numerics.pack(tensor.codes), *tensor[1:], **sizes))
    assert torch.equal(dense, numerics.fake_quantize(x, **layout))
    assert torch.equal(dense, numerics.fake_quantize(x.contiguous(), **layout))


def test_a_row_alone_gives_the_bytes_of_the_row_among_many(monkeypatch):
    """Rows are cut into chunks for speed; nothing may depend on where."""
    x = torch.randn(50, 192)
    whole = numerics.quantize(x, search="dynamic")
    monkeypatch.setattr(numerics, "_CHUNK_ELEMENTS", 192 * 7)
    cut = numerics.quantize(x, search="dynamic")
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_extreme_blocks_stay_finite_and_accurate():
    largest = torch.finfo(torch.float32).max
    x = torch.zeros(1, 160)
    x[0, :32] = largest * torch.linspace(-1, 1, 32)
    x[0, 32:64] = 2.0**-149
    x[0, 96:128] = 2.0**-120
    for search in ("static", "dynamic"):
        tensor = numerics.quantize(x, search=search)
        back = numerics.dequantize(tensor)
        assert bool(torch.isfinite(back).all())
        assert (back[0, :32] - x[0, :32]).abs().max() <= 0.15 * largest
        assert tensor.scales[0, 2:5].tolist()[0] == 127 and not tensor.codes[0, 64:96].any()
        torch.testing.assert_close(back[0, 96:128], x[0, 96:128], rtol=0.13, atol=0)
    half = numerics.fake_quantize(torch.full((1, 32), 65504.0, dtype=torch.float16))
    assert bool(torch.isfinite(half).all())


def test_non_finite_blocks_become_nan_and_leave_their_neighbours_alone():
    x = torch.randn(2, 128)
    x[0, 40], x[1, 100] = float("nan"), float("-inf")
    tensor = numerics.quantize(x)
    back = numerics.dequantize(tensor)
    assert tensor.scales[0].tolist()[1] == 255 and tensor.scales[1].tolist()[3] == 255
    assert back[0, 32:64].isnan().all() and back[1, 96:].isnan().all()
    assert bool(torch.isfinite(back[0, :32]).all()) and bool(torch.isfinite(back[1, :96]).all())


def test_the_smallest_and_the_reserved_scale_byte_read_as_the_format_says():
    scales = torch.tensor([[0, 1, 127, 254, 255]], dtype=torch.uint8)
    read = numerics.block_scales(scales, None)[0]
    assert read[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and read[4].isnan()


def test_empty_tensors_pass():
    tensor = numerics.quantize(torch.zeros(0, 2, 64))
    assert tensor.codes.shape == (0, 2, 64) and tensor.macro.shape == (0, 2, 1)
    assert numerics.fake_quantize(torch.zeros(0, 64)).shape == (0, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 24}, "`block_size` must be 16 or 32, got 24"),
        ({"macro_block_size": 100}, "`macro_block_size` must be 32, 64, 128 or None, got 100"),
        ({"scale_rule": "floor"}, "`scale_rule` must be one of ocp, ceil, oas, even, mse; got 'floor'"),
        ({"search": "best"}, "`search` must be one of"),
        ({"search": "weighted"}, "`channel_weights` goes with"),
        ({"search_slots": 3}, "`search_slots` must divide 256, got 3"),
        ({"search": "weighted", "channel_weights": torch.ones(3)}, "one value for each of 64 inputs"),
        ({"search": "weighted", "channel_weights": -torch.ones(64)}, "finite and not negative"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        numerics.quantize(torch.randn(2, 64), **arguments)


def test_bad_tensors_are_named():
    with pytest.raises(ValueError, match="48 values, not a multiple of `block_size`=32"):
        numerics.quantize(torch.randn(2, 48))
    with pytest.raises(ValueError, match="`x` must be a float tensor"):
        numerics.quantize(torch.zeros(2, 64, dtype=torch.int32))


def test_signal_to_noise_on_gaussian_blocks():
    """The method's figures in dB for N(0, 1); they separate the rules by more than the sampling error of 0.01 dB."""
    x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))

    def decibels(back: torch.Tensor) -> float:
        return (10 * torch.log10(x.square().sum() / (back - x).square().sum())).item()

    expected = {
        ("ocp", None, "static", 32): 18.79,
        ("oas", None, "static", 32): 19.02,
        ("mse", None, "static", 32): 19.04,
        ("oas", 128, "static", 32): 19.30,
        ("oas", 128, "dynamic", 32): 19.95,
        ("oas", None, "static", 16): 19.16,
        ("oas", 128, "dynamic", 16): 20.13,
    }
    for (rule, macro, search, block), figure in expected.items():
        back = numerics.fake_quantize(x, scale_rule=rule, macro_block_size=macro, search=search, block_size=block)
        assert decibels(back) == pytest.approx(figure, abs=0.015), (rule, macro, search, block)
    assert decibels(numerics.nvfp4_fake_quantize(x)) == pytest.approx(20.43, abs=0.015)


def test_nvfp4_scales_are_e4m3_of_the_tensor_scale():
    x = torch.randn(4, 64) * 100
    g = x.abs().max() / (6 * 448)
    scale = (x.view(-1, 16).abs().amax(-1) / (6 * g)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).double() * g.double()
    ratio = numerics.nvfp4_fake_quantize(x).view(-1, 16).double() / scale[:, None]
    assert bool((ratio.abs().unsqueeze(-1) - GRID).abs().amin(-1).max() < 1e-5)
    assert torch.equal(numerics.nvfp4_fake_quantize(torch.zeros(2, 32)), torch.zeros(2, 32))


def test_compiles_in_one_graph():
    x = torch.randn(4, 192)
    compiled = torch.compile(
        lambda v: numerics.fake_quantize(v, macro_block_size=64), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), numerics.fake_quantize(x, macro_block_size=64))
