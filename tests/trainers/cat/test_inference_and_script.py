"""The steps without training, and the script from a YAML file."""

import json

import pytest
import yaml
from transformers import AutoTokenizer, LlamaForCausalLM

from hf_ext.cli import main
from hf_ext.trainers.cat import make_sft_dataset, propose_rubric, score, synthesize
from hf_ext.trainers.cat.__main__ import load_data, load_object

ANSWERS = ["2 + 2 is #### 4", "#### 5", "four, #### 4"]


def five(messages):
    return "\n".join(f"- criterion {i}" for i in range(5))


def test_answers_are_merged_by_a_model_a_function_or_a_rule(policy_dir):
    model, tokenizer = LlamaForCausalLM.from_pretrained(policy_dir).train(), AutoTokenizer.from_pretrained(policy_dir)
    greedy = {"max_completion_length": 8, "anchor_temperature": 0.0}
    found = synthesize(model, tokenizer, ANSWERS, **greedy)
    assert found.text == synthesize(model, tokenizer, ANSWERS, **greedy).text and len(found.meta["order"]) == 3
    assert model.training and all(p.requires_grad for p in model.parameters())  # lent, not taken
    assert synthesize(lambda messages: "#### 9", None, ANSWERS).answer == "9"
    assert synthesize(None, None, ANSWERS, aggregator="majority").answer == "4"
    for arguments, message in (
        ((None, None, []), "completions is empty"),
        ((None, None, ANSWERS), "aggregator synthesis needs a model"),
        ((model, None, ANSWERS), "tokenizer is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            synthesize(*arguments)
    with pytest.raises(ValueError, match="anchor_temprature is no option of CaTConfig"):
        synthesize(five, None, ANSWERS, anchor_temprature=0.0)


def test_criteria_and_rewards_without_a_trainer():
    criteria = propose_rubric(five, None, "a reference")
    assert criteria == [f"criterion {i}" for i in range(5)]
    with pytest.raises(RuntimeError, match="no usable rubric"):
        propose_rubric(lambda messages: "none", None, "a reference")
    assert score(ANSWERS, reference="#### 4").rewards == [1.0, 0.0, 1.0]

    def judge(items):
        return [item.criterion[-1] in item.completion for item in items]

    assert score(["0 1 2 3", "4", ""], criteria=criteria, judge=judge).rewards == [0.8, 0.2, 0.0]
    with pytest.raises(ValueError, match="rubric needs a judge"):
        score(ANSWERS, criteria=criteria)
    with pytest.raises(ValueError, match="give a reference to compare with, or criteria"):
        score(ANSWERS)


def test_data_for_sft_keeps_the_form_of_the_prompts():
    rows = [
        {"prompt": "2+2", "completions": ANSWERS},
        {"prompt": "x", "completions": ["no answer"]},
    ]
    assert make_sft_dataset(rows, None, aggregator="majority").to_list() == [
        {"prompt": "2+2", "completion": "2 + 2 is #### 4"}
    ]
    chat = [{"prompt": [{"role": "user", "content": "2+2"}], "completions": ANSWERS}]
    (row,) = make_sft_dataset(chat, None, aggregator="majority")
    assert row["completion"] == [{"role": "assistant", "content": "2 + 2 is #### 4"}]
    with pytest.raises(ValueError, match="no row has a reference"):
        make_sft_dataset(rows[1:], None, aggregator="majority")


JUDGE = "def judge(items):\n    return [len(item.completion) % 2 == 0 for item in items]\n"


@pytest.mark.slow
def test_a_yaml_file_trains_with_a_judge_from_a_python_path(policy_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_judge.py").write_text(JUDGE)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(8)))
    fields = {
        "model_name_or_path": str(policy_dir),
        "dataset_name": "data.jsonl",
        "output_dir": "out",
        "aggregator": "first",
        "reward": "rubric",
        "judge": "own_judge:judge",
        "min_rubrics": 1,
        "rubric_max_new_tokens": 8,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 8,
        "max_steps": 1,
        "dtype": "float32",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(fields))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "cat", "--config", "run.yaml", "--audit", "all"])
    assert not stopped.value.code, capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").exists() and (tmp_path / "out" / "cat_audit.jsonl").exists()
    assert "hf-ext audit rewards out/cat_audit.jsonl" in capsys.readouterr().out


def test_paths_of_objects_and_data_say_what_is_wrong(tmp_path):
    assert load_object("json:dumps") is json.dumps
    with pytest.raises(ValueError, match=r"'json.dumps' is no Python path; write package.module:name"):
        load_object("json.dumps")
    with pytest.raises(ValueError, match="json has no nothing"):
        load_object("json:nothing")
    with pytest.raises(ValueError, match="dataset_name is missing"):
        load_data(None)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load_data(str(tmp_path / "x.jsonl"))
