"""`generate` with the cache: transformers' DynamicCache is the oracle, token for token where nothing is rounded."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache, T5Config

from hf_ext import MXFP4Config, PatternKVCache, PatternKVConfig
from hf_ext.cache_impls.patternkv import PatternKVLayer

NEW = 40  # with prompts of 50: windows of the prompt and windows of decoding


def ours(model, small, **fields) -> PatternKVCache:
    return PatternKVCache(model.config, **{**small, "nbits": 16, **fields})


def run(model, inputs, cache, mode="greedy", assistant=None, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    if mode == "sample":
        options |= {"do_sample": True, "temperature": 0.9}
    if mode == "beam":
        options |= {"num_beams": 3}
    if mode == "assisted":
        options |= {"assistant_model": assistant}
    torch.manual_seed(0)
    return model.generate(**inputs, cache=cache, **options)


MODES = ["greedy", "sample", "beam", "assisted"]
# transformers assists one row at a time
CASES = [
    pytest.param(mode, kind, padding, "sdpa", id=f"{mode}-{kind}-{'padded' if padding else 'even'}")
    for mode in MODES
    for kind in ("llama", "llama-mqa", "llama-mha")
    for padding in (None, [17] if mode == "assisted" else [0, 17])
]
CASES += [pytest.param("greedy", "llama", [0, 17], "eager", id="eager")]


@pytest.mark.parametrize(("mode", "kind", "padding", "implementation"), CASES)
def test_without_rounding_the_text_is_that_of_the_full_cache(
    tiny, prompts, small, mode, kind, padding, implementation
):
    model = tiny(kind)
    model.set_attn_implementation(implementation)
    assistant = tiny(kind, seed=1) if mode == "assisted" else None
    inputs = prompts(1 if mode == "assisted" else 2, 50, padding)
    cache, full = ours(model, small), DynamicCache(config=model.config)
    one, other = (run(model, inputs, c, mode, assistant) for c in (cache, full))
    assert torch.equal(one, other)
    assert cache.get_seq_length() == full.get_seq_length()
    assert all(max(layer.packed) >= 32 and layer.key_states.ids.any() for layer in cache.layers)

    # the second turn, on the caches as they are
    more = torch.randint(1, 96, (one.shape[0], 9), generator=torch.Generator().manual_seed(3))
    ids = torch.cat([one, more], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(one.shape[0], ids.shape[1] - 50, dtype=torch.int64)], 1)
    if mode != "beam":  # beams leave the cache with rows for each, in transformers too
        again = {"input_ids": ids, "attention_mask": mask}
        one, other = (run(model, again, c, mode, assistant) for c in (cache, full))
        assert torch.equal(one, other)


KINDS = "qwen2 qwen3 mistral phi3 gemma2 gemma3 gpt-oss qwen3-next deepseek-v3 gpt2 llama-3".split()


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_many_kinds_give_the_same_text(tiny, prompts, small, kind):
    model = tiny(kind)
    inputs = prompts(2, 50, None if kind == "qwen3-next" else [0, 11])
    fields = {"group_size_value": 8} if kind == "deepseek-v3" else {}
    cache, full = ours(model, small, **fields), DynamicCache(config=model.config)
    one, other = (run(model, inputs, c) for c in (cache, full))
    assert torch.equal(one, other)
    assert next(iter(cache.packed_layers.values())).start == ([0, 0] if kind == "qwen3-next" else [0, 11])
    for layer, host in zip(cache.layers, full.layers):
        if type(host) is not type(DynamicCache(config=tiny("llama").config).layers[0]):
            assert type(layer) is type(host)
        else:
            assert isinstance(layer, PatternKVLayer) and max(layer.packed) >= 64


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt-oss", "qwen3-next"])
def test_hybrid_models_are_assisted_and_searched_by_beams(tiny, prompts, small, kind):
    model = tiny(kind)
    assistant = tiny("llama", seed=1)
    inputs = prompts(1, 50)
    for mode in ("beam", "assisted"):
        cache, full = ours(model, small), DynamicCache(config=model.config)
        try:
            expected = run(model, inputs, full, mode, assistant)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            with pytest.raises(type(error)):
                run(model, inputs, cache, mode, assistant)
            continue
        assert torch.equal(run(model, inputs, cache, mode, assistant), expected)


@pytest.mark.parametrize("chunk", [7, 32, 36, 49])
def test_chunked_prefill_without_rounding_changes_nothing(tiny, prompts, small, chunk):
    model, inputs = tiny("llama"), prompts(2, 50, [0, 5])
    expected = run(model, inputs, DynamicCache(config=model.config))
    cache = ours(model, small)
    assert torch.equal(run(model, inputs, cache, prefill_chunk_size=chunk), expected)
    # padding is read from the first chunk alone
    assert cache.layers[0].start == [0, 5]


def test_tokens_proposed_from_the_prompt_are_taken_back_exactly(tiny, small):
    model = tiny("llama")
    inputs = {"input_ids": torch.arange(1, 13).repeat(5)[None]}
    caches = ours(model, small), DynamicCache(config=model.config)
    one, other = (run(model, inputs, cache, prompt_lookup_num_tokens=6) for cache in caches)
    assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{"num_return_sequences": 2, "do_sample": True}, {"num_beams": 4, "top_k": 5}])
def test_several_answers_a_prompt(tiny, prompts, small, options):
    model, inputs = tiny("llama"), prompts(2, 50, [3, 0])
    one, other = (run(model, inputs, c, **options) for c in (ours(model, small), DynamicCache(config=model.config)))
    assert torch.equal(one, other)


def test_the_old_name_of_the_argument_works(tiny, prompts, small):
    model, inputs = tiny("llama"), prompts(1, 50)
    cache = ours(model, small)
    found = model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, run(model, inputs, ours(model, small), max_new_tokens=8))
    assert cache.get_seq_length() == 57


def test_a_filled_prefix_serves_many_questions_by_copies_and_by_cropping(tiny, prompts, small):
    model, prefix = tiny("llama"), prompts(1, 70)["input_ids"]
    cache = PatternKVCache(model.config, **small, nbits=4)
    with torch.inference_mode():
        model(prefix, cache=cache)
    answers = []
    for seed in (1, 2, 1):
        ids = torch.cat([prefix, prompts(1, 6, seed=seed)["input_ids"]], dim=1)
        answers.append(model.generate(ids, cache=copy.deepcopy(cache), max_new_tokens=12, do_sample=False))
    assert torch.equal(answers[0], answers[2]) and cache.get_seq_length() == 70
    # 17 tokens more stay within the tail, so going back is exact
    for expected, seed in zip(answers, (1, 2)):
        ids = torch.cat([prefix, prompts(1, 6, seed=seed)["input_ids"]], dim=1)
        assert torch.equal(model.generate(ids, cache=cache, max_new_tokens=12, do_sample=False), expected)
        cache.crop(70 - cache.get_seq_length())


def test_one_prompt_cached_once_and_repeated_for_samples(tiny, prompts, small):
    model, inputs = tiny("llama"), prompts(1, 70)
    logits = {}
    for make in (ours, lambda model, _: DynamicCache(config=model.config)):
        cache = make(model, small)
        with torch.no_grad():
            model(inputs["input_ids"], cache=cache)
            cache.batch_repeat_interleave(3)
            cache.batch_select_indices(torch.tensor([0, 2]))
            logits[make] = model(torch.tensor([[5], [7]]), cache=cache).logits
    one, other = logits.values()
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.03), (4, 0.35)])
def test_a_continued_conversation_is_close_to_one_in_one_go(tiny, prompts, small, bits, bound):
    # Not equal: the second turn sees the first one rounded, and its new windows add patterns.
    model, ids = tiny("llama"), prompts(1, 120)["input_ids"]
    with torch.no_grad():
        exact = model(ids).logits[:, -1]
        cache = PatternKVCache(model.config, **small, nbits=bits)
        model(ids[:, :80], cache=cache)
        turned = model(ids[:, 80:], cache=cache).logits[:, -1]
    assert (turned - exact).norm() / exact.norm() < bound


def test_one_config_serves_two_models_and_is_not_changed(tiny, prompts, small):
    config = PatternKVConfig(**small, nbits=2)
    before = config.to_dict()
    for kind, layers in (("llama", 2), ("qwen3", 3)):
        model = tiny(kind, num_hidden_layers=layers)
        cache = PatternKVCache(model.config, config)
        run(model, prompts(1, 50), cache)
        assert len(cache) == layers and cache.patternkv_config is config
    assert config.to_dict() == before
    with pytest.raises(AttributeError):
        config.nbits = 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_half_precision_models_generate(tiny, prompts, small, dtype, bits):
    model = copy.deepcopy(tiny("llama")).to(dtype)
    cache = PatternKVCache(model.config, **small, nbits=bits)
    found = run(model, prompts(2, 50, [0, 9]), cache)
    assert found.shape == (2, 90) and {layer.keys.dtype for layer in cache.layers} == {dtype}
    assert cache.memory_report()["tokens"] == 89


def test_it_runs_over_mxfp4_weights(tiny_llama_dir, prompts, small):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=MXFP4Config()).eval()
    inputs = prompts(2, 50, [0, 9])
    expected = run(model, inputs, DynamicCache(config=model.config), eos_token_id=None)
    assert torch.equal(run(model, inputs, ours(model, small), eos_token_id=None), expected)
    cache = PatternKVCache(model.config, **small, nbits=2)
    model.set_attn_implementation("patternkv")
    run(model, inputs, cache, eos_token_id=None)
    assert cache.memory_report()["packed_tokens"] == 64


# --- compiled generation -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_generate_does_not_compile_for_this_cache(tiny, prompts, small, monkeypatch):
    model, inputs = tiny("llama"), prompts(1, 50)
    cache = ours(model, small)
    assert not cache.is_compileable
    expected = run(model, inputs, DynamicCache(config=model.config))
    config = CompileConfig()
    config._compile_all_devices = True
    monkeypatch.setattr("torch.compile", lambda *_, **__: pytest.fail("compiled"))
    assert torch.equal(run(model, inputs, cache, compile_config=config), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_forward_gives_the_same_text(tiny, prompts, small):
    model = copy.deepcopy(tiny("llama"))
    inputs = prompts(1, 50)
    expected = run(model, inputs, ours(model, small, nbits=2), max_new_tokens=20)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(run(model, inputs, ours(model, small, nbits=2), max_new_tokens=20), expected)


# --- bad input -----------------------------------------------------------------------------------------------------


def test_models_that_it_is_not_for_are_refused_by_name(tiny, small):
    with pytest.raises(ValueError, match="decoder-only models, and model_type='t5' is an encoder-decoder"):
        PatternKVCache(T5Config(), nbits=2)
    with pytest.raises(ValueError, match="no layer of model_type='mistral' has full attention .found sliding_att"):
        PatternKVCache(tiny("mistral-sliding").config)
    with pytest.raises(ValueError, match="`config` must be the model's config, got LlamaForCausalLM: pass `model.con"):
        PatternKVCache(tiny("llama"))
    with pytest.raises(ValueError, match=r"give `patternkv_config` or its fields \(nbits\), not both"):
        PatternKVCache(tiny("llama").config, PatternKVConfig(), nbits=4)
    with pytest.raises(ValueError, match="unknown fields of PatternKVConfig: bits; known are"):
        PatternKVCache(tiny("llama").config, bits=4)


def test_the_text_model_of_a_multimodal_one_counts(small):
    from transformers import Gemma3Config

    config = Gemma3Config(text_config={"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]})
    config._name_or_path = "org/pictures"
    cache = PatternKVCache(config, **small)
    assert len(cache) == 2 and list(cache.packed_layers) == [1]
    assert cache.model_facts["model_type"] == "gemma3_text" and cache.model_facts["name_or_path"] == "pictures"
    assert cache.layers[1].attention is config.text_config


def test_a_cache_of_another_model_is_refused(tiny, prompts, small):
    model, inputs = tiny("llama"), prompts(1, 50)
    for other, message in (
        (tiny("llama", num_hidden_layers=1), "layer 1 of a cache that was built for 1 layers of model_type='llama'"),
        (tiny("llama", num_hidden_layers=3), "layer 0 of the cache has seen 50 tokens and layer 2 0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(model, inputs, PatternKVCache(other.config, **small))
    cache = PatternKVCache(model.config, **small)
    run(model, inputs, cache)
    mqa, more = tiny("llama-mqa"), prompts(1, 100)
    with pytest.raises(ValueError, match="2 heads of 16 channels and got 1 of 16: it belongs to another model"):
        run(mqa, more, cache)


def test_a_batch_that_changes_midway_is_refused(tiny, prompts, small):
    model = tiny("llama")
    cache = PatternKVCache(model.config, **small)
    run(model, prompts(2, 50), cache)
    with pytest.raises(ValueError, match="the cache holds 2 rows and got 3"):
        run(model, prompts(3, 100), cache)


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3-next", "deepseek-v3"])
@pytest.mark.parametrize("patterns", [0, 8])
def test_reported_bytes_are_those_of_the_storages_alive(tiny, prompts, small, kind, patterns):
    import gc

    model = tiny(kind)
    fields = {**small, "num_patterns": patterns, "nbits": 2, "group_size_value": 8}
    inputs = prompts(2, 50, None if kind == "qwen3-next" else [0, 9])
    run(model, inputs, PatternKVCache(model.config, **fields))  # whatever a first call leaves behind
    gc.collect()

    def alive() -> dict[int, int]:
        tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}

    before = alive()
    cache = PatternKVCache(model.config, **fields)
    run(model, inputs, cache)
    gc.collect()
    after = alive()
    # a layer of the host keeps its window's length as a tensor of 8 bytes
    windows = sum(hasattr(layer, "_sliding_window_tensor") for layer in cache.layers)
    report = cache.memory_report()
    assert sum(after.values()) - sum(before.values()) == report["bytes"] + 8 * windows
    assert report["bytes"] == sum(report[f"{part}_bytes"] for part in ("packed", "dense", "other", "spare"))
    full = DynamicCache(config=model.config)
    run(model, inputs, full)
    from hf_ext.cache_impls.patternkv.files import tensors_of

    expected = sum(t.numel() * t.element_size() for layer in full.layers for t in tensors_of(layer).values())
    assert report["full_bytes"] == expected
    assert report["ratio"] == report["full_bytes"] / report["bytes"] and report["host_bytes"] == 0


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("patterns", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_an_element_follow_the_closed_form(tiny, prompts, small, bits, patterns, dtype):
    model = copy.deepcopy(tiny("llama")).to(dtype)
    config = PatternKVConfig(**{**small, "num_patterns": patterns, "nbits": bits, "nbits_key": 4})
    cache = PatternKVCache(model.config, config)
    with torch.no_grad():
        model(prompts(1, 133)["input_ids"], cache=cache)
    packed, ids = 128, (8 / 16 if patterns else 0)
    key = 4 + 32 / 16 + ids + 16 * (patterns + 1) / packed
    value = bits + 32 / 16 + ids + 16 * (patterns + 1) / packed
    if not patterns:  # one byte stands for all ids
        key, value = key + 8 / (2 * packed * 16), value + 8 / (2 * packed * 16)
    report = cache.memory_report()
    assert report["bits_per_element"] == pytest.approx((key + value) / 2, abs=1e-9)
    assert (report["packed_tokens"], report["tokens"], report["patterns"]) == (128, 133, patterns)
    assert config.bits_per_element(16, 133) == pytest.approx((key, value), abs=0.01)
    assert report["spare_bytes"] == 0


def test_sizes_of_the_method_file():
    # the zero pattern is one row of the bank more
    key, value = PatternKVConfig(nbits=2).bits_per_element(128, 8196)
    assert key == value == pytest.approx(2.375 + 16 / 8192)
    key, value = PatternKVConfig(nbits=2).bits_per_element(64, 8196)
    assert (key, value) == pytest.approx((2.4375 + 16 / 8192, 2.6875 + 16 / 8192))
    assert (key + value) / 2 < 2.6


def test_an_empty_cache_reports_nothing(tiny, small):
    report = PatternKVCache(tiny("llama").config, **small).memory_report()
    assert report["bytes"] == report["full_bytes"] == 0 and report["ratio"] == 1 and report["bits_per_element"] is None
