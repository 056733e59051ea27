"""`generate` with the cache: plain peft with transformers' DynamicCache is the oracle, token for token."""

import copy
import gc

import pytest
import torch
from transformers import DynamicCache

from hf_ext import LRAgentCache, MXFP4Config, disable_lragent, enable_lragent, prepare_lora_config

MODES = ["base_shared", "base_lr_shared", "full", "none"]
STYLES = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 20},
    "beam": {"do_sample": False, "num_beams": 3},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
}


def run(model, inputs, cache, style="greedy", tokens=12, **fields):
    torch.manual_seed(7)
    return model.generate(**inputs, cache=cache, max_new_tokens=tokens, **STYLES[style], **fields)


def by_peft(model, agent, inputs, style="greedy", tokens=12, cache=None, **fields):
    model.set_adapter(agent)
    model.requires_grad_(False)
    return run(model, inputs, cache or DynamicCache(config=model.config), style, tokens, **fields)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("style", list(STYLES))
@pytest.mark.parametrize("padding", [None, [0, 9]])
def test_one_agent_writes_what_plain_peft_writes(tiny, prompts, mode, style, padding):
    model = tiny(shared=mode == "base_lr_shared")
    inputs = prompts(1 if style == "lookup" else 2, 30, padding if style != "lookup" else None)
    if style == "lookup":
        inputs["input_ids"] = torch.arange(1, 11).repeat(3)[None]
    full = DynamicCache(config=model.config)
    expected = by_peft(model, "act", inputs, style, cache=full)
    model.set_adapter("plan")
    cache = LRAgentCache(model, mode=mode)
    with cache.agent("act") as given:
        found = run(model, inputs, given, style)
    assert torch.equal(found, expected) and given is cache
    assert model.active_adapter == "plan" and cache.get_seq_length() == 41
    if style != "beam":  # beams leave the cache with rows for each, in transformers too
        turn = torch.cat([found, prompts(found.shape[0], 8, seed=3)["input_ids"]], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(turn[:, inputs["attention_mask"].shape[1] :])], 1)
        again = {"input_ids": turn, "attention_mask": mask}
        with cache.agent("act"):
            found = run(model, again, cache, style)
        assert torch.equal(found, by_peft(model, "act", again, style, cache=full))
        if style != "lookup":  # which writes otherwise from a cache that is kept, in transformers too
            assert torch.equal(found, by_peft(model, "act", again, style))


@pytest.mark.parametrize("mode", MODES)
def test_an_assistant_model_proposes_and_what_is_refused_is_taken_back(tiny, prompts, mode):
    model, assistant = tiny(shared=True), tiny(enable=False, overrides={"num_hidden_layers": 1}).unload()
    inputs = prompts(1, 30)
    expected = by_peft(model, "act", inputs, assistant_model=assistant, tokens=20)
    cache = LRAgentCache(model, mode=mode)
    with cache.agent("act"):
        assert torch.equal(run(model, inputs, cache, assistant_model=assistant, tokens=20), expected)
    track = next(iter(cache.tracks.values()))
    assert torch.equal(track.ids.view(), expected[:, : track.length])


def test_several_samples_of_a_prompt(tiny, prompts):
    model, inputs = tiny(), prompts(2, 30, [3, 0])
    expected = by_peft(model, "plan", inputs, "sample", num_return_sequences=2)
    cache = LRAgentCache(model)
    with cache.agent("plan"):
        assert torch.equal(run(model, inputs, cache, "sample", num_return_sequences=2), expected)


@pytest.mark.parametrize("kind", ["llama-mqa", "phi3", "qwen2", "cohere"])
def test_models_of_other_kinds_write_the_same(tiny, prompts, kind):
    model = tiny(kind, targets=("qkv_proj",) if kind == "phi3" else ("q_proj", "k_proj", "v_proj"))
    inputs = prompts(2, 30, [0, 9])
    expected = by_peft(model, "act", inputs)
    cache = LRAgentCache(model)
    with cache.agent("act"):
        assert torch.equal(run(model, inputs, cache), expected)


@pytest.mark.parametrize("chunk", [7, 30])
def test_a_prompt_is_read_in_chunks(tiny, prompts, chunk):
    model, inputs = tiny(), prompts(2, 30, [0, 5])
    expected = by_peft(model, "act", inputs)
    cache = LRAgentCache(model)
    with cache.agent("act"):
        assert torch.equal(run(model, inputs, cache, prefill_chunk_size=chunk), expected)


def test_the_old_name_of_the_argument_works(tiny, prompts):
    model, inputs = tiny(), prompts(1, 30)
    expected = by_peft(model, "act", inputs)
    cache = LRAgentCache(model)
    with cache.agent("act"):
        found = model.generate(**inputs, past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert torch.equal(found, expected) and cache.get_seq_length() == 41


# --- agents over one trajectory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, [0, 6]])
@pytest.mark.parametrize("shared", [True, False])
def test_agents_take_turns_and_read_only_what_is_theirs_to_read(tiny, prompts, padding, shared):
    model, inputs = tiny(shared=shared), prompts(2, 30, padding)
    ids, mask = inputs.values()
    cache, seen = LRAgentCache(model), []
    for agent in ("plan", "act", "plan", "act"):
        with cache.agent(agent):
            seen.append(cache.sync(ids, mask))
            ids = run(model, {"input_ids": ids, "attention_mask": mask}, cache, tokens=10)
        ids = torch.cat([ids, prompts(2, 2, seed=len(seen))["input_ids"]], 1)  # what an agent sees of the world
        mask = torch.cat([mask, torch.ones_like(ids[:, mask.shape[1] :])], 1)
    # 10 tokens are written a turn, of which the last is not read by its writer, and 2 are added. With A shared all but
    # those 3 are there; else only what the agent itself has read.
    assert seen == ([0, 39, 51, 63] if shared else [0, 0, 39, 51])
    track = cache.tracks["*"]
    assert torch.equal(track.ids.view(), ids[:, :75]) and torch.equal(track.visible.view(), mask[:, :75].bool())
    plan, act = (cache.agents[name] for name in ("plan", "act"))
    assert track.owners == [(39, plan), (51, act), (63, plan), (75, act)]


def test_the_first_reader_owns_the_base_states(tiny, prompts):
    model, ids = tiny(), prompts(1, 20)["input_ids"]
    cache = LRAgentCache(model, mode="base_shared")
    with cache.agent("plan"), torch.no_grad():
        model(input_ids=ids[:, :10], cache=cache)
    layer = cache.layers[1]
    owned = layer.lanes["*"].keys.view().clone()
    with cache.agent("act"), torch.no_grad():
        assert cache.get_seq_length() == 0 and layer.lanes["*"].length == 10
        model(input_ids=ids[:, :14], cache=cache)
        assert cache.get_seq_length() == 14
    assert torch.equal(layer.lanes["*"].keys.view(10), owned)
    plan, act = (layer.low_rank[cache.agents[name]] for name in ("plan", "act"))
    assert (plan.length, act.length, act.u_v.length, plan.u_k.length) == (10, 14, 14, 10)
    assert cache.tracks["*"].owners == [(10, cache.agents["plan"]), (14, cache.agents["act"])]
    with cache.agent("plan"):
        assert cache.get_seq_length() == 10


def test_an_agent_that_goes_on_differently_cuts_what_the_others_read(tiny, prompts, plain):
    model, ids = tiny(), prompts(1, 20)["input_ids"]
    other = ids.clone()
    other[:, 15:] = (ids[:, 15:] + 1) % 96
    cache = LRAgentCache(model, mode="base_shared")
    with cache.agent("plan"), torch.no_grad():
        model(input_ids=ids, cache=cache)
    with cache.agent("act"), torch.no_grad():
        model(input_ids=other[:, :10], cache=cache)
        assert cache.tracks["*"].length == 20
        model(input_ids=other[:, 10:], cache=cache)
    assert torch.equal(cache.tracks["*"].ids.view(), other)
    with cache.agent("plan"):
        assert cache.get_seq_length() == 15


# --- operations on the cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_rows_and_ends_are_those_of_a_cache_filled_anew(tiny, prompts, mode):
    model, inputs = tiny(shared=mode == "base_lr_shared"), prompts(3, 30, [0, 4, 9])
    ids, mask = inputs.values()
    nxt = prompts(3, 1, seed=2)["input_ids"]

    def filled(rows, end):
        cache = LRAgentCache(model, mode=mode)
        with cache.agent("act"), torch.no_grad():
            model(input_ids=ids[rows, :end], attention_mask=mask[rows, :end], cache=cache)
        return cache

    def logits(cache, rows, end):
        with cache.agent("act"), torch.no_grad():
            seen = torch.cat([mask[rows, :end], torch.ones_like(mask[rows, :1])], 1)
            return model(input_ids=nxt[rows], attention_mask=seen, cache=cache).logits

    order = torch.tensor([2, 0, 0])
    operations = {
        "reorder": (lambda c: c.reorder_cache(order), order, 30),
        "select": (lambda c: c.batch_select_indices(torch.tensor([0, 2])), torch.tensor([0, 2]), 30),
        "mask": (lambda c: c.batch_select_indices(torch.tensor([False, True, True])), torch.tensor([1, 2]), 30),
        "repeat": (lambda c: c.batch_repeat_interleave(2), torch.tensor([0, 0, 1, 1, 2, 2]), 30),
        "crop": (lambda c: c.crop(-7), torch.arange(3), 23),
        "nothing": (lambda c: c.crop(0), torch.arange(3), 30),
        "away": (
            lambda c: [getattr(layer, n)() for n in ("offload", "prefetch") for layer in c.layers],
            slice(None),
            30,
        ),
        "copy": (lambda c: None, torch.arange(3), 30),
    }
    for name, (operate, rows, end) in operations.items():
        cache = filled(slice(None), 30)
        kept = copy.deepcopy(cache) if name == "copy" else None
        operate(cache)
        found = logits(kept or cache, rows, end)
        torch.testing.assert_close(found, logits(filled(rows, end), rows, end), rtol=1e-4, atol=1e-4, msg=name)
        if kept:
            assert kept.get_seq_length() == 31 and cache.get_seq_length() == 30 and kept.model is cache.model
    with pytest.raises(ValueError, match="`crop` takes a negative number"):
        cache.crop(3)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.memory_report()["bytes"] == 0 and not cache.agents
    torch.testing.assert_close(logits(cache, slice(None), 0), logits(LRAgentCache(model, mode=mode), slice(None), 0))


def test_an_agent_that_is_behind_crops_its_own_states_only(tiny, prompts, plain):
    model, ids = tiny(overrides={"num_hidden_layers": 1}), prompts(1, 30)["input_ids"]
    cache = LRAgentCache(model, mode="base_shared")
    with torch.no_grad():
        with cache.agent("plan"):
            model(input_ids=ids, cache=cache)
        with cache.agent("act"):
            model(input_ids=ids[:, :20], cache=cache)
            cache.crop(-5)
            assert cache.get_seq_length() == 15
            found = model(input_ids=ids[:, 15:], cache=cache).logits
        with cache.agent("plan"):
            assert cache.get_seq_length() == 30
    torch.testing.assert_close(found, plain(model, "act", ids)[:, 15:], rtol=1e-4, atol=1e-4)


def test_a_call_that_breaks_midway_leaves_a_cache_that_goes_on(tiny, prompts, plain):
    model, ids = tiny(), prompts(1, 30)["input_ids"]
    cache = LRAgentCache(model, mode="base_shared")
    layer = model.get_base_model().model.layers[1]
    with torch.no_grad(), cache.agent("act"):
        model(input_ids=ids[:, :10], cache=cache)
    handle = layer.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), cache.agent("act"), torch.no_grad():
        model(input_ids=ids[:, 10:], cache=cache)
    handle.remove()
    assert [layer.get_seq_length() for layer in cache.layers] == [10, 10, 10] and model.active_adapter == "plan"
    with torch.no_grad(), cache.agent("act"):
        found = model(input_ids=ids[:, 10:], cache=cache).logits
    torch.testing.assert_close(found, plain(model, "act", ids)[:, 10:], rtol=1e-4, atol=1e-4)


# --- the model beside the cache -------------------------------------------------------------------------------------


def test_a_model_without_the_cache_computes_what_it_did_before(tiny, prompts, plain):
    model, inputs = tiny(enable=False), prompts(2, 30, [0, 6])
    gradients = [parameter.requires_grad for parameter in model.parameters()]
    before = plain(model, "act", **{"ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]})
    enable_lragent(model)
    enable_lragent(model)  # twice is once
    cache = LRAgentCache(model)
    with cache.agent("act"):
        run(model, inputs, cache)
        other = model(**inputs, use_cache=False).logits  # bypasses the cache
        beside = run(model, inputs, DynamicCache(config=model.config))
    torch.testing.assert_close(other, before, rtol=1e-5, atol=1e-5)
    after = plain(model, "act", inputs["input_ids"], attention_mask=inputs["attention_mask"])
    assert torch.equal(after, before) and model.config._attn_implementation == "sdpa"
    assert torch.equal(beside, by_peft(model, "act", inputs))
    disable_lragent(model)
    assert torch.equal(plain(model, "act", inputs["input_ids"], attention_mask=inputs["attention_mask"]), before)
    assert not any(m._forward_pre_hooks for m in model.modules()) and "generate" not in vars(model.get_base_model())
    assert [parameter.requires_grad for parameter in model.parameters()] == gradients
    with pytest.raises(ValueError, match="without it: call it first"):
        disable_lragent(model)


def test_a_copy_of_the_model_is_a_model_of_its_own(tiny, prompts):
    model, inputs = tiny(), prompts(1, 30)
    twin = copy.deepcopy(model)
    enable_lragent(twin)
    expected = by_peft(twin, "act", inputs)
    for each in (twin, model):
        cache = LRAgentCache(each)
        with cache.agent("act"):
            assert torch.equal(run(each, inputs, cache), expected)


def test_gradients_are_wanted_as_before(tiny, prompts):
    model = tiny()
    model.set_adapter("plan")  # peft makes it trainable
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert wanted and all("plan" in name for name in wanted)
    cache = LRAgentCache(model)
    with cache.agent("act"), torch.no_grad():
        model(**prompts(1, 10), cache=cache)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", ["base_shared", "base_lr_shared"])
def test_models_of_other_dtypes_keep_states_in_theirs(tiny, prompts, plain, dtype, mode):
    # peft keeps adapters in float32 over a base in half precision
    model = tiny(shared=True, enable=False)
    for name, parameter in model.named_parameters():
        if "lora_" not in name or dtype == torch.float64:
            parameter.data = parameter.data.to(dtype)
    enable_lragent(model)
    ids = prompts(1, 40)["input_ids"]
    cache = LRAgentCache(model, mode=mode)
    with torch.no_grad(), cache.agent("act"):
        first = model(input_ids=ids[:, :39], cache=cache).logits
        found = torch.cat([first, model(input_ids=ids[:, 39:], cache=cache).logits], 1)
    assert {part.data.dtype for layer in cache.layers for part in layer.holdings().values()} == {dtype}
    expected = plain(model, "act", ids)
    bound = 1e-12 if dtype == torch.float64 else 0.05
    assert (found - expected).norm() / expected.norm() < bound


def test_states_read_in_inference_mode_are_written_to_after_it(tiny, prompts):
    model, inputs = tiny(), prompts(1, 30)
    cache = LRAgentCache(model)
    with torch.inference_mode(), cache.agent("act"):
        run(model, inputs, cache, tokens=3)
        cache.crop(-2)
        cache.batch_repeat_interleave(2)
    with torch.no_grad(), cache.agent("act"):
        for _ in range(3):
            model(input_ids=torch.ones(2, 2, dtype=torch.int64), cache=cache)
    assert cache.get_seq_length() == 36


def test_it_runs_over_mxfp4_weights(tiny_llama_dir, prompts, plain):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=MXFP4Config()).eval()
    config = LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    config = prepare_lora_config(config)
    model = get_peft_model(base, config, adapter_name="plan")
    model.add_adapter("act", config)
    model.eval().requires_grad_(False)
    enable_lragent(model)
    inputs = prompts(2, 30, [0, 9])
    expected = by_peft(model, "act", inputs, eos_token_id=None)
    cache = LRAgentCache(model)
    with cache.agent("plan"), torch.no_grad():
        model(input_ids=inputs["input_ids"][:, :20], attention_mask=inputs["attention_mask"][:, :20], cache=cache)
    assert cache.mode == "base_shared"
    cache.reset()
    with cache.agent("act"):
        assert torch.equal(run(model, inputs, cache, eos_token_id=None), expected)


def test_generate_does_not_compile_for_this_cache(tiny):
    assert not LRAgentCache(tiny()).is_compileable


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_forward_gives_the_same_text(tiny, prompts):
    model, inputs = tiny(), prompts(1, 30)
    cache = LRAgentCache(model)
    with cache.agent("act"):
        expected = run(model, inputs, cache)
    base = model.get_base_model()
    base.forward = torch.compile(base.forward, backend="eager")
    cache = LRAgentCache(model)
    with cache.agent("act"):
        assert torch.equal(run(model, inputs, cache), expected)


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_reported_bytes_are_those_of_the_storages_alive(tiny, prompts, mode):
    model, inputs = tiny(shared=mode == "base_lr_shared"), prompts(2, 30, [0, 9])

    def use():
        cache = LRAgentCache(model, mode=mode)
        for agent in ("plan", "act"):
            with cache.agent(agent):
                run(model, inputs, cache)
        return cache

    use()  # whatever a first call leaves behind
    for _ in range(3):  # models of other tests go one after the other
        gc.collect()

    def alive() -> dict[int, int]:
        tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}

    before = alive()
    cache = use()
    gc.collect()
    report = cache.memory_report()
    assert sum(alive().values()) - sum(before.values()) == report["bytes"]
    parts = ("base", "low_rank", "token", "spare")
    assert report["bytes"] == sum(report[f"{part}_bytes"] for part in parts) and report["host_bytes"] == 0
    assert (report["agents"], report["mode"]) == (2, mode)
    assert report["ratio"] == report["full_bytes"] / report["bytes"]


@pytest.mark.parametrize(("mode", "ratio"), [("base_lr_shared", 2.88), ("base_shared", 2.67)])
def test_bytes_follow_the_closed_form(tiny, prompts, mode, ratio):
    # the heads of SmolLM2-135M: 2 HD = 384 values a token and layer, k and v adapters of rank 8
    overrides = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64, "num_hidden_layers": 30}
    overrides["hidden_size"] = 48
    model = tiny(agents=("a", "b", "c"), targets=("k_proj", "v_proj"), r=8, shared=True, overrides=overrides)
    ids = prompts(1, 40)["input_ids"]
    cache = LRAgentCache(model, mode=mode)
    for agent in ("a", "b", "c"):
        with cache.agent(agent), torch.no_grad():
            rest = ids[:, cache.get_seq_length() :]
            if rest.shape[1]:
                model(input_ids=rest, cache=cache)
    report = cache.memory_report()
    assert report["one_full_bytes"] == report["base_bytes"] == 40 * 30 * 384 * 4
    assert report["low_rank_bytes"] == 40 * 30 * 16 * 4 * (1 if mode == "base_lr_shared" else 3)
    assert report["token_bytes"] == 40 * (8 + 1 + 2 * 64 * 4) and report["spare_bytes"] == 0
    states = report["bytes"] - report["token_bytes"]
    assert report["full_bytes"] / states == pytest.approx(ratio, abs=0.005) and report["ratio"] < ratio


def test_room_for_growth_is_a_sixteenth(tiny, prompts):
    model = tiny()
    cache = LRAgentCache(model)
    with cache.agent("act"):
        run(model, prompts(1, 300), cache, tokens=60)
        cache.crop(-1)
    spare = cache.memory_report()["spare_bytes"] / cache.memory_report()["bytes"]
    assert spare < 0.1
    with cache.agent("act"):
        cache.crop(-200)
    assert cache.memory_report()["spare_bytes"] < 0.4 * cache.memory_report()["bytes"]
