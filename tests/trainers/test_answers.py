"""Final answers: what is found in a text, and which are the same."""

import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ext.trainers.answers import answers_match, extract_answer


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"first \boxed{1}, no, \boxed{ 2 }", "2"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\fbox{3}", None),
        (r"\fboxed{3} and \boxed {4}", "4"),
        (r"\boxed{5} and then \boxed{6", "5"),
        (r"\boxed{5} and then \boxed{}", "5"),
        (r"\boxed{8} #### 9", "8"),
        ("work\n#### 1,234", "1,234"),
        ("#### 1\n#### 2 \nend", "2"),
        ("#### 3\n####", "3"),
        ("#### -7", "-7"),
        ("the answer is 5", None),
        ("", None),
        (r"\boxed", None),
        ("} } {", None),
        (r"\boxed{日本}", "日本"),
    ],
)
def test_the_answer_is_the_last_box_or_what_follows_the_hashes(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize("piece", [r"\boxed{", "{", "}", r"\boxed{x} ", "#### ", "####\n", r"\boxed{\boxed{", "\\"])
def test_extraction_takes_linear_time(piece):
    text = piece * (500_000 // len(piece))
    start = time.perf_counter()
    extract_answer(text)
    assert time.perf_counter() - start < 10  # quadratic would be hours


EQUAL = [
    ("0.5", "1/2"),
    ("0.5", r"\frac{1}{2}"),
    ("1/2", r"\dfrac{1}{2}"),
    (".5", r"\frac12"),
    ("-1/2", r"-\frac{1}{2}"),
    (r"\frac{-1}{2}", "-0.5"),
    ("1,000", "1000"),
    ("1{,}000", "1000"),
    ("1,234,567.5", "1234567.5"),
    ("3 1/2", r"3\frac{1}{2}"),
    ("3.5", "3 1/2"),
    ("7", "7."),
    ("007", "7"),
    ("+7", "7.0"),
    ("2/4", "1/2"),
    (r"1.5\times 10^3", "1500"),
    (r"10^{-2}", "0.01"),
    ("1e-2", "0.01"),
    ("0.333333", "1/3"),
    (r"50\%", "0.5"),
    (r"50\%", "50"),
    (r"5\text{ km}", "5"),
    ("5 km", "5"),
    (r"30^\circ", "30"),
    (r"\$5", "5"),
    ("$12$", "12"),
    (r"\text{Paris}", "paris"),
    ("New  York", "new york."),
    ("(B)", "B"),
    (r"\text{(B)}", "b"),
    ("x+1", "1+x"),
    ("(1,2)", "(1, 2)"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{\sqrt{3}}{2}", "0.8660254"),
    ("x=3", "3"),
    ("2^{10}", "1024"),
    (r"\left(\frac{1}{2}, 3\right)", "(0.5,3)"),
    ("−3", "-3"),
]
DIFFERENT = [
    ("10", "100"),
    ("1", "-1"),
    ("0.3333", "1/3"),
    ("1000000", "1000001.0"),
    ("1e-8", "2e-8"),
    ("5 km", "5 m"),
    ("3x", "3"),
    ("3 x", "3"),
    ("of", "fo"),
    ("Paris", "London"),
    ("A", "B"),
    ("(1,2)", "(2,1)"),
    ("x+1", "x-1"),
    (r"\sqrt{2}", "2"),
    (r"\infty", r"-\infty"),
    ("1/0", "1"),
    ("1/0", "2/0"),
    ("12 apples and 3 pears", "12"),
    ("yes", "no"),
    ("", ""),
    (" ", "$$"),
    ("\\", "1"),
]


@pytest.mark.parametrize("a, b", EQUAL)
def test_equal_answers_match_both_ways(a, b):
    assert answers_match(a, b) and answers_match(b, a)


@pytest.mark.parametrize("a, b", DIFFERENT)
def test_different_answers_do_not_match_either_way(a, b):
    assert not answers_match(a, b) and not answers_match(b, a)


def test_nothing_equals_no_answer():
    assert not answers_match(None, "1") and not answers_match("1", None) and not answers_match(None, None)


# Where we differ from it on purpose: it ignores units that differ, takes a word for a product of its letters, and
# reads neither mixed numbers nor exponents nor phrases.
BESIDE_TRL = {
    *[("5 km", "5 m"), ("3 x", "3"), ("12 apples and 3 pears", "12"), ("of", "fo"), ("Paris", "London")],
    *[("3 1/2", r"3\frac{1}{2}"), ("3.5", "3 1/2"), ("1e-2", "0.01"), ("New  York", "new york.")],
}


@pytest.mark.parametrize("a, b", [pair for pair in EQUAL + DIFFERENT if pair not in BESIDE_TRL])
def test_trls_accuracy_reward_says_the_same(a, b):
    from trl.rewards import accuracy_reward

    completions = [[{"role": "assistant", "content": rf"It is $\boxed{{{a}}}$"}]]
    (reward,) = accuracy_reward(completions, [f"${b}$"])
    if reward is None:
        pytest.skip("it cannot read the reference")
    assert bool(reward) == answers_match(extract_answer(completions[0][0]["content"]), b)


@given(st.fractions(), st.fractions())
def test_fractions_match_exactly_when_they_are_equal(x, y):
    def write(z) -> str:
        return rf"{'-' * (z < 0)}\frac{{{abs(z.numerator)}}}{{{z.denominator}}}"

    assert answers_match(write(x), f"{x.numerator}/{x.denominator}")
    assert answers_match(write(x), write(y)) == (x == y)


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_texts_can_be_compared_and_it_is_symmetric(a, b):
    # Short texts of any characters; expressions are left to the tables above, they take the computer algebra seconds.
    a, b = (text.translate({ord(c): None for c in "\\^!*"}) for text in (a, b))
    assert answers_match(a, b) == answers_match(b, a)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["9^{9^{9^{9}}}", "1e999999999", "1" * 5000, "{" * 300, "100!!!!"])
def test_an_expression_made_to_take_for_ever_is_unequal_in_seconds(text):
    start = time.perf_counter()
    assert not answers_match(text, r"\sqrt{5}")
    assert time.perf_counter() - start < 20


def test_outside_the_main_thread_expressions_are_compared_too():
    found = []
    thread = threading.Thread(target=lambda: found.append(answers_match("y + 2", "2 + y")))
    thread.start()
    thread.join()
    assert found == [True]


def test_numbers_need_no_library_and_expressions_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert answers_match("1/2", "0.5") and not answers_match("yes", "no")
    with pytest.raises(ImportError, match=r"pip install 'hf-ext\[trainers\]'"):
        answers_match("z+17", "17+z")
