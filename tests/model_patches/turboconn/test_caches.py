"""The state of the links follows whatever a cache goes through: beams, crops, repeats, assistants, other layers."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer

from hf_ext import PatternKVCache
from hf_ext.model_patches.turboconn import TurboConnConfig, patch
from hf_ext.model_patches.turboconn.state import TurboStateLayer, state_layer

ROUNDING = 2e-6
OPTIONS = {"max_new_tokens": 8, "min_new_tokens": 8}


def states(tokens: int, start: int = 0, rows: int = 2) -> torch.Tensor:
    """[S = 3, rows, tokens, d = 4], each entry its token's number plus a tenth of its row's."""
    numbers = torch.arange(start + 1, start + 1 + tokens, dtype=torch.float32)
    return (numbers[None, :, None] + 0.1 * torch.arange(rows)[:, None, None]).expand(3, rows, tokens, 4).clone()


def numbers(layer: TurboStateLayer, row: int = 0) -> list[float]:
    return [round(value, 3) for value in layer.states[0, row, :, 0].tolist()]


# --- the layer itself ----------------------------------------------------------------------------------------------


def test_the_layer_keeps_history_tokens_and_gives_the_last_group():
    layer = TurboStateLayer(group_size=2, history=5)
    assert layer.window() is None and layer.get_seq_length() == 0
    layer.append(states(1))
    assert numbers(layer) == [0, 0, 1]  # zeros stand before the first token
    layer.append(states(1, 1))
    assert layer.window()[0, 0, :, 0].tolist() == [1, 2]
    layer.append(states(9, 2))
    assert numbers(layer) == [7, 8, 9, 10, 11] and layer.seen == layer.get_seq_length() == 11


def test_a_crop_gives_back_what_was_before_and_refuses_to_go_past_its_history():
    layer = TurboStateLayer(group_size=1, history=9)
    layer.append(states(20))
    layer.crop(0)
    layer.crop(-3)
    assert layer.seen == 17 and layer.window()[0, 0, 0, 0] == 17
    with pytest.raises(ValueError, match=r"crop\(-10\) removes 10 tokens.*at most 5.*history=11"):
        layer.crop(-10)
    with pytest.raises(ValueError, match=r"crop\(4\): a positive length"):
        layer.crop(4)
    assert layer.seen == 17
    layer.crop(-17)
    assert layer.window() is None and layer.seen == 0


def test_a_crop_into_the_first_tokens_finds_the_zeros_before_them():
    layer = TurboStateLayer(group_size=3, history=20)
    layer.append(states(5))
    layer.crop(-4)
    assert layer.window()[0, 0, :, 0].tolist() == [0, 0, 1]


def test_recording_keeps_what_the_next_crop_may_remove():
    layer = TurboStateLayer(group_size=1, history=2)
    layer.activate_past_recording()
    layer.append(states(3))
    layer.append(states(12, 3))
    layer.crop(-12)
    assert layer.seen == 3 and numbers(layer) == [2, 3]


def test_rows_are_reordered_repeated_selected_and_forgotten():
    layer = TurboStateLayer(group_size=1, history=2)
    for change in (
        lambda: layer.reorder_cache(torch.tensor([0])),
        lambda: layer.batch_repeat_interleave(2),
        lambda: layer.batch_select_indices(torch.tensor([0])),
        lambda: layer.crop(-1),
    ):
        change()  # nothing to do while empty
    layer.append(states(1))
    layer.reorder_cache(torch.tensor([1, 0]))
    assert [numbers(layer, row) for row in range(2)] == [[0, 1.1], [0, 1]]
    layer.batch_repeat_interleave(2)
    assert [numbers(layer, row)[1] for row in range(4)] == [1.1, 1.1, 1, 1]
    layer.batch_select_indices(torch.tensor([3, 0]))
    assert [numbers(layer, row)[1] for row in range(2)] == [1, 1.1]
    layer.reset()
    assert layer.states is None and layer.seen == 0


# --- in generate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize(
    "mode", [{"num_beams": 4, "num_return_sequences": 2}, {"num_beams": 3}, {"do_sample": True, "num_beams": 2}]
)
def test_beams_carry_the_state(group_size, mode, linked, ids):
    model, tokens = linked("Qwen3", scale=0.3, group_size=group_size), ids()
    results = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        options = {**OPTIONS, "do_sample": False, **mode, "use_cache": use_cache, "attention_mask": tokens * 0 + 1}
        results.append(model.generate(tokens, **options))
    assert torch.equal(*results)


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 12}, {"assistant": "turbo"}, {"assistant": "base"}])
def test_assisted_generation_equals_greedy(family, options, linked, tiny, ids):
    # Drafts of 12 and 20 tokens, longer than the history of 9: the layer records what may be removed.
    model = linked(family, scale=0.1)
    tokens = ids(1).repeat(1, 2)
    options = dict(options)
    kind = options.pop("assistant", None)
    if kind is not None:
        assistant = copy.deepcopy(model) if kind == "turbo" else tiny(family)
        assistant.generation_config.num_assistant_tokens = 20
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0
        options["assistant_model"] = assistant
    common = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "attention_mask": tokens * 0 + 1}
    assert torch.equal(model.generate(tokens, **common, **options), model.generate(tokens, **common))


def test_a_cropped_cache_continues_as_if_the_tokens_had_never_been(linked, ids):
    for group_size in (1, 2):
        model, tokens = linked(group_size=group_size), ids()
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            expected = model(tokens, cache=cache, use_cache=True).logits
            for removed in (3, 8):
                cache.crop(-removed)
                redone = model(tokens[:, 12 - removed :], cache=cache, use_cache=True).logits
                assert (redone - expected[:, 12 - removed :]).abs().max() < ROUNDING
            with pytest.raises(ValueError, match="crop"):
                cache.crop(-10)
            # The keys and values were cropped before the state refused: the cache may not be used on.
            with pytest.raises(ValueError, match="cropped further"):
                model(tokens[:, 2:], cache=cache, use_cache=True)
            cache.reset()
            assert torch.equal(model(tokens, cache=cache, use_cache=True).logits, expected)


def test_rows_of_a_cache_are_repeated_and_selected_with_their_state(linked, ids):
    model, tokens = linked(), ids(3)
    with torch.no_grad():
        cache = model(tokens[:, :8], use_cache=True).cache
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        rows = torch.tensor([2, 2, 0, 0])
        continued = model(tokens[rows, 8:], cache=cache, use_cache=True).logits
        expected = model(tokens).logits[rows, 8:]
    assert (continued - expected).abs().max() < ROUNDING


def test_a_conversation_continues_in_the_cache_of_its_first_turn(linked, ids):
    model, tokens = linked(group_size=2), ids(1)
    options = {**OPTIONS, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(tokens, attention_mask=tokens * 0 + 1, **options)
    follow = torch.cat([first.sequences, ids(1, 5, seed=3)], dim=1)
    continued = model.generate(follow, attention_mask=follow * 0 + 1, cache=first.cache, **options).sequences
    anew = model.generate(follow, attention_mask=follow * 0 + 1, **options).sequences
    assert torch.equal(continued, anew)


def test_prefill_in_pieces_changes_nothing(linked, ids):
    model, tokens = linked(group_size=2), ids()
    options = {**OPTIONS, "do_sample": False, "attention_mask": tokens * 0 + 1}
    assert torch.equal(model.generate(tokens, prefill_chunk_size=5, **options), model.generate(tokens, **options))


# --- other caches --------------------------------------------------------------------------------------------------


class RoundingLayer(QuantizedLayer):
    """The library's quantized layer with a quantizer that loses nothing: what remains is its handling of the cache."""

    def __init__(self) -> None:
        super().__init__(residual_length=4)

    def _quantize(self, tensor, axis):
        return tensor.clone()

    def _dequantize(self, tensor):
        return tensor


def test_a_quantized_cache_holds_the_state_too(linked, ids):
    model, tokens = linked("Qwen3"), ids()
    options = {**OPTIONS, "do_sample": False, "attention_mask": tokens * 0 + 1}
    expected = model.generate(tokens, **options)
    cache = Cache(layers=[RoundingLayer() for _ in range(4)])
    assert torch.equal(model.generate(tokens, cache=cache, **options), expected)
    assert state_layer(cache).seen == cache.get_seq_length()
    cache = PatternKVCache(model.config, nbits=16)
    assert torch.equal(model.generate(tokens, cache=cache, **options), expected)


def test_a_cache_whose_layers_appear_on_the_way_holds_the_state_too(linked, ids):
    model, tokens = linked("Qwen3"), ids()
    options = {**OPTIONS, "do_sample": False, "attention_mask": tokens * 0 + 1}
    expected = model.generate(tokens, **options)
    cache = DynamicCache()
    assert torch.equal(model.generate(tokens, cache=cache, **options), expected)
    assert len(cache) == 5


def test_what_cannot_hold_the_state_is_refused_by_name(linked, tiny, ids):
    model, tokens = linked(), ids()
    with pytest.raises(ValueError, match="'static'.*'dynamic'"):
        model.generate(tokens, cache_implementation="static", max_new_tokens=2)
    with pytest.raises(ValueError, match="StaticCache cannot hold.*DynamicCache"):
        model(tokens, cache=StaticCache(config=model.config, max_cache_len=20))
    with pytest.raises(ValueError, match="tuple cannot hold"):
        model(tokens, cache=((tokens, tokens),))
    filled = tiny()(tokens, use_cache=True).cache
    with pytest.raises(ValueError, match="12 tokens but the links' states of 0.*empty cache"):
        model(tokens, cache=filled, use_cache=True)
    own = model(tokens, use_cache=True).cache
    with pytest.raises(ValueError, match="holds 2 sequences, but 1"):
        model(tokens[:1], cache=own, use_cache=True)
    with pytest.raises(ValueError, match="attention_mask has 12 columns.*12 tokens in the cache and the 12 new"):
        model(tokens, attention_mask=torch.ones_like(tokens), cache=own, use_cache=True)


def test_without_links_a_static_cache_is_the_bases_affair(tiny, ids):
    model, tokens = patch(tiny(), TurboConnConfig()), ids()
    options = {**OPTIONS, "do_sample": False, "attention_mask": tokens * 0 + 1}
    model.set_links(False)
    expected = tiny().generate(tokens, **options)
    assert torch.equal(model.generate(tokens, **options), expected)
    with torch.no_grad():
        logits = model(tokens, cache=StaticCache(config=model.config, max_cache_len=20)).logits
        assert (logits - model(tokens).logits).abs().max() < ROUNDING
