"""MXFP4 with overflow-aware and macro-block scaling in Triton: quantise, dequantise, W4A16 and W4A4 products."""

from . import layers
from .functional import dequantize, gemm, gemm_w4a4, quantize

__all__ = ["dequantize", "gemm", "gemm_w4a4", "layers", "quantize"]
