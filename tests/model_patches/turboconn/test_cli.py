"""`hf-ext patch turboconn`: a folder with all that belongs to it, or one clear error and no folder."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from hf_ext.cli import main
from hf_ext.publishing import publish_model


def run(*arguments, code: int = 0) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in ("patch", *arguments)])
    assert stopped.value.code == code


@pytest.fixture
def source(tiny_llama_dir, tmp_path):
    """The tiny Llama with what checkpoints have beside their weights."""
    folder = tmp_path / "source"
    shutil.copytree(tiny_llama_dir, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "LICENSE").write_text("free")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# tiny\n")
    return folder


def test_a_patched_folder_says_what_its_source_says(source, tmp_path, capsys, ids):
    out = tmp_path / "deep" / "turbo"
    run("turboconn", source, out, "--links", "dense", "--rank", 4, "--group-size", 2, "--max-shard-size", "50KB")
    said = " ".join(capsys.readouterr().out.split())
    assert "1 link(s): 512 parameters on" in said and said.endswith(f"in {out}; load it with trust_remote_code=True")
    assert [path.name for path in out.parent.iterdir()] == ["turbo"]
    names = {path.name for path in out.iterdir()}
    assert {"model.safetensors.index.json", "modeling_turboconn.py", "configuration_turboconn.py"} <= names
    assert (out / "LICENSE").read_text() == "free"
    assert (out / "generation_config.json").is_file()
    settings = json.loads((out / "config.json").read_text())["turboconn"]
    assert (settings["rank"], settings["group_size"], settings["links"]) == (4, 2, "dense")

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    base = AutoModelForCausalLM.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    prompt = tokenizer("some text", return_tensors="pt")
    options = {"max_new_tokens": 10, "do_sample": False}
    assert torch.equal(model.generate(**prompt, **options), base.generate(**prompt, **options))

    card = (out / "README.md").read_text()
    assert "license: apache-2.0" in card and "- turboconn" in card and "trust_remote_code=True" in card
    assert "1 to 0 (matrices of rank 4)" in card and "A `LlamaForCausalLM`" in card
    assert "README.md" in publish_model(out, dry_run=True).files


def test_every_option_reaches_the_settings(source, tmp_path):
    options = ["--links", "1:0", "--rank", "none", "--gate", "input", "--train-mode", "auto", "--n-iters", 7]
    options += ["--bptt-window", 3, "--history", 20, "--target-scale", "--dtype", "bfloat16", "--base-model", "me/x"]
    run("turboconn", source, tmp_path / "turbo", *options)
    config = json.loads((tmp_path / "turbo" / "config.json").read_text())
    expected = {"links": [[1, 0]], "rank": None, "gate": "input", "train_mode": "auto", "n_iters": 7}
    expected |= {"bptt_window": 3, "history": 20, "target_scale": True}
    assert expected.items() <= config["turboconn"].items() and config["dtype"] == "bfloat16"
    assert "base_model: me/x" in (tmp_path / "turbo" / "README.md").read_text()


def test_an_existing_folder_is_replaced_only_when_told_so(source, tmp_path, capsys):
    out = tmp_path / "turbo"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    run("turboconn", source, out, code=1)
    assert "--overwrite" in capsys.readouterr().err and (out / "mine.txt").is_file()
    (tmp_path / "turbo.partial").mkdir()  # of a run that was killed
    (tmp_path / "turbo.partial" / "junk").touch()
    run("turboconn", source, out, "--overwrite")
    assert (out / "config.json").is_file() and not (out / "mine.txt").exists() and not (out / "junk").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "turbo"]
    run("turboconn", source, source, "--overwrite", code=1)
    assert "is the source itself" in capsys.readouterr().err and (source / "config.json").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--links", "0:1"], "pair (0, 1): the source must lie above"),
        (["--links", "5:1"], "pair (5, 1), but the model has 2 layers"),
        (["--links", "1:0,x"], "--links is '1:0,x'; pairs are written SOURCE:TARGET"),
        (["--links", "wide"], "links is 'wide'; it must be one of 'dense'"),
        (["--rank", "65"], "rank is 65; it must be at most the model's hidden_size, 64"),
        (["--rank", "many"], "--rank is 'many'; it must be a whole number or none"),
        (["--group-size", "0"], "group_size is 0"),
        (["--train-mode", "fast"], "train_mode is 'fast'"),
        (["--dtype", "float99"], "dtype is 'float99'"),
        (["--dtype", "int8"], "dtype is 'int8'; it must be a float type"),
    ],
)
def test_wrong_options_are_one_line_and_leave_nothing(options, message, source, tmp_path, capsys):
    run("turboconn", source, tmp_path / "turbo", *options, code=1)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_sources_that_cannot_be_patched_are_refused_before_their_weights_are_read(source, tmp_path, capsys):
    # None of these has weights that could be read.
    (source / "model.safetensors").write_bytes(b"")
    config = json.loads((source / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "gptq"}}
    patched = {**config, "model_type": "turboconn_llama", "turboconn": {}}
    for values, message in (
        (
            GPT2Config(architectures=["GPT2LMHeadModel"]).to_dict(),
            "GPT2LMHeadModel (model_type 'gpt2') is not supported",
        ),
        (quantized, "LlamaForCausalLM is quantized"),
        (patched, "has TurboConn links already"),
        ([], "is not a model's configuration: it holds a list"),
    ):
        (source / "config.json").write_text(json.dumps(values))
        run("turboconn", source, tmp_path / "turbo", code=1)
        assert message in capsys.readouterr().err
    (source / "config.json").write_text("{")
    run("turboconn", source, tmp_path / "turbo", code=1)
    assert "config.json is not JSON" in capsys.readouterr().err
    (source / "config.json").unlink()
    run("turboconn", source, tmp_path / "turbo", code=1)
    assert "it has no config.json" in capsys.readouterr().err
    run("turboconn", tmp_path / "nowhere", tmp_path / "turbo", code=1)
    assert "nowhere does not exist" in capsys.readouterr().err
    run("turboconn", source / "LICENSE", tmp_path / "turbo", code=1)
    assert "is a file, not the folder of a checkpoint" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_unknown_method_is_answered_with_those_there_are(tmp_path, capsys):
    run("turbo", "x", tmp_path / "y", code=2)
    assert "turboconn" in capsys.readouterr().err


def test_a_killed_run_leaves_no_folder_that_looks_complete(source, tmp_path, monkeypatch):
    from hf_ext.model_patches import checkpoint

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_text", killed)  # the card, which is written last
    run("turboconn", source, tmp_path / "turbo", code=130)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "turbo.partial"]


@pytest.mark.parametrize("destination", [".", ".."])
def test_the_folder_one_stands_in_is_not_replaced(destination, source, tmp_path, monkeypatch, capsys):
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    run("turboconn", source, destination, "--overwrite", code=1)
    error = capsys.readouterr().err
    assert f"{destination} is the folder that you are in" in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside", "source"]


def test_a_destination_below_a_file_is_refused_before_the_weights_are_read(source, tmp_path, capsys):
    (source / "model.safetensors").write_bytes(b"")
    run("turboconn", source, source / "LICENSE" / "turbo", code=1)
    assert "LICENSE is a file; name another folder" in capsys.readouterr().err
