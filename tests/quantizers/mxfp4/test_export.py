"""Exports read by stock transformers and compressed-tensors, in processes that never import hf_ext."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GraniteMoeConfig, MixtralConfig

from hf_ext import MXFP4Config, export_compressed_tensors, quantize_model
from hf_ext.quantizers.mxfp4 import numerics
from hf_ext.quantizers.mxfp4.checkpoint import quantize_checkpoint

pytest.importorskip("compressed_tensors")

IDS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
STOCK = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
folder, inputs, output, dtype = {arguments!r}
kwargs = {{"quantization_config": CompressedTensorsConfig(dequantize=True)}} if dtype is None else {{"dtype": dtype}}
model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)
assert not any(info.values()), info
with torch.no_grad():
    logits = model(load_file(inputs)["ids"]).logits
weights = {{name: w for name, w in model.state_dict().items() if name.endswith("proj.weight")}}
save_file(weights | {{"logits": logits}}, output)
assert "hf_ext" not in sys.modules
"""


@pytest.fixture
def read_by_stock(fresh_python, tmp_path):
    """Weights and logits of an export, as transformers and compressed-tensors alone see them."""
    from safetensors.torch import save_file

    def read(folder: Path, dtype: str | None = None) -> dict[str, torch.Tensor]:
        save_file({"ids": IDS}, tmp_path / "ids")
        arguments = (str(folder), str(tmp_path / "ids"), str(tmp_path / "out"), dtype)
        fresh_python(STOCK.format(arguments=arguments))
        return load_file(tmp_path / "out")

    return read


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def assert_read_as_ours(found: dict[str, torch.Tensor], model) -> None:
    """``model`` is quantised by us; compares in its dtype."""
    assert torch.equal(found.pop("logits"), logits(model))
    dense = model.dequantize().state_dict()
    assert len(found) == 14
    for name, weight in found.items():
        assert torch.equal(weight, dense[name]), name


def test_export_of_a_model_is_read_bit_for_bit_without_hf_ext(tiny_llama_dir, tmp_path, read_by_stock):
    model = quantize_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), MXFP4Config.vllm())
    export_compressed_tensors(model, tmp_path / "export")
    assert_read_as_ours(read_by_stock(tmp_path / "export"), model)


def test_export_of_a_folder_is_read_bit_for_bit_without_hf_ext(tiny_llama_dir, tmp_path, read_by_stock):
    config = MXFP4Config.vllm(scale_rule="ocp", modules_to_not_convert=["lm_head", "model.layers.1.mlp.up_proj"])
    packed = quantize_checkpoint(tiny_llama_dir, tmp_path / "packed", config).path
    export_compressed_tensors(packed, tmp_path / "export")
    assert_read_as_ours(read_by_stock(tmp_path / "export"), AutoModelForCausalLM.from_pretrained(packed))
    stored = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    assert stored["ignore"] == ["lm_head", "model.layers.1.mlp.up_proj"]
    for name in ("tokenizer.json", "generation_config.json", "README.md"):
        assert (tmp_path / "export" / name).is_file()


def test_checkpoint_written_in_the_format_is_read_bit_for_bit_without_hf_ext(tiny_llama_dir, tmp_path, read_by_stock):
    config = MXFP4Config.vllm()
    quantize_checkpoint(
        tiny_llama_dir, tmp_path / "export", config, format="compressed-tensors", max_shard_size="40KB"
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=config)
    assert_read_as_ours(read_by_stock(tmp_path / "export"), model)


def test_export_can_stay_compressed_in_bfloat16(tiny_llama_dir, tmp_path, read_by_stock):
    model = AutoModelForCausalLM.from_pretrained(
        tiny_llama_dir, dtype=torch.bfloat16, quantization_config=MXFP4Config.vllm()
    )
    export_compressed_tensors(model, tmp_path / "export")
    assert_read_as_ours(read_by_stock(tmp_path / "export", "bfloat16"), model)


def test_calibrated_export_leaves_no_other_safetensors_behind(tiny_llama_dir, tmp_path, read_by_stock):
    config = MXFP4Config.vllm(search_exponents=True)
    folder = tmp_path / "export"
    quantize_checkpoint(tiny_llama_dir, folder, config, format="compressed-tensors", calibration=IDS)
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    read_by_stock(folder)


def test_activations_are_rounded_as_compressed_tensors_rounds_them(tiny_llama_dir, tmp_path):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    config = MXFP4Config.vllm(activation="mxfp4")
    quantize_checkpoint(tiny_llama_dir, tmp_path / "export", config, format="compressed-tensors")
    stored = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    arguments = QuantizationArgs(**stored["config_groups"]["group_0"]["input_activations"])
    assert arguments.dynamic
    for dtype in (torch.float32, torch.bfloat16):
        # 7 * 2^k is where the rules part: "oas" takes the smaller scale, "even" the larger.
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
        scale, zero_point = compute_dynamic_scales_and_zp(x, arguments, torch.nn.Linear(128, 64))
        theirs = fake_quantize(x, scale, zero_point, arguments)
        ours = numerics.fake_quantize(x, block_size=32, scale_rule="even", macro_block_size=None)
        assert torch.equal(theirs, ours)
        ours = numerics.fake_quantize(x, block_size=32, scale_rule="oas", macro_block_size=None)
        differ = (theirs != ours).view(64, 4, 32).any(-1)
        amax = x.view(64, 4, 32).abs().amax(-1).float()
        assert bool((torch.frexp(amax).mantissa[differ] == 7 / 8).all())


@pytest.mark.parametrize(
    "config, match",
    [
        (MXFP4Config(), "no macro-block scale; re-quantise with macro_block_size=None"),
        (MXFP4Config.vllm(block_size=16), "blocks of 32 only, got block_size=16"),
        (MXFP4Config.vllm(activation="mxfp4", scale_rule="ceil"), "rounds activations by the rule 'even', not 'ceil'"),
        (MXFP4Config.vllm(activation="mxfp4", activation_macro_block_size=64), "for activations either"),
    ],
)
@pytest.mark.parametrize("what", ["model", "folder"])
def test_what_the_layout_cannot_hold_is_refused(what, config, match, tiny_llama_dir, tmp_path):
    model = quantize_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), config)
    if what == "folder":
        model.save_pretrained(tmp_path / "packed")
        model = tmp_path / "packed"
    with pytest.raises(ValueError, match=match):
        export_compressed_tensors(model, tmp_path / "export")
    assert not any(path.name.startswith("export") for path in tmp_path.iterdir())


def test_conv1d_and_fused_experts_are_refused_by_name(tiny_gpt2_dir, tmp_path):
    model = quantize_model(AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir), MXFP4Config.vllm())
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.c_attn is a Conv1D layer"):
        export_compressed_tensors(model, tmp_path / "export")
    config = MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    for skip, match in ([], "is fused experts"), (["model.layers.0.mlp.experts"], "holds dense experts.*mxfp4 format"):
        with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.experts {match}"):
            quantize_checkpoint(
                tmp_path / "moe", tmp_path / "out", MXFP4Config.vllm(), format="compressed-tensors", skip=skip
            )


def test_dense_experts_that_are_stored_as_they_are_held_are_read_without_hf_ext(tmp_path, read_by_stock):
    torch.manual_seed(0)
    config = GraniteMoeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    skipped = MXFP4Config.vllm(modules_to_not_convert=["experts", "lm_head"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", quantization_config=skipped)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    export_compressed_tensors(model, tmp_path / "link")
    assert torch.equal(read_by_stock(tmp_path / "disk")["logits"], logits(model))


def test_what_is_not_ours_or_in_the_way_is_refused(tiny_llama_dir, tmp_path):
    with pytest.raises(ValueError, match="not quantised to MXFP4"):
        export_compressed_tensors(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), tmp_path / "export")
    with pytest.raises(ValueError, match="quant_method is None"):
        export_compressed_tensors(tiny_llama_dir, tmp_path / "export")
    with pytest.raises(FileNotFoundError, match="no-such"):
        export_compressed_tensors(tmp_path / "no-such", tmp_path / "export")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        export_compressed_tensors(tiny_llama_dir, tmp_path / "full")
