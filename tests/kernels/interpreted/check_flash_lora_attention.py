"""flash_lora_attention against attention in float64 over keys and values with the adapter's part written out."""

import importlib.util
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


@pytest.mark.parametrize("sizes", [{}, {"queries": 40, "head_dim": 80, "rotary": 32}], ids=["decode", "prefill"])
def test_float16_rounds_keys_and_weights_to_float16(kernel, sizes):
    assert_agrees(kernel, problem(**sizes, dtype=torch.float16, rows=1), rtol=4e-3, atol=4e-3)


def test_an_adapter_in_float32_over_a_float16_base(kernel):
    assert_agrees(kernel, problem(dtype=torch.float16, adapter=torch.float32, rows=1), rtol=4e-3, atol=4e-3)


def test_worked_numbers(kernel):
    """P = (1/4, 3/4): P V = (.25, .75), P U = 7, and 7 s B = (3.5, -3.5)."""
    pad = torch.nn.functional.pad
    rows = torch.eye(2)
    out = kernel.flash_lora_attention(
        pad(torch.tensor([[[[1.0]]]]), (0, 7)),
        pad(torch.tensor([[[[0.0], [3.0]]]]).log().clamp(min=0), (0, 7)),
        pad(rows[None, None], (0, 6)),
        None,
        torch.tensor([[[4.0], [8.0]]]),
        None,
        pad(torch.tensor([[1.0], [-1.0]]), (0, 0, 0, 6)),
        None,
        None,
        scale=1.0,
        lora_scale_k=1.0,
        lora_scale_v=0.5,
    )
    torch.testing.assert_close(out[0, 0, 0], torch.tensor([3.75, -2.75, 0, 0, 0, 0, 0, 0]), rtol=1e-6, atol=1e-6)


def test_shifting_all_positions_leaves_the_result(kernel):
    """Query and base are rotated by the test, the adapter's part by the kernel: only together are scores relative."""

    def rotate(x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    arguments = problem(rows=1, queries=6, tokens=40)
    frequency = 100.0 ** -(torch.arange(0, 64, 2) / 64)
    results = []
    for shift in (0, 17):
        angle = (torch.arange(40) + shift)[None, :, None] * frequency
        cos, sin = (f(torch.cat([angle, angle], -1)) for f in (torch.cos, torch.sin))
        shifted = {"query": rotate(arguments["query"], cos[:, -6:], sin[:, -6:]), "cos": cos, "sin": sin}
        shifted["key"] = rotate(arguments["key"], cos, sin)
        results.append(kernel.flash_lora_attention(**arguments | shifted))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# --- what is visible -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("queries", [1, 20])
def test_left_padding_of_rows(kernel, queries, kind):
    arguments = problem(rows=4, kv_heads=1, groups=2, tokens=140, queries=queries)
    arguments["kv_start"] = torch.tensor([0, 65, 130, 140], dtype=kind)
    out = assert_agrees(kernel, arguments)
    assert not out[3].any() and not out.isnan().any()
    if queries > 1:  # those that stand in the padding themselves
        assert not out[2, :, :10].any() and out[2, :, 10:].any()


def test_what_is_padding_or_behind_the_tokens_is_never_read(kernel):
    """Buffers hold anything in the padding and in the room for tokens to come."""
    arguments = problem(rows=2, kv_heads=1, groups=2, tokens=100)
    arguments["kv_start"] = torch.tensor([30, 70])
    want = kernel.flash_lora_attention(**arguments)
    for name in ("key", "value", "u_k", "u_v", "cos", "sin"):
        tensor = arguments[name]
        axis = tensor.ndim - 2
        buffer = torch.full((*tensor.shape[:axis], 164, tensor.shape[-1]), torch.nan)
        for row, start in enumerate((30, 70)):
            buffer[row].narrow(axis - 1, start, 100 - start).copy_(tensor[row].narrow(axis - 1, start, 100 - start))
        arguments[name] = buffer.narrow(axis, 0, 100)
        assert not arguments[name].is_contiguous()
    assert torch.equal(kernel.flash_lora_attention(**arguments), want)


@pytest.mark.parametrize("window", [1, 20, 64, 500])
@pytest.mark.parametrize("queries", [1, 50])
def test_windows(kernel, queries, window):
    arguments = problem(rows=2, kv_heads=1, groups=2, queries=queries) | {"window": window}
    arguments["kv_start"] = torch.tensor([0, 90])
    assert_agrees(kernel, arguments)


@pytest.mark.parametrize(
    "extra", [{}, {"kv_start": torch.tensor([3, 149])}, {"window": 30}], ids=["all", "pad", "win"]
)
def test_attention_that_is_not_causal(kernel, extra):
    assert_agrees(kernel, problem(queries=40, groups=2) | {"causal": False} | extra)


@pytest.mark.parametrize("queries", [1, 5])
def test_the_number_of_parts_does_not_change_the_result(kernel, configs, monkeypatch, queries):
    arguments = problem(rows=2, kv_heads=1, groups=2, tokens=448, queries=queries, rank_k=4, rank_v=20)
    arguments["kv_start"] = torch.tensor([0, 200])  # more than a whole part of seven
    results = []
    for plan in ((1, 448), (2, 256), (7, 64), (21, 64)):  # the last: more than a block of the merge, some empty
        monkeypatch.setattr(configs, "split_count", lambda *_, plan=plan: plan)
        results.append(assert_agrees(kernel, arguments))
    for out in results[1:]:
        torch.testing.assert_close(out, results[0], rtol=1e-6, atol=1e-6)


def test_a_row_that_sees_nothing_in_any_part_is_zero(kernel, configs, monkeypatch):
    monkeypatch.setattr(configs, "split_count", lambda *_: (3, 64))
    arguments = problem(rows=2, tokens=150) | {"kv_start": torch.tensor([150, 149])}
    assert not assert_agrees(kernel, arguments)[0].any()


def test_large_logits_do_not_overflow(kernel):
    arguments = problem(rows=1, queries=5) | {"scale": 100.0}
    out = kernel.flash_lora_attention(**arguments)
    assert out.isfinite().all() and (out - oracle(arguments)).abs().max() < 0.05


# --- layouts ---------------------------------------------------------------------------------------------------------


def test_heads_and_tokens_in_any_order(kernel):
    """Queries as a projection leaves them, keys with the heads of a token side by side."""
    arguments = problem(queries=7)
    want = kernel.flash_lora_attention(**arguments)
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
    for name in ("u_k", "u_v", "cos", "sin"):
        arguments[name] = arguments[name].transpose(0, 1).contiguous().transpose(0, 1)
    for name in ("b_k", "b_v"):
        arguments[name] = torch.cat([arguments[name], arguments[name]], 1)[:, : arguments[name].shape[1]]
    assert torch.equal(kernel.flash_lora_attention(**arguments), want)


def test_rows_that_share_a_cache_and_positions(kernel):
    """Batch stride 0, as `expand` makes it, and one row of cosines for all."""
    arguments = problem(rows=1, groups=2)
    shared = {
        name: x.expand(3, *x.shape[1:]) for name, x in arguments.items() if name in ("key", "value", "u_k", "u_v")
    }
    assert_agrees(kernel, arguments | shared | {"query": torch.randn(3, 4, 1, 64)})


def test_the_result_lies_as_the_next_layer_reads_it(kernel):
    out = kernel.flash_lora_attention(**problem(queries=7))
    assert out.shape == (2, 6, 7, 64) and out.transpose(1, 2).is_contiguous()


def test_no_rows_and_no_queries(kernel):
    arguments = problem(rows=2, queries=3)
    for name, sizes in (("rows", (0, 6, 3, 64)), ("queries", (2, 6, 0, 64))):
        empty = {**arguments, "query": arguments["query"][:0] if name == "rows" else arguments["query"][:, :, :0]}
        if name == "rows":
            empty |= {x: arguments[x][:0] for x in ("key", "value", "u_k", "u_v", "cos", "sin")}
        assert kernel.flash_lora_attention(**empty).shape == sizes


@pytest.mark.parametrize(
    "extra",
    [{}, {"causal": False}, {"window": 20}, {"kv_start": torch.tensor([10, 150])}],
    ids=["plain", "full", "window", "padding"],
)
@pytest.mark.parametrize("sizes", [{}, {"queries": 33, "rotary": 32}, {"rank_k": 0, "queries": 5}, {"rank_v": 0}])
def test_kernel_and_reference_agree(kernel, reference, sizes, extra):
    arguments = problem(**sizes) | extra
    ours, theirs = kernel.flash_lora_attention(**arguments), reference.flash_lora_attention(**arguments)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("rotary", [0, 24, 32])
def test_every_launch_configuration_gives_the_result(kernel, configs, monkeypatch, rotary):
    for entry in configs.ATTEND:
        sizes = {key: value for key, value in entry.items() if key in ("HALVES", "BLOCK_M", "BLOCK_N")}
        launch = {"dtypes": ("fp32",), "num_warps": 4, "num_stages": 1}
        monkeypatch.setattr(configs, "ATTEND", [{**sizes, **launch}])
        assert_agrees(kernel, problem(rows=1, queries=30, tokens=80, head_dim=32, rotary=rotary))


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.fixture
def costs(kernel, monkeypatch):
    path = kernel_folder(KERNEL) / "benchmarks" / "costs.py"
    spec = importlib.util.spec_from_file_location("flash_lora_costs", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def sizes_of(case: Case) -> dict[str, int]:
    """A case in the terms of costs.Problem."""
    return {
        "rows": case.rows,
        "heads": case.kv_heads * case.groups,
        "kv_heads": case.kv_heads,
        "queries": case.queries,
        "tokens": case.tokens,
        "head_dim": case.head_dim,
        "rank_k": case.rank_k,
        "rank_v": case.rank_v,
        "rotary": case.head_dim if case.rotary < 0 else case.rotary,
        "element": 4,
    }


@pytest.mark.parametrize("sizes", [{}, {"rotary": 16}, {"rank_k": 0}, {"rank_v": 0}], ids=["all", "part", "v", "k"])
def test_the_bytes_that_are_counted_are_those_that_are_read_and_written(kernel, costs, bytes_read, sizes):
    arguments = problem(rows=1, queries=1, tokens=70, **sizes)
    out = kernel.flash_lora_attention(**arguments)
    used = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    if arguments["u_k"] is None:
        used = {name: x for name, x in used.items() if name not in ("cos", "sin")}
    p = costs.Problem(**sizes_of(Case(rows=1, queries=1, tokens=70, **sizes)))
    read = sum(bytes_read(x) for x in used.values())
    assert read + out.numel() * 4 == costs.plain(p)[1] + costs.low_rank(p)[1]


def test_flops_are_those_of_the_products_one_by_one(costs):
    case = {"rows": 2, "heads": 6, "kv_heads": 2, "queries": 5, "tokens": 9, "head_dim": 8, "rotary": 4}
    p = costs.Problem(**case, rank_k=3, rank_v=2, block_m=4)
    # Query i sees 5 + i tokens; blocks of 4 rows hold queries (0, 1), (1, 2), (2, 3), (4): the last sees most.
    pairs = 2 * 6 * (5 + 6 + 7 + 8 + 9)
    rebuilt = 2 * 2 * (6 + 7 + 8 + 9)
    assert (p.pairs, p.rebuilt) == (pairs, rebuilt)
    assert costs.plain(p)[0] == pairs * (2 * 8 + 2 * 8)
    values = pairs * 2 * 2 + 2 * 6 * 5 * (2 * 2 * 8)
    assert costs.low_rank(p)[0] == values + rebuilt * (2 * 3 * 8 + 4 * 4 + 4)
    whole = costs.Problem(**case, rank_k=3, rank_v=2, block_m=4, halves=False)
    assert costs.low_rank(whole)[0] - costs.low_rank(p)[0] == rebuilt * 2 * 3 * 4


def test_a_decode_step_adds_a_fraction_of_what_writing_out_adds(costs):
    for name, sizes in costs.CASES.items():
        p = costs.Problem(**{**costs.LLAMA, **sizes})
        (flops, low_bytes), (full_flops, full_bytes) = costs.low_rank(p), costs.materialised(p)
        assert low_bytes < full_bytes / 20
        assert (flops < full_flops) == (p.queries == 1), name  # a prefill rebuilds a key for every block of rows


# --- how work is cut -------------------------------------------------------------------------------------------------


def test_parts_cover_the_tokens_and_fill_the_device(configs):
    for programs, tokens in itertools.product((1, 8, 64, 1000), (1, 64, 100, 4096, 131072)):
        for processors in (4, 132):
            parts, chunk = configs.split_count(programs, tokens, processors)
            assert chunk % 64 == 0 and (parts - 1) * chunk < tokens <= parts * chunk
            assert programs * parts >= 2 * processors or chunk == configs.MIN_CHUNK or tokens <= configs.MIN_CHUNK


def test_every_problem_has_a_configuration(configs):
    for target, dtype, rows in itertools.product(configs.ALL, ("bf16", "fp16", "fp32"), (1, 16, 17, 10**6)):
        for head_dim, rank in itertools.product((8, 64, 80, 96, 128), (0, 1, 16, 64)):
            for rotary in {0, rank and head_dim, rank and head_dim // 4}:
                assert configs.attend_entry(target, dtype, rows, head_dim, rank, rank, rotary)


# --- PyTorch ---------------------------------------------------------------------------------------------------------


def test_it_compiles_without_a_graph_break(kernel):
    arguments = problem(rows=1, tokens=70)
    query = arguments.pop("query")
    compiled = torch.compile(
        lambda query: 2 * kernel.flash_lora_attention(query, **arguments),
        fullgraph=True,
        backend="aot_eager",
        dynamic=False,
    )
    assert torch.equal(compiled(query), 2 * kernel.flash_lora_attention(query, **arguments))


@pytest.mark.parametrize("extra", [False, True])
def test_the_operator_passes_pytorchs_own_checks(kernel, extra):
    arguments = problem(rows=2, tokens=70, queries=3, rank_v=0 if extra else 8) | {"causal": True}
    arguments |= {"kv_start": torch.tensor([0, 5]), "window": 20} if extra else {"kv_start": None, "window": None}
    operator = sys.modules[f"{kernel.__name__}.ops"].flash_lora_attention
    torch.library.opcheck(operator, tuple(arguments[argument.name] for argument in operator._schema.arguments))


def test_a_second_copy_of_the_kernel_loads_beside_the_first(kernel, tmp_path):
    from kernels import get_local_kernel

    shutil.copytree(kernel_folder(KERNEL), tmp_path / "copy")
    copy = get_local_kernel(tmp_path / "copy")
    assert copy is not kernel
    arguments = problem(rows=1, tokens=70)
    assert torch.equal(copy.flash_lora_attention(**arguments), kernel.flash_lora_attention(**arguments))


def test_adapters_that_are_trained_elsewhere_may_be_used_without_gradients(kernel):
    arguments = problem(rows=1, tokens=70)
    arguments["b_v"].requires_grad_()
    with torch.no_grad():
        assert not kernel.flash_lora_attention(**arguments).requires_grad


CHANGES = [
    (lambda a: a.update(query=a["query"].double()), TypeError, "query has dtype torch.float64: expected torch.bfloat"),
    (lambda a: a.update(query=a["query"][0]), ValueError, r"query has shape .* expected \[B, Hq, S, D\]"),
    (lambda a: a.update(query=a["query"][:, :5]), ValueError, "query has 5 heads: expected a multiple of the 2 KV"),
    (lambda a: a.update(query=torch.randn(2, 6, 1, 256)), ValueError, "query has D=256: .* multiples of 8 up to 128"),
    (lambda a: a.update(query=torch.randn(2, 6, 1, 60)), ValueError, "query has D=60: .* use source='reference'"),
    (lambda a: a.update(query=torch.randn(2, 6, 151, 64)), ValueError, "query has S=151 tokens and key T=150"),
    (lambda a: a.update(query=a["query"].to("meta")), ValueError, "key is on cpu: expected meta, where query is"),
    (lambda a: a.update(key=a["key"][0]), ValueError, r"key has shape .* expected \[B, Hk, T, D\]"),
    (lambda a: a.update(key=a["key"].half()), TypeError, "key has dtype torch.float16: expected torch.float32"),
    (lambda a: a.update(value=a["value"][:, :, 1:]), ValueError, r"value has shape .* expected \(2, 2, 150, 64\)"),
    (
        lambda a: a.update(value=a["value"].transpose(2, 3).contiguous().transpose(2, 3)),
        ValueError,
        "value has strides .*: its last dimension must be contiguous; the others are free",
    ),
    (lambda a: a.update(u_k=None), ValueError, "b_k is given and u_k is None: give both, or neither where there is"),
    (lambda a: a.update(b_v=None), ValueError, "u_v is given and b_v is None"),
    (lambda a: a.update(u_k=a["u_k"][0]), ValueError, r"u_k has shape .* expected \[B, T, r\]"),
    (lambda a: a.update(u_k=torch.randn(2, 150, 65)), ValueError, "u_k has rank r=65: .* takes 1 to 64"),
    (lambda a: a.update(u_v=torch.randn(2, 150, 0)), ValueError, "u_v has rank r=0"),
    (lambda a: a.update(u_v=a["u_v"][:, 1:]), ValueError, r"u_v has shape .* expected \(2, 150, 8\)"),
    (lambda a: a.update(u_v=a["u_v"].double()), TypeError, "u_v has dtype torch.float64"),
    (lambda a: a.update(b_k=a["b_k"][:, :4]), ValueError, r"b_k has shape \(128, 4\): expected \(128, 8\)"),
    (lambda a: a.update(b_v=a["b_v"][:64]), ValueError, r"b_v has shape \(64, 8\): expected \(128, 8\)"),
    (lambda a: a.update(b_v=a["b_v"].T.contiguous().T), ValueError, "b_v has strides"),
    (lambda a: a.update(sin=None), ValueError, "cos is given and sin is None: give both, or neither where nothing is"),
    (lambda a: a.update(cos=a["cos"][..., :63]), ValueError, r"cos has shape .* \(2 or 1, 150, R\) with R even"),
    (lambda a: a.update(cos=a["cos"][:, :, None]), ValueError, "cos has shape"),
    (lambda a: a.update(cos=a["cos"][:, 1:]), ValueError, r"cos has shape .* expected \(2, 150, 64\)"),
    (lambda a: a.update(sin=a["sin"][..., :32]), ValueError, r"sin has shape .* expected \(2, 150, 64\)"),
    (lambda a: a.update(scale=0.0), ValueError, "scale=0.0: expected a positive number"),
    (lambda a: a.update(window=0), ValueError, "window=0: expected a positive number of tokens, or None"),
    (lambda a: a.update(kv_start=torch.tensor([1.0, 2.0])), TypeError, "kv_start has dtype torch.float32"),
    (lambda a: a.update(kv_start=torch.tensor([1])), ValueError, r"kv_start has shape \(1,\): expected \(2,\)"),
    (lambda a: a["b_k"].requires_grad_(), ValueError, "b_k requires a gradient: the kernel is for inference only"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), CHANGES)
def test_wrong_arguments_are_named(kernel, change, error, words):
    arguments = problem()
    change(arguments)
    with pytest.raises(error, match=words):
        kernel.flash_lora_attention(**arguments)
