"""Decode attention timed beside SDPA over the dense cache: `kernels benchmark ./kernels/patternkv_attention`.

The runner calls `verify_*` for the peer, times it, and compares its result with the kernel's. The peer attends to the
same keys and values, dequantised to bf16 beforehand: what it reads, not what it takes to dequantise, is compared. On
the CPU (Triton's interpreter) the shapes shrink and the dtype is float32: that run checks the script and times nothing
worth knowing.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class PackedDecodeAttention(Benchmark):
    """Attention of an 8B Llama (32 query heads, 8 KV heads of 128 channels), one new token a row."""

    seed = 0

    def setup(self):
        self.small = self.device == "cpu"
        self.dtype = torch.float32 if self.small else torch.bfloat16
        self.problems = {
            "2_bits_32k": self.problem(1, 32768, 2),
            "4_bits_32k": self.problem(1, 32768, 4),
            "2_bits_4k_16_rows": self.problem(16, 4096, 2),
        }

    def problem(self, rows, packed, bits, patterns=48, group=128, dense=132):
        """Packed arguments, and the dense keys and values they stand for."""
        packed = 2 * group if self.small else packed
        rows = min(rows, 2) if self.small else rows
        kv_heads, heads, head_dim = (2, 4, 64) if self.small else (8, 32, 128)
        sides = []
        for groups in ((packed // group, head_dim), (packed, 1)):
            shape = (rows, kv_heads, *groups)
            codes = torch.randint(
                0, 256, (rows, kv_heads, packed, head_dim * bits // 8), dtype=torch.uint8, device=self.device
            )
            scale = (torch.rand(shape, device=self.device) * 2 / 2**bits).half()
            zero = (torch.randn(shape, device=self.device) / 2 - 1).half()
            ids = torch.randint(0, patterns, (rows, kv_heads, packed), device=self.device).to(torch.uint8)
            bank = torch.randn(rows, kv_heads, patterns, head_dim, device=self.device, dtype=self.dtype)
            bank[:, :, 0] = 0
            tail = torch.randn(rows, kv_heads, dense, head_dim, device=self.device, dtype=self.dtype)
            sides.append(((codes, scale, zero, ids, bank), tail))
        query = torch.randn(rows, heads, head_dim, device=self.device, dtype=self.dtype)
        (keys, key_tail), (values, value_tail) = sides
        arguments = (query, *keys, *values, key_tail, value_tail)
        options = {"key_bits": bits, "value_bits": bits, "group_size": group, "value_group_size": head_dim}
        full = [torch.cat([self.dequantize(*side, bits), tail], 2) for side, tail in sides]
        return arguments, {**options, "scaling": head_dim**-0.5}, full

    def dequantize(self, codes, scale, zero, ids, bank, bits):
        planes = [(codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
        code = torch.cat(planes, -1).float()
        groups = scale.shape[2]
        residual = code.unflatten(2, (groups, -1)) * scale.unsqueeze(3).float() + zero.unsqueeze(3).float()
        pattern = bank.gather(2, ids.long()[..., None].expand(*ids.shape, bank.shape[-1]))
        return (residual.flatten(2, 3) + pattern.float()).to(self.dtype)

    def packed(self, name):
        arguments, options, _ = self.problems[name]
        self.out = self.kernel.decode_attention(*arguments, **options)[0]

    def dense(self, name):
        arguments, options, (keys, values) = self.problems[name]
        query = arguments[0].unsqueeze(2)
        return F.scaled_dot_product_attention(query, keys, values, scale=options["scaling"], enable_gqa=True)[:, :, 0]

    def benchmark_2_bits_32k(self):
        self.packed("2_bits_32k")

    def verify_2_bits_32k(self):
        return self.dense("2_bits_32k")

    def benchmark_4_bits_32k(self):
        self.packed("4_bits_32k")

    def verify_4_bits_32k(self):
        return self.dense("4_bits_32k")

    def benchmark_2_bits_4k_16_rows(self):
        self.packed("2_bits_4k_16_rows")

    def verify_2_bits_4k_16_rows(self):
        return self.dense("2_bits_4k_16_rows")
