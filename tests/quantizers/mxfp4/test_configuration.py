"""`MXFP4Config`: what it refuses, what it stores."""

import json

import pytest
import torch

from hf_ext import MXFP4Config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 24}, "`block_size` must be one of 16, 32; got 24"),
        ({"scale_rule": "floor"}, "`scale_rule` must be one of 'ocp', 'ceil', 'oas', 'even', 'mse'; got 'floor'"),
        ({"macro_block_size": 100}, "`macro_block_size` must be one of 32, 64, 128, None; got 100"),
        ({"weight_search": "best"}, "`weight_search` must be one of"),
        ({"activation": "int8"}, "`activation` must be one of 'mxfp4', None; got 'int8'"),
        ({"activation_search": "dynamic"}, "`activation_search` must be one of 'static'"),
        ({"search_slots": 10}, "`search_slots` must divide 256, got 10"),
        ({"search_slots": True}, "`search_slots` must be a positive divisor"),
        ({"search_exponents": 1}, "`search_exponents` must be True or False"),
        ({"compute_dtype": "int8"}, "`compute_dtype` must be one of float32, float16, bfloat16"),
        ({"modules_to_not_convert": "lm_head"}, "`modules_to_not_convert` must be a list of names"),
        ({"modules_to_not_convert": ["*q_proj"]}, "'.q_proj' is not a regular expression.*such as 'q_proj'"),
        ({"channel_stats": "f", "weight_search": "static"}, "`channel_stats` is only used by"),
        ({"macro_block_size": None, "weight_search": "dynamic"}, "has nothing to search"),
        ({"kernel": "cuda"}, "`kernel` must be one of"),
        ({"quant_method": "mxfp4"}, "`quant_method` must be 'hf_ext_mxfp4'"),
    ],
)
def test_bad_values_are_named_with_what_would_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        MXFP4Config(**arguments)


def test_unknown_keys_raise():
    with pytest.raises(ValueError, match="unknown key.s. group_size"):
        MXFP4Config.from_dict({"group_size": 32})
    with pytest.raises(TypeError, match="group_size"):
        MXFP4Config(group_size=32)


def test_round_trips_through_json_without_what_belongs_to_the_loader():
    config = MXFP4Config(
        block_size=16, macro_block_size=64, compute_dtype=torch.bfloat16, modules_to_not_convert=["lm_head"]
    )
    stored = json.loads(config.to_json_string())
    assert {"dequantize", "kernel", "channel_stats"}.isdisjoint(stored)
    assert MXFP4Config.from_dict(stored) == config
    assert config.torch_compute_dtype is torch.bfloat16


def test_presets_and_bits():
    assert MXFP4Config().bits_per_weight == 4.3125
    assert MXFP4Config.ocp().bits_per_weight == 4.25
    paper = MXFP4Config.paper()
    assert (paper.block_size, paper.weight_search, paper.activation) == (16, "dynamic", "mxfp4")
    assert paper.bits_per_weight == 4.5625
    assert MXFP4Config.vllm(scale_rule="even").macro_block_size is None


def test_auto_search_follows_the_statistics():
    assert MXFP4Config().resolve_search(has_stats=False) == "static"
    assert MXFP4Config().resolve_search(has_stats=True) == "weighted"
    assert MXFP4Config(weight_search="dynamic").resolve_search(has_stats=False) == "dynamic"
    with pytest.raises(ValueError, match="needs the inputs' statistics"):
        MXFP4Config(weight_search="weighted").resolve_search(has_stats=False)
