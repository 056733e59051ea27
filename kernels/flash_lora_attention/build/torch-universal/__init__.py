"""Attention in Triton over keys and values that are a base part plus a low-rank part, which is never expanded."""

from .functional import flash_lora_attention

__all__ = ["flash_lora_attention"]
