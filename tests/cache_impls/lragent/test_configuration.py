"""Options, and everything that is refused: one error each, which names what it was and what would work."""

import json

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model

from hf_ext import LRAgentCache, LRAgentConfig, create_shared_a_adapter, disable_lragent, enable_lragent


def test_a_config_goes_through_json_and_is_never_changed(tmp_path, tiny, prompts):
    config = LRAgentConfig(mode="base_shared", targets=["v_proj"], check_prefix=False)
    assert LRAgentConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    config.to_json_file(tmp_path / "config.json")
    assert LRAgentConfig.from_json_file(tmp_path / "config.json") == config and config.targets == ("v_proj",)
    with pytest.raises(AttributeError):
        config.mode = "none"
    config = LRAgentConfig()
    for kind in ("llama", "qwen2"):
        cache = LRAgentCache(tiny(kind), config)
        with cache.agent("plan"):
            cache.model(**prompts(1, 5), cache=cache)
        assert cache.config is config and config == LRAgentConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"mode": "shared"},
            "`mode` must be one of 'auto', 'base_shared', 'base_lr_shared', 'full', 'none', got 's",
        ),
        ({"targets": ("q_proj",)}, r"`targets` must be one or both of 'k_proj', 'v_proj', got \('q_proj',\)"),
        ({"targets": ()}, r"`targets` must be one or both of 'k_proj', 'v_proj', got \(\)"),
        ({"targets": "v_proj"}, "`targets` must be one or both"),
        ({"check_prefix": 1}, "`check_prefix` must be True or False, got 1"),
        ({"share": True}, "unknown fields of LRAgentConfig: share; known are check_prefix, mode, targets"),
    ],
)
def test_options_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LRAgentConfig.from_dict(fields)


def test_models_without_what_it_needs_are_refused_by_name(tiny):
    plain = tiny(enable=False).unload()
    with pytest.raises(ValueError, match="`model` must be a PeftModel with LoRA adapters, got LlamaForCausalLM: wrap"):
        enable_lragent(plain)
    with pytest.raises(ValueError, match="needs a peft model prepared by `enable_lragent.model.`, got LlamaForCaus"):
        LRAgentCache(plain)
    other = get_peft_model(plain, IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match="must be a PeftModel with LoRA adapters, got a PeftModel of IA3Model"):
        enable_lragent(other)
    with pytest.raises(ValueError, match="got PeftModelForCausalLM without it: call it first|got PeftModel"):
        LRAgentCache(tiny(enable=False))
    with pytest.raises(ValueError, match="`config` must be an LRAgentConfig, got str"):
        enable_lragent(tiny(enable=False), "auto")
    model = tiny()
    with pytest.raises(ValueError, match=r"the cache's targets are \('v_proj',\) and the model's \('k_proj', 'v_"):
        LRAgentCache(model, targets=("v_proj",))
    with pytest.raises(ValueError, match=r"give `config` or its fields \(mode\), not both"):
        LRAgentCache(model, LRAgentConfig(), mode="none")


def test_adapters_without_keys_and_values_are_refused(tiny):
    message = r"no adapter of the model \(plan, act\) has LoRA on k_proj or v_proj: there is nothing to keep apart"
    with pytest.raises(ValueError, match=message):
        tiny(targets=("q_proj", "o_proj"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "adapter 'plan' on model.layers.0.self_attn, k_proj, is DoRA, whose part is not B A x"),
        ({"lora_bias": True}, "adapter 'plan' on model.layers.0.self_attn, k_proj, has `lora_bias=True`: its bias"),
    ],
)
def test_adapters_that_are_not_plain_lora_on_a_cached_projection_are_refused(tiny, fields, message):
    with pytest.raises(ValueError, match=message):
        tiny(**fields)
    # on others they may be
    extra = {"target_modules": ["q_proj"], **fields}
    model = tiny(agents={"plan": {}, "act": extra})
    cache = LRAgentCache(model)
    with cache.agent("act"), torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.int64), cache=cache)


def test_a_later_adapter_is_checked_when_it_becomes_active(tiny):
    model = tiny()
    cache = LRAgentCache(model)
    model.add_adapter("odd", LoraConfig(target_modules=["v_proj"], use_dora=True))
    model.eval()
    with pytest.raises(ValueError, match="adapter 'odd' on model.layers.0.self_attn, v_proj, is DoRA"):
        with cache.agent("odd"):
            pass
    with pytest.raises(ValueError, match="agent 'none' is no adapter of the model; its adapters are plan, act, odd: "):
        with cache.agent("none"):
            pass


@pytest.mark.parametrize(
    ("kind", "targets", "message"),
    [
        (
            "qwen3",
            ("k_proj", "v_proj"),
            "Qwen3ForCausalLM does not cache .* k_proj .its k_norm after k_proj is",
        ),
        ("mistral-sliding", ("v_proj",), "model_type='mistral' has layers of sliding_attention: agents can share"),
        ("gemma2", ("v_proj",), "model_type='gemma2' has layers of sliding_attention"),
        (
            "gpt2",
            ("c_attn",),
            "model_type='gpt2' has no k_proj and v_proj, or qkv_proj, in each .*has c_attn",
        ),
    ],
)
def test_models_whose_states_cannot_be_split_are_refused_by_name(tiny, kind, targets, message):
    with pytest.raises(ValueError, match=message):
        tiny(kind, targets=targets)


def test_normed_keys_are_shared_whole_and_values_apart(tiny, prompts, plain):
    model, ids = tiny("qwen3", targets=("q_proj", "v_proj")), prompts(1, 20)["input_ids"]
    cache = LRAgentCache(model)
    with cache.agent("act"), torch.no_grad():
        found = model(input_ids=ids, cache=cache).logits
    torch.testing.assert_close(found, plain(model, "act", ids), rtol=1e-4, atol=1e-4)
    model = tiny("qwen3", targets=("k_proj", "v_proj"), enable=False)
    enable_lragent(model, LRAgentConfig(targets=("v_proj",)))
    cache = LRAgentCache(model)
    with cache.agent("act"), torch.no_grad():
        found = model(input_ids=ids, cache=cache).logits
    torch.testing.assert_close(found, plain(model, "act", ids), rtol=1e-4, atol=1e-4)


def test_states_of_the_model_that_no_agent_can_use_are_refused(tiny, prompts):
    model = tiny()
    cache = LRAgentCache(model)

    def enter():
        with cache.agent("plan"):
            pass

    model.train()
    with pytest.raises(ValueError, match=r"in training mode, and an LRAgentCache is for inference only: call mo"):
        enter()
    model.eval()
    with cache.agent("plan"), pytest.raises(ValueError, match="in training mode"):
        model.train()
        model(**prompts(1, 5), cache=cache)
    model.eval()
    model.base_model.set_adapter(["plan", "act"])
    with pytest.raises(ValueError, match="adapters 'plan', 'act' are active at once; an agent is one adapter: merge"):
        enter()
    model.set_adapter("plan")
    with cache.agent("plan"), pytest.raises(ValueError, match="another agent of this model is active: agents take tu"):
        enter()
    enter()
    with cache.agent("plan"), pytest.raises(ValueError, match="an agent is active: leave its `with` block first"):
        disable_lragent(model)


def test_the_cache_is_used_by_its_own_agent_only(tiny, prompts):
    model, inputs = tiny(), prompts(1, 10)
    cache, other = LRAgentCache(model), LRAgentCache(model)
    message = "inside `with cache.agent.name.:` of that very cache only"
    with pytest.raises(ValueError, match=message):
        model.generate(**inputs, cache=cache, max_new_tokens=2)
    with other.agent("plan"), pytest.raises(ValueError, match=message):
        model.generate(**inputs, cache=cache, max_new_tokens=2)
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    with cache.agent("plan"), pytest.raises(ValueError, match="`inputs_embeds` without `input_ids`"):
        model(inputs_embeds=embeddings, cache=cache)
    with cache.agent("plan"):
        model(**inputs, cache=cache)
    with cache.agent("plan"), pytest.raises(ValueError, match="the cache holds 1 rows and got 3"):
        model(**prompts(3, 5), cache=cache)
    assert cache.get_seq_length() == 10


def test_low_rank_states_cannot_be_shared_by_adapters_of_other_a(tiny):
    model = tiny()
    cache = LRAgentCache(model, mode="base_lr_shared")
    message = (
        "mode=\"base_lr_shared\" needs adapters of one A: adapters 'plan' and 'act' have different A on "
        "model.layers.0.self_attn, k_proj; make them by `create_shared_a_adapter`, or use"
    )
    with pytest.raises(ValueError, match=message), cache.agent("plan"):
        pass
    model = tiny(agents={"plan": {}, "act": {"target_modules": ["v_proj"]}})
    with pytest.raises(ValueError, match="adapter 'act' has no LoRA on model.layers.0.self_attn, k_proj, where 'plan"):
        with LRAgentCache(model, mode="base_lr_shared").agent("plan"):
            pass


def test_adapters_of_a_shared_a_cannot_be_made_of_nothing(tiny):
    model = tiny(targets=("q_proj",), enable=False)
    with pytest.raises(ValueError, match="`name` is 'act', which the model has already .plan, act."):
        create_shared_a_adapter(model, "act", like="plan")
    with pytest.raises(ValueError, match="`like` is 'x', and the model's adapters are plan, act"):
        create_shared_a_adapter(model, "critic", like="x")
    with pytest.raises(ValueError, match="adapter 'plan' has no LoRA on k_proj or v_proj, so there is no A to share"):
        create_shared_a_adapter(model, "critic", like="plan")
    assert set(model.peft_config) == {"plan", "act"}


def test_peft_still_has_the_private_hook_that_this_rests_on():
    import inspect

    from peft.tuners.lora.layer import Linear, LoraVariant

    source = inspect.getsource(Linear.forward)
    assert (
        "self.lora_variant[active_adapter].forward(" in source and "active_adapter not in self.lora_variant" in source
    )
    assert list(inspect.signature(LoraVariant.forward).parameters)[:4] == ["module", "active_adapter", "x", "result"]
