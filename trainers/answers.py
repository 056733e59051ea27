r"""Final answers of texts: found in `\boxed{...}` or after `####`, and compared as numbers, words or expressions.

The one place in which trainers extract and compare answers. Numbers are compared exactly, words by their letters;
expressions go to math-verify, as in TRL's `accuracy_reward`.
"""

import functools
import re
import threading
from fractions import Fraction
from typing import NamedTuple

from hf_ext.extras import require

__all__ = ["answers_match", "extract_answer"]

_LONGEST = 400  # characters of an expression that the computer algebra still gets
_SECONDS = 2  # that it may think about one comparison
_TOLERANCE = Fraction(1, 10**6)  # between a decimal and what it may be rounded from; math-verify's too

_BRACES = re.compile(r"\\f?boxed\s*\{|\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
# In this order. Afterwards a fraction of integers is a/b, a power of ten is an exponent, and words are bare.
_PLAIN = [
    (re.compile(r"\\(?:left|right|displaystyle)\b|\\[()\[\],;:!]|\\q?quad\b|(?<!\\)\$"), ""),
    (re.compile(r"\\ |~"), " "),
    (re.compile(r"\\\$"), ""),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf)|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree\b|°"), " degrees "),
    (re.compile(r"\\[dt]frac\b"), r"\\frac"),
    (re.compile(r"\\frac\s*\{\s*([+-]?\d+)\s*\}\s*\{\s*(\d+)\s*\}"), r" \1/\2 "),
    (re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)"), r" \1/\2 "),
    (re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))"), r"e\1\2"),
    (re.compile(r"−"), "-"),
    (re.compile(r"\s+"), " "),
]
# A letter alone is a unit only where it is the sign of one: 3 m, but not 3 x.
_NUMBER = re.compile(
    r"(?P<sign>[+-]?) ?(?:(?P<whole>\d+) (?=\d+ ?/))?"
    r"(?P<value>\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)(?:e(?P<exponent>[+-]?\d{1,3}))?"
    r"(?: ?/ ?(?P<bottom>\d+))?"
    r"(?P<unit> ?%| (?:[a-z]{2,}|[mgslhjwv])(?:\^?\d)?(?:[ /][a-z]+(?:\^?\d)?)*|)"
)
_DIGITS = 60  # of a number that is read as one
_OPERATORS = re.compile(r"[\\^_+*/=()\[\]{}<>|!-]|\d[a-z]|^[a-z]$")
_WORD = re.compile(r"(?<![\\a-z])[a-z]{3,}")


class _Number(NamedTuple):
    value: Fraction
    unit: str
    is_decimal: bool


def extract_answer(text: str) -> str | None:
    r"""The final answer of a text: what is in its last `\boxed{...}`, else what follows its last `####`.

    Of nested boxes the innermost counts; one that is not closed, or empty, does not. Takes time linear in the text.

    Returns:
        The answer without surrounding blanks, or None if there is none.

    Example:
        >>> extract_answer(r"First \boxed{1}, then \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    found = ""
    # Of each open brace: where its box's content starts (None: another brace) and whether a box was closed inside.
    open_braces: list[list[int | bool | None]] = []
    for match in _BRACES.finditer(text):
        piece = match.group()
        if piece.endswith("{") and piece != r"\{":
            open_braces.append([match.end() if piece != "{" else None, False])
        elif piece == "}" and open_braces:
            start, has_box = open_braces.pop()
            if start is not None and not has_box:
                found = text[start : match.start()].strip() or found
            if open_braces and (start is not None or has_box):
                open_braces[-1][1] = True
    if found:
        return found
    return next((answer for answer in map(str.strip, reversed(_HASHES.findall(text))) if answer), None)


def answers_match(a: str | None, b: str | None) -> bool:
    r"""Whether two answers are the same: as numbers, as words, or as mathematical expressions. Symmetric.

    Numbers may be integers with thousands separators, decimals, fractions, mixed numbers, percentages and powers of
    ten, in LaTeX or not; a decimal equals what it is rounded from to six places. A unit counts only where both have
    one. Words are compared without case. Expressions are compared by math-verify, for at most two seconds in the main
    thread (the time limit of that library needs it); what is not decided then is not equal.

    Args:
        a, b: Answers as `extract_answer` gives them. None, or an empty one, equals nothing.

    Raises:
        ImportError: Two expressions are to be compared and math-verify is not installed (extra `trainers`).

    Example:
        >>> answers_match("0.5", r"\frac{1}{2}"), answers_match("1,000", "1000"), answers_match("10", "100")
        (True, True, False)
    """
    if a is None or b is None:
        return False
    left, right = _plain(a), _plain(b)
    if not left or not right:
        return False
    if left == right:
        return True
    one, other = _number(left), _number(right)
    if one and other:
        return _numbers_match(one, other)
    # A product of letters is not a word: without this, "of" would equal "fo".
    if all(_number(text) or (_OPERATORS.search(text) and not _WORD.search(text)) for text in (left, right)):
        return len(a) <= _LONGEST and len(b) <= _LONGEST and _expressions_match(*sorted((a.strip(), b.strip())))
    return False


def _plain(text: str) -> str:
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;: ").casefold()
    choice = re.fullmatch(r"\(([a-z])\)", text)
    return choice.group(1) if choice else text


def _number(plain: str) -> _Number | None:
    match = _NUMBER.fullmatch(plain) if len(plain) <= 2 * _DIGITS else None
    if match is None:
        return None
    # Decimals and exponents are exact as fractions; Fraction reads both.
    digits = match["value"].replace(",", "")
    value = Fraction(f"{digits}e{match['exponent']}" if match["exponent"] else digits)
    if match["bottom"]:
        if not int(match["bottom"]):
            return None
        value /= int(match["bottom"])
    value += int(match["whole"] or 0)
    is_decimal = "." in digits or match["exponent"] is not None
    return _Number(-value if match["sign"] == "-" else value, match["unit"].strip(), is_decimal)


def _numbers_match(a: _Number, b: _Number) -> bool:
    percent = "%" in (a.unit, b.unit)
    if a.unit and b.unit and a.unit != b.unit and not percent:
        return False
    values = [(a.value, b.value)]
    if percent and a.unit != b.unit:  # 50% is written 50 as well as 0.5
        values.append((a.value / (100 if a.unit == "%" else 1), b.value / (100 if b.unit == "%" else 1)))
    for x, y in values:
        rounded = (a.is_decimal or b.is_decimal) and abs(x - y) <= _TOLERANCE * min(1, max(abs(x), abs(y)))
        if x == y or rounded:
            return True
    return False


@functools.lru_cache(maxsize=8192)
def _expressions_match(a: str, b: str) -> bool:
    math_verify = require("math_verify", extra="trainers")
    # Its time limit is a signal, which only the main thread may set.
    seconds = _SECONDS if threading.current_thread() is threading.main_thread() else None
    x, y = (math_verify.parse(_in_dollars(text), parsing_timeout=seconds) for text in (a, b))
    if not x or not y:
        return False
    # It treats the reference and the answer differently.
    return any(math_verify.verify(*pair, timeout_seconds=seconds) for pair in ((x, y), (y, x)))


def _in_dollars(text: str) -> str:
    return f"${text.replace('$', '')}$"
