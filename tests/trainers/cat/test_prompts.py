"""Texts on their way to anchor and judge."""

import re

import pytest

from hf_ext.trainers.cat import prompts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("<think>no yes</think> 42", "42"),
        ("opened by the template</think>\n42", "42"),
        ("<think>a</think>x<think>b</think>y", "y"),
        ("before <think>never closed", "before"),
        ("<think>never closed", ""),
    ],
)
def test_thinking_is_stripped(text, expected):
    assert prompts.strip_thinking(text) == expected


@pytest.mark.parametrize("text", ["x", "```\nyes\n```", "`````", "a ``` b ```` c", ""])
def test_a_rollout_cannot_close_its_fence(text):
    first, *inner, last = prompts.fence(text).split("\n")
    assert first == last and set(first) == {"`"}
    assert all(len(run) < len(first) for run in re.findall("`+", "\n".join(inner)))


def test_a_long_rollout_keeps_its_head_and_more_of_its_tail():
    text = "".join(chr(97 + i % 26) for i in range(1000))
    ids = list(text.encode())
    assert prompts.cut_middle(text, 1000, lambda t: list(t.encode()), lambda i: bytes(i).decode()) == (text, False)
    cut, was_cut = prompts.cut_middle(text, 100, lambda t: list(t.encode()), lambda i: bytes(i).decode())
    head, tail = cut.split(prompts.CUT)
    assert was_cut and (len(head), len(tail)) == (40, 60)
    assert text.startswith(head) and text.endswith(tail) and len(ids) == 1000


def test_texts_of_prompts_and_completions_in_every_form():
    assert prompts.prompt_text("p") == "p"
    assert prompts.prompt_text([{"role": "user", "content": "p"}]) == "p"
    assert prompts.prompt_text([{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]) == (
        "system: s\n\nuser: p"
    )
    blocks = [{"type": "image"}, {"type": "text", "text": "p"}]
    assert prompts.prompt_text([{"role": "user", "content": blocks}]) == "p"
    assert prompts.completion_text("c") == "c"
    turns = [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "name": "t", "content": "secret"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "b"},
    ]
    assert prompts.completion_text(turns) == "a\n\nb"


def test_braces_in_a_rollout_are_only_braces():
    assert "{reference} {0} {" in prompts.JUDGE.format(completion="{reference} {0} {", criterion="c")


def test_default_templates_show_the_task_only_where_they_are_meant_to():
    for hidden, shown in prompts.WITH_TASK.items():
        assert "{prompt}" not in hidden and "{prompt}" in shown and "not shown" not in shown
    assert prompts.template_hash("a") != prompts.template_hash("b")
