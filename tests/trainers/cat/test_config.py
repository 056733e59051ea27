"""The configuration: what it refuses, and that it goes through JSON and back."""

import json
import re
from dataclasses import fields

import pytest
from trl import GRPOConfig

from hf_ext.trainers.cat import CaTConfig, prompts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"aggregator": "majorty"},
            "aggregator is 'majorty'; it must be one of synthesis, majority, min_ppl, best_of_n, first; "
            "a callable goes to the trainer's argument aggregator",
        ),
        ({"reward": "rubrics"}, "reward is 'rubrics'; it must be one of auto, match, rubric, judge_score"),
        ({"audit": True}, "audit is True; it must be one of all, sample, off"),
        ({"on_judge_error": "stop"}, "on_judge_error is 'stop'; it must be one of continue, raise"),
        ({"on_rubric_failure": ""}, "on_rubric_failure is ''; it must be one of skip, judge_score, raise"),
        ({"anchor_source": "x"}, "anchor_source is 'x'; it must be one of auto, instance, path"),
        ({"min_rubrics": 11}, "min_rubrics is 11 and max_rubrics 10; the first may not be above the second"),
        ({"min_rubrics": 0}, "min_rubrics is 0; it must be at least 1"),
        ({"anchor_temperature": -1.0}, "anchor_temperature is -1.0; it must be at least 0"),
        ({"anchor_batch_size": 0}, "anchor_batch_size is 0; it must be at least 1"),
        ({"rollout_token_budget": 0}, "rollout_token_budget is 0; it must be at least 1"),
        ({"synthesis_template": "x"}, "synthesis_template lacks {attempts}"),
        ({"judge_template": "{completion}"}, "judge_template lacks {criterion}"),
        ({"rubric_template": "{reference} {x}"}, "rubric_template has the unknown field {x}; it may have {reference}"),
        ({"rubric_template": "{reference"}, "rubric_template is no format string"),
        (
            {"synthesis_template": "{attempts} {prompt}"},
            "synthesis_template has {prompt}, but include_prompt is False: set it to True to show the task",
        ),
        ({"synthesis_template": "{attempts}", "include_prompt": True}, "synthesis_template lacks {prompt}"),
        (
            {"judge_template": "{prompt} {completion} {criterion}"},
            "judge_template has {prompt}, but judge_include_prompt is False",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, message, kit, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        kit.config(tmp_path, **changes)


def test_the_default_templates_follow_the_flags(kit, tmp_path):
    blind = kit.config(tmp_path)
    assert blind.synthesis_template == prompts.SYNTHESIS and "{prompt}" not in blind.judge_template
    shown = kit.config(tmp_path, include_prompt=True, judge_include_prompt=True)
    assert all(
        "{prompt}" in getattr(shown, f"{name}_template") for name in ("synthesis", "best_of_n", "judge", "score")
    )
    assert shown.template_hashes["rubric"] == blind.template_hashes["rubric"]
    assert shown.template_hashes["judge"] != blind.template_hashes["judge"]


def test_it_goes_through_json_and_back(kit, tmp_path):
    config = kit.config(tmp_path, include_prompt=True, reward="judge_score", anchor_temperature=0.0, min_rubrics=3)
    own = {field.name for field in fields(CaTConfig)} - {field.name for field in fields(GRPOConfig)} | {"beta"}
    saved = {name: value for name, value in json.loads(config.to_json_string()).items() if name in own}
    assert set(saved) == own
    again = kit.config(tmp_path, **saved)
    assert {name: getattr(again, name) for name in own} == saved


def test_every_field_is_documented_with_a_default():
    own = {field.name for field in fields(CaTConfig)} - {field.name for field in fields(GRPOConfig)}
    for field in fields(CaTConfig):
        if field.name in own:
            assert field.metadata["help"] and field.name in CaTConfig.__doc__, field.name
