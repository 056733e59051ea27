"""From groups of rollouts to rewards: reference, criteria, verdicts, failures. Used in training and without it."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import rewards as math
from .aggregators import Group, Reference, Tools
from .prompts import prompt_text, strip_thinking
from .rubrics import Rubric, propose_rubrics

if TYPE_CHECKING:
    from .judges import CachedJudge

__all__ = ["Outcome", "Scorer", "answer_finder"]

logger = logging.getLogger(__name__)

DOMAINS = {"verifiable": "match", "open": "rubric"}
EMPTY_ROLLOUT = "empty rollout"
_MARKED = re.compile(r"\\f?boxed\b|####")


@dataclass
class Outcome:
    """What was found about one group.

    Attributes:
        reference: The pseudo-reference.
        kind: How it was compared: `"match"`, `"rubric"`, `"judge_score"`; `"none"` without a reference.
        rewards: One for each rollout; None where it could not be scored.
        criteria: Of a rubric.
        verdicts: For each rollout its verdicts: one for `match`, one a criterion for `rubric`, none for `judge_score`.
        grades: For each rollout its grade, for `judge_score`.
        errors: What went wrong with single verdicts, in the shape of `verdicts` (or `grades`, as lists of one).
        cached: Which verdicts came from the cache, in the same shape.
        failures: What went wrong with the group.
    """

    reference: Reference
    kind: str
    rewards: list[float | None]
    criteria: list[str] = field(default_factory=list)
    verdicts: list[list[bool | None]] = field(default_factory=list)
    grades: list[float | None] = field(default_factory=list)
    errors: list[list[str | None]] = field(default_factory=list)
    cached: list[list[bool]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def answer_finder(extract: Callable[[str], str | None], strip: bool) -> Callable[[str], str | None]:
    """An extractor of final answers that does not look into thinking parts, if they are to be stripped.

    What it gives raises a `TypeError` where `extract` finds something that is no text.
    """

    def answer_of(text: str) -> str | None:
        answer = extract(strip_thinking(text) if strip else text)
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"answer_extractor returned {answer!r:.60}; it must return a text, or None for no answer")
        return answer

    return answer_of


class Scorer:
    """Scores groups of rollouts.

    Args:
        tools: Configuration, anchor, how answers are found and compared.
        aggregator: Groups to references.
        judge: Verdicts on criteria; None where every reward is `match`.
    """

    def __init__(self, tools: Tools, aggregator: Any, judge: "CachedJudge | None" = None) -> None:
        self.tools = tools
        self.aggregator = aggregator
        self.judge = judge

    def __call__(self, groups: Sequence[Group], rubrics: Mapping[int, Rubric] | None = None) -> list[Outcome]:
        """Score groups.

        Args:
            groups: Any number of them.
            rubrics: Criteria that are there already, by the group's index; without them the anchor writes some.

        Returns:
            One outcome for each group, in their order.
        """
        config = self.tools.config
        references = self.aggregator(groups)
        kinds = [self._kind(group, reference) for group, reference in zip(groups, references)]
        if rubrics is None:
            rubrics = self._rubrics(groups, references, kinds)
        outcomes = []
        for i, (group, reference) in enumerate(zip(groups, references)):
            outcome = Outcome(reference, kinds[i], [None] * len(group.completions))
            if reference.meta.get("error"):
                outcome.failures.append(reference.meta["error"])
            if i in rubrics:
                self._take_rubric(outcome, rubrics[i])
            outcomes.append(outcome)
        failures = [failure for outcome in outcomes for failure in outcome.failures]
        if failures:
            logger.warning("%d failure(s) in %d groups, such as: %s", len(failures), len(groups), failures[0])
        self._judge(groups, outcomes)
        for group, outcome in zip(groups, outcomes):
            if outcome.kind == "match":
                outcome.rewards = math.match_rewards(group.answers, outcome.reference.answer, self.tools.match)
                outcome.verdicts = [[None if r is None else r == 1.0] for r in outcome.rewards]
                if outcome.reference.answer is None:
                    outcome.failures.append("the reference has no answer")
            elif outcome.kind == "rubric":
                outcome.rewards = [math.rubric_reward(row) for row in outcome.verdicts]
            elif outcome.kind == "judge_score":
                outcome.rewards = [math.score_reward(grade) for grade in outcome.grades]
            # An empty rollout meets nothing, whatever it avoids by being empty.
            if outcome.kind in ("rubric", "judge_score"):
                for i, text in enumerate(group.completions):
                    if outcome.verdicts or outcome.grades:
                        outcome.rewards[i] = outcome.rewards[i] if self._shown(text) else 0.0
        if config.on_judge_error == "raise":
            for outcome in outcomes:
                if error := outcome.reference.meta.get("error", ""):
                    if error.startswith(("anchor:", "aggregator")):
                        raise RuntimeError(f"no reference: {error}")
        return outcomes

    # -- steps --------------------------------------------------------------------------------------------------------

    def _shown(self, text: str) -> str:
        """The text of a rollout or reference as criteria and judges see it."""
        return strip_thinking(text).strip() if self.tools.config.strip_thinking else text.strip()

    def _kind(self, group: Group, reference: Reference) -> str:
        if not self._shown(reference.text):
            return "none"
        kind = self.tools.config.reward
        if kind != "auto":
            return kind
        domain = group.row.get("domain")
        if domain is None:
            return "match" if reference.answer is not None and _MARKED.search(reference.text) else "rubric"
        if domain not in DOMAINS:
            raise ValueError(f"the column domain has {domain!r}; it must be one of {', '.join(DOMAINS)}")
        return DOMAINS[domain]

    def _rubrics(
        self, groups: Sequence[Group], references: Sequence[Reference], kinds: Sequence[str]
    ) -> dict[int, Rubric]:
        config = self.tools.config
        if config.reward not in ("auto", "rubric") or self.tools.anchor is None:
            return {}
        wanted = [i for i, kind in enumerate(kinds) if kind == "rubric"]
        texts = [self._shown(references[i].text) for i in wanted]
        return dict(zip(wanted, propose_rubrics(self.tools, texts, [groups[i].seed for i in wanted])))

    def _take_rubric(self, outcome: Outcome, rubric: Rubric) -> None:
        config = self.tools.config
        outcome.criteria = rubric.criteria
        if rubric.error is None:
            return
        if config.on_rubric_failure == "raise" or (
            config.on_judge_error == "raise" and rubric.error.startswith("anchor:")
        ):
            raise RuntimeError(f"no usable rubric after {rubric.attempts} attempt(s): {rubric.error}")
        outcome.failures.append(f"rubric: {rubric.error}")
        outcome.criteria = []
        outcome.kind = "judge_score" if config.on_rubric_failure == "judge_score" else "rubric"

    def _judge(self, groups: Sequence[Group], outcomes: Sequence[Outcome]) -> None:
        from .judges import JudgeItem

        items: list[JudgeItem] = []
        places: list[tuple[int, int, int]] = []
        for g, (group, outcome) in enumerate(zip(groups, outcomes)):
            if outcome.kind not in ("rubric", "judge_score"):
                continue
            graded = outcome.kind == "judge_score"
            questions = [self._shown(outcome.reference.text)] if graded else outcome.criteria
            size = len(questions)
            outcome.errors = [[None] * size for _ in group.completions]
            outcome.cached = [[False] * size for _ in group.completions]
            if graded:
                outcome.grades = [None] * len(group.completions)
            else:
                outcome.verdicts = [[None] * size for _ in group.completions]
            config = self.tools.config
            shown_prompt = prompt_text(group.prompt) if config.judge_include_prompt else None
            template = config.score_template if graded else config.judge_template
            for i, text in enumerate(group.completions):
                completion = self._shown(text)
                if not completion:
                    outcome.errors[i] = [EMPTY_ROLLOUT] * size
                    if not graded:
                        outcome.verdicts[i] = [False] * size
                    continue
                for j, question in enumerate(questions):
                    fields = {"reference": question} if graded else {"criterion": question}
                    items.append(JudgeItem(shown_prompt, completion, template=template, **fields))
                    places.append((g, i, j))
        if not items:
            return
        for (g, i, j), verdict in zip(places, self.judge(items)):
            outcome = outcomes[g]
            if outcome.kind == "judge_score":
                outcome.grades[i] = verdict.value
            else:
                outcome.verdicts[i][j] = verdict.value
            outcome.errors[i][j] = verdict.error
            outcome.cached[i][j] = verdict.cached
