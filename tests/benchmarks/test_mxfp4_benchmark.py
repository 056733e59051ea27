"""The MXFP4 benchmark: its formats, rows that resume, and the report made from a data file."""

import copy
import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ext.benchmarks import report
from hf_ext.benchmarks.mxfp4 import formats, run
from hf_ext.extras import is_installed
from hf_ext.quantizers.mxfp4 import numerics


@pytest.fixture(scope="module")
def dense(tiny_llama_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()


@pytest.fixture
def calibration():
    return torch.randint(1, 256, (2, 32), generator=torch.Generator().manual_seed(2))


def _logits(model):
    with torch.no_grad():
        return model(torch.arange(1, 33)[None]).logits


def test_our_formats_are_the_product_and_equal_rounding_by_the_numerics(dense, calibration):
    entry = formats.FORMATS["oas + mbs static 32/128"]
    expected = copy.deepcopy(dense)
    for name, module in expected.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            module.weight.data = numerics.fake_quantize(module.weight.data)
    with formats.prepare(dense, entry, "none", calibration, "") as prepared:
        assert torch.allclose(_logits(prepared.model), _logits(expected), atol=1e-5)
        # Rows of 64 and 96 values: one macro byte each, where 128 would share one.
        assert 4.25 + 8 / 128 < prepared.bits_per_weight <= 4.25 + 8 / 64
        assert 0.005 < prepared.relative_mse < 0.02
        plain = _logits(prepared.model)
    with formats.prepare(dense, entry, "macro 64", calibration, "") as prepared:
        assert not torch.equal(_logits(prepared.model), plain)
    with formats.prepare(dense, entry, "dynamic 128", calibration, "") as prepared:
        searched = _logits(prepared.model)
    with formats.prepare(dense, entry, "none", calibration, "") as prepared:
        assert torch.equal(_logits(prepared.model), plain)
    assert not torch.equal(searched, plain)


def test_preparing_leaves_the_dense_model_as_it_was(dense, calibration):
    before = _logits(dense)
    for name in ("bf16", formats.NVFP4, "weighted + exponents 32/64"):
        with formats.prepare(dense, formats.FORMATS[name], "none", calibration, ""):
            pass
    assert torch.equal(_logits(dense), before)


def test_nvfp4_rounds_each_sequence_by_its_own_scale(dense, calibration):
    ids = torch.stack((torch.arange(1, 33), torch.arange(100, 132)))
    with formats.prepare(dense, formats.FORMATS[formats.NVFP4], "own", calibration, "") as prepared, torch.no_grad():
        together = prepared.model(ids).logits
        alone = torch.cat([prepared.model(row[None]).logits for row in ids])
    assert torch.allclose(together, alone, atol=1e-5)


def test_compressed_tensors_is_the_even_rule():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    found, bits = formats._compressed_tensors(weight)
    expected = numerics.fake_quantize(weight, scale_rule="even", macro_block_size=None)
    assert torch.equal(found.float(), expected)
    assert bits == 4.25 * weight.numel()


if is_installed("torchao"):  # comes with the extra `bench`

    @pytest.mark.parametrize(("mode", "rule"), [("floor", "ocp"), ("rceil", "ceil"), ("even", "even")])
    def test_torchao_agrees_with_our_rules(mode, rule):
        weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
        found, bits = formats._torchao(mode)(weight)
        assert torch.equal(found, numerics.fake_quantize(weight, scale_rule=rule, macro_block_size=None))
        assert bits == 4.25 * weight.numel()

    def test_torchao_agrees_with_our_nvfp4():
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

        weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
        packed = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor_amax_to_scale(weight.abs().max()))
        assert torch.equal(packed.dequantize(torch.float32), formats._nvfp4(weight)[0])


def test_dithering_takes_weights_off_their_grid_by_at_most_half_a_step():
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    step = 0.01
    levels = torch.randint(0, 16, (8, 2, 32), generator=torch.Generator().manual_seed(4)).float()
    levels[..., 0], levels[..., 1] = 0, 15
    model[0].weight.data = (levels * step - 0.07).view(8, 64)
    before = model[0].weight.data.clone()
    run.dither(model)
    moved = (model[0].weight.data - before).abs()
    assert moved.max() <= step / 2 * 1.001
    assert moved.mean() == pytest.approx(step / 4, rel=0.15)
    again = nn.Sequential(nn.Linear(64, 8, bias=False))
    again[0].weight.data = before.clone()
    run.dither(again)
    assert torch.equal(again[0].weight, model[0].weight)


@pytest.fixture
def tiny_benchmark(monkeypatch, dense, tiny_llama_dir):
    """The benchmark with the tiny model in the place of SmolLM2 and windows of its length."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    made = run._Model(tiny_llama_dir, dense, tokenizer, {"pydoc": "The quick brown fox jumps. " * 400})
    monkeypatch.setattr(run, "_MODELS", {"smollm2": lambda say, texts: made})


def _run(out, **options):
    run.main(windows=2, texts="pydoc", models="smollm2", threads=1, out=out, **options)


def test_rows_are_complete_and_a_second_run_measures_only_what_is_missing(tmp_path, tiny_benchmark, monkeypatch):
    out = tmp_path / "rows.jsonl"
    _run(out, quick=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = {(row["format"], row["activation"]) for row in rows}
    assert {("ocp 32", "none"), ("ocp 32", "own"), ("nvfp4", "own"), ("weighted 32/128", "macro 64")} <= names
    for row in rows:
        assert len(row["nlls"]) == len(row["kls"]) == row["windows"] == 2
        assert row["nll"] == pytest.approx(sum(row["nlls"]) / 2)
        assert len(row["text_sha256"]) == 64
        assert row["threads"] == 1
        assert row["versions"]["torch"] == torch.__version__
        if row["group"] in ("paper", "ours"):
            worse, better = (
                next(
                    other
                    for other in rows
                    if other["format"] == end
                    and other["activation"] in ("none", "own")
                    and (other["activation"] == "none") == (row["activation"] == "none")
                )
                for end in ("ocp 32", "nvfp4")
            )
            share = (worse["nll"] - row["nll"]) / (worse["nll"] - better["nll"])
            assert row["gap_closed"][0] == pytest.approx(share)
            assert row["versus_nvfp4"][0] == pytest.approx(row["nll"] - better["nll"])

    before = out.read_text()
    monkeypatch.setattr(run, "_MODELS", {"smollm2": None})  # no model may be loaded (or trained), nothing measured
    _run(out, quick=True)
    assert out.read_text() == before
    monkeypatch.undo()


def test_a_run_cut_short_goes_on_where_it_was(tmp_path, tiny_benchmark):
    out = tmp_path / "rows.jsonl"
    _run(out, quick=True)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:5]) + lines[5][:20])
    _run(out, quick=True)
    assert len(run.RunLog(out, run.KEY).latest()) == len(lines)
    assert out.read_text().startswith("".join(lines[:5]))


def test_an_error_of_a_peer_becomes_a_row_and_one_of_ours_does_not(tmp_path, tiny_benchmark, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such kernel on a CPU\nand more")

    monkeypatch.setitem(formats._PEERS, "bitsandbytes nf4", fail)
    out = tmp_path / "rows.jsonl"
    _run(out, only="bitsandbytes nf4")
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["error"] == "RuntimeError: no such kernel on a CPU"
    monkeypatch.setattr(formats, "_prepare_ours", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        _run(out, only="oas 32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "mxfp5"}, "`--only` must be one of: fp32; ocp 32"),
        ({"texts": "novel"}, "`--texts` knows wikipedia, news, pydoc, stdlib; got novel"),
        ({"models": "gpt"}, "`--models` knows smollm2"),
        ({"windows": 1}, "`--windows` must be at least 2"),
        ({"formats": "some"}, "`--formats` must be auto, main or all"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        run.main(**options)


def test_the_report_has_the_figures_of_the_rows_and_its_plots(tmp_path, tiny_benchmark):
    folder = tmp_path / "benchmarks"
    data = folder / "mxfp4" / "data" / "results.jsonl"
    _run(data, quick=True)
    with data.open("a") as file:
        row = {"model": "smollm2", "text": "pydoc", "windows": 2, "format": "torchao mxfp4 (kernel)", "group": "peer"}
        file.write(json.dumps(row | {"activation": "none", "error": "ValueError: no", "versions": {}}) + "\n")
    other = folder / "other" / "data" / "rows.jsonl"
    other.parent.mkdir(parents=True)
    other.write_text('{"kernel": "quantize", "seconds": 0.123456}\n')
    report.main(folder)
    text = (folder / "RESULTS.md").read_text()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    ocp = next(row for row in rows if row["format"] == "ocp 32" and row["activation"] == "none")
    assert f"| ocp 32 | 4.25 | {ocp['relative_mse']:.5f} | {ocp['nll']:.4f} |" in text
    assert "`ValueError: no`" in text
    assert "| quantize | 0.1235 |" in text
    assert "hf-ext bench mxfp4" in text
    for name in ("gap_closed", "loss_against_bits"):
        assert (folder / "mxfp4" / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no benchmark under"):
        report.main(tmp_path)
