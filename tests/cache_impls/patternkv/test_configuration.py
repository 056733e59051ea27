"""The options: what is refused, presets, JSON."""

import dataclasses
import re

import pytest

from hf_ext import PatternKVConfig
from hf_ext.cache_impls import patternkv

CHOICES = {
    "assign": "'paper', 'l2', 'range', 'matched'",
    "value_gate": "'test', 'narrower', 'none'",
    "key_gate": "'window', 'none'",
    "new_pattern": "'midrange', 'mean', 'none'",
    "scale_fit": "'minmax', 'mse'",
    "bank_scope": "'sequence', 'batch'",
    "return_packed": "'auto', True, False",
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nbits": 3}, "`nbits` must be 2, 4 or 8, got 3: a byte must hold whole codes"),
        ({"nbits": 7}, "`nbits` must be 2, 4 or 8, got 7"),
        ({"nbits": "2"}, "`nbits` must be 2, 4 or 8, got '2'"),
        ({"nbits": 2.0}, "`nbits` must be 2, 4 or 8, got 2.0"),
        ({"nbits": True}, "`nbits` must be 2, 4 or 8, got True"),
        ({"nbits_key": 5}, "`nbits_key` must be 2, 4 or 8, got 5"),
        ({"nbits_value": 0}, "`nbits_value` must be 2, 4 or 8, got 0"),
        ({"residual_length": 100}, "`residual_length` must be a multiple of `group_size`, got 100 and 128"),
        ({"group_size": 96}, "`residual_length` must be a multiple of `group_size`, got 128 and 96"),
        ({"group_size": 4}, "`group_size` must be an integer of at least 8, got 4"),
        ({"num_patterns": -1}, "`num_patterns` must be an integer of at least 0, got -1"),
        ({"num_patterns": 1.5}, "`num_patterns` must be an integer of at least 0, got 1.5"),
        ({"sink_length": -4}, "`sink_length` must be an integer of at least 0, got -4"),
        ({"mining_iters": 0}, "`mining_iters` must be an integer of at least 1, got 0"),
        ({"num_patterns": 2**15}, "`num_patterns` must be at most 32767, got 32768"),
        ({"seed": 2**64}, "`seed` must be at most 9223372036854775807"),
        ({"max_patterns": 0}, "`max_patterns` must be an integer of at least 1, got 0"),
        ({"mining_max_tokens": 0}, "`mining_max_tokens` must be an integer of at least 1, got 0"),
        ({"seed": None}, "`seed` must be an integer of at least 0, got None"),
        *(({name: "x"}, f"`{name}` must be one of {listed}, got 'x'") for name, listed in CHOICES.items()),
    ],
)
def test_bad_values_are_named_with_what_would_work(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PatternKVConfig(**fields)


def test_the_paper_s_choices():
    config = PatternKVConfig.paper()
    assert (config.nbits, config.num_patterns, config.group_size, config.residual_length) == (2, 32, 128, 128)
    assert (config.sink_length, config.key_gate, config.bank_scope) == (0, "none", "batch")
    assert (config.assign, config.value_gate, config.new_pattern) == ("paper", "test", "midrange")
    assert (config.scale_fit, config.mining_iters) == ("minmax", 30)
    assert (config.max_patterns, config.mining_max_tokens) == (None, None)
    assert PatternKVConfig.paper(4, seed=3).nbits_key == 4 and PatternKVConfig.paper(4, seed=3).seed == 3


def test_kivi_s_choices():
    config = PatternKVConfig.kivi()
    assert (config.num_patterns, config.group_size, config.sink_length, config.scale_fit) == (0, 32, 0, "minmax")
    assert PatternKVConfig.kivi(4, 64).group_size == 64


def test_bits_of_keys_and_values_follow_nbits_unless_given():
    config = PatternKVConfig(nbits=2, nbits_key=4)
    assert (config.nbits_key, config.nbits_value) == (4, 2)


def test_json_gives_the_same_config_back(tmp_path):
    config = PatternKVConfig.paper(4, group_size=32, max_patterns=64, return_packed=False)
    config.to_json_file(tmp_path / "config.json")
    assert PatternKVConfig.from_json_file(tmp_path / "config.json") == config
    assert PatternKVConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="unknown fields of PatternKVConfig: bits, groups; known are assign, "):
        PatternKVConfig.from_dict({"bits": 2, "groups": 1})


def test_every_field_is_documented_with_its_default():
    text = PatternKVConfig.__doc__
    for field in dataclasses.fields(PatternKVConfig):
        match = re.search(rf"^        {field.name} \((.*?)\):$", text, re.MULTILINE)
        assert match, field.name
        if field.default is not None:
            shown = f'`"{field.default}"`' if isinstance(field.default, str) else field.default
            assert f"defaults to {shown}" in match[1], field.name


def test_too_few_tokens_have_no_bits():
    with pytest.raises(ValueError, match="100 tokens fill no window: 132 are the first to be packed"):
        PatternKVConfig().bits_per_element(64, 100)


def test_public_names():
    assert set(patternkv.__all__) == {"PatternKVCache", "PatternKVConfig", "PatternKVLayer"}
