"""The Hub repository for `generate(custom_generate=...)`, loaded by its path as the Hub would load it."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration
from transformers.dynamic_module_utils import check_python_requirements

import hf_ext.cache_impls.patternkv
from hf_ext import PatternKVCache, PatternKVConfig

FOLDER = str(Path(hf_ext.cache_impls.patternkv.__file__).parent / "custom_generate" / "patternkv")
OPTIONS = {"custom_generate": FOLDER, "trust_remote_code": True, "max_new_tokens": 40, "do_sample": False}


def test_it_generates_as_with_the_cache_itself(tiny, prompts, small):
    model, inputs = tiny("llama"), prompts(2, 50, [0, 9])
    config = PatternKVConfig(**small, nbits=2)
    expected = model.generate(**inputs, cache=PatternKVCache(model.config, config), max_new_tokens=40, do_sample=False)
    for options in ({"nbits": 2, **small}, {"patternkv_config": config}, {"patternkv_config": config.to_dict()}):
        assert torch.equal(model.generate(**inputs, **OPTIONS, **options), expected)


def test_the_cache_comes_back_and_is_gone_on_from(tiny, prompts, small):
    model, inputs = tiny("llama"), prompts(1, 50)
    first = model.generate(**inputs, **OPTIONS, **small, return_dict_in_generate=True)
    assert isinstance(first.cache, PatternKVCache) and first.cache.memory_report()["packed_tokens"] == 64
    ids = torch.cat([first.sequences, torch.tensor([[3, 4, 5]])], dim=1)
    again = model.generate(ids, **OPTIONS, cache=first.cache)
    assert again.shape == (1, 133) and first.cache.get_seq_length() == 132


def test_beams_and_processors_reach_generate(tiny, prompts, small):
    model, inputs = tiny("llama"), prompts(2, 50)
    options = {"num_beams": 3, "repetition_penalty": 1.3, "min_new_tokens": 5}
    found = model.generate(**inputs, **OPTIONS, **options, **small, nbits=16)
    expected = model.generate(
        **inputs, cache=DynamicCache(config=model.config), max_new_tokens=40, do_sample=False, **options
    )
    assert torch.equal(found, expected)


def test_what_it_needs_is_checked_by_transformers(tiny, prompts, tmp_path):
    check_python_requirements(FOLDER, requirements_file="custom_generate/requirements.txt")
    lines = (Path(FOLDER) / "custom_generate" / "requirements.txt").read_text().split()
    assert lines == ["hf-ext"]
    (tmp_path / "requirements.txt").write_text("hf-ext-of-another-kind\n")
    with pytest.raises(ImportError, match="hf-ext-of-another-kind"):
        check_python_requirements(tmp_path)


def test_it_asks_for_trust(tiny, prompts):
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny("llama").generate(**prompts(1, 5), custom_generate=FOLDER, trust_remote_code=False)


def test_what_it_is_not_for_is_refused(tiny, prompts, small):
    model, inputs = tiny("llama"), prompts(1, 50)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(ValueError, match="model_type='t5' is an encoder-decoder"):
        t5.generate(**inputs, **OPTIONS)
    with pytest.raises(ValueError, match="`cache` must be a PatternKVCache, got DynamicCache"):
        model.generate(**inputs, **OPTIONS, cache=DynamicCache())
    cache = PatternKVCache(model.config, **small)
    with pytest.raises(ValueError, match="`cache` has its options already; nbits cannot be given with it"):
        model.generate(**inputs, **OPTIONS, cache=cache, nbits=2)
    with pytest.raises(ValueError, match="`cache` has its options already; patternkv_config cannot"):
        model.generate(**inputs, **OPTIONS, cache=cache, patternkv_config=PatternKVConfig())
    with pytest.raises(ValueError, match="`nbits` must be 2, 4 or 8, got 3"):
        model.generate(**inputs, **OPTIONS, nbits=3)
