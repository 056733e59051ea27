"""Who decides whether a rollout meets a criterion: a local model, an endpoint, a function, or the anchor itself."""

import contextlib
import copy
import dataclasses
import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn
from transformers import DynamicCache

from hf_ext.chat import ChatBackend, ChatReply, EndpointChat, generate_replies, render_conversation

from . import prompts
from .rewards import parse_grade, parse_verdict

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .anchor import Anchor

__all__ = [
    "AnchorJudge",
    "CachedJudge",
    "CallableJudge",
    "ChatJudge",
    "EndpointJudge",
    "Judge",
    "JudgeError",
    "JudgeItem",
    "TransformersJudge",
    "Verdict",
    "as_judge",
]

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
        template: What `filled` puts them into; empty for the default.
    """

    prompt: str | None
    completion: str
    criterion: str = ""
    reference: str | None = None
    template: str = ""

    def filled(self) -> str:
        """The template with the texts in it."""
        # Fenced, so that a rollout cannot pass off its words as the judge's instructions.
        return self.chosen_template().format(
            prompt=self.prompt or "",
            completion=prompts.fence(self.completion),
            criterion=self.criterion,
            reference=prompts.fence(self.reference or ""),
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
            if hasattr(answers, "tolist"):  # an array or a tensor
                answers = answers.tolist()
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
                f"{task}Answer:\n{prompts.fence(completion)}\n\nCriteria:\n{criteria}\n\nDoes the answer meet each "
                f"criterion? Reply with a JSON list of {len(members)} booleans, in the order of the criteria, and "
                "nothing else."
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


# --- a local model -------------------------------------------------------------------------------------------------

# Stands for the criterion while the text around it is rendered: a private character that no template touches.
_HOLE = "\uf8ff\uf8fe\uf8ff"
_FORMS = ("yes", "Yes", "YES", " yes", " Yes", " YES"), ("no", "No", "NO", " no", " No", " NO")
# Plain questions by which it is found out whether a model replies yes or no at all.
_CALIBRATION = [
    JudgeItem(None, completion, criterion)
    for completion in ("The capital of France is Paris.", "2 + 2 = 4, so the answer is 4.", "I like tea with milk.")
    for criterion in ("It names a city.", "It contains a sum.", "It mentions a drink.", "It is written in English.")
]
_READABLE = 0.9  # share of them


class TransformersJudge:
    """A local model as a judge, without generation: a verdict is the odds of yes against no as the next token.

    The criteria of one answer share its prefix: it is read once, its cache is repeated, and each criterion costs its
    own few tokens. Verdicts are deterministic.

    Args:
        model: A model, or a name or folder to load one from.
        tokenizer: Its tokenizer. Default: the one of the folder or of `model.name_or_path`.
        batch_size: Criteria that are read together.
        margin: Log-odds below which a verdict is None.
        readout: `"logits"`; `"generate"` (write a few tokens and read them); or `"auto"`: logits if the most likely
            next token is a form of yes or no on nearly all of a few built-in questions, else generation.
        share_prefix: Switch off for models whose cache is not that of attention.
        template_kwargs: Handed to the chat template; thinking is switched off where a template can do that.
        **load_kwargs: For `from_pretrained`, if `model` is a name.

    Raises:
        ValueError: A bad argument.
    """

    def __init__(
        self,
        model: "PreTrainedModel | str | os.PathLike[str] | None",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        batch_size: int = 16,
        margin: float = 0.0,
        readout: str = "auto",
        share_prefix: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        **load_kwargs: Any,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if margin < 0:
            raise ValueError(f"margin is {margin}; it must be 0 or more")
        if readout not in ("auto", "logits", "generate"):
            raise ValueError(f"readout is {readout!r}; it must be one of auto, logits, generate")
        if isinstance(model, (str, os.PathLike)):
            tokenizer = AutoTokenizer.from_pretrained(model) if tokenizer is None else tokenizer
            model = AutoModelForCausalLM.from_pretrained(model, **load_kwargs).eval().requires_grad_(False)
        elif tokenizer is None:
            if not model.name_or_path:
                raise ValueError("this model does not know where it comes from; pass its tokenizer too")
            tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.margin = margin
        self.readout = readout
        self.share_prefix = share_prefix
        self.template_kwargs = {"enable_thinking": False, **(template_kwargs or {})}
        if model is not None:
            self.name = f"transformers:{model.name_or_path or type(model).__name__}"
        self._special = prompts.special_tokens(tokenizer)
        self._forms = [self._tokens(forms) for forms in _FORMS]

    def _tokens(self, forms: Sequence[str]) -> list[list[int]]:
        """Each form as tokens: those of one token if there are any, else the first two forms."""
        found = [self.tokenizer(form, add_special_tokens=False)["input_ids"] for form in forms]
        return [ids for ids in found if len(ids) == 1] or found[:2]

    @contextlib.contextmanager
    def active(self) -> "Iterator[PreTrainedModel]":
        """The model in evaluation mode, without gradients; its mode is put back."""
        training = self.model.training
        try:
            self.model.eval()
            with torch.no_grad():
                yield self.model
        finally:
            self.model.train(training)

    def to(self, device: Any) -> "TransformersJudge":
        """Move the model to a device."""
        self.model.to(device)
        return self

    # -- what is asked of it ------------------------------------------------------------------------------------------

    def judge(self, items: Sequence[JudgeItem]) -> list[bool | None]:
        """See `Judge.judge`."""
        with self.active() as model:
            if self.readout == "auto":
                share = self.readable_share(_CALIBRATION, model)
                self.readout = "logits" if share >= _READABLE else "generate"
                logger.info("%s: next token is yes or no %.0f%% of the time: %s", self.name, 100 * share, self.readout)
            if self.readout == "generate":
                replies = self._generate(model, items)
                return [reply if isinstance(reply, Exception) else parse_verdict(reply) for reply in replies]
            odds = self.log_odds(items, model)
        return [
            value if isinstance(value, Exception) else None if abs(value) < self.margin else value > 0
            for value in odds
        ]

    def grade(self, items: Sequence[JudgeItem]) -> list[float | None]:
        """Grades from 1 to 10 for items with a reference, written by the model."""
        with self.active() as model:
            replies = self._generate(model, items)
        return [reply if isinstance(reply, Exception) else parse_grade(reply) for reply in replies]

    def log_odds(self, items: Sequence[JudgeItem], model: "PreTrainedModel | None" = None) -> list[float]:
        """Log-probability of yes minus that of no for each item; an exception object for one that is too long."""
        if model is None:
            with self.active() as model:
                return self.log_odds(items, model)
        single = all(len(ids) == 1 for forms in self._forms for ids in forms)
        flat = [ids for forms in self._forms for ids in forms]
        endings = [[]] if single else [ids[:-1] for ids in flat]
        keep = 1 if single else max(map(len, flat))
        rows = self._last_logits(model, items, endings, keep)
        odds: list[Any] = []
        for row in rows:
            if isinstance(row, Exception):
                odds.append(row)
                continue
            if single:
                logits = row[0][-1]
                sides = [torch.logsumexp(logits[[ids[0] for ids in forms]], 0) for forms in self._forms]
            else:
                scores = [_log_probability(logits, ids) for logits, ids in zip(row, flat)]
                cut = len(self._forms[0])
                sides = [torch.logsumexp(torch.stack(part), 0) for part in (scores[:cut], scores[cut:])]
            odds.append((sides[0] - sides[1]).item())
        return odds

    def readable_share(self, items: Sequence[JudgeItem], model: "PreTrainedModel | None" = None) -> float:
        """Share of items after which the most likely next token begins a form of yes or no."""
        if model is None:
            with self.active() as model:
                return self.readable_share(items, model)
        first = {ids[0] for forms in self._forms for ids in forms}
        rows = self._last_logits(model, items, [[]], 1)
        return sum(not isinstance(row, Exception) and row[0][-1].argmax().item() in first for row in rows) / len(rows)

    # -- how it is done -----------------------------------------------------------------------------------------------

    def _render(self, item: JudgeItem) -> str:
        plain = not self.tokenizer.chat_template
        messages = [{"role": "user", "content": item.filled()}]
        return render_conversation(
            self.tokenizer, messages, plain_text=plain, template_kwargs=None if plain else self.template_kwargs
        )

    def _split(self, item: JudgeItem) -> tuple[list[int], list[int]]:
        """Token ids before the criterion, and from the criterion on; both ways of scoring read exactly these."""
        plain = not self.tokenizer.chat_template
        texts = {"prompt": item.prompt, "completion": item.completion, "reference": item.reference}
        texts = {name: text and self._harmless(text) for name, text in texts.items()}
        criterion = self._harmless(item.criterion)
        head, hole, tail = self._render(dataclasses.replace(item, criterion=_HOLE, **texts)).partition(_HOLE)
        # A template may name the criterion more than once; one for grades does not name it at all.
        tail = (criterion if hole else "") + tail.replace(_HOLE, criterion)
        ids = self.tokenizer([head, tail], add_special_tokens=False)["input_ids"]
        if plain:
            ids[0] = self.tokenizer(head)["input_ids"]
        return ids[0], ids[1]

    def _harmless(self, text: str) -> str:
        return prompts.defuse(text.replace(_HOLE, ""), self._special)

    def _generate(self, model: "PreTrainedModel", items: Sequence[JudgeItem]) -> list[str | Exception]:
        pairs = [self._split(item) for item in items]
        replies = generate_replies(
            model, self.tokenizer, [head + tail for head, tail in pairs], batch_size=self.batch_size, max_new_tokens=8
        )
        return [
            JudgeError(f"{self.name}: {reply.error}") if reply.text is None else prompts.strip_thinking(reply.text)
            for reply in replies
        ]

    def _last_logits(
        self, model: "PreTrainedModel", items: Sequence[JudgeItem], endings: Sequence[list[int]], keep: int
    ) -> list[list[torch.Tensor] | Exception]:
        """For each item and ending, the logits float32 [keep, vocabulary] of the last positions."""
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        found: list[Any] = [None] * len(items)
        heads: dict[tuple[int, ...], list[int]] = {}
        tails: list[list[int]] = []
        for index, item in enumerate(items):
            head, tail = self._split(item)
            tails.append(tail)
            length = len(head) + len(tail) + keep
            if context is not None and length > context:
                found[index] = JudgeError(f"{self.name}: {length} tokens are more than its {context} positions")
            else:
                heads.setdefault(tuple(head), []).append(index)
        rows = [
            (head, [(index, tails[index] + ending) for index in members for ending in endings])
            for head, members in heads.items()
        ]
        if not self.share_prefix:
            rows = [((), [(index, [*head, *tail])]) for head, own in rows for index, tail in own]
        for batch in self._batches(rows):
            for index, logits in self._forward(model, batch, keep):
                if found[index] is None:
                    found[index] = []
                found[index].append(logits)
        return found

    def _batches(self, rows: list) -> "Iterator[list]":
        """Heads of similar length whose tails are `batch_size` together; one with more tails is alone."""
        batch, size = [], 0
        for row in sorted(rows, key=lambda row: -len(row[0]) - max(len(tail) for _, tail in row[1])):
            if batch and size + len(row[1]) > self.batch_size:
                yield batch
                batch, size = [], 0
            batch.append(row)
            size += len(row[1])
        if batch:
            yield batch

    def _forward(self, model: "PreTrainedModel", batch: list, keep: int) -> "Iterator[tuple[int, torch.Tensor]]":
        flat = [(row, index, tail) for row, (_, own) in enumerate(batch) for index, tail in own]
        cache = lengths = mask = None
        if batch[0][0]:
            ids, mask = _left_padded([head for head, _ in batch], model.device)
            lengths = mask.sum(1)
            cache = DynamicCache(config=model.config)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        for start in range(0, len(flat), self.batch_size):
            part = flat[start : start + self.batch_size]
            ids, own = _left_padded([tail for _, _, tail in part], model.device)
            positions = (own.cumsum(1) - 1).clamp(min=0)
            inputs = {"attention_mask": own, "position_ids": positions, "use_cache": False}
            if cache is not None:
                rows = torch.tensor([row for row, _, _ in part], device=model.device)
                last = start + self.batch_size >= len(flat)
                repeated = cache if last else copy.deepcopy(cache)
                repeated.batch_select_indices(rows)
                # Padding stands between the prefix and the shorter tails, hidden by the mask; positions go on.
                inputs = {
                    "attention_mask": torch.cat([mask[rows], own], dim=1),
                    "position_ids": positions + lengths[rows, None],
                    "cache": repeated,
                    "use_cache": True,
                }
            logits = model(input_ids=ids, logits_to_keep=keep, **inputs).logits[:, -keep:].float()
            for (_, index, _), row in zip(part, logits):
                yield index, row


def _left_padded(rows: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, int64 [rows, longest], padded on the left."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _log_probability(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Log-probability of a continuation whose all but last tokens were fed; logits [at least len(ids), vocabulary]."""
    return logits[-len(ids) :].log_softmax(-1).gather(1, torch.tensor(ids, device=logits.device)[:, None]).sum()


class AnchorJudge(TransformersJudge):
    """The anchor as its own judge: cheap, and biased in favour of what it would write itself."""

    def __init__(self, anchor: "Anchor", **kwargs: Any) -> None:
        self.anchor = anchor
        self.name = f"anchor:{anchor.name}"
        kwargs.setdefault("template_kwargs", anchor.template_kwargs)
        super().__init__(None, anchor.tokenizer, **kwargs)

    def active(self) -> Any:
        """See `Anchor.active`."""
        return self.anchor.active()

    def to(self, device: Any) -> "AnchorJudge":
        """The anchor is where it belongs."""
        return self


class _AnchorChat:
    """An anchor that is no local model as a chat back end."""

    def __init__(self, anchor: Any) -> None:
        self.anchor = anchor
        self.name = f"anchor:{anchor.name}"

    def complete(
        self,
        conversations: Sequence[Any],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> list[ChatReply]:
        """See `ChatBackend.complete`."""
        seeds = [seed] * len(conversations)
        return self.anchor.generate(conversations, max_new_tokens=max_new_tokens, temperature=temperature, seeds=seeds)


def as_judge(judge: Any, anchor: Any = None, device: Any = None) -> Judge:
    """A judge from what a user may pass: a judge, a model or its path, a chat back end, a function, or `"anchor"`.

    Raises:
        TypeError: It is none of these.
        ValueError: The anchor's weights are sharded, so that it cannot judge.
    """
    if isinstance(judge, str) and judge == "anchor":
        if anchor.synchronized:
            raise ValueError('judge="anchor" does not work with sharded weights (FSDP, ZeRO-3); pass another judge')
        logger.warning("the anchor judges rollouts by its own reference: it may prefer what it would write itself")
        return AnchorJudge(anchor) if anchor.can_score else ChatJudge(_AnchorChat(anchor))
    if isinstance(judge, (str, os.PathLike, nn.Module)):
        judge = TransformersJudge(judge)
    if isinstance(judge, TransformersJudge):
        return judge if device is None else judge.to(device)
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
