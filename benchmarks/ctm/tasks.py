"""Small tasks on real words with answers that can be checked: what the four adapters of the study learn.

The words come from three pinned wheels of the Python package index: inflections of English words (lemminflect, from
NIH's SPECIALIST lexicon), a lexicon of sentiment (vaderSentiment) and word lists in several languages (mnemonic).
"""

import gzip
import random
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hf_ext.benchmarks.language_model import Wheel, wheel_member

__all__ = ["TASKS", "Example", "Task", "make_task", "number_words", "split"]

TRAINING, VALIDATION, TEST = 1600, 60, 300
_LEMMINFLECT = Wheel(
    "lemminflect==0.2.3",
    "lemminflect-0.2.3-py3-none-any.whl",
    "1cf470efa783733ca5654cc1a6ee1de774e59031e61bf6210467625e84a8cf1c",
)
_VADER = Wheel(
    "vaderSentiment==3.3.2",
    "vaderSentiment-3.3.2-py2.py3-none-any.whl",
    "3bf1d243b98b1afad575b9f22bc2cb1e212b94ff89ca74f8a23a588d024ea311",
)
_MNEMONIC = Wheel(
    "mnemonic==0.21",
    "mnemonic-0.21-py3-none-any.whl",
    "72dc9de16ec5ef47287237b9b6943da11647a03fe7cf1f139fc3d7c4a7439288",
)
_INFLECTIONS = "8c44bd5bec62488bef043f98b0cab022a431d6cb03954864ea70334530908ba7"
_SENTIMENT = "1ec9c6e9ee19aade328f8beb393a6afa71a5bb3acf7d3cc22d4ef568df374bf5"
_LANGUAGES = {
    "Czech": "7e80e161c3e93d9554c2efb78d4e3cebf8fc727e9c52e03b83b94406bdcc95fc",
    "English": "2f5eed53a4727b4bf8880d8f3f199efc90e58503646d9ff8eff3a2ed3b24dbda",
    "French": "ebc3959ab7801a1df6bac4fa7d970652f1df76b683cd2f4003c941c63d517e59",
    "Italian": "d392c49fdb700a24cd1fceb237c1f65dcc128f6b34a8aacb58b59384b5c648c2",
    "Portuguese": "2685e9c194c82ae67e10ba59d9ea5345a23dc093e92276fc5361f6667d79cd3f",
    "Spanish": "46846a5a0139d1e3cb77293e521c2865f7bcdb82c44e8d0a06a2cd0ecba48c0b",
    "Turkish": "a7dc9c77913726106c7b8baa022b7e17601d118acf40aa60ab1fbc9c91b383ac",
}
_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
)
_UNITS += ["seventeen", "eighteen", "nineteen"]
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


class Example(NamedTuple):
    """One question.

    Attributes:
        word: What it asks about; no two examples of a task share it.
        prompt: The text before the answer, without a space at its end.
        answer: The text that must follow, with its leading space; a newline ends it.
    """

    word: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A task with its three disjoint parts.

    Attributes:
        name: What rows call it.
        training, validation, test: Its examples.
    """

    name: str
    training: list[Example]
    validation: list[Example]
    test: list[Example]


def split(
    name: str,
    pairs: dict[str, str],
    prompt: str,
    sizes: tuple[int, int, int],
    family: Callable[[str], str] = str,
) -> Task:
    """Shuffle word -> answer by the task's name, always the same way, and deal it out to training, validation, test.

    Words of one family (those with the same `family(word)`) never go to different parts.

    Raises:
        ValueError: There are too few words.
    """
    families: dict[str, list[str]] = {}
    for word in sorted(pairs):
        families.setdefault(family(word), []).append(word)
    groups = list(families.values())
    random.Random(f"hf_ext ctm {name}").shuffle(groups)
    parts: list[list[Example]] = []
    for size in reversed(sizes):  # the test's words do not depend on how many there are to train on
        words: list[str] = []
        while groups and len(words) < size:
            words += groups.pop()
        if len(words) < size:
            raise ValueError(f"task {name!r} has {len(pairs)} words, too few for {sizes} examples")
        parts.append([Example(word, prompt.format(word), f" {pairs[word]}\n") for word in words[:size]])
    test, validation, training = parts
    return Task(name, training, validation, test)


def _is_plain(word: str, longest: int = 9) -> bool:
    return 3 <= len(word) <= longest and word.isascii() and word.isalpha() and word.islower()


def _past() -> dict[str, str]:
    """Verb -> its past tense, of verbs with a single spelling of it."""
    data = gzip.decompress(wheel_member(_LEMMINFLECT, "lemminflect/resources/infl_lu.csv.gz", _INFLECTIONS)).decode()
    rows = (line.split(",") for line in data.splitlines())
    found = {row[0]: row[2] for row in rows if row[1] == "verb" and len(row) > 2}
    return {word: form for word, form in found.items() if _is_plain(word) and _is_plain(form, 12)}


def _sentiment() -> dict[str, str]:
    """Word -> positive or negative, of words whose mean rating (from -4 to 4) is at least 1 away from neutral."""
    data = wheel_member(_VADER, "vaderSentiment/vader_lexicon.txt", _SENTIMENT).decode()
    ratings = {row[0]: float(row[1]) for row in (line.split("\t") for line in data.splitlines()) if len(row) > 1}
    kept = {word: rating for word, rating in ratings.items() if abs(rating) >= 1 and _is_plain(word, 12)}
    return {word: "positive" if rating > 0 else "negative" for word, rating in kept.items()}


def _language() -> dict[str, str]:
    """Word -> its language, of words that only one list has."""
    found: dict[str, list[str]] = {}
    for language, sha256 in _LANGUAGES.items():
        words = wheel_member(_MNEMONIC, f"mnemonic/wordlist/{language.lower()}.txt", sha256).decode().split()
        for word in words:
            found.setdefault(unicodedata.normalize("NFC", word), []).append(language)
    return {word: languages[0] for word, languages in found.items() if len(languages) == 1}


def number_words(number: int) -> str:
    """A number from 0 to 9999 in English words.

    Raises:
        ValueError: The number is outside.
    """
    if not 0 <= number <= 9999:
        raise ValueError(f"number must be from 0 to 9999, got {number}")
    if number < 20:
        return _UNITS[number]
    if number < 100:
        rest = number % 10
        return _TENS[number // 10 - 2] + (f"-{_UNITS[rest]}" if rest else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    rest = f" {number_words(number % size)}" if number % size else ""
    return f"{number_words(number // size)} {name}{rest}"


def _number() -> dict[str, str]:
    return {number_words(number): str(number) for number in range(10000)}


TASKS: dict[str, tuple[Callable[[], dict[str, str]], str]] = {
    "past": (_past, "past tense: {} ="),
    "sentiment": (_sentiment, "sentiment: {} ="),
    "language": (_language, "language: {} ="),
    "number": (_number, "digits: {} ="),
}


def make_task(name: str, sizes: tuple[int, int, int] = (TRAINING, VALIDATION, TEST)) -> Task:
    """A task of `TASKS`, the same on every call.

    Raises:
        ValueError: An unknown name, or too many examples asked for.
        RuntimeError: pip could not fetch the words.
    """
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown; known: {', '.join(TASKS)}")
    words, prompt = TASKS[name]
    # "adore" and "adored" share their sentiment.
    return split(name, words(), prompt, sizes, family=(lambda word: word[:5]) if name == "sentiment" else str)
