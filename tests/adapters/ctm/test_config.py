"""The configuration: every wrong value by its name, and through JSON and back."""

import json

import pytest

from hf_ext.adapters.ctm import CtMConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "`rank` must be an integer of at least 1, got 0"),
        ({"rank": True}, "`rank`"),
        ({"rank": 2.0}, "`rank`"),
        ({"combination_type": "svd"}, "`combination_type` must be one of 'linear'.*got 'svd'"),
        ({"space": "dense"}, "`space` must be one of 'ctm', 'core', 'full'; got 'dense'"),
        ({"beta": 1.5}, r"`beta` must be a finite number in \[0, 1\], got 1.5"),
        ({"beta": float("nan")}, "`beta`"),
        ({"sides": "top"}, "`sides`"),
        ({"sides": "left", "space": "core"}, "`sides='left'` is only used with space='ctm'"),
        ({"density": 0}, r"`density` is the share of entries to keep, in \(0, 1\], got 0"),
        ({"density": 1.01}, "`density`"),
        ({"density": -0.5}, "`density`"),
        ({"density": None}, "`density` is None, but combination_type='ties' needs it"),
        ({"ties_density": 0.5}, "`ties_density` is only used by combination_type='dare_ties'"),
        ({"majority_sign_method": "mean"}, "`majority_sign_method`"),
        ({"scaling_coeff": float("inf")}, "`scaling_coeff`"),
        ({"max_iter": -1}, "`max_iter`"),
        ({"tol": -1e-3}, "`tol`"),
        ({"seed": None}, "`seed`"),
        ({"factor": "right"}, "`factor`"),
        ({"weight_subspace": 1}, "`weight_subspace`"),
        ({"dtype": "int8"}, "`dtype`"),
    ],
)
def test_a_wrong_value_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        CtMConfig(**arguments)


def test_json_and_back():
    config = CtMConfig(rank=8, combination_type="dare_ties", ties_density=0.3, beta=0, dtype="bfloat16")
    assert CtMConfig.from_dict(json.loads(config.to_json_string())) == config
    assert CtMConfig.from_dict(json.loads(CtMConfig().to_json_string())) == CtMConfig()


def test_an_unknown_key_is_refused():
    with pytest.raises(ValueError, match="unknown key.*svd_rank.*known"):
        CtMConfig.from_dict({"svd_rank": 8})


def _largest(matrices, weights):
    return matrices[0]


def test_a_rule_of_ones_own_is_written_by_name_and_not_read_back():
    stored = CtMConfig(combination_type=_largest).to_dict()
    assert stored["combination_type"].startswith("callable:") and stored["combination_type"].endswith("._largest")
    with pytest.raises(ValueError, match="pass the function itself"):
        CtMConfig.from_dict(json.loads(json.dumps(stored)))


@pytest.mark.parametrize(
    ("rule", "weight"),
    [("ties", 1), ("dare_ties", 1), ("tsv", 1), ("linear", 0.25), ("dare_linear", 0.25), ("magnitude_prune", 0.25)],
)
def test_default_weights_do_not_count_what_adapters_share_several_times(rule, weight):
    assert CtMConfig(combination_type=rule).default_weights(4) == [weight] * 4
