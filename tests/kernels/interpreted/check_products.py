"""gemm and gemm_w4a4 against products in float64."""

import pytest
import torch

EPS = torch.finfo(torch.float32).eps
SHAPES = [  # M, N, K and the weight's macro block
    (1, 1, 32, 128),
    (1, 70, 1536, 128),
    (3, 70, 96, None),
    (16, 64, 128, 64),
    (16, 70, 576, 32),
    (17, 70, 576, 128),
    (17, 1, 96, 64),
    (64, 192, 128, 128),
    (64, 64, 576, None),
    (3, 64, 1536, 64),
]


def problem(reference, m, n, k, macro, dtype=torch.float32):
    """x, the packed weight, the bias, and the weight's values in ``dtype``."""
    torch.manual_seed(m * n + k)
    weight = torch.randn(n, k) * torch.exp2(torch.randint(-3, 4, (n, 1)).float())
    packed = reference.quantize(weight, macro_block_size=macro)
    values = reference.dequantize(*packed, macro_block_size=macro or 128, dtype=dtype)
    return torch.randn(m, k).to(dtype), packed, torch.randn(n).to(dtype), values


def assert_product(y, x, values, bias=None):
    """y = x @ values^T + bias up to the rounding of float32 sums and of y itself, entry by entry."""
    x, values = x.double(), values.double()
    want, size = x @ values.T, x.abs() @ values.abs().T
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    bound = 8 * EPS * size + torch.finfo(y.dtype).eps / 2 * want.abs()
    excess = ((y.double() - want).abs() / bound).nan_to_num(posinf=torch.inf).max()
    assert excess <= 1, f"error is {excess:.3g} times its bound"


@pytest.mark.parametrize(("m", "n", "k", "macro"), SHAPES)
def test_gemm_float32(kernel, reference, m, n, k, macro):
    x, packed, bias, values = problem(reference, m, n, k, macro)
    y = kernel.gemm(x, *packed, bias, macro_block_size=macro or 128)
    assert y.dtype == torch.float32
    assert_product(y, x, values, bias)


@pytest.mark.parametrize(("m", "n", "k", "macro"), [(1, 70, 576, 128), (16, 64, 96, None), (17, 70, 160, 64)])
def test_gemm_float16_rounds_the_weight_to_float16(kernel, reference, m, n, k, macro):
    x, packed, bias, values = problem(reference, m, n, k, macro, torch.float16)
    y = kernel.gemm(x, *packed, bias, macro_block_size=macro or 128)
    assert y.dtype == torch.float16
    assert_product(y, x, values, bias)


@pytest.mark.parametrize("activation_macro", [None, 64, 128])
@pytest.mark.parametrize(("m", "n", "k", "macro"), [*SHAPES[:1], *SHAPES[2:8]])
def test_gemm_w4a4(kernel, reference, m, n, k, macro, activation_macro):
    x, packed, bias, values = problem(reference, m, n, k, macro)
    y = kernel.gemm_w4a4(x, *packed, bias, macro_block_size=macro or 128, activation_macro_block_size=activation_macro)
    rounded = reference.dequantize(
        *reference.quantize(x, macro_block_size=activation_macro), macro_block_size=activation_macro or 128
    )
    assert_product(y, rounded, values, bias)


@pytest.mark.parametrize("rule", ["ocp", "even", "ceil"])
def test_gemm_w4a4_takes_the_rule_for_activations(kernel, reference, rule):
    x, packed, bias, values = problem(reference, 5, 24, 160, 128)
    y = kernel.gemm_w4a4(x, *packed, bias, scale_rule=rule)
    rounded = reference.quantize(x, scale_rule=rule, macro_block_size=64)
    assert_product(y, reference.dequantize(*rounded, macro_block_size=64), values, bias)


def test_gemm_w4a4_float16_output(kernel, reference):
    x, packed, bias, values = problem(reference, 5, 24, 160, 128)
    x = x.half()
    y = kernel.gemm_w4a4(x, *packed, bias.half())
    assert y.dtype == torch.float16
    rounded = reference.dequantize(*reference.quantize(x, macro_block_size=64), macro_block_size=64)
    assert_product(y, rounded, values, bias.half())


SCALES = (1, 100, 127, 200, 252)


def codes_under(scales) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [len(scales), 64] with all codes twice in every row, one scale byte a row."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(4)
    packed = (codes[0::2] | codes[1::2] << 4)[None].repeat(len(scales), 1)
    return packed, torch.tensor(scales, dtype=torch.uint8)[:, None].repeat(1, 2)


def test_a_unit_matrix_gives_every_code_under_every_scale_exactly(kernel, reference):
    packed, scale = codes_under((0, *SCALES))
    values = reference.dequantize(packed, scale)
    assert values[1:].abs().unique().numel() > 30
    assert torch.equal(kernel.gemm(torch.eye(64), packed, scale), values.T)


def test_a_unit_matrix_gives_every_code_exactly_in_w4a4(kernel, reference):
    packed, scale = codes_under(SCALES)
    y = kernel.gemm_w4a4(torch.eye(64), packed, scale, activation_macro_block_size=None)
    assert torch.equal(y, reference.dequantize(packed, scale).T)


def test_the_largest_scale_overflows_only_past_float32(kernel, reference):
    packed, scale = codes_under((254,))
    x = torch.full((1, 64), 2.0**-10)
    x[0, packed.repeat_interleave(2, 1)[0] != 0] = 0
    x[0, 1] = 2.0**-10  # code 1: 0.5 * 2**127 is finite
    packed = torch.where(torch.arange(32) == 0, 0x10, 0).to(torch.uint8)[None]
    assert kernel.gemm(x, packed, scale).item() == 2.0**116
    assert reference.gemm(x, packed, scale).item() == 2.0**116


@pytest.mark.parametrize("product", ["gemm", "gemm_w4a4"])
def test_a_nan_scale_spoils_its_output_only(kernel, reference, product):
    x, (packed, scale, macro), _, _ = problem(reference, 3, 40, 160, 128)
    scale[7, 2] = 255
    y = getattr(kernel, product)(x, packed, scale, macro)
    assert y.isnan().any(0).nonzero().flatten().tolist() == [7] and y[:, 7].isnan().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_itself_only_in_w4a4(kernel, reference, value):
    x, packed, _, _ = problem(reference, 5, 40, 160, 128)
    x[2, 150] = value
    y = kernel.gemm_w4a4(x, *packed)
    assert y.isnan().any(1).nonzero().flatten().tolist() == [2] and y[2].isnan().all()


@pytest.mark.parametrize("product", ["gemm", "gemm_w4a4"])
def test_strides_leading_dimensions_and_no_rows(kernel, reference, product):
    x, (packed, scale, macro), bias, _ = problem(reference, 6, 40, 160, 128)
    run = getattr(kernel, product)
    want = run(x, packed, scale, macro, bias)
    wide = torch.empty(6, 320)
    wide[:, ::2] = x
    assert torch.equal(run(wide[:, ::2], packed, scale, macro, bias), want)
    columns = packed.t().contiguous().t()  # the same values, stored the other way round
    assert torch.equal(run(x, columns, scale.t().contiguous().t(), macro, bias), want)
    assert torch.equal(run(x.view(2, 3, 160), packed, scale, macro, bias), want.view(2, 3, 40))
    assert run(x[:0], packed, scale, macro, bias).shape == (0, 40)


def test_an_address_that_is_not_aligned(kernel, reference):
    x, (packed, scale, macro), _, values = problem(reference, 2, 8, 64, 128)
    shifted = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].view(packed.shape).copy_(packed)
    assert shifted.data_ptr() % 4
    assert_product(kernel.gemm(x, shifted, scale, macro), x, values)


def entries_of(configs):
    return [("W4A16", i) for i in range(len(configs.W4A16))] + [("W4A4", i) for i in range(len(configs.W4A4))]


def test_every_launch_configuration_gives_the_product(kernel, reference, configs, monkeypatch):
    for table, index in entries_of(configs):
        entry = getattr(configs, table)[index]
        dtype = torch.float32 if "fp32" in entry.get("dtypes", ("fp32",)) else torch.float16
        x, packed, bias, values = problem(reference, 19, 134, 288, 128, dtype)
        unbounded = {key: value for key, value in entry.items() if key not in ("max_m", "targets", "steps")}
        with monkeypatch.context() as patch:
            patch.setattr(configs, table, [unbounded])
            if table == "W4A16":
                assert_product(kernel.gemm(x, *packed, bias), x, values, bias)
            else:
                rounded = reference.dequantize(*reference.quantize(x, macro_block_size=64), macro_block_size=64)
                assert_product(kernel.gemm_w4a4(x, *packed, bias), rounded, values, bias)


def test_pieces_of_k_cover_it_without_overlap(configs):
    for m, n, k in [(1, 576, 576), (1, 64, 32), (16, 4096, 14336), (64, 64, 1536), (65, 64, 65536), (1, 128256, 4096)]:
        for processors in (1, 4, 132):
            pieces, length = configs.split_count(m, n, k, processors)
            assert length % 128 == 0 and (pieces - 1) * length < k <= pieces * length
            assert pieces == 1 or length >= 256


def test_every_case_has_a_configuration(configs):
    for target in configs.ALL:
        for m in (1, 16, 17, 64, 65, 5000):
            for dtype in ("bf16", "fp16", "fp32"):
                assert configs.w4a16_candidates(target, dtype, m)
            for x_macro in (0, 64, 128):
                for macro in (0, 32, 64, 128):
                    for entry in configs.w4a4_candidates(target, x_macro, macro, m):
                        assert all(size % entry["BLOCK_K"] == 0 for size in (x_macro, macro))
