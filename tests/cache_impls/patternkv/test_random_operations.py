"""Any sequence of operations leaves what the same operations leave of plain tensors, rounding switched off."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ext.cache_impls.patternkv import PatternKVConfig, PatternKVLayer
from hf_ext.cache_impls.patternkv.attention import packed_attention

OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 60)),
    st.tuples(st.just("step"), st.integers(1, 20)),
    st.tuples(st.just("crop"), st.integers(0, 70)),
    st.tuples(st.just("reorder"), st.integers(0, 99)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.integers(0, 99)),
    st.tuples(st.just("record"), st.just(0)),
    st.tuples(st.just("offload"), st.just(0)),
)


class Plain:
    """Keys [B, H, T, D] and the columns of padding of each row."""

    def __init__(self, padding):
        self.keys, self.values, self.padding = None, None, list(padding)

    def append(self, keys, values):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 2)
        self.values = values if self.values is None else torch.cat([self.values, values], 2)

    def rows(self, order):
        self.padding = [self.padding[row] for row in order]
        if self.keys is not None:
            self.keys, self.values = self.keys[order], self.values[order]


@given(
    padding=st.lists(st.integers(0, 25), min_size=1, max_size=3),
    first=st.integers(26, 90),
    operations=st.lists(OPERATIONS, max_size=12),
    fields=st.fixed_dictionaries(
        {
            "sink_length": st.sampled_from([0, 4]),
            "num_patterns": st.sampled_from([0, 5]),
            "new_pattern": st.sampled_from(["midrange", "none"]),
            "max_patterns": st.sampled_from([None, 6]),
        }
    ),
)
@settings(max_examples=150, deadline=None)
def test_operations_are_those_of_plain_tensors(padding, first, operations, fields):
    layer = PatternKVLayer(PatternKVConfig(nbits=16, group_size=8, residual_length=16, **fields))
    plain = Plain(padding)
    generator = torch.Generator().manual_seed(0)

    def append(tokens):
        keys, values = torch.randn(2, len(plain.padding), 2, tokens, 8, generator=generator)
        positions = torch.arange(layer.seen, layer.seen + tokens)[None] - torch.tensor(plain.padding)[:, None]
        returned = layer.update(keys, values, kwargs={"position_ids": positions.clamp(min=0)})
        plain.append(keys, values)
        check(*returned)

    def check(keys, values):
        assert keys.shape == plain.keys.shape and layer.get_seq_length() == plain.keys.shape[2]
        for row, columns in enumerate(plain.padding):
            torch.testing.assert_close(keys[row, :, columns:], plain.keys[row, :, columns:], atol=1e-5, rtol=0)
            torch.testing.assert_close(values[row, :, columns:], plain.values[row, :, columns:], atol=1e-5, rtol=0)

    append(first)
    for name, number in operations:
        if name == "update":
            append(number)
        elif name == "step":
            for _ in range(number):
                append(1)
        elif name == "crop":
            layer.crop(-number)
            left = plain.keys.shape[2] - number
            if left <= 0:
                return
            if number:
                plain.keys, plain.values = plain.keys[:, :, :left], plain.values[:, :, :left]
                plain.padding = [min(columns, left) for columns in plain.padding]
        elif name in ("reorder", "select"):
            count = len(plain.padding) if name == "reorder" else 1 + number % len(plain.padding)
            order = torch.randint(len(plain.padding), (count,), generator=generator)
            (layer.reorder_cache if name == "reorder" else layer.batch_select_indices)(order)
            plain.rows(order.tolist())
        elif name == "repeat" and len(plain.padding) < 6:
            layer.batch_repeat_interleave(number)
            plain.rows([row for row in range(len(plain.padding)) for _ in range(number)])
        elif name == "record":
            layer.activate_past_recording()
        elif name == "offload":
            layer.offload()
            layer.prefetch()
        check(*layer.dequantize())
        # sinks and two windows at most, and before the first window is packed the padding
        assert layer.keys.shape[2] < layer.config.sink_length + 2 * 16 + (0 if any(layer.packed) else max(padding))
    assert layer.start == plain.padding


@given(
    padding=st.lists(st.integers(0, 25), min_size=1, max_size=3),
    first=st.integers(30, 90),
    operations=st.lists(OPERATIONS, max_size=8),
    bits=st.sampled_from([2, 4, 8]),
    sinks=st.sampled_from([0, 4]),
    patterns=st.sampled_from([0, 5]),
)
@settings(max_examples=100, deadline=None)
def test_steps_over_packed_states_are_those_over_dense_ones(padding, first, operations, bits, sinks, patterns):
    fields = {"group_size": 8, "residual_length": 16, "sink_length": sinks, "num_patterns": patterns}
    layers = [PatternKVLayer(PatternKVConfig(nbits=bits, return_packed=packed, **fields)) for packed in (True, False)]
    module, generator = torch.nn.Module(), torch.Generator().manual_seed(0)
    padding = list(padding)

    def append(tokens):
        keys, values = torch.randn(2, len(padding), 2, tokens, 8, generator=generator)
        columns = torch.arange(layers[0].seen, layers[0].seen + tokens)[None] - torch.tensor(padding)[:, None]
        arguments = {"position_ids": columns.clamp(min=0)}
        (packed, packed_values), dense = (layer.update(keys, values, kwargs=arguments) for layer in layers)
        if tokens > 1:
            return
        query = torch.randn(len(padding), 4, 1, 8, generator=generator)
        visible = torch.arange(layers[0].seen)[None] >= torch.tensor(padding)[:, None]
        found, _ = packed_attention(module, query, packed, packed_values, visible[:, None, None])
        keys, values = (side.repeat_interleave(2, 1) for side in dense)
        expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, visible[:, None, None])
        torch.testing.assert_close(found, expected.transpose(1, 2), atol=2e-5, rtol=1e-4)

    append(first)
    module.num_key_value_groups = 2
    for name, number in operations:
        if name in ("update", "step"):
            for _ in range(1 if name == "update" else number):
                append(number if name == "update" else 1)
        elif name == "crop" and number < layers[0].seen:
            padding = [min(columns, layers[0].seen - number) for columns in padding]
            for layer in layers:
                layer.crop(-number)
        elif name in ("reorder", "select"):
            order = torch.randint(len(padding), (1 + number % len(padding),), generator=generator)
            padding = [padding[row] for row in order.tolist()]
            for layer in layers:
                layer.batch_select_indices(order)
        elif name == "repeat" and len(padding) < 6:
            padding = [columns for columns in padding for _ in range(number)]
            for layer in layers:
                layer.batch_repeat_interleave(number)
        elif name == "record":
            for layer in layers:
                layer.activate_past_recording()


def test_early_initialization_changes_nothing(states, fed):
    keys, values = states(2, 100)
    layer = PatternKVLayer(PatternKVConfig(group_size=16, residual_length=32, num_patterns=8))
    layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
    fed.more(layer, (keys, values), None, [0, 9])
    expected = fed((keys, values), None, [0, 9])
    for found, other in zip(layer.dequantize(), expected.dequantize()):
        assert torch.equal(found[:, :, 9:], other[:, :, 9:])
