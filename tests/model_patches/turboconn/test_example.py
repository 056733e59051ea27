"""examples/parity.py, on the tiny model."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_example_trains_both_models_and_leaves_a_table_a_plot_and_a_model(tiny_llama_dir, tmp_path, fresh_python):
    command = [sys.executable, str(ROOT / "examples" / "parity.py"), "--model", str(tiny_llama_dir), "--steps", "2"]
    command += ["--length", "4", "--out", str(tmp_path / "parity")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    (head,) = (line for line in lines if line.startswith("accuracy after bits"))
    assert head.split()[3:] == ["2", "4", "8", "16", "32"]
    place = lines.index(head)
    assert lines[place + 1].startswith("base ") and lines[place + 2].startswith("TurboConn, dense")
    assert all(line.count("%") == 5 for line in lines[place + 1 : place + 3])
    assert (tmp_path / "parity" / "accuracy.png").stat().st_size > 10_000
    loaded = fresh_python(
        "from transformers import AutoModelForCausalLM\n"
        f"folder = {str(tmp_path / 'parity' / 'model')!r}\n"
        "model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)\n"
        "print(type(model).__name__, max(p.abs().max().item() for p in model.model.turbo_links.parameters()) > 0)"
    )
    assert loaded.split()[-2:] == ["TurboConnLlamaForCausalLM", "True"]
