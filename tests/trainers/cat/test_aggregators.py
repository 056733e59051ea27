"""From rollouts to a reference: each rule, by hand."""

import random

import pytest

from hf_ext.chat import ChatReply
from hf_ext.trainers.answers import answers_match
from hf_ext.trainers.cat import prompts
from hf_ext.trainers.cat.aggregators import AGGREGATORS, Group, Tools, make_aggregator, show_attempts


class Scripted:
    """An anchor that writes `reply(text)` and finds a text the likelier the shorter it is."""

    can_score = can_count = True
    synchronized = False
    name = "scripted"

    def __init__(self, reply=None, context=None):
        self.reply = reply
        self.context = context
        self.seen = []
        self.scored = []

    def generate(self, conversations, *, max_new_tokens, temperature, seeds):
        self.seen += [(c[0]["content"], max_new_tokens, temperature, seed) for c, seed in zip(conversations, seeds)]
        replies = [self.reply(c[0]["content"]) for c in conversations]
        return [r if isinstance(r, ChatReply) else ChatReply(r, "stop") for r in replies]

    def score(self, pairs):
        self.scored += pairs
        return [float(len(text)) for _, text in pairs]

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode()

    def count(self, messages):
        return len(messages[0]["content"].encode())


def digit(text):
    return next((c for c in text if c.isdigit()), None)


@pytest.fixture
def make(kit, tmp_path):
    def make_rule(name, anchor=None, **changes):
        config = kit.config(tmp_path, **changes)
        return make_aggregator(name, Tools(config, digit, answers_match, anchor, 32, 0.9))

    return make_rule


def group(*texts, seed=0):
    return Group("the question", list(texts), [digit(text) for text in texts], seed=seed)


def test_the_majority_is_a_class_of_answers_and_ties_go_to_the_likeliest_rollout_then_the_first(make):
    anchor = Scripted()
    rule = make("majority", anchor)
    found = rule([group("3 long", "7", "x", "7 again"), group("33", "4 is long", "4", "3 is longer"), group("x", "")])
    assert [reference.answer for reference in found] == ["7", "4", None]
    assert found[2].text == "" and found[2].meta["error"] == "no rollout has an answer"
    assert len(anchor.scored) == 4  # of the tied group only: with `match` nobody reads the text
    assert rule([group("3", "4")])[0].answer == "3"
    read = make("majority", anchor, reward="rubric")([group("7 in many words", "7", "3")])
    assert read[0].text == "7"


def test_the_likeliest_rollout(make):
    found = make("min_ppl", Scripted())([group("long one", "7", "x 3"), group("b", "a")])
    assert [(reference.text, reference.meta["rollout"]) for reference in found] == [("7", 1), ("b", 0)]


def test_the_first_rollout(make):
    assert make("first")([group("3", "7")])[0].answer == "3"


def test_a_synthesis_is_asked_for_once_a_group_with_its_seed_limit_and_temperature(make):
    anchor = Scripted(lambda text: " the answer is 5 ")
    found = make("synthesis", anchor)([group("3", "7", seed=11), group("", "  "), group("4", "4", seed=12)])
    assert [reference.answer for reference in found] == ["5", None, "5"] and found[0].text == "the answer is 5"
    assert found[1].meta["error"] == "every rollout is empty"
    assert [call[1:] for call in anchor.seen] == [(32, 0.9, 11), (32, 0.9, 12)]
    assert "the question" not in anchor.seen[0][0]
    make("synthesis", anchor, anchor_temperature=0.0, anchor_max_new_tokens=5)([group("3", "7")])
    assert anchor.seen[-1][1:3] == (5, 0.0)


def test_an_anchor_that_fails_gives_no_reference(make):
    rule = make("synthesis", Scripted(lambda text: ChatReply.failed("HTTP 500")))
    (reference,) = rule([group("3", "7")])
    assert (reference.text, reference.answer, reference.meta["error"]) == ("", None, "anchor: HTTP 500")


def test_the_chosen_number_is_that_of_the_shuffled_list(make):
    texts = ["zero", "one", "two", "three"]

    def choose(text):
        shown = [line for line in text.split("\n") if line in texts]
        return f"Attempt {1 + shown.index('two')}"

    for seed in range(6):
        assert make("best_of_n", Scripted(choose))([group(*texts, seed=seed)])[0].text == "two"
    (reference,) = make("best_of_n", Scripted(lambda text: "the last"))([group(*texts)])
    assert reference.text == "zero" and "no number of an attempt" in reference.meta["error"]


def test_a_function_gets_prompt_rollouts_and_row(make):
    seen = {}

    def function(prompt, completions, level):
        seen.update(prompt=prompt, completions=completions, level=level)
        return "5"

    given = group("3", "7")
    given.row = {"level": 2}
    assert make(function)([given])[0].answer == "5"
    assert seen == {"prompt": "the question", "completions": ["3", "7"], "level": 2}
    (reference,) = make(lambda prompt, completions: None)([group("3")])
    assert "it returned None, not a text" in reference.meta["error"]


def test_an_unknown_name_lists_the_known_ones(make):
    with pytest.raises(ValueError, match="aggregator is 'vote'; it must be one of synthesis, majority, min_ppl"):
        make("vote")
    assert set(AGGREGATORS) == {"synthesis", "majority", "min_ppl", "best_of_n", "first"}


def test_long_rollouts_are_cut_to_what_the_context_leaves(make):
    template = "{n}: {attempts}"
    context = 1000
    anchor = Scripted(str, context)
    rule = make("synthesis", anchor, synthesis_template=template)
    texts = ["a" * 900, "b" * 900, "c", "d" * 900]
    conversation, cut = show_attempts(rule.tools, group(*texts), range(4), template, 100)
    shown = conversation[0]["content"]
    assert cut == 3 and shown.count(prompts.CUT) == 3
    assert 650 < anchor.count(conversation) <= context - 100
    assert anchor.count(conversation) < context
    fixed = make("synthesis", anchor, synthesis_template=template, rollout_token_budget=10)
    conversation, cut = show_attempts(fixed.tools, group(*texts), range(4), template, 100)
    assert "aaaa" + prompts.CUT + "aaaaaa\n" in conversation[0]["content"]


def test_rollouts_that_do_not_fit_at_all_cost_their_group_alone(make):
    rule = make("synthesis", Scripted(lambda text: "5", 400), synthesis_template="{attempts}")
    small, large = group("3", "7"), group(*["x" * 50] * 12)
    found = rule([small, large])
    assert found[0].answer == "5" and "12 rollouts do not fit" in found[1].meta["error"]
    with pytest.raises(ValueError, match="12 rollouts do not fit"):
        rule.check(12)
    rule.check(2)


def test_the_order_depends_on_the_groups_seed_alone(make):
    rule = make("synthesis", Scripted(lambda text: "5"))
    texts = list("abcdefgh")
    orders = [rule([group(*texts, seed=seed)])[0].meta["order"] for seed in (1, 1, 2)]
    random.seed(99)
    assert orders[0] == orders[1] != orders[2] and sorted(orders[2]) == list(range(8))
