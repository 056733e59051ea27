"""What a patched model computes: the base at the start, and with links a recurrence that no chunking changes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache

from hf_ext.model_patches.turboconn import TurboConnConfig, patch, unpatch

ROUNDING = 2e-6  # of logits near 1: attention over other block sizes sums in another order


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


# --- at the start it is the base ---------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [1, 3, 16])
def test_with_links_at_their_start_the_logits_are_the_bases(family, group_size, tiny, ids):
    model, tokens = tiny(family, attention="eager"), ids()
    with torch.no_grad():
        expected = model(tokens).logits
        patch(model, TurboConnConfig(group_size=group_size))
        assert difference(model(tokens).logits, expected) < ROUNDING
        if group_size >= tokens.shape[1]:  # one chunk is one call: the same arithmetic
            assert torch.equal(model(tokens).logits, expected)


def test_with_links_switched_off_and_after_unpatch_the_logits_are_the_bases_bit_for_bit(family, tiny, fill, ids):
    model, tokens = tiny(family, attention="eager"), ids()
    classes = type(model), type(model.model), type(model.config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(tokens).logits
        fill(patch(model, TurboConnConfig(rank=4, gate="input")))
        assert difference(model(tokens).logits, expected) > 1e-3
        model.set_links(False)
        assert torch.equal(model(tokens).logits, expected)
        model.set_links(True)
        assert difference(model(tokens).logits, expected) > 1e-3
        assert unpatch(model) is model
        assert torch.equal(model(tokens).logits, expected)
    assert (type(model), type(model.model), type(model.config)) == classes
    assert not hasattr(model.config, "turboconn") and not any(model.model.layers[0]._forward_pre_hooks)
    assert model.state_dict().keys() == before.keys()


# --- one recurrence, however it is cut ---------------------------------------------------------------------------


@pytest.mark.parametrize("links", ["dense", "cascade", "all", "sparse", [(3, 1), (2, 0), (3, 0)]])
@pytest.mark.parametrize("group_size", [1, 3])
def test_one_call_two_calls_and_token_by_token_agree(links, group_size, linked, ids):
    model, tokens = linked("Qwen3", links=links, group_size=group_size), ids()
    with torch.no_grad():
        whole = model.model(tokens).last_hidden_state
        for cuts in ([5, 7], [1] * 12, [4, 1, 1, 6]):
            cache, parts = DynamicCache(), []
            for part in tokens.split(cuts, dim=1):
                parts.append(model.model(part, cache=cache, use_cache=True).last_hidden_state)
            assert len(cache) == 5 and cache.get_seq_length() == 12
            assert difference(torch.cat(parts, dim=1), whole) < ROUNDING
            if group_size == 1:  # then it is the same computation
                assert torch.equal(torch.cat(parts, dim=1), whole)
        model.set_links(False)
        assert difference(model.model(tokens).last_hidden_state, whole) > 1e-3


def test_every_family_continues_its_cache(family, linked, ids):
    # Rows of 12 tokens exceed the windows of 6 that half of the families have.
    for group_size in (1, 4):
        model, tokens = linked(family, group_size=group_size), ids()
        with torch.no_grad():
            whole = model(tokens, use_cache=False).logits
            first = model(tokens[:, :7], use_cache=True)
            second = model(tokens[:, 7:], cache=first.cache)
        assert difference(torch.cat([first.logits, second.logits], dim=1), whole) < ROUNDING


def test_generate_equals_a_loop_that_computes_everything_anew(family, linked, ids):
    model, tokens = linked(family, group_size=2), ids()
    expected = tokens
    with torch.no_grad():
        for _ in range(6):
            logits = model(expected, use_cache=False).logits[:, -1]
            logits[:, 2] = float("-inf")  # no end of text
            expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], dim=1)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    mask = torch.ones_like(tokens)
    assert torch.equal(model.generate(tokens, attention_mask=mask, **options), expected)
    assert torch.equal(model.generate(tokens, attention_mask=mask, use_cache=False, **options), expected)


def test_bf16_chunks_agree_with_token_by_token(linked, ids):
    # At g = 3: at g = 1 both are the same computation.
    model, tokens = linked(group_size=3).to(torch.bfloat16), ids()
    with torch.no_grad():
        whole, cache = model(tokens).logits, DynamicCache()
        parts = [model(tokens[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(12)]
    assert whole.dtype == torch.bfloat16 and model.model.turbo_links.into_0.weight.dtype == torch.bfloat16
    assert difference(torch.cat(parts, dim=1).float(), whole.float()) < 0.02


# --- causality ---------------------------------------------------------------------------------------------------


def test_a_change_at_a_token_changes_nothing_before_it_and_everything_after(linked, ids):
    model, tokens = linked(links="all", rank=4), ids(1)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 60 + 3
    with torch.no_grad():
        moved = (model(tokens).logits - model(changed).logits).abs().amax(-1)[0]
    assert moved[:5].max() == 0 and moved[5:].min() > 0


def test_the_link_reaches_back_group_size_tokens(linked, ids):
    # Without attention only the links join tokens: token 11 depends on 8, 5 and 2 at g = 3.
    model, tokens = linked(group_size=3), ids(1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    embeds = model.get_input_embeddings()(tokens).detach().requires_grad_()
    model(inputs_embeds=embeds).logits[0, 11].sum().backward()
    assert (embeds.grad[0].abs().amax(-1) > 0).nonzero().flatten().tolist() == [2, 5, 8, 11]


def test_state_accumulates_along_the_chain_of_tokens(linked, ids):
    # A source is read with its own links applied, so token 11 depends on token 0 through eleven links.
    model, tokens = linked(scale=0.2), ids(1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    embeds = model.get_input_embeddings()(tokens).detach().requires_grad_()
    model(inputs_embeds=embeds).logits[0, 11].sum().backward()
    assert (embeds.grad[0].abs().amax(-1) > 0).all()


# --- padding and packed rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("group_size", [1, 3])
def test_a_row_alone_equals_the_row_padded_in_a_batch(attention, group_size, linked, ids):
    model, tokens = linked(group_size=group_size, model={"attention": attention}), ids(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        batch = model(tokens.where(mask == 1, 0), attention_mask=mask, position_ids=positions).logits
        assert difference(batch[:1], model(tokens[:1]).logits) < ROUNDING
        assert difference(batch[1:, 5:], model(tokens[1:, 5:]).logits) < ROUNDING
        right = model(tokens[1:].roll(-5, 1), attention_mask=mask[1:].roll(-5, 1)).logits
        assert difference(right[:, :7], model(tokens[1:, 5:]).logits) < ROUNDING


@pytest.mark.parametrize("group_size", [1, 3])
def test_padding_writes_no_state_even_where_positions_do_not_tell(group_size, linked, ids):
    # Rotary positions are relative, so a row that starts late is the same row; only the mask says what is padding.
    model, tokens = linked(scale=0.3, group_size=group_size), ids(1, 12)
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        alone = model(tokens[:, 5:]).logits
        assert difference(model(tokens, attention_mask=mask).logits[:, 5:], alone) < 2 * ROUNDING
        first = model(tokens[:, :7], attention_mask=mask[:, :7], use_cache=True)
        second = model(tokens[:, 7:], attention_mask=mask, cache=first.cache, use_cache=True)
        assert difference(second.logits, alone[:, 2:]) < 2 * ROUNDING


def test_a_padded_batch_generates_what_each_row_does_alone(family, linked, ids):
    model, tokens = linked(family, group_size=2), ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    batch = model.generate(tokens.where(mask == 1, 0), attention_mask=mask, **options)[:, 9:]
    for row, start in ((0, 0), (1, 4)):
        prompt = tokens[row : row + 1, start:]
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert torch.equal(batch[row], alone[0, 9 - start :])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral"])
def test_packed_documents_equal_rows_alone(attention, use_cache, kind, linked, ids):
    for group_size in (1, 3, 12):
        model = linked(kind, group_size=group_size, model={"attention": attention})
        tokens, lengths = ids(1, 12), [3, 7, 2]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        with torch.no_grad():
            packed = model(tokens, position_ids=positions, use_cache=use_cache).logits
            alone = [model(part).logits for part in tokens.split(lengths, dim=1)]
        assert difference(packed, torch.cat(alone, dim=1)) < ROUNDING


def test_a_ready_4d_mask_rules_attention_and_links(linked, ids):
    for group_size in (1, 3):
        model, tokens, lengths = linked(group_size=group_size), ids(1, 12), [5, 7]
        document = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
        mask = (document[:, None] == document[None]).tril()[None, None]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        with torch.no_grad():
            alone = torch.cat([model(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
            assert difference(model(tokens, attention_mask=mask, position_ids=positions).logits, alone) < ROUNDING
            added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
            assert difference(model(tokens, attention_mask=added, position_ids=positions).logits, alone) < ROUNDING


# --- outputs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [1, 5])
def test_hidden_states_and_attentions_have_the_bases_shapes_and_values(group_size, tiny, ids):
    model, tokens = tiny("Qwen3", attention="eager"), ids()
    with torch.no_grad():
        expected = model(tokens, output_hidden_states=True, output_attentions=True)
        patch(model, TurboConnConfig(group_size=group_size))
        found = model(tokens, output_hidden_states=True, output_attentions=True)
    for ours, theirs in ((found.hidden_states, expected.hidden_states), (found.attentions, expected.attentions)):
        assert len(ours) == len(theirs)
        assert max(difference(a, b) for a, b in zip(ours, theirs, strict=True)) < ROUNDING


def test_outputs_come_as_tuples_when_asked(linked, ids):
    model, tokens = linked(), ids()
    with torch.no_grad():
        as_tuple, whole = model(tokens, return_dict=False, use_cache=False), model(tokens).logits
        assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], whole)
        assert torch.equal(model.model(tokens, return_dict=False)[0], model.model(tokens).last_hidden_state)


def test_the_cache_comes_back_when_it_is_asked_for_only(linked, ids):
    model, tokens = linked(), ids()
    with torch.no_grad():
        assert model(tokens, use_cache=False).cache is None
        assert model(tokens).cache.get_seq_length() == 12  # config.use_cache is True
        cache = DynamicCache(config=model.config)
        assert model(tokens, cache=cache, use_cache=True).cache is cache
        with pytest.warns(FutureWarning, match="past_key_values"):
            model.model(tokens, past_key_values=DynamicCache(), use_cache=True)


@pytest.mark.parametrize("low", [-1e4, -1e9, float("-inf")])
def test_a_mask_of_floats_rules_links_however_low_its_floats_are(low, linked, ids):
    model, tokens = linked(scale=0.3), ids(1, 6)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    allowed[3:, :3] = False
    floats = torch.zeros(6, 6).masked_fill(~allowed, low)
    with torch.no_grad():
        expected = model(tokens, attention_mask=allowed[None, None]).logits
        assert (model(tokens, attention_mask=floats[None, None]).logits - expected).abs().max() < ROUNDING


def test_attentions_that_sdpa_does_not_record_are_none_of_ours(linked, tiny, ids):
    options = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        found, expected = linked()(ids(), **options), tiny()(ids(), **options)
    assert found.attentions == expected.attentions == () and len(found.hidden_states) == 5


def test_threads_take_turns(linked, ids):
    # Hooks have one place to read from: two passes at once would take each other's states.
    model, rows = linked(scale=0.3), [ids(1, 24, seed=seed) for seed in range(3)]

    def logits(tokens):
        with torch.no_grad():
            return [model(tokens).logits for _ in range(3)]

    expected = [logits(tokens)[0] for tokens in rows]
    with ThreadPoolExecutor(len(rows)) as pool:
        for found, right in zip(pool.map(logits, rows), expected, strict=True):
            assert all(torch.equal(one, right) for one in found)


def test_weights_that_are_offloaded_between_calls_are_used(linked, ids):
    from accelerate import cpu_offload

    for fields in ({}, {"links": "all", "rank": 3, "gate": "input"}):
        model, tokens = linked(scale=0.3, **fields), ids()
        with torch.no_grad():
            expected = model(tokens).logits
            cpu_offload(model, execution_device=torch.device("cpu"))
            assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
            assert torch.equal(model(tokens).logits, expected)
