"""Merging on a PeftModel; the oracle is peft: `get_delta_weight` of the sources, its own merges, its own keys."""

import copy
import warnings

import numpy
import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM

from hf_ext import CtMConfig, add_ctm_adapter

IDS = torch.randint(1, 256, (2, 12), generator=torch.Generator().manual_seed(0))
RANKED = {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 3}}
SOURCES = {
    "plain": {"r": 4},
    "rslora": {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": ["q_proj", "k_proj", "o_proj"]},
    "ranked": {"r": 6, **RANKED, "target_modules": r".*layers\.\d+\.(self_attn\.[qv]|mlp\.up)_proj"},
    "chosen": {"r": 4, "layers_to_transform": [1], "target_modules": ["q_proj", "down_proj"]},
}


@pytest.fixture(scope="module")
def folders(save_adapter, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(root / name, seed, **arguments) for seed, (name, arguments) in enumerate(SOURCES.items())
    }


@pytest.fixture
def model(folders, load_adapters):
    return load_adapters(**folders)


def lora_layers(model) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def has(module: LoraLayer, adapter: str) -> bool:
    return adapter in module.lora_A or adapter in module.lora_embedding_A


def deltas(model, weights: dict[str, float]) -> dict[str, torch.Tensor]:
    """Layer -> sum of w_t W_t by peft; only layers that one of the adapters has."""
    found = {}
    for name, module in lora_layers(model).items():
        parts = [w * module.get_delta_weight(a).double() for a, w in weights.items() if has(module, a)]
        if parts:
            found[name] = sum(parts)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance=1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, update in expected.items():
        assert found[name].shape == update.shape
        assert (found[name] - update).norm() <= tolerance * update.norm(), name


@pytest.mark.parametrize("space", ["ctm", "core", "full"])
def test_with_room_the_sum_is_exact_whatever_the_adapters_ranks_scalings_and_targets(model, space):
    weights = {"plain": 1.0, "rslora": -0.5, "ranked": 2.0, "chosen": 0.25}
    report = add_ctm_adapter(
        model, list(weights), list(weights.values()), "sum", combination_type="linear", rank=24, space=space
    )
    assert_same(deltas(model, {"sum": 1.0}), deltas(model, weights))
    assert all(module.scaling["sum"] == 1.0 for module in lora_layers(model).values() if has(module, "sum"))
    assert report.rank == 24 and report.output == "sum"
    assert set(report.retained_energy) == set(weights)
    assert min(report.min_energy(name) for name in weights) > 1 - 1e-5


def test_it_is_pefts_cat_with_room_for_all_ranks(model):
    # With the one without rslora first, for peft takes the first adapter's.
    names, weights = ["plain", "rslora"], [1.0, -2.0]
    model.base_model.add_weighted_adapter(names, weights, "cat", combination_type="cat")
    add_ctm_adapter(model, names, weights, "ours", combination_type="linear", rank=12)
    assert_same(deltas(model, {"ours": 1.0}), deltas(model, {"cat": 1.0}))


def test_pefts_merge_of_a_choice_of_layers_breaks_and_ours_does_not(model):
    with pytest.raises(ValueError, match="No matching LoRAs found. Please raise an issue"):
        model.base_model.add_weighted_adapter(["plain", "chosen"], [1.0, 1.0], "theirs", combination_type="cat")
    add_ctm_adapter(model, ["plain", "chosen"], [1.0, 1.0], "ours", combination_type="linear", rank=8)
    assert_same(deltas(model, {"ours": 1.0}), deltas(model, {"plain": 1.0, "chosen": 1.0}))


def test_the_result_is_plain_lora_of_one_rank(model):
    names = list(SOURCES)
    add_ctm_adapter(model, names, None, "both")
    config = model.peft_config["both"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (8, 8, False)  # the largest rank among the adapters
    assert not config.rank_pattern and not config.alpha_pattern and config.layers_to_transform is None
    assert config.bias == "none" and config.modules_to_save is None and config.init_lora_weights is True
    assert config.base_model_name_or_path == model.peft_config["plain"].base_model_name_or_path
    for name, module in lora_layers(model).items():
        assert has(module, "both") == any(has(module, source) for source in names), name
        if has(module, "both"):
            assert module.r["both"] == 8 == module.lora_A["both"].weight.shape[0]


def test_a_layer_that_one_adapter_alone_has_is_kept(model):
    before = deltas(model, {"rslora": 1.0, "plain": 1.0})
    add_ctm_adapter(model, ["plain", "rslora"], [1.0, 1.0], "both", rank=8, combination_type="ties", density=0.3)
    after = deltas(model, {"both": 1.0})
    alone = [name for name in before if "q_proj" not in name]
    assert len(alone) == 6
    assert_same({name: after[name] for name in alone}, {name: before[name] for name in alone})
    add_ctm_adapter(model, ["plain", "rslora"], [1.0, 1.0], "low", rank=3, combination_type="ties")
    for name in alone:
        u, s, vt = torch.linalg.svd(before[name])
        expected = u[:, :3] @ torch.diag(s[:3]) @ vt[:3]
        assert_same({name: deltas(model, {"low": 1.0})[name]}, {name: expected})


@pytest.mark.parametrize("rule", ["ties", "dare_ties", "linear"])
@pytest.mark.parametrize("name", SOURCES)
def test_one_adapter_alone_of_weight_1_is_itself(model, name, rule):
    add_ctm_adapter(model, [name], [1.0], "same", combination_type=rule)
    assert_same(deltas(model, {"same": 1.0}), deltas(model, {name: 1.0}), 1e-6)


def test_pefts_merge_of_rslora_is_four_times_too_strong_and_ours_is_not(load_adapters, save_adapter, tmp_path):
    # peft 0.21 keeps `use_rslora` of the first adapter: scaling 16 / sqrt(16) instead of 1, after a reload too.
    one, two = (save_adapter(tmp_path / str(i), i, r=8, lora_alpha=8, use_rslora=True) for i in range(2))
    model = load_adapters(one=one, two=two)
    model.base_model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "theirs", "svd", svd_rank=16)
    add_ctm_adapter(model, ["one", "two"], [1.0, 1.0], "ours", rank=16, combination_type="linear")
    expected = deltas(model, {"one": 1.0, "two": 1.0})
    assert_same(deltas(model, {"ours": 1.0}), expected)
    assert_same(deltas(model, {"theirs": 0.25}), expected)
    model.save_pretrained(tmp_path / "saved", selected_adapters=["ours", "theirs"])
    again = load_adapters(ours=tmp_path / "saved" / "ours", theirs=tmp_path / "saved" / "theirs")
    assert {module.scaling["ours"] for module in lora_layers(again).values()} == {1.0}
    assert {module.scaling["theirs"] for module in lora_layers(again).values()} == {4.0}


def test_pefts_merge_of_a_rank_pattern_does_not_load_and_ours_does(load_adapters, save_adapter, tmp_path):
    one, two = (save_adapter(tmp_path / str(i), i, r=8, rank_pattern={"v_proj": 4}) for i in range(2))
    model = load_adapters(one=one, two=two)
    model.base_model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "theirs", "linear")
    add_ctm_adapter(model, ["one", "two"], [1.0, 1.0], "ours", combination_type="linear", rank=16)
    model.save_pretrained(tmp_path / "saved", selected_adapters=["ours", "theirs"])
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_adapters(theirs=tmp_path / "saved" / "theirs")
    again = load_adapters(ours=tmp_path / "saved" / "ours")
    assert_same(deltas(again, {"ours": 1.0}), deltas(model, {"one": 1.0, "two": 1.0}))


def test_alpha_and_a_larger_b_are_the_same(load_adapters, save_adapter, tmp_path):
    one = save_adapter(tmp_path / "one", 1, r=4, lora_alpha=8)
    other = save_adapter(tmp_path / "other", 2)
    model = load_adapters(one=one, other=other)
    double = load_adapters(one=save_adapter(tmp_path / "double", 1, r=4, lora_alpha=4), other=other)
    with torch.no_grad():
        for module in lora_layers(double).values():
            module.lora_B["one"].weight.mul_(2)
    for each in (model, double):
        add_ctm_adapter(each, ["one", "other"], [1.0, 1.0], "both")
    assert_same(deltas(double, {"both": 1.0}), deltas(model, {"both": 1.0}))


def test_a_scaling_changed_in_memory_is_what_counts(model):
    for module in lora_layers(model).values():
        if "plain" in module.scaling:
            module.set_scale("plain", 3)
    add_ctm_adapter(model, ["plain"], [1.0], "same")
    assert_same(deltas(model, {"same": 1.0}), deltas(model, {"plain": 1.0}), 1e-6)


def test_a_weight_of_0_leaves_an_adapter_and_its_layers_out(model):
    report = add_ctm_adapter(model, ["plain", "rslora"], [1.0, 0.0], "one")
    assert report.left_out == ["rslora"] and report.rank == 4
    assert_same(deltas(model, {"one": 1.0}), deltas(model, {"plain": 1.0}), 1e-6)
    with pytest.raises(ValueError, match="every weight is 0"):
        add_ctm_adapter(model, ["plain", "rslora"], [0, 0.0], "none")


def test_the_model_goes_on_as_it_was(model):
    model.set_adapter("plain")
    model.train()
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    # "plai" is in the names of others' parameters: peft's own merge would freeze all of these.
    add_ctm_adapter(model, ["plain", "rslora"], [1.0, 1.0], "plai")
    assert model.active_adapters == ["plain"] and model.training
    for name, parameter in model.named_parameters():
        if ".plai." in name:
            assert not parameter.requires_grad
        else:
            assert parameter.requires_grad == before[name] and torch.equal(parameter, values[name])
    model.delete_adapter("plai")
    assert {name for name, _ in model.named_parameters()} == set(values)


def test_the_merged_adapter_runs(model):
    weights = {"plain": 1.0, "rslora": 1.0}
    add_ctm_adapter(model, list(weights), [1.0, 1.0], "both", combination_type="linear", rank=12)
    model.set_adapter("both")
    model.eval()
    base = copy.deepcopy(model).unload()
    with torch.no_grad():
        for name, update in deltas(model, weights).items():
            base.get_submodule(name.removeprefix("base_model.model.")).weight += update.float()
        torch.testing.assert_close(model(IDS).logits, base(IDS).logits, rtol=1e-4, atol=1e-5)


def test_names_that_would_find_other_layers_are_written_in_full(load_adapters, save_adapter, tmp_path):
    # Together the lists say "q_proj" and layer 1 of it alone: a short name would find layer 0.
    one = save_adapter(tmp_path / "one", 1, target_modules=["model.layers.1.self_attn.q_proj"])
    two = save_adapter(
        tmp_path / "two", 2, target_modules=["q_proj"], exclude_modules=["model.layers.0.self_attn.q_proj"]
    )
    model = load_adapters(one=one, two=two)
    add_ctm_adapter(model, ["one", "two"], None, "both")
    model.save_pretrained(tmp_path / "saved", selected_adapters=["both"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = load_adapters(both=tmp_path / "saved" / "both")
    assert [name for name, module in lora_layers(again).items()] == [
        "base_model.model.model.layers.1.self_attn.q_proj"
    ]


# --- kinds of layers -------------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    """One layer of each kind that LoRA knows."""

    def __init__(self, groups=1):
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.linear = nn.Linear(6, 8)
        self.line = nn.Conv1d(8, 8, 3, padding=1)
        self.square = nn.Conv2d(4, 6, 3, padding=1, groups=groups)
        self.point = nn.Conv2d(6, 4, 1)
        self.volume = nn.Conv3d(2, 4, (1, 2, 3))


KINDS = ["embed", "linear", "line", "square", "point", "volume"]


def zoo(targets=KINDS, ranks=(2, 3), base=None, **arguments):
    torch.manual_seed(0)
    configs = [LoraConfig(r=r, lora_alpha=5, target_modules=list(targets), init_lora_weights=False) for r in ranks]
    model = get_peft_model(base or Zoo(**arguments), configs[0], adapter_name="a0")
    for i, config in enumerate(configs[1:], start=1):
        model.add_adapter(f"a{i}", config)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("space", ["ctm", "full"])
def test_every_kind_of_layer_is_merged_as_get_delta_weight_has_it(kind, space):
    model = zoo([kind])
    add_ctm_adapter(model, ["a0", "a1"], [1.0, -2.0], "both", rank=5, combination_type="linear", space=space)
    assert_same(deltas(model, {"both": 1.0}), deltas(model, {"a0": 1.0, "a1": -2.0}))


def test_gpt2s_transposed_layers_and_embeddings(tiny_gpt2_dir):
    base = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir)
    model = zoo(["c_attn", "c_proj", "wte"], base=base)
    add_ctm_adapter(model, ["a0", "a1"], [1.0, 1.0], "both", rank=5, combination_type="linear")
    assert model.peft_config["both"].fan_in_fan_out
    assert_same(deltas(model, {"both": 1.0}), deltas(model, {"a0": 1.0, "a1": 1.0}))


def test_the_keys_are_those_of_an_adapter_of_pefts_own():
    model = zoo()
    add_ctm_adapter(model, ["a0", "a1"], None, "both", rank=2)
    ours, theirs = (get_peft_model_state_dict(model, adapter_name=name) for name in ("both", "a0"))
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
    assert any(key.endswith("embed.lora_embedding_A") for key in ours)


def test_half_precision_adapters_give_a_half_precision_one():
    model = zoo().to(torch.bfloat16)
    add_ctm_adapter(model, ["a0", "a1"], [1.0, 1.0], "both", rank=5, combination_type="linear")
    parameters = {name: p for name, p in model.named_parameters() if ".both" in name}
    assert parameters and all(parameter.dtype == torch.bfloat16 for parameter in parameters.values())
    assert_same(deltas(model, {"both": 1.0}), deltas(model, {"a0": 1.0, "a1": 1.0}), 2e-2)


# --- what cannot be merged -------------------------------------------------------------------------------------------


def refused(model, match, adapters=("a0", "a1"), weights=(1.0, 1.0), name="both", error=ValueError, **options):
    """It raises, and the model is as it was."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(error, match=match):
        add_ctm_adapter(model, list(adapters), weights, name, **options)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)


def test_bad_arguments_are_named():
    model = zoo(["linear"])
    refused(model, "Adapter a2 does not exist; the model has a0, a1", adapters=["a0", "a2"])
    refused(model, "adapter 'a1' exists already", name="a1")
    assert model.base_model.add_weighted_adapter(["a0"], [1.0], "a1") is None  # peft does nothing, and does not say so
    refused(model, "`adapter_name` must be a name without dots", name="v1.0")
    refused(model, "`weights` has 1 entries for 2 adapters", weights=[1.0])
    refused(model, "`weights` must be finite numbers, got nan", weights=[1.0, float("nan")])
    refused(model, "`weights` must be finite numbers, got '1'", weights="11")
    refused(model, "adapter 'a0' is named twice", adapters=["a0", "a0"])
    refused(model, "`adapters` must be a list of at least one adapter", adapters=[], weights=[])
    refused(model, "`rank` must be an integer of at least 1, got 0", rank=0)
    refused(model, r"`density` is the share", density=1.5)
    refused(model, "unexpected keyword argument 'svd_rank'", error=TypeError, svd_rank=4)


def test_another_kind_of_model_is_refused(tiny_llama_dir):
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    with pytest.raises(
        TypeError, match="must be a PeftModel with LoRA adapters, got LlamaForCausalLM; load the first"
    ):
        add_ctm_adapter(base, ["a"], [1.0], "both")
    ia3 = get_peft_model(base, IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(TypeError, match="must be a PeftModel with LoRA adapters"):
        add_ctm_adapter(ia3, ["default"], [1.0], "both")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_dora": True}, "adapter 'odd' uses DoRA"),
        ({"lora_bias": True}, "adapter 'odd' has biases in its LoRA layers"),
        (
            {"modules_to_save": ["lm_head"]},
            r"adapter 'odd' has whole modules beside LoRA \(modules_to_save=\['lm_head'\]\)",
        ),
        ({"trainable_token_indices": [1, 2]}, "adapter 'odd' has trained rows of the embedding"),
        ({"target_parameters": ["q_proj.weight"], "target_modules": []}, "adapter 'odd' targets parameters"),
        ({"bias": "lora_only"}, r"adapter 'odd' trains biases of the base model \(bias='lora_only'\)"),
        ({"alora_invocation_tokens": [1]}, "adapter 'odd' is an activated LoRA"),
        ({"init_lora_weights": "pissa"}, "adapter 'odd' was made with init_lora_weights='pissa'.*path_initial_model"),
        ({"init_lora_weights": "pissa_niter_2"}, "init_lora_weights='pissa_niter_2'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"layer_replication": [(0, 2), (0, 2)]}, "adapter 'odd' runs on a model with replicated layers"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_is_not_plain_lora_is_refused_by_name(tiny_llama_dir, arguments, message):
    settings = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model = get_peft_model(base, LoraConfig(**settings | arguments), adapter_name="odd")
    if "layer_replication" not in arguments:  # peft cannot add a second adapter there
        model.add_adapter("plain", LoraConfig(**settings))
        refused(model, message, adapters=["plain", "odd"])
    refused(model, message, adapters=["odd"], weights=[1.0])


@pytest.mark.parametrize("init", ["gaussian", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_model_alone_are_fine(save_adapter, load_adapters, tmp_path, init):
    # As peft saves and loads them, with the initialisation in the configuration.
    folder = save_adapter(tmp_path / "a", 1, init_lora_weights=init)
    model = load_adapters(a=folder, b=save_adapter(tmp_path / "b", 2))
    add_ctm_adapter(model, ["a", "b"], [1.0, 1.0], "both", rank=8, combination_type="linear")
    assert_same(deltas(model, {"both": 1.0}), deltas(model, {"a": 1.0, "b": 1.0}))


def test_a_converted_pissa_adapter_is_merged_on_the_base_model_as_it_was(tiny_llama_dir, load_adapters, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights="pissa")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        expected = model.eval()(IDS).logits
    model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    again = load_adapters(a=tmp_path / "converted")
    add_ctm_adapter(again, ["a"], [1.0], "same")
    again.set_adapter("same")
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(IDS).logits, expected, rtol=1e-3, atol=1e-4)


def test_a_grouped_convolution_and_an_attention_module_are_refused_by_layer():
    refused(zoo(["square"], ranks=(2, 2), groups=2), "layer 'square' of adapter 'a0' is a grouped convolution")
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    model = zoo(["attention"], base=attention, ranks=(2, 2))
    refused(model, "layer 'attention' is a MultiheadAttention of peft")


def test_entries_that_are_not_finite_are_named_with_their_layer():
    model = zoo(["linear", "square"])
    model.base_model.model.square.lora_B["a1"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="layer 'square': B of adapter 'a1' has entries that are not finite"):
        add_ctm_adapter(model, ["a0", "a1"], [1.0, 1.0], "both")
    assert list(model.peft_config) == ["a0", "a1"]


def test_a_failure_of_peft_leaves_no_half_adapter(monkeypatch):
    model = zoo(["linear", "square"])
    before = set(model.state_dict())
    tuner, inject = model.base_model, model.base_model.inject_adapter

    def failing(*arguments, **options):
        inject(*arguments, **options)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tuner, "inject_adapter", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        add_ctm_adapter(model, ["a0", "a1"], [1.0, 1.0], "both")
    assert set(model.state_dict()) == before and "both" not in model.peft_config


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_report_has_each_adapter_in_each_of_its_layers(model):
    ones = numpy.ones(2, dtype=numpy.float32)  # any numbers
    report = add_ctm_adapter(model, ["plain", "rslora"], ones, "both", CtMConfig(rank=4))
    assert set(report.retained_energy["plain"]) == {
        f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qv"
    }
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    module = lora_layers(model)[name]
    update, merged = (module.get_delta_weight(a).double() for a in ("plain", "both"))
    layer = name.removeprefix("base_model.model.")
    assert report.norms["plain"][layer] == pytest.approx(float(update.norm()), rel=1e-5)
    # The merged update fills both subspaces, so its own singular vectors span them.
    u, s, vt = torch.linalg.svd(merged)
    kept = float((u[:, :4].T @ update @ vt[:4].T).norm() / update.norm()) ** 2
    assert report.retained_energy["plain"][layer] == pytest.approx(kept, rel=1e-4)
    entry = next(entry for entry in report.layers if entry.layer == layer)
    assert entry.cosines[0] == pytest.approx(kept**0.5, rel=1e-4) and entry.shape == (64, 64)
    shares = s / s.sum()
    assert entry.effective_rank == pytest.approx(
        float((-(shares * shares.clamp(min=1e-300).log()).sum()).exp()), rel=1e-3
    )
    assert report.weakest in ("plain", "rslora") and report.to_dict()["adapters"][0]["layers"] == 4


def test_nearly_orthogonal_adapters_are_warned_about(factors):
    model = zoo(["linear"], ranks=(2, 2, 2, 2), base=nn.ModuleDict({"linear": nn.Linear(64, 64)}))
    with pytest.warns(
        UserWarning, match=r"less than 0.3 of the energy of .*a\d \(0\.\d\d\).*raise the rank \(now 2\)"
    ):
        report = add_ctm_adapter(model, ["a0", "a1", "a2", "a3"], None, "both")
    assert report.recommended_space == "core"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert add_ctm_adapter(model, ["a0", "a1", "a2", "a3"], None, "wide", rank=8).recommended_space == "ctm"


def test_it_goes_on_training_and_saving_like_any_adapter(model, tmp_path, load_adapters):
    add_ctm_adapter(model, ["plain", "rslora"], None, "both")
    model.set_adapter("both")
    model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if ".both." in name]
    assert gradients and all(gradient is not None for gradient in gradients)
    model.save_pretrained(tmp_path, selected_adapters=["both"])
    again = load_adapters(both=tmp_path / "both")
    assert isinstance(again, PeftModel)
    assert_same(deltas(again, {"both": 1.0}), deltas(model, {"both": 1.0}), 0)
