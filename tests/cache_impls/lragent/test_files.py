"""Caches in files: the same next logits in a fresh process, and nothing read that is of another content."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_ext import LRAgentCache
from hf_ext.cache_impls.lragent.files import CONFIG_NAME, TENSORS_NAME

MODES = ["base_shared", "base_lr_shared", "full", "none"]


def filled(model, ids, mode="base_shared"):
    cache = LRAgentCache(model, mode=mode)
    for agent, end in (("plan", 20), ("act", 26)):
        with cache.agent(agent), torch.no_grad():
            model(input_ids=ids[:, cache.get_seq_length() : end], cache=cache)
    return cache


def goes_on(model, cache, ids):
    with cache.agent("plan"), torch.no_grad():
        return model(input_ids=ids[:, cache.get_seq_length() :], cache=cache).logits[:, -1]


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_read_again_goes_on_as_the_one_written(tiny, prompts, tmp_path, mode):
    model, ids = tiny(shared=True), prompts(2, 30)["input_ids"]
    cache = filled(model, ids, mode)
    cache.save_pretrained(tmp_path / "cache")
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {TENSORS_NAME, CONFIG_NAME}
    again = LRAgentCache.from_pretrained(tmp_path / "cache", model)
    assert (again.mode, again.agents) == (cache.mode, cache.agents)
    one, other = again.memory_report(), cache.memory_report()
    assert {k: v for k, v in one.items() if k in ("base_bytes", "low_rank_bytes", "tokens")} == {
        k: v for k, v in other.items() if k in ("base_bytes", "low_rank_bytes", "tokens")
    }
    torch.testing.assert_close(goes_on(model, again, ids), goes_on(model, cache, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_fresh_process_reads_it(tiny, prompts, tmp_path, fresh_python):
    model, ids = tiny(), prompts(1, 30)["input_ids"]
    cache = filled(model, ids)
    cache.save_pretrained(tmp_path / "cache")
    model.save_pretrained(tmp_path / "adapters")
    base = model.unload()
    base.save_pretrained(tmp_path / "base")
    code = f"""
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from hf_ext import LRAgentCache, enable_lragent
base = AutoModelForCausalLM.from_pretrained({str(tmp_path / "base")!r}).eval()
model = PeftModel.from_pretrained(base, {str(tmp_path / "adapters" / "plan")!r}, adapter_name="plan")
model.load_adapter({str(tmp_path / "adapters" / "act")!r}, adapter_name="act")
enable_lragent(model)
cache = LRAgentCache.from_pretrained({str(tmp_path / "cache")!r}, model)
ids = torch.tensor({ids.tolist()})
with cache.agent("act"), torch.no_grad():
    logits = model(input_ids=ids[:, cache.get_seq_length() :], cache=cache).logits
print(logits.shape[1], logits[0, -1, :4].tolist())
"""
    seen, _, numbers = fresh_python(code).strip().partition(" ")
    tuned = tiny()
    other = LRAgentCache.from_pretrained(tmp_path / "cache", tuned)
    with other.agent("act"), torch.no_grad():
        expected = tuned(input_ids=ids[:, other.get_seq_length() :], cache=other).logits[0, -1, :4]
    assert seen == "4"
    torch.testing.assert_close(torch.tensor(json.loads(numbers)), expected, rtol=1e-4, atol=1e-4)


def test_files_of_another_content_are_refused(tiny, prompts, tmp_path):
    model, ids = tiny(), prompts(1, 30)["input_ids"]
    filled(model, ids).save_pretrained(tmp_path)
    other = tiny(agents={"plan": {}, "act": {"lora_alpha": 3}})
    with pytest.raises(ValueError, match="holds states of adapter 'act' .* other weights or another scaling here"):
        LRAgentCache.from_pretrained(tmp_path, other)
    with pytest.raises(ValueError, match="holds states of adapter 'act' .* is not loaded here: load the one"):
        LRAgentCache.from_pretrained(tmp_path, tiny(agents=("plan",)))
    with pytest.raises(ValueError, match="was written with other base weights .unnamed, fingerprint"):
        LRAgentCache.from_pretrained(tmp_path, tiny(overrides={"initializer_range": 0.1}))
    with pytest.raises(ValueError, match="is of another model: num_hidden_layers=3, not 2"):
        LRAgentCache.from_pretrained(tmp_path, tiny(overrides={"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match="is of another model: model_type='llama', not 'qwen2'"):
        LRAgentCache.from_pretrained(tmp_path, tiny("qwen2"))


def test_a_file_knows_adapters_by_content_and_not_by_name(tiny, prompts, tmp_path):
    model, ids = tiny(), prompts(1, 30)["input_ids"]
    filled(model, ids).save_pretrained(tmp_path)
    twin = tiny(agents=("one", "two"))  # the same draws under other names
    cache = LRAgentCache.from_pretrained(tmp_path, twin)
    with cache.agent("two"):
        assert cache.get_seq_length() == 26


def test_damaged_and_unfinished_files_are_refused(tiny, prompts, tmp_path):
    model, ids = tiny(), prompts(1, 30)["input_ids"]
    with pytest.raises(FileNotFoundError, match=f"has no {CONFIG_NAME}: it is not a cache that `save_pretrained`"):
        LRAgentCache.from_pretrained(tmp_path, model)
    filled(model, ids).save_pretrained(tmp_path)
    path, tensors = tmp_path / CONFIG_NAME, tmp_path / TENSORS_NAME
    good, states = json.loads(path.read_text()), load_file(tensors)
    changes = [
        ({"format": 9}, "has format 9, and this version of hf_ext reads 1"),
        ({"mode": "odd"}, "is damaged: .*`mode` is 'odd'"),
        ({"tracks": None}, "is damaged: `tracks` is None, not a dict"),
        ({"read": {}}, "is damaged: .*tensors, of which"),
        ({"lragent_config": {"mode": "x"}}, "`mode` must be one of"),
    ]
    for change, message in changes:
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(ValueError, match=message):
            LRAgentCache.from_pretrained(tmp_path, model)
    path.write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        LRAgentCache.from_pretrained(tmp_path, model)
    path.write_text(json.dumps(good))
    save_file({**states, "more": torch.ones(1)}, tensors)
    with pytest.raises(ValueError, match=f"does not hold the tensors that {CONFIG_NAME} lists"):
        LRAgentCache.from_pretrained(tmp_path, model)
    tensors.write_bytes(b"no")
    with pytest.raises(ValueError, match="cannot be read"):
        LRAgentCache.from_pretrained(tmp_path, model)


def test_a_cache_in_use_is_not_written(tiny, tmp_path):
    model = tiny()
    cache = LRAgentCache(model)
    with (
        cache.agent("plan"),
        pytest.raises(ValueError, match="an agent is active: leave its `with` block first"),
    ):
        cache.save_pretrained(tmp_path)
