"""Where LRAgent is exact (2.5), and where it is not: plain peft without a cache is the oracle."""

import pytest
import torch

from hf_ext import LRAgentCache, LRAgentConfig

QV, QKV = ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def last(model, cache, agent, ids):
    """Logits of the tokens that the agent still has to read."""
    with cache.agent(agent), torch.no_grad():
        return model(input_ids=ids[:, cache.get_seq_length() :], cache=cache).logits


def read_by(model, cache, agent, ids):
    with cache.agent(agent), torch.no_grad():
        model(input_ids=ids[:, cache.get_seq_length() :], cache=cache)


@pytest.mark.parametrize("mode", ["base_shared", "base_lr_shared", "full", "none", "auto"])
@pytest.mark.parametrize("targets", [QV, QKV, ("k_proj",), (*QKV, "o_proj", "gate_proj")])
def test_one_agent_alone_is_exact(tiny, prompts, plain, mode, targets):
    model, ids = tiny(targets=targets, shared=mode == "base_lr_shared"), prompts(2, 40)["input_ids"]
    cache = LRAgentCache(model, mode=mode)
    expected = plain(model, "act", ids)
    pieces = []
    with cache.agent("act"), torch.no_grad():
        for start, end in ((0, 20), (20, 37), (37, 38), (38, 40)):
            pieces.append(model(input_ids=ids[:, start:end], cache=cache).logits)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, **TOLERANCE)


@pytest.mark.parametrize("mode", ["base_shared", "base_lr_shared", "full"])
def test_agents_of_equal_adapters_are_exact(tiny, prompts, plain, mode):
    model, ids = tiny(shared=True), prompts(1, 40)["input_ids"]
    for name, parameter in model.named_parameters():
        if ".act." in name:
            parameter.data.copy_(model.get_parameter(name.replace(".act.", ".plan.")))
    cache = LRAgentCache(model, mode=mode)
    read_by(model, cache, "plan", ids[:, :30])
    found = last(model, cache, "act", ids)
    torch.testing.assert_close(found, plain(model, "act", ids)[:, -found.shape[1] :], **TOLERANCE)


@pytest.mark.parametrize("targets", [QV, QKV])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("where", ["one layer", "last layer", "no adapter"])
def test_agents_are_exact_where_their_hidden_states_are_those_of_the_base_model(
    tiny, prompts, plain, targets, shared, where
):
    fields = {"layers_to_transform": [2]} if where == "last layer" else {}
    overrides = {"num_hidden_layers": 1} if where == "one layer" else {}
    model = tiny(targets=targets, shared=shared, overrides=overrides, **fields)
    if where == "no adapter":  # B = 0
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.zero_()
    ids = prompts(1, 40)["input_ids"]
    cache = LRAgentCache(model)
    read_by(model, cache, "plan", ids[:, :20])
    read_by(model, cache, "act", ids[:, :30])
    assert cache.mode == ("base_lr_shared" if shared else "base_shared")
    for agent, end in (("plan", 35), ("act", 40)):
        found = last(model, cache, agent, ids[:, :end])
        assert shared or found.shape[1] > 5
        torch.testing.assert_close(found, plain(model, agent, ids[:, :end])[:, -found.shape[1] :], **TOLERANCE)


def test_several_layers_are_an_approximation_and_a_closer_one_than_full_sharing(tiny, prompts, plain):
    errors = {}
    for mode in ("none", "base_shared", "base_lr_shared", "full"):
        total = 0.0
        for seed in range(4):
            model, ids = tiny(shared=True), prompts(1, 40, seed=seed)["input_ids"]
            cache = LRAgentCache(model, mode=mode)
            read_by(model, cache, "plan", ids[:, :30])
            expected = plain(model, "act", ids)[:, 30:]
            total += (last(model, cache, "act", ids)[:, -10:] - expected).norm() / expected.norm()
        errors[mode] = total / 4
    assert errors["none"] < 1e-4 < 1e-2 < errors["base_lr_shared"]
    assert errors["base_shared"] < errors["full"] and errors["base_lr_shared"] < errors["full"]


KINDS = "llama-mqa llama-mha llama-yarn qwen2 mistral phi phi3 cohere stablelm gemma opt".split()


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_many_kinds_and_rotations_are_exact_for_one_agent(tiny, prompts, plain, kind):
    targets = ("qkv_proj",) if kind == "phi3" else QKV
    model, inputs = tiny(kind, targets=targets), prompts(2, 30, [0, 7])
    ids, mask = inputs.values()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if kind == "opt":
        positions = mask.cumsum(-1) * mask - 1
    expected = plain(model, "act", ids, attention_mask=mask, position_ids=positions)
    cache = LRAgentCache(model, mode="base_shared")
    pieces = []
    with cache.agent("act"), torch.no_grad():
        for start, end in ((0, 16), (16, 29), (29, 30)):
            part = slice(start, end)
            inputs = {"attention_mask": mask[:, :end], "position_ids": positions[:, part]}
            pieces.append(model(input_ids=ids[:, part], cache=cache, **inputs).logits)
    found = torch.cat(pieces, 1)
    for row, padding in enumerate((0, 7)):
        torch.testing.assert_close(found[row, padding:], expected[row, padding:], **TOLERANCE)
    assert cache.layers[0].low_rank[cache.agents["act"]].u_k.length == 30


@pytest.mark.parametrize("targets", [("k_proj",), ("v_proj",)])
def test_a_projection_that_is_no_target_is_shared_with_the_owners_part(tiny, prompts, plain, targets):
    from hf_ext import disable_lragent, enable_lragent

    model, ids = tiny(overrides={"num_hidden_layers": 1}), prompts(1, 40)["input_ids"]
    disable_lragent(model)
    enable_lragent(model, LRAgentConfig(targets=targets))
    cache = LRAgentCache(model)
    found = last(model, cache, "plan", ids)
    torch.testing.assert_close(found, plain(model, "plan", ids), **TOLERANCE)
    with cache.agent("act"), torch.no_grad():
        found = model(input_ids=ids[:, cache.get_seq_length() :], cache=cache).logits
    assert (found - plain(model, "act", ids)).abs().max() > 1e-2
    assert cache.layers[0].low_rank[cache.agents["act"]].parts().keys() == {"u_k", "u_v"}
    assert len(cache.layers[0].holdings()) == 4  # keys, values, and one u for each of the two


def test_adapters_of_different_ranks_and_targets_share_base_states(tiny, prompts, plain):
    agents = {
        "plan": {"r": 4, "target_modules": ["k_proj", "v_proj"]},
        "act": {"r": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        "see": {"r": 2, "target_modules": ["q_proj", "o_proj"]},
    }
    model, ids = tiny(agents=agents, overrides={"num_hidden_layers": 1}), prompts(1, 40)["input_ids"]
    cache = LRAgentCache(model)
    for agent in ("plan", "act"):
        found = last(model, cache, agent, ids[:, :30])
        torch.testing.assert_close(found, plain(model, agent, ids[:, :30]), **TOLERANCE)
    with cache.agent("see"):  # one without k or v takes the base states as they are
        assert cache.get_seq_length() == 30
    for agent in ("see", "plan", "act"):
        found = last(model, cache, agent, ids)
        torch.testing.assert_close(found, plain(model, agent, ids)[:, -found.shape[1] :], **TOLERANCE)
    assert cache.mode == "base_shared" and len(cache.layers[0].low_rank) == 2
