"""Criteria read from replies of every kind, and asked for again."""

import json
import time

import pytest

from hf_ext.chat import ChatReply
from hf_ext.trainers.cat.aggregators import Tools
from hf_ext.trainers.cat.rubrics import parse_rubric, propose_rubrics

TABLE = {
    "a JSON list": ('["names Paris", "gives a date"]', ["names Paris", "gives a date"]),
    "in a fence": ('```json\n["a b", "c d"]\n```', ["a b", "c d"]),
    "after prose": ('Here are the criteria [as asked]:\n["a b", "c d"]\nI hope they help.', ["a b", "c d"]),
    "objects": ('[{"criterion": "a b"}, {"text": "c d", "weight": 2}]', ["a b", "c d"]),
    "objects of another kind": ('[{"rule": "a b"}]', []),
    "numbered": ("1. a b\n2. c d\n10) e f", ["a b", "c d", "e f"]),
    "dashes": ("- a b\n- c d", ["a b", "c d"]),
    "stars": ("* a b\n* c d", ["a b", "c d"]),
    "bullets, indented, after prose": ("Criteria:\n  \u2022 a b\n  \u2022 c d\n", ["a b", "c d"]),
    "nested quotes": (r'["says \"yes\" twice", "c d"]', ['says "yes" twice', "c d"]),
    "a trailing comma": ('[\n  "a b",\n  "c d",\n]', ["a b", "c d"]),
    "never closed": ('[\n  "a b",\n  "c d"\n', ["a b", "c d"]),
    "bullets in quotes": ('- "a b",\n- "c d"', ["a b", "c d"]),
    "empty": ("", []),
    "no list": ("I cannot do that.", []),
    "one criterion": ('["a b"]', ["a b"]),
    "duplicates": ('["Names Paris.", "names paris", "c d"]', ["Names Paris.", "c d"]),
    "too long": (json.dumps(["x" * 301, "y" * 300]), ["y" * 300]),
    "unicode": ('["nennt Zürich 🏔", "größer als 3"]', ["nennt Zürich 🏔", "größer als 3"]),
    "numbers among them": ('["a b", 3, null, "c d"]', ["a b", "c d"]),
    "thinking first": ('<think>["x y"]</think>["a b"]', ["a b"]),
    "line breaks inside": ('["a\\n b"]', ["a b"]),
}


@pytest.mark.parametrize(("text", "expected"), TABLE.values(), ids=TABLE)
def test_criteria_are_read(text, expected):
    assert parse_rubric(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "\n " * 2_500_000,
        "x" * 5_000_000,
        "[" * 5_000_000,
        '["a", ' * 800_000,
        "- a\n" * 1_200_000,
        '"' * 5_000_000,
        "```\n" * 1_250_000,
    ],
    ids=["blank lines", "words", "brackets", "lists", "lines", "quotes", "fences"],
)
def test_a_runaway_reply_of_5_mb_is_read_at_once(text):
    start = time.perf_counter()
    parse_rubric(text)
    assert time.perf_counter() - start < 1  # s; some 20 ms on an idle core, and minutes if it were quadratic


class Scripted:
    """An anchor whose replies are written beforehand; it notes how it was asked."""

    can_score = can_count = synchronized = False
    context = None
    name = "scripted"

    def __init__(self, *replies):
        self.replies = list(replies)
        self.calls = []

    def generate(self, conversations, *, max_new_tokens, temperature, seeds):
        self.calls.append((len(conversations), temperature, list(seeds)))
        replies = [self.replies.pop(0) for _ in conversations]
        return [r if isinstance(r, ChatReply) else ChatReply(r, "stop") for r in replies]


FIVE = json.dumps([f"criterion {i}" for i in range(5)])
TWELVE = json.dumps([f"criterion {i}" for i in range(12)])


def proposed(kit, tmp_path, anchor, references=("r",), **changes):
    tools = Tools(kit.config(tmp_path, **changes), str, str, anchor)
    return propose_rubrics(tools, list(references), list(range(len(references))))


def test_a_list_that_is_long_enough_is_taken_and_cut_to_max_rubrics(kit, tmp_path):
    anchor = Scripted(FIVE, TWELVE)
    first, second = proposed(kit, tmp_path, anchor, ("r", "s"))
    assert (len(first.criteria), len(second.criteria)) == (5, 10) and first.error is second.error is None
    # One greedy call for both; the second attempt has nothing left to ask.
    assert anchor.calls[0][:2] == (2, 0.0) and anchor.calls[1][0] == 0


def test_only_what_failed_is_asked_again_at_temperature_1(kit, tmp_path):
    anchor = Scripted("no idea", FIVE, TWELVE)
    first, second = proposed(kit, tmp_path, anchor, ("r", "s"))
    assert (first.attempts, second.attempts) == (2, 1) and first.error is None and len(first.criteria) == 10
    assert [call[:2] for call in anchor.calls] == [(2, 0.0), (1, 1.0)]
    assert anchor.calls[0][2][0] != anchor.calls[1][2][0]  # another seed, or it would write the same


def test_too_few_criteria_after_all_attempts_are_an_error(kit, tmp_path):
    (rubric,) = proposed(kit, tmp_path, Scripted('["a b"]', '["a b", "c d"]'))
    assert rubric.attempts == 2 and rubric.error == "2 criteria, fewer than min_rubrics=5"
    (rubric,) = proposed(kit, tmp_path, Scripted(ChatReply.failed("HTTP 500")), rubric_retries=0)
    assert rubric.error == "anchor: HTTP 500"
