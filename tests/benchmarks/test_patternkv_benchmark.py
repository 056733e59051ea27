"""The PatternKV benchmark: peers measured right, complete rows, resumed runs, a report with their figures."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.patternkv import measure, report, run
from hf_ext.benchmarks.patternkv.settings import FULL, SETTINGS, load_text
from hf_ext.runlog import read_rows


@pytest.fixture(scope="module")
def model(tiny_llama_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()


@pytest.fixture
def tiny(monkeypatch, tiny_llama_dir):
    monkeypatch.setattr(lm, "fetch_smollm2", lambda say=None: tiny_llama_dir)
    monkeypatch.setattr(run, "SPEED_TOKENS", 300)
    monkeypatch.setattr(run, "FIRST", 132)
    monkeypatch.setattr(run, "GREEDY", 8)
    text = "The quick brown fox jumps over the lazy dog. " * 40
    monkeypatch.setattr(run, "load_text", lambda name: lm.Text(name, text, "0" * 64, "made up"))
    return tiny_llama_dir


def test_the_full_cache_diverges_by_nothing_and_reads_back_exactly(model):
    tokens = torch.randint(1, 256, (200,))
    prompt = measure.prefill(model, tokens, 150, chunk=64)
    found, _ = measure.score(model, prompt, DynamicCache(config=model.config))
    assert abs(found.kl) < 1e-9 and found.loss == pytest.approx(prompt.loss)
    assert found.agreement == 1 and found.key_error == found.value_error == 0
    whole = model(input_ids=tokens[None]).logits[0, 150:].log_softmax(-1)
    torch.testing.assert_close(prompt.log_probs, whole, rtol=1e-4, atol=1e-5)


def test_the_greedy_text_of_the_full_cache_is_that_of_generate(model):
    tokens = torch.randint(1, 256, (60,))
    prompt = measure.prefill(model, tokens, 50)
    found = measure.greedy(model, DynamicCache(config=model.config), prompt, 12)
    whole = model.generate(tokens[None, :51], max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert found == whole[0, 51:].tolist()


def test_the_levels_of_the_codebook_are_lloyd_max_for_a_normal_variable():
    torch.testing.assert_close(
        measure.normal_levels(4), torch.tensor([-1.5104, -0.4528, 0.4528, 1.5104]), rtol=0, atol=2e-3
    )


def test_a_rotated_cache_keeps_lengths_and_has_the_error_of_its_codebook():
    torch.manual_seed(0)
    layer = measure.RotatedLayer(2)
    x = torch.randn(1, 2, 500, 64)
    keys, _ = layer.update(x, x)
    assert torch.equal(keys, x)  # what is new is exact once
    error = (layer.keys - x).square().sum() / x.square().sum()
    assert 0.10 < error < 0.13  # 0.1175 for four levels of a normal variable


def test_rows_are_complete_and_a_second_run_measures_only_what_is_missing(tiny, tmp_path):
    arguments = {"texts": "news", "kinds": "quality,decoded,greedy,speed", "prompt": 260, "threads": 1}
    out = tmp_path / "rows.jsonl"
    run.main(settings="full,g 128", out=out, **arguments)
    first = read_rows(out)
    kinds = [row["kind"] for row in first]
    assert kinds.count("decoded") >= 1 and kinds.count("quality") >= 2 and "speed" in kinds
    greedy = next(row for row in first if row["kind"] == "greedy")
    assert greedy["setting"] == "KIVI 2 bit, g 128" and 0 <= greedy["until"] <= greedy["of"] == 8
    for row in first:
        assert {*run.KEY, "versions", "command", "threads"} <= set(row)
    quality = next(row for row in first if row["kind"] == "quality" and row["setting"] == "KIVI 2 bit, g 128")
    assert quality["kl"] > 0 and quality["bits"] == pytest.approx(2 + (32 / 128 + 32 / 16) / 2 + 16 / 512, abs=1e-3)
    run.main(settings="full,g 128", out=out, **arguments)
    assert read_rows(out) == first
    out.write_text("".join(line for line in out.read_text().splitlines(keepends=True) if '"patternkv"' not in line))
    left = len(read_rows(out))
    run.main(settings="full,g 128", out=out, **arguments)
    again = [(row["kind"], row["setting"], row["attention"]) for row in read_rows(out)[left:]]
    name = "KIVI 2 bit, g 128"  # ratios are of one run: the rows beside the missing one are measured again
    assert again == [("speed", FULL, "sdpa"), ("speed", name, "sdpa"), ("speed", name, "patternkv")]


def test_a_peer_that_is_not_installed_is_a_row_that_says_so(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "is_installed", lambda name: False)
    run.main(texts="news", settings="hqq 2", kinds="quality", prompt=260, threads=1, out=tmp_path / "rows.jsonl")
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert row["error"] == "hqq is not installed (extra 'bench')"


def test_unknown_names_are_errors_that_list_the_known(tiny, tmp_path):
    out = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match="matches none of: full, transformers quanto 2 bit"):
        run.main(texts="news", settings="nope", kinds="quality", prompt=260, threads=1, out=out)
    with pytest.raises(ValueError, match="--kinds nope: known are quality, decoded, greedy, speed"):
        run.main(texts="news", settings="", kinds="nope", prompt=260, threads=1, out=out)
    with pytest.raises(ValueError, match="text 'nope' is unknown; known: wikipedia"):
        load_text("nope")
    assert not out.exists()


def test_the_curve_is_followed_by_straight_lines_and_not_beyond_its_ends():
    curve = [(2.0, 0.4), (3.0, 0.2), (4.0, 0.1)]
    assert report.against_curve(2.5, 0.15, curve) == pytest.approx(0.5)
    assert report.against_curve(4.0, 0.1, curve) == pytest.approx(1.0)
    assert report.against_curve(1.9, 0.1, curve) is None and report.against_curve(4.1, 0.1, curve) is None


def test_the_report_has_the_figures_of_the_rows_and_its_plot(tmp_path):
    facts = {"text_sha256": "ab" * 32, "versions": {"torch": "0", "transformers": "1"}, "threads": 1, "tokens": 4100}
    rows = []
    for text in ("news", "code"):
        for i, (name, setting) in enumerate(SETTINGS.items()):
            row = {"kind": "quality", "text": text, "setting": name, "seed": 0, "attention": "sdpa", **facts}
            row |= {"kl": 0.5 / (i + 1), "loss": 3.1, "loss_of_full": 3.0, "agreement": 0.9, "key_error": 0.1}
            rows.append({**row, "value_error": 0.2, "bits": setting.bits or 2.0 + i / 8, "group": setting.group})
    rows.append({**rows[1], "setting": "transformers hqq 4 bit", "text": "code", "error": "ValueError: no"})
    for name, attention, seconds in ((FULL, "sdpa", 0.1), ("PatternKV default", "patternkv", 0.12)):
        row = {"kind": "speed", "text": "random states", "tokens": 8196, "setting": name, "seed": 0, "threads": 1}
        row |= {
            "attention": attention,
            "seconds_a_step": seconds,
            "seconds_empty": 0.02,
            "seconds_window": seconds + 0.128 * (name != FULL),
            "memory": {"ratio": 5.5},
        }
        rows.append({**row, "group": SETTINGS[name].group})
    greedy = {"kind": "greedy", "text": "news", "setting": "PatternKV default", "seed": 0, "attention": "sdpa"}
    rows.append({**greedy, **facts, "group": "default", "until": 41, "of": 64})
    text = report.section(rows, tmp_path / "plots")
    assert (tmp_path / "plots" / "kl_against_bits.png").stat().st_size > 10_000
    assert "| PatternKV default | patternkv | 120 | 248 | 121 | 1.21 |  | 5.5 |" in text
    assert "| PatternKV default | 41 |  | 41 |" in text
    assert "`ValueError: no`" in text and "**1.21 x**" in text
