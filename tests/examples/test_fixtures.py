"""`make fixtures`: what it builds, that it builds it once, and that the YAML files name nothing else."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("trl")

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def fixtures():
    """The module examples/fixtures.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("fixtures_under_test", ROOT / "examples" / "fixtures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def built(fixtures, tmp_path_factory):
    """All fixtures in a folder of their own; the model is trained for a few steps only."""
    folder = tmp_path_factory.mktemp("fixtures")
    whole = fixtures.training.train_llama

    def hardly(*args, **kwargs):
        whole(*args, **{**kwargs, "steps": 3, "say": lambda text: None})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixtures.training, "train_llama", hardly)
        assert all(fixtures.build(name, folder) for name in fixtures.FIXTURES)
    return folder


@pytest.mark.slow
def test_a_second_build_keeps_what_is_there_and_what_a_killed_one_left_is_made_anew(fixtures, built):
    assert not any(fixtures.build(name, built) for name in fixtures.FIXTURES)
    file = built / "sums" / "train.jsonl"
    whole = file.read_text()
    (built / "sums.partial").mkdir()
    (built / "sums" / fixtures.STAMP).unlink()
    file.write_text("half")
    assert fixtures.build("sums", built) and file.read_text() == whole
    assert not (built / "sums.partial").exists()


@pytest.mark.slow
def test_the_data_sets_load_and_the_model_has_a_template_for_chat_and_tools(built, monkeypatch, tmp_path):
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = load_dataset(str(built / "sums"), cache_dir=str(tmp_path))
    assert len(data["train"]) == 80 and len(data["test"]) == 20
    for row in data["train"]:
        assert sum(map(int, row["prompt"][0]["content"].split("+"))) == int(row["solution"])
    assert load_dataset(str(built / "notes"), cache_dir=str(tmp_path))["train"]["domain"][0] == "open"
    tokenizer = AutoTokenizer.from_pretrained(built / "tiny-llama")
    model = AutoModelForCausalLM.from_pretrained(built / "tiny-llama")
    assert model.num_parameters() < 300_000 and model.config.vocab_size == len(tokenizer)
    tools = [{"type": "function", "function": {"name": "add"}}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "2+2"}], tools=tools, tokenize=False)
    assert '"name": "add"' in text and text.endswith("<|user|>2+2<|end|>")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_names_only_fixtures_that_are_built(fixtures, path):
    named = {
        value
        for value in yaml.safe_load(path.read_text()).values()
        if isinstance(value, str) and value.startswith("examples/fixtures/")
    }
    assert named and {value.split("/")[2] for value in named} <= set(fixtures.FIXTURES)
    assert re.search(r"^#   .*hf_ext\.trainers|^#   hf-ext train", path.read_text(), re.MULTILINE), "no command in it"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cat_tiny", "cat_tiny_rubric"])
def test_a_config_trains_in_one_process_and_leaves_its_audit(built, tmp_path, name):
    values = yaml.safe_load((ROOT / "examples" / "configs" / f"{name}.yaml").read_text())
    overrides = {
        "model_name_or_path": built / "tiny-llama",
        "dataset_name": built / Path(values["dataset_name"]).name,
        "output_dir": tmp_path / "out",
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "rubric_max_new_tokens": 8,
    }
    flags = [text for key, value in overrides.items() for text in (f"--{key}", str(value))]
    config = str(ROOT / "examples" / "configs" / f"{name}.yaml")
    command = [sys.executable, "-m", "hf_ext.cli", "train", "cat", "--config", config, *flags]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "cat_audit.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1} and {row["rollout"] for row in rows} == set(range(4))
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
def test_an_unknown_fixture_is_an_error_that_lists_them():
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "fixtures.py"), "nope"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 2 and "no such fixture: nope; there are tiny-llama, sums, notes" in ran.stderr
