"""What the anchor and the judge are shown: the templates, and pure functions that put texts into them."""

import hashlib
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "ANSWER_ONLY",
    "BEST_OF_N",
    "JUDGE",
    "RUBRIC",
    "SCORE",
    "SYNTHESIS",
    "WITH_TASK",
    "check_template",
    "completion_text",
    "cut_middle",
    "defuse",
    "fence",
    "number_attempts",
    "prompt_text",
    "special_tokens",
    "strip_thinking",
    "template_hash",
]

SYNTHESIS = (
    "Below are {n} independent attempts at one and the same task. The task itself is not shown. Compare them: where "
    "they agree, where they contradict each other, what some omit. Write the single best answer, settling every "
    "disagreement by reasoning, not by counting. Keep the form that the attempts use and end with the final answer in "
    "the same format.\n\n{attempts}"
)
BEST_OF_N = (
    "Below are {n} independent attempts at one and the same task. The task itself is not shown. Reply with the number "
    "of the best attempt and nothing else.\n\n{attempts}"
)
RUBRIC = (
    "Here is a good answer to a task:\n\n{reference}\n\nWrite {n_min} to {n_max} yes/no criteria that another answer "
    "must meet to be as good. Each names one checkable fact, step or property, or something a good answer must avoid, "
    "stands alone, and is true of the answer above. At least one is of the second kind. Output a JSON list of strings "
    "and nothing else."
)
# The answer comes first and the criterion last, so that all criteria of an answer share one prefix.
JUDGE = "Answer:\n{completion}\n\nCriterion: {criterion}\nDoes the answer meet the criterion? Reply yes or no."
SCORE = (
    "Reference answer:\n{reference}\n\nAnswer:\n{completion}\n\nHow good is the answer, measured by the reference? "
    "Reply with a whole number from 1 (useless) to 10 (as good as the reference) and nothing else."
)
# Default template -> the default that shows the task too, for `include_prompt` and `judge_include_prompt`.
WITH_TASK = {
    SYNTHESIS: SYNTHESIS.replace("The task itself is not shown.", "The task:\n\n{prompt}\n\n"),
    BEST_OF_N: BEST_OF_N.replace("The task itself is not shown.", "The task:\n\n{prompt}\n\n"),
    JUDGE: "Task:\n{prompt}\n\n" + JUDGE,
    SCORE: "Task:\n{prompt}\n\n" + SCORE,
}
ANSWER_ONLY = {shown: hidden for hidden, shown in WITH_TASK.items()}

CUT = "\n[... cut ...]\n"
HEAD_SHARE = 0.4  # of a cut rollout; answers live at its end


def check_template(name: str, template: str, required: Sequence[str], allowed: Sequence[str] = ()) -> None:
    """Check that a `str.format` template has the fields that it needs and no others.

    Raises:
        ValueError: Names the template, the field, and what may stand there.
    """
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise ValueError(f"{name} is no format string ({error}); write {{{{ and }}}} for plain braces") from None
    missing, unknown = sorted(set(required) - fields), sorted(fields - set(required) - set(allowed))
    if missing:
        raise ValueError(f"{name} lacks {', '.join(f'{{{field}}}' for field in missing)}")
    if unknown:
        known = ", ".join(f"{{{field}}}" for field in (*required, *allowed))
        raise ValueError(f"{name} has the unknown field {{{unknown[0]}}}; it may have {known}")


def template_hash(template: str) -> str:
    """Twelve hexadecimal digits that change when the template does."""
    return hashlib.sha256(template.encode()).hexdigest()[:12]


def strip_thinking(text: str) -> str:
    """The text without what a reasoning model thinks aloud.

    Everything up to the last `</think>` goes (a chat template may have opened the part itself); after a `<think>` that
    is never closed, everything does.
    """
    _, closed, answer = text.rpartition("</think>")
    if closed:
        return answer.strip()
    return text.partition("<think>")[0].strip() if "<think>" in text else text


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    # Content blocks: [{"type": "text", "text": ...}, {"type": "image", ...}]
    return "\n".join(part["text"] for part in content or () if part.get("type") == "text")


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt of a dataset, text or messages, as one text; of several messages each with its role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return _content(prompt[0])
    return "\n\n".join(f"{message['role']}: {_content(message)}" for message in prompt)


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """A completion, text or messages, as one text: what the assistant wrote, tool results left out."""
    if isinstance(completion, str):
        return completion
    return "\n\n".join(text for m in completion if m.get("role") == "assistant" and (text := _content(m)))


def fence(text: str) -> str:
    """The text between two lines of backticks that it cannot close: more of them than it has in a row anywhere."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}\n{text}\n{marks}"


def special_tokens(tokenizer: Any) -> list[str]:
    """The texts that a tokenizer reads as special tokens: ends of turns, roles, padding."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return sorted(token for token in {*tokenizer.all_special_tokens, *added} if len(token) > 1)


def defuse(text: str, tokens: Sequence[str]) -> str:
    """The text with a blank inside each special token, which is then read as characters.

    A rollout that spells the end of a turn would otherwise leave its fence and speak as somebody else.
    """
    for token in tokens:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def number_attempts(texts: Sequence[str]) -> str:
    """Rollouts as the anchor sees them: numbered from 1, each in a fence."""
    return "\n\n".join(f"Attempt {i}:\n{fence(text)}" for i, text in enumerate(texts, start=1))


def cut_middle(
    text: str, budget: int, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> tuple[str, bool]:
    """Shorten a text to `budget` tokens by cutting its middle: 40% head and 60% tail are kept, the cut is marked.

    Args:
        text: The rollout.
        budget: Tokens to keep, those of the mark apart.
        encode: Text to token ids.
        decode: Token ids to text.

    Returns:
        The text, and whether it was cut.
    """
    ids = encode(text)
    if len(ids) <= budget:
        return text, False
    head = int(budget * HEAD_SHARE)
    return decode(ids[:head]) + CUT + decode(ids[len(ids) - (budget - head) :]), True
