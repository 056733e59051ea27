"""The packed layer against `nn.Linear` on the weight it stands for."""

import copy
import inspect

import pytest
import torch
from torch import nn

from hf_ext import MXFP4Config, MXFP4Linear
from hf_ext.quantizers.mxfp4 import numerics, reference
from hf_ext.quantizers.mxfp4.linear import packed_shapes

CONFIGS = {
    "default": MXFP4Config(),
    "paper": MXFP4Config.paper(),
    "ocp": MXFP4Config.ocp(),
    "w4a4": MXFP4Config(activation="mxfp4", macro_block_size=64),
}


def make(config: MXFP4Config, bias: bool = True) -> tuple[MXFP4Linear, nn.Linear]:
    torch.manual_seed(1)
    dense = nn.Linear(160, 48, bias=bias)
    packed = MXFP4Linear.from_weight(dense.weight, dense.bias, config)
    dense.weight = nn.Parameter(packed.dequantize())
    return packed, dense


def rounded(x: torch.Tensor, config: MXFP4Config) -> torch.Tensor:
    if config.activation is None:
        return x
    return numerics.fake_quantize(x, block_size=config.block_size, macro_block_size=config.activation_macro_block_size)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_a_dense_layer_with_the_rounded_weight(name, bias):
    packed, dense = make(CONFIGS[name], bias)
    x = torch.randn(2, 3, 160)
    with torch.no_grad():
        assert torch.equal(packed(x), dense(rounded(x, CONFIGS[name])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_weight_once(dtype):
    packed, dense = make(MXFP4Config())
    x = torch.randn(5, 160).to(dtype)
    packed.bias.data = packed.bias.data.to(dtype)
    with torch.no_grad():
        assert torch.equal(packed(x), dense.to(dtype)(x))


def test_compute_dtype_decides_where_the_product_is_taken():
    packed, dense = make(MXFP4Config(compute_dtype="float32"), bias=False)
    x = torch.randn(5, 160, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(packed(x), dense(x.float()).to(torch.bfloat16))


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_reach_the_input_and_the_bias_only(name):
    packed, dense = make(CONFIGS[name])
    x = torch.randn(2, 3, 160)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    target = torch.randn(2, 3, 48)
    packed(ours).mul(target).sum().backward()
    # Straight through the rounding of the input: the dense layer's gradient does not depend on its input's value.
    dense(theirs).mul(target).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(packed.bias.grad, dense.bias.grad)
    assert packed.weight_packed.grad is None


def test_the_backward_pass_keeps_no_dense_weight():
    packed, _ = make(MXFP4Config())
    kept = []

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        packed(torch.randn(2, 160, requires_grad=True))
    assert kept and all(tensor.dtype == torch.uint8 for tensor in kept)


@pytest.mark.parametrize("tile", [1, 160 * 7, 160 * 47])
def test_tiles_agree_with_the_whole(monkeypatch, tile):
    packed, dense = make(MXFP4Config())
    x = torch.randn(4, 160, requires_grad=True)
    monkeypatch.setattr(reference, "TILE_ELEMENTS", tile)
    out = packed(x)
    torch.testing.assert_close(out, dense(x), rtol=1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(dense(x).square().sum(), x)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def test_a_small_layer_is_one_tile_and_a_large_one_is_not():
    assert len(reference.row_tiles(torch.empty(48, 80, dtype=torch.uint8))) == 1
    tiles = reference.row_tiles(torch.empty(49152, 2048, dtype=torch.uint8, device="meta"))
    assert len(tiles) == 12 and tiles[-1].stop == 49152


def test_stored_bytes_are_the_formats_bits():
    layer = MXFP4Linear(576, 64, bias=False)
    stored = sum(tensor.numel() for tensor in layer.state_dict().values())
    assert stored == 64 * (576 // 2 + 576 // 32 + 5)
    assert packed_shapes(64, 576, MXFP4Config())["mbs"] == (64, 5)
    assert "weight_mbs" not in MXFP4Linear(576, 64, config=MXFP4Config.ocp()).state_dict()


def test_copies_and_state_dicts_are_exact():
    packed, _ = make(MXFP4Config())
    other = MXFP4Linear(160, 48)
    other.load_state_dict(packed.state_dict())
    x = torch.randn(3, 160)
    with torch.no_grad():
        expected = packed(x)
        assert torch.equal(other(x), expected)
        assert torch.equal(copy.deepcopy(packed)(x), expected)
        assert torch.equal(packed.to(torch.float32)(x), expected)


def test_non_finite_weights_and_ragged_inputs_are_refused():
    with pytest.raises(ValueError, match="NaN or infinite"):
        MXFP4Linear.from_weight(torch.full((2, 32), float("nan")), None, MXFP4Config())
    with pytest.raises(ValueError, match="48 values, not a multiple of `block_size`=32"):
        MXFP4Linear(48, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 16}, "block_size=16"),
        ({"activation": "mxfp4", "activation_macro_block_size": 32}, "activation_macro_block_size=32"),
        ({"activation": "mxfp4", "scale_rule": "mse"}, "scale_rule='mse' for activations"),
    ],
)
def test_a_kernel_by_name_refuses_layouts_that_it_does_not_have(arguments, message):
    packed = MXFP4Linear(160, 48, config=MXFP4Config(kernel="bundled", **arguments))
    with pytest.raises(ValueError, match=f"{message}; use kernel='reference'"):
        packed(torch.randn(2, 160))
    assert MXFP4Linear(160, 48, config=MXFP4Config(**arguments)).layout.operations(torch.device("cuda")) is reference


def test_a_forced_kernel_without_an_accelerator_raises_instead_of_falling_back():
    if torch.cuda.is_available():
        return
    packed = MXFP4Linear(160, 48, config=MXFP4Config(kernel="bundled"))
    with pytest.raises(RuntimeError, match="need an accelerator"):
        packed(torch.randn(2, 160))


def test_compiles_in_one_graph():
    packed, _ = make(MXFP4Config())
    x = torch.randn(3, 160)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), packed(x))


def test_the_reference_names_every_argument_of_the_operations():
    names = {name: list(inspect.signature(getattr(reference, name)).parameters) for name in reference.__all__}
    assert names["gemm"][:5] == ["x", "packed", "scale", "macro", "bias"]
    assert set(names["gemm_w4a4"]) - set(names["gemm"]) == {"scale_rule", "activation_macro_block_size"}
