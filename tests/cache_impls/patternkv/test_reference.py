"""The PyTorch attention over packed states, where rows differ and where there is nothing to see."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ext import PatternKVCache
from hf_ext.cache_impls.patternkv.reference import decode_attention


def test_nothing_to_attend_to_gives_zeros_and_minus_infinity():
    bytes_ = torch.zeros(2, 1, 0, 8, dtype=torch.uint8)
    scales, ids, bank = torch.zeros(2, 1, 0, 32), torch.zeros(2, 1, 0, dtype=torch.uint8), torch.zeros(2, 1, 1, 32)
    side = (bytes_, scales, scales, ids, bank)
    output, lse = decode_attention(
        torch.randn(2, 3, 32),
        *side,
        *side[:1],
        torch.zeros(2, 1, 0, 1),
        torch.zeros(2, 1, 0, 1),
        *side[3:],
        torch.zeros(2, 1, 0, 32),
        torch.zeros(2, 1, 0, 32),
        key_bits=2,
        value_bits=2,
        group_size=32,
        value_group_size=32,
        scaling=1.0,
    )
    assert torch.equal(output, torch.zeros(2, 3, 32)) and torch.equal(lse, torch.full((2, 3), -torch.inf))


@pytest.mark.parametrize("steps", [70])
def test_rows_that_fill_their_windows_at_different_steps_attend_to_their_own_patterns(steps):
    # A window that one row packs brings a pattern, while a step that saw the bank before is still to attend.
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=32
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 64, (3, 100))
    mask = torch.ones_like(ids)
    mask[1, :9], mask[2, :41] = 0, 0
    logits = {}
    for attention in ("sdpa", "patternkv"):
        model.set_attn_implementation(attention)
        cache = PatternKVCache(model.config, group_size=32, residual_length=32, num_patterns=8)
        out = model.generate(
            ids,
            attention_mask=mask,
            cache=cache,
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits[attention] = torch.stack(out.logits)
    assert len(set(cache.layers[0].packed)) > 1
    torch.testing.assert_close(logits["patternkv"], logits["sdpa"], rtol=0, atol=1e-4)
