"""Fixtures of the checks that `test_interpreter.py` starts with TRITON_INTERPRET=1; pytest collects none by itself.

A file is about the kernel that its `KERNEL` names, mxfp4_gemm where it has none.
"""

import sys
from types import ModuleType

import pytest

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
