"""The attention function: the kernel gets what PyTorch reads, and what it cannot take is said once."""

import logging

import pytest
import torch

from hf_ext import LRAgentCache
from hf_ext.cache_impls.lragent import attention, reference
from hf_ext.cache_impls.lragent.functional import causal_mask


def generated(model, inputs):
    cache = LRAgentCache(model)
    with cache.agent("plan"), torch.no_grad():
        part = {name: value[:, :20] for name, value in inputs.items()}
        model(**part, cache=cache)
    with cache.agent("act"):
        return model.generate(**inputs, cache=cache, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("padding", [None, [0, 9]])
@pytest.mark.parametrize("targets", [("q_proj", "k_proj", "v_proj"), ("v_proj",), ("k_proj",)])
def test_the_kernel_is_given_what_pytorch_reads(tiny, prompts, monkeypatch, padding, targets):
    model, inputs = tiny(targets=targets), prompts(2, 30, padding)
    expected = generated(model, inputs)
    calls = []

    class Kernel:
        @staticmethod
        def flash_lora_attention(query, *args, **options):
            calls.append((query.shape[2], options["kv_start"]))
            return reference.flash_lora_attention(query, *args, **options)

    monkeypatch.setattr(attention, "_uses_kernel", lambda query, low: True)
    monkeypatch.setattr(attention, "load_kernel", lambda name, source: Kernel)
    assert torch.equal(generated(model, inputs), expected)
    assert {queries for queries, _ in calls} >= {1, 20}
    if padding:
        assert all(start.tolist() == padding for _, start in calls)


def test_masks_are_read_as_padding_or_refused():
    start, causal = attention._padding(None, 3, 5)
    assert start is None and causal
    mask = causal_mask(3, 5, torch.tensor([0, 2]), device="cpu")
    start, causal = attention._padding(mask, 3, 5)
    assert causal and start.tolist() == [0, 2]
    additive = torch.zeros(2, 1, 3, 5).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert attention._padding(additive, 3, 5)[1]
    mask = mask.clone()
    mask[1, 0, 2, 3] = False  # a hole
    assert not attention._padding(mask, 3, 5)[1]


def test_what_the_kernel_cannot_take_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(attention, "_said", set())
    monkeypatch.setattr(attention, "interpreter_enabled", lambda: True)
    monkeypatch.setenv("HF_EXT_KERNELS", "bundled")
    low = attention.LowRankView(*[torch.ones(1)] * 4, 1.0, 1.0, None, None, "interleaved")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not attention._uses_kernel(torch.ones(1, 1, 1, 16), low)
        assert not attention._uses_kernel(torch.ones(1, 1, 1, 20), low._replace(layout="half"))
        assert attention._uses_kernel(torch.ones(1, 1, 1, 16), low._replace(layout="half"))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "does not take keys that rotate by 'interleaved': attention runs in PyTorch" in said[0]
    assert "head_dim=20" in said[1]


def test_the_cpu_runs_pytorch(monkeypatch):
    monkeypatch.setattr(attention, "interpreter_enabled", lambda: False)
    low = attention.LowRankView(*[torch.ones(1)] * 4, 1.0, 1.0, None, None, "half")
    assert not attention._uses_kernel(torch.ones(1, 1, 1, 16), low)


def test_softcaps_are_refused(tiny):
    model = tiny()
    layer = model.get_base_model().model.layers[0].self_attn
    layer._lragent_record.low_rank = attention.LowRankView(*[torch.ones(1)] * 4, 1.0, 1.0, None, None, "half")
    x = torch.ones(1, 2, 1, 16)
    with pytest.raises(ValueError, match='"lragent" has no softcap and no sinks'):
        attention.lragent_attention(layer, x, x, x, None, softcap=30.0)


@pytest.mark.slow
def test_the_triton_kernel_in_its_interpreter_writes_the_same(fresh_python):
    pytest.importorskip("triton")
    code = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from hf_ext import LRAgentCache, enable_lragent, load_kernel
from hf_ext.cache_impls.lragent import attention
torch.manual_seed(0)
config = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, initializer_range=0.2, eos_token_id=None, pad_token_id=0)
lora = LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
model = get_peft_model(LlamaForCausalLM(config), lora, adapter_name="plan").eval().requires_grad_(False)
enable_lragent(model)
ids = torch.randint(1, 96, (2, 20))
mask = torch.ones_like(ids)
ids[1, :5], mask[1, :5] = 0, 0
texts = []
for uses in (False, True):
    if not uses:
        was, attention._uses_kernel = attention._uses_kernel, lambda *_: False
    else:
        attention._uses_kernel = was
    cache = LRAgentCache(model)
    with cache.agent("plan"):
        inputs = {"input_ids": ids, "attention_mask": mask}
        texts.append(model.generate(**inputs, cache=cache, max_new_tokens=4, do_sample=False))
print(torch.equal(*texts), load_kernel("flash_lora_attention", "bundled").__name__)
"""
    found = fresh_python(code, env={"TRITON_INTERPRET": "1", "HF_EXT_KERNELS": "bundled"})
    assert found.split()[0] == "True" and "flash_lora_attention" in found
