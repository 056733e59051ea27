"""decode_attention against attention in float64 over keys and values that are put together by plain indexing."""

import itertools
import shutil
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hf_ext.kernel_lookup import kernel_folder

KERNEL = "patternkv_attention"
LAYOUT = ("key_bits", "value_bits", "group_size", "value_group_size")


class Case(NamedTuple):
    """Sizes of a problem."""

    rows: int = 2
    kv_heads: int = 2
    groups: int = 3
    head_dim: int = 64
    key_bits: int = 2
    value_bits: int = 2
    packed: int = 256
    dense: int = 5
    group_size: int = 128
    value_group_size: int = 64
    patterns: int = 6
    bank_rows: int = 0  # 0: as many as rows
    ids: torch.dtype = torch.uint8
    scales: torch.dtype = torch.float16
    dtype: torch.dtype = torch.float32


def problem(**sizes) -> dict[str, Any]:
    """Arguments of decode_attention, random and of the size that a cache would hold."""
    case = Case(**sizes)
    torch.manual_seed(sum(value for value in case if isinstance(value, int)))
    b, h, d, p = case.rows, case.kv_heads, case.head_dim, case.packed

    def side(bits: int, scale_shape: tuple) -> tuple:
        bank = torch.randn(case.bank_rows or b, h, case.patterns, d)
        bank[:, :, 0] = 0
        return (
            torch.randint(0, 256, (b, h, p, d * bits // 8), dtype=torch.uint8),
            ((0.5 + torch.rand(scale_shape)) * 2 / 2**bits).to(case.scales),
            (torch.randn(scale_shape) - 1).to(case.scales),
            torch.randint(0, case.patterns, (b, h, p)).to(case.ids),
            bank.to(case.dtype),
        )

    keys = side(case.key_bits, (b, h, p // case.group_size, d))
    values = side(case.value_bits, (b, h, p, d // case.value_group_size))
    names = ("codes", "scale", "zero", "ids", "bank")
    return {
        "query": torch.randn(b, h * case.groups, d).to(case.dtype),
        **{f"key_{name}": tensor for name, tensor in zip(names, keys)},
        **{f"value_{name}": tensor for name, tensor in zip(names, values)},
        "dense_key": torch.randn(b, h, case.dense, d).to(case.dtype),
        "dense_value": torch.randn(b, h, case.dense, d).to(case.dtype),
        **{name: getattr(case, name) for name in LAYOUT},
        "scaling": d**-0.5,
    }


def dequantized(arguments: dict[str, Any], side: str) -> torch.Tensor:
    """scale * code + zero + pattern, channel by channel: float64 [B, Hk, P, D]."""
    codes, bits = arguments[f"{side}_codes"].numpy(), arguments[f"{side}_bits"]
    scale, zero = (arguments[f"{side}_{name}"].double().numpy() for name in ("scale", "zero"))
    ids, bank = arguments[f"{side}_ids"].long().numpy(), arguments[f"{side}_bank"].double().numpy()
    b, h, p, _ = codes.shape
    d = bank.shape[-1]
    bytes_a_plane = d * bits // 8
    out = np.zeros((b, h, p, d))
    for row, head, token, channel in itertools.product(range(b), range(h), range(p), range(d)):
        byte = int(codes[row, head, token, channel % bytes_a_plane])
        code = byte >> (bits * (channel // bytes_a_plane)) & (2**bits - 1)
        if side == "key":
            at = (row, head, token // arguments["group_size"], channel)
        else:
            at = (row, head, token, channel // arguments["value_group_size"])
        pattern = bank[row % bank.shape[0], head, ids[row, head, token], channel]
        out[row, head, token, channel] = scale[at] * code + zero[at] + pattern
    return torch.from_numpy(out)


def oracle(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse in float64, a query head at a time."""
    keys = torch.cat([dequantized(arguments, "key"), arguments["dense_key"].double()], 2)
    values = torch.cat([dequantized(arguments, "value"), arguments["dense_value"].double()], 2)
    query, packed = arguments["query"].double(), arguments["key_codes"].shape[2]
    lengths, mask, cap = (arguments.get(name) for name in ("lengths", "mask", "softcap"))
    out = torch.zeros_like(query)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64)
    for row, head in itertools.product(range(query.shape[0]), range(query.shape[1])):
        kv = head // (query.shape[1] // keys.shape[1])
        seen = torch.ones(keys.shape[2], dtype=torch.bool) if mask is None else mask[row].clone()
        if lengths is not None:
            seen[int(lengths[row]) : packed] = False
        if not seen.any():
            continue
        logits = keys[row, kv][seen] @ query[row, head] * arguments["scaling"]
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        lse[row, head] = torch.logsumexp(logits, 0)
        out[row, head] = torch.softmax(logits, 0) @ values[row, kv][seen]
    return out, lse


def assert_agrees(kernel, arguments, rtol=2e-6, atol=2e-6) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = kernel.decode_attention(**arguments)
    want, want_lse = oracle(arguments)
    assert out.dtype == arguments["query"].dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=atol)
    torch.testing.assert_close(lse.double(), want_lse, rtol=rtol, atol=atol)
    return out, lse


CASES = {
    "one query head": {"groups": 1},
    "seven query heads": {"groups": 7, "kv_heads": 1},
    "eight query heads, 4 bits": {"groups": 8, "kv_heads": 1, "key_bits": 4, "value_bits": 4},
    "more query heads than a tile": {"groups": 19, "kv_heads": 1, "rows": 1, "packed": 128},
    "D 32": {"head_dim": 32, "value_group_size": 32},
    "D 80": {"head_dim": 80, "value_group_size": 80, "rows": 1},
    "D 96, 4 bits": {"head_dim": 96, "value_group_size": 96, "key_bits": 4, "value_bits": 4, "rows": 1},
    "D 128": {"head_dim": 128, "value_group_size": 128, "rows": 1},
    "D 128, 8 bits": {"head_dim": 128, "value_group_size": 128, "key_bits": 8, "value_bits": 8, "rows": 1},
    "D 256": {"head_dim": 256, "value_group_size": 128, "rows": 1, "kv_heads": 1, "packed": 128},
    "D 40, 8 bits": {"head_dim": 40, "value_group_size": 40, "key_bits": 8, "value_bits": 8, "rows": 1},
    "8 bits": {"key_bits": 8, "value_bits": 8},
    "keys 4, values 2": {"key_bits": 4, "value_bits": 2},
    "keys 2, values 8": {"key_bits": 2, "value_bits": 8, "rows": 1},
    "value groups of a plane": {"value_group_size": 16, "rows": 1},
    "value groups within a plane": {"value_group_size": 8, "value_bits": 4, "rows": 1},
    "value groups across planes": {"head_dim": 96, "value_group_size": 32, "rows": 1},
    "groups of 32": {"group_size": 32, "packed": 160},
    "groups of 64": {"group_size": 64, "packed": 192},
    "groups of 96": {"group_size": 96, "packed": 192, "rows": 1},
    "one tile": {"group_size": 32, "packed": 32},
    "many groups": {"group_size": 64, "packed": 640, "rows": 1, "kv_heads": 1},
    "nothing packed": {"packed": 0},
    "nothing dense": {"dense": 0},
    "nothing at all": {"packed": 0, "dense": 0},
    "one dense token": {"dense": 1, "packed": 128},
    "130 dense tokens": {"dense": 130, "packed": 128},
    "only 130 dense tokens": {"dense": 130, "packed": 0},
    "int16 ids": {"ids": torch.int16, "patterns": 300, "rows": 1},
    "one bank for all rows": {"bank_rows": 1},
    "one pattern, the zero one": {"patterns": 1, "rows": 1},
    "float32 scales": {"scales": torch.float32, "rows": 1},
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_attention_is_that_of_float64(kernel, sizes):
    assert_agrees(kernel, problem(**sizes))


@pytest.mark.parametrize("sizes", [{}, {"head_dim": 80, "value_group_size": 80, "key_bits": 4}], ids=["D 64", "D 80"])
def test_float16_rounds_keys_and_weights_to_float16(kernel, sizes):
    assert_agrees(kernel, problem(**sizes, dtype=torch.float16, rows=1), rtol=4e-3, atol=4e-3)


def test_one_hand_written_byte(kernel):
    """2 bits, D = 16, so 4 bytes a token: byte 0 holds channels 0, 4, 8, 12 and 0x39 is the codes 1, 2, 3, 0."""
    arguments = problem(rows=1, kv_heads=1, groups=1, head_dim=16, value_group_size=16, packed=32, group_size=32)
    codes = torch.zeros(1, 1, 32, 4, dtype=torch.uint8)
    codes[0, 0, 0, 0] = 0x39
    arguments |= {"key_codes": codes, "value_codes": codes, "lengths": torch.tensor([1], dtype=torch.int32)}
    for side in ("key", "value"):
        arguments[f"{side}_ids"] = torch.zeros_like(arguments[f"{side}_ids"])
        arguments[f"{side}_scale"] = torch.ones_like(arguments[f"{side}_scale"])
        arguments[f"{side}_zero"] = torch.zeros_like(arguments[f"{side}_zero"])
    arguments |= {name: arguments[name][:, :, :0] for name in ("dense_key", "dense_value")}
    out, lse = kernel.decode_attention(**arguments)
    query = arguments["query"][0, 0]
    assert out[0, 0].tolist() == [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]
    torch.testing.assert_close(lse[0, 0], (query[0] + 2 * query[4] + 3 * query[8]) / 4)


@pytest.mark.parametrize("dense", [0, 5])
def test_lengths_of_rows(kernel, dense):
    arguments = problem(rows=6, kv_heads=1, groups=2, packed=256, dense=dense)
    arguments["lengths"] = torch.tensor([0, 1, 63, 128, 255, 256], dtype=torch.int32)
    out, lse = assert_agrees(kernel, arguments)
    if not dense:
        assert not out[0].any() and (lse[0] == -torch.inf).all()


def test_what_is_not_in_use_is_never_read(kernel):
    """A buffer that has grown holds anything behind the tokens in use: NaN scales, ids outside the bank."""
    arguments = problem(rows=2, kv_heads=1, groups=2, packed=256)
    arguments["lengths"] = torch.tensor([128, 64], dtype=torch.int32)
    want = kernel.decode_attention(**arguments)
    spoiled = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    for side in ("key", "value"):
        spoiled[f"{side}_ids"][:, :, 128:] = 255
        for name in ("scale", "zero"):
            tensor = spoiled[f"{side}_{name}"]
            tensor[:, :, tensor.shape[2] // 2 :] = torch.nan
    for a, b in zip(kernel.decode_attention(**spoiled), want):
        assert torch.equal(a, b)


@pytest.mark.parametrize("sizes", [{}, {"dense": 0}, {"packed": 0}], ids=["both", "packed", "dense"])
def test_masks_with_holes(kernel, sizes):
    arguments = problem(rows=3, kv_heads=1, groups=2, **sizes)
    tokens = arguments["key_codes"].shape[2] + arguments["dense_key"].shape[2]
    arguments["mask"] = torch.rand(3, tokens) < 0.5
    arguments["mask"][2] = False
    out, lse = assert_agrees(kernel, arguments)
    assert not out[2].any() and (lse[2] == -torch.inf).all() and not out.isnan().any()


def test_left_padding_over_whole_parts_and_lengths_together(kernel, configs, monkeypatch):
    arguments = problem(rows=3, kv_heads=1, groups=2, packed=384)
    monkeypatch.setattr(configs, "split_count", lambda *_: (4, 128))  # three packed parts and the dense one
    mask = torch.ones(3, 384 + 5, dtype=torch.bool)
    mask[0, :300] = False  # two parts see nothing
    mask[1, :384] = False  # only the dense part sees something
    mask[2, 384:] = False  # it sees nothing
    arguments |= {"mask": mask, "lengths": torch.tensor([384, 384, 129], dtype=torch.int32)}
    assert_agrees(kernel, arguments)


def test_a_mask_whose_rows_are_not_contiguous(kernel):
    arguments = problem(rows=2, kv_heads=1)
    mask = torch.rand(2, 2 * 261) < 0.5
    arguments["mask"] = mask[:, ::2]
    assert_agrees(kernel, arguments)
    arguments["mask"] = mask[:1, :261].expand(2, -1)
    assert_agrees(kernel, arguments)


@pytest.mark.parametrize("masked", [False, True])
def test_the_number_of_parts_does_not_change_the_result(kernel, configs, monkeypatch, masked):
    arguments = problem(rows=1, kv_heads=2, packed=448, group_size=64, dense=20)
    if masked:
        arguments["mask"] = torch.rand(1, 468) < 0.3
        arguments["mask"][:, 64:192] = False  # a whole part of seven
    results = []
    # One program for all; the packed tokens in one part; in two; in seven.
    for plan in ((1, 448), (2, 448), (3, 256), (8, 64)):
        monkeypatch.setattr(configs, "split_count", lambda *_, plan=plan: plan)
        results.append(assert_agrees(kernel, arguments))
    for out, lse in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lse, results[0][1], rtol=1e-6, atol=1e-6)


def test_parts_without_tokens_change_nothing(kernel, configs, monkeypatch):
    arguments = problem(rows=1, packed=128)
    monkeypatch.setattr(configs, "split_count", lambda *_: (21, 128))  # more than a block of the merge
    assert_agrees(kernel, arguments)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_caps(kernel, cap):
    # The cap times the rounding of tanh is the error of a logit.
    assert_agrees(kernel, problem(rows=1) | {"softcap": cap, "scaling": 1.0}, rtol=1e-5, atol=1e-5)


def test_large_logits_do_not_overflow(kernel):
    arguments = problem(rows=1, packed=128) | {"scaling": 100.0}
    out, lse = kernel.decode_attention(**arguments)
    want, want_lse = oracle(arguments)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=0)
    assert out.isfinite().all() and (out - want).abs().max() < 0.05
    capped = kernel.decode_attention(**arguments, softcap=20.0)
    assert capped[0].isfinite().all() and capped[1].max() <= 20.0 + np.log(133)


def test_views_of_longer_buffers(kernel):
    """Room for more windows, rows and heads cut out of larger tensors, dense tokens with strides of their own."""
    arguments = problem(rows=2, kv_heads=2, packed=256)
    want = kernel.decode_attention(**arguments)
    views = dict(arguments)
    for side, name in itertools.product(("key", "value"), ("codes", "scale", "zero", "ids", "bank")):
        tensor = arguments[f"{side}_{name}"]
        rows, heads, tokens = tensor.shape[:3]
        buffer = torch.full((rows + 1, heads + 1, 2 * tokens + 3, *tensor.shape[3:]), 7, dtype=tensor.dtype)
        view = buffer[1:, :heads, 2 : 2 + tokens]
        view.copy_(tensor)
        assert not view.is_contiguous()
        views[f"{side}_{name}"] = view
    views["dense_key"] = arguments["dense_key"].transpose(1, 2).contiguous().transpose(1, 2)
    views["dense_value"] = arguments["dense_value"].transpose(2, 3).contiguous().transpose(2, 3)
    views["query"] = arguments["query"].transpose(0, 1).contiguous().transpose(0, 1)
    for a, b in zip(kernel.decode_attention(**views), want):
        assert torch.equal(a, b)


def test_one_id_may_stand_for_all(kernel):
    """What a cache without patterns stores; ids with gaps between them are read where they are, too."""
    arguments = problem(rows=1, packed=128)
    arguments["key_ids"] = torch.full((1, 1, 1), 2, dtype=torch.uint8).expand(arguments["key_ids"].shape)
    arguments["value_ids"] = arguments["value_ids"].repeat_interleave(2, 2)[:, :, ::2]
    assert_agrees(kernel, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_banks_in_half_precision_or_single(kernel, dtype):
    arguments = problem(rows=1, packed=128, dtype=torch.float16 if dtype == torch.float32 else torch.float32)
    arguments |= {name: arguments[name].to(dtype) for name in ("key_bank", "value_bank")}
    tolerance = 2e-6 if arguments["query"].dtype == torch.float32 else 4e-3
    assert_agrees(kernel, arguments, rtol=tolerance, atol=tolerance)


def test_rows_that_share_a_cache(kernel):
    """Batch stride 0, as `expand` makes it."""
    arguments = problem(rows=1, packed=128)
    shared = {
        name: value.expand(3, *value.shape[1:]) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    shared["query"] = torch.randn(3, 6, 64)
    assert_agrees(kernel, shared)


def test_no_rows(kernel):
    arguments = problem(rows=2, packed=128)
    empty = {name: value[:0] if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    empty |= {"key_bank": arguments["key_bank"][:1]}
    out, lse = kernel.decode_attention(**empty)
    assert out.shape == (0, 6, 64) and lse.shape == (0, 6)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"softcap": 5.0},
        {"lengths": torch.tensor([256, 40], dtype=torch.int32)},
        {"mask": torch.arange(2 * 261).view(2, 261) % 3 > 0},
    ],
    ids=["plain", "softcap", "lengths", "mask"],
)
@pytest.mark.parametrize("sizes", [{}, {"key_bits": 4, "value_group_size": 16}, {"bank_rows": 1, "group_size": 32}])
def test_kernel_and_reference_agree(kernel, reference, sizes, extra):
    arguments = problem(**sizes) | extra
    for ours, theirs in zip(kernel.decode_attention(**arguments), reference.decode_attention(**arguments)):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


def test_every_launch_configuration_gives_the_result(kernel, configs, monkeypatch):
    for index, entry in enumerate(configs.ATTEND):
        free = {key: value for key, value in entry.items() if key not in ("dtypes", "targets")}
        monkeypatch.setattr(configs, "ATTEND", [{**free, "dtypes": ("fp32",), "padded": True}])
        assert_agrees(kernel, problem(rows=1, groups=index + 1, head_dim=32, value_group_size=32))


# --- what is read ----------------------------------------------------------------------------------------------------


PACKED = tuple(f"{side}_{name}" for side in ("key", "value") for name in ("codes", "scale", "zero", "ids"))


@pytest.mark.parametrize(
    "sizes", [{}, {"key_bits": 4, "head_dim": 96, "value_group_size": 32, "group_size": 32}], ids=["b2", "b4-2"]
)
def test_every_packed_byte_is_read_and_the_layout_says_how_many(kernel, configs, bytes_read, sizes):
    arguments = problem(rows=1, kv_heads=1, **sizes)
    kernel.decode_attention(**arguments)
    read = {name: bytes_read(arguments[name]) for name in PACKED}
    assert read == {name: arguments[name].numel() * arguments[name].element_size() for name in PACKED}
    layout = {name: arguments[name] for name in LAYOUT}
    a_token = configs.bytes_per_token(arguments["query"].shape[-1], **layout)
    assert sum(read.values()) == a_token * 256


def test_only_tokens_in_use_are_read(kernel, configs, bytes_read):
    arguments = problem(rows=1, kv_heads=1) | {"lengths": torch.tensor([128], dtype=torch.int32)}
    kernel.decode_attention(**arguments)
    layout = {name: arguments[name] for name in LAYOUT}
    assert sum(bytes_read(arguments[name]) for name in PACKED) == 128 * configs.bytes_per_token(64, **layout)


def test_bytes_of_a_token(configs):
    # D = 128, 2 bits, groups of 128: codes 32 + 32, key scales 4, value scales 4, ids 2; in 16 bits 512.
    assert configs.bytes_per_token(128, 2, 2, 128, 128) == 74
    assert configs.bytes_per_token(128, 4, 4, 32, 128, id_bytes=2) == 64 + 64 + 16 + 4 + 4
    assert configs.bytes_per_token(64, 2, 2, 128, 64, scale_bytes=4) == 16 + 16 + 4 + 8 + 2


# --- how work is cut -------------------------------------------------------------------------------------------------


def test_parts_cover_the_packed_tokens_and_fill_the_device(configs):
    for programs, packed, dense in itertools.product((1, 8, 64, 1000), (0, 32, 128, 4096, 131072), (0, 132)):
        for processors in (4, 132):
            parts, chunk = configs.split_count(programs, packed, dense, processors)
            splits = -(-packed // chunk)
            assert chunk % 64 == 0 and splits * chunk >= packed
            # The dense tokens have a part of their own, unless one program does everything.
            assert parts == max(1, splits + (dense > 0)) or parts == splits == 1
            assert programs * max(1, splits) >= 2 * processors or chunk == configs.MIN_CHUNK


def test_every_layout_has_a_configuration_whose_tile_lies_in_a_key_group(configs):
    for target, dtype in itertools.product(configs.ALL, ("bf16", "fp16", "fp32")):
        for head_dim in (8, 32, 64, 80, 96, 128, 160, 256):
            for bits, group in itertools.product(itertools.product((2, 4, 8), (2, 4, 8)), (32, 64, 96, 128)):
                entry = configs.attend_entry(target, dtype, head_dim, *bits, group)
                assert group % entry["BLOCK_T"] == 0


# --- PyTorch ---------------------------------------------------------------------------------------------------------


def test_it_compiles_without_a_graph_break(kernel):
    arguments = problem(rows=1, packed=128)
    query = arguments.pop("query")

    def run(query):
        out, lse = kernel.decode_attention(query, **arguments)
        return 2 * out, lse

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=False)
    for a, b in zip(compiled(query), run(query)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("extra", [False, True])
def test_the_operator_passes_pytorchs_own_checks(kernel, extra):
    arguments = problem(rows=2, packed=128, dtype=torch.float16)
    arguments |= {"softcap": None, "lengths": None, "mask": None}
    if extra:
        arguments |= {"softcap": 5.0, "lengths": torch.tensor([128, 0], dtype=torch.int32)}
        arguments |= {"mask": torch.ones(2, 133, dtype=torch.bool)}
        arguments["query"] = arguments["query"].transpose(0, 1).contiguous().transpose(0, 1)
    operator = sys.modules[f"{kernel.__name__}.ops"].decode_attention
    torch.library.opcheck(operator, tuple(arguments[argument.name] for argument in operator._schema.arguments))


def test_a_second_copy_of_the_kernel_loads_beside_the_first(kernel, tmp_path):
    from kernels import get_local_kernel

    shutil.copytree(kernel_folder(KERNEL), tmp_path / "copy")
    copy = get_local_kernel(tmp_path / "copy")
    assert copy is not kernel
    arguments = problem(rows=1, packed=128)
    for a, b in zip(copy.decode_attention(**arguments), kernel.decode_attention(**arguments)):
        assert torch.equal(a, b)


CHANGES = [
    (lambda a: a.update(query=a["query"].double()), TypeError, "query has dtype torch.float64: expected torch.bfloat"),
    (lambda a: a.update(query=a["query"][:, :, None]), ValueError, r"query has shape .* expected \[B, Hq, D\]"),
    (lambda a: a.update(query=a["query"][:, :5]), ValueError, "query has 5 heads: expected a multiple of the 2 KV"),
    (lambda a: a.update(query=torch.randn(2, 6, 512)), ValueError, "query has D=512: the Triton kernel takes up to"),
    (lambda a: a.update(query=torch.randn(2, 6, 30)), ValueError, "query has D=30: .* fill whole bytes at 2 bits"),
    (lambda a: a.update(key_bits=3), ValueError, "key_bits=3: expected 2, 4 or 8"),
    (lambda a: a.update(value_bits=16), ValueError, "value_bits=16: expected 2, 4 or 8"),
    (lambda a: a.update(group_size=16), ValueError, "group_size=16: .* multiples of 32; use source='reference'"),
    (lambda a: a.update(group_size=96), ValueError, "key_codes has P=256 tokens: expected a multiple of group"),
    (lambda a: a.update(value_group_size=48), ValueError, "value_group_size=48: expected a divisor of D=64"),
    (lambda a: a.update(value_group_size=0), ValueError, "value_group_size=0"),
    (lambda a: a.update(softcap=0.0), ValueError, "softcap=0.0: expected a positive number, or None"),
    (lambda a: a.update(key_codes=a["key_codes"].int()), TypeError, "key_codes has dtype torch.int32: expected torch"),
    (lambda a: a.update(key_codes=a["key_codes"][0]), ValueError, r"key_codes has shape .* expected \[B, Hk, P, D"),
    (lambda a: a.update(key_bits=4), ValueError, r"key_codes has shape \(2, 2, 256, 16\): expected \(2, 2, 256, 32\)"),
    (lambda a: a.update(key_scale=a["key_scale"].bfloat16()), TypeError, "key_scale has dtype .* torch.float16 or"),
    (lambda a: a.update(key_zero=a["key_zero"][:, :, :1]), ValueError, r"key_zero has shape .* \(2, 2, 2, 64\)"),
    (lambda a: a.update(key_ids=a["key_ids"].long()), TypeError, "key_ids has dtype torch.int64: expected torch"),
    (lambda a: a.update(key_bank=a["key_bank"].double()), TypeError, "key_bank has dtype torch.float64: expected"),
    (lambda a: a.update(key_bank=a["key_bank"][:, :1]), ValueError, r"key_bank has shape .* expected \(2, 2, 6, 64\)"),
    (lambda a: a.update(value_bank=a["value_bank"][:, :, :0]), ValueError, r"value_bank .* \(2 or 1, 2, m, 64\)"),
    (lambda a: a.update(value_ids=a["value_ids"][:, :, :9]), ValueError, r"value_ids has shape .* \(2, 2, 256\)"),
    (lambda a: a.update(value_scale=a["value_scale"][..., :0]), ValueError, r"value_scale .* \(2, 2, 256, 1\)"),
    (lambda a: a.update(dense_key=a["dense_key"][0]), ValueError, r"dense_key has shape .* \(2, 2, 0, 64\)"),
    (lambda a: a.update(dense_value=a["dense_value"][:, :, 1:]), ValueError, r"dense_value .* \(2, 2, 5, 64\)"),
    (lambda a: a.update(lengths=torch.tensor([1, 2])), TypeError, "lengths has dtype torch.int64: expected torch"),
    (lambda a: a.update(lengths=torch.ones(3, dtype=torch.int32)), ValueError, r"lengths has shape \(3,\): .* \(2,\)"),
    (lambda a: a.update(mask=torch.ones(2, 261)), TypeError, "mask has dtype torch.float32: expected torch.bool"),
    (lambda a: a.update(mask=torch.ones(2, 256) > 0), ValueError, r"mask has shape \(2, 256\): expected \(2, 261\)"),
    (
        lambda a: a.update(key_codes=a["key_codes"].transpose(2, 3).contiguous().transpose(2, 3)),
        ValueError,
        "key_codes has strides .*: its last two dimensions must be contiguous; batch and heads are free",
    ),
    (lambda a: a.update(key_bank=a["key_bank"].to("meta")), ValueError, "key_bank is on meta: expected cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), CHANGES)
def test_wrong_arguments_are_named(kernel, change, error, words):
    arguments = problem()
    change(arguments)
    with pytest.raises(error, match=words):
        kernel.decode_attention(**arguments)
