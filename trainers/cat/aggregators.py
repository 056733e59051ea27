"""From the rollouts of a group to one reference: a small class for each rule."""

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from . import prompts
from .rewards import answer_classes, parse_choice

if TYPE_CHECKING:
    from .anchor import Anchor
    from .cat_config import CaTConfig

__all__ = [
    "AGGREGATORS",
    "BestOfN",
    "CallableAggregator",
    "First",
    "Group",
    "Majority",
    "MinPerplexity",
    "Reference",
    "Synthesis",
    "Tools",
    "make_aggregator",
]


POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
MIN_BUDGET = 8  # tokens of a rollout; with fewer there is nothing left to compare


@dataclass
class Group:
    """The rollouts of one prompt.

    Attributes:
        prompt: As in the dataset: text or messages.
        completions: The rollouts as texts.
        answers: Final answer of each, or None.
        row: The other columns of the prompt's row.
        seed: For everything random about this group; it depends on step and position, not on the process.
    """

    prompt: Any
    completions: list[str]
    answers: list[str | None]
    row: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass
class Reference:
    """The pseudo-reference of a group.

    Attributes:
        text: What criteria are written from; empty if there is none.
        answer: Its final answer, or None.
        meta: Where it comes from, for the log: `rollout` (an index), `order`, `cut`, `error`.
    """

    text: str
    answer: str | None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass
class Tools:
    """What aggregators work with.

    Attributes:
        config: Templates and limits.
        answer_of: Final answer of a text, or None.
        match: Whether two answers are the same.
        anchor: None where nothing asks for one.
        default_max_new_tokens: Limit of a synthesis where the configuration has none.
        default_temperature: That of the rollouts.
    """

    config: "CaTConfig"
    answer_of: Callable[[str], str | None]
    match: Callable[[str, str], bool]
    anchor: "Anchor | None" = None
    default_max_new_tokens: int = 256
    default_temperature: float = 1.0


class Aggregator:
    """What all rules share.

    Args:
        tools: What they work with.
    """

    name: str
    uses_anchor = True
    needs_anchor = True  # nothing can be done without one

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    def check(self, num_generations: int) -> None:
        """Refuse before work starts what could never give a reference."""

    def __call__(self, groups: Sequence[Group]) -> list[Reference]:
        """One reference for each group."""
        raise NotImplementedError


class First(Aggregator):
    """The first rollout: a control."""

    name = "first"
    uses_anchor = needs_anchor = False

    def __call__(self, groups: Sequence[Group]) -> list[Reference]:
        """One reference for each group."""
        return [_rollout(group, 0) for group in groups]


class Majority(Aggregator):
    """The most frequent answer; ties go to the class with the likeliest rollout under the anchor, then the first."""

    name = "majority"
    needs_anchor = False

    def __call__(self, groups: Sequence[Group]) -> list[Reference]:
        """One reference for each group; its text is the class's likeliest rollout where the text is used at all."""
        tied = []
        for group in groups:
            classes = answer_classes(group.answers, self.tools.match)
            tied.append([members for members in classes if len(members) == len(classes[0])])
        text_counts = self.tools.config.reward != "match"
        wanted = [
            (g, i)
            for g, classes in enumerate(tied)
            if len(classes) > 1 or (text_counts and classes)
            for members in classes
            for i in members
        ]
        losses = dict(zip(wanted, _losses(self.tools, [(groups[g], i) for g, i in wanted])))
        references = []
        for g, classes in enumerate(tied):
            # Without a loss (one class whose text nobody reads, or an anchor that cannot score) the first is taken.
            members = [i for tied_class in classes for i in tied_class]
            if not members:
                references.append(Reference("", None, {"error": "no rollout has an answer"}))
                continue
            best = min(members, key=lambda i: (losses.get((g, i), 0.0), i))
            references.append(_rollout(groups[g], best))
            references[-1].meta["votes"] = len(classes[0])
        return references


class MinPerplexity(Aggregator):
    """The rollout that the anchor finds most likely a token."""

    name = "min_ppl"

    def check(self, num_generations: int) -> None:
        """See `Aggregator.check`: only a model in this process gives log-probabilities."""
        if not self.tools.anchor.can_score:
            raise ValueError(
                f"min_ppl needs an anchor whose weights are here; {self.tools.anchor.name} gives no log-probabilities"
            )

    def __call__(self, groups: Sequence[Group]) -> list[Reference]:
        """One reference for each group."""
        pairs = [(group, i) for group in groups for i in range(len(group.completions))]
        losses = iter(_losses(self.tools, pairs))
        references = []
        for group in groups:
            own = [next(losses) for _ in group.completions]
            references.append(_rollout(group, min(range(len(own)), key=own.__getitem__)))
        return references


class Synthesis(Aggregator):
    """A new answer that the anchor writes from all rollouts (the paper's)."""

    name = "synthesis"

    @property
    def max_new_tokens(self) -> int:
        """Limit of a reference."""
        return self.tools.config.anchor_max_new_tokens or self.tools.default_max_new_tokens

    def check(self, num_generations: int) -> None:
        """See `Aggregator.check`: the rollouts must fit into the anchor's context."""
        _check_room(self.tools, num_generations, self.tools.config.synthesis_template, self.max_new_tokens)

    def __call__(self, groups: Sequence[Group]) -> list[Reference]:
        """One reference for each group; empty, with the error in `meta`, if the anchor gives none."""
        config = self.tools.config
        warmth = config.anchor_temperature
        warmth = self.tools.default_temperature if warmth is None else warmth
        found = _ask(self.tools, groups, config.synthesis_template, self.max_new_tokens, warmth)
        return [
            Reference("", None, meta) if text is None else Reference(text.strip(), self.tools.answer_of(text), meta)
            for text, meta in found
        ]


class BestOfN(Aggregator):
    """The rollout whose number the anchor names; the first where it names none."""

    name = "best_of_n"
    max_new_tokens = 16

    def check(self, num_generations: int) -> None:
        """See `Aggregator.check`: the rollouts must fit into the anchor's context."""
        _check_room(self.tools, num_generations, self.tools.config.best_of_n_template, self.max_new_tokens)

    def __call__(self, groups: Sequence[Group]) -> list[Reference]:
        """One reference for each group."""
        found = _ask(self.tools, groups, self.tools.config.best_of_n_template, self.max_new_tokens, 0.0)
        references = []
        for group, (text, meta) in zip(groups, found):
            if meta.get("empty"):
                references.append(Reference("", None, meta))
                continue
            choice = None if text is None else parse_choice(prompts.strip_thinking(text), len(group.completions))
            if choice is None:
                meta.setdefault("error", f"no number of an attempt in {text!r:.60}")
            references.append(_rollout(group, 0 if choice is None else meta["order"][choice], meta))
        return references


class CallableAggregator(Aggregator):
    """Somebody else's rule: `fn(prompt, completions, **row) -> str`."""

    uses_anchor = needs_anchor = False

    def __init__(self, tools: Tools, function: Callable[..., str]) -> None:
        super().__init__(tools)
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        if Parameter.VAR_POSITIONAL not in kinds and sum(kind in POSITIONAL for kind in kinds) < 2:
            raise TypeError(
                f"aggregator {function!r} must take prompt and completions: fn(prompt, completions, **row)"
            )
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def __call__(self, groups: Sequence[Group]) -> list[Reference]:
        """One reference for each group; what the function raises is treated as `on_judge_error` says."""
        references = []
        for group in groups:
            try:
                text = self.function(group.prompt, list(group.completions), **group.row)
                if not isinstance(text, str):
                    raise TypeError(f"it returned {text!r:.60}, not a text")
            except Exception as error:
                if self.tools.config.on_judge_error == "raise":
                    raise
                references.append(Reference("", None, {"error": f"aggregator {self.name}: {error!r}"}))
            else:
                references.append(Reference(text, self.tools.answer_of(text)))
        return references


AGGREGATORS = {cls.name: cls for cls in (Synthesis, Majority, MinPerplexity, BestOfN, First)}


def make_aggregator(what: str | Callable[..., str], tools: Tools) -> Any:
    """An aggregator by its name, or around a callable.

    Raises:
        ValueError: An unknown name; the message lists the known ones.
    """
    if callable(what):
        return CallableAggregator(tools, what)
    if what not in AGGREGATORS:
        raise ValueError(f"aggregator is {what!r}; it must be one of {', '.join(AGGREGATORS)}, or a callable")
    return AGGREGATORS[what](tools)


def _rollout(group: Group, index: int, meta: dict[str, Any] | None = None) -> Reference:
    return Reference(group.completions[index], group.answers[index], {**(meta or {}), "rollout": index})


def _losses(tools: Tools, pairs: Sequence[tuple[Group, int]]) -> list[float]:
    """Mean negative log-probability of rollouts; 0 for all where the anchor has no weights here to score with."""
    anchor = tools.anchor
    if anchor is None or not anchor.can_score:
        return [0.0] * len(pairs)
    return anchor.score([(group.prompt, group.completions[i]) for group, i in pairs])


def _ask(
    tools: Tools, groups: Sequence[Group], template: str, max_new_tokens: int, temperature: float
) -> list[tuple[str | None, dict[str, Any]]]:
    """What the anchor writes when it is shown the rollouts of each group, and how they were shown."""
    metas: list[dict[str, Any]] = []
    conversations, asked = [], []
    for index, group in enumerate(groups):
        # Shuffled, so that a preference for a position averages out over groups.
        order = list(range(len(group.completions)))
        random.Random(group.seed).shuffle(order)
        meta: dict[str, Any] = {"order": order}
        metas.append(meta)
        if not any(text.strip() for text in group.completions):
            meta |= {"empty": True, "error": "every rollout is empty"}
            continue
        try:
            conversation, meta["cut"] = show_attempts(tools, group, order, template, max_new_tokens)
        except ValueError as error:
            meta["error"] = str(error)
            continue
        conversations.append(conversation)
        asked.append(index)
    replies = tools.anchor.generate(
        conversations,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seeds=[groups[i].seed for i in asked],
    )
    texts: list[str | None] = [None] * len(groups)
    for index, reply in zip(asked, replies):
        texts[index] = reply.text
        if reply.error:
            metas[index]["error"] = f"anchor: {reply.error}"
    return list(zip(texts, metas))


def show_attempts(
    tools: Tools, group: Group, order: Sequence[int], template: str, max_new_tokens: int
) -> tuple[list[dict[str, str]], int]:
    """The conversation that shows the rollouts to the anchor, and how many of them were cut to fit.

    Raises:
        ValueError: The anchor's context is too short for even a few tokens of each rollout.
    """
    fields = {"n": len(order)}
    if "{prompt}" in template:
        fields["prompt"] = prompts.prompt_text(group.prompt)

    def conversation(texts: Sequence[str]) -> list[dict[str, str]]:
        return [{"role": "user", "content": template.format(attempts=prompts.number_attempts(texts), **fields)}]

    texts = [group.completions[i] for i in order]
    budget = tools.config.rollout_token_budget
    anchor = tools.anchor
    if budget is None and anchor.context is not None:
        # What the frame costs is measured with the marks of a cut in it, so that cut rollouts fit too.
        frame = anchor.count(conversation([prompts.CUT] * len(texts)))
        budget = (anchor.context - max_new_tokens - frame) // len(texts)
        if budget < MIN_BUDGET:
            raise ValueError(
                f"{len(texts)} rollouts do not fit into the anchor's context of {anchor.context} tokens beside "
                f"{frame} of the prompt and {max_new_tokens} new ones: lower anchor_max_new_tokens or "
                "num_generations, shorten synthesis_template, or set rollout_token_budget"
            )
    cut = 0
    if budget is not None and anchor.can_count:
        pairs = [prompts.cut_middle(text, budget, anchor.encode, anchor.decode) for text in texts]
        texts, cut = [text for text, _ in pairs], sum(was_cut for _, was_cut in pairs)
    return conversation(texts), cut


def _check_room(tools: Tools, num_generations: int, template: str, max_new_tokens: int) -> None:
    group = Group("", ["x"] * num_generations, [])
    show_attempts(tools, group, range(num_generations), template, max_new_tokens)
