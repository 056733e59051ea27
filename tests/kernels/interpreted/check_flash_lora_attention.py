"""flash_lora_attention against attention in float64 over keys and values with the adapter's part written out."""

import itertools
import shutil
import sys
from typing import Any, NamedTuple

import pytest
import torch

from hf_ext.kernel_lookup import kernel_folder

KERNEL = "flash_lora_attention"


class Case(NamedTuple):
    """Sizes of a problem."""

    rows: int = 2
    kv_heads: int = 2
    groups: int = 3
    queries: int = 1
    tokens: int = 150
    head_dim: int = 64
    rank_k: int = 8  # 0: no adapter
    rank_v: int = 8
    rotary: int = -1  # -1: all channels; 0: cos and sin are None
    dtype: torch.dtype = torch.float32
    adapter: torch.dtype | None = None  # of u, b, cos and sin; None: as dtype


def problem(**sizes) -> dict[str, Any]:
    """Random arguments of flash_lora_attention, with an adapter's part as large as the base."""
    case = Case(**sizes)
    torch.manual_seed(sum(value for value in case if isinstance(value, int)))
    b, h, t, d = case.rows, case.kv_heads, case.tokens, case.head_dim
    low = case.adapter or case.dtype
    arguments = {
        "query": torch.randn(b, h * case.groups, case.queries, d).to(case.dtype),
        "key": torch.randn(b, h, t, d).to(case.dtype),
        "value": torch.randn(b, h, t, d).to(case.dtype),
    }
    for side, rank in (("k", case.rank_k), ("v", case.rank_v)):
        arguments[f"u_{side}"] = torch.randn(b, t, rank).to(low) if rank else None
        arguments[f"b_{side}"] = (torch.randn(h * d, rank) / max(rank, 1) ** 0.5).to(low) if rank else None
    rotary = d if case.rotary < 0 else case.rotary
    # Positions of each row start elsewhere, as those of left-padded rows do.
    position = torch.arange(t)[None, :, None] + 5 * torch.arange(b)[:, None, None]
    angle = position * 10000.0 ** -(torch.arange(0, rotary, 2) / max(rotary, 1))
    for name, function in (("cos", torch.cos), ("sin", torch.sin)):
        arguments[name] = function(torch.cat([angle, angle], -1)).to(low) if rotary else None
    return arguments | {"scale": d**-0.5, "lora_scale_k": 0.75, "lora_scale_v": 1.25}


def materialised(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, Hk, T, D] in float64, as a model with the adapter merged into it would have them."""
    full = []
    for side, base in (("k", "key"), ("v", "value")):
        u, second, x = arguments[f"u_{side}"], arguments[f"b_{side}"], arguments[base].double()
        if u is not None:
            rows, heads, tokens, channels = x.shape
            part = arguments[f"lora_scale_{side}"] * (u.double() @ second.double().T)
            part = part.view(rows, tokens, heads, channels).transpose(1, 2)
            if side == "k" and arguments["cos"] is not None:
                cos, sin = (arguments[name].double()[:, None] for name in ("cos", "sin"))
                turned, rest = part.split([cos.shape[-1], channels - cos.shape[-1]], -1)
                first, second = turned.chunk(2, -1)
                part = torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)
            x = x + part
        full.append(x)
    return full[0], full[1]


def oracle(arguments: dict[str, Any]) -> torch.Tensor:
    """A query at a time, in float64."""
    keys, values = materialised(arguments)
    query = arguments["query"].double()
    rows, heads, queries, _ = query.shape
    tokens = keys.shape[2]
    start, window = arguments.get("kv_start"), arguments.get("window")
    out = torch.zeros_like(query)
    for row, head, i in itertools.product(range(rows), range(heads), range(queries)):
        position = tokens - queries + i
        begin = 0 if start is None else int(start[row])
        if window is not None:
            begin = max(begin, position - window + 1)
        end = position + 1 if arguments.get("causal", True) else tokens
        if begin < end:
            kv = head // (heads // keys.shape[1])
            logits = keys[row, kv, begin:end] @ query[row, head, i] * arguments["scale"]
            out[row, head, i] = torch.softmax(logits, 0) @ values[row, kv, begin:end]
    return out


def assert_agrees(kernel, arguments, rtol=2e-6, atol=4e-6) -> torch.Tensor:
    out = kernel.flash_lora_attention(**arguments)
    assert out.dtype == arguments["query"].dtype
    torch.testing.assert_close(out.double(), oracle(arguments), rtol=rtol, atol=atol)
    return out


CASES = {
    "decode": {},
    "decode, rank 1": {"rank_k": 1, "rank_v": 1},
    "decode, rank 4": {"rank_k": 4, "rank_v": 4},
    "decode, rank 16": {"rank_k": 16, "rank_v": 16},
    "decode, rank 32": {"rank_k": 32, "rank_v": 32},
    "decode, rank 64": {"rank_k": 64, "rank_v": 64},
    "decode, rank 12": {"rank_k": 12, "rank_v": 12},
    "rank above D": {"head_dim": 16, "rank_k": 32, "rank_v": 32},
    "ranks differ": {"rank_k": 4, "rank_v": 32, "queries": 9},
    "keys alone": {"rank_v": 0, "queries": 9},
    "values alone": {"rank_k": 0, "queries": 9},
    "no adapter": {"rank_k": 0, "rank_v": 0, "queries": 9},
    "values alone, decode": {"rank_k": 0, "rank_v": 16},
    "one query head": {"groups": 1},
    "one query head of one KV head": {"groups": 1, "kv_heads": 1, "rows": 1},
    "seven query heads": {"groups": 7, "kv_heads": 1},
    "more query heads than a tile": {"groups": 19, "kv_heads": 1, "rows": 1},
    "prefill": {"queries": 150, "rows": 1},
    "prefill, rank 64": {"queries": 70, "tokens": 70, "rank_k": 64, "rank_v": 64, "rows": 1},
    "prefill behind a cache": {"queries": 37},
    "D 16": {"head_dim": 16},
    "D 80": {"head_dim": 80, "queries": 5},
    "D 96": {"head_dim": 96, "queries": 5},
    "D 128": {"head_dim": 128, "queries": 5},
    "D 72, half of it rotated": {"head_dim": 72, "rotary": 36, "queries": 5},
    "D 128, 96 rotated": {"head_dim": 128, "rotary": 96, "rows": 1},
    "D 80, 32 rotated": {"head_dim": 80, "rotary": 32, "queries": 5},
    "D 64, 2 rotated": {"rotary": 2},
    "nothing rotated": {"rotary": 0, "queries": 5},
    "one token": {"tokens": 1},
    "63 tokens": {"tokens": 63},
    "64 tokens": {"tokens": 64},
    "65 tokens": {"tokens": 65},
    "many tokens": {"tokens": 1000, "rows": 1, "kv_heads": 1},
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_attention_is_that_over_the_materialised_keys_and_values(kernel, sizes):
    assert_agrees(kernel, problem(**sizes))
