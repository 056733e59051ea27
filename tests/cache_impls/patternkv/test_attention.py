"""The attention implementation "patternkv": equal to attention over the dequantized states, which is the oracle."""

import copy

import numpy as np
import pytest
import torch

from hf_ext import PatternKVCache, PatternKVConfig
from hf_ext.cache_impls.patternkv import reference
from hf_ext.cache_impls.patternkv.attention import PackedKV, packed_attention


@pytest.fixture
def calls(monkeypatch):
    """Calls of the reference, so that no test passes without it."""
    made = []
    decode = reference.decode_attention
    monkeypatch.setattr(reference, "decode_attention", lambda *a, **k: made.append(k) or decode(*a, **k))
    return made


def attend_in_float64(query, keys, values, visible, scaling, softcap=None, sink=None):
    """Softmax attention of one token, loops over rows and heads; NumPy float64."""
    rows, heads, size = query.shape
    groups = heads // keys.shape[1]
    out = np.zeros((rows, heads, values.shape[-1]))
    for row in range(rows):
        seen = visible[row].numpy()
        for head in range(heads):
            k, v = (side[row, head // groups].double().numpy()[seen] for side in (keys, values))
            logits = k @ query[row, head].double().numpy() * scaling
            if softcap is not None:
                logits = softcap * np.tanh(logits / softcap)
            if sink is not None:
                logits = np.append(logits, sink[head].item())
                v = np.vstack([v, np.zeros(v.shape[1])])
            weights = np.exp(logits - logits.max())
            out[row, head] = weights / weights.sum() @ v
    return torch.from_numpy(out)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("padding", [None, [0, 21, 80]], ids=["even", "padded"])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("extra", [None, "softcap", "sink"])
def test_a_step_equals_attention_over_dequantized_states(states, fed, calls, bits, groups, padding, holes, extra):
    layer = fed(states(3, 120), [100, *[1] * 20], padding, nbits=bits, return_packed=True, group_size_value=8)
    before = copy.deepcopy(layer)
    before.activate_past_recording()  # keeps the window that the step completes in one row
    new = states(3, 1, seed=4)
    fed.more(before, new)
    ((key, value),) = fed.more(layer, new)
    assert isinstance(key, PackedKV) and key is value
    assert not padding or layer.packed != before.packed
    # ids of the window that a row has just completed stand in the buffer that the handle shows; a kernel reads them
    for view in (key.keys, key.values):
        assert view.ids.max() < view.bank.shape[2]
    keys, values = before.dequantize()
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, 2 * groups, 1, 32, generator=generator)
    columns = torch.arange(121)[None] >= torch.tensor(padding or [0, 0, 0])[:, None]
    if holes:
        columns &= torch.rand(3, 121, generator=generator) > 0.3
        columns[:, -1] = True
    mask = None if not (padding or holes) else columns[:, None, None]
    options = {}
    if extra == "softcap":
        options["softcap"] = 2.0
    if extra == "sink":
        options["s_aux"] = torch.randn(2 * groups, generator=generator)
    others = options.get("softcap"), options.get("s_aux")
    expected = attend_in_float64(query[:, :, 0], keys, values, columns, 0.2, *others)
    found, weights = packed_attention(torch.nn.Module(), query, key, value, mask, scaling=0.2, **options)
    assert found.shape == (3, 1, 2 * groups, 32) and weights is None and len(calls) == 1
    torch.testing.assert_close(found[:, 0].double(), expected, atol=2e-5, rtol=1e-5)
    if mask is not None:  # the additive form of the same mask
        additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        again, _ = packed_attention(torch.nn.Module(), query, key, value, additive, scaling=0.2, **options)
        assert torch.equal(again, found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_decode_step_in_half_precision(states, fed, dtype):
    layer = fed(states(2, 120, dtype=dtype), [100, *[1] * 20], [0, 9], nbits=2, return_packed=True)
    ((key, value),) = fed.more(layer, states(2, 1, seed=4, dtype=dtype))
    query = torch.randn(2, 4, 1, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    columns = torch.arange(121)[None] >= torch.tensor([0, 9])[:, None]
    expected = attend_in_float64(query[:, :, 0], *layer.dequantize(), columns, 32**-0.5)
    found, _ = packed_attention(torch.nn.Module(), query, key, value, columns[:, None, None])
    assert found.dtype == dtype
    torch.testing.assert_close(found[:, 0].double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("block", [32, 64, 2048])
def test_a_block_of_tokens_at_a_time_gives_the_same(states, fed, monkeypatch, block):
    layer = fed(states(1, 300), nbits=2, return_packed=True)
    ((key, value),) = fed.more(layer, states(1, 1, seed=4))
    query = torch.randn(1, 4, 1, 32, generator=torch.Generator().manual_seed(1))
    whole, _ = packed_attention(torch.nn.Module(), query, key, value, None)
    monkeypatch.setattr(reference, "BLOCK_TOKENS", block)
    parts, _ = packed_attention(torch.nn.Module(), query, key, value, None)
    torch.testing.assert_close(parts, whole)


def test_logarithm_of_the_sum_merges_segments_and_a_blind_row_gets_zeros(states, fed):
    layer = fed(states(2, 120), nbits=4, return_packed=True)
    ((key, _),) = fed.more(layer, states(2, 1, seed=4))
    query = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(1))
    arguments = {"key_bits": 4, "value_bits": 4, "group_size": 16, "value_group_size": 16, "scaling": 0.2}
    tokens, dense = key.keys.codes.shape[2], key.dense_keys.shape[2]

    def decode(mask):
        tensors = (*key.keys, *key.values, key.dense_keys, key.dense_values)
        return reference.decode_attention(query, *tensors, mask=mask, **arguments)

    first = torch.zeros(2, tokens + dense, dtype=torch.bool)
    first[:, : tokens // 2] = True
    whole, lse = decode(None)
    (one, lse_one), (other, lse_other) = decode(first), decode(~first)
    torch.testing.assert_close(torch.logaddexp(lse_one, lse_other), lse)
    merged = one * (lse_one - lse).exp()[..., None] + other * (lse_other - lse).exp()[..., None]
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=1e-5)
    nothing, lse = decode(torch.zeros_like(first))
    assert not nothing.any() and (lse == -torch.inf).all()


def test_no_layer_is_dequantized_and_no_full_tensor_is_made(tiny, prompts, small, monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    model = tiny("llama")
    cache = PatternKVCache(model.config, **{**small, "nbits": 2})
    with torch.no_grad():
        model(prompts(1, 420)["input_ids"], cache=cache)
    model.set_attn_implementation("patternkv")
    monkeypatch.setattr(reference, "BLOCK_TOKENS", 64)
    full = 420 * 2 * 16 * 4
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point() and out.shape[-1:] == (16,):
                largest.append(out.numel() * out.element_size())
            return out

    with torch.no_grad(), Watch():
        model(torch.tensor([[3]]), cache=cache)
    assert largest and max(largest) < full / 2


# --- models --------------------------------------------------------------------------------------------------------

KINDS = "llama llama-mqa llama-mha llama-3 qwen2 qwen3 mistral phi3 gemma2 gemma3 gpt-oss qwen3-next gpt2"


@pytest.mark.parametrize("kind", KINDS.split())
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_models_step_has_the_logits_of_its_own_attention(tiny, prompts, small, calls, kind, bits):
    model = tiny(kind)
    own = model.config._attn_implementation
    padding = None if kind == "qwen3-next" else [0, 23]
    inputs = prompts(2, 90, padding)
    cache = PatternKVCache(model.config, **{**small, "nbits": bits})
    logits = {}
    with torch.no_grad():
        model(**inputs, cache=cache)
        for implementation in (own, "patternkv"):
            model.set_attn_implementation(implementation)
            twin = copy.deepcopy(cache)
            mask = inputs["attention_mask"]
            for step in range(12):
                mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], 1)
                token = torch.full((2, 1), 5 + step)
                logits.setdefault(implementation, []).append(model(token, attention_mask=mask, cache=twin).logits)
    full_layers = len(cache.packed_layers)
    assert len(calls) == 12 * full_layers
    own_logits, packed_logits = (torch.cat(steps) for steps in logits.values())
    torch.testing.assert_close(packed_logits, own_logits, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("mode", ["greedy", "beam", "assisted", "chunked"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt-oss"])
def test_text_is_that_of_the_dense_path(tiny, prompts, small, calls, mode, kind):
    model = tiny(kind)
    inputs = prompts(1 if mode == "assisted" else 2, 60, None if mode == "assisted" else [0, 13])
    options = {"max_new_tokens": 40, "do_sample": False}
    options |= {"beam": {"num_beams": 3}, "chunked": {"prefill_chunk_size": 20}}.get(mode, {})
    if mode == "assisted":
        options["assistant_model"] = tiny("llama", seed=1)
    config = PatternKVConfig(**small, nbits=8)
    expected = model.generate(**inputs, cache=PatternKVCache(model.config, config), **options)
    assert not calls
    model.set_attn_implementation("patternkv")
    found = model.generate(**inputs, cache=PatternKVCache(model.config, config), **options)
    assert torch.equal(found, expected)
    assert calls or mode == "assisted"


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt-oss"])
def test_without_our_cache_the_implementation_is_plain_attention(tiny, prompts, calls, kind):
    model, inputs = tiny(kind), prompts(2, 40, [0, 11])
    with torch.no_grad():
        expected = model(**inputs).logits
        model.set_attn_implementation("patternkv")
        found = model(**inputs).logits
    visible = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[visible], expected[visible], atol=2e-4, rtol=2e-4)
    kept = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert kept.shape == (2, 48) and not calls


def test_the_model_decides_at_each_step_and_the_config_may_decide_otherwise(tiny, prompts, small, calls):
    model = tiny("llama")
    cache = PatternKVCache(model.config, **small)
    with torch.no_grad():
        model(**prompts(1, 60), cache=cache)
        model(torch.tensor([[1]]), cache=cache)
        assert not calls
        model.set_attn_implementation("patternkv")
        model(torch.tensor([[1]]), cache=cache)
        assert len(calls) == 2
        model(torch.tensor([[1, 2]]), cache=cache)  # more tokens than one: over full tensors
        assert len(calls) == 2
        never = PatternKVCache(model.config, **small, return_packed=False)
        model(**prompts(1, 60), cache=never)
        model(torch.tensor([[1]]), cache=never)
        assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"num_patterns": 0}, {"bank_scope": "batch", "nbits_key": 4}])
def test_the_triton_kernel_gives_the_logits_of_the_dense_path(tmp_path, fresh_python, fields):
    padding = 0 if "bank_scope" in fields else 21
    code = (
        "import copy, torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "from hf_ext import PatternKVCache, load_kernel\n"
        "torch.set_num_threads(1)\ntorch.manual_seed(0)\n"
        "config = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=32,\n"
        "    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)\n"
        "model = LlamaForCausalLM(config).eval()\n"
        f"fields = {fields!r}\n"
        "cache = PatternKVCache(config, group_size=32, residual_length=32, **{'num_patterns': 6, **fields})\n"
        "ids, mask = torch.randint(96, (2, 120)), torch.ones(2, 121, dtype=torch.int64)\n"
        f"mask[1, :{padding}] = 0\n"
        "with torch.no_grad():\n"
        "    model(ids, attention_mask=mask[:, :120], cache=cache)\n"
        "    twin = copy.deepcopy(cache)\n"
        "    expected = model(ids[:, :1], attention_mask=mask, cache=twin).logits\n"
        "    model.set_attn_implementation('patternkv')\n"
        "    found = model(ids[:, :1], attention_mask=mask, cache=cache).logits\n"
        "torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)\n"
        "assert not load_kernel('patternkv_attention').__name__.startswith('hf_ext')\n"
    )
    fresh_python(code, env={"TRITON_INTERPRET": "1", "HF_EXT_KERNELS": "bundled"}, cwd=tmp_path)


# --- bad use -------------------------------------------------------------------------------------------------------


@pytest.fixture
def handle(states, fed):
    layer = fed(states(1, 100), return_packed=True)
    return fed.more(layer, states(1, 1, seed=4))[0][0]


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.shape,
        lambda x: x.transpose(1, 2),
        lambda x: x[:, 0],
        lambda x: x * 2,
        lambda x: 2 * x,
        lambda x: x @ torch.ones(2, 2),
        lambda x: torch.ones(2, 2) @ x,
        lambda x: torch.cat([x, torch.ones(2)]),
        lambda x: torch.nn.functional.pad(x, (0, 1)),
        lambda x: len(x),
        lambda x: list(x),
        lambda x: torch.ones(2) + x,
    ],
)
def test_packed_states_used_as_a_tensor_say_what_to_do(handle, use):
    with pytest.raises(TypeError, match=r"are no tensors.*set_attn_implementation\(.*return_packed=False"):
        use(handle)


def test_packed_states_given_to_another_attention_say_what_to_do(tiny, prompts, small):
    model = tiny("llama")
    cache = PatternKVCache(model.config, **small, return_packed=True)
    with torch.no_grad():
        model(**prompts(1, 60), cache=cache)
        with pytest.raises(TypeError, match="packed keys and values are no tensors"):
            model(torch.tensor([[1]]), cache=cache)


def test_a_handle_can_be_copied_and_shown(handle):
    assert copy.copy(handle).bits == handle.bits
    assert "PackedKV" in repr(handle)


def test_biases_dropout_and_masks_by_head_are_refused(handle):
    query = torch.randn(1, 2, 1, 32)
    module = torch.nn.Module()
    with pytest.raises(ValueError, match='takes masks that show or hide.*use attn_implementation="sdpa"'):
        packed_attention(module, query, handle, handle, torch.full((1, 1, 1, 101), -1.0))
    with pytest.raises(ValueError, match=r"no dropout \(0.1\) over packed states"):
        packed_attention(module, query, handle, handle, None, dropout=0.1)
    with pytest.raises(ValueError, match=r"one for all heads, and got \[1, 2, 1, 101\]"):
        packed_attention(module, query, handle, handle, torch.ones(1, 2, 1, 101, dtype=torch.bool))


def test_models_that_work_on_returned_states_get_tensors(tiny, prompts, small, calls):
    from transformers import DiffLlamaConfig

    latent = tiny("deepseek-v3")  # caches latents, which it expands
    latent.set_attn_implementation("patternkv")
    cache = PatternKVCache(latent.config, **small, group_size_value=8)
    latent.generate(**prompts(2, 50, [0, 9]), cache=cache, max_new_tokens=20)
    assert cache.memory_report()["packed_tokens"] == 64 and not calls
    config = DiffLlamaConfig(num_hidden_layers=2)
    config._attn_implementation = "patternkv"
    assert all(layer.attention is None for layer in PatternKVCache(config).layers)
