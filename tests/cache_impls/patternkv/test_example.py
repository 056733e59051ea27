"""examples/long_context.py, on the tiny model."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = "The ferry left at dawn, and by noon the island was a line on the water. " * 10


@pytest.fixture
def run(tiny_llama_dir, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)

    def call(*options):
        command = [sys.executable, str(ROOT / "examples" / "long_context.py"), "--model", str(tiny_llama_dir)]
        command += ["--document", str(tmp_path / "text.txt"), "--out", str(tmp_path / "cache"), *options]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)

    return call


@pytest.mark.slow
def test_the_reloaded_cache_gives_the_same_answers(run, tmp_path):
    result = run("--tokens", "300", "--ask", "When?", "--ask", "Where?")
    assert result.returncode == 0, result.stderr
    assert "300 tokens, " in result.stdout and "Q: When?" in result.stdout
    assert result.stdout.rstrip().endswith("in a fresh process: the same answers")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [
        "patternkv_cache.safetensors",
        "patternkv_config.json",
    ]


@pytest.mark.slow
def test_too_short_a_document_is_refused(run, tmp_path):
    result = run("--tokens", "100")
    assert result.returncode == 2 and "100 tokens are too few to pack" in result.stderr
    assert not (tmp_path / "cache").exists()
