"""The CtM benchmark: disjoint tasks, answers scored as greedy decoding writes them, merges resumed, a report of it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.ctm import layer, methods, report, run, study, synthetic, tasks, training
from hf_ext.benchmarks.ctm.tasks import Example, Task
from hf_ext.runlog import read_rows

QUICK = training.Training(rank=4, alpha=8, targets=("v_proj", "down_proj"), learning_rate=1e-2, batch=4, tokens=4000)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir):
    return AutoTokenizer.from_pretrained(tiny_llama_dir)


@pytest.fixture
def load(tiny_llama_dir):
    return lambda: AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()


def made_up(name: str, answer: str) -> Task:
    words = {f"{letter}{number}": answer for number in range(6) for letter in "abc"}
    return tasks.split(name, words, name + " {} =", (8, 4, 4))


@pytest.fixture
def tiny(monkeypatch, tiny_llama_dir, tmp_path):
    """The benchmark on a tiny model and two made-up tasks, its adapters in a cache of its own."""
    monkeypatch.setenv("HF_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lm, "fetch_smollm2", lambda say=None: tiny_llama_dir)
    monkeypatch.setattr(run, "TASKS", ("x", "y"))
    monkeypatch.setattr(run, "make_task", lambda name: made_up(name, name))
    monkeypatch.setattr(run, "Training", lambda: dataclasses.replace(QUICK, tokens=60))
    monkeypatch.setattr(study, "accuracy", lambda model, tokenizer, examples: 0.5 + len(examples) / 100)
    monkeypatch.setattr(run, "SIZES", (64,))
    return tmp_path / "rows.jsonl"


def random_factors(count: int, seed: int, rows: int = 40, columns: int = 30, rank: int = 4) -> list[methods.Factors]:
    generator = torch.Generator().manual_seed(seed)

    def pair() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)

    return [{"one": pair(), "two": pair()} for _ in range(count)]


# --- tasks ---


def test_parts_of_a_task_share_no_word_and_are_the_same_each_time():
    pairs = {f"w{number}": str(number) for number in range(100)}
    task = tasks.split("t", pairs, "{}:", (50, 20, 30))
    parts = [{example.word for example in part} for part in (task.training, task.validation, task.test)]
    assert [len(part) for part in parts] == [50, 20, 30] and len(set.union(*parts)) == 100
    assert task == tasks.split("t", dict(reversed(pairs.items())), "{}:", (50, 20, 30))
    assert task.test != tasks.split("u", pairs, "{}:", (50, 20, 30)).test
    example = task.test[0]
    assert example.prompt == f"{example.word}:" and example.answer == f" {pairs[example.word]}\n"
    assert tasks.split("t", pairs, "{}:", (10, 20, 30)).test == task.test  # whatever there is to train on


def test_a_family_of_words_stays_in_one_part():
    pairs = {f"{stem}{end}": stem for stem in ("ab", "cd", "ef", "gh", "ij", "kl") for end in ("", "s", "ed")}
    task = tasks.split("t", pairs, "{}", (6, 3, 5), family=lambda word: word[:2])
    stems = [{example.word[:2] for example in part} for part in (task.training, task.validation, task.test)]
    assert not (stems[0] & stems[1] or stems[0] & stems[2] or stems[1] & stems[2])


def test_too_few_words_and_unknown_tasks_are_refused():
    with pytest.raises(ValueError, match=r"task 't' has 3 words, too few for \(2, 1, 1\) examples"):
        tasks.split("t", {"a": "1", "b": "2", "c": "3"}, "{}", (2, 1, 1))
    with pytest.raises(ValueError, match="task 'plural' is unknown; known: past, sentiment, language, number"):
        tasks.make_task("plural")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (40, "forty"),
        (99, "ninety-nine"),
        (105, "one hundred five"),
        (2368, "two thousand three hundred sixty-eight"),
        (9010, "nine thousand ten"),
    ],
)
def test_numbers_in_words(number, words):
    assert tasks.number_words(number) == words


def test_numbers_have_words_of_their_own():
    assert len({tasks.number_words(number) for number in range(10000)}) == 10000
    with pytest.raises(ValueError, match="from 0 to 9999, got 10000"):
        tasks.number_words(10000)


# --- training and scoring ---


class Numbers:
    """A tokenizer whose text is the token ids: "12 7" is [12, 7]."""

    pad_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[int(number) for number in text.split()])


def test_accuracy_is_that_of_greedy_decoding(load):
    model, examples = load(), []
    for number in range(8):
        prompt = list(range(10 + number, 13 + 3 * number))  # of different lengths
        with torch.autocast("cpu", torch.bfloat16):
            out = model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False, eos_token_id=None)
        answer = out[0, len(prompt) : len(prompt) + 1 + number % 3].tolist()
        if number in (1, 5, 6):
            answer[-1] = (answer[-1] + 1) % 256
        examples.append(Example(str(number), " ".join(map(str, prompt)), " ".join(map(str, answer))))
    assert training.accuracy(model, Numbers(), examples, batch=3) == 5 / 8


def test_a_batch_is_padded_on_the_left_and_only_answers_are_labels(tokenizer):
    inputs, labels = training.batch_of(tokenizer, [Example("", "ab", "cde"), Example("", "a", "b")])
    ids = [tokenizer(text).input_ids for text in ("abcde", "ab", "cde", "b")]
    assert inputs["input_ids"][0].tolist() == ids[0] and inputs["attention_mask"].tolist() == [
        [1] * 5,
        [0, 0, 0, 1, 1],
    ]
    assert inputs["input_ids"][1, 3:].tolist() == ids[1]
    assert labels.tolist() == [ids[2], [-100, -100, *ids[3]]]


def test_an_adapter_learns_its_task_and_is_trained_once(load, tokenizer, tmp_path):
    task, folder = made_up("x", "x"), tmp_path / "a"
    facts = training.train_adapter(load, tokenizer, task, QUICK, 0, 0, folder)
    assert QUICK.tokens <= facts["tokens"] < QUICK.tokens + 4 * 20 and facts["steps"] > 10
    model = PeftModel.from_pretrained(load(), folder)
    assert training.accuracy(load(), tokenizer, task.test) == 0 and training.accuracy(model, tokenizer, task.test) == 1
    again = training.train_adapter(lambda: pytest.fail("trained again"), tokenizer, task, QUICK, 0, 0, folder)
    assert again == facts and list(tmp_path.iterdir()) == [folder]


def test_the_folder_of_an_adapter_is_named_by_what_it_depends_on():
    task = made_up("x", "x")
    first = training.adapter_folder(QUICK, task, 0, 1, "m")
    assert first == training.adapter_folder(QUICK, made_up("x", "x"), 0, 1, "m")
    others = [
        training.adapter_folder(dataclasses.replace(QUICK, tokens=4001), task, 0, 1, "m"),
        training.adapter_folder(QUICK, made_up("x", "z"), 0, 1, "m"),
        training.adapter_folder(QUICK, task, 0, 2, "m"),
        training.adapter_folder(QUICK, task, 0, 1, "n"),
    ]
    assert len({first, *others}) == 5


def test_a_common_start_is_one_seed_for_all_tasks_and_an_own_one_is_not():
    assert {study.init_seed("common", seed, place) for seed in range(3) for place in range(4)} == {0, 1, 2}
    assert len({study.init_seed("own", seed, place) for seed in range(3) for place in range(4)}) == 12


# --- merging ---


def test_an_update_is_measured_as_peft_would_and_the_base_is_left_as_it_was(load, tokenizer, tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(load(), LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    model.save_pretrained(tmp_path)
    adapter = methods.read_adapter(tmp_path)
    layers = {name: module for name, module in model.base_model.model.named_modules() if hasattr(module, "lora_A")}
    assert set(adapter) == set(layers)
    for name, module in layers.items():
        a, b = adapter[name]
        torch.testing.assert_close(b @ a, module.get_delta_weight("default"))
    base = load()
    before = {name: weight.clone() for name, weight in base.named_parameters()}
    seen = {}

    def remember(network, *_):
        seen["weight"] = network.get_submodule("model.layers.0.mlp.up_proj").weight.clone()
        return 0.0

    monkey = pytest.MonkeyPatch()
    monkey.setattr(study, "accuracy", remember)
    study.Evaluator(base, tokenizer, [made_up("x", "x")]).measure(adapter, [0.5], "test")
    monkey.undo()
    a, b = adapter["model.layers.0.mlp.up_proj"]
    torch.testing.assert_close(seen["weight"], before["model.layers.0.mlp.up_proj.weight"] + 0.5 * (b @ a))
    assert all(torch.equal(weight, before[name]) for name, weight in base.named_parameters())


def test_kept_energy_is_that_of_dense_projections():
    adapters = random_factors(3, 0)
    merged = methods.merge(methods.METHODS["CtM ties"], adapters, 4, 0.5, 0)
    found = methods.kept_energy(adapters, merged)
    for number, adapter in enumerate(adapters):
        for place, name in enumerate(adapter):
            dense, (a, b) = adapter[name][1] @ adapter[name][0], merged[name]
            left, right = b @ torch.linalg.pinv(b), torch.linalg.pinv(a) @ a
            share = (left @ dense @ right).square().sum() / dense.square().sum()
            assert found[number][place] == pytest.approx(share.item(), abs=1e-4)
    whole = methods.merge(methods.METHODS["sum, not cut"], adapters, 4, 0.5, 0)
    assert methods.kept_energy(adapters, whole) == [pytest.approx([1, 1])] * 3


def test_peft_merges_a_layer_alone_as_it_does_in_a_model():
    adapters = random_factors(3, 1)
    merged = methods.merge(methods.METHODS["peft svd"], adapters, 4, 0.5, 0)
    for name, (a, b) in merged.items():
        dense = sum(adapter[name][1] @ adapter[name][0] for adapter in adapters)
        left, values, right = torch.linalg.svd(dense, full_matrices=False)
        torch.testing.assert_close(b @ a, left[:, :4] * values[:4] @ right[:4], rtol=1e-3, atol=1e-3)


def test_merges_that_the_card_calls_the_same_are_the_same():
    adapters = random_factors(3, 1)
    names = [("full ties", "peft ties_svd"), ("core linear", "peft svd")]
    pairs = [(methods.METHODS[one], methods.METHODS[two]) for one, two in names]
    pairs.append((methods.METHODS["core tsv"], methods.Method("full", "tsv")))
    for one, two in pairs:
        first, second = (methods.merge(method, adapters, 4, 0.5, 0) for method in (one, two))
        for name, (a, b) in first.items():
            torch.testing.assert_close(b @ a, second[name][1] @ second[name][0], rtol=1e-3, atol=1e-3)


def test_every_method_gives_one_adapter_of_the_rank_asked_for():
    adapters = random_factors(3, 2)
    for name, method in methods.METHODS.items():
        merged = methods.merge(method, adapters, 4, 0.5, 0)
        rank = 12 if method.whole else 4
        assert {a.shape[0] for a, _ in merged.values()} == {rank}, name
        again = methods.merge(method, adapters, 4, 0.5, 0)
        assert all(torch.equal(merged[key][1], again[key][1]) for key in merged), name


def test_the_grid_is_searched_by_scale_and_then_by_density():
    asked = []

    def score(density, scales):
        asked.append((density, list(scales)))
        return [-abs(scale - 1.6) - abs(density - 0.75) for scale in scales]

    scale, density, tried = study.tune(score, thins=True)
    assert (scale, density) == (1.5, 0.75) and len(tried) == len(study.SCALES) + 2
    assert asked == [(0.5, list(study.SCALES)), (0.25, [1.5]), (0.75, [1.5])]
    assert study.tune(lambda _, scales: [0.0] * len(scales), thins=False)[:2] == (1.0, 0.5)


@pytest.mark.parametrize(("best", "found"), [(0.1, 0.125), (0.06, 0.0625), (4.0, 4.5)])
def test_a_grid_whose_end_is_best_is_gone_beyond(best, found):
    scale, _, tried = study.tune(lambda _, scales: [-abs(scale - best) for scale in scales], thins=False)
    assert scale == found and len(tried) > len(study.SCALES)


def test_accuracies_are_shares_of_the_adapters_own():
    assert study.normalised({"x": 0.4, "y": 0.9}, {"x": 0.8, "y": 0.9}) == {"x": 0.5, "y": 1.0}
    with pytest.raises(ValueError, match="the adapters of y get nothing right"):
        study.normalised({"x": 0.4, "y": 0.9}, {"x": 0.8, "y": 0.0})


def test_other_factors_are_the_same_updates():
    adapters = random_factors(2, 3)
    for adapter, turned in zip(adapters, synthetic.regauge(adapters, 0)):
        for name, (a, b) in adapter.items():
            other_a, other_b = turned[name]
            assert (a - other_a).norm() > 0.1 * a.norm()
            torch.testing.assert_close(other_b @ other_a, b @ a, rtol=1e-4, atol=1e-4)


def test_half_of_the_space_is_shared():
    first, second = (adapter[synthetic.LAYER] for adapter in synthetic.half_shared_adapters(60, 8, [1.0, 4.0], seed=0))
    assert (first[1] @ first[0]).norm() == pytest.approx(1, rel=1e-4)
    assert (second[1] @ second[0]).norm() == pytest.approx(4, rel=1e-4)
    together = torch.linalg.matrix_rank(torch.cat([first[1], second[1]], 1))
    assert together == 12  # 8 + 8, less the 4 in common


# --- the whole ---


@pytest.mark.slow
def test_rows_are_complete_and_a_second_run_measures_only_what_is_missing(tiny, monkeypatch, tmp_path):
    arguments = {"cases": "common", "seeds": 2, "rank": 4, "threads": 1, "out": tiny}
    run.main(parts="layer,gauge,energy,adapters", methods="CtM ties;peft svd;core linear", **arguments)
    first = read_rows(tiny)
    assert {row["part"] for row in first} == {"layer", "gauge", "energy", "adapters"}
    for row in first:
        assert {*run.KEY, "versions", "command", "threads"} <= set(row)
    own = next(row for row in first if row["name"] == "own")
    merged = next(row for row in first if row["part"] == "adapters" and row["name"] == "CtM ties")
    assert set(own["test"]) == set(merged["test"]) == {"x", "y"} and len(own["training"]) == 2
    assert merged["scale"] in study.SCALES and merged["density"] in study.DENSITIES and len(merged["tried"]) == 8
    peft = next(row for row in first if row["part"] == "layer" and row["name"] == "peft svd")
    assert peft["seconds"] > 0 and peft["runs"] == 5 and peft["peak_bytes"] >= 0
    folders = sorted((tmp_path / "cache" / "ctm-adapters").iterdir())
    assert len(folders) == 4  # two tasks, two seeds
    monkeypatch.setattr(study, "accuracy", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(run, "measure_apart", lambda *_: pytest.fail("measured again"))
    run.main(parts="layer,gauge,energy,adapters", methods="CtM ties;peft svd;core linear", **arguments)
    assert read_rows(tiny) == first
    text = report.section(first, tmp_path / "plots")
    assert "CtM ties" in text and "peft svd" in text and "nan" not in text
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["accuracy.png", "kept_energy.png"]


def test_unknown_names_are_errors_that_list_the_known(tmp_path):
    arguments = {"cases": "common", "methods": "", "seeds": 1, "rank": 4, "threads": 1, "out": tmp_path / "rows.jsonl"}
    for change, message in [
        ({"parts": "speed"}, "--parts speed: known are layer, gauge, energy, adapters"),
        ({"cases": "other"}, "--cases other: known are common, own"),
        ({"methods": "nope"}, "--methods 'nope' matches none of: core ties, CtM ties"),
        ({"rank": 0}, "--rank must be at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            run.main(**{"parts": "gauge", **arguments, **change})
    assert not list(tmp_path.iterdir())


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="KeyError: 'nope'"):
        layer.measure_apart("nope", 8, 8, 2, 2, 1)
