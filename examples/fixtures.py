"""Build, offline, the tiny models and data sets that the files in examples/configs/ name: `make fixtures`.

Everything goes to examples/fixtures/. What is there already, made by this version of its builder, is kept; what a
killed run left is made anew. To add a fixture, write a function that fills a folder and name it in `FIXTURES`.
"""

import argparse
import hashlib
import inspect
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hf_ext.benchmarks.cat import sums as training
from hf_ext.runlog import write_json, write_text
from hf_ext.trainers.cat import prompts

FOLDER = Path(__file__).resolve().parent / "fixtures"
STAMP = ".fixture.json"

# A note says three things about an object; what they are is the policy's choice.
OBJECTS = ("ball", "lamp", "boat", "coat", "box", "chair", "cup", "kite", "door", "bell")
FACTS = (("red", "blue", "green"), ("old", "new"), ("small", "large", "tall"))
ATTEMPTS = 4
Pair = tuple[str, str]  # of a prompt and a reply


def _sum(rng: random.Random) -> tuple[str, str, Callable[[], str]]:
    """A question, its good answer, and what writes an answer that errs one time in three."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)

    def attempt() -> str:
        found = a + b + (rng.choice((-2, -1, 1, 2)) if rng.random() < 1 / 3 else 0)
        return f"{a}+{b}={max(0, found)}\n#### {max(0, found)}"

    return f"{a}+{b}", f"{a}+{b}={a + b}\n#### {a + b}", attempt


def _note(rng: random.Random) -> tuple[str, str, Callable[[], str]]:
    """The same for a note: an attempt leaves out what it likes, the good one nothing."""
    thing, facts = rng.choice(OBJECTS), [rng.choice(kind) for kind in FACTS]

    def attempt() -> str:
        kept = [fact for fact in facts if rng.random() < 0.7]
        return f"The {thing}." + "".join(f" It is {fact}." for fact in kept)

    return f"Write a note on a {thing}.", f"The {thing}." + "".join(f" It is {fact}." for fact in facts), attempt


def _criteria(note: str) -> list[str]:
    """What a rubric for a note asks."""
    thing, *facts = note.rstrip(".").split(". ")
    asked = [f"It says that it is {fact.removeprefix('It is ')}." for fact in facts]
    return [f"It names the {thing.removeprefix('The ')}.", *asked, "It is written in English.", "It tells no lie."]


def _merged(attempts: list[str]) -> str:
    return prompts.SYNTHESIS.format(n=len(attempts), attempts=prompts.number_attempts(attempts))


def _conversations(rng: random.Random, count: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Replies as a policy, an anchor and a judge would give them."""
    answers, merged, rubrics = [], [], []
    for i in range(count):
        question, good, attempt = (_note if i % 2 else _sum)(rng)
        answers.append((question, attempt()))
        merged.append((_merged([attempt() for _ in range(ATTEMPTS)]), good))
        if i % 2:
            criteria = _criteria(good)
            asked = prompts.RUBRIC.format(reference=good, n_min=5, n_max=10)
            rubrics.append((asked, json.dumps(criteria)))
            answer, criterion = attempt(), rng.choice(criteria)
            met = criterion.removeprefix("It says that it is ") in answer or not criterion.startswith("It says")
            judged = prompts.JUDGE.format(completion=prompts.fence(answer), criterion=criterion)
            rubrics.append((judged, "yes" if met else "no"))
    return answers, merged, rubrics


def tiny_llama(folder: Path) -> None:
    """A Llama of two layers that adds two digits, writes notes, merges attempts, lists criteria and says yes or no.

    Half a minute of training: it errs often, which is what a policy to be trained should do. The chat template takes
    tools.
    """
    rng = random.Random(0)
    corpus = [text for part in _conversations(rng, 200) for pair in part for text in pair]

    def batches() -> Iterator[tuple[list[Pair], list[Pair], list[Pair]]]:
        while True:
            yield _conversations(rng, 16)

    tokenizer = training.chat_tokenizer(corpus)
    training.train_llama(folder, tokenizer, batches(), hidden=64, layers=2, heads=4, steps=300, learning_rate=0.02)


def _write_rows(file: Path, rows: list[dict]) -> None:
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def sums(folder: Path) -> None:
    """Prompts with a solution, which CaT only logs against."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(0).shuffle(pairs)
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "solution": str(a + b), "domain": "verifiable"}
        for a, b in pairs
    ]
    _write_rows(folder / "train.jsonl", rows[:80])
    _write_rows(folder / "test.jsonl", rows[80:])


def notes(folder: Path) -> None:
    """Prompts without a checkable answer."""
    rows = [
        {"prompt": [{"role": "user", "content": f"Write a note on a {thing}."}], "domain": "open"} for thing in OBJECTS
    ]
    _write_rows(folder / "train.jsonl", rows)


# Folder under examples/fixtures -> what fills it.
FIXTURES: dict[str, Callable[[Path], None]] = {"tiny-llama": tiny_llama, "sums": sums, "notes": notes}


def build(name: str, folder: Path = FOLDER) -> bool:
    """Build a fixture unless it is there, and say whether it was built.

    Args:
        name: A name in `FIXTURES`.
        folder: Where fixtures are.
    """
    # An edit of what it is built with makes it anew.
    modules = (sys.modules[__name__], training, prompts)
    made_of = hashlib.sha256("".join(map(inspect.getsource, modules)).encode()).hexdigest()
    target, partial = folder / name, folder / f"{name}.partial"
    stamp = target / STAMP
    if stamp.is_file() and json.loads(stamp.read_text())["made_of"] == made_of:
        return False
    for old in (target, partial):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    FIXTURES[name](partial)
    write_json(partial / STAMP, {"made_of": made_of})
    os.replace(partial, target)
    return True


def main() -> None:
    """Build all fixtures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(FIXTURES)}")
    names = parser.parse_args().names or list(FIXTURES)
    if unknown := sorted(set(names) - set(FIXTURES)):
        parser.error(f"no such fixture: {', '.join(unknown)}; there are {', '.join(FIXTURES)}")
    torch.set_num_threads(1)
    for name in names:
        begun = time.time()
        built = build(name)
        print(f"{FOLDER / name}: " + (f"built in {time.time() - begun:.0f} s" if built else "there already"))


if __name__ == "__main__":
    main()
