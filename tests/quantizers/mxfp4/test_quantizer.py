"""MXFP4 inside `from_pretrained` and `save_pretrained`; oracles are dense models with rounded weights."""

import copy
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from hf_ext import MXFP4Config, MXFP4Linear, quantize_model
from hf_ext.quantizers.mxfp4 import collect_channel_stats, numerics

CLEAN = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
W = "model.safetensors"
IDS = torch.randint(1, 256, (3, 21), generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def biased_dir(tmp_path_factory):
    """A Llama with biases, a ragged last macro block (K = 160, 96) and untied embeddings."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=160,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
    )
    folder = tmp_path_factory.mktemp("biased")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixtral_dir(tmp_path_factory):
    torch.manual_seed(4)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    folder = tmp_path_factory.mktemp("mixtral")
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


FOLDERS = ["tiny_llama_dir", "tiny_gpt2_dir", "biased_dir", "mixtral_dir"]
CONFIGS = {"default": MXFP4Config(), "paper": MXFP4Config.paper(), "ocp": MXFP4Config.ocp()}


def round_dense(model: nn.Module, config: MXFP4Config) -> nn.Module:
    """The oracle: the same dense model with each converted weight rounded by the numerics, whatever stores it."""
    arguments = config.quantize_arguments | {"search": config.resolve_search(has_stats=False)}
    for name, parameter in model.named_parameters():
        if "layers" not in name and ".h." not in name:
            continue
        if parameter.dim() < 2 or "mlp.gate.weight" in name:
            continue
        transposed = ".h." in name  # GPT-2's Conv1D
        weight = parameter.data.t() if transposed else parameter.data
        weight = numerics.fake_quantize(weight, **arguments)
        parameter.data = weight.t() if transposed else weight
    return model


@pytest.mark.parametrize("preset", CONFIGS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_quantising_on_load_equals_the_dense_model_with_rounded_weights(folder, preset, request):
    config = MXFP4Config(**CONFIGS[preset].__dict__ | {"activation": None})
    path = request.getfixturevalue(folder)
    model, info = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, output_loading_info=True)
    assert info == CLEAN
    oracle = round_dense(AutoModelForCausalLM.from_pretrained(path), config)
    if folder == "mixtral_dir":  # the experts are summed in another order
        torch.testing.assert_close(logits(model), logits(oracle), rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(logits(model), logits(oracle))


@pytest.mark.parametrize("preset", CONFIGS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_saving_and_loading_is_bit_exact_and_so_is_dequantising(folder, preset, request, tmp_path):
    path = request.getfixturevalue(folder)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=CONFIGS[preset])
    expected = logits(model)
    assert torch.equal(expected, logits(quantize_model(AutoModelForCausalLM.from_pretrained(path), CONFIGS[preset])))
    model.save_pretrained(tmp_path / "packed")

    packed, info = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert info == CLEAN and torch.equal(logits(packed), expected)
    with pytest.warns(UserWarning, match="loading attributes"):
        dense, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "packed", quantization_config=MXFP4Config(dequantize=True), output_loading_info=True
        )
    assert info == CLEAN and not hasattr(dense.config, "quantization_config")
    assert not any(isinstance(module, MXFP4Linear) for module in dense.modules())
    again = packed.dequantize()
    assert torch.equal(logits(again), logits(dense))
    if CONFIGS[preset].activation is None and folder != "mixtral_dir":
        assert torch.equal(logits(dense), expected)
    again.save_pretrained(tmp_path / "dense")
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert info == CLEAN and torch.equal(logits(reloaded), logits(dense))


def test_a_fresh_process_needs_only_import_hf_ext(tiny_llama_dir, tmp_path, fresh_python):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=MXFP4Config())
    model.save_pretrained(tmp_path)
    save_file({"ids": IDS, "logits": logits(model)}, tmp_path / "expected.st")
    code = f"""
{{imports}}
import torch
from safetensors.torch import load_file
expected = load_file({str(tmp_path / "expected.st")!r})
model, info = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, output_loading_info=True)
with torch.no_grad():
    assert torch.equal(model(expected["ids"]).logits, expected["logits"])
assert not info["missing_keys"] and not info["unexpected_keys"]
print(type(model.model.layers[0].self_attn.q_proj).__name__)
"""
    before = "import hf_ext\nfrom transformers import AutoModelForCausalLM"
    after = "from transformers import AutoModelForCausalLM\nimport hf_ext"
    for imports in (before, after):
        assert fresh_python(code.format(imports=imports)).split()[-1] == "MXFP4Linear"


def test_what_stays_dense_is_as_asked_and_is_stored_resolved(tiny_llama_dir, tmp_path):
    config = MXFP4Config(modules_to_not_convert=["model.layers.0", "lm_head"])
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=config)
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.Linear)
    assert isinstance(model.model.layers[1].mlp.up_proj, MXFP4Linear)
    default = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=MXFP4Config())
    default.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stored["modules_to_not_convert"] == ["lm_head"]
    assert type(default.lm_head) is nn.Linear


@pytest.mark.parametrize("entry", ["layers.1.mlp", "model.layers.1.mlp", r"model\.layers\.[1-9]\.mlp"])
def test_what_is_in_a_module_left_dense_stays_dense_however_it_is_named(entry, tiny_llama_dir, tmp_path):
    config = MXFP4Config(modules_to_not_convert=[entry, "lm_head"])
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=config)
    dense = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert dense == {"lm_head", *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down"))}
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info == CLEAN and torch.equal(logits(loaded), logits(model))


def test_the_callers_config_is_not_changed(tiny_llama_dir):
    config = MXFP4Config()
    AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=config)
    quantize_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), config)
    assert config == MXFP4Config()


def test_tied_embeddings_stay_dense_and_tied(tiny_gpt2_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir, quantization_config=MXFP4Config())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert isinstance(model.transformer.h[0].attn.c_attn, MXFP4Linear)


def test_tied_embeddings_stay_dense_whatever_else_is_left_dense(tiny_gpt2_dir, tmp_path):
    config = MXFP4Config(modules_to_not_convert=["transformer.h.0"])
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir, quantization_config=config)
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.transformer.wte.weight
    assert isinstance(model.transformer.h[1].mlp.c_fc, MXFP4Linear)
    memory = quantize_model(AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir), config)
    assert memory.state_dict().keys() == model.state_dict().keys()
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info == CLEAN and torch.equal(logits(loaded), logits(model))


def test_a_module_in_two_places_stays_dense_by_name(tiny_llama_dir, caplog):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    shared = model.model.layers[0].mlp.up_proj
    model.model.layers[1].mlp.up_proj = shared
    quantize_model(model)
    assert model.model.layers[0].mlp.up_proj is shared and model.model.layers[1].mlp.up_proj is shared
    assert isinstance(model.model.layers[1].mlp.down_proj, MXFP4Linear)
    assert "layers.0.mlp.up_proj: the same module is also model.layers.1.mlp.up_proj" in caplog.text


def test_subclasses_of_linear_stay_dense_by_name(tmp_path):
    from transformers import FalconConfig, FalconForCausalLM

    FalconForCausalLM(
        FalconConfig(vocab_size=256, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no layer of this model.*h.0.*FalconLinear is a subclass"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MXFP4Config())


def test_a_model_that_reads_a_packed_weight_is_told_what_to_leave_dense(tmp_path):
    from transformers import LongT5Config, LongT5ForConditionalGeneration

    config = LongT5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, local_radius=5, pad_token_id=0
    )
    LongT5ForConditionalGeneration(config).save_pretrained(tmp_path)
    load = LongT5ForConditionalGeneration.from_pretrained
    with pytest.raises(AttributeError, match="no dense `weight`.*`modules_to_not_convert`"):
        load(tmp_path, quantization_config=MXFP4Config())(IDS, decoder_input_ids=IDS)
    model = load(tmp_path, quantization_config=MXFP4Config(modules_to_not_convert=["wo", "lm_head"]))
    assert torch.isfinite(model(IDS, decoder_input_ids=IDS).logits).all()


def test_experts_that_transformers_transposes_while_loading_save_and_load(tmp_path):
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    torch.manual_seed(5)
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
    config = Qwen3VLMoeConfig(
        text_config={"vocab_size": 256, "hidden_size": 64, "rope_parameters": rope, **heads, **experts},
        vision_config=vision | {"deepstack_visual_indexes": [0]},
    )
    load = Qwen3VLMoeForConditionalGeneration.from_pretrained
    Qwen3VLMoeForConditionalGeneration(config).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=MXFP4Config())
    assert model.model.language_model.layers[0].mlp.experts.gate_up_proj_packed.dtype == torch.uint8
    model.save_pretrained(tmp_path / "packed")
    loaded, info = load(tmp_path / "packed", output_loading_info=True)
    assert info == CLEAN and torch.equal(logits(loaded), logits(model))
    dense, info = load(tmp_path / "packed", quantization_config=MXFP4Config(dequantize=True), output_loading_info=True)
    assert info == CLEAN
    torch.testing.assert_close(logits(dense), logits(model))


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification", "CausalLM"])
def test_a_head_that_the_checkpoint_lacks_is_initialised_dense_and_can_be_trained(task, tiny_llama_dir, tmp_path):
    import transformers

    auto = getattr(transformers, f"AutoModelFor{task}")
    head = "lm_head" if task == "CausalLM" else "score"
    source = tiny_llama_dir
    if task == "CausalLM":  # the whole model from a checkpoint of its base
        source = tmp_path / "base"
        transformers.AutoModel.from_pretrained(tiny_llama_dir).save_pretrained(source)
    transformers.AutoModel.from_pretrained(source, quantization_config=MXFP4Config()).save_pretrained(tmp_path / "p")
    _, expected = auto.from_pretrained(source, output_loading_info=True)  # without quantisation
    for folder, arguments in ((source, {"quantization_config": MXFP4Config()}), (tmp_path / "p", {})):
        model, info = auto.from_pretrained(folder, output_loading_info=True, **arguments)
        assert info["missing_keys"] == expected["missing_keys"] and not info["mismatched_keys"]
        layer = model.get_submodule(head)
        assert type(layer) is nn.Linear and layer.weight.requires_grad and layer.weight.std() > 0
        assert isinstance(model.model.layers[0].mlp.up_proj, MXFP4Linear)
        model(IDS).logits.square().mean().backward()
        assert layer.weight.grad.abs().sum() > 0
        model.save_pretrained(tmp_path / "again")
        loaded, info = auto.from_pretrained(tmp_path / "again", output_loading_info=True)
        assert info == CLEAN and torch.equal(logits(loaded), logits(model))


def test_a_pooler_that_the_checkpoint_lacks_stays_dense_by_name(tmp_path, caplog):
    from transformers import BertConfig, BertForMaskedLM, BertModel

    config = BertConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    BertForMaskedLM(config).save_pretrained(tmp_path / "dense")
    arguments = {"quantization_config": MXFP4Config()}
    BertForMaskedLM.from_pretrained(tmp_path / "dense", **arguments).save_pretrained(tmp_path / "packed")
    for folder, kwargs in (("dense", arguments), ("packed", {})):
        caplog.clear()
        model, info = BertModel.from_pretrained(tmp_path / folder, output_loading_info=True, **kwargs)
        assert info["missing_keys"] == {"pooler.dense.weight", "pooler.dense.bias"}
        assert type(model.pooler.dense) is nn.Linear and model.pooler.dense.weight.std() > 0
        assert isinstance(model.encoder.layer[0].output.dense, MXFP4Linear)
        assert "1 layer(s) that the checkpoint has no weight for stay dense: pooler.dense" in caplog.text


def test_a_key_mapping_of_the_caller_is_followed(tiny_llama_dir, tmp_path):
    state = {name.replace("model.layers", "b.blocks"): t for name, t in load_file(tiny_llama_dir / W).items()}
    save_file(state, tmp_path / W, metadata={"format": "pt"})
    shutil.copy(tiny_llama_dir / "config.json", tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=MXFP4Config(),
        key_mapping={"b.blocks": "model.layers"},
        output_loading_info=True,
    )
    direct = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=MXFP4Config())
    assert info == CLEAN and torch.equal(logits(model), logits(direct))


def test_inputs_that_are_no_multiple_of_the_block_stay_dense_with_one_warning(tmp_path, caplog):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes)).save_pretrained(tmp_path)
    with caplog.at_level("WARNING", logger="transformers"):
        import transformers

        transformers.utils.logging.enable_propagation()
        try:
            model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MXFP4Config())
        finally:
            transformers.utils.logging.disable_propagation()
    warnings = [record.getMessage() for record in caplog.records if "stay dense" in record.getMessage()]
    assert len(warnings) == 1 and "down_proj: 48 inputs are not a multiple of block_size=32" in warnings[0]
    assert isinstance(model.model.layers[0].mlp.down_proj, nn.Linear)
    assert isinstance(model.model.layers[0].mlp.up_proj, MXFP4Linear)


def test_sharded_checkpoints_and_dtypes(tiny_llama_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    packed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "sharded", dtype=torch.bfloat16, quantization_config=MXFP4Config(), device_map="cpu"
    )
    assert packed.dtype == torch.bfloat16 and packed.lm_head.weight.dtype == torch.bfloat16
    packed.save_pretrained(tmp_path / "packed", max_shard_size="50KB")
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16)
    assert torch.equal(logits(again), logits(packed))


def test_generation_in_a_left_padded_batch_equals_the_dequantised_model(tiny_llama_dir):
    model = AutoModelForCausalLM.from_pretrained(
        tiny_llama_dir, quantization_config=MXFP4Config(compute_dtype="float32")
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir, padding_side="left")
    batch = tokenizer(["a", "a longer prompt", "mid one"], return_tensors="pt", padding=True)
    options = {"max_new_tokens": 12, "pad_token_id": 0}
    outputs = [model.generate(**batch, do_sample=False, num_beams=beams, **options) for beams in (1, 3)]
    dense = model.dequantize()
    for beams, output in zip((1, 3), outputs, strict=True):
        assert torch.equal(output, dense.generate(**batch, do_sample=False, num_beams=beams, **options))


def test_bfloat16_generation_runs_in_a_batch(tiny_llama_dir):
    model = AutoModelForCausalLM.from_pretrained(
        tiny_llama_dir, dtype=torch.bfloat16, quantization_config=MXFP4Config(activation="mxfp4")
    )
    out = model.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert out.shape == (3, 26)


def test_memory_footprint_is_the_bits_of_the_format(biased_dir):
    model = AutoModelForCausalLM.from_pretrained(biased_dir, quantization_config=MXFP4Config())
    packed = sum(
        module.out_features * (module.in_features // 2 + module.in_features // 32 + -(-module.in_features // 128))
        for module in model.modules()
        if isinstance(module, MXFP4Linear)
    )
    dense = sum(p.numel() * 4 for p in model.parameters() if p.is_floating_point())
    assert model.get_memory_footprint() == pytest.approx(packed + dense, rel=0.02)


def test_calibration_lowers_the_error_weighted_by_the_inputs(biased_dir):
    dense = AutoModelForCausalLM.from_pretrained(biased_dir)
    with torch.no_grad():  # a model whose inputs differ in size by channel
        for layer in dense.model.layers:
            layer.input_layernorm.weight.copy_(torch.logspace(-1, 1, 160))
    dense.save_pretrained(biased_dir.parent / "uneven")
    calibration = torch.randint(1, 256, (4, 64), generator=torch.Generator().manual_seed(1))
    stats = collect_channel_stats(dense, [calibration])
    weights = {name: parameter.detach().clone() for name, parameter in dense.named_parameters()}

    def error(**arguments) -> float:
        model = quantize_model(AutoModelForCausalLM.from_pretrained(biased_dir.parent / "uneven"), **arguments)
        return sum(
            ((module.dequantize() - weights[f"{name}.weight"]).square() * stats[name]).sum().item()
            for name, module in model.named_modules()
            if isinstance(module, MXFP4Linear)
        )

    weighted = error(calibration=calibration)
    searched = error(calibration=calibration, config=MXFP4Config(search_exponents=True))
    assert searched < weighted < 0.85 * error()


def test_channel_statistics_are_the_mean_squares_of_the_inputs(tiny_llama_dir, mixtral_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    seen = []
    module = model.model.layers[1].mlp.down_proj
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    stats = collect_channel_stats(model, IDS.split(1))
    handle.remove()
    expected = torch.cat(seen).flatten(0, 1).square().mean(0)
    torch.testing.assert_close(stats["model.layers.1.mlp.down_proj"], expected)

    experts = AutoModelForCausalLM.from_pretrained(mixtral_dir)
    stats = collect_channel_stats(experts, IDS.split(1))
    assert stats["model.layers.0.mlp.experts.gate_up_proj"].shape == (64,)
    assert stats["model.layers.0.mlp.experts.down_proj"].shape == (96,)


def test_statistics_from_a_file_equal_a_calibration(tiny_llama_dir, tmp_path):
    dense = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    save_file(collect_channel_stats(dense, [IDS]), tmp_path / "stats.safetensors")
    config = MXFP4Config(channel_stats=str(tmp_path / "stats.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=config)
    assert torch.equal(logits(loaded), logits(quantize_model(dense, calibration=IDS)))


@pytest.mark.parametrize(
    "calibration, message",
    [
        (torch.tensor([[1, 999]]), "has the token 999, and the model's vocabulary has 256"),
        (torch.rand(2, 3), "token ids of `calibration` must be integers, got torch.float32"),
        ([[0.5, 1.5]], "token ids of `calibration` must be integers"),
        (torch.zeros(0, dtype=torch.long), "`calibration` is empty"),
        (5, "`calibration` must be text, rows or token ids, got 5"),
        ([5], "`calibration` must hold text, rows or lists of token ids, got 5"),
    ],
)
def test_calibration_that_is_no_text_or_ids_is_refused(calibration, message, tiny_llama_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    with pytest.raises(ValueError, match=message):
        quantize_model(model, calibration=calibration)


def test_text_calibration_needs_a_tokenizer_and_takes_rows(tiny_llama_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    with pytest.raises(ValueError, match="`tokenizer` is needed"):
        quantize_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), calibration="some text")
    with pytest.raises(ValueError, match="neither 'input_ids' nor 'text'"):
        quantize_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), calibration=[{"body": "x"}])
    with pytest.raises(ValueError, match="`calibration` is empty"):
        quantize_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), calibration=[])
    rows = [{"text": "some text " * 40}]
    model = quantize_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), calibration=rows, tokenizer=tokenizer)
    assert model.is_quantized


# -- bad input --------------------------------------------------------------------------------------------------------


def test_a_nan_weight_is_named(tiny_llama_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(ValueError, match="model.layers.1.mlp.up_proj.weight: the weight has NaN"):
        quantize_model(model)
    broken = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    broken.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("inf")
    broken.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="^model.layers.1.mlp.up_proj.weight: the weight has NaN"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MXFP4Config())


def test_a_refused_model_is_left_as_it_was(tiny_llama_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    expected = logits(model)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.double()
    weight.data[0, 0] = 1e300  # finite in float64, in which nothing is computed
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight: the weight has NaN or infinite"):
        quantize_model(model)
    assert not any(isinstance(module, MXFP4Linear) for module in model.modules())
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model.model.layers[1].mlp.up_proj.to("meta")
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight: the weight is on the meta device"):
        quantize_model(model)
    model.model.layers[1].mlp.up_proj = (
        AutoModelForCausalLM.from_pretrained(tiny_llama_dir).model.layers[1].mlp.up_proj
    )
    assert torch.equal(logits(model), expected)


def test_what_is_no_model_or_configuration_is_refused(tiny_llama_dir):
    with pytest.raises(ValueError, match="must be a PreTrainedModel of transformers, got Linear"):
        quantize_model(nn.Linear(64, 64))
    with pytest.raises(ValueError, match="`config` must be an MXFP4Config or None, got dict"):
        quantize_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), {"block_size": 32})


@pytest.mark.parametrize("folder", ["tiny_llama_dir", "mixtral_dir"])
def test_a_quantised_model_is_pickled_and_copied_whole(folder, request):
    model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(folder), quantization_config=MXFP4Config())
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(logits(twin), logits(model))
        assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]


@pytest.fixture
def packed_dir(tiny_llama_dir, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=MXFP4Config()).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("suffix", ["scale", "mbs"])
def test_a_missing_scale_tensor_is_named_before_anything_loads(packed_dir, suffix):
    tensors = load_file(packed_dir / "model.safetensors")
    del tensors[f"model.layers.0.mlp.up_proj.weight_{suffix}"]
    save_file(tensors, packed_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"model.layers.0.mlp.up_proj.weight_{suffix}"):
        AutoModelForCausalLM.from_pretrained(packed_dir)


def test_a_truncated_file_is_named(packed_dir):
    path = packed_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(OSError, match="model.safetensors is not a complete safetensors file"):
        AutoModelForCausalLM.from_pretrained(packed_dir)


def test_a_damaged_configuration_is_refused(packed_dir):
    config = json.loads((packed_dir / "config.json").read_text())
    config["quantization_config"]["macro_block_size"] = None
    (packed_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not go with macro_block_size=None"):
        AutoModelForCausalLM.from_pretrained(packed_dir)


def test_refusals_before_work_starts(tiny_llama_dir, packed_dir):
    with pytest.raises(ValueError, match="`dequantize=True` is for a checkpoint that is packed"):
        AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=MXFP4Config(dequantize=True))
    with pytest.raises(ValueError, match="is not a file"):
        config = MXFP4Config(channel_stats="nowhere.safetensors")
        AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=config)
    with pytest.raises(ValueError, match="needs the inputs' statistics"):
        config = MXFP4Config(weight_search="weighted")
        AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=config)
    with pytest.raises(ValueError, match="no layer of this model can be held"):
        config = MXFP4Config(modules_to_not_convert=["model", "lm_head"])
        AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=config)
    with pytest.raises(ValueError, match="quantised already"):
        quantize_model(AutoModelForCausalLM.from_pretrained(packed_dir))


def test_statistics_of_another_model_are_refused(tiny_llama_dir, biased_dir, tmp_path):
    stats = collect_channel_stats(AutoModelForCausalLM.from_pretrained(biased_dir), [IDS])
    save_file(stats, tmp_path / "stats.safetensors")
    config = MXFP4Config(channel_stats=str(tmp_path / "stats.safetensors"))
    with pytest.raises(ValueError, match=r"channel statistics of .* have shape \(160,\), not \(64,\)"):
        AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=config)


def test_an_unfinished_copy_is_not_loaded_as_a_whole(packed_dir, tmp_path_factory):
    partial = tmp_path_factory.mktemp("copy")
    shutil.copy(packed_dir / "config.json", partial)
    with pytest.raises(OSError):
        AutoModelForCausalLM.from_pretrained(partial)


def test_experts_stored_transposed_stay_dense_by_name(tmp_path):
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"],
        pad_token_id=0,
        eos_token_id=0,
    )
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MXFP4Config())
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.is_floating_point() and experts.gate_up_proj.dim() == 3
    assert isinstance(model.model.layers[0].self_attn.q_proj, MXFP4Linear)
