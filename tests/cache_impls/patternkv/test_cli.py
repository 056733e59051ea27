"""`hf-ext cache inspect`, called as the command calls it."""

import json

import pytest
import torch

from hf_ext import PatternKVCache
from hf_ext.cache_impls.patternkv.files import CONFIG_NAME, TENSORS_NAME
from hf_ext.cli import main


@pytest.fixture
def run(capsys, monkeypatch):
    """Exit code, standard output and standard error of `hf-ext cache inspect ...`."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main(["cache", "inspect", *map(str, arguments)])
        captured = capsys.readouterr()
        return exit.value.code, captured.out, captured.err

    return call


@pytest.fixture
def folder(tiny, prompts, small, tmp_path):
    model = tiny("gemma3", num_hidden_layers=4, layer_types=["full_attention"] * 3 + ["sliding_attention"])
    cache = PatternKVCache(model.config, **small, nbits=4)
    with torch.no_grad():
        model(**prompts(2, 110), cache=cache)
    cache.save_pretrained(tmp_path / "cache [1]", token_ids=[[1]])
    return tmp_path / "cache [1]"


def test_the_table_shows_model_options_tokens_bytes_and_bits(run, folder):
    code, out, err = run(folder)
    assert code == 0 and err == ""
    assert "unnamed (gemma3_text)" in out and "110 in each of 2 row(s), their ids are kept" in out
    assert "nbits=4, num_patterns=8, group_size=16, residual_length=32" in out
    lines = [line for line in out.splitlines() if "PatternKVLayer" in line]
    assert len(lines) == 1 and "0-2" in lines[0]  # layers that are alike share a row
    # 4 bits, 32 for scale and zero over 16, 8 for an id over 16 channels, 9 rows of the bank over 96 tokens
    assert f"{4 + 2 + 0.5 + 16 * 9 / 96:.3f}" in lines[0]
    assert "DynamicSlidingWindowLayer" in out
    assert out.rstrip().endswith(f"cache in {folder}")


def test_json_holds_every_layer(run, folder):
    code, out, _ = run(folder, "--json")
    found = json.loads(out)
    assert code == 0 and [layer["layer"] for layer in found["layers"]] == [0, 1, 2, 3]
    assert found["bytes"] == sum(layer["bytes"] for layer in found["layers"])
    assert found["layers"][3]["bits_key"] is None and found["tokens"] == 110 and found["rows"] == 2


def test_errors_are_one_line(run, folder, tmp_path):
    assert run(tmp_path / "no") == (
        1,
        "",
        f"error: {tmp_path / 'no'} is not a folder; name one that `save_pretrained` of a cache wrote\n",
    )
    (tmp_path / "empty").mkdir()
    code, out, err = run(tmp_path / "empty")
    assert (code, out) == (1, "") and err.count("\n") == 1 and f"has no {CONFIG_NAME}: it is not a cache" in err
    path = folder / TENSORS_NAME
    path.write_bytes(path.read_bytes()[:500])
    code, out, err = run(folder, "--json")
    assert (code, out) == (1, "") and err.count("\n") == 1 and f"{TENSORS_NAME} cannot be read" in err
    (folder / CONFIG_NAME).write_text("{")
    code, out, err = run(folder)
    assert (code, out) == (1, "") and err.count("\n") == 1 and "is damaged" in err
