"""Fixtures of the checks that `test_interpreter.py` starts with TRITON_INTERPRET=1; pytest collects none by itself."""

import sys
from types import ModuleType

import pytest

from hf_ext.kernel_lookup import interpreter_enabled, load_kernel


@pytest.fixture(scope="session")
def kernel() -> ModuleType:
    assert interpreter_enabled(), "run these through tests/kernels/test_interpreter.py, or set TRITON_INTERPRET=1"
    return load_kernel("mxfp4_gemm", "bundled")


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    return load_kernel("mxfp4_gemm", "reference")


@pytest.fixture(scope="session")
def configs(kernel) -> ModuleType:
    return sys.modules[f"{kernel.__name__}.configs"]
