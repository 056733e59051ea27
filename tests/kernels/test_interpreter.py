"""Runs the checks in `interpreted/`, each file in a process of its own: the interpreter is a choice per process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("check_*.py")))
def test_kernels_are_right_in_the_interpreter(name):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "HF_EXT_"))}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(FOLDER / name)],
        env={**inherited, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        timeout=500,
    )
    if result.returncode:
        pytest.fail(f"{result.stdout}\n{result.stderr}", pytrace=False)
    assert " passed" in result.stdout and "skipped" not in result.stdout
