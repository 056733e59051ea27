"""Attention with low-rank parts timed beside the materialised way: `kernels benchmark ./kernels/flash_lora_attention`.

The runner calls `verify_*` for the peer, times it, and compares its result with the kernel's. The peer writes the
adapter's part of keys and values out in full, as a model with peft does, and calls `scaled_dot_product_attention`. On
the CPU (Triton's interpreter) the shapes shrink and the dtype is float32: that run checks the script and times nothing
worth knowing.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class LowRankAttention(Benchmark):
    """Attention of an 8B Llama (32 query heads, 8 KV heads of 128 channels) with an adapter of rank 16."""

    seed = 0

    def setup(self):
        self.small = self.device == "cpu"
        self.dtype = torch.float32 if self.small else torch.bfloat16
        self.problems = {
            "decode_32k": self.problem(1, 1, 32768),
            "decode_4k_16_rows_values_alone": self.problem(16, 1, 4096, keys=False),
            "prefill_4k": self.problem(1, 4096, 4096),
        }

    def problem(self, rows, queries, tokens, rank=16, keys=True):
        """Arguments of the kernel: one query a row, or all tokens."""
        if self.small:
            rows, queries, tokens = min(rows, 2), min(queries, 90), 90
        kv_heads, heads, head_dim = (2, 4, 64) if self.small else (8, 32, 128)

        def random(*shape):
            return torch.randn(shape, device=self.device, dtype=self.dtype)

        def second():
            return random(kv_heads * head_dim, rank) / rank**0.5

        angle = torch.arange(tokens, device=self.device)[:, None] * 10000.0 ** -(
            torch.arange(0, head_dim, 2, device=self.device) / head_dim
        )
        angle = torch.cat([angle, angle], -1)[None]
        base = [random(rows, kv_heads, tokens, head_dim) for _ in range(2)]
        u_k, b_k = (random(rows, tokens, rank), second()) if keys else (None, None)
        cos, sin = (angle.cos().to(self.dtype), angle.sin().to(self.dtype)) if keys else (None, None)
        query = random(rows, heads, queries, head_dim)
        arguments = (query, *base, u_k, random(rows, tokens, rank), b_k, second(), cos, sin)
        return arguments, {"scale": head_dim**-0.5, "lora_scale_k": 0.5, "lora_scale_v": 0.5}

    def low_rank(self, name):
        arguments, options = self.problems[name]
        self.out = self.kernel.flash_lora_attention(*arguments, **options)

    def materialised(self, name):
        (query, key, value, u_k, u_v, b_k, b_v, cos, sin), options = self.problems[name]

        def written_out(u, b, scale):
            rows, tokens, _ = u.shape
            return (scale * (u @ b.T)).view(rows, tokens, -1, query.shape[3]).transpose(1, 2)

        if u_k is not None:
            part = written_out(u_k, b_k, options["lora_scale_k"])
            first, second = part.chunk(2, -1)
            key = key + part * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
        value = value + written_out(u_v, b_v, options["lora_scale_v"])
        causal = query.shape[2] > 1
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=options["scale"], enable_gqa=True
        )

    def benchmark_decode_32k(self):
        self.low_rank("decode_32k")

    def verify_decode_32k(self):
        return self.materialised("decode_32k")

    def benchmark_decode_4k_16_rows_values_alone(self):
        self.low_rank("decode_4k_16_rows_values_alone")

    def verify_decode_4k_16_rows_values_alone(self):
        return self.materialised("decode_4k_16_rows_values_alone")

    def benchmark_prefill_4k(self):
        self.low_rank("prefill_4k")

    def verify_prefill_4k(self):
        return self.materialised("prefill_4k")
