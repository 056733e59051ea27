"""The products timed beside a dense matmul of the same shape: `kernels benchmark ./kernels/mxfp4_gemm`.

The runner calls `verify_*` for the peer, times it, and compares its result with the kernel's. The peer multiplies by
the weight that the kernel decodes, held dense in bf16. On the CPU (Triton's interpreter) the shapes shrink and the
dtype is float32: that run checks the script and times nothing worth knowing.
"""

import torch
from kernels.benchmark import Benchmark


class MXFP4Products(Benchmark):
    """A weight of 14336 x 4096, the widest projection of an 8B Llama, with macro blocks of 128."""

    seed = 0

    def setup(self):
        small = self.device == "cpu"
        self.n, self.k = (192, 256) if small else (14336, 4096)
        self.dtype = torch.float32 if small else torch.bfloat16
        weight = torch.randn(self.n, self.k, device=self.device) / (4 * self.k**0.5)
        self.weight = self.kernel.quantize(weight)
        self.plain = self.kernel.quantize(weight, macro_block_size=None)
        self.dense = self.kernel.dequantize(*self.weight, dtype=self.dtype)
        self.dense_plain = self.kernel.dequantize(*self.plain, dtype=self.dtype)
        self.x = {m: torch.randn(m, self.k, device=self.device, dtype=self.dtype) for m in (1, 16, 512)}

        # W4A4 rounds x first: the peer gets the rounded x, and its time is a matmul's alone.
        packed, scale, macro = self.kernel.quantize(self.x[512], macro_block_size=64)
        self.rounded = self.kernel.dequantize(packed, scale, macro, macro_block_size=64, dtype=self.dtype)
        packed, scale, _ = self.kernel.quantize(self.x[512], macro_block_size=None)
        self.rounded_plain = self.kernel.dequantize(packed, scale, dtype=self.dtype)

    def benchmark_w4a16_1_row(self):
        self.out = self.kernel.gemm(self.x[1], *self.weight)

    def verify_w4a16_1_row(self):
        return self.x[1] @ self.dense.T

    def benchmark_w4a16_1_row_without_macro(self):
        self.out = self.kernel.gemm(self.x[1], *self.plain)

    def verify_w4a16_1_row_without_macro(self):
        return self.x[1] @ self.dense_plain.T

    def benchmark_w4a16_16_rows(self):
        self.out = self.kernel.gemm(self.x[16], *self.weight)

    def verify_w4a16_16_rows(self):
        return self.x[16] @ self.dense.T

    def benchmark_w4a16_512_rows(self):
        self.out = self.kernel.gemm(self.x[512], *self.weight)

    def verify_w4a16_512_rows(self):
        return self.x[512] @ self.dense.T

    def benchmark_w4a4_512_rows(self):
        self.out = self.kernel.gemm_w4a4(self.x[512], *self.weight)

    def verify_w4a4_512_rows(self):
        return self.rounded @ self.dense.T

    def benchmark_w4a4_512_rows_without_macro(self):
        self.out = self.kernel.gemm_w4a4(self.x[512], *self.plain, activation_macro_block_size=None)

    def verify_w4a4_512_rows_without_macro(self):
        return self.rounded_plain @ self.dense_plain.T
