"""The mathematics: numpy in float64, plain peft and the transformers library are the oracles."""

import numpy as np
import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half

from hf_ext.cache_impls.lragent.functional import (
    attend,
    causal_mask,
    common_prefix,
    expand,
    rebuild_keys,
    rotate,
)
from hf_ext.cache_impls.lragent.reference import flash_lora_attention

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def angles(rows, tokens, width, seed=0, layout="half"):
    angle = random(rows, tokens, width // 2, seed=seed) * 3
    both = torch.cat([angle, angle], -1) if layout == "half" else angle.repeat_interleave(2, -1)
    return both.cos(), both.sin()


def case(rows=2, heads=8, kv_heads=2, queries=5, tokens=23, size=16, r_k=4, r_v=4, width=16):
    cos, sin = angles(rows, tokens, width)
    return {
        "query": random(rows, heads, queries, size, seed=1),
        "key": random(rows, kv_heads, tokens, size, seed=2),
        "value": random(rows, kv_heads, tokens, size, seed=3),
        "u_k": random(rows, tokens, r_k, seed=4) if r_k else None,
        "u_v": random(rows, tokens, r_v, seed=5) if r_v else None,
        "b_k": random(kv_heads * size, r_k, seed=6) if r_k else None,
        "b_v": random(kv_heads * size, r_v, seed=7) if r_v else None,
        "cos": cos,
        "sin": sin,
    }


def materialised(c, *, scale, s_k, s_v, mask):
    """Everything in full dimension, a head at a time, in numpy."""
    q, k, v, u_k, u_v, b_k, b_v, cos, sin = (None if x is None else x.numpy() for x in c.values())
    rows, heads, queries, size = q.shape
    kv_heads = k.shape[1]
    out = np.zeros_like(q)
    for row in range(rows):
        for head in range(heads):
            g = head // (heads // kv_heads)
            part = slice(g * size, (g + 1) * size)
            keys, values = k[row, g], v[row, g]
            if u_k is not None:
                delta = s_k * u_k[row] @ b_k[part].T
                width = cos.shape[-1]
                turned = delta[:, :width]
                partner = np.concatenate([-turned[:, width // 2 :], turned[:, : width // 2]], 1)
                turn = min(row, cos.shape[0] - 1)
                delta = np.concatenate([turned * cos[turn] + partner * sin[turn], delta[:, width:]], 1)
                keys = keys + delta
            if u_v is not None:
                values = values + s_v * u_v[row] @ b_v[part].T
            logits = np.where(mask[min(row, len(mask) - 1), 0], q[row, head] @ keys.T * scale, -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            out[row, head] = weights / weights.sum(-1, keepdims=True) @ values
    return torch.from_numpy(out)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("width", [16, 8])
def test_rotation_is_that_of_the_library(layout, width):
    x = random(2, 3, 7, 16)
    cos, sin = angles(2, 7, width, layout=layout)
    library = half if layout == "half" else interleaved
    expected, _ = library(x[..., :width].float(), x[..., :width].float(), cos.float(), sin.float())
    found = rotate(x, cos, sin, layout)
    torch.testing.assert_close(found[..., :width].float(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[..., width:], x[..., width:])


@pytest.mark.parametrize("rank", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("tile", [5, 1024])
def test_the_two_accumulators_equal_attention_to_full_keys_and_values(rank, tile):
    c = case(r_k=rank, r_v=rank)
    mask = causal_mask(5, 23, torch.tensor([0, 6]), device="cpu")
    found = attend(*c.values(), scale=0.3, lora_scale_k=0.7, lora_scale_v=1.9, mask=mask, tile=tile)
    torch.testing.assert_close(found, materialised(c, scale=0.3, s_k=0.7, s_v=1.9, mask=mask.numpy()), **EXACT)


@pytest.mark.parametrize(("r_k", "r_v"), [(0, 3), (3, 0), (2, 5), (0, 0)])
def test_sides_without_an_adapter_and_of_other_ranks(r_k, r_v):
    c = case(r_k=r_k, r_v=r_v, queries=1, heads=6, kv_heads=3)
    mask = np.ones((1, 1, 1, 23), bool)
    found = attend(*c.values(), scale=0.3, lora_scale_k=0.7, lora_scale_v=1.9)
    torch.testing.assert_close(found, materialised(c, scale=0.3, s_k=0.7, s_v=1.9, mask=mask), **EXACT)


@pytest.mark.parametrize("padding", [None, [0, 6]])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("width", [16, 8])
def test_the_reference_of_the_kernel_is_attention_to_full_keys_and_values(padding, causal, window, width):
    c = case(width=width)
    column, position = np.arange(23), np.arange(18, 23)[:, None]
    mask = np.ones((2, 1, 5, 23), bool)
    mask &= (column <= position) if causal else True
    mask &= True if window is None else column > position - window
    if padding:
        mask &= column >= np.array(padding)[:, None, None, None]
    start = torch.tensor(padding) if padding else None
    options = {"scale": 0.3, "lora_scale_k": 0.7, "lora_scale_v": 1.9}
    found = flash_lora_attention(*c.values(), **options, causal=causal, kv_start=start, window=window)
    torch.testing.assert_close(found, materialised(c, scale=0.3, s_k=0.7, s_v=1.9, mask=mask), **EXACT)


def test_a_query_that_sees_nothing_gives_zeros():
    c = case()
    options = {"scale": 0.3, "lora_scale_k": 0.7, "lora_scale_v": 1.9}
    found = flash_lora_attention(*c.values(), **options, kv_start=torch.tensor([0, 20]))
    assert not found[1, :, :2].any() and found[1, :, 2:].all() and found.isfinite().all()


def test_the_worked_example():
    # P = (1/4, 3/4), V0 = I, U = (4, 8), B = (1, -1), s = 1/2: P V0 = (.25, .75), P U = 7
    query = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[0.0, 0.0], [np.log(3), 0.0]]]], dtype=torch.float64)
    u = torch.tensor([[[4.0], [8.0]]], dtype=torch.float64)
    b = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    value = torch.eye(2, dtype=torch.float64)[None, None]
    found = attend(query, key, value, None, u, None, b, None, None, scale=1.0, lora_scale_v=0.5)
    torch.testing.assert_close(found[0, 0, 0], torch.tensor([3.75, -2.75], dtype=torch.float64), **EXACT)


def test_shifting_all_positions_leaves_scores_as_they_are():
    angle = torch.arange(9, dtype=torch.float64)[None, :, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    scores = []
    for shift in (0, 100):
        turned = (angle + shift * torch.tensor([1.0, 0.3, 0.1, 0.01])).repeat(1, 1, 2)
        cos, sin = turned.cos(), turned.sin()
        base = rotate(random(1, 2, 9, 8), cos, sin)
        keys = rebuild_keys(base, random(1, 9, 3, seed=1), random(16, 3, seed=2), 0.5, cos, sin)
        scores.append(rotate(random(1, 2, 9, 8, seed=3), cos, sin) @ keys.transpose(-1, -2))
    torch.testing.assert_close(*scores, rtol=1e-9, atol=1e-9)


def test_base_and_part_are_the_projection_of_plain_peft(tiny):
    model = tiny(enable=False).double()
    attention = model.get_base_model().model.layers[0].self_attn
    x = random(2, 7, 64)
    cos, sin = angles(2, 7, 16)
    for name, rotated in (("k_proj", True), ("v_proj", False)):
        module = getattr(attention, name)
        whole = module(x).unflatten(-1, (2, 16)).transpose(1, 2)
        base = module.base_layer(x).unflatten(-1, (2, 16)).transpose(1, 2)
        u, b, scale = module.lora_A["plan"](x), module.lora_B["plan"].weight, module.scaling["plan"]
        if rotated:
            found, whole = rebuild_keys(rotate(base, cos, sin), u, b, scale, cos, sin), rotate(whole, cos, sin)
        else:
            found = base + expand(u, b, scale, 2)
        torch.testing.assert_close(found, whole, **EXACT)


def test_prefixes_end_where_any_row_differs():
    one = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    for other, length in (
        (one, 4),
        (one[:, :3], 3),
        (torch.tensor([[1, 2, 3, 4, 9], [5, 6, 0, 8, 9]]), 2),
        (torch.tensor([[0, 2], [5, 6]]), 0),
        (one[:, :0], 0),
    ):
        assert common_prefix(one, other) == length
