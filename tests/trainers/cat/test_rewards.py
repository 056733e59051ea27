"""The arithmetic, against what numpy and the host make of it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ext.trainers.answers import answers_match
from hf_ext.trainers.cat.rewards import (
    answer_classes,
    discrimination,
    fill_unscorable,
    match_rewards,
    parse_choice,
    parse_grade,
    parse_verdict,
    rubric_reward,
    score_reward,
)

NAN = float("nan")


def test_a_rollout_is_rewarded_for_the_references_answer():
    assert match_rewards(["7", "7.0", "3", None], "7", answers_match) == [1.0, 1.0, 0.0, 0.0]
    assert match_rewards(["7", "7", "3", None], "3", answers_match) == [0.0, 0.0, 1.0, 0.0]
    assert match_rewards(["7", None], None, answers_match) == [None, None]
    assert match_rewards(["7"], "", answers_match) == [None]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([True, True, False, True, None], 0.75),
        ([True, True, None, None, None], None),  # fewer than half are readable
        ([True, False, None, None], 0.5),  # exactly half are enough
        ([False] * 5, 0.0),
        ([None] * 5, None),
        ([], None),
    ],
)
def test_a_rubric_reward_is_the_share_of_readable_verdicts_that_are_yes(verdicts, expected):
    assert rubric_reward(verdicts) == expected


def test_a_grade_from_1_to_10_becomes_a_reward_from_0_to_1():
    assert [score_reward(g) for g in (1, 10, 5.5, None)] == [0.0, 1.0, 0.5, None]


def test_a_criterion_discriminates_if_one_rollout_meets_it_and_another_does_not():
    verdicts = [[True, True, None, True], [True, False, True, None], [True, None, True, None]]
    assert discrimination(verdicts) == [False, True, False, False]
    assert discrimination([]) == []


def test_answers_are_classed_by_equality_not_by_spelling():
    answers = ["1/2", None, "3", "0.5", r"\frac{1}{2}", "3.0", "4"]
    assert answer_classes(answers, answers_match) == [[0, 3, 4], [2, 5], [6]]
    assert answer_classes([None, None], answers_match) == []


# --- rewards that are missing ----------------------------------------------------------------------------------------


def test_a_missing_reward_beside_another_gets_the_mean_of_its_group_and_an_empty_group_that_of_the_batch():
    own = [1.0, NAN, 0.0, 0.5, NAN, NAN, NAN, NAN, 1.0, 1.0, 1.0, 1.0]
    rewards = torch.tensor([[0.1 * i, value] for i, value in enumerate(own)])
    filled = fill_unscorable(rewards, 1, 4)
    assert torch.equal(filled[:, 0], rewards[:, 0])
    expected = [1.0, 0.5, 0.0, 0.5, *[5.5 / 7] * 4, 1.0, 1.0, 1.0, 1.0]
    np.testing.assert_allclose(filled[:, 1].numpy(), np.array(expected), rtol=1e-6)


def test_rows_without_any_other_reward_stay_missing():
    rewards = torch.tensor([[NAN, 1.0], [NAN, NAN], [2.0, NAN], [2.0, 0.0]])
    filled = fill_unscorable(rewards, 1, 2)
    assert filled[1].isnan().all()  # the host leaves this row out
    assert filled[2, 1] == 0.0
    np.testing.assert_array_equal(filled[[0, 3]].numpy(), rewards[[0, 3]].numpy())


def test_without_any_reward_in_the_batch_the_constant_is_0():
    assert fill_unscorable(torch.tensor([[1.0, NAN], [2.0, NAN]]), 1, 2)[:, 1].tolist() == [0.0, 0.0]


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, None]), min_size=8, max_size=8), st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_filling_moves_no_group_mean_and_no_reward_that_is_there(own, column):
    other = torch.arange(8.0)
    mine = torch.tensor([NAN if value is None else value for value in own])
    rewards = torch.stack([mine, other] if column == 0 else [other, mine], dim=1)
    filled = fill_unscorable(rewards, column, 4)[:, column]
    there = ~mine.isnan()
    assert torch.equal(filled[there], mine[there]) and not filled.isnan().any()
    for group in range(2):
        part = slice(4 * group, 4 * group + 4)
        if there[part].any():
            assert filled[part].mean().item() == pytest.approx(mine[part].nanmean().item(), abs=1e-6)


# --- replies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yes", True),
        ("Yes.", True),
        ("**No**, it does not", False),
        (" no\n", False),
        ("The answer is yes", None),
        ("nope", None),
        ("yesterday", None),
        ("", None),
        ("1", None),
    ],
)
def test_a_verdict_is_the_first_word(text, expected):
    assert parse_verdict(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7", 7), ("Grade: 10/10", 10), ("0", None), ("11", None), ("1.5", 1), ("ten", None), ("9" * 5000, None)],
)
def test_a_grade_is_the_first_whole_number_from_1_to_10(text, expected):
    assert parse_grade(text) == expected


def test_a_choice_is_an_index():
    assert parse_choice("Attempt 3 is best", 4) == 2
    assert parse_choice("5", 4) is None and parse_choice("0", 4) is None and parse_choice("none", 4) is None
