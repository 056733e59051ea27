"""Self-proposed rubrics: criteria read from what the anchor writes, and asked for again when there are too few."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .prompts import strip_thinking

if TYPE_CHECKING:
    from .aggregators import Tools

__all__ = ["Rubric", "parse_rubric", "propose_rubrics"]

LONGEST_CRITERION = 300  # characters
LONGEST_TEXT = 50_000  # characters that are read: a list of criteria is never longer, a runaway reply is
# Matched against single stripped lines: across lines, a reply of line breaks would take them quadratic time.
_BULLET = re.compile(r"(?:[-*\u2022\u2013\u2014]|\(?\d{1,3}[.):])\s+(\S.*)")
_QUOTED = re.compile(r'\[?\s*"((?:[^"\\]|\\.){1,400})"\s*,?\s*\]?')
_FENCE = re.compile(r"```\w*")
_NOISE = re.compile(r"[\W_]+")


def parse_rubric(text: str) -> list[str]:
    """The criteria in a reply, in their order: the first JSON array of strings, else numbered or bulleted lines.

    The array may hold objects with `criterion` or `text`. Thinking parts and code fences are taken off. Criteria that
    repeat (without case and punctuation) or are longer than 300 characters are left out.
    """
    stripped = map(str.strip, strip_thinking(text[:LONGEST_TEXT]).splitlines())
    lines = [line for line in stripped if line and not _FENCE.fullmatch(line)]
    found = _json_array("\n".join(lines))
    if not found:
        bullets = [match.group(1) for line in lines if (match := _BULLET.fullmatch(line))]
        # A list that is broken elsewhere (a trailing comma, a bracket that never closes) still has one string a line.
        quoted = [match.group(1) if (match := _QUOTED.fullmatch(line)) else None for line in bullets or lines]
        found = [
            string or bullet for string, bullet in zip(quoted, bullets or [None] * len(lines)) if string or bullet
        ]
    criteria: dict[str, str] = {}
    for criterion in found:
        criterion = " ".join(criterion.split())
        key = _NOISE.sub(" ", criterion.casefold()).strip()
        if key and len(criterion) <= LONGEST_CRITERION:
            criteria.setdefault(key, criterion)
    return list(criteria.values())


def _json_array(text: str) -> list[str]:
    decoder = json.JSONDecoder()
    # Tries are bounded: each may read to the end of the text, and a reply of brackets would make that quadratic.
    position = -1
    for _ in range(20):
        position = text.find("[", position + 1)
        if position < 0:
            break
        try:
            value, _ = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            continue
        strings = [_string(entry) for entry in value]
        if any(strings):
            return [string for string in strings if string]
    return []


def _string(entry: object) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("criterion") or entry.get("text")
    return entry if isinstance(entry, str) else None


@dataclass
class Rubric:
    """The criteria of one reference.

    Attributes:
        criteria: At most `max_rubrics`; fewer than `min_rubrics` if every attempt failed.
        attempts: Replies that were read.
        error: Why there are too few, or None.
    """

    criteria: list[str]
    attempts: int = 0
    error: str | None = None


def propose_rubrics(tools: "Tools", references: Sequence[str], seeds: Sequence[int]) -> list[Rubric]:
    """Criteria for each reference, written by the anchor: greedily, then at temperature 1 while there are too few.

    Args:
        tools: Anchor and configuration.
        references: Texts, none of them empty.
        seeds: One for each reference.
    """
    config = tools.config
    rubrics = [Rubric([]) for _ in references]
    template = config.rubric_template
    conversations = [
        [
            {
                "role": "user",
                "content": template.format(reference=text, n_min=config.min_rubrics, n_max=config.max_rubrics),
            }
        ]
        for text in references
    ]
    for attempt in range(1 + config.rubric_retries):
        # Also with nothing left to ask: processes that share sharded weights must call equally often.
        asked = [i for i, rubric in enumerate(rubrics) if len(rubric.criteria) < config.min_rubrics]
        replies = tools.anchor.generate(
            [conversations[i] for i in asked],
            max_new_tokens=config.rubric_max_new_tokens,
            temperature=float(attempt > 0),
            seeds=[random.Random(f"{seeds[i]}/rubric/{attempt}").getrandbits(62) for i in asked],
        )
        for index, reply in zip(asked, replies):
            rubric = rubrics[index]
            rubric.attempts += 1
            criteria = parse_rubric(reply.text or "")[: config.max_rubrics]
            if len(criteria) >= len(rubric.criteria):
                rubric.criteria = criteria
            rubric.error = f"anchor: {reply.error}" if reply.error else None
    for rubric in rubrics:
        if len(rubric.criteria) >= config.min_rubrics:
            rubric.error = None
        elif rubric.error is None:
            rubric.error = f"{len(rubric.criteria)} criteria, fewer than min_rubrics={config.min_rubrics}"
    return rubrics
