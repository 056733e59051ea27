"""`hf-ext merge-lora`, called as the command calls it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hf_ext import merge_adapter_folders
from hf_ext.cli import main


@pytest.fixture
def run(capsys, monkeypatch):
    """Exit code, standard output and standard error of `hf-ext merge-lora ...`."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main(["merge-lora", *map(str, arguments)])
        captured = capsys.readouterr()
        return exit.value.code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def adapters(save_adapter, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [save_adapter(root / name, seed) for seed, name in enumerate(["sql", "math", "co[de]"])]


def test_it_merges_shows_what_is_kept_and_says_where_the_result_is(run, adapters, tmp_path):
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    code, text, err = run(*adapters, "-o", out, "--combine", "ties", "--rank", 4, "--report", figures)
    assert code == 0 and err == ""
    report = json.loads(figures.read_text())
    for entry in report["adapters"]:
        assert entry["name"] in text and f"{entry['mean_retained_energy']:.3f}" in text
    assert "Energy kept at rank 4" in text and "co[de]" in text
    assert "fit for vLLM: yes, at --max-lora-rank 4 or more" in text
    assert text.rstrip().endswith(f"merged adapter of rank 4 in {out}")
    assert len(report["layers"]) == 4 and report["config"]["combination_type"] == "ties"


def test_every_option_reaches_the_merge(run, adapters, tmp_path):
    options = [
        *("--combine", "dare_ties", "--rank", 3, "--density", 0.7, "--ties-density", 0.6, "--space", "ctm"),
        *("--sides", "left", "--beta", 0.5, "--majority-sign", "frequency", "--scale", 0.9, "--factor", "left"),
        *("--dtype", "bfloat16", "--seed", 3),
    ]
    code, _, err = run(*adapters, "-o", tmp_path / "command", "--weights", "1 -0.5 2", *options)
    assert code == 0, err
    merge_adapter_folders(
        adapters,
        tmp_path / "python",
        [1, -0.5, 2],
        combination_type="dare_ties",
        rank=3,
        density=0.7,
        ties_density=0.6,
        sides="left",
        beta=0.5,
        majority_sign_method="frequency",
        scaling_coeff=0.9,
        factor="left",
        dtype="bfloat16",
        seed=3,
    )
    found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("command", "python"))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("given", [["1 2 0.5"], ["1,2,0.5"], ["1", "2", "0.5"]], ids=str)
def test_weights_may_be_one_word_or_several(run, adapters, tmp_path, given):
    figures = tmp_path / "figures.json"
    code, _, err = run(*adapters, "-o", tmp_path / "out", "--report", figures, "--weights", *given)
    assert code == 0, err
    assert [entry["weight"] for entry in json.loads(figures.read_text())["adapters"]] == [1, 2, 0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "1 2"], "`weights` has 2 entries for 3 adapters"),
        (["--weights", "one"], "--weights is 'one'; give numbers"),
        (["--combine", "svd"], "`combination_type` must be one of"),
        (["--method", "knots"], "--method is 'knots'; this version has ctm"),
        (["--space", "dense"], "`space` must be one of"),
        (["--density", "0"], "`density` is the share of entries to keep"),
        (["--rank", "0"], "`rank` must be an integer of at least 1"),
        (["--dtype", "int8"], "`dtype` must be one of"),
    ],
    ids=str,
)
def test_errors_are_one_line_and_nothing_is_written(run, adapters, tmp_path, arguments, message):
    code, _, err = run(*adapters, "-o", tmp_path / "out", *arguments)
    assert code == 1 and err.startswith("error: ") and message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_report_that_cannot_be_written_is_refused_before_the_merge(run, adapters, tmp_path):
    (tmp_path / "file").touch()
    for report, message in (
        (tmp_path, "is a folder; name a file"),
        (tmp_path / "out", "is a folder; name a file"),
        (tmp_path / "file" / "figures.json", "cannot be written"),
    ):
        code, _, err = run(*adapters, "-o", tmp_path / "out", "--report", report)
        assert code == 1 and err.startswith("error: --report: ") and message in err
        assert not (tmp_path / "out").exists()


def test_an_existing_output_needs_overwrite(run, adapters, tmp_path):
    out = tmp_path / "out"
    assert run(*adapters, "-o", out)[0] == 0
    code, _, err = run(*adapters, "-o", out)
    assert code == 1 and "exists already; overwrite it" in err
    assert run(*adapters, "-o", out, "--overwrite")[0] == 0


def test_warnings_and_advice_are_shown_once(run, save_adapter, tmp_path):
    folders = [save_adapter(tmp_path / str(i), i, r=2) for i in range(6)]
    code, out, err = run(*folders, "-o", tmp_path / "out")
    assert code == 0 and err == ""
    assert out.count("warning: less than 0.3 of the energy of") == 1
    assert "--space core may serve them better" in out


def test_a_push_checks_the_card_and_needs_the_hub(run, adapters, tmp_path):
    code, _, err = run(*adapters, "-o", tmp_path / "local", "--push-to-hub", "me/both")
    assert code == 1 and "README.md lacks base_model in its metadata" in err
    options = ["--base-model", "me/base", "--push-to-hub", "me/both"]
    code, _, err = run(*adapters, "-o", tmp_path / "named", *options)
    assert code == 1 and "HF_HUB_OFFLINE is set, so nothing can be uploaded" in err
    assert json.loads((tmp_path / "named" / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
