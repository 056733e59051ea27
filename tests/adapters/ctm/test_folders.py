"""Merging folders; the oracles are the in-memory route and peft's own loading."""

import json
import os
import pickle
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_ext import CtMConfig, add_ctm_adapter, merge_adapter_folders
from hf_ext.adapters.ctm.folders import OWN_CONFIG
from hf_ext.adapters.ctm.rules import RULES
from hf_ext.adapters.ctm.saved import CONFIG, PICKLE, WEIGHTS, servable_problems

FILES = {CONFIG, WEIGHTS, OWN_CONFIG, "README.md"}
SOURCES = {
    "sql": {"r": 4},
    "math": {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": ["q_proj", "k_proj", "o_proj"]},
    "code": {"r": 6, "rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
}


@pytest.fixture(scope="module")
def adapters(save_adapter, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(root / name, seed, **arguments) for seed, (name, arguments) in enumerate(SOURCES.items())
    }


@pytest.fixture
def edited(adapters, tmp_path):
    """`edited(name, config={...}, tensors=function)`: a changed copy of an adapter's folder."""

    def edit(name="sql", config=None, tensors=None, where="edited", remove=()):
        folder = tmp_path / where / name
        folder.mkdir(parents=True)
        values = json.loads((adapters[name] / CONFIG).read_text()) | (config or {})
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in values.items() if key not in remove}))
        state = load_file(adapters[name] / WEIGHTS)
        save_file(tensors(state) if tensors else state, folder / WEIGHTS)
        return folder

    return edit


def written(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


# --- the same as in memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *({"combination_type": rule} for rule in RULES),
        {"space": "core"},
        {"space": "full", "combination_type": "linear"},
        {"sides": "auto"},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_it_is_bit_for_bit_what_the_model_gets_in_memory(adapters, load_adapters, tmp_path, options):
    model = load_adapters(**adapters)
    weights = [1.0, -0.5, 2.0]
    config = CtMConfig(rank=4, **options)
    in_memory = add_ctm_adapter(model, list(adapters), weights, "both", config)
    model.save_pretrained(tmp_path / "memory", selected_adapters=["both"])
    report = merge_adapter_folders(list(adapters.values()), tmp_path / "out", weights, config)
    expected, found = written(tmp_path / "memory" / "both"), written(tmp_path / "out")
    assert found.keys() == expected.keys()  # peft's own
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert {layer.layer: layer for layer in report.layers} == {layer.layer: layer for layer in in_memory.layers}
    theirs, ours = (json.loads((tmp_path / name / CONFIG).read_text()) for name in ("memory/both", "out"))
    assert set(theirs.pop("target_modules")) == set(ours.pop("target_modules"))
    assert ours == theirs


def test_layers_side_by_side_change_no_bit(adapters, tmp_path):
    for workers in (1, 3):
        merge_adapter_folders(list(adapters.values()), tmp_path / str(workers), rank=4, workers=workers)
    one, three = written(tmp_path / "1"), written(tmp_path / "3")
    assert all(torch.equal(one[key], three[key]) for key in one)
    first, second = ((tmp_path / name / WEIGHTS).read_bytes() for name in "13")
    assert first == second


def test_the_folder_has_one_rank_a_scaling_of_1_and_nothing_that_servers_do_not_take(adapters, tmp_path):
    report = merge_adapter_folders(list(adapters.values()), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (8, 8, False)
    assert config["rank_pattern"] == config["alpha_pattern"] == {} and config["modules_to_save"] is None
    assert config["inference_mode"] and config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    for key, tensor in written(tmp_path / "out").items():
        assert tensor.shape["lora_B" in key] == 8 and tensor.dtype == torch.float32
    assert servable_problems(tmp_path / "out") == []
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # readable by whoever serves it
    assert [layer.layer for layer in report.layers][:2] == [
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.o_proj",
    ]


def test_what_servers_do_not_take_is_named(adapters):
    assert servable_problems(adapters["sql"]) == []
    problems = servable_problems(adapters["code"])
    assert any("rank_pattern" in problem for problem in problems)
    assert any("has another rank than 6" in problem for problem in problems)


def test_ctm_config_json_is_the_configuration(adapters, tmp_path):
    config = CtMConfig(rank=4, combination_type="dare_ties", beta=0.5)
    merge_adapter_folders([adapters["sql"], adapters["code"]], tmp_path / "out", None, config)
    assert CtMConfig.from_dict(json.loads((tmp_path / "out" / OWN_CONFIG).read_text())) == config


def test_the_card_records_sources_weights_and_energy_and_no_path_of_this_machine(adapters, tmp_path):
    from huggingface_hub import ModelCard

    report = merge_adapter_folders(list(adapters.values()), tmp_path / "out", combination_type="linear", rank=4)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "peft" and {"lora", "merge", "ctm"} <= set(card.data.tags)
    assert report.weights == pytest.approx([1 / 3] * 3)
    assert f"| `math` | 0.333333 | 6 | {report.norm('math'):.4g} | {report.mean_energy('math'):.3f}" in card.text
    assert "combination_type='linear'" in card.text and str(tmp_path) not in card.content


def test_a_base_model_of_the_hub_is_in_the_card(edited, tmp_path):
    bases = {"base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    merge_adapter_folders([edited("sql", bases), edited("code", bases)], tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in text


def test_the_choice_of_layer_0_alone_stays_that_of_layer_0(save_adapter, tmp_path):
    # As a number, which is as false as no choice is; its short name alone would find all layers.
    one = save_adapter(tmp_path / "one", target_modules=["q_proj"], layers_to_transform=0)
    merge_adapter_folders([one], tmp_path / "out")
    targets = json.loads((tmp_path / "out" / CONFIG).read_text())["target_modules"]
    assert targets == ["model.layers.0.self_attn.q_proj"]


@pytest.mark.parametrize(
    ("task", "auto"),
    [
        ("CAUSAL_LM", "AutoModelForCausalLM"),
        ("SEQ_2_SEQ_LM", "AutoModelForSeq2SeqLM"),
        ("FEATURE_EXTRACTION", "AutoModel"),
    ],
)
def test_the_card_loads_the_kind_of_model_that_the_adapters_are_of(edited, tmp_path, task, auto):
    merge_adapter_folders([edited("sql", {"task_type": task})], tmp_path / "out")
    assert f"from transformers import {auto}\n" in (tmp_path / "out" / "README.md").read_text()


def test_a_first_adapter_of_a_dtype_that_cannot_be_merged_is_named(adapters, edited, tmp_path):
    def narrow(state):
        return {key: value.to(torch.float8_e4m3fn) for key, value in state.items()}

    with pytest.raises(ValueError, match="adapter 'sql' is of float8_e4m3fn; adapters of float32, float16"):
        merge_adapter_folders([edited("sql", tensors=narrow), adapters["math"]], tmp_path / "out")


def test_progress_names_every_layer(adapters, tmp_path):
    calls = []
    merge_adapter_folders([adapters["sql"]], tmp_path / "out", progress=lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(done, 4) for done in range(1, 5)]


@pytest.mark.slow
def test_a_fresh_process_loads_it_with_a_scaling_of_1_and_equal_logits(
    adapters, load_adapters, tiny_llama_dir, tmp_path, fresh_python
):
    model = load_adapters(**adapters)
    add_ctm_adapter(model, list(adapters), None, "both", rank=4)
    model.set_adapter("both")
    ids = torch.randint(1, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.save((ids, model.eval()(ids).logits), tmp_path / "expected.pt")
    merge_adapter_folders(list(adapters.values()), tmp_path / "out", rank=4)
    fresh_python(
        "import torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "from peft import PeftModel\n"
        f"ids, expected = torch.load({str(tmp_path / 'expected.pt')!r})\n"
        f"base = AutoModelForCausalLM.from_pretrained({str(tiny_llama_dir)!r})\n"
        f"model = PeftModel.from_pretrained(base, {str(tmp_path / 'out')!r}).eval()\n"
        "scalings = {m.scaling['default'] for m in model.modules() if hasattr(m, 'lora_A')}\n"
        "assert scalings == {1.0}, scalings\n"
        "from peft import AutoPeftModelForCausalLM\n"
        f"auto = AutoPeftModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r}).eval()\n"
        f"direct = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r}).eval()\n"
        "with torch.no_grad():\n"
        "    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)\n"
        "    torch.testing.assert_close(auto(ids).logits, expected, rtol=1e-5, atol=1e-5)\n"
        "    torch.testing.assert_close(direct(ids).logits, expected, rtol=1e-5, atol=1e-5)\n"
    )


# --- what may be in a folder -----------------------------------------------------------------------------------------


def test_a_bin_file_of_tensors_is_read(adapters, edited, tmp_path):
    folder = edited("sql")
    (folder / WEIGHTS).unlink()
    torch.save(written(adapters["sql"]), folder / PICKLE)
    for name, source in (("bin", folder), ("safetensors", adapters["sql"])):
        merge_adapter_folders([source, adapters["math"]], tmp_path / name)
    assert (tmp_path / "bin" / WEIGHTS).read_bytes() == (tmp_path / "safetensors" / WEIGHTS).read_bytes()


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_a_bin_file_that_would_run_code_is_refused_and_does_not_run(adapters, edited, tmp_path):
    folder = edited("sql")
    (folder / WEIGHTS).unlink()
    torch.save({"x": Bomb(tmp_path / "ran")}, folder / PICKLE)
    with pytest.raises(OSError, match="adapter_model.bin cannot be read safely"):
        merge_adapter_folders([folder, adapters["math"]], tmp_path / "out")
    (folder / PICKLE).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(OSError, match="cannot be read safely"):
        merge_adapter_folders([folder, adapters["math"]], tmp_path / "out")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def with_embeddings(save_adapter, tmp_path_factory) -> list[Path]:
    # peft saves the base's own embedding beside factors of it.
    root = tmp_path_factory.mktemp("embeddings")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [save_adapter(root / str(i), i, target_modules=["embed_tokens", "q_proj"]) for i in range(2)]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_saved_embeddings_of_one_base_model_are_kept_as_peft_does(with_embeddings, load_adapters, tmp_path):
    merge_adapter_folders(with_embeddings, tmp_path / "out")
    model = load_adapters(a=with_embeddings[0], b=with_embeddings[1])
    add_ctm_adapter(model, ["a", "b"], None, "both")
    model.save_pretrained(tmp_path / "memory", selected_adapters=["both"])
    found, expected = written(tmp_path / "out"), written(tmp_path / "memory" / "both")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    assert any(key.endswith("embed_tokens.base_layer.weight") for key in found)
    assert servable_problems(tmp_path / "out") == []


def changed(folder: Path, target: Path, function) -> Path:
    target.mkdir()
    (target / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    state = load_file(folder / WEIGHTS)
    function(state)
    save_file(state, target / WEIGHTS)
    return target


def test_saved_embeddings_that_differ_or_were_resized_are_refused(with_embeddings, adapters, tmp_path):
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    other = changed(with_embeddings[1], tmp_path / "other", lambda state: state[key].add_(1))
    with pytest.raises(ValueError, match=r"'0' and 'other' were saved with different base embeddings \(base_model"):
        merge_adapter_folders([with_embeddings[0], other], tmp_path / "out")
    whole = "base_model.model.lm_head.weight"
    resized = changed(adapters["sql"], tmp_path / "sql2", lambda state: state.update({whole: torch.zeros(4, 4)}))
    with pytest.raises(ValueError, match=f"adapter 'sql2' holds the whole tensor {whole}"):
        merge_adapter_folders([adapters["math"], resized], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "adapter 'sql' uses DoRA"),
        ({"lora_bias": True}, "adapter 'sql' has biases in its LoRA layers"),
        ({"modules_to_save": ["score"]}, "adapter 'sql' has whole modules beside LoRA"),
        ({"trainable_token_indices": [3]}, "adapter 'sql' has trained rows of the embedding"),
        ({"target_parameters": ["experts.up"]}, "adapter 'sql' targets parameters of fused experts"),
        ({"layer_replication": [[0, 2]]}, "adapter 'sql' runs on a model with replicated layers"),
        ({"bias": "all"}, "adapter 'sql' trains biases of the base model"),
        ({"alora_invocation_tokens": [1]}, "adapter 'sql' is an activated LoRA"),
        ({"use_qalora": True}, "adapter 'sql' uses QA-LoRA"),
        ({"kasa_config": {"beta": 1.0}}, r"adapter 'sql' uses a variant of LoRA \(kasa_config\)"),
        ({"init_lora_weights": "pissa"}, "adapter 'sql' was made with init_lora_weights='pissa'"),
        ({"init_lora_weights": "loftq"}, "adapter 'sql' was made with init_lora_weights='loftq'"),
        ({"peft_type": "ADALORA"}, "adapter 'sql' is of type ADALORA; only LORA adapters"),
        ({"peft_type": None}, "adapter 'sql' is of type None"),
        ({"rank_pattern": [1]}, r"adapter 'sql': rank_pattern is \[1\]; it must be a table"),
        ({"alpha_pattern": {"(": 3}}, "adapter 'sql': alpha_pattern is .* regular expressions"),
        ({"r": "4"}, "has factors of rank 4, but its configuration says '4'"),
        ({"r": 5}, "layer 'model.layers.0.self_attn.q_proj' has factors of rank 4, but its configuration says 5"),
        ({"lora_alpha": None}, "lora_alpha of layer 'model.layers.0.self_attn.q_proj' is None"),
    ],
    ids=str,
)
def test_an_adapter_that_is_not_plain_lora_is_refused_by_name(adapters, edited, tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        merge_adapter_folders([adapters["math"], edited("sql", config)], tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def rename(old, new):
    return lambda state: {(new if key == old else key): value for key, value in state.items()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            lambda s: s | {KEY: s[KEY].index_fill(1, torch.tensor(3), float("nan"))},
            "A of adapter 'sql' has entries that",
        ),
        (lambda s: s | {KEY: s[KEY][:, :8].contiguous()}, "the adapters' inputs differ in shape"),
        (lambda s: {k: v for k, v in s.items() if k != KEY}, "has only one of its two factors"),
        (lambda s: {"base_model.model.x.weight": s[KEY]}, "holds the whole tensor base_model.model.x.weight"),
        (lambda s: {}, "adapter 'sql' has no layer of LoRA"),
        (rename(KEY, KEY.replace("lora_A", "lora_A.default")), "is not a key as peft saves it"),
        (rename(KEY, KEY.removeprefix("base_model.model.")), "is not a key as peft saves it"),
        (lambda s: s | {KEY.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(4)}, "uses DoRA"),
        (lambda s: s | {KEY.replace("lora_A.weight", "lora_B.bias"): torch.ones(4)}, "has biases in its LoRA layers"),
        (
            lambda s: {k.replace(".lora_", ".base_layer.lora_"): v for k, v in s.items()},
            "is inside another layer of LoRA",
        ),
        (lambda s: {k: v.to(torch.float8_e4m3fn) for k, v in s.items()}, "is float8_e4m3fn; adapters of float32"),
        (lambda s: s | {KEY: s[KEY].flatten()}, "it was saved before its shards were gathered"),
    ],
)
def test_weights_that_cannot_be_merged_are_named(adapters, edited, tmp_path, tensors, message):
    with pytest.raises(ValueError, match=message):
        merge_adapter_folders([adapters["math"], edited("sql", tensors=tensors)], tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_files_that_are_missing_or_damaged_are_named(adapters, edited, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError, match="./no/such does not exist; pass a folder or an adapter of the Hub"):
        merge_adapter_folders([adapters["sql"], "./no/such"], out)
    with pytest.raises(FileNotFoundError, match="me/lora is neither a folder nor an adapter that the Hub gives"):
        merge_adapter_folders([adapters["sql"], "me/lora"], out)
    with pytest.raises(ValueError, match="is a file; name the folder"):
        merge_adapter_folders([adapters["sql"] / CONFIG], out)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match="empty is not an adapter of peft: it has no adapter_config.json"):
        merge_adapter_folders([adapters["sql"], empty], out)
    folder = edited("sql")
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(OSError, match="is not a complete safetensors file"):
        merge_adapter_folders([adapters["math"], folder], out)
    (folder / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="has no weights: neither adapter_model.safetensors nor"):
        merge_adapter_folders([adapters["math"], folder], out)
    (folder / CONFIG).write_text("{")
    with pytest.raises(ValueError, match="adapter_config.json is not JSON"):
        merge_adapter_folders([adapters["math"], folder], out)
    (folder / CONFIG).write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        merge_adapter_folders([adapters["math"], folder], out)
    assert not out.exists()


def test_adapters_of_the_hub_are_downloaded_without_the_rest_of_their_repository(adapters, tmp_path, monkeypatch):
    import huggingface_hub

    calls = {}

    def download(name, allow_patterns):
        calls[name] = allow_patterns
        return str(adapters["sql"] if name == "me/sql" else adapters["math"].parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    report = merge_adapter_folders(["me/sql", "me/all/math"], tmp_path / "out")
    assert calls["me/sql"] == [CONFIG, WEIGHTS, PICKLE]
    assert calls["me/all"] == [f"math/{name}" for name in (CONFIG, WEIGHTS, PICKLE)]
    assert report.adapters == ["sql", "math"]
    assert "| `me/all/math` | 1 |" in (tmp_path / "out" / "README.md").read_text()


def test_different_base_models_are_refused_unless_allowed(adapters, edited, tmp_path):
    folders = [
        edited("sql", {"base_model_name_or_path": "a/one"}),
        edited("math", {"base_model_name_or_path": "b/two"}),
    ]
    with pytest.raises(ValueError, match="adapters were trained on different base models: a/one, b/two"):
        merge_adapter_folders(folders, tmp_path / "out")
    with pytest.warns(UserWarning, match="call their base model differently: a/one, b/two"):
        merge_adapter_folders(folders, tmp_path / "out", allow_different_bases=True)
    for one, two in (("/runs/1/final", "/runs/2/final"), ("a/one", "b/one"), ("a/one", "/data/two")):
        pair = [
            edited(name, {"base_model_name_or_path": base}, where=f"{one}-{two}".replace("/", "_"))
            for name, base in (("sql", one), ("math", two))
        ]
        with pytest.raises(ValueError, match=f"different base models: {one}, {two}"):
            merge_adapter_folders(pair, tmp_path / "pair")
    local = edited("code", {"base_model_name_or_path": "/data/models/One/"})
    with pytest.warns(UserWarning, match="call their base model differently: /data/models/One/, a/one"):
        merge_adapter_folders([local, folders[0]], tmp_path / "same")
    assert json.loads((tmp_path / "same" / CONFIG).read_text())["base_model_name_or_path"] == "a/one"


def test_shapes_of_another_base_model_are_an_error_whatever_its_name(adapters, edited, tmp_path):
    def wider(state):
        return {key: torch.zeros(128, 4) if "lora_B" in key else value for key, value in state.items()}

    with pytest.raises(ValueError, match=r"updates differ in shape \(math 64 x 64, sql 128 x 64\)"):
        merge_adapter_folders([adapters["math"], edited("sql", tensors=wider)], tmp_path / "out")


def test_adapters_without_a_common_layer_are_warned_about(adapters, edited, tmp_path):
    def of_the_inner_model(state):
        return {key.replace("base_model.model.model.", "base_model.model."): value for key, value in state.items()}

    with pytest.warns(UserWarning, match="adapter 'sql' shares no layer with the others"):
        merge_adapter_folders([adapters["math"], edited("sql", tensors=of_the_inner_model)], tmp_path / "out")


def test_names_are_as_long_as_they_must_be_and_a_folder_counts_once(adapters, edited, tmp_path, monkeypatch):
    report = merge_adapter_folders([adapters["sql"], edited("sql"), adapters["math"]], tmp_path / "out")
    assert report.adapters == [
        f"{adapters['sql'].parent.name}/sql",
        "edited/sql",
        f"{adapters['sql'].parent.name}/math",
    ]
    with pytest.raises(ValueError, match="is named twice; name it once, with the sum of its weights"):
        merge_adapter_folders([adapters["sql"], f"{adapters['sql']}/../sql"], tmp_path / "twice")
    monkeypatch.chdir(adapters["sql"])
    assert merge_adapter_folders([".", "../math"], tmp_path / "dots").adapters == ["sql", "math"]
    named = merge_adapter_folders([adapters["sql"], adapters["math"]], tmp_path / "named", names=["s", "m"])
    assert named.adapters == ["s", "m"]


def test_bad_arguments_are_named(adapters, tmp_path):
    folders = [adapters["sql"], adapters["math"]]
    for arguments, message in (
        ({"weights": [1.0]}, "`weights` has 1 entries for 2 adapters"),
        ({"weights": [0, 0]}, "every weight is 0"),
        ({"names": ["a"]}, "`names` has 1 entries for 2 adapters"),
        ({"rank": 0}, "`rank`"),
        ({"weights": 1.0}, "`weights` must be a list of one number per adapter, got 1.0"),
        ({"workers": 0}, "`workers` must be an integer of at least 1 or None, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_adapter_folders(folders, tmp_path / "out", **arguments)
    with pytest.raises(ValueError, match="`paths` must be a list of folders"):
        merge_adapter_folders(str(folders[0]), tmp_path / "out")
    with pytest.raises(ValueError, match="`adapters` must be a list of at least one"):
        merge_adapter_folders([], tmp_path / "out")


def test_a_weight_of_0_leaves_an_adapter_out(adapters, tmp_path):
    report = merge_adapter_folders([adapters["sql"], adapters["math"]], tmp_path / "out", [1.0, 0.0])
    assert report.left_out == ["math"] and report.rank == 4
    assert written(tmp_path / "out").keys() == written(adapters["sql"]).keys()
    assert "left out" in (tmp_path / "out" / "README.md").read_text()


# --- never a dense update --------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


@pytest.mark.parametrize("space", ["ctm", "core"])
def test_no_dense_update_is_ever_made(factors, tmp_path, space):
    folders = []
    for t in range(4):
        folder = tmp_path / f"a{t}"
        LoraConfig(r=8, target_modules=["proj"], base_model_name_or_path="me/base").save_pretrained(folder)
        a, b = factors(160, 200, [8] * 2, seed=t)  # R = 32 < 160 / 2
        state = {}
        for i in range(2):
            state[f"base_model.model.{i}.proj.lora_A.weight"] = a[i]
            state[f"base_model.model.{i}.proj.lora_B.weight"] = b[i]
        save_file(state, folder / WEIGHTS)
        folders.append(folder)
    with Largest() as seen:
        merge_adapter_folders(folders, tmp_path / "out", space=space, workers=1)
    assert seen.numel <= 32 * 200 < 160 * 200


# --- the output ------------------------------------------------------------------------------------------------------


def test_an_existing_output_is_kept_unless_it_is_to_be_replaced(adapters, tmp_path):
    folders, out = [adapters["sql"], adapters["math"]], tmp_path / "out"
    merge_adapter_folders(folders, out, rank=2)
    before = (out / WEIGHTS).read_bytes()
    with pytest.raises(FileExistsError, match="out exists already; overwrite it"):
        merge_adapter_folders(folders, out)
    assert (out / WEIGHTS).read_bytes() == before
    (out / "old-file").touch()
    merge_adapter_folders(folders, out, rank=3, overwrite=True)
    assert {path.name for path in out.iterdir()} == FILES and (out / WEIGHTS).read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_folder_that_no_merge_made_is_never_replaced(adapters, edited, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").touch()
    run = edited("math")  # of a training, with checkpoints beside the adapter
    for output in (tmp_path / "thesis", tmp_path / "thesis" / "chapter1.tex", run):
        with pytest.raises(FileExistsError, match="exists and is not the result of a merge"):
            merge_adapter_folders([adapters["sql"]], output, overwrite=True)
    (tmp_path / "empty").mkdir()
    merge_adapter_folders([adapters["sql"]], tmp_path / "empty")
    assert (tmp_path / "empty" / WEIGHTS).is_file()


def test_folders_beside_the_output_are_left_alone(adapters, tmp_path, monkeypatch):
    for name in ("out.old", "out.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    for _ in range(2):
        merge_adapter_folders([adapters["sql"], adapters["math"]], tmp_path / "out", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.old", "out.partial"]
    assert (tmp_path / "out.old" / "precious").exists() and (tmp_path / "out.partial" / "precious").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    merge_adapter_folders([adapters["sql"]], "nested/out")
    assert (tmp_path / "here" / "nested" / "out" / CONFIG).is_file()


def test_an_output_that_is_a_link_is_written_where_it_points(adapters, tmp_path):
    (tmp_path / "disk").mkdir()
    for target in ("disk/empty", "disk/absent"):
        link = tmp_path / f"to-{Path(target).name}"
        link.symlink_to(tmp_path / target)
    (tmp_path / "disk" / "empty").mkdir()
    for name in ("empty", "absent"):
        for _ in range(2):
            merge_adapter_folders([adapters["sql"]], tmp_path / f"to-{name}", overwrite=True)
        assert (tmp_path / f"to-{name}").is_symlink()
        assert {path.name for path in (tmp_path / "disk" / name).iterdir()} == FILES
        assert f"# to-{name}\n" in (tmp_path / f"to-{name}" / "README.md").read_text()


def test_an_output_that_cannot_be_made_is_refused_before_anything_is_merged(adapters, tmp_path, monkeypatch):
    def merged(*call):
        raise AssertionError("it merged")

    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/out cannot be made: .*file is no folder"):
        merge_adapter_folders([adapters["sql"]], tmp_path / "file" / "out", progress=merged)
    # The superuser may write anywhere, so the answer is given here.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="new/out cannot be made: .* is not writable"):
        merge_adapter_folders([adapters["sql"]], tmp_path / "new" / "out", progress=merged)
    assert not (tmp_path / "new").exists()


def test_the_output_is_none_of_the_inputs(adapters, tmp_path):
    for output in (adapters["sql"], adapters["sql"].parent):
        with pytest.raises(ValueError, match="is, or holds, the adapter"):
            merge_adapter_folders([adapters["sql"], adapters["math"]], output, overwrite=True)


def test_an_error_while_writing_leaves_the_old_output(adapters, tmp_path, monkeypatch):
    import hf_ext.adapters.ctm.folders as module

    folders, out = [adapters["sql"], adapters["math"]], tmp_path / "out"
    merge_adapter_folders(folders, out, rank=2)
    before = (out / WEIGHTS).read_bytes()

    def full(*arguments, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        merge_adapter_folders(folders, out, rank=3, overwrite=True)
    assert (out / WEIGHTS).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["merging", "writing"])
def test_a_killed_run_leaves_nothing_that_looks_complete_and_the_next_one_works(adapters, tmp_path, where):
    folders, out = [str(adapters["sql"]), str(adapters["math"])], tmp_path / "out"
    code = (
        "import time, sys\n"
        "import hf_ext.adapters.ctm.folders as module\n"
        "def wait(*arguments, **options):\n    print('here', flush=True)\n    time.sleep(60)\n"
        + ("module.model_card = wait\n" if where == "writing" else "")
        + f"module.merge_adapter_folders({folders}, {str(out)!r}"
        + (", progress=wait)\n" if where == "merging" else ")\n")
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout.readline() == "here\n"
        time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert not out.exists()
    # What is left of the writing is not taken for an adapter.
    assert not list(tmp_path.rglob(CONFIG))
    merge_adapter_folders(folders, out)
    assert {path.name for path in out.iterdir()} == FILES
    assert all(path.name.startswith(".out.") for path in tmp_path.iterdir() if path != out)


def test_a_merged_adapter_can_be_merged_again_and_trained_on(adapters, load_adapters, tiny_llama_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    merge_adapter_folders([adapters["sql"], adapters["math"]], tmp_path / "one", rank=4)
    merge_adapter_folders([tmp_path / "one", adapters["code"]], tmp_path / "two", rank=4)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model = PeftModel.from_pretrained(base, tmp_path / "two", is_trainable=True)
    ids = torch.randint(1, 256, (1, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_convolutions_and_other_models_merge_from_folders_too(tmp_path):
    class Zoo(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 5, 3)
            self.embed = torch.nn.Embedding(7, 4)

    for i in range(2):
        torch.manual_seed(i)
        config = LoraConfig(r=2 + i, target_modules=["conv", "embed"], init_lora_weights=False)
        get_peft_model(Zoo(), config).save_pretrained(tmp_path / f"a{i}")
    merge_adapter_folders(
        [tmp_path / "a0", tmp_path / "a1"], tmp_path / "out", [1, 1], rank=5, combination_type="linear"
    )
    model = PeftModel.from_pretrained(Zoo(), tmp_path / "a0", adapter_name="a0")
    for name in ("a1", "out"):
        model.load_adapter(tmp_path / name, adapter_name=name)
    for module in (model.base_model.model.conv, model.base_model.model.embed):
        expected = module.get_delta_weight("a0") + module.get_delta_weight("a1")
        torch.testing.assert_close(module.get_delta_weight("out"), expected, rtol=1e-4, atol=1e-5)
    assert servable_problems(tmp_path / "out") == ["conv is a convolution"] * 2
