"""Caches on disk: the same logits from a fresh process, and nothing is read that is not what it says."""

import copy
import json

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_ext import PatternKVCache, PatternKVConfig
from hf_ext.cache_impls.patternkv.files import CONFIG_NAME, TENSORS_NAME, describe


@pytest.fixture
def filled(tiny, prompts, small):
    """`filled(kind, **fields)`: a model and its cache of two rows, one padded, after a prompt and decoding."""

    def make(kind: str = "llama", **fields):
        model = tiny(kind)
        cache = PatternKVCache(model.config, **{**small, "nbits": 2, **fields})
        model.generate(**prompts(2, 60, [0, 13]), cache=cache, max_new_tokens=30, do_sample=False)
        return model, cache

    return make


@pytest.fixture
def saved(filled, tmp_path):
    """A model, its cache, and the folder that the cache was saved to."""
    model, cache = filled()
    cache.save_pretrained(tmp_path / "cache", token_ids=torch.arange(178).view(2, 89))
    return model, cache, tmp_path / "cache"


def next_logits(model, cache, steps: int = 50) -> torch.Tensor:
    """Logits of some more tokens, enough of them to pack another window."""
    mask = torch.ones(2, cache.get_seq_length(), dtype=torch.int64)
    mask[1, :13] = 0
    found = []
    with torch.no_grad():
        for step in range(steps):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], 1)
            found.append(model(torch.full((2, 1), 1 + step), attention_mask=mask, cache=cache).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("patterns", [0, 8])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("implementation", ["sdpa", "patternkv"])
def test_a_reloaded_cache_goes_on_with_the_same_logits_bit_for_bit(
    filled, tmp_path, bits, patterns, kind, implementation
):
    model, cache = filled(kind, nbits=bits, num_patterns=patterns)
    cache.save_pretrained(tmp_path)
    again = PatternKVCache.from_pretrained(tmp_path, model.config)
    assert again.memory_report()["bits_per_element"] == cache.memory_report()["bits_per_element"]
    model.set_attn_implementation(implementation)
    twin = copy.deepcopy(cache)
    expected = next_logits(model, cache)
    assert torch.equal(next_logits(model, again), expected)
    assert torch.equal(next_logits(model, twin), expected)


def test_a_fresh_process_goes_on_with_the_same_logits(tiny_llama_dir, prompts, small, tmp_path, fresh_python):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir).eval()
    cache = PatternKVCache(model.config, **small, nbits=2)
    with torch.no_grad():
        model(**prompts(2, 60, [0, 13]), cache=cache)
    cache.save_pretrained(tmp_path / "cache")
    save_file({"logits": next_logits(model, cache)}, tmp_path / "logits.safetensors")
    fresh_python(
        "import torch\nfrom hf_ext import PatternKVCache\nfrom safetensors.torch import load_file\n"
        "from transformers import AutoModelForCausalLM\n"
        "torch.set_num_threads(1)\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tiny_llama_dir)!r}).eval()\n"
        "cache = PatternKVCache.from_pretrained('cache', model.config)\n"
        "mask = torch.ones(2, 60, dtype=torch.int64)\nmask[1, :13] = 0\nfound = []\n"
        "with torch.no_grad():\n"
        "    for step in range(50):\n"
        "        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], 1)\n"
        "        found.append(model(torch.full((2, 1), 1 + step), attention_mask=mask, cache=cache).logits)\n"
        "assert torch.equal(torch.cat(found, 1), load_file('logits.safetensors')['logits'])\n",
        cwd=tmp_path,
    )


def test_token_ids_are_kept_if_given(saved, filled, tmp_path):
    model, cache, folder = saved
    assert PatternKVCache.from_pretrained(folder, model.config).token_ids == torch.arange(178).view(2, 89).tolist()
    cache.save_pretrained(tmp_path / "without")
    assert PatternKVCache.from_pretrained(tmp_path / "without", model.config).token_ids is None


def test_ids_that_make_no_tensor_leave_the_files_as_they_were(saved):
    model, cache, folder = saved
    with pytest.raises(ValueError, match="expected sequence of length 2"):
        cache.save_pretrained(folder, token_ids=[[1, 2], [3]])
    assert PatternKVCache.from_pretrained(folder, model.config).token_ids == torch.arange(178).view(2, 89).tolist()


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu", 0)])
def test_the_cpu_may_be_named_by_its_number(saved, device):
    model, cache, folder = saved
    again = PatternKVCache.from_pretrained(folder, model.config, device=device)
    assert again.memory_report() == cache.memory_report()


def test_files_are_as_small_as_what_is_kept(saved):
    _, cache, folder = saved
    report = cache.memory_report()
    size = (folder / TENSORS_NAME).stat().st_size
    assert report["bytes"] <= size + 100 and size < report["bytes"] + 8000


def test_caches_that_are_empty_cropped_or_of_float16_are_saved(tiny, filled, small, tmp_path):
    model, cache = filled()
    empty = PatternKVCache(model.config, **small)
    empty.save_pretrained(tmp_path / "empty")
    again = PatternKVCache.from_pretrained(tmp_path / "empty", model.config)
    assert again.get_seq_length() == 0 and not again.layers[0].is_initialized
    cache.crop(-3)
    cache.save_pretrained(tmp_path / "cropped")
    again = PatternKVCache.from_pretrained(tmp_path / "cropped", model.config)
    assert torch.equal(next_logits(model, again), next_logits(model, cache))
    half = copy.deepcopy(model).half()
    cache = PatternKVCache(half.config, **small)
    with torch.no_grad():
        half(torch.arange(60)[None], cache=cache)
    cache.save_pretrained(tmp_path / "half")
    again = PatternKVCache.from_pretrained(tmp_path / "half", half.config)
    with pytest.raises(ValueError, match="in torch.float16 and got torch.float32: load the model with dtype=torch.fl"):
        model(torch.arange(3)[None], cache=again)


def test_push_to_hub_uploads_the_folder(saved, monkeypatch):
    _, cache, _ = saved
    sent = {}

    def create(self, repo_id, **options):
        sent.update(options)
        return f"hub/{repo_id}"

    monkeypatch.setattr(HfApi, "create_repo", create)

    def upload(self, *, repo_id, folder_path, **_):
        from pathlib import Path

        sent[repo_id] = sorted(path.name for path in Path(folder_path).iterdir())

    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert cache.push_to_hub("me/prefix", private=True, token_ids=[[1]]) == "hub/me/prefix"
    assert sent["me/prefix"] == [TENSORS_NAME, CONFIG_NAME] or sent["me/prefix"] == [CONFIG_NAME, TENSORS_NAME]
    assert sent["private"] and sent["repo_type"] == "dataset"


def test_description_needs_no_model(saved):
    _, cache, folder = saved
    found = describe(folder)
    assert found["model"]["model_type"] == "llama" and found["patternkv_config"]["nbits"] == 2
    assert (found["rows"], found["tokens"], found["token_ids"]) == (2, 89, True)
    assert found["bytes"] == cache.memory_report()["bytes"]
    assert [layer["packed_tokens"] for layer in found["layers"]] == [64, 64]
    bits = [(layer["bits_key"] + layer["bits_value"]) / 2 for layer in found["layers"]]
    assert sum(bits) / 2 == pytest.approx(cache.memory_report()["bits_per_element"])


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, r"of another model: layer_types="),
        ({"num_key_value_heads": 1}, r"of another model: num_key_value_heads=2, not 1"),
        ({"head_dim": 32}, r"of another model: head_dim=16, not 32"),
        ({"hidden_size": 128}, r"of another model: hidden_size=64, not 128"),
    ],
)
def test_a_file_of_another_model_is_refused(saved, change, message):
    model, _, folder = saved
    config = LlamaConfig(**{**model.config.to_dict(), **change})
    with pytest.raises(ValueError, match=message):
        PatternKVCache.from_pretrained(folder, config)


def test_a_file_of_a_model_of_another_kind_or_name_is_refused(saved, tiny):
    model, _, folder = saved
    with pytest.raises(ValueError, match="of another model: model_type='llama', not 'qwen3'"):
        PatternKVCache.from_pretrained(folder, tiny("qwen3").config)
    config = copy.deepcopy(model.config)
    config._name_or_path = "org/other"
    with pytest.raises(ValueError, match="of another model: name_or_path='', not 'other'"):
        PatternKVCache.from_pretrained(folder, config)


def test_a_file_of_another_configuration_is_refused(saved, small):
    model, _, folder = saved
    with pytest.raises(ValueError, match="was written with nbits=2, not 4, nbits_key=2, not 4, nbits_value=2, not 4"):
        PatternKVCache.from_pretrained(folder, model.config, patternkv_config=PatternKVConfig(**small, nbits=4))
    same = PatternKVConfig(**small, nbits=2, return_packed=False)
    assert PatternKVCache.from_pretrained(folder, model.config, patternkv_config=same).patternkv_config is same


def rewrite(folder, **changes):
    path = folder / CONFIG_NAME
    stored = json.loads(path.read_text())
    stored.update(changes)
    path.write_text(json.dumps(stored))


def change_layer(**changes):
    def damage(folder):
        layers = json.loads((folder / CONFIG_NAME).read_text())["layers"]
        layers[1].update(changes)
        rewrite(folder, layers=layers)

    return damage


def drop_layer(folder):
    rewrite(folder, layers=json.loads((folder / CONFIG_NAME).read_text())["layers"][:1])


def truncate(folder):
    path = folder / TENSORS_NAME
    path.write_bytes(path.read_bytes()[:-1000])


def drop_tensor(folder):
    tensors = load_file(folder / TENSORS_NAME)
    tensors.pop("layers.1.key_codes")
    save_file(tensors, folder / TENSORS_NAME)


def other_dtype(folder):
    tensors = load_file(folder / TENSORS_NAME)
    tensors["layers.1.key_scale"] = tensors["layers.1.key_scale"].view(torch.int16)
    save_file(tensors, folder / TENSORS_NAME)


def other_options(**changes):
    def damage(folder):
        options = json.loads((folder / CONFIG_NAME).read_text())["patternkv_config"]
        rewrite(folder, patternkv_config=options | changes)

    return damage


DAMAGES = {
    "no json": (lambda f: (f / CONFIG_NAME).unlink(), FileNotFoundError, f"has no {CONFIG_NAME}: it is not a cache"),
    "no tensors": (lambda f: (f / TENSORS_NAME).unlink(), FileNotFoundError, f"has no {TENSORS_NAME}"),
    "broken json": (lambda f: (f / CONFIG_NAME).write_text('{"format": 1,'), ValueError, "is damaged: Expecting"),
    "empty json": (lambda f: (f / CONFIG_NAME).write_text(""), ValueError, "is damaged: Expecting value"),
    "binary json": (lambda f: (f / CONFIG_NAME).write_bytes(b"\xff\xfe\x00"), ValueError, "is damaged"),
    "foreign json": (lambda f: (f / CONFIG_NAME).write_text('{"a": 1}'), ValueError, "not of a PatternKV cache"),
    "list": (lambda f: (f / CONFIG_NAME).write_text("[1]"), ValueError, "is not of a PatternKV cache"),
    "version": (lambda f: rewrite(f, format=2), ValueError, "has format 2, and this version of hf_ext reads 1"),
    "model": (lambda f: rewrite(f, model="x"), ValueError, "damaged: `model` is 'x', not a dict"),
    "layers": (lambda f: rewrite(f, layers=None), ValueError, "damaged: `layers` is None, not a list"),
    "config": (lambda f: rewrite(f, patternkv_config={"nbits": 3}), ValueError, "`nbits` must be 2, 4 or 8, got 3"),
    "field": (lambda f: rewrite(f, patternkv_config={"a": 3}), ValueError, "unknown fields of PatternKVConfig: a"),
    "truncated": (truncate, ValueError, f"{TENSORS_NAME} cannot be read"),
    "empty": (lambda f: (f / TENSORS_NAME).write_bytes(b""), ValueError, f"{TENSORS_NAME} cannot be read"),
    "tensor": (drop_tensor, ValueError, f"does not hold the tensors that {CONFIG_NAME} lists"),
    "dtype": (other_dtype, ValueError, f"does not hold the tensors that {CONFIG_NAME} lists"),
    "fewer layers": (drop_layer, ValueError, "holds 1 layers, and the model has 2"),
    "kind": (change_layer(kind="DynamicLayer"), ValueError, "damaged at layer 1.*a DynamicLayer where this model has"),
    "rows": (change_layer(start=[0]), ValueError, "damaged at layer 1.*`start` is for 1 rows, and the tensors have 2"),
    "packed": (change_layer(packed=[96, 64]), ValueError, "damaged at layer 1.*96 packed of 89 tokens do not fit"),
    "window": (change_layer(packed=[63, 64]), ValueError, "damaged at layer 1.*63 packed of 89 tokens do not fit"),
    "seen": (change_layer(seen=500), ValueError, "damaged at layer 1.*of 500 tokens do not fit"),
    "patterns": (change_layer(key_patterns=[99, 1]), ValueError, "damaged at layer 1.*99 patterns do not fit"),
    "text": (change_layer(seen="x"), ValueError, "damaged at layer 1.*`seen`, .* is not what a layer with states has"),
    "fraction": (change_layer(seen=89.0), ValueError, "damaged at layer 1.*`seen`, .* is not what"),
    "empty layer": (change_layer(is_initialized=False), ValueError, "damaged at layer 1.*is not what"),
    "groups": (other_options(group_size=32), ValueError, "damaged at layer 0.*key scale of .* the options ask for"),
    "bits": (other_options(nbits_value=4), ValueError, "damaged at layer 0.*value codes of .* the options ask for"),
    "ids": (other_options(num_patterns=0), ValueError, "damaged at layer 0.*key ids of .* the options ask for"),
    "scope": (other_options(bank_scope="batch"), ValueError, "damaged at layer 0.*key bank of .* the options ask for"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused_by_one_error(saved, name):
    model, _, folder = saved
    damage, kind, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(kind, match=message):
        PatternKVCache.from_pretrained(folder, model.config)
    if name not in ("fewer layers", "kind"):
        with pytest.raises(kind, match=message):
            describe(folder)


def test_states_of_linear_attention_are_not_written(tiny, prompts, small, tmp_path):
    model = tiny("qwen3-next")
    cache = PatternKVCache(model.config, **small)
    with torch.no_grad():
        model(**prompts(1, 60), cache=cache)
    with pytest.raises(ValueError, match="layer 0 is a LinearAttentionLayer, whose state is not written to files"):
        cache.save_pretrained(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_interrupted_save_leaves_no_folder_that_can_be_read(saved, monkeypatch):
    model, cache, folder = saved
    monkeypatch.setattr("hf_ext.cache_impls.saved.save_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.save_pretrained(folder)
    with pytest.raises(FileNotFoundError, match="not a cache that `save_pretrained` finished"):
        PatternKVCache.from_pretrained(folder, model.config)
