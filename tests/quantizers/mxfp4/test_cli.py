"""`hf-ext quantize`, called as the command calls it."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ext import MXFP4Config
from hf_ext.cli import main
from hf_ext.quantizers.mxfp4.checkpoint import quantize_checkpoint
from hf_ext.quantizers.mxfp4.evaluation import perplexity

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 60


@pytest.fixture
def run(capsys, tiny_llama_dir, tmp_path):
    """Exit code, standard output and standard error of `hf-ext quantize SRC DST OPTIONS`."""

    def call(*options, src=tiny_llama_dir, dst=tmp_path / "packed"):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main(["quantize", str(src), str(dst), *map(str, options)])
        captured = capsys.readouterr()
        return exit.value.code, captured.out, captured.err

    return call


def test_acceptance_command_makes_a_folder_that_a_fresh_process_loads_and_generates_from(
    run, tiny_llama_dir, tmp_path, fresh_python
):
    code, out, _ = run("--scale-rule", "oas", "--macro-block", "128")
    assert code == 0
    assert out.rstrip().splitlines()[-1] == f"packed checkpoint in {tmp_path / 'packed'}"
    assert re.search(r"mlp\.down_proj\s+│\s+2 │\s+0\.\d{4}", out)  # two layers, with their relative error
    generated = fresh_python(
        "import hf_ext, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'packed')!r})\n"
        "print(model.generate(torch.arange(1, 9)[None], max_new_tokens=6, min_new_tokens=6, do_sample=False).tolist())"
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=MXFP4Config())
    expected = model.generate(torch.arange(1, 9)[None], max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert json.loads(generated.strip().splitlines()[-1]) == expected.tolist()


def test_every_option_reaches_the_checkpoint(run, tmp_path):
    (tmp_path / "cal.txt").write_text(TEXT)
    options = (
        "--block-size 16 --macro-block 64 --scale-rule even --search weighted --search-exponents --search-slots 32 "
        "--activation mxfp4 --activation-macro-block none --calibration-windows 1 --skip model.layers.0 "
        "--dtype bfloat16 --max-shard-size 20KB --base-model org/dense"
    ).split()
    code, out, err = run(*options, "--calibration", tmp_path / "cal.txt", "--skip", "o_proj")
    assert code == 0, err
    stored = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert stored["dtype"] == "bfloat16"
    config = MXFP4Config.from_dict(stored["quantization_config"])
    assert {"model.layers.0", "o_proj", "lm_head"} <= set(config.modules_to_not_convert)
    config.modules_to_not_convert = None
    assert config == MXFP4Config(
        block_size=16,
        macro_block_size=64,
        scale_rule="even",
        weight_search="weighted",
        search_exponents=True,
        search_slots=32,
        activation="mxfp4",
        activation_macro_block_size=None,
    )
    assert len(list((tmp_path / "packed").glob("model-*.safetensors"))) > 1
    assert "base_model: org/dense" in (tmp_path / "packed" / "README.md").read_text()
    assert "o_proj" not in out


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_calibration_file_gives_what_its_text_gives(kind, run, tiny_llama_dir, tmp_path):
    path = tmp_path / f"cal.{kind}"
    path.write_text(TEXT if kind == "txt" else "".join(json.dumps({"text": TEXT[i::2]}) + "\n" for i in range(2)))
    code, _, err = run("--calibration", path)
    assert code == 0, err
    texts = [TEXT] if kind == "txt" else [TEXT[0::2], TEXT[1::2]]
    quantize_checkpoint(tiny_llama_dir, tmp_path / "direct", calibration=texts)
    ours, direct = (load_file(tmp_path / name / "model.safetensors") for name in ("packed", "direct"))
    assert all(torch.equal(tensor, direct[name]) for name, tensor in ours.items())


def test_perplexity_is_that_of_the_dense_and_the_packed_model(run, tiny_llama_dir, tmp_path):
    (tmp_path / "eval.txt").write_text(TEXT)
    code, out, err = run("--eval-ppl", tmp_path / "eval.txt")
    assert code == 0, err
    found = re.search(r"perplexity on eval\.txt: ([\d.]+) dense, ([\d.]+) packed", out).groups()
    ids = AutoTokenizer.from_pretrained(tiny_llama_dir)(TEXT, return_tensors="pt")["input_ids"]
    for folder, figure in zip((tiny_llama_dir, tmp_path / "packed"), found):
        model = AutoModelForCausalLM.from_pretrained(folder)
        starts = torch.linspace(0, ids.shape[1] - 512, ids.shape[1] // 512).long().tolist()
        with torch.no_grad():
            losses = [model(ids[:, s : s + 512], labels=ids[:, s : s + 512]).loss for s in starts]
        assert float(figure) == pytest.approx(float(torch.stack(losses).mean().exp()), abs=2e-3)


def test_perplexity_of_certain_predictions_is_one():
    class Certain(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids, use_cache):
            logits = torch.nn.functional.one_hot(input_ids.roll(-1, 1), 256) * 100.0
            return type("Output", (), {"logits": logits})

    def tokenizer(text, add_special_tokens):
        return {"input_ids": list(text.encode())}

    assert perplexity(Certain(), tokenizer, TEXT) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="fewer than two tokens"):
        perplexity(Certain(), tokenizer, "x")


def test_compressed_tensors_format(run, tmp_path):
    (tmp_path / "eval.txt").write_text(TEXT)
    options = ("--format", "compressed-tensors", "--macro-block", "none", "--eval-ppl", tmp_path / "eval.txt")
    code, out, err = run(*options)
    assert code == 0, err
    assert "perplexity on eval.txt" in out
    stored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "compressed-tensors"


def test_second_run_needs_overwrite(run, tmp_path):
    assert run()[0] == 0
    code, _, err = run()
    assert code == 1 and "not empty" in err and "--overwrite" in err
    assert run("--overwrite")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--scale-rule", "floor"], "`scale_rule` must be one of .*'floor'"),
        (["--block-size", "24"], "`block_size` must be one of 16, 32; got 24"),
        (["--macro-block", "100"], "--macro-block must be 128, 64, 32 or none; got '100'"),
        (["--activation-macro-block", "1"], "--activation-macro-block must be"),
        (["--activation", "int8"], "`activation` must be one of"),
        (["--search", "best"], "`weight_search` must be one of"),
        (["--search", "weighted"], "--calibration"),
        (["--format", "compressed-tensors"], "no macro-block scale.*--macro-block none"),
        (["--calibration", "no-such.txt"], "no-such.txt does not exist"),
        (["--eval-ppl", "no-such.txt"], "no-such.txt is not a file"),
        (["--gguf-file", "no-such.gguf"], "no-such.gguf does not exist"),
        (["--skip", "model.nothing"], "model.nothing"),
    ],
)
def test_bad_value_gives_one_line_and_no_folder(options, message, run, tmp_path):
    code, _, err = run(*options)
    line = err.strip().splitlines()[-1]
    assert code == 1 and re.search(message, line) and line.startswith("error: ") and "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("cal.jsonl", b'{"text": "a"}\nnot json\n', "line 2 is not JSON"),
        ("cal.jsonl", b'{"other": "a"}\n', "line 1 has no field `text`"),
        ("cal.txt", b"\xff\xfe\xfa", "not a text in UTF-8"),
        ("cal.txt", b"", "`calibration` is empty"),
    ],
)
def test_bad_calibration_file_gives_one_line(name, content, message, run, tmp_path):
    (tmp_path / name).write_bytes(content)
    code, _, err = run("--calibration", tmp_path / name)
    assert code == 1 and message in err and "Traceback" not in err


def test_weight_that_is_not_finite_is_named_in_one_line(run, tiny_llama_dir, tmp_path):
    import shutil

    src = shutil.copytree(tiny_llama_dir, tmp_path / "src")
    state = load_file(src / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(state, src / "model.safetensors", metadata={"format": "pt"})
    code, _, err = run(src=src)
    assert code == 1 and "model.layers.0.mlp.up_proj.weight: " in err and "Traceback" not in err
