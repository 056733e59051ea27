"""Who decides whether a rollout meets a criterion: a local model, an endpoint, a function, or the anchor itself."""

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hf_ext.chat import ChatBackend, EndpointChat

from . import prompts
from .rewards import parse_grade, parse_verdict

if TYPE_CHECKING:
    pass

__all__ = ["CachedJudge", "CallableJudge", "ChatJudge", "EndpointJudge", "Judge", "JudgeError", "JudgeItem", "Verdict"]

logger = logging.getLogger(__name__)


class JudgeError(RuntimeError):
    """A judge failed and `on_judge_error` is `"raise"`, or no retry could mend it."""

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


@dataclass(frozen=True)
class JudgeItem:
    """One question to a judge.

    Attributes:
        prompt: The task, if the judge may see it.
        completion: The rollout.
        criterion: Answered by yes or no; empty where a grade is asked for.
        reference: What a grade measures the rollout by.
        template: What `text` puts them into; empty for the default.
    """

    prompt: str | None
    completion: str
    criterion: str = ""
    reference: str | None = None
    template: str = ""

    def filled(self, template: str | None = None) -> str:
        """The template with the texts in it."""
        return (template or self.chosen_template()).format(
            prompt=self.prompt or "",
            completion=self.completion,
            criterion=self.criterion,
            reference=self.reference or "",
        )

    def chosen_template(self) -> str:
        """The template, or the default one for an item of this kind."""
        if self.template:
            return self.template
        plain = prompts.JUDGE if self.reference is None else prompts.SCORE
        return prompts.WITH_TASK[plain] if self.prompt is not None else plain


@runtime_checkable
class Judge(Protocol):
    """What gives verdicts. A judge that also grades has `grade(items) -> list[float | None]`, from 1 to 10."""

    name: str
    """Identifies it in logs, cards and cache keys; holds no secret."""

    def judge(self, items: Sequence[JudgeItem]) -> list[bool | None]:
        """True, False, or None (unreadable) for each item; an exception object in place of one says that it failed."""
        ...


@dataclass(frozen=True)
class Verdict:
    """A verdict or grade: its value (None if there is none), why there is none, and whether it was remembered."""

    value: bool | float | None
    error: str | None = None
    cached: bool = False


class CachedJudge:
    """Asks a judge what it has not been asked before, each question once, and keeps its failures within bounds.

    Args:
        judge: The judge.
        size: Verdicts that are remembered, the latest used; 0 for none. What had no verdict is asked again.
        on_error: `"continue"` (logged, no verdict) or `"raise"`.
    """

    def __init__(self, judge: Judge, *, size: int = 20_000, on_error: str = "continue") -> None:
        self.inner = judge
        self.name = judge.name
        self.size = size
        self.on_error = on_error
        self.asked = 0
        self.hits = 0
        self._known: OrderedDict[str, bool | float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __call__(self, items: Sequence[JudgeItem]) -> list[Verdict]:
        """A verdict for each item; those with a `reference` are graded."""
        keys = [self._key_of(item) for item in items]
        fresh: dict[str, JudgeItem] = {}
        known: dict[str, bool | float] = {}
        for key, item in zip(keys, items):
            if key in self._known:
                self._known.move_to_end(key)
                known[key] = self._known[key]
            else:
                fresh.setdefault(key, item)
        found: dict[str, Verdict] = {}
        for graded in (False, True):
            part = {key: item for key, item in fresh.items() if (item.reference is not None) == graded}
            if part:
                found |= zip(part, self._ask(list(part.values()), graded))
        self.asked += len(fresh)
        self.hits += len(items) - len(fresh)
        for key, verdict in found.items():
            if verdict.value is not None:
                self._known[key] = verdict.value
        while len(self._known) > self.size:
            self._known.popitem(last=False)
        first = set()
        verdicts = []
        for key in keys:
            if key in known:
                verdicts.append(Verdict(known[key], cached=True))
            else:
                verdict = found[key]
                verdicts.append(Verdict(verdict.value, verdict.error, cached=key in first))
                first.add(key)
        return verdicts

    def _key_of(self, item: JudgeItem) -> str:
        template = prompts.template_hash(item.chosen_template())
        parts = [self.name, template, item.prompt, item.completion, item.criterion, item.reference]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _ask(self, items: list[JudgeItem], graded: bool) -> list[Verdict]:
        try:
            answers = self.inner.grade(items) if graded else self.inner.judge(items)
            if not isinstance(answers, (list, tuple)) or len(answers) != len(items):
                size = f"{len(answers)} of them" if hasattr(answers, "__len__") else type(answers).__name__
                raise JudgeError(f"the judge {self.name} was asked for {len(items)} verdicts and returned {size}")
        except Exception as error:
            if getattr(error, "fatal", False) or self.on_error == "raise" or _is_bug(error):
                raise
            answers = [error] * len(items)
        verdicts = [self._read(answer, graded) for answer in answers]
        failed = [verdict.error for verdict in verdicts if verdict.error]
        if failed:
            logger.warning("%s: no verdict on %d of %d items: %s", self.name, len(failed), len(items), failed[0])
        return verdicts

    def _read(self, answer: Any, graded: bool) -> Verdict:
        if isinstance(answer, Exception):
            text = str(answer) if isinstance(answer, JudgeError) else repr(answer)
            if getattr(answer, "fatal", False) or self.on_error == "raise":
                raise answer if isinstance(answer, JudgeError) else JudgeError(f"{self.name}: {text}") from answer
            return Verdict(None, " ".join(text.split())[:500])
        if isinstance(answer, str):
            answer = parse_grade(answer) if graded else parse_verdict(answer)
        if answer is None:
            return Verdict(None)
        try:
            if graded and 1 <= float(answer) <= 10:
                return Verdict(float(answer))
            if not graded and answer in (True, False):  # numpy's and torch's booleans too
                return Verdict(bool(answer))
        except Exception:  # an object of any kind may come back
            pass
        return Verdict(None, f"{answer!r:.80} is no {'grade from 1 to 10' if graded else 'yes or no'}")


def _is_bug(error: Exception) -> bool:
    """Running out of memory must not pass for a judge's bad day."""
    return type(error).__name__ == "OutOfMemoryError"


# --- functions and endpoints ---------------------------------------------------------------------------------------


class CallableJudge:
    """A function as a judge.

    Args:
        function: `fn(items) -> list`, one True, False or None for each `JudgeItem`.
        grade: `fn(items) -> list` of grades from 1 to 10, for `reward="judge_score"`.
        name: For logs and the cache; another rule needs another name.
    """

    def __init__(
        self,
        function: Callable[[Sequence[JudgeItem]], Sequence[bool | None]],
        grade: Callable[[Sequence[JudgeItem]], Sequence[float | None]] | None = None,
        name: str | None = None,
    ) -> None:
        self.judge = function
        if grade is not None:
            self.grade = grade
        self.name = name or f"callable:{getattr(function, '__qualname__', type(function).__name__)}"


class ChatJudge:
    """A chat model that replies yes or no.

    Args:
        backend: The model, see `hf_ext.chat`.
        max_new_tokens: Of a reply.
        grouped: Ask for all verdicts on a rollout at once, as a JSON list of booleans: fewer calls, and the verdicts
            see each other.
    """

    def __init__(
        self,
        backend: ChatBackend,
        *,
        max_new_tokens: int = 3,
        grouped: bool = False,
    ) -> None:
        self.backend = backend
        self.max_new_tokens = max_new_tokens
        self.grouped = grouped
        self.name = backend.name + (":grouped" if grouped else "")

    def judge(self, items: Sequence[JudgeItem]) -> list[bool | None]:
        """See `Judge.judge`."""
        if self.grouped:
            return self._judge_grouped(items)
        replies = self._complete([item.filled() for item in items], self.max_new_tokens)
        return [reply if isinstance(reply, Exception) else parse_verdict(reply) for reply in replies]

    def grade(self, items: Sequence[JudgeItem]) -> list[float | None]:
        """Grades from 1 to 10 for items with a reference."""
        replies = self._complete([item.filled() for item in items], self.max_new_tokens)
        return [reply if isinstance(reply, Exception) else parse_grade(reply) for reply in replies]

    def _judge_grouped(self, items: Sequence[JudgeItem]) -> list[bool | None]:
        rollouts: dict[tuple[str | None, str], list[int]] = {}
        for index, item in enumerate(items):
            rollouts.setdefault((item.prompt, item.completion), []).append(index)
        texts = []
        for (prompt, completion), members in rollouts.items():
            criteria = "\n".join(f"{k}. {items[i].criterion}" for k, i in enumerate(members, start=1))
            task = f"Task:\n{prompt}\n\n" if prompt is not None else ""
            texts.append(
                f"{task}Answer:\n{completion}\n\nCriteria:\n{criteria}\n\nDoes the answer meet each criterion? Reply "
                f"with a JSON list of {len(members)} booleans, in the order of the criteria, and nothing else."
            )
        longest = max(map(len, rollouts.values()))
        verdicts: list[Any] = [None] * len(items)
        for members, reply in zip(rollouts.values(), self._complete(texts, 16 + 4 * longest)):
            answers = [reply] * len(members) if isinstance(reply, Exception) else _booleans(reply, len(members))
            for index, answer in zip(members, answers):
                verdicts[index] = answer
        return verdicts

    def _complete(self, texts: Sequence[str], max_new_tokens: int) -> list[str | Exception]:
        replies = self.backend.complete(
            [[{"role": "user", "content": text}] for text in texts], max_new_tokens=max_new_tokens, temperature=0.0
        )
        return [
            JudgeError(f"{self.name}: {reply.error}", fatal=reply.fatal)
            if reply.text is None
            else prompts.strip_thinking(reply.text)
            for reply in replies
        ]


class EndpointJudge(ChatJudge):
    """A model behind an OpenAI-compatible endpoint, asked at temperature 0.

    Args:
        base_url, model, api_key, max_concurrency, timeout, max_retries, options: See `hf_ext.chat.EndpointChat`. The
            key may come from the environment variable OPENAI_API_KEY; it is never written anywhere.
        max_new_tokens, grouped: See `ChatJudge`.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        max_concurrency: int = 16,
        timeout: float = 60.0,
        max_retries: int = 3,
        options: dict[str, Any] | None = None,
        **judging: Any,
    ) -> None:
        if not base_url:
            raise ValueError("base_url is missing: the address of the endpoint, such as http://localhost:8000/v1")
        chat = EndpointChat(
            base_url,
            model,
            api_key,
            max_concurrency=max_concurrency,
            timeout=timeout,
            max_retries=max_retries,
            options=options,
        )
        super().__init__(chat, **judging)


def _booleans(text: str, count: int) -> list[bool | None]:
    """The first JSON list in a reply, if it has `count` booleans (or yes and no); else nothing is readable."""
    start = text.find("[")
    try:
        values, _ = json.JSONDecoder().raw_decode(text, start) if start >= 0 else (None, 0)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or len(values) != count:
        return [None] * count
    return [v if isinstance(v, bool) else parse_verdict(v) if isinstance(v, str) else None for v in values]


def as_judge(judge: Any, anchor: Any = None, device: Any = None) -> Judge:
    """A judge from what a user may pass: a judge, a model or its path, a chat back end, a function, or `"anchor"`.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(judge, Judge):
        return judge
    if isinstance(judge, ChatBackend):
        return ChatJudge(judge)
    if callable(judge):
        return CallableJudge(judge)
    raise TypeError(
        f"judge is a {type(judge).__name__}; it must be a TransformersJudge, EndpointJudge or CallableJudge, another "
        'object with name and judge(items), a model or its path, a function of a list of items, or "anchor"'
    )
