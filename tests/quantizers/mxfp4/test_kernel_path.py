"""The layer through the Triton kernels (in the interpreter) against the layer through the reference."""

CODE = """
import torch
from hf_ext import MXFP4Config, MXFP4Linear
from hf_ext.quantizers.mxfp4.linear import PackedLayout

torch.manual_seed(0)
for arguments in (
    {},
    {"macro_block_size": None},
    {"macro_block_size": 64},
    {"activation": "mxfp4"},
    {"activation": "mxfp4", "macro_block_size": None, "activation_macro_block_size": None},
):
    weight, bias, x = torch.randn(40, 160), torch.randn(40), torch.randn(3, 5, 160)
    layer = MXFP4Linear.from_weight(weight, bias, MXFP4Config(kernel="bundled", **arguments))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = layer(ours)
    out.square().sum().backward()
    dense = layer.dequantize()
    layer.layout = PackedLayout(MXFP4Config(kernel="reference", **arguments))
    expected = layer(theirs)
    expected.square().sum().backward()
    assert torch.equal(dense, layer.dequantize())
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    print("agrees", arguments)
"""


def test_layer_and_gradients_agree_with_the_reference(fresh_python):
    assert fresh_python(CODE, env={"TRITON_INTERPRET": "1"}).count("agrees") == 5


def test_the_environment_forces_the_kernel(fresh_python):
    code = """
import torch
from hf_ext import MXFP4Config, MXFP4Linear
layer = MXFP4Linear.from_weight(torch.randn(8, 64), None, MXFP4Config())
print(layer.layout.operations(torch.device("cpu")).__name__)
"""
    forced = fresh_python(code, env={"TRITON_INTERPRET": "1", "HF_EXT_KERNELS": "bundled"})
    assert "mxfp4_gemm" in forced
    assert fresh_python(code).split()[-1] == "hf_ext.quantizers.mxfp4.reference"
