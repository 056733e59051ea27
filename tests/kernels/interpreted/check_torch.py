"""What the kernels owe PyTorch: operators that torch.compile takes, gradients, a layer, and clear errors."""

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_ext.kernel_lookup import kernel_folder


@pytest.fixture
def problem(reference):
    torch.manual_seed(0)
    return torch.randn(3, 5, 96), reference.quantize(torch.randn(24, 96)), torch.randn(24)


@pytest.fixture(scope="module")
def operators(kernel):
    return sys.modules[f"{kernel.__name__}.ops"]


@pytest.mark.parametrize("product", ["gemm", "gemm_w4a4"])
def test_products_compile_without_a_graph_break(kernel, problem, product):
    x, packed, bias = problem
    run = getattr(kernel, product)
    compiled = torch.compile(lambda x: 2 * run(x, *packed, bias), fullgraph=True, backend="aot_eager", dynamic=False)
    assert torch.equal(compiled(x), 2 * run(x, *packed, bias))


def test_quantize_and_dequantize_compile_without_a_graph_break(kernel, problem):
    x = problem[0]

    def round_trip(x):
        return kernel.dequantize(*kernel.quantize(x))

    assert torch.equal(torch.compile(round_trip, fullgraph=True, backend="aot_eager")(x), round_trip(x))


def test_operators_pass_pytorchs_own_checks(operators, problem):
    x, (packed, scale, macro), bias = problem
    x = x.flatten(0, 1)
    cases = [
        (operators.quantize, (x, "oas", 128)),
        (operators.quantize, (x, "oas", 0)),
        (operators.dequantize, (packed, scale, macro, 128, torch.float16)),
        (operators.gemm, (x.requires_grad_(), packed, scale, macro, bias.requires_grad_(), 128)),
        (operators.gemm, (x, packed, scale, None, None, 0)),
        (operators.gemm_w4a4, (x, packed, scale, macro, bias, 128, "oas", 64)),
    ]
    for operator, arguments in cases:
        torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("product", ["gemm", "gemm_w4a4"])
def test_gradients_reach_x_and_bias(kernel, reference, problem, product):
    x, packed, bias = problem
    x, bias = x.requires_grad_(), bias.requires_grad_()
    weights = torch.randn(3, 5, 24)
    (getattr(kernel, product)(x, *packed, bias) * weights).sum().backward()
    torch.testing.assert_close(x.grad, weights @ reference.dequantize(*packed), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.grad, weights.sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_a_second_copy_of_the_kernel_loads_beside_the_first(kernel, problem, tmp_path):
    from kernels import get_local_kernel

    shutil.copytree(kernel_folder("mxfp4_gemm"), tmp_path / "copy")
    copy = get_local_kernel(tmp_path / "copy")
    assert copy is not kernel
    x, packed, bias = problem
    assert torch.equal(copy.gemm(x, *packed, bias), kernel.gemm(x, *packed, bias))


@pytest.mark.parametrize("activation", [None, "mxfp4"])
def test_the_layer_reads_the_state_of_the_layer_it_stands_in_for(kernel, problem, activation):
    x, (packed, scale, macro), bias = problem
    layout = SimpleNamespace(
        block_size=32,
        macro_block_size=128,
        activation=activation,
        scale_rule="oas",
        activation_macro_block_size=64,
        compute_dtype=None,
    )
    host = nn.Module()
    host.layout, host.weight_packed, host.weight_scale, host.weight_mbs, host.bias = layout, packed, scale, macro, bias
    product = kernel.gemm if activation is None else kernel.gemm_w4a4
    assert torch.equal(kernel.layers.MXFP4Linear.forward(host, x), product(x, packed, scale, macro, bias))


def test_the_layer_holds_no_state(kernel):
    layer = kernel.layers.MXFP4Linear
    assert set(vars(layer)) - {"__doc__", "__module__"} <= {"forward", "can_torch_compile", "has_backward"} | {
        name for name in vars(layer) if name.startswith("__")
    }
    assert not list(layer().parameters()) and not list(layer().buffers())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda a: a.update(x=a["x"].double()), TypeError, "x has dtype torch.float64: expected torch.bfloat16"),
        (lambda a: a.update(x=a["x"][..., :64]), ValueError, "x has K=64 but packed holds K=96"),
        (lambda a: a.update(x=a["x"][..., :90]), ValueError, "must be a positive multiple of 32"),
        (
            lambda a: a.update(packed=a["packed"].int()),
            TypeError,
            "packed has dtype torch.int32: expected torch.uint8",
        ),
        (lambda a: a.update(packed=a["packed"][None]), ValueError, r"packed has shape .* expected \[N, K / 2\]"),
        (lambda a: a.update(packed=a["packed"][:, :40]), ValueError, "so K=80: K must be a multiple of 32"),
        (lambda a: a.update(scale=a["scale"].float()), TypeError, "scale has dtype torch.float32"),
        (lambda a: a.update(scale=a["scale"][:, :2]), ValueError, r"scale has shape \(24, 2\): expected \(24, 3\)"),
        (lambda a: a.update(macro=a["macro"][:9]), ValueError, r"macro has shape \(9, 1\): expected \(24, 1\)"),
        (lambda a: a.update(macro_block_size=64), ValueError, r"expected \(24, 2\) for K=96 and macro_block_size=64"),
        (lambda a: a.update(macro_block_size=48), ValueError, "macro_block_size=48: expected one of 32, 64, 128"),
        (lambda a: a.update(bias=a["bias"][:5]), ValueError, r"bias is torch.float32 \(5,\): expected .* \(24,\)"),
        (lambda a: a.update(block_size=16), ValueError, "block_size=16: the Triton kernels take blocks of 32; use"),
    ],
)
@pytest.mark.parametrize("product", ["gemm", "gemm_w4a4"])
def test_wrong_arguments_are_named(kernel, problem, product, change, error, words):
    x, (packed, scale, macro), bias = problem
    arguments = {"x": x, "packed": packed, "scale": scale, "macro": macro, "bias": bias}
    change(arguments)
    with pytest.raises(error, match=words):
        getattr(kernel, product)(**arguments)


def test_a_rule_without_closed_form_is_refused_by_name(kernel, problem):
    x, packed, _ = problem
    with pytest.raises(ValueError, match="scale_rule='mse': the Triton kernels take ocp, oas, even, ceil"):
        kernel.quantize(x, scale_rule="mse")
    with pytest.raises(ValueError, match="scale_rule='mse'"):
        kernel.gemm_w4a4(x, *packed, scale_rule="mse")


def test_other_sizes_and_dtypes_are_refused_by_name(kernel, problem):
    x, (packed, scale, macro), _ = problem
    with pytest.raises(ValueError, match="block_size=16"):
        kernel.quantize(x, block_size=16)
    with pytest.raises(ValueError, match="macro_block_size=256"):
        kernel.quantize(x, macro_block_size=256)
    with pytest.raises(ValueError, match="block_size=16"):
        kernel.dequantize(packed, scale, macro, block_size=16)
    with pytest.raises(TypeError, match=r"dtype=torch.int8: expected torch.bfloat16"):
        kernel.dequantize(packed, scale, macro, dtype=torch.int8)
    with pytest.raises(ValueError, match="activation_macro_block_size=32: the kernel takes 64, 128 or None"):
        kernel.gemm_w4a4(x, packed, scale, macro, activation_macro_block_size=32)
