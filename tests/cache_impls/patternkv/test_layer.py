"""The layer: what it packs, when, and that every operation on rows and tokens does what it does to full states."""

import copy

import numpy as np
import pytest
import torch

from hf_ext.cache_impls.patternkv import PatternKVConfig, PatternKVLayer
from hf_ext.cache_impls.patternkv.quantization import (
    assign_nearest,
    gate_threshold,
    quantize_groups,
    unpack_codes,
)

PACKED = ("codes", "scale", "zero", "ids", "bank")


def assert_same_packed(one: PatternKVLayer, other: PatternKVLayer, rows=slice(None), other_rows=slice(None)) -> None:
    """The same bytes in use: every packed buffer, sinks, and the counts."""
    assert [one.packed[r] for r in range(len(one.packed))[rows]] == [
        other.packed[r] for r in range(len(other.packed))[other_rows]
    ]
    tokens = max(other.packed[other_rows])
    for side in ("key_states", "value_states"):
        a, b = getattr(one, side).view(tokens), getattr(other, side).view(tokens)
        for name in PACKED:
            x, y = getattr(a, name)[rows], getattr(b, name)[other_rows]
            if name == "bank":
                count = max(getattr(other, side.replace("states", "patterns"))[other_rows])
                x, y = x[:, :, :count], y[:, :, :count]
            assert torch.equal(x, y), f"{side}.{name}"
    assert torch.equal(one.sink_keys[rows], other.sink_keys[other_rows])
    assert torch.equal(one.sink_values[rows], other.sink_values[other_rows])


# --- what is packed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[100], [40, 1, 1, 58], [1] * 100])
def test_passthrough_reads_back_what_was_written(states, fed, chunks):
    keys, values = states(2, 100)
    layer = fed((keys, values), chunks, nbits=16)
    assert layer.packed == [96, 96] and layer.key_states.ids.any()
    for found, expected in zip(layer.dequantize(), (keys, values)):
        assert (found - expected).abs().max() < 2e-6


def kivi_reference(x: np.ndarray, bits: int, group: int, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values of KIVI for [T, D]: loops over groups, along tokens (axis 0) or channels (axis 1)."""
    codes, values = np.empty(x.shape, np.uint8), np.empty_like(x)
    for start in range(0, x.shape[axis], group):
        for other in range(x.shape[1 - axis]):
            at = (slice(start, start + group), other) if axis == 0 else (other, slice(start, start + group))
            low, high = x[at].min(), x[at].max()
            scale = np.float32(np.float16((high - low) / np.float32(2**bits - 1)))
            zero = np.float32(np.float16(low))
            codes[at] = np.clip(np.rint((x[at] - zero) / scale), 0, 2**bits - 1)
            values[at] = codes[at] * scale + zero
    return codes, values


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_without_patterns_it_is_kivi_bit_for_bit(states, fed, bits):
    config = PatternKVConfig.kivi(bits, group_size=32, residual_length=32).to_dict()
    keys, values = states(2, 70, channels=64)
    layer = fed((keys, values), [50, *[1] * 20], **config)
    assert layer.packed == [64, 64]
    for side, x, axis, read in (
        (layer.key_states, keys, 0, layer.dequantize()[0]),
        (layer.value_states, values, 1, layer.dequantize()[1]),
    ):
        found = unpack_codes(side.view(64).codes, bits)
        for row in range(2):
            for head in range(2):
                codes, back = kivi_reference(x[row, head, :64].numpy(), bits, 32, axis)
                assert (found[row, head].numpy() == codes).all()
                assert (read[row, head, :64].numpy() == back).all()
    assert torch.equal(layer.dequantize()[0][:, :, 64:], keys[:, :, 64:])


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("scale_fit", ["minmax", "mse"])
def test_what_is_read_back_is_scale_times_code_plus_zero_plus_pattern_in_float64(states, fed, bits, scale_fit):
    keys, values = states(2, 140, channels=48)
    layer = fed((keys, values), [100, *[1] * 40], nbits=bits, scale_fit=scale_fit, group_size_value=24)
    read = layer.dequantize()
    parts = 8 // bits
    for states_, found in ((layer.key_states, read[0]), (layer.value_states, read[1])):
        view = states_.view(128)
        for head in range(2):
            for token in (0, 17, 63, 64, 127):
                for channel in (0, 23, 24, 47):
                    byte = int(view.codes[1, head, token, channel % (48 // parts)])
                    code = byte >> bits * (channel // (48 // parts)) & (2**bits - 1)
                    at = (token // 16, channel) if states_.axis == -2 else (token, channel // 24)
                    scale, zero = float(view.scale[1, head, at[0], at[1]]), float(view.zero[1, head, at[0], at[1]])
                    pattern = float(view.bank[1, head, int(view.ids[1, head, token]), channel])
                    expected = scale * code + zero + pattern
                    assert found[1, head, 4 + token, channel].item() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("bits", [2, 4])
def test_values_err_by_half_a_step_of_their_narrower_residual_at_most(states, fed, bits):
    keys, values = states(1, 68)
    layer = fed((keys, values), nbits=bits, scale_fit="minmax")
    view = layer.value_states.view(64)
    error = (layer.dequantize()[1] - values)[:, :, 4:]
    step, zero = (part.float().repeat_interleave(16, -1) for part in (view.scale, view.zero))
    assert (error.abs() <= step * 0.501 + zero.abs() * 2**-10 + step * 2**-8).all()
    kivi = fed((keys, values), nbits=bits, scale_fit="minmax", num_patterns=0)
    kivi_error = (kivi.dequantize()[1] - values)[:, :, 4:]
    assert error.square().mean() < 0.3 * kivi_error.square().mean()


def test_tokens_that_are_patterns_are_exact_up_to_float16(fed):
    centers = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).half().float() * 4
    keys = centers[torch.arange(68) % 8][None, None]
    layer = fed((keys, keys.clone()), nbits=2, num_patterns=8, sink_length=0)
    tokens = layer.packed[0]
    # k-means may leave a centre out, but a token whose pattern is itself has a residual of zero
    for states_, found in ((layer.key_states, layer.dequantize()[0]), (layer.value_states, layer.dequantize()[1])):
        view = states_.view(tokens)
        pattern = view.bank[0, 0].float()[view.ids[0, 0].long()]
        own = (pattern - keys[0, 0, :tokens]).abs().amax(-1) == 0
        if states_ is layer.value_states:
            assert own.float().mean() > 0.5
            assert (found[0, 0, :tokens][own] - keys[0, 0, :tokens][own]).abs().max() == 0


# --- gates ---------------------------------------------------------------------------------------------------------


def group_cost(x: torch.Tensor, group: int) -> torch.Tensor:
    """Sum of squared ranges over channels and groups of tokens, float64 [..., ] from [..., window, D]."""
    low, high = x.double().unflatten(-2, (-1, group)).aminmax(dim=-2)
    return (high - low).square().sum((-1, -2))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
def test_key_gate_never_widens_the_ranges_of_a_window(states, fed, seed, spread):
    keys, values = states(2, 36 + 96, seed=seed)
    keys = keys + spread * torch.randn(keys.shape, generator=torch.Generator().manual_seed(seed))
    layer = fed((keys, values), [68, *[1] * 64])
    view = layer.key_states.view(128)
    pattern = view.bank.float().gather(2, view.ids.long()[..., None].expand(-1, -1, -1, 32))
    packed = keys[:, :, 4:132]
    windows = packed.unflatten(2, (-1, 32))
    residual = (packed - pattern).unflatten(2, (-1, 32))
    assert (group_cost(residual, 16) <= group_cost(windows, 16) * (1 + 1e-6)).all()


def test_patterns_that_hurt_keys_are_not_used_and_the_codes_are_kivis(states, fed, monkeypatch):
    keys, values = states(1, 68)

    def far(x, count, **_):
        signs = torch.randn(x.shape[0], x.shape[1], count, x.shape[3], generator=torch.Generator().manual_seed(3))
        return 50 * signs.sign()  # equally far from everything, so that tokens differ in which they take

    monkeypatch.setattr("hf_ext.cache_impls.patternkv.packed.mine_patterns", far)
    layer = fed((keys, values), assign="l2", new_pattern="none")
    kivi = fed((keys, values), num_patterns=0)
    for states_, plain in ((layer.key_states, kivi.key_states), (layer.value_states, kivi.value_states)):
        assert not states_.view(64).ids.any()
        assert torch.equal(states_.view(64).codes, plain.view(64).codes)


def test_without_the_key_gate_every_key_has_a_pattern(states, fed):
    layer = fed(states(1, 132), [68, *[1] * 64], key_gate="none")
    assert (layer.key_states.view(128).ids > 0).all()


@pytest.mark.parametrize("gate", ["test", "narrower", "none"])
def test_value_gate_accepts_by_the_ratio_of_ranges(states, fed, gate):
    keys, values = states(1, 68)
    values = values + torch.linspace(0, 6, 68)[None, None, :, None] * torch.randn(values.shape)
    layer = fed((keys, values), value_gate=gate)
    view, x = layer.value_states.view(64), values[:, :, 4:68]
    bank = view.bank.float()
    nearest = 1 + assign_nearest(x, bank[:, :, 1:])
    residual = x - bank.gather(2, nearest[..., None].expand(-1, -1, -1, 32))
    rho = (residual.amax(-1) - residual.amin(-1)) / (x.amax(-1) - x.amin(-1))
    limit = {"test": gate_threshold(32), "narrower": 1.0, "none": float("inf")}[gate]
    clear = (rho - limit).abs() > 1e-4
    expected = torch.where(rho < limit, nearest, 0)
    assert torch.equal(view.ids.long()[clear], expected[clear])
    if gate != "none":
        assert 0 < (view.ids == 0).float().mean() < 1


# --- banks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["midrange", "mean", "none"])
def test_each_window_after_the_first_flush_adds_its_pattern(states, fed, kind):
    keys, values = states(1, 36 + 3 * 32)
    layer = fed((keys, values), [68, *[1] * 64], new_pattern=kind)  # two windows of the prompt, two of decoding
    added = 0 if kind == "none" else 2
    assert layer.key_patterns == layer.value_patterns == [1 + 8 + added]
    for j in range(added):
        window = keys[0, :, 68 + 32 * j : 100 + 32 * j]
        expected = window.mean(1) if kind == "mean" else (window.amin(1) + window.amax(1)) / 2
        torch.testing.assert_close(layer.key_states.bank[0, :, 9 + j].float(), expected, atol=2e-3, rtol=2e-3)
    assert not layer.key_states.bank[:, :, 0].any()


def test_patterns_are_bounded_when_asked(states, fed):
    layer = fed(states(1, 36 + 5 * 32), [36, *[1] * 160], max_patterns=10)
    assert layer.key_patterns == [11]


def test_more_than_255_patterns_take_two_bytes_and_read_back_the_same(states, fed):
    keys, values = states(1, 36 + 40 * 8, channels=8)
    fields = {"residual_length": 8, "group_size": 8, "num_patterns": 6, "nbits": 16}
    small = fed((keys, values), [40, *[1] * 316], **fields)
    assert small.key_states.ids.dtype == torch.uint8
    big = fed((keys, values), [308, *[1] * 48], **{**fields, "num_patterns": 254})
    assert big.key_states.ids.dtype == torch.int16 and big.key_patterns[0] > 256
    assert (big.dequantize()[0] - keys).abs().max() < 2e-6


def test_prompt_shorter_than_the_patterns_asked_for_is_packed(states, fed):
    layer = fed(states(1, 40), num_patterns=64)
    assert layer.packed == [32] and layer.key_patterns == [1 + 36]


def test_mining_looks_at_a_bounded_number_of_evenly_spaced_tokens(states, fed, monkeypatch):
    seen = []
    from hf_ext.cache_impls.patternkv import packed

    mine = packed.mine_patterns
    monkeypatch.setattr(packed, "mine_patterns", lambda x, *a, **k: seen.append(x) or mine(x, *a, **k))
    keys, values = states(1, 104)
    fed((keys, values), mining_max_tokens=10)
    assert torch.equal(seen[0], keys[:, :, 4::10])


# --- windows and chunks --------------------------------------------------------------------------------------------


def test_a_window_is_packed_as_soon_as_it_is_full(states, fed):
    keys, values = states(1, 4 + 64 + 1)
    layer = fed((keys[:, :, :35], values[:, :, :35]))
    assert layer.packed == [0] and layer.keys.shape[2] == 35
    fed.more(layer, (keys[:, :, 35:36], values[:, :, 35:36]))
    assert layer.packed == [32] and layer.keys.shape[2] == 0
    fed.more(layer, (keys[:, :, 36:67], values[:, :, 36:67]), [1] * 31)
    assert layer.packed == [32] and layer.keys.shape[2] == 31
    fed.more(layer, (keys[:, :, 67:68], values[:, :, 67:68]))
    assert layer.packed == [64] and layer.keys.shape[2] == 0
    fed.more(layer, (keys[:, :, 68:], values[:, :, 68:]))
    assert layer.packed == [64] and layer.get_seq_length() == 69 and layer.dequantize()[0].shape[2] == 69


@pytest.mark.parametrize("chunks", [[1] * 171, [7] * 24 + [3], [31] * 5 + [16], [32] * 5 + [11], [33] * 5 + [6]])
def test_windows_have_the_same_codes_however_the_prompt_is_split(states, fed, monkeypatch, chunks):
    bank = {}

    def fixed(x, count, **_):
        return bank.setdefault(x.shape[1:2], torch.randn(*x.shape[:2], count, x.shape[3]))

    monkeypatch.setattr("hf_ext.cache_impls.patternkv.packed.mine_patterns", fixed)
    both = states(1, 171)
    fields = {"new_pattern": "none", "assign": "l2"}
    assert_same_packed(fed(both, chunks, **fields), fed(both, **fields))


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_a_prompt_is_packed_in_blocks_with_the_same_result(states, fed, monkeypatch, scope):
    both = states(2, 270)
    whole = fed(both, bank_scope=scope)
    monkeypatch.setattr("hf_ext.cache_impls.patternkv.packed._PROMPT_BLOCK", 70)
    assert_same_packed(fed(both, bank_scope=scope), whole)


def test_a_long_prompt_needs_little_more_than_its_states(states, fed):
    from torch.utils._python_dispatch import TorchDispatchMode

    keys, values = states(1, 12000, channels=16)
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype in (torch.float32, torch.int64) and out._base is None:
                largest.append(out.untyped_storage().nbytes())
            return out

    layer = PatternKVLayer(PatternKVConfig(mining_max_tokens=256, mining_iters=2))
    with Watch():
        layer.update(keys.bfloat16(), values.bfloat16())
    assert layer.packed[0] > 11000
    # float32 of 2,048 tokens, and of the patterns' distances to them
    assert max(largest) <= 2048 * 2 * max(16, 32) * 4


def test_new_states_are_returned_exact_and_old_ones_as_they_are_read_back(states, fed):
    keys, values = states(1, 100)
    layer = fed((keys[:, :, :70], values[:, :, :70]))
    before = layer.dequantize()
    ((returned, _),) = fed.more(layer, (keys[:, :, 70:], values[:, :, 70:]))
    assert torch.equal(returned[:, :, 70:], keys[:, :, 70:]) and torch.equal(returned[:, :, :70], before[0])
    assert torch.equal(returned[:, :, :4], keys[:, :, :4])  # sinks
    assert not torch.equal(returned[:, :, 4:68], keys[:, :, 4:68])


def test_packed_bytes_never_change_and_buffers_stay_where_they_are_within_a_block(states, fed):
    keys, values = states(1, 68 + 32 * 12)
    layer = fed((keys[:, :, :68], values[:, :, :68]))
    kept, moves, pointers = None, 0, None
    for at in range(68, keys.shape[2]):
        fed.more(layer, (keys[:, :, at : at + 1], values[:, :, at : at + 1]))
        tokens = layer.packed[0]
        views = [getattr(layer, side).view(tokens) for side in ("key_states", "value_states")]
        now = [tensor for view in views for tensor in view[:4]]
        if kept is not None:
            assert all(torch.equal(new[:, :, : old.shape[2]], old) for new, old in zip(now, kept))
        kept = [tensor.clone() for tensor in now]
        new_pointers = [layer.key_states.codes.data_ptr(), layer.value_states.scale.data_ptr()]
        moves += pointers is not None and new_pointers != pointers
        pointers = new_pointers
    # the prompt's exact buffers, then blocks of 8 windows
    assert moves == 2 and layer.key_states.codes.shape[2] == 64 + 2 * 8 * 32


# --- rows ----------------------------------------------------------------------------------------------------------


def test_a_rows_codes_do_not_depend_on_its_neighbours(states, fed):
    keys, values = states(2, 140)
    changed = [side.clone() for side in (keys, values)]
    for side in changed:
        side[1] = torch.randn(side[1].shape, generator=torch.Generator().manual_seed(5))
    one, other = (fed(both, [100, *[1] * 40]) for both in ((keys, values), changed))
    assert_same_packed(one, other, slice(0, 1), slice(0, 1))
    assert not torch.equal(one.key_states.codes[1], other.key_states.codes[1])
    one, other = (fed(both, [100, *[1] * 40], bank_scope="batch") for both in ((keys, values), changed))
    assert one.key_states.bank.shape[0] == 1
    assert not torch.equal(one.key_states.codes[0], other.key_states.codes[0])  # as documented


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e30])
def test_a_row_does_not_depend_on_a_neighbour_that_float16_cannot_hold(states, fed, odd):
    keys, values = states(2, 140)
    alone = fed((keys[:1], values[:1]), [100, *[1] * 40])
    for side in (keys, values):
        side[1, 0, 50, 3] = odd
    both = fed((keys, values), [100, *[1] * 40])
    assert both.key_states.scale.dtype == torch.float32
    for found, expected in zip(both.dequantize(), alone.dequantize()):
        assert torch.equal(found[:1], expected)


def test_one_row_has_the_same_bank_in_either_scope(states, fed):
    both = states(1, 140)
    assert_same_packed(fed(both, [100, *[1] * 40], bank_scope="batch"), fed(both, [100, *[1] * 40]))


@pytest.mark.parametrize("padding", [[0, 13], [40, 3], [5, 5], [70, 0]])
def test_a_padded_row_has_the_codes_that_it_has_alone(states, fed, padding):
    keys, values = states(2, 170)
    layer = fed((keys, values), [100, *[1] * 70], padding)
    read = layer.dequantize()
    for row, columns in enumerate(padding):
        alone_states = tuple(side[row : row + 1, :, columns:] for side in (keys, values))
        alone = fed(alone_states, [100 - columns, *[1] * 70])
        assert layer.start[row] == columns
        tokens = alone.packed[0]
        assert layer.packed[row] == tokens
        for side in ("key_states", "value_states"):
            a, b = getattr(layer, side).view(tokens), getattr(alone, side).view(tokens)
            for name in ("codes", "scale", "zero", "ids"):
                assert torch.equal(getattr(a, name)[row], getattr(b, name)[0]), f"{side}.{name} of row {row}"
            # ids of padding: there are none, since padding has no place among the packed tokens
        for found, expected in zip(read, alone.dequantize()):
            assert torch.equal(found[row : row + 1, :, columns:], expected)


def test_padding_is_no_sink_and_is_not_mined(states, fed):
    keys, values = states(2, 100)
    for side in (keys, values):
        side[1, :, :20] = 1e4
    layer = fed((keys, values), None, [0, 20])
    assert torch.equal(layer.sink_keys[1], keys[1, :, 20:24])
    assert layer.key_states.bank.abs().max() < 100 and layer.value_states.bank.abs().max() < 100


@pytest.mark.parametrize(
    ("positions", "start"),
    [
        (None, 0),
        ([0, 1, 2, 3, 4, 5], 0),
        ([0, 0, 0, 1, 2, 3], 2),  # what generate gives a padded row, in two variants
        ([1, 1, 0, 1, 2, 3], 2),
        ([0, 0, 0, 0, 0, 0], 5),
        ([5, 6, 7, 8, 9, 10], 0),  # an offset
        ([0, 1, 2, 0, 1, 2], 0),  # packed sequences
        ([0, 1, 2, 2, 2, 3], 0),  # positions of an image
        ([0, 1, 2], 0),  # of something else
    ],
)
def test_padding_is_read_from_position_ids_and_from_nothing_else(states, positions, start):
    keys, values = states(1, 6)
    layer = PatternKVLayer(PatternKVConfig())
    arguments = {} if positions is None else {"kwargs": {"position_ids": torch.tensor([positions])}}
    layer.update(keys, values, **arguments)
    assert layer.start == [start]


def test_batch_scope_refuses_padding(states, fed):
    with pytest.raises(ValueError, match='bank_scope`="batch".*use bank_scope="sequence"'):
        fed(states(2, 40), None, [0, 3], bank_scope="batch")


@pytest.fixture
def uneven(states, fed):
    """A layer of three rows of different lengths, patterns and packed tokens, and what it reads back."""

    def make(**fields):
        return fed(states(3, 150), [100, *[1] * 50], [0, 20, 60], **fields)

    return make


@pytest.mark.parametrize("patterns", [0, 8])
def test_operations_on_rows_are_those_of_the_read_back_states(uneven, patterns):
    layer = uneven(num_patterns=patterns)
    keys, values = layer.dequantize()
    for name, argument, index in (
        ("reorder_cache", torch.tensor([2, 2, 0]), [2, 2, 0]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ("batch_select_indices", torch.tensor([2, 0]), [2, 0]),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
        ("batch_select_indices", [1], [1]),
        ("batch_select_indices", torch.tensor([-1]), [-1]),
    ):
        twin = copy.deepcopy(layer)
        getattr(twin, name)(argument)
        visible = [range(twin.start[r], 150) for r in range(len(index))]
        for found, expected in zip(twin.dequantize(), (keys, values)):
            assert found.shape[0] == len(index)
            for row, source in enumerate(index):
                columns = list(visible[row])
                assert torch.equal(found[row, :, columns], expected[source, :, columns]), name
        if not patterns:
            assert twin.key_states.ids.untyped_storage().nbytes() == 1


def test_decoding_goes_on_by_row_after_a_reorder(states, fed):
    keys, values = states(3, 150)
    order = torch.tensor([2, 0, 0])
    layer = fed((keys, values), [100, *[1] * 50], [0, 20, 60])
    layer.reorder_cache(order)
    other = fed((keys[order], values[order]), [100, *[1] * 50], [60, 0, 0])
    more = states(3, 40, seed=7)
    for one in (layer, other):
        fed.more(one, more, [1] * 40)
    for found, expected in zip(layer.dequantize(), other.dequantize()):
        assert torch.equal(found, expected)


# --- cropping ------------------------------------------------------------------------------------------------------


def test_cropping_the_tail_equals_never_having_had_it(states, fed):
    keys, values = states(2, 110)
    layer = fed((keys, values))
    layer.crop(-9)
    expected = fed((keys[:, :, :101], values[:, :, :101]))
    # mined from a few tokens more, so codes differ; what is in the tail does not
    assert layer.seen == 101 and layer.packed == expected.packed
    assert torch.equal(layer.dequantize()[0][:, :, 100:], keys[:, :, 100:101])
    layer = fed((keys[:, :, :101], values[:, :, :101]))
    fed.more(layer, (keys[:, :, 101:], values[:, :, 101:]))
    layer.crop(-9)
    assert_same_packed(layer, expected)
    for found, other in zip(layer.dequantize(), expected.dequantize()):
        assert torch.equal(found, other)
    more = states(2, 60, seed=3)
    for one in (layer, expected):
        fed.more(one, more, [1] * 60)
    for found, other in zip(layer.dequantize(), expected.dequantize()):
        assert torch.equal(found, other)


@pytest.mark.parametrize("left", [99, 70, 68, 67, 40, 36, 20, 4, 3, 1])
@pytest.mark.parametrize("padding", [None, [0, 30]])
def test_cropping_beyond_the_tail_keeps_what_was_read_back(states, fed, left, padding):
    both = states(2, 110)
    layer = fed(both, [70, *[1] * 40], padding)
    keys, values = layer.dequantize()
    layer.crop(left - 110)
    assert layer.get_seq_length() == left
    found = layer.dequantize()
    for row, columns in enumerate(padding or [0, 0]):
        assert torch.equal(found[0][row, :, columns:], keys[row, :, columns:left])
        assert torch.equal(found[1][row, :, columns:], values[row, :, columns:left])
        whole = max(0, left - columns - 4) // 32 * 32
        assert layer.packed[row] == min(whole, max(0, 110 - columns - 4) // 32 * 32)
    more = states(2, 83, seed=1)
    fed.more(layer, more, [1] * 83)
    again = layer.dequantize()
    assert again[0].shape[2] == left + 83
    assert torch.equal(again[0][:, :, -1], more[0][:, :, -1])
    visible = max(padding or [0])
    if left > visible:
        relative = (again[0][:, :, left:] - more[0]).norm() / more[0].norm()
        assert relative < 0.5


def test_cropping_everything_leaves_an_empty_layer_and_nothing_does_nothing(states, fed):
    layer = fed(states(1, 80))
    layer.crop(0)
    assert layer.seen == 80
    layer.crop(-200)
    assert layer.seen == 0 and layer.get_seq_length() == 0
    fed.more(layer, states(1, 80))
    assert_same_packed(layer, fed(states(1, 80)))
    PatternKVLayer(PatternKVConfig()).crop(-3)
    with pytest.raises(ValueError, match="`crop` takes a negative number.*got 5"):
        layer.crop(5)


def test_rolling_back_again_and_again_does_not_pile_up_patterns(states, fed):
    layer = fed(states(1, 68))
    for seed in range(5):
        fed.more(layer, states(1, 70, seed=seed), [1] * 70)
        layer.crop(-70)
    fed.more(layer, states(1, 70, seed=1), [1] * 70)
    assert layer.key_patterns == [1 + 8 + 2] and layer.key_states.bank.shape[2] <= 1 + 8 + 8


def test_with_a_past_to_record_a_window_back_is_exact(states, fed):
    keys, values = states(1, 68 + 32 * 4)
    layer = fed((keys[:, :, :68], values[:, :, :68]))
    layer.activate_past_recording()
    at = 68
    while at + 32 < keys.shape[2]:
        fed.more(layer, (keys[:, :, at : at + 32], values[:, :, at : at + 32]))
        read = layer.dequantize()[0]
        assert torch.equal(read[:, :, at : at + 32], keys[:, :, at : at + 32])
        layer.crop(-20)  # what was refused
        at += 12
        assert torch.equal(layer.dequantize()[0], read[:, :, :at])
    assert layer.packed[0] > 64 and layer.keys.shape[2] < 64 + 32


def test_a_past_that_is_never_cropped_stays_bounded(states, fed):
    keys, values = states(1, 400)
    layer = fed((keys[:, :, :68], values[:, :, :68]))
    layer.activate_past_recording()
    for at in range(68, 400):
        fed.more(layer, (keys[:, :, at : at + 1], values[:, :, at : at + 1]))
        assert layer.keys.shape[2] < 64


# --- lifetime ------------------------------------------------------------------------------------------------------


def test_reset_forgets_everything_and_the_next_prompt_mines_anew(states, fed):
    layer = fed(states(2, 100), None, [0, 10])
    layer.reset()
    assert layer.get_seq_length() == 0 and not layer.is_initialized
    assert layer.tensors() == {}
    fresh = states(1, 100, seed=4, heads=3)
    fed.more(layer, fresh, [70, *[1] * 30])
    assert_same_packed(layer, fed(fresh, [70, *[1] * 30]))


def test_reset_forgets_that_a_past_was_to_be_recorded(states, fed):
    layer = fed(states(1, 100))
    layer.activate_past_recording()
    layer.reset()
    fed.more(layer, states(1, 100))
    assert layer.packed == fed(states(1, 100)).packed == [96]


def test_every_tensor_is_moved_to_the_host_and_back(states, fed):
    layer = fed(states(1, 100))
    assert len(layer.tensors()) == 4 + 2 * 5
    layer.device = torch.device("meta")  # stands for an accelerator
    layer.prefetch()
    assert {str(tensor.device) for tensor in layer.tensors().values()} == {"meta"}
    before = fed(states(1, 100))
    read = before.dequantize()
    before.offload()
    assert {str(tensor.device) for tensor in before.tensors().values()} == {"cpu"}
    before.prefetch()
    assert all(torch.equal(a, b) for a, b in zip(before.dequantize(), read))
    empty = PatternKVLayer(PatternKVConfig())
    empty.offload()
    empty.prefetch()


def test_states_on_another_device_take_the_layer_with_them(states, fed):
    layer = fed(states(1, 100))
    fed.more(layer, tuple(side.to("meta") for side in states(1, 1)))
    assert {str(tensor.device) for tensor in layer.tensors().values()} == {"meta"}
    assert layer.device == torch.device("meta") and layer.seen == 101


def test_a_copy_goes_its_own_way_and_shares_the_options(states, fed):
    layer = fed(states(1, 100))
    layer.attention = object()
    read = layer.dequantize()
    twin = copy.deepcopy(layer)
    assert twin.config is layer.config and twin.attention is layer.attention
    assert twin.key_states.config is layer.config
    fed.more(twin, states(1, 60, seed=1), [1] * 60)
    assert all(torch.equal(a, b) for a, b in zip(layer.dequantize(), read))
    assert layer.seen == 100 and twin.seen == 160
    fed.more(layer, states(1, 60, seed=1), [1] * 60)
    assert all(torch.equal(a, b) for a, b in zip(layer.dequantize(), twin.dequantize()))


@pytest.mark.parametrize("operation", [None, "batch_repeat_interleave", "crop"])
def test_what_inference_mode_filled_is_used_outside_of_it(states, fed, operation):
    keys, values = states(2, 100)
    with torch.inference_mode():
        layer = fed((keys.clone(), values.clone()))
        if operation == "batch_repeat_interleave":
            layer.batch_repeat_interleave(1)
        if operation == "crop":
            layer.crop(-50)
    more = states(2, 70, seed=1)
    fed.more(layer, more, [1] * 70)
    assert torch.equal(layer.dequantize()[0][:, :, -1], more[0][:, :, -1])


@pytest.mark.parametrize("tokens", [30, 110])
def test_the_call_has_gradients_and_what_is_kept_has_none(states, tokens):
    keys, values = (side.requires_grad_() for side in states(1, tokens))
    layer = PatternKVLayer(PatternKVConfig(group_size=16, residual_length=32))
    returned = layer.update(keys, values)
    returned[0].sum().backward()
    assert keys.grad is not None
    assert not any(tensor.requires_grad for tensor in layer.tensors().values())
    copy.deepcopy(layer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bits", [2, 8])
def test_states_come_back_in_the_models_dtype(states, fed, dtype, bits):
    both = states(2, 100, dtype=dtype)
    layer = fed(both, [70, *[1] * 30], nbits=bits)
    read = layer.dequantize()
    assert {side.dtype for side in read} == {dtype}
    for found, expected in zip(read, both):
        assert (found - expected).double().norm() / expected.double().norm() < (0.3 if bits == 2 else 0.02)


def test_states_beyond_float16_are_kept(states, fed):
    keys, values = states(1, 100)
    keys = keys * 1e5
    layer = fed((keys, values), [70, *[1] * 30], nbits=8)
    assert layer.key_states.scale.dtype == torch.float32
    assert ((layer.dequantize()[0] - keys).norm() / keys.norm()) < 0.05


def test_keys_and_values_may_differ_in_their_channels(states, fed):
    keys, _ = states(1, 100, channels=48)
    _, values = states(1, 100, channels=24)
    layer = fed((keys, values), [70, *[1] * 30], nbits=8, group_size_value=8)
    assert layer.dequantize()[1].shape == values.shape
    assert ((layer.dequantize()[1] - values).norm() / values.norm()) < 0.02


def test_no_more_than_one_codebook_is_kept_where_patterns_are_off(states, fed):
    layer = fed(states(2, 100), num_patterns=0)
    assert layer.key_states.bank.shape[2] == 1 and layer.key_states.ids.untyped_storage().nbytes() == 1


# --- bad input -----------------------------------------------------------------------------------------------------


def test_states_of_another_batch_model_or_dtype_are_refused(states, fed):
    layer = fed(states(2, 40))
    with pytest.raises(ValueError, match="holds 2 rows and got 3: use `batch_repeat_interleave`"):
        fed.more(layer, states(3, 1))
    with pytest.raises(ValueError, match="key states of 2 heads of 32 channels and got 4 of 32: it belongs to"):
        fed.more(layer, states(2, 1, heads=4))
    with pytest.raises(ValueError, match="2 heads of 32 channels and got 2 of 64"):
        fed.more(layer, states(2, 1, channels=64))
    with pytest.raises(ValueError, match=r"in torch.float32 and got torch.float16: load the model with dtype"):
        fed.more(layer, states(2, 1, dtype=torch.float16))
    fed.more(layer, states(2, 1))


def test_a_group_that_does_not_divide_the_channels_is_refused(states, fed):
    with pytest.raises(ValueError, match="`group_size_value` is 16, which does not divide head_dim=24.*example 12"):
        fed(states(1, 40, channels=24))
    with pytest.raises(ValueError, match="`nbits_key`=2 does not fill whole bytes with head_dim=10"):
        fed(states(1, 40, channels=10))


def test_quantizing_a_window_does_not_depend_on_the_windows_beside_it(states):
    x = states(1, 64)[0]
    whole = quantize_groups(x, 2, group=16, axis=-2)
    half = quantize_groups(x[:, :, 32:], 2, group=16, axis=-2)
    assert torch.equal(whole.codes[:, :, 32:], half.codes) and torch.equal(whole.scale[:, :, 2:], half.scale)
