"""The settings: what they mean, what they refuse, through JSON and back; models that cannot be patched."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForSequenceClassification, LlamaModel

from hf_ext import MXFP4Config
from hf_ext.model_patches.turboconn import TurboConnConfig, modeling_turboconn, patch
from hf_ext.model_patches.turboconn.patching import check_config


@pytest.mark.parametrize(
    ("links", "layers", "expected"),
    [
        ("dense", 6, [(3, 0), (4, 1), (5, 2)]),
        ("dense", 5, [(2, 0), (3, 1)]),
        ("cascade", 6, [(5, 0), (4, 1), (3, 2)]),
        ("all", 4, [(2, 0), (3, 0), (2, 1), (3, 1)]),
        ("sparse", 6, [(5, 0)]),
        ([[4, 2], [5, 0]], 6, [(5, 0), (4, 2)]),
    ],
)
def test_link_sets(links, layers, expected):
    assert TurboConnConfig(links=links).pairs(layers) == expected


def test_dense_and_sparse_coincide_for_two_layers():
    assert TurboConnConfig().pairs(2) == TurboConnConfig(links="sparse").pairs(2) == [(1, 0)]


def test_settings_go_through_json():
    settings = TurboConnConfig(links=[(3, 0), (2, 1)], rank=8, gate="input", train_mode="auto", bptt_window=2)
    assert TurboConnConfig.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    assert TurboConnConfig().history == 9 and TurboConnConfig(group_size=4).history == 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"links": "dens"}, r"links is 'dens'; it must be one of 'dense', 'cascade', 'all', 'sparse' or a list"),
        ({"links": []}, r"links is \[\]"),
        ({"links": 3}, "links is 3"),
        ({"links": [(0, 2)]}, r"pair \(0, 2\): the source must lie above the target"),
        ({"links": [(2, 2)]}, r"pair \(2, 2\): the source must lie above"),
        ({"links": [(2, -1)]}, r"0 <= target < source"),
        ({"links": [(3, 0), (3, 0)]}, r"pair \(3, 0\) twice"),
        ({"links": [(3, 0, 1)]}, "a link is a pair"),
        ({"links": [(3.0, 0)]}, "a link is a pair"),
        ({"gate": "tanh"}, "gate is 'tanh'; it must be one of 'none', 'scalar', 'input'"),
        ({"train_mode": "parallel"}, "train_mode is 'parallel'; it must be one of 'exact', 'jacobi', 'auto'"),
        ({"group_size": 0}, "group_size is 0; it must be a whole number of at least 1"),
        ({"group_size": 1.5}, "group_size is 1.5"),
        ({"n_iters": 0}, "n_iters is 0"),
        ({"gap_every": 0}, "gap_every is 0"),
        ({"gap_tol": 0}, "gap_tol is 0; it must be a number above 0"),
        ({"rank": 0}, "rank is 0; it must be a whole number of at least 1 or None"),
        ({"bptt_window": True}, "bptt_window is True"),
        ({"group_size": 4, "history": 3}, r"history is 3; it must be a whole number of at least 4 \(group_size\)"),
        ({"target_scale": 1}, "target_scale is 1; it must be True or False"),
    ],
)
def test_settings_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TurboConnConfig(**fields)


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="unknown TurboConn setting 'gates'; the settings are links, rank, gate"):
        TurboConnConfig.from_dict({"gates": "none"})
    with pytest.raises(ValueError, match="turboconn is 'dense'; it must be a dictionary"):
        TurboConnConfig.from_dict("dense")


def test_settings_that_do_not_fit_the_model_are_refused_before_anything_changes(tiny):
    model = tiny()
    for settings, message in (
        (TurboConnConfig(links=[(4, 0)]), r"pair \(4, 0\), but the model has 4 layers.*source <= 3"),
        (TurboConnConfig(rank=33), "rank is 33; it must be at most the model's hidden_size, 32"),
    ):
        with pytest.raises(ValueError, match=message):
            patch(model, settings)
        assert type(model).__name__ == "LlamaForCausalLM" and not hasattr(model.config, "turboconn")
    with pytest.raises(ValueError, match="the model has 1 layer; a link needs"):
        patch(tiny(num_hidden_layers=1))


def test_models_that_cannot_be_patched_are_refused_by_name(tiny, linked, tiny_llama_dir):
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    config.vocab_size = 16
    everything = "LlamaForCausalLM, MistralForCausalLM, Olmo2ForCausalLM.*Qwen3ForCausalLM, SmolLM3ForCausalLM"
    for model, name in (
        (GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=2, n_head=2)), "GPT2LMHeadModel"),
        (LlamaModel(config), "LlamaModel"),
        (LlamaForSequenceClassification(config), "LlamaForSequenceClassification"),
    ):
        with pytest.raises(ValueError, match=f"{name} .*is not supported; TurboConn patches .*{everything}"):
            patch(model)
    with pytest.raises(ValueError, match="Linear is not a transformers model"):
        patch(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="TurboConnLlamaForCausalLM has TurboConn links already.*unpatch"):
        patch(linked())
    quantized = type(tiny()).from_pretrained(tiny_llama_dir, quantization_config=MXFP4Config())
    with pytest.raises(ValueError, match="LlamaForCausalLM is quantized; patch the model in full precision"):
        patch(quantized)
    with pytest.raises(ValueError, match="dtype: loading options need the name or folder"):
        patch(tiny(), TurboConnConfig(), dtype=torch.float32)
    with pytest.raises(ValueError, match="use_bidirectional_attention=True"):
        patch(bidirectional := tiny("Gemma3", use_bidirectional_attention=True))
    assert type(bidirectional).__name__ == "Gemma3ForCausalLM"


def test_settings_of_another_kind_are_refused(tiny):
    with pytest.raises(ValueError, match=r"config is {'rank': 3}; it must be a TurboConnConfig"):
        patch(tiny(), {"rank": 3})


def test_a_class_of_the_same_name_from_elsewhere_is_refused(tiny):
    model = tiny()
    model.__class__ = type("LlamaForCausalLM", (type(model),), {})
    with pytest.raises(ValueError, match="patches transformers' own LlamaForCausalLM"):
        patch(model)


def test_a_checkpoint_is_judged_by_its_config_alone():
    check_config(tiny_values := LlamaConfig(architectures=["LlamaForCausalLM"]).to_dict(), TurboConnConfig())
    with pytest.raises(ValueError, match="is quantized"):
        check_config({**tiny_values, "quantization_config": {"quant_method": "gptq"}}, TurboConnConfig())


def test_generated_classes_are_found_by_name_and_others_are_not():
    assert modeling_turboconn.TurboConnPhi3ForCausalLM.__name__.endswith("Phi3ForCausalLM")
    assert modeling_turboconn.TurboConnGemma3TextModel.__mro__[0].__module__ == modeling_turboconn.__name__
    for name in ("TurboConnGPT2LMHeadModel", "TurboConnLlamaConfig", "nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(modeling_turboconn, name)


# --- while it runs -------------------------------------------------------------------------------------------------


def test_packed_rows_that_attention_cannot_keep_apart_are_refused(linked, ids):
    # Neither runs on a CPU, nor gets that far: the refusal comes before any work.
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    for name in ("flash_attention_2", "flex_attention"):
        model = linked()
        model.config._attn_implementation_internal = name
        with pytest.raises(ValueError, match=f"rows are packed.*{name!r}.*'sdpa' or 'eager', train_mode='jacobi'"):
            model(ids(1, 6), position_ids=positions, use_cache=False)
    with pytest.raises(ValueError, match="packed rows need position_ids"):
        linked()(ids(1, 6), cu_seq_lens_q=torch.tensor([0, 3, 6]))


def test_masks_that_cannot_be_cut_into_chunks_are_refused(linked, ids):
    model, tokens = linked(), ids(1, 6)
    with pytest.raises(ValueError, match="4-D tensor.*each of the 6 tokens"):
        model(tokens, attention_mask=torch.ones(1, 1, 6, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model.model(tokens, inputs_embeds=model.get_input_embeddings()(tokens))


def test_a_large_jacobi_error_is_warned_about(linked, ids, monkeypatch):
    said = []
    monkeypatch.setattr(modeling_turboconn.logger, "warning", said.append)
    for mode, advice in (("jacobi", "use train_mode='exact'"), ("auto", "exact training is used")):
        linked(scale=0.3, train_mode=mode, n_iters=2).train()(ids())
        assert "2 Jacobi passes are off by" in said[-1] and advice in said[-1]
    assert len(said) == 2
