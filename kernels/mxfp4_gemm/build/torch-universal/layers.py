"""Layer for `kernels.kernelize`: swaps the forward of hf_ext's MXFP4Linear for the Triton kernels."""

import torch
from torch import nn

from .functional import gemm, gemm_w4a4

__all__ = ["MXFP4Linear"]


class MXFP4Linear(nn.Module):
    """Stateless: reads weight_packed, weight_scale, weight_mbs, bias and layout of the layer it stands in for.

    ``layout`` carries block_size, macro_block_size, activation (None or "mxfp4"), scale_rule,
    activation_macro_block_size and compute_dtype (None: x's own).
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features] in the dtype of x."""
        layout = self.layout
        dtype = layout.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        arguments = (x.to(dtype), self.weight_packed, self.weight_scale, self.weight_mbs, bias)
        sizes = {"block_size": layout.block_size, "macro_block_size": layout.macro_block_size}
        if layout.activation is None:
            return gemm(*arguments, **sizes).to(x.dtype)
        return gemm_w4a4(
            *arguments,
            **sizes,
            scale_rule=layout.scale_rule,
            activation_macro_block_size=layout.activation_macro_block_size,
        ).to(x.dtype)
