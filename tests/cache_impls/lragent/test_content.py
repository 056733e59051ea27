"""States belong to content: what vLLM, LMCache and llama.cpp got wrong with adapters and prefixes, as tests."""

import copy

import pytest
import torch
from peft import LoraConfig

from hf_ext import LRAgentCache, create_shared_a_adapter, enable_lragent
from hf_ext.cache_impls.lragent.lora import enabled_of

MODES = ["base_shared", "base_lr_shared", "full", "none"]


def read(model, cache, agent, ids):
    """Let an agent read what it has not; the last token always, so that there are logits."""
    with cache.agent(agent), torch.no_grad():
        cache.sync(ids)
        return model(input_ids=ids[:, cache.get_seq_length() :], cache=cache).logits[:, -1]


A_OF_ACT = "base_model.model.model.layers.2.self_attn.{}.lora_A.act.weight"


def key(model, name):
    return enabled_of(model).key(name)


def reload_other(model, name, shared_with=None):
    """Replace an adapter by one of other weights, under the same name."""
    config = copy.deepcopy(model.peft_config[name])
    model.set_adapter("plan")
    model.delete_adapter(name)
    torch.manual_seed(99)
    if shared_with:
        create_shared_a_adapter(model, name, like=shared_with)
    else:
        model.add_adapter(name, config)
    for parameter_name, parameter in model.named_parameters():
        if f".{name}." in parameter_name and "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.set_adapter("plan")
    model.eval().requires_grad_(False)


@pytest.mark.parametrize("mode", MODES)
def test_an_adapter_reloaded_with_other_weights_never_meets_its_old_states(tiny, prompts, mode):
    shared = mode == "base_lr_shared"
    model, ids = tiny(shared=shared), prompts(1, 30)["input_ids"]
    cache, fresh = LRAgentCache(model, mode=mode), LRAgentCache(model, mode=mode)
    for store in (cache, fresh):
        read(model, store, "plan", ids[:, :12])
    before = read(model, cache, "act", ids[:, :20])
    old = cache.agents["act"]
    reload_other(model, "act", "plan" if shared else None)
    found = read(model, cache, "act", ids[:, :20])
    assert cache.agents["act"] != old and (found - before).abs().max() > 1e-3
    # what plan read before is still there; what the old act read, and what followed, is not
    torch.testing.assert_close(found, read(model, fresh, "act", ids[:, :20]), rtol=1e-5, atol=1e-5)
    held = {key for layer in cache.layers for key in (*layer.low_rank, *layer.lanes)}
    assert old not in held and all(owner != old for track in cache.tracks.values() for _, owner in track.owners)


@pytest.mark.parametrize("mode", MODES)
def test_what_others_read_after_a_changed_adapter_goes_too(tiny, prompts, mode):
    model, ids = tiny(shared=mode == "base_lr_shared"), prompts(1, 30)["input_ids"]
    cache = LRAgentCache(model, mode=mode)
    read(model, cache, "plan", ids[:, :10])
    read(model, cache, "act", ids[:, :20])
    read(model, cache, "plan", ids)
    model.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.act.weight").data[0, 0] += (
        1.0  # one element, of no cached projection, and unseen by version counters
    )
    with cache.agent("plan"):  # not even the changed agent: its tokens are in the shared part
        held = cache.get_seq_length()
    assert held == {"base_shared": 10, "base_lr_shared": 10, "full": 10, "none": 30}[mode]


def test_the_key_covers_every_tensor_and_the_scaling_and_not_the_name(tiny):
    model = tiny(targets=("q_proj", "k_proj", "v_proj", "down_proj"), modules_to_save=["lm_head"])
    keys = [key(model, "act")]
    lora = "base_model.model.model.layers.2.{}.act.weight"
    for name in (
        lora.format("self_attn.q_proj.lora_A"),
        lora.format("mlp.down_proj.lora_B"),
        "base_model.model.lm_head.modules_to_save.act.weight",
    ):
        model.get_parameter(name).data.view(-1)[-1] += 0.01
        keys.append(key(model, "act"))
    layer = model.get_base_model().model.layers[2].mlp.down_proj
    layer.set_scale("act", 2.0)
    keys.append(key(model, "act"))
    layer.set_scale("act", 1.0)
    assert key(model, "act") == keys[-2] and len(set(keys)) == 5
    plan = key(model, "plan")
    model.add_adapter("twin", copy.deepcopy(model.peft_config["plan"]))
    for name, parameter in model.named_parameters():
        if ".twin." in name:
            parameter.data.copy_(model.get_parameter(name.replace(".twin.", ".plan.")))
    assert key(model, "twin") == plan != key(model, "act")


@pytest.mark.parametrize("mode", ["base_shared", "none"])
def test_two_names_of_one_content_share_everything(tiny, prompts, mode):
    model, ids = tiny(agents=("plan", "act", "twin")), prompts(1, 20)["input_ids"]
    for name, parameter in model.named_parameters():
        if ".twin." in name:
            parameter.data.copy_(model.get_parameter(name.replace(".twin.", ".plan.")))
    cache = LRAgentCache(model, mode=mode)
    read(model, cache, "plan", ids)
    for name, held in (("twin", 20), ("act", 0)):
        with cache.agent(name):
            assert cache.get_seq_length() == held
    assert cache.memory_report()["agents"] == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_changed_scaling_is_a_changed_adapter(tiny, prompts, mode):
    model, ids = tiny(shared=mode == "base_lr_shared"), prompts(1, 20)["input_ids"]
    cache = LRAgentCache(model, mode=mode)
    read(model, cache, "act", ids)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("act", 0.5)
    found = read(model, cache, "act", ids)
    torch.testing.assert_close(found, read(model, LRAgentCache(model, mode=mode), "act", ids), rtol=1e-5, atol=1e-5)


def test_merged_adapters_are_refused_and_what_merging_left_behind_is_seen(tiny, prompts):
    model, ids = tiny(), prompts(1, 20)["input_ids"]
    cache = LRAgentCache(model)
    read(model, cache, "plan", ids)
    weight = model.get_base_model().model.layers[0].self_attn.k_proj.base_layer.weight
    before = weight.clone()
    model.merge_adapter(["act"])
    with pytest.raises(ValueError, match="adapter 'act' is merged into the base weights: call model.unmerge_adapter"):
        read(model, cache, "plan", ids)
    model.unmerge_adapter()
    assert not torch.equal(before, weight)  # rounding
    with cache.agent("plan"):
        assert cache.get_seq_length() == 0
    with cache.agent("plan"), pytest.raises(ValueError, match="did not run on model.layers.0.self_attn, k_proj"):
        model.merge_adapter(["plan"])
        model(input_ids=ids, cache=cache)
    model.unmerge_adapter()


def test_disabled_adapters_are_refused(tiny, prompts):
    model, ids = tiny(), prompts(1, 20)["input_ids"]
    cache = LRAgentCache(model)
    with model.disable_adapter(), pytest.raises(ValueError, match="the adapters are disabled, so that the states"):
        read(model, cache, "plan", ids)
    message = "adapter 'plan' did not run on model.layers.0.self_attn, k_proj, for all rows: it is disabled, merged"
    with cache.agent("plan"), pytest.raises(ValueError, match=message), model.disable_adapter():
        model(input_ids=ids, cache=cache)
    assert cache.get_seq_length() == 0


def test_an_adapter_that_changes_while_it_is_active_is_refused(tiny, prompts):
    model, ids = tiny(), prompts(1, 20)["input_ids"]
    cache = LRAgentCache(model)
    with cache.agent("plan"), torch.no_grad():
        model(input_ids=ids, cache=cache)
        next(p for n, p in model.named_parameters() if "lora_B.plan" in n).mul_(2)
        with pytest.raises(ValueError, match="adapter 'plan' was changed while it is active"):
            model(input_ids=ids[:, :1], cache=cache)
    with cache.agent("plan"):
        assert cache.get_seq_length() == 0


def test_rows_of_several_adapters_are_refused(tiny, prompts):
    model, inputs = tiny(), prompts(2, 20)
    cache = LRAgentCache(model)
    for names in (["plan", "act"], ["plan", "__base__"], ["act", "act"]):
        with cache.agent("plan"), pytest.raises(ValueError, match="one adapter at a time|did not run"):
            model(**inputs, cache=cache, adapter_names=names)
    with cache.agent("plan"), pytest.raises(ValueError, match="did not run|adapter 'act' runs while"):
        model.base_model.set_adapter(["plan", "act"])
        model(**inputs, cache=cache)


def test_changed_base_weights_leave_nothing(tiny, prompts):
    model, ids = tiny(), prompts(1, 20)["input_ids"]
    cache = LRAgentCache(model)
    read(model, cache, "plan", ids)
    with torch.no_grad():
        model.get_base_model().model.layers[2].mlp.up_proj.weight.mul_(1.01)
    with cache.agent("act"):
        assert cache.get_seq_length() == 0
    assert not cache.tracks and cache.memory_report()["bytes"] == 0


# --- prefixes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_same_text_under_another_system_prompt_is_read_again(tiny, prompts, mode):
    model = tiny(shared=mode == "base_lr_shared")
    text = prompts(1, 20)["input_ids"]
    one, other = (torch.cat([prompts(1, 8, seed=seed)["input_ids"], text], 1) for seed in (1, 2))
    for change in (other, one[:, 5:]):
        cache, fresh = LRAgentCache(model, mode=mode), LRAgentCache(model, mode=mode)
        with cache.agent("plan"):
            model.generate(input_ids=one, cache=cache, max_new_tokens=3, do_sample=False)
        for store in (cache, fresh):
            with store.agent("plan"):
                found = model.generate(input_ids=change, cache=store, max_new_tokens=3, do_sample=False)
            if store is cache:
                first = found
        assert torch.equal(first, found)
        for lane in cache.tracks:
            assert torch.equal(cache.tracks[lane].ids.view(), fresh.tracks[lane].ids.view())


def test_without_the_check_the_caller_is_trusted(tiny, prompts):
    model, ids = tiny(), prompts(1, 20)["input_ids"]
    cache = LRAgentCache(model, check_prefix=False)
    read(model, cache, "plan", ids)
    other = torch.cat([(ids + 1) % 96, ids[:, :1]], 1)
    with cache.agent("plan"):
        model.generate(input_ids=other, cache=cache, max_new_tokens=1)
    assert torch.equal(cache.tracks["*"].ids.view()[:, :20], ids)


def test_a_cut_beyond_the_last_turn_warns_once(tiny, prompts, recwarn):
    model, ids = tiny(shared=True), prompts(1, 20)["input_ids"]
    cache = LRAgentCache(model)
    with cache.agent("plan"):
        ids = model.generate(input_ids=ids, cache=cache, max_new_tokens=4, do_sample=False)
    ids = torch.cat([ids, ids[:, :3]], 1)
    with cache.agent("act"):
        model.generate(input_ids=ids, cache=cache, max_new_tokens=4, do_sample=False)
        ids[:, -1] = 95  # the last turn, edited
        model.generate(input_ids=ids, cache=cache, max_new_tokens=4, do_sample=False)
        assert not [w for w in recwarn if "the prompt shares" in str(w.message)]
        ids[:, 5] = 95
        message = "the prompt shares only its first 5 tokens with the 30 that the cache holds, less than the 26 before"
        with pytest.warns(UserWarning, match=message):
            model.generate(input_ids=ids, cache=cache, max_new_tokens=4, do_sample=False)
        ids[:, 2] = 95
        model.generate(input_ids=ids, cache=cache, max_new_tokens=4, do_sample=False)
    assert not [w for w in recwarn if "the prompt shares" in str(w.message)]


def test_an_identical_prompt_leaves_one_token_to_read(tiny, prompts, plain):
    for mode in MODES:
        model, ids = tiny(shared=True), prompts(1, 20)["input_ids"]
        cache = LRAgentCache(model, mode=mode)
        read(model, cache, "plan", ids)
        with cache.agent("plan"):
            assert cache.sync(ids) == 19
            assert cache.sync(ids[:, :15]) == 14
        torch.testing.assert_close(read(model, cache, "plan", ids), plain(model, "plan", ids)[:, -1])
        with cache.agent("act"):
            assert cache.sync(ids) == {"base_shared": 0, "none": 0}.get(mode, 19)


def test_padding_is_part_of_a_prefix(tiny, prompts):
    model, inputs = tiny(), prompts(2, 20, [0, 6])
    ids, mask = inputs.values()
    cache = LRAgentCache(model)
    with cache.agent("plan"), torch.no_grad():
        model(**inputs, cache=cache)
        assert cache.sync(ids, mask) == 19
        assert cache.sync(ids, torch.ones_like(mask)) == 0  # the same ids, but padding is now text


def test_a_prompt_of_new_tokens_only_goes_on(tiny, prompts):
    model, inputs = tiny(), prompts(1, 20)
    whole = torch.cat([inputs["input_ids"], prompts(1, 5, seed=4)["input_ids"]], 1)
    cache, fresh = LRAgentCache(model), LRAgentCache(model)
    with cache.agent("plan"), torch.no_grad():
        model(**inputs, cache=cache)
        new = {"input_ids": whole[:, 20:], "attention_mask": torch.ones_like(whole)}
        found = model.generate(**new, cache=cache, max_new_tokens=5, do_sample=False)
    with fresh.agent("plan"):
        expected = model.generate(input_ids=whole, cache=fresh, max_new_tokens=5, do_sample=False)
    assert torch.equal(found[:, 5:], expected[:, 25:])


# --- the mode -------------------------------------------------------------------------------------------------------


def test_auto_shares_low_rank_states_if_all_a_are_equal(tiny, prompts):
    ids = prompts(1, 10)["input_ids"]
    for shared, change, mode in ((True, False, "base_lr_shared"), (True, True, "base_shared"), (False, False, None)):
        model = tiny(shared=shared)
        if change:  # one element
            model.get_parameter(A_OF_ACT.format("v_proj")).data[1, 1] += 1e-3
        cache = LRAgentCache(model)
        read(model, cache, "plan", ids)
        assert cache.mode == (mode or "base_shared") and cache.config.mode == "auto"
    # q_proj is not cached
    model = tiny(shared=True)
    model.get_parameter(A_OF_ACT.format("q_proj")).data[1, 1] += 1e-3
    cache = LRAgentCache(model)
    read(model, cache, "plan", ids)
    assert cache.mode == "base_lr_shared"


def test_auto_stops_sharing_low_rank_states_when_an_adapter_of_another_a_comes(tiny, prompts, plain):
    model, ids = tiny(shared=True, overrides={"num_hidden_layers": 1}), prompts(1, 20)["input_ids"]
    cache = LRAgentCache(model)
    read(model, cache, "plan", ids)
    model.add_adapter("new", LoraConfig(r=3, target_modules=["k_proj", "v_proj"], init_lora_weights=False))
    model.eval().requires_grad_(False)
    for agent in ("plan", "new", "act"):
        found = read(model, cache, agent, ids)
        torch.testing.assert_close(found, plain(model, agent, ids)[:, -1], rtol=1e-4, atol=1e-4)
    assert cache.mode == "base_shared" and cache.tracks["*"].owners == [(20, cache.agents["plan"])]


def test_a_shared_a_adapter_shares_a_and_trains_the_rest(tiny, prompts):
    model, inputs = tiny(enable=False), prompts(1, 10)
    create_shared_a_adapter(model, "critic", like="plan")
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".critic." in name for name in trained)
    assert not any("lora_A" in name and ("k_proj" in name or "v_proj" in name) for name in trained)
    assert sum("q_proj.lora_A" in name for name in trained) == 3
    before = {n: p.clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):  # B begins as zeros
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in trained), name
        if "k_proj.lora_A.critic" in name or "v_proj.lora_A.critic" in name:
            assert torch.equal(parameter, model.get_parameter(name.replace("critic", "plan")))
    model.delete_adapter("act")
    model.eval()
    enable_lragent(model)
    cache = LRAgentCache(model)
    read(model, cache, "plan", inputs["input_ids"])
    assert cache.mode == "base_lr_shared"
