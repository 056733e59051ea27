"""`hf-ext cache agents` and recorded traces, called as the command calls them; the example."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ext.cache_impls.lragent.trace import Turn, read_trace, token_turns
from hf_ext.cli import main

ROOT = Path(__file__).resolve().parents[3]
TRACE = ROOT / "examples" / "data" / "trace.json"


@pytest.fixture
def run(capsys, monkeypatch):
    """Exit code, standard output and standard error of `hf-ext cache agents ...`."""
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main(["cache", "agents", *map(str, arguments)])
        captured = capsys.readouterr()
        return exit.value.code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def folders(tiny_llama_dir, tmp_path_factory):
    """Folders of two adapters of the tiny Llama, and of one that has the first's A."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from hf_ext import create_shared_a_adapter

    root = tmp_path_factory.mktemp("adapters")
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    config = LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(base, config, adapter_name="plan")
    model.add_adapter("other", config)
    create_shared_a_adapter(model, "act", like="plan")
    for name, parameter in model.named_parameters():
        if "lora_B.act" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(root)
    return root


@pytest.mark.parametrize("repeated", [True, False])
def test_adapters_follow_one_option_or_repeat_it(run, tiny_llama_dir, folders, repeated):
    given = ["--adapters", f"plan={folders / 'plan'}"] + ["--adapters"] * repeated + [f"act={folders / 'act'}"]
    code, out, err = run("--model", tiny_llama_dir, *given, "--trace", TRACE, "--json")
    assert code == 0, err
    found = json.loads(out[out.index("{") :])
    assert found["turns"] == 5 and [row["mode"] for row in found["modes"]] == [
        "none",
        "full",
        "base_shared",
        "base_lr_shared",
    ]
    none, full, shared, both = found["modes"]
    assert none["kl"] is None and 0 < both["kl"] and full["kl"] > 0
    assert full["read"] == both["read"] == found["tokens"] < shared["read"] == none["read"]
    assert full["bytes"] < both["bytes"] < shared["bytes"] < none["bytes"]


def test_the_table_says_what_a_mode_lacks(run, tiny_llama_dir, folders):
    given = ["--adapters", f"plan={folders / 'plan'}", f"act={folders / 'other'}"]
    code, out, err = run("--model", tiny_llama_dir, *given, "--trace", TRACE)
    assert code == 0 and "5 turns of plan, act" in out, err
    assert 'base_lr_shared: mode="base_lr_shared" needs adapters of one A' in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("│")] == [
        "none",
        "full",
        "base_shared",
        "base_lr_shared",
    ]


@pytest.mark.parametrize(
    ("adapters", "trace", "message"),
    [
        (["plan=a"], None, "--adapters names 1 agent, and sharing takes two or more"),
        (["plan=a", "act"], None, "--adapters takes NAME=FOLDER, got 'act'"),
        (["plan=a", "plan=b"], None, "--adapters names 'plan' twice: a and b"),
        (["plan=a", "see=b"], None, "has agents without an adapter: act; --adapters names plan, see"),
        (["plan=a", "act=b"], "none.json", "none.json is no file; examples/data/trace.json shows what one holds"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_loaded(run, adapters, trace, message):
    code, _, err = run("--model", "m", "--adapters", *adapters, "--trace", trace or TRACE)
    assert code == 1 and message in err


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("[", "is not JSON"),
        ({"turns": []}, 'is no trace: it needs {"turns": .* with two turns or more'),
        ({"turns": [{"agent": "a", "prompt": "x"}, {"agent": "b"}]}, 'turn 2 needs "agent" and "prompt", both texts'),
        (
            {"turns": [{"agent": "a", "prompt": "one text"}, {"agent": "b", "prompt": "one other text"}]},
            "turn 2 does not go on from the prompt of turn 1: they part at character 4. Agents share",
        ),
        (
            {"turns": [{"agent": "a", "prompt": "one text"}, {"agent": "b", "prompt": "one text"}]},
            "turn 2 does not go on from the prompt of turn 1: it adds nothing",
        ),
    ],
)
def test_traces_that_do_not_share_their_prefix_are_refused(tmp_path, stored, message):
    path = tmp_path / "trace.json"
    path.write_text(stored if isinstance(stored, str) else json.dumps(stored))
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_token_ids_of_a_turn_begin_with_those_before(tiny_llama_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    turns = token_turns(tokenizer, [Turn("a", "one"), Turn("b", "one two"), Turn("a", "one two three")])
    ids = [ids for _, ids in turns]
    assert [i.shape[1] for i in ids] == [3, 7, 13] and tokenizer.decode(ids[2][0]) == "one two three"
    assert ids[2][0, :7].tolist() == ids[1][0].tolist()


@pytest.mark.slow
def test_the_example_writes_and_compares(tiny_llama_dir, tmp_path):
    import os

    command = [sys.executable, str(ROOT / "examples" / "agents.py"), "--model", str(tiny_llama_dir)]
    command += ["--rounds", "2", "--tokens", "3", "--times", "1"]
    environment = {**os.environ, "HF_EXT_CACHE": str(tmp_path)}
    downloads = Path(os.environ.get("HF_EXT_CACHE") or Path.home() / ".cache" / "hf_ext") / "downloads"
    if not any(downloads.glob("gensim*")):
        pytest.skip("the texts that adapters learn are not downloaded")
    (tmp_path / "downloads").symlink_to(downloads)
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    assert "3 agents, auto is base_lr_shared" in result.stdout and "[critic]" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[-3:]] == ["base_lr_shared", "full", "no"]
