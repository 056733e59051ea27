"""The LRAgent benchmark: adapters whole or not there, complete rows, resumed runs, a report with their figures."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.lragent import adapters, measure, report, run
from hf_ext.runlog import read_rows


@pytest.fixture
def tiny(monkeypatch, tiny_llama_dir, tmp_path):
    monkeypatch.setenv("HF_EXT_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(lm, "fetch_smollm2", lambda say=None: tiny_llama_dir)
    texts = {"stdlib": "def f(x): return x ", "news": "Rain is due today. ", "wikipedia": "It is a town. "}
    monkeypatch.setattr(lm, "load_text", lambda name: lm.Text(name, texts[name] * 100, "0" * 64, "made up"))
    monkeypatch.setattr(adapters, "STEPS", 4)
    for name, value in {"PREFIX": 40, "SCORED": 10, "HELD": 60, "NEW": 5, "REPEATS": 2}.items():
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(run, "MEMORY", [(2, 4, 64, 2)])
    return tmp_path


def test_an_adapter_is_whole_or_not_there_and_shares_what_it_is_told(tiny, tiny_llama_dir):
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir).eval()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    ids = torch.randint(1, 256, (600,))
    first, second = tiny / "first", tiny / "second"
    adapters.train(base, ids, first, "qkv", seed=0)
    adapters.train(base, ids.flip(0), second, "qkv", seed=0, like=first)
    assert sorted(path.name for path in tiny.iterdir() if "first" in path.name or "second" in path.name) == [
        "first",
        "second",
    ]
    after = base.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    model = adapters.load_pair(base, first, second)
    same = {}
    for name, tensor in model.named_parameters():
        if "lora_A.first" in name or "lora_B.first" in name:
            same[name] = torch.equal(tensor, model.get_parameter(name.replace("first", "second")))
    assert {name for name, equal in same.items() if equal} == {
        name for name in same if "lora_A" in name and "q_proj" not in name
    }


def test_a_trajectory_is_of_what_no_adapter_has_learnt():
    one, other = torch.arange(1000), torch.arange(1000, 2000)
    found = [adapters.trajectory(one, other, number, 40, 10)[0] for number in range(3)]
    for number, ids in enumerate(found):
        start = 600 + 50 * number
        assert ids.tolist() == [*range(start, start + 20), *range(1000 + start, 1000 + start + 30)]
    with pytest.raises(ValueError, match="trajectory 8 needs 450 tokens behind those learnt"):
        adapters.trajectory(one, other, 8, 40, 10)


def test_divergence_is_zero_from_itself_and_that_of_two_coins():
    coin = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    biased = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    assert measure.compare(coin, coin, torch.tensor([0, 1]))["kl"] == pytest.approx(0)
    found = measure.compare(biased, coin, torch.tensor([0, 1]))
    assert found["kl"] == pytest.approx((0.5 * torch.tensor(4 / 3).log()).item() / 2, rel=1e-5)


@pytest.mark.slow
def test_rows_are_complete_a_rerun_adds_none_and_the_report_has_their_figures(tiny):
    pytest.importorskip("matplotlib")
    out = tiny / "rows.jsonl"
    run.main(kinds="memory,kl,ttft", seeds=1, threads=1, out=out)
    rows = read_rows(out)
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("memory", "kl", "ttft")}
    # three pairs, three trajectories; 2 + 1 + 2 + 2 modes
    assert {kind: len(found) for kind, found in kinds.items()} == {"memory": 2, "kl": 63, "ttft": 5}
    assert all(row["kl"] >= -1e-6 and row["command"] and row["versions"] for row in kinds["kl"])
    read = {(row["mode"], row["read"]) for row in kinds["kl"]}
    assert read == {("full", 10), ("base_lr_shared", 10), ("base_shared", 50)}
    assert all(1 < row["bytes"] / row["one_full_bytes"] < 1.8 for row in kinds["memory"])
    assert all(row["full_bytes"] == 2 * row["one_full_bytes"] for row in kinds["memory"])  # there are two agents
    run.main(kinds="memory,kl,ttft", seeds=1, threads=1, out=out)
    assert len(read_rows(out)) == len(rows)
    text = report.section(rows, tiny / "plots")
    assert (tiny / "plots" / "kl_by_pair.png").stat().st_size > 10_000
    full = [row["kl"] for row in kinds["kl"] if (row["targets"], row["a"], row["mode"]) == ("qkv", "shared", "full")]
    assert f"| full sharing | q, k, v | one A | 9 | {sum(full) / 9:.4f}" in text and "one DynamicCache" in text


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="--kinds speed: known are memory, kl, ttft"):
        run.main(kinds="speed", seeds=1, threads=1, out=None)
    with pytest.raises(ValueError, match="--seeds must be at least 1, got 0"):
        run.main(kinds="kl", seeds=0, threads=1, out=None)
