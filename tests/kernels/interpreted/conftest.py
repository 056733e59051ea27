"""Fixtures of the checks that `test_interpreter.py` starts with TRITON_INTERPRET=1; pytest collects none by itself.

A file is about the kernel that its `KERNEL` names, mxfp4_gemm where it has none.
"""

import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from hf_ext.kernel_lookup import interpreter_enabled, load_kernel


@pytest.fixture(scope="module")
def kernel_name(request) -> str:
    return getattr(request.module, "KERNEL", "mxfp4_gemm")


@pytest.fixture(scope="module")
def kernel(kernel_name) -> ModuleType:
    assert interpreter_enabled(), "run these through tests/kernels/test_interpreter.py, or set TRITON_INTERPRET=1"
    return load_kernel(kernel_name, "bundled")


@pytest.fixture(scope="module")
def reference(kernel_name) -> ModuleType:
    return load_kernel(kernel_name, "reference")


@pytest.fixture(scope="module")
def configs(kernel) -> ModuleType:
    return sys.modules[f"{kernel.__name__}.configs"]


@pytest.fixture
def bytes_read(monkeypatch) -> Callable[[torch.Tensor], int]:
    """How many bytes of a tensor kernels have loaded so far in the test, each counted once."""
    from triton.runtime import interpreter

    seen: set[int] = set()
    load = interpreter.InterpreterBuilder.create_masked_load

    def watch(self, ptrs, mask, other, *rest):
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        seen.update((ptrs.data[mask.data][:, None] + np.arange(size, dtype=np.uint64)).ravel().tolist())
        return load(self, ptrs, mask, other, *rest)

    def count(tensor: torch.Tensor) -> int:
        start = tensor.data_ptr()
        return sum(start <= address < start + tensor.numel() * tensor.element_size() for address in seen)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", watch)
    return count
