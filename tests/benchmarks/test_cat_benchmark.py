"""The benchmark of CaT: its task and its worlds, on models too small to learn anything."""

import random
from statistics import mean

import pytest

pytest.importorskip("trl")

from hf_ext.benchmarks.cat import report, run, sums, training
from hf_ext.benchmarks.cat.open_domain import REFERENCES, simulate
from hf_ext.runlog import read_rows
from hf_ext.trainers.answers import extract_answer


def test_a_working_without_noise_is_right_on_every_sum():
    for a in range(10, 100):
        for b in range(10, 100):
            text = sums.working((a, b))
            assert extract_answer(text) == str(a + b) and sums.is_right(text, (a, b))
    assert sums.working((37, 58)) == "7+8=15\n3+5+1=9\n#### 95"
    assert sums.working((21, 34)) == "1+4=5\n2+3=5\n#### 55"


def test_systematic_errors_are_missing_carries_that_a_vote_does_not_repair():
    rng = random.Random(0)
    pairs = [(38, 47), (26, 85)]  # a carry, and an even last digit
    noise = sums.NOISES["systematic"]
    for pair in pairs:
        answers = [int(extract_answer(sums.working(pair, noise, rng))) for _ in range(400)]
        right = mean(answer == sum(pair) for answer in answers)
        assert right < 0.25 and mean(answer == sum(pair) - 10 for answer in answers) > 0.55
    odd = [sums.is_right(sums.working((37, 58), noise, rng), (37, 58)) for _ in range(400)]
    assert mean(odd) > 0.55


def test_spread_errors_leave_the_right_answer_the_most_frequent_one():
    rng = random.Random(0)
    for pair in [(38, 47), (37, 58), (21, 34)]:
        answers = [extract_answer(sums.working(pair, sums.NOISES["spread"], rng)) for _ in range(400)]
        counts = sorted(((answers.count(answer), answer) for answer in set(answers)), reverse=True)
        assert counts[0][1] == str(sum(pair)) and 0.5 < counts[0][0] / 400 < 0.7 and counts[1][0] / 400 < 0.15


def test_held_out_sums_are_never_trained_on():
    training_set, held_out = set(sums.problems(3000, 0, False)), set(sums.problems(400, 1, True))
    assert len(training_set) == 3000 and len(held_out) == 400 and not training_set & held_out


def test_the_tokenizer_loses_nothing_and_splits_digits():
    texts = [sums.synthesis_prompt([sums.working((37, 58))] * 3)]
    tokenizer = sums.chat_tokenizer(texts * 30)
    for text in [*texts, "1234+56", "something else: é\n", sums.working((99, 99))]:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert len(tokenizer("1234")["input_ids"]) == 4
    messages = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
        {"role": "tool", "content": "4"},
    ]
    shown = tokenizer.apply_chat_template(
        messages, tools=[{"type": "function", "function": {"name": "add"}}], tokenize=False, add_generation_prompt=True
    )
    assert shown.startswith('<|system|>[{"type": "function"') and shown.endswith("<|tool|>4<|end|><|assistant|>")
    assert '<|assistant|><tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|end|>' in shown


# --- the world of statements ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_frozen_anchor_keeps_precision_where_counting_and_scores_lose_it():
    precision = {name: mean(simulate(name, seed).precision for seed in range(4)) for name in REFERENCES}
    frozen = precision["synthesis, frozen anchor"]
    assert precision["gold statements"] > frozen
    assert frozen >= 1.15 * precision["whole-answer score"]
    assert frozen >= 1.3 * precision["synthesis by counting"]
    assert precision["longest rollout"] < precision["first rollout"] < frozen


def test_the_simulation_is_seeded():
    assert simulate("first rollout", 3) == simulate("first rollout", 3) != simulate("first rollout", 4)


# --- training and the command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model that has hardly been trained."""
    folder = tmp_path_factory.mktemp("models") / "base"
    recipe = sums.Recipe(hidden=32, layers=1, heads=2, steps=2, batch=8)
    assert sums.train_base(folder, recipe, say=lambda text: None) == folder
    before = (folder / "model.safetensors").stat().st_mtime_ns
    sums.train_base(folder, recipe, say=lambda text: None)  # is there: not trained again
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    return folder


@pytest.mark.slow
def test_rows_are_complete_a_second_run_adds_none_and_the_report_shows_them(base, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "base_model", lambda recipe, say: base)
    monkeypatch.setattr(run, "WORLDS", 2)
    monkeypatch.setattr(run.open_domain.simulate, "__defaults__", (run.open_domain.World(steps=3),))
    out = tmp_path / "rows.jsonl"
    arguments = {"kinds": "statements,inference,train", "noises": "systematic,spread", "methods": "", "threads": 1}
    arguments |= {"seeds": 1, "steps": 2, "base_steps": 2, "held_out": 8}
    run.main(**arguments, out=out)
    rows = read_rows(out)
    kinds = [row["kind"] for row in rows]
    assert kinds.count("statements") == len(REFERENCES) and kinds.count("inference") == 6
    assert kinds.count("train") == len(training.METHODS) + 2
    assert all({*run.KEY, "versions", "command", "threads"} <= set(row) for row in rows)
    for row in rows:
        if row["kind"] == "train":
            last = 4 if row["method"] == training.LONGER else 2
            assert 0 <= row["accuracy"] <= 1 and row["curve"][-1][0] == last and row["tokens_read"] > 0
    run.main(**arguments, out=out)
    assert read_rows(out) == rows
    text = report.section(rows, tmp_path / "plots")
    assert "| CaT, synthesis, 1 seeds |" in text and "| synthesis of 8, untrained |" in text
    assert (tmp_path / "plots" / "accuracy.png").stat().st_size > 10_000
    assert (tmp_path / "plots" / "compute.png").stat().st_size > 10_000


def test_unknown_names_are_errors_that_list_the_known(tmp_path):
    arguments = {"methods": "", "seeds": 1, "steps": 1, "base_steps": 1, "held_out": 8, "threads": 1}
    with pytest.raises(ValueError, match="--kinds nope: known are statements, inference, train, judge, smollm2"):
        run.main(kinds="nope", noises="spread", **arguments, out=tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="--noises nope: known are systematic, spread"):
        run.main(kinds="train", noises="nope", **arguments, out=tmp_path / "x.jsonl")


def test_the_goals_of_the_report_are_what_the_rows_say(tmp_path):
    facts = {"versions": {"torch": "0", "transformers": "1", "trl": "2"}, "seed": 0}
    step = {"reward": 0.5, "reference_accuracy": 0.8, "differs_from_vote": 0.2}
    tokens = {"tokens_read": 8.0, "tokens_written": 19.0}
    rows = []
    for method, accuracy in zip(training.METHODS, (0.98, 0.9, 0.96, 0.72, 0.84)):
        for noise in ("systematic", "spread"):
            row = {"kind": "train", "noise": noise, "method": method, "accuracy": accuracy, "seconds_a_step": 1.0}
            row |= {"first": step, "last": step, "curve": [[2, accuracy]], "budget": training.Budget()._asdict()}
            rows.append({**row, **tokens, **facts})
    merged = {"kind": "inference", "noise": "systematic", "method": "synthesis of 8", "accuracy": 0.85}
    merged |= {"differs_from_vote": 0.2, "right_where_it_differs": 0.7, "right_with_all_wrong": 0.01}
    rows.append({**merged, "tokens_read": 230.0, "tokens_written": 171.0, "standard_error": 0.01, **facts})
    judge = {"kind": "judge", "noise": "", "tokens_fed": 4000, "largest_difference": 1e-5, **facts}
    rows += [{**judge, "method": way, "seconds": s} for way, s in (("prefix shared", 1.0), ("one at a time", 2.5))]
    text = report.section(rows, tmp_path)
    assert "| **0.900 against 0.850 ± 0.010, with 1/14.9 of the tokens** | yes |" in text
    assert "| 0.840 against 0.850 ± 0.010, with 1/14.9 of the tokens | no |" in text
    assert "| **0.900 / 0.720 = 1.25** | yes |" in text and "| **0.960 / 0.980 = 0.98** | yes |" in text
    assert "| 0.720 / 0.980 = 0.73 | no |" in text and "| 2.5 x | no |" in text
