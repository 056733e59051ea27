"""Decode attention in Triton over a KV cache that is packed to 2, 4 or 8 bits, plus a full-precision part."""

from .functional import decode_attention

__all__ = ["decode_attention"]
