"""quantize and dequantize: the same bits as the PyTorch reference."""

import itertools

import pytest
import torch

RULES = ("oas", "ocp", "even", "ceil")
MACROS = (128, 64, 32, None)
MAX = torch.finfo(torch.float32).max


def random_bits() -> torch.Tensor:
    """Every kind of float32, NaNs, infinities and subnormals included."""
    bits = torch.randint(-(2**31), 2**31 - 1, (8, 160), dtype=torch.int32)
    return bits.view(torch.float32)


def powers_of_two() -> torch.Tensor:
    sign = torch.where(torch.rand(8, 288) < 0.5, -1.0, 1.0)
    return sign * torch.exp2(torch.randint(-149, 128, (8, 288)).float())


def decision_points() -> torch.Tensor:
    """The grid's midpoints and their neighbours, at several exponents; maxima 6 and 7 times powers of two."""
    points = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    row = torch.cat([points, -points, points.nextafter(points * 0), points.nextafter(points * 2)])
    tops = torch.tensor([6.0, 7.0, 7.0000005, 6.9999995, 4.0, 5.0, 5.0000005])
    rows = row.repeat(7, 1)
    rows[:, 0] = tops
    return torch.cat([rows, rows * 2.0**-130, rows * 2.0**120, rows / 1.5])


def not_finite() -> torch.Tensor:
    x = torch.randn(7, 288)
    x[0, 5], x[1, 40], x[2, 287] = float("nan"), float("inf"), -float("inf")
    x[3, :32], x[3, 40] = 0, float("nan")
    x[4, :128] = float("nan")
    x[5, 128:256] = 0
    return x


INPUTS = {
    "gauss": lambda: torch.randn(17, 160),
    "random bits": random_bits,
    "powers of two": powers_of_two,
    "subnormal": lambda: torch.randn(6, 160) * 1e-39,
    "one subnormal among zeros": lambda: torch.cat([torch.full((2, 1), 2.0**-149), torch.zeros(2, 159)], 1),
    "zero": lambda: torch.cat([torch.zeros(2, 96), -torch.zeros(2, 96)]),
    "next to the largest": lambda: (
        MAX * (1 - torch.rand(4, 160) * 1e-6) * torch.where(torch.rand(4, 160) < 0.5, -1, 1)
    ),
    "up to the largest": lambda: MAX * torch.rand(4, 160),
    "decision points": decision_points,
    "not finite": not_finite,
    "not contiguous": lambda: torch.randn(96, 7).t(),
    "every second column": lambda: torch.randn(3, 320)[:, ::2],
    "three dimensions": lambda: torch.randn(2, 3, 96),
    "no rows": lambda: torch.randn(0, 96),
    "fp16": lambda: torch.randn(5, 96).to(torch.float16),
}
THOROUGH = ("gauss", "random bits", "decision points")
CASES = [
    *itertools.product(THOROUGH, RULES, MACROS),
    *itertools.product([name for name in INPUTS if name not in THOROUGH], ("oas",), (128, 64, None)),
    *itertools.product(("subnormal", "next to the largest", "not finite"), ("ceil",), (128,)),
]


@pytest.mark.parametrize(("name", "rule", "macro"), CASES)
def test_quantize_gives_the_bytes_of_the_reference(kernel, reference, name, rule, macro):
    torch.manual_seed(0)
    x = INPUTS[name]()
    ours = kernel.quantize(x, scale_rule=rule, macro_block_size=macro)
    theirs = reference.quantize(x, scale_rule=rule, macro_block_size=macro)
    for part, a, b in zip(("packed", "scale", "macro"), ours, theirs):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == torch.uint8 and a.shape == b.shape
            assert torch.equal(a, b), f"{part}: {(a != b).sum()} of {a.numel()} bytes differ"


def test_quantize_marks_blocks_that_are_not_finite(kernel):
    x = torch.ones(1, 128)
    x[0, 33] = float("inf")
    packed, scale, macro = kernel.quantize(x)
    assert scale[0, 1] == 255 and not packed[0, 16:32].any() and macro.item() == 0
    assert (scale[0, [0, 2, 3]] < 255).all() and packed[0, :16].all()


def every_code_and_scale(macro: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Each of the 16 codes, in both nibbles, under scale bytes 0, 1, 100, 127, 254, 255, and all macro bytes."""
    codes = torch.arange(256, dtype=torch.uint8)
    packed = torch.cat([codes, codes.flip(0)[:64]]).view(1, -1).repeat(6, 1)  # 640 values, 20 blocks
    scale = torch.tensor([0, 1, 100, 127, 254, 255], dtype=torch.uint8)[:, None].repeat(1, 20)
    if macro is None:
        return packed, scale, None
    width = -(-640 // macro)
    return packed, scale, (torch.arange(6 * width) * 37 % 256).to(torch.uint8).view(6, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("macro", MACROS)
def test_dequantize_gives_the_values_of_the_reference(kernel, reference, macro, dtype):
    packed, scale, macro_bytes = every_code_and_scale(macro)
    sizes = {"macro_block_size": macro or 128, "dtype": dtype}
    ours = kernel.dequantize(packed, scale, macro_bytes, **sizes)
    theirs = reference.dequantize(packed, scale, macro_bytes, **sizes)
    assert ours.dtype == dtype and ours.isnan().all(1).tolist() == [False] * 5 + [True]
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(ours[:5].view(bits), theirs[:5].view(bits))
    assert ours[:5].abs().max() == torch.finfo(dtype).max  # byte 254 times 6 saturates


def test_dequantize_every_macro_byte(kernel, reference):
    macro = torch.arange(256, dtype=torch.uint8)[:, None]
    packed = torch.randint(0, 256, (256, 32), dtype=torch.uint8)
    scale = torch.full((256, 2), 127, dtype=torch.uint8)
    assert torch.equal(
        kernel.dequantize(packed, scale, macro, macro_block_size=64),
        reference.dequantize(packed, scale, macro, macro_block_size=64),
    )


def test_dequantize_keeps_leading_dimensions_and_strides(kernel, reference):
    packed, scale, macro = reference.quantize(torch.randn(2, 5, 160))
    ours = kernel.dequantize(packed.transpose(0, 1), scale.transpose(0, 1), macro.transpose(0, 1))
    assert torch.equal(ours, reference.dequantize(packed, scale, macro).transpose(0, 1))
