"""Tasks whose answers need a state that every earlier token has changed, and what the base is pretrained on.

A sequence is one token a step of the task. The answer to a token is not its successor in the text: no answer is ever
an input, so the state must be carried inside the model. Symbols take the ids from 0, answers those from `ANSWERS`.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["ANSWERS", "TASKS", "VOCABULARY", "Task", "batch_of", "pretraining_batch"]

ANSWERS = 20  # id of the first answer: no task has more symbols
VOCABULARY = 144
_MODULUS = 7
_COUNTERS, _COUNT = 4, 5
_WORDS = 64


@dataclass(frozen=True)
class Task:
    """A state that symbols change, and what is asked of it.

    Attributes:
        name: Short name.
        about: What a token does and what is asked, for the report.
        symbols: Number of symbols.
        answers: Number of answers; guessing is right once in so many.
        start: The state before the first token, a tuple of integers.
        step: (state, symbol) -> (state, answer).
        once: Whether a training sequence asks at one random token only, instead of at each.
    """

    name: str
    about: str
    symbols: int
    answers: int
    start: tuple[int, ...]
    step: Callable[[tuple[int, ...], int], tuple[tuple[int, ...], int]]
    once: bool = False

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return 1 / self.answers

    def answer(self, symbols: list[int]) -> list[int]:
        """The answer after each symbol, counted from 0."""
        state, found = self.start, []
        for symbol in symbols:
            state, answer = self.step(state, symbol)
            found.append(answer)
        return found


def _parity(state: tuple[int, ...], symbol: int) -> tuple[tuple[int, ...], int]:
    bit = state[0] ^ symbol
    return (bit,), bit


def _arithmetic(state: tuple[int, ...], symbol: int) -> tuple[tuple[int, ...], int]:
    # Symbols: + 1 .. + 6, then * 2 .. * 6.
    adds = _MODULUS - 1
    value = state[0] + symbol + 1 if symbol < adds else state[0] * (symbol - adds + 2)
    return (value % _MODULUS,), value % _MODULUS


def _counters(state: tuple[int, ...], symbol: int) -> tuple[tuple[int, ...], int]:
    which, amount = divmod(symbol, _COUNT - 1)
    value = (state[which] + amount + 1) % _COUNT
    return (*state[:which], value, *state[which + 1 :]), value


def _permuting(moves: list[tuple[int, ...]]) -> Callable[[tuple[int, ...], int], tuple[tuple[int, ...], int]]:
    number = {order: i for i, order in enumerate(itertools.permutations(range(len(moves[0]))))}

    def step(state: tuple[int, ...], symbol: int) -> tuple[tuple[int, ...], int]:
        state = tuple(state[place] for place in moves[symbol])
        return state, number[state]

    return step


_S3 = list(itertools.permutations(range(3)))
# Neighbours change places, or all move on by one: these five generate all 120 permutations.
_S5 = [(1, 0, 2, 3, 4), (0, 2, 1, 3, 4), (0, 1, 3, 2, 4), (0, 1, 2, 4, 3), (1, 2, 3, 4, 0)]

TASKS = {
    task.name: task
    for task in (
        Task("parity", "bits; whether the ones so far are odd", 2, 2, (0,), _parity),
        Task("parity, asked once", "the same, asked at one random token of a sequence", 2, 2, (0,), _parity, True),
        Task(
            "arithmetic", "+ a or * a; the value so far modulo 7, from left to right", 11, _MODULUS, (0,), _arithmetic
        ),
        Task(
            "counters",
            "adds 1 to 4 to one of four counters modulo 5; that counter's value",
            _COUNTERS * (_COUNT - 1),
            _COUNT,
            (0,) * _COUNTERS,
            _counters,
        ),
        Task("S3", "one of the 6 orders of three things; their product so far", 6, 6, (0, 1, 2), _permuting(_S3)),
        Task(
            "S5",
            "a swap of neighbours or a rotation of five things; which of 120 orders they are in",
            5,
            120,
            (0, 1, 2, 3, 4),
            _permuting(_S5),
        ),
    )
}


def batch_of(
    task: Task, rows: int, length: int, generator: torch.Generator, training: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random sequences of a task.

    Returns:
        Input ids and the answers' ids after each token, both [rows, length]; -100 where a training sequence is not
        asked.
    """
    symbols = torch.randint(task.symbols, (rows, length), generator=generator)
    answers = torch.tensor([task.answer(row) for row in symbols.tolist()]) + ANSWERS
    if training and task.once:
        asked = torch.randint(length, (rows, 1), generator=generator)
        answers = torch.where(torch.arange(length) == asked, answers, -100)
    return symbols, answers


def pretraining_batch(rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """A made-up language: 64 words of 2 to 5 tokens, few of them frequent; every second row repeats a phrase.

    None of the tasks is in it, and no state is needed. It gives the base what a pretrained model has: statistics of
    its tokens, heads that look back, and all positions.

    Returns:
        Ids [rows, length].
    """
    language = torch.Generator().manual_seed(0)  # of the words, the same for every batch
    words = [torch.randint(VOCABULARY, (2 + word % 4,), generator=language) for word in range(_WORDS)]
    frequency = 1 / torch.arange(1.0, _WORDS + 1)
    found = []
    for row in range(rows):
        chosen = torch.multinomial(frequency, length // 2 + 1, replacement=True, generator=generator)
        text = torch.cat([words[word] for word in chosen.tolist()])
        if row % 2:
            phrase = text[: 8 + torch.randint(25, (1,), generator=generator).item()]
            text = phrase.repeat(length // len(phrase) + 1)
        found.append(text[:length])
    return torch.stack(found)
