"""The arithmetic of CaT: verdicts to rewards, answers to classes, rewards that are missing. No model, no trainer."""

import re
from collections.abc import Callable, Sequence

import torch

__all__ = [
    "answer_classes",
    "discrimination",
    "fill_unscorable",
    "match_rewards",
    "parse_choice",
    "parse_grade",
    "parse_verdict",
    "rubric_reward",
    "score_reward",
]

Match = Callable[[str, str], bool]


def match_rewards(answers: Sequence[str | None], reference: str | None, match: Match) -> list[float | None]:
    """1 for a rollout whose answer is the reference's, else 0 (the paper's verifiable reward).

    Args:
        answers: Answer of each rollout; None (no answer found) gets 0.
        reference: Answer of the reference; None or empty makes the whole group unscorable: every reward is None.
        match: Whether two answers are the same.
    """
    if not reference:
        return [None] * len(answers)
    return [float(answer is not None and match(answer, reference)) for answer in answers]


def rubric_reward(verdicts: Sequence[bool | None]) -> float | None:
    """Share of the criteria that are met, among those with a readable verdict (the paper's rubric reward).

    None when fewer than half of the verdicts are readable, or there are none: too little to judge by.
    """
    readable = [verdict for verdict in verdicts if verdict is not None]
    if not readable or 2 * len(readable) < len(verdicts):
        return None
    return sum(readable) / len(readable)


def score_reward(grade: float | None) -> float | None:
    """A grade from 1 to 10 as a reward from 0 to 1: (g - 1) / 9."""
    return None if grade is None else (grade - 1) / 9


def discrimination(verdicts: Sequence[Sequence[bool | None]]) -> list[bool]:
    """For each criterion, whether it separates the rollouts: one meets it and another does not.

    Args:
        verdicts: A row per rollout, an entry per criterion. Unreadable verdicts count on neither side.
    """
    columns = zip(*verdicts)
    return [any(v is True for v in column) and any(v is False for v in column) for column in map(list, columns)]


def answer_classes(answers: Sequence[str | None], match: Match) -> list[list[int]]:
    """Indices of rollouts with the same answer, largest class first, ties by the first index; None is in no class."""
    classes: list[list[int]] = []
    for index, answer in enumerate(answers):
        if answer is None:
            continue
        for members in classes:
            if match(answer, answers[members[0]]):
                members.append(index)
                break
        else:
            classes.append([index])
    return sorted(classes, key=lambda members: (-len(members), members[0]))


def fill_unscorable(rewards: torch.Tensor, column: int, group_size: int) -> torch.Tensor:
    """Give rows without a CaT reward a neutral one, where another reward would make the host count the gap as 0.

    TRL leaves a row out only if all of its columns are NaN; in any other row a NaN adds 0 to the sum, which would
    punish a rollout for an outage. Such a row gets the mean of its group, and a group without any reward the mean of
    the batch: a constant, which its baseline takes away again.

    Args:
        rewards: Float `[rows, columns]`, NaN where a reward is missing; whole groups in a row.
        column: That of CaT.
        group_size: Rows of a group.

    Returns:
        A new tensor of the same shape; rows that are NaN in every other column are as they were.
    """
    own = rewards[:, column].view(-1, group_size)
    scored = own[~own.isnan()]
    batch = scored.mean() if scored.numel() else own.new_zeros(())
    neutral = own.nanmean(dim=1, keepdim=True)
    neutral = torch.where(neutral.isnan(), batch, neutral).expand_as(own).reshape(-1)
    others = torch.arange(rewards.shape[1], device=rewards.device) != column
    gap = rewards[:, column].isnan() & ~rewards[:, others].isnan().all(dim=1)
    filled = rewards.clone()
    filled[gap, column] = neutral[gap]
    return filled


# --- what judges and anchors write ---------------------------------------------------------------------------------

_FIRST_WORD = re.compile(r"[^\W\d_]+")
_INTEGER = re.compile(r"(?<![\d.])\d+(?![\d])")


def parse_verdict(text: str) -> bool | None:
    """True for a reply that begins with yes, False for one that begins with no, None for any other."""
    word = _FIRST_WORD.search(text)
    return {"yes": True, "no": False}.get(word.group().lower()) if word else None


def parse_grade(text: str) -> int | None:
    """The first whole number of a reply if it is from 1 to 10, else None."""
    number = _INTEGER.search(text)
    grade = int(number.group()[:3]) if number else 0
    return grade if 1 <= grade <= 10 else None


def parse_choice(text: str, count: int) -> int | None:
    """The index (from 0) of the attempt that a reply names by its number from 1 to `count`, else None."""
    number = _INTEGER.search(text)
    choice = int(number.group()[:6]) if number else 0
    return choice - 1 if 1 <= choice <= count else None
