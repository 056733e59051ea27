"""examples/merge_adapters.py, on the tiny model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[3]


def run(tiny_llama_dir: Path, folder: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "examples" / "merge_adapters.py"), "--model", str(tiny_llama_dir)]
    command += ["--steps", "2", "--out", str(folder / "out"), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=200)


@pytest.mark.slow
def test_it_trains_merges_reloads_and_shows_what_was_kept(tiny_llama_dir, tmp_path):
    result = run(tiny_llama_dir, tmp_path)
    assert result.returncode == 0, result.stderr
    for name in ("digits", "dates"):
        line = rf"{name} +\d+% +\d+%   [01]\.\d\d, [01]\.\d\d"
        assert re.search(line, result.stdout), result.stdout
    assert "rank 8; the merged adapter is in " in result.stdout
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_llama_dir), tmp_path / "out" / "merged"
    )
    assert model.peft_config["default"].r == 8
