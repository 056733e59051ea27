"""The demo: the folder it writes into, and the whole of it on a tiny model."""

import json
import sys

import pytest
import torch

from hf_ext.benchmarks import demo


def test_a_folder_with_other_things_is_refused_unless_overwrite_is_given(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty and not from an earlier demo"):
        demo._claim(tmp_path, overwrite=False)
    demo._claim(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    demo._claim(tmp_path, overwrite=False)  # now it is the demo's


def test_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ValueError, match="is a file"):
        demo._claim(path, overwrite=True)


@pytest.mark.parametrize("library", ["matplotlib", "gguf"])
def test_a_missing_library_is_named_before_anything_is_written(tmp_path, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=library):
        demo.main(out=tmp_path / "out", prompt="hello", windows=2, threads=0)
    assert not (tmp_path / "out").exists()


def test_bars_of_transformers_are_off_while_the_demo_runs_and_back_afterwards(capsys):
    from transformers import modeling_gguf_pytorch_utils as gguf

    bar = gguf.tqdm
    with demo._quiet():
        assert list(gguf.tqdm([1, 2], desc="Converting")) == [1, 2]
    assert gguf.tqdm is bar and capsys.readouterr().err == ""


@pytest.fixture
def tiny_demo(monkeypatch, tmp_path, tiny_llama_dir):
    """The demo with a tiny model, whose tokenizer gets a chat template."""
    import shutil

    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(demo.lm, "fetch_smollm2", lambda say: folder)
    return folder


def test_the_demo_writes_its_results_and_a_fresh_process_repeats_the_text(tmp_path, tiny_demo, capsys):
    out = tmp_path / "out"
    demo.main(out=out, prompt="hello [there]", windows=2, threads=1)
    said = capsys.readouterr().out
    assert "wrote the same text" in said
    assert "dense: hello [there]" in said  # brackets are no markup
    assert "measuring the dense model\n" in said  # the steps, as no terminal shows the bars
    table = {row["format"]: row for row in json.loads((out / "table.json").read_text())}
    assert table["dense float32"]["kl"] == 0
    assert table["OCP MXFP4"]["bits_per_weight"] == 4.25
    assert all(row["kl"] > 0 for name, row in table.items() if name != "dense float32")
    assert table["OCP MXFP4"]["megabytes"] < table["dense float32"]["megabytes"]
    assert (out / "smollm2-mxfp4" / "model.safetensors").exists()
    for name in ("perplexity", "weight_error"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir()) == [
        ".hf-ext-demo",
        "perplexity.png",
        "smollm2-mxfp4",
        "table.json",
        "weight_error.png",
    ]


def test_another_text_in_the_fresh_process_is_a_failure(tmp_path, tiny_demo, monkeypatch, capsys):
    monkeypatch.setattr(demo, "_in_fresh_process", lambda *_: "something else")
    monkeypatch.setattr(demo, "_plot_layers", lambda *_: None)
    with pytest.raises(SystemExit) as stop:
        demo.main(out=tmp_path / "out", prompt="hello there", windows=2, threads=1)
    assert stop.value.code == 1
    assert "wrote another text" in capsys.readouterr().out
    assert torch.get_num_threads() == 1
