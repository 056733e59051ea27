"""Saved and loaded, copied, pickled, resized, unpatched: the links go along, and never get lost without a word."""

import copy
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_ext import MXFP4Config
from hf_ext.model_patches.turboconn import (
    TurboConnConfig,
    configuration_turboconn,
    modeling_turboconn,
    patch,
    unpatch,
)

# Run in a process where hf_ext cannot be imported: neither installed nor from the checkout.
WITHOUT_HF_EXT = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_ext":
            raise ModuleNotFoundError("No module named 'hf_ext'")
sys.meta_path.insert(0, Block())
"""


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True, **options)


def complete(info: dict) -> bool:
    return not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_saved_and_loaded_the_logits_are_the_same(family, linked, ids, tmp_path):
    model, tokens = linked(family, rank=3, gate="input", links="all", group_size=2), ids()
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin")) and (tmp_path / "model.safetensors").is_file()
    loaded, info = load(tmp_path)
    assert complete(info) and type(loaded).__name__ == type(model).__name__
    assert type(loaded) is not type(model)  # its class came with the folder
    assert loaded.config._attn_implementation == model.config._attn_implementation
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
    # And again from there: the code travels on.
    loaded.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert len(list((tmp_path / "again").glob("model-*.safetensors"))) > 1
    again, info = load(tmp_path / "again")
    assert complete(info)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)
        # What a remote class can do, the functions of this package can use.
        assert type(unpatch(again)).__name__ == f"{family}ForCausalLM"


@pytest.mark.slow
def test_a_fresh_process_without_hf_ext_needs_the_flag_and_then_loads_and_generates(
    linked, ids, tmp_path, fresh_python
):
    model, tokens = linked("Qwen3", group_size=2), ids()
    model.save_pretrained(tmp_path / "turbo")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "attention_mask": tokens * 0 + 1}
    expected = [model.generate(tokens, num_beams=n, do_sample=False, **options).tolist() for n in (1, 3)]
    (tmp_path / "empty").mkdir()
    out = fresh_python(
        WITHOUT_HF_EXT + "import json, os, torch\n"
        "sys.stdin = open(os.devnull)\n"  # not a terminal: there is nobody to ask
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        f"folder, tokens = {str(tmp_path / 'turbo')!r}, torch.tensor({tokens.tolist()})\n"
        "for auto in (AutoConfig, AutoModelForCausalLM):\n"
        "    try:\n"
        "        auto.from_pretrained(folder)\n"
        "    except ValueError as error:\n"
        "        assert 'trust_remote_code=True' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError('loaded without a word')\n"
        "model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()\n"
        "options = dict(max_new_tokens=6, min_new_tokens=6, attention_mask=tokens * 0 + 1, do_sample=False)\n"
        "print()\nprint(json.dumps([model.generate(tokens, num_beams=n, **options).tolist() for n in (1, 3)]))\n"
        "assert 'hf_ext' not in sys.modules\n",
        cwd=tmp_path / "empty",
    )
    assert json.loads(out.splitlines()[-1]) == expected


def test_the_config_names_its_own_model_type_and_holds_the_settings(linked, tmp_path):
    settings = TurboConnConfig(links=[(3, 0), (2, 1)], rank=5, group_size=4, gate="scalar", bptt_window=3)
    linked(**settings.to_dict()).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "turboconn_llama" and written["architectures"] == ["TurboConnLlamaForCausalLM"]
    assert written["auto_map"] == {
        "AutoConfig": "configuration_turboconn.TurboConnLlamaConfig",
        "AutoModelForCausalLM": "modeling_turboconn.TurboConnLlamaForCausalLM",
    }
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert TurboConnConfig.from_dict(config.turboconn) == settings
    built = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert built.model.turbo_links.into_0.up.abs().max() == 0 and built.model.turbo_links.into_0.down.std() > 0.1


def test_a_base_checkpoint_loads_into_the_patched_class_with_links_at_zero(tiny, ids, tmp_path):
    # The library initialises what a checkpoint lacks through the nested model's own method.
    base, tokens = tiny("Qwen3"), ids()
    base.save_pretrained(tmp_path)
    patched = patch(copy.deepcopy(base), TurboConnConfig(rank=4))
    cls = modeling_turboconn.TurboConnQwen3ForCausalLM
    loaded, info = cls.from_pretrained(tmp_path, config=patched.config, output_loading_info=True)
    names = {f"model.turbo_links.into_{i}.{part}" for i in range(2) for part in ("up", "down")}
    assert set(info["missing_keys"]) == names and not info["unexpected_keys"]
    links = loaded.model.turbo_links
    assert links.into_0.up.abs().max() == 0 and 0.1 < links.into_0.down.std() < 0.3
    with torch.no_grad():
        assert (loaded.eval()(tokens).logits - base(tokens).logits).abs().max() < 2e-6


def test_keep_links_false_writes_the_base(linked, tiny, ids, tmp_path):
    model, tokens = linked(), ids()
    with torch.no_grad():
        expected = model(tokens).logits
        model.save_pretrained(tmp_path / "turbo")  # leaves its auto_map in the config
        model.save_pretrained(tmp_path / "base", keep_links=False)
        state = {f"{name}": tensor for name, tensor in model.state_dict().items()}
        model.save_pretrained(tmp_path / "given", keep_links=False, state_dict=state)
        assert torch.equal(model(tokens).logits, expected)
    model.save_pretrained(tmp_path / "turbo again")
    assert "auto_map" in json.loads((tmp_path / "turbo again" / "config.json").read_text())
    for name in ("base", "given"):
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["model_type"] == "llama" and not {"turboconn", "auto_map"} & set(written)
        assert not list((tmp_path / name).glob("*.py"))
        base, info = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert complete(info)
        with torch.no_grad():
            assert torch.equal(base.eval()(tokens).logits, tiny()(tokens).logits)


def test_unpatch_after_saving_leaves_a_plain_base(linked, tiny, ids, tmp_path):
    model, tokens = linked(), ids()
    model.save_pretrained(tmp_path / "turbo")
    unpatch(model).save_pretrained(tmp_path / "base")
    written = json.loads((tmp_path / "base" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"] and "auto_map" not in written
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        assert torch.equal(base(tokens).logits, tiny()(tokens).logits)
    patch(model, TurboConnConfig(links="sparse"))  # and other links may be put on
    assert list(dict(model.model.turbo_links.named_children())) == ["into_0"]
    with pytest.raises(ValueError, match="LlamaForCausalLM has no TurboConn links"):
        unpatch(tiny())


def test_a_deep_copy_uses_its_own_links(linked, fill, ids):
    model, tokens = linked(), ids()
    twin = fill(copy.deepcopy(model), scale=0.5, seed=7)
    with torch.no_grad():
        expected = model(tokens).logits
        assert (twin(tokens).logits - expected).abs().max() > 1e-3
        assert torch.equal(model(tokens).logits, expected)
        unpatch(twin)
        assert torch.equal(model(tokens).logits, expected)


def test_a_pickled_model_works(linked, ids, tmp_path, monkeypatch):
    model, tokens = linked(gate="scalar"), ids()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
        assert torch.equal(unpatch(loaded)(tokens).logits, unpatch(model)(tokens).logits)
    # In a fresh process the classes are not there yet; they are made when pickle asks for them.
    for name in ("TurboConnLlamaForCausalLM", "TurboConnLlamaModel"):
        monkeypatch.delattr(modeling_turboconn, name)
    monkeypatch.delattr(configuration_turboconn, "TurboConnLlamaConfig")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(again) is modeling_turboconn.TurboConnLlamaForCausalLM is not type(loaded)


def test_token_embeddings_are_resized(linked, ids, tmp_path):
    for tied in (True, False):
        model, tokens = linked(model={"tie_word_embeddings": tied}), ids()
        with torch.no_grad():
            expected = model(tokens).logits
            model.resize_token_embeddings(70)
            assert torch.equal(model(tokens).logits[..., :64], expected)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        model.save_pretrained(tmp_path)
        loaded, info = load(tmp_path)
        assert complete(info) and loaded.config.vocab_size == 70
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        with torch.no_grad():
            assert torch.equal(loaded.eval()(tokens).logits[..., :64], expected)


def test_bf16_is_kept(linked, tiny, ids, tmp_path):
    model = patch(tiny().to(torch.bfloat16), TurboConnConfig())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path)
    loaded, _ = load(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.isfinite(loaded.eval()(ids()).logits).all()


def test_a_patched_checkpoint_may_be_quantized_when_it_is_loaded(linked, ids, tmp_path):
    model, tokens = linked(model={"hidden_size": 64, "intermediate_size": 64}), ids()
    model.save_pretrained(tmp_path)
    packed = AutoModelForCausalLM.from_pretrained(
        tmp_path, trust_remote_code=True, quantization_config=MXFP4Config()
    ).eval()
    assert type(packed.model.layers[0].mlp.up_proj).__name__ == "MXFP4Linear"
    assert torch.equal(packed.model.turbo_links.into_0.weight, model.model.turbo_links.into_0.weight)
    with torch.no_grad():
        found = packed(tokens).logits
        packed.set_links(False)
        assert (packed(tokens).logits - found).abs().max() > 1e-3


def test_patch_loads_a_folder_by_its_name(tiny_llama_dir, tmp_path):
    model = patch(str(tiny_llama_dir), TurboConnConfig(links="sparse"), dtype=torch.bfloat16)
    assert type(model).__name__ == "TurboConnLlamaForCausalLM" and model.dtype == torch.bfloat16
    assert model.model.turbo_links.into_0.weight.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tiny_llama_dir)("a").input_ids


def test_a_model_loaded_by_its_own_code_is_unpatched_and_patched_again(linked, tiny, ids, tmp_path):
    linked().save_pretrained(tmp_path / "turbo")
    loaded, _ = load(tmp_path / "turbo")
    assert loaded.config.model_type == "turboconn_llama"
    unpatch(loaded)
    assert loaded.config.model_type == "llama" and type(loaded) is type(tiny())
    loaded.save_pretrained(tmp_path / "base")
    again = patch(str(tmp_path / "base"), TurboConnConfig(links="sparse")).eval()
    assert again.config.model_type == "turboconn_llama"  # and not what loading has written into the config
    patch(loaded.eval(), TurboConnConfig(links="sparse"))
    with torch.no_grad():
        assert torch.equal(loaded(ids()).logits, again(ids()).logits)


def test_another_model_of_the_same_config_is_left_alone(tiny, tmp_path):
    first = tiny()
    second = type(first)(first.config)
    patch(first, TurboConnConfig())
    assert type(second.config).__name__ == "LlamaConfig" and not hasattr(second.config, "turboconn")
    held = [module.config for module in first.modules() if hasattr(module, "config")]
    assert len(held) > 2 and all(config is first.config for config in held)
    second.save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is type(second)
    patch(second, TurboConnConfig())
