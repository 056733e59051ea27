"""Every shipped configuration compiled for the GPUs it ships for: no spills, little shared memory, no growth."""

import json
import re

import pytest

pytest.importorskip("triton", reason="triton comes for Linux only")

import triton
import triton.language as tl

from hf_ext.benchmarks.static_kernels.instructions import count_instructions
from hf_ext.benchmarks.static_kernels.report import adapter_cost, instructions_per_code, macro_cost
from hf_ext.benchmarks.static_kernels.run import DATA, measure
from hf_ext.kernel_lookup import kernel_folder, kernel_folders
from hf_ext.kernel_tools import DEFAULT_TARGETS, aot_configs, check_target, compile_config, is_for
from hf_ext.runlog import read_rows

GROWTH = 1.1
KNOWN = {(row["kernel"], row["name"], row["target"]): row for row in read_rows(DATA)}


@pytest.fixture(scope="module", autouse=True)
def _fusion(module_monkeypatch):
    module_monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as it is by default in triton 3.9


@pytest.fixture(scope="module")
def module_monkeypatch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def shipped(target: str, default: bool) -> list[tuple[str, dict]]:
    return [
        (kernel, config)
        for kernel, folder in kernel_folders().items()
        for config in aot_configs(folder)
        if config["default"] == default and is_for(config, target)
    ]


@pytest.mark.parametrize(
    "default", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["default", "every other"]
)
@pytest.mark.parametrize("target", DEFAULT_TARGETS)
def test_nothing_spills_and_no_kernel_grows(target, default):
    jobs = shipped(target, default)
    assert jobs
    wrong = []
    for kernel, config in jobs:
        row = measure(kernel, config, target)
        name = f"{kernel} {config['name']}"
        wrong += [f"{name}: {problem}" for problem in row["problems"]]
        known = KNOWN.get((kernel, config["name"], target))
        if known is None:
            wrong.append(f"{name} is not in {DATA.name}: run `hf-ext bench static_kernels`")
        # Another compiler gives other counts; the table is of the version in constraints.txt.
        elif known["triton"] == triton.__version__ and not row["problems"]:
            wrong += [
                f"{name}: {row[key]} {key} instructions, {known[key]} in {DATA.name}"
                for key in ("total", "loop")
                if row[key] > GROWTH * known[key]
            ]
    assert wrong == []


def test_the_table_is_of_what_is_shipped_and_of_the_pinned_compiler():
    names = {
        (kernel, config["name"], t) for t in DEFAULT_TARGETS for d in (True, False) for kernel, config in shipped(t, d)
    }
    assert set(KNOWN) == names
    constraints = (kernel_folder("mxfp4_gemm").parents[1] / "constraints.txt").read_text("utf-8")
    assert {f"triton=={row['triton']}" for row in KNOWN.values()} <= set(constraints.split())


@pytest.mark.parametrize("target", DEFAULT_TARGETS)
def test_a_number_of_outputs_that_is_no_multiple_of_16_spills_nothing_either(target):
    for kernel, config in shipped(target, True):
        if "n" in config["divisible"]:
            ragged = {**config, "divisible": [name for name in config["divisible"] if name != "n"]}
            assert compile_config(ragged, target).problems == (), f"{kernel} {config['name']}"


@pytest.mark.parametrize("macro", ["macro128-128", "macro64-128", "macro0-0"])
def test_blackwell_multiplies_the_codes_as_they_are(macro):
    configs = [
        config
        for config in aot_configs(kernel_folder("mxfp4_gemm"))
        if config["name"].startswith(f"w4a4-{macro}-128x") and is_for(config, "sm_100")
    ]
    assert len(configs) == 2  # 128 x 64 and 128 x 128
    for config in configs:
        report = compile_config(config, "sm_100")
        assert report.ok
        assert list(report.matrix_instructions) == ["tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32"]


def test_attention_needs_at_most_64_kib_of_shared_memory_and_reads_codes_by_16_bytes():
    """Codes of 128 channels: 32 bytes a token or more, copied past the registers where there is a copy for it."""
    folder = kernel_folder("patternkv_attention")
    assert all(row["shared_bytes"] <= 64 * 1024 for key, row in KNOWN.items() if key[0] == "patternkv_attention")
    for config in aot_configs(folder):
        if config["name"].startswith("attend-bf16-d128-") and "-packed-" in config["name"] and config["default"]:
            text = compile_config(config, "sm_80").text
            # `.cg` copies 16 bytes and nothing else: codes and key scales; `.ca` the rows of the banks.
            assert "cp.async.cg.shared.global" in text
            # Single bytes are ids and the mask alone: at most one a row and thread, in the prologue and in the loop.
            assert len(re.findall(r"ld\.global\S*\.[bu]8\b", text)) <= 24


def test_an_adapter_costs_shared_memory_within_the_bound():
    """Of the method, a stage: a tile of u and the head's rows of b in 16 bits. Keys and values together keep it."""
    rank, stages = 16, 2
    added = adapter_cost([row for row in KNOWN.values() if row["kernel"] == "flash_lora_attention"])
    for name, target, _, shared in added:
        tile = KNOWN["flash_lora_attention", name, target]["tile"]
        bound = 2 * rank * (tile["BLOCK_N"] + tile["HEAD_DIM"]) * stages
        if target == "gfx942" and "-k0-" not in name:
            # A rotated tile passes through shared memory in float32, in fewer instructions than rebuilding halves.
            bound += 4 * tile["BLOCK_N"] * tile["HEAD_DIM"]
        assert shared <= bound, (name, target)
    # Decode and prefill, on values and on both; on Ampere and CDNA3 a prefill with keys has a tile of its own.
    assert len(added) == 4 * len(DEFAULT_TARGETS) - 2


def test_hopper_uses_warp_group_products_from_one_row_on():
    for config in aot_configs(kernel_folder("mxfp4_gemm")):
        if config["name"].startswith("w4a16-bf16"):
            assert all("wgmma" in name for name in compile_config(config, "sm_90").matrix_instructions)


# --- the check itself can fail ---------------------------------------------------------------------------------------


@triton.jit
def _greedy_kernel(x_ptr, y_ptr, steps, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + rows[:, None] * BLOCK + rows[None, :])
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for _ in range(steps):
        acc = tl.dot(x, x, acc) * acc + tl.dot(x, tl.trans(x))
    tl.store(y_ptr + rows[:, None] * BLOCK + rows[None, :], acc)


def greedy(block: int, warps: int) -> dict:
    return {
        "kernel": _greedy_kernel,
        "name": f"greedy-{block}",
        "signature": {"x_ptr": "*bf16", "y_ptr": "*fp32", "steps": "i32"},
        "constexprs": {"BLOCK": block},
        "num_warps": warps,
        "num_stages": 1,
        "divisible": ["x_ptr", "y_ptr"],
        "default": True,
    }


def test_a_kernel_that_wants_too_many_registers_is_caught():
    report = compile_config(greedy(128, 4), "sm_80")
    assert not report.ok and report.spilled_bytes > 0
    assert f"{report.spilled_bytes} bytes spilled" in report.problems


def test_a_kernel_that_wants_too_much_shared_memory_is_caught():
    report = compile_config(greedy(256, 8), "sm_90")
    assert any("KiB of shared memory, at most 99" in problem for problem in report.problems)


def test_a_kernel_that_does_not_compile_is_a_row_that_says_so():
    report = compile_config({**greedy(48, 4), "name": "no power of two"}, "sm_80")
    assert not report.ok and report.problems[0].startswith("does not compile: ")
    assert json.dumps(report.to_dict())
    with pytest.raises(ValueError, match="no power of two did not compile for sm_80"):
        count_instructions(report)


def test_the_loop_around_the_product_is_what_is_counted():
    for target in DEFAULT_TARGETS:
        report = compile_config(greedy(32, 4), target)
        counts = count_instructions(report)
        # The compiler may unroll the loop beside a copy that takes one step, which is the one counted.
        assert counts.loop_matrix > 0 and sum(report.matrix_instructions.values()) % counts.loop_matrix == 0, target
        assert counts.loop_matrix < counts.loop < counts.total, target


def test_unknown_targets_and_configurations_for_others_are_refused():
    with pytest.raises(ValueError, match="target is 'sm_42'; known targets: sm_80, sm_90"):
        check_target("sm_42")
    with pytest.raises(ValueError, match="is made for sm_90, not for sm_80"):
        compile_config({**greedy(32, 4), "targets": ("sm_90",)}, "sm_80")


def test_instructions_are_spread_over_the_codes_of_a_step():
    row = {"loop": 320, "threads": 256, "tile": {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64}}
    assert instructions_per_code(row) == 10
    assert instructions_per_code({**row, "loop": 0}) is None
    assert instructions_per_code({**row, "tile": {"ROWS": 16}}) is None


def test_instructions_of_attention_are_counted_where_the_only_loop_is_that_over_packed_tokens():
    row = {"kernel": "patternkv_attention", "loop": 640, "threads": 128, "tile": {"BLOCK_T": 64, "HEAD_DIM": 64}}
    assert instructions_per_code({**row, "name": "attend-d64-packed-t64"}) == 10
    assert instructions_per_code({**row, "name": "attend-d64-t64"}) is None


def test_the_cost_of_an_adapter_compares_the_same_tile_on_the_same_target():
    tile = {"BLOCK_M": 16, "BLOCK_N": 32, "HEAD_DIM": 128}
    row = {"target": "sm_80", "threads": 128, "default": True, "loop": 100, "shared_bytes": 2048, "tile": tile}
    rows = [
        {**row, "name": "decode-bf16-d128-k0-v0-16x32"},
        {**row, "name": "decode-bf16-d128-k16-v16-16x32-halves", "loop": 250, "shared_bytes": 3072},
        {**row, "name": "decode-bf16-d128-k64-v64-16x32-halves", "default": False},
        {**row, "name": "decode-bf16-d128-k16-v16-16x32-halves", "target": "sm_90"},
        {**row, "name": "decode-bf16-d128-k16-v16-16x64-halves", "tile": {**tile, "BLOCK_N": 64}},
        {**row, "name": "decode-fp16-d128-k16-v16-16x32-halves"},
        {**row, "name": "merge-bf16-d128-v16", "loop": 0},
    ]
    assert adapter_cost(rows) == [("decode-bf16-d128-k16-v16-16x32-halves", "sm_80", 2.5, 1024)]


def test_the_cost_of_macro_blocks_compares_the_same_tile_on_the_same_target():
    rows = [
        {"name": "w4a16-bf16-macro128-16x64", "target": "sm_80", "loop": 110},
        {"name": "w4a16-bf16-macro0-16x64", "target": "sm_80", "loop": 100},
        {"name": "w4a16-bf16-macro0-16x64", "target": "sm_90", "loop": 50},
        {"name": "w4a4-macro128-128-16x64", "target": "sm_90", "loop": 30},
        {"name": "w4a4-macro0-0-16x64", "target": "sm_90", "loop": 20},
        {"name": "w4a4-macro64-128-16x64", "target": "sm_90", "loop": 40},
    ]
    assert macro_cost(rows) == [
        ("w4a16-bf16-macro128-16x64", "sm_80", 1.1),
        ("w4a4-macro128-128-16x64", "sm_90", 1.5),
    ]
