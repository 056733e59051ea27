"""The TurboConn benchmark: tasks that are right, fair runs, exact errors, a report with the figures of the rows."""

import json
import math
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.turboconn import cost, jacobi, report, run, training
from hf_ext.benchmarks.turboconn.tasks import ANSWERS, TASKS, VOCABULARY, batch_of, pretraining_batch
from hf_ext.model_patches.turboconn import TurboConnConfig
from hf_ext.runlog import read_rows

TINY = training.BASE | {"hidden": 16, "heads": 2, "kv_heads": 1, "steps": 2, "batch": 3, "length": 20}


@pytest.fixture
def tiny(monkeypatch, tmp_path, tiny_llama_dir):
    monkeypatch.setenv("HF_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lm, "fetch_smollm2", lambda say=None: tiny_llama_dir)
    real = training.pretrained
    monkeypatch.setattr(training, "pretrained", lambda seed, say=None: real(seed, TINY, say))
    for name, value in {"STEPS": 2, "ROWS": 4, "LENGTH": 4, "TEST_LENGTH": 8, "TEST_ROWS": 6}.items():
        monkeypatch.setattr(run, name, value)
    for name, value in {"PASSES": [1, 4], "CONTEXT": 5, "TOKEN_ROUNDS": 1, "TRAINING_LENGTH": 8}.items():
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(run, "TRAINED", TINY)
    monkeypatch.setattr(run, "TRAINING_ROUNDS", 1)
    return tmp_path / "rows.jsonl"


def test_answers_are_those_of_integer_and_permutation_arithmetic():
    generator = torch.Generator().manual_seed(0)
    bits, answers = batch_of(TASKS["parity"], 5, 30, generator)
    assert torch.equal(answers - ANSWERS, bits.cumsum(1) % 2)

    symbols, answers = batch_of(TASKS["arithmetic"], 5, 30, generator)
    for row, told in zip(symbols.tolist(), answers.tolist()):
        text = "0"
        for symbol, answer in zip(row, told):
            text = f"({text} + {symbol + 1})" if symbol < 6 else f"({text} * {symbol - 4})"
            assert answer - ANSWERS == eval(text) % 7

    symbols, answers = batch_of(TASKS["counters"], 5, 30, generator)
    for row, told in zip(symbols, answers):
        for i in range(30):
            same = row[: i + 1] // 4 == row[i] // 4
            assert told[i] - ANSWERS == (row[: i + 1][same] % 4 + 1).sum() % 5


@pytest.mark.parametrize(("name", "size"), [("S3", 3), ("S5", 5)])
def test_permutation_tasks_walk_through_the_whole_group(name, size):
    task = TASKS[name]
    generator = torch.Generator().manual_seed(0)
    _, answers = batch_of(task, 40, 400, generator)
    assert answers.unique().tolist() == [ANSWERS + i for i in range(math.factorial(size))]
    # A word and its inverse lead back: the answer is that of the state, not of the path.
    swap = 0 if name == "S5" else 1
    once, thrice = task.answer([swap]), task.answer([swap] * 3)
    assert thrice[-1] == once[-1] and task.answer([swap] * 2)[-1] == 0


def test_a_sequence_asked_once_has_one_label_and_tests_ask_everywhere():
    task = TASKS["parity, asked once"]
    _, answers = batch_of(task, 50, 16, torch.Generator().manual_seed(0))
    assert ((answers != -100).sum(1) == 1).all()
    assert len((answers != -100).nonzero()[:, 1].unique()) > 10
    _, answers = batch_of(task, 5, 16, torch.Generator().manual_seed(0), training=False)
    assert (answers != -100).all()


def test_symbols_answers_and_pretraining_text_fit_the_vocabulary():
    for task in TASKS.values():
        assert task.symbols <= ANSWERS and ANSWERS + task.answers <= VOCABULARY
    text = pretraining_batch(60, 50, torch.Generator().manual_seed(0))
    assert text.shape == (60, 50) and text.min() >= 0 and text.max() < VOCABULARY


def test_the_base_is_trained_once_a_seed_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_EXT_CACHE", str(tmp_path))
    folder = training.pretrained(3, TINY)
    facts = json.loads((folder / "training.json").read_text())
    assert facts["seed"] == 3 and len(facts["losses"]) == 2
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert training.pretrained(3, TINY) == folder and (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert training.pretrained(4, TINY) != folder


def test_models_with_and_without_links_start_alike_and_see_the_same_data(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_EXT_CACHE", str(tmp_path))
    folder = training.pretrained(0, TINY)
    first = [
        training.fine_tune(training.load(folder, kind), TASKS["S3"], 1, 1e-3, 5, rows=4, length=6)["losses"][0]
        for kind in training.MODELS.values()
    ]
    assert first[1:] == [pytest.approx(first[0], rel=1e-5)] * (len(first) - 1)


def test_accuracy_at_a_token_is_that_of_the_sequence_that_ends_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_EXT_CACHE", str(tmp_path))
    model = training.load(training.pretrained(0, TINY), training.Kind("dense"))
    for parameter in model.model.turbo_links.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    found = training.accuracy(model, TASKS["parity"], 6, 200)
    generator = torch.Generator().manual_seed(2_000_000)
    ids, answers = batch_of(TASKS["parity"], 200, 6, generator, training=False)
    alone = model(input_ids=ids[:, :4]).logits[:, -1].argmax(-1)
    assert found[3] == pytest.approx((alone == answers[:, 3]).float().mean().item())


def test_jacobi_errors_vanish_at_as_many_passes_as_tokens_and_settings_are_put_back(tiny_llama_dir):
    model = jacobi.random_links(AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32), 0.03, 0)
    ids = torch.randint(1, 256, (3, 8))
    found = jacobi.errors(model.eval(), ids, [1, 8])
    assert found["largest"][0] > 1e-2 and found["largest"][1] < 1e-5 and found["changed"][1] == 0
    assert not model.training and model.model.turbo_config.train_mode == "exact"


def test_paired_ratios_are_those_of_what_is_timed():
    seconds, ratios = cost.paired_ratios(lambda: time.sleep(0.01), lambda: time.sleep(0.03), 4)
    assert len(seconds) == len(ratios) == 4 and min(seconds) >= 0.01 and min(ratios) > 1


def test_timing_tokens_leaves_the_base(tiny_llama_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    ids = torch.randint(1, 256, (1, 9))
    before = model(input_ids=ids).logits
    row = cost.token_ratio(model, 6, {}, 1)
    assert row["ratio"] > 0 and row["base_seconds"] > 0 and type(model).__name__ == "LlamaForCausalLM"
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.slow
def test_rows_are_complete_and_a_second_run_measures_only_what_is_missing(tiny):
    arguments = {"tasks": "parity", "models": "base;dense", "rates": "1e-3", "seeds": "0", "threads": 1, "out": tiny}
    run.main(kinds="accuracy,training,tokens,jacobi", **arguments)
    rows = read_rows(tiny)
    assert {row["kind"] for row in rows} == set(run.KINDS)
    for row in rows:
        assert {*run.KEY, "versions", "command", "threads"} <= set(row)
    dense = next(row for row in rows if row["kind"] == "accuracy" and row["model"] == "dense")
    assert len(dense["accuracy"]) == 8 and dense["steps"] == 2 and dense["jacobi"]["largest"][-1] < 1e-4
    run.main(kinds="accuracy,training,tokens,jacobi", **arguments)
    assert read_rows(tiny) == rows
    tiny.write_text(
        "".join(line for line in tiny.read_text().splitlines(keepends=True) if '"dense", "lr"' not in line)
    )
    left = len(read_rows(tiny))
    run.main(kinds="accuracy", **arguments)
    assert [row["model"] for row in read_rows(tiny)[left:]] == ["dense"]


def test_unknown_names_are_errors_that_list_the_known(tmp_path):
    arguments = {"seeds": "0", "threads": 1, "rates": "1e-3", "out": tmp_path / "rows.jsonl"}
    with pytest.raises(ValueError, match="--tasks 'nope': known are parity; parity, asked once; arithmetic"):
        run.main(kinds="accuracy", tasks="nope", models="base", **arguments)
    with pytest.raises(ValueError, match="--models 'nope': known are base; base, attention kept; sparse; dense"):
        run.main(kinds="accuracy", tasks="parity", models="nope", **arguments)
    with pytest.raises(ValueError, match="--kinds 'nope': known are accuracy; training; tokens; jacobi"):
        run.main(kinds="nope", tasks="parity", models="base", **arguments)
    with pytest.raises(ValueError, match="--rates 'fast' must be numbers"):
        run.main(kinds="accuracy", tasks="parity", models="base", **arguments | {"rates": "fast"})
    assert not (tmp_path / "rows.jsonl").exists()


def made_up(model, lr, seed, inside, beyond, **more):
    row = {"kind": "accuracy", "task": "parity", "model": model, "lr": lr, "seed": seed, "length": 16, "rows": 32}
    row |= {"steps": 300, "accuracy": [inside] * 16 + [beyond] * 112, "losses": [0.7, 0.1], "largest_norm": 12.0}
    row |= {"median_norm": 0.5, "cpu_seconds": 3.0, "threads": 1, "versions": {"torch": "0", "transformers": "1"}}
    return row | more


def test_the_learning_rate_is_chosen_by_the_training_loss():
    runs = [made_up("base", 1e-3, 0, 0.9, 0.4), made_up("base", 2e-3, 0, 0.99, 0.99, losses=[0.7, 0.2])]
    assert report.best_rate(runs) == 1e-3
    assert report.at_length(runs[0], 16) == pytest.approx(0.9) and report.at_length(runs[0], 18) == pytest.approx(0.65)


def test_the_report_has_the_figures_of_the_rows_and_its_plots(tmp_path):
    errors = {"passes": [1, 16], "largest": [1.0, 1e-6], "relative": [0.5, 1e-7], "changed": [0.1, 0.0]}
    rows = [made_up("base", 7e-4, seed, 0.8, 0.5 + seed / 100) for seed in range(3)]
    rows += [made_up("dense", 7e-4, seed, 1.0, 0.98, jacobi=errors, cpu_seconds=12.0) for seed in range(3)]
    rows += [made_up("dense", 2e-3, 0, 0.5, 0.5, jacobi=errors, losses=[0.7, 0.6])]
    facts = {"threads": 1, "versions": {"torch": "0", "transformers": "1"}, "lr": None, "seed": 0}
    rows.append({"kind": "jacobi", "task": "random links", "model": "0.001", **facts, **errors})
    timed = {"ratio": 1.094, "ratio_quartiles": [1.05, 1.2], "base_seconds": 0.03, "rounds": 4, "tokens": 64}
    rows.append({"kind": "tokens", "task": "SmolLM2-135M", "model": "dense", **facts, **timed})
    text = report.section(rows, tmp_path / "plots")
    assert "| parity | base | 0.0007 | 3 | 80% | 80% | 51% (50% to 52%) | 51% (50% to 52%) |" in text
    assert "| parity | dense | 0.0007 | 3 | 100% | 100% | 98% |" in text
    assert "| dense | 0.002 | 0 of 1 |" in text and "| dense | 0.0007 | 3 of 3 |" in text
    assert "| trained, dense (3 runs) | 5e-01 | 1e-07 |" in text
    assert "| a generated token | SmolLM2-135M | dense | **1.09 x** | 1.05 to 1.20 | 30 ms | 64 |" in text
    assert "dense 4.0 x" in text
    assert text.count("| parity | dense | 0.002 | 0 |") == 1
    for name in ("accuracy.png", "jacobi.png"):
        assert (tmp_path / "plots" / name).stat().st_size > 10_000


def test_configurations_of_the_cost_table_are_accepted():
    for settings in (*run.TRAINING_SETTINGS.values(), *run.TOKEN_SETTINGS.values()):
        TurboConnConfig(**settings)
