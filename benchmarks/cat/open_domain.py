"""A world of statements: what the reference must know for rubrics to teach, in numpy and without any model.

An answer to a prompt is a set of statements out of ten true and ten false ones, and the policy states each with a
probability of its own. Rollouts are merged into a reference, up to ten statements of the reference are the criteria,
and a judge who errs one time in twenty checks them. Then GRPO: groups of eight, advantages over the standard
deviation, a step along the gradient of the log-likelihood.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

__all__ = ["REFERENCES", "Outcome", "World", "simulate"]

TRUE = FALSE = 10  # statements of a prompt; the true ones come first
IS_TRUE = np.arange(TRUE + FALSE) < TRUE


@dataclasses.dataclass(frozen=True)
class World:
    """The constants of the simulation.

    Attributes:
        prompts, group, steps: Of the training.
        recall, false_rate: How often the policy states a true and a false statement in the beginning.
        criteria: Most that are taken from a reference.
        judge_error: Probability that a verdict is turned round.
        votes: Rollouts that must state what a merged reference states.
        plausible_true, plausible_false: Share of true and of false statements that the frozen anchor believes.
        score_noise: Standard deviation of the grade's noise, of 1.
        learning_rate: On the logits.
    """

    prompts: int = 8
    group: int = 8
    steps: int = 300
    recall: float = 0.49
    false_rate: float = 0.16
    criteria: int = 10
    judge_error: float = 0.05
    votes: int = 3
    plausible_true: float = 0.9
    plausible_false: float = 0.2
    score_noise: float = 0.15
    learning_rate: float = 0.4


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Means over prompts after training.

    Attributes:
        recall: Probability of stating a true statement.
        false_rate: Probability of stating a false one.
    """

    recall: float
    false_rate: float

    @property
    def precision(self) -> float:
        """Share of what is stated that is true."""
        return self.recall * TRUE / (self.recall * TRUE + self.false_rate * FALSE)


def _counted(rollouts: np.ndarray, believed: np.ndarray, world: World) -> np.ndarray:
    return rollouts.sum(1) >= world.votes


def _frozen(rollouts: np.ndarray, believed: np.ndarray, world: World) -> np.ndarray:
    return _counted(rollouts, believed, world) & believed


def _gold(rollouts: np.ndarray, believed: np.ndarray, world: World) -> np.ndarray:
    return np.broadcast_to(IS_TRUE, believed.shape)


def _first(rollouts: np.ndarray, believed: np.ndarray, world: World) -> np.ndarray:
    return rollouts[:, 0]


def _largest(rollouts: np.ndarray, believed: np.ndarray, world: World) -> np.ndarray:
    return rollouts[np.arange(len(rollouts)), rollouts.sum(2).argmax(1)]


# Name -> (rollouts [P, G, S], what the frozen anchor believes [P, S], world) -> reference [P, S], all bool.
REFERENCES: dict[str, Callable[[np.ndarray, np.ndarray, World], np.ndarray]] = {
    "gold statements": _gold,
    "synthesis, frozen anchor": _frozen,
    "whole-answer score": _frozen,
    "synthesis by counting": _counted,
    "first rollout": _first,
    "longest rollout": _largest,
}


def simulate(reference: str, seed: int, world: World = World()) -> Outcome:
    """Train the policy against a kind of reference.

    Args:
        reference: A name in `REFERENCES`. `whole-answer score` grades against the frozen anchor's reference instead of
            checking criteria: half the grade is the share of it that is stated, half is length, plus noise.
        seed: Of everything random.
        world: The constants.
    """
    rng = np.random.default_rng(seed)
    shape = (world.prompts, TRUE + FALSE)
    start = np.where(IS_TRUE, world.recall, world.false_rate)
    logits = np.broadcast_to(np.log(start / (1 - start)), shape).copy()
    believed = rng.random(shape) < np.where(IS_TRUE, world.plausible_true, world.plausible_false)
    for _ in range(world.steps):
        p = 1 / (1 + np.exp(-logits))
        rollouts = rng.random((world.prompts, world.group, TRUE + FALSE)) < p[:, None]
        merged = REFERENCES[reference](rollouts, believed, world)
        if reference == "whole-answer score":
            met = (rollouts & merged[:, None]).sum(2) / np.maximum(merged.sum(1), 1)[:, None]
            reward = (met + rollouts.mean(2)) / 2 + rng.normal(0, world.score_noise, rollouts.shape[:2])
        else:
            # The first so many of the reference's statements in random order.
            order = np.where(merged, rng.random(shape), 2).argsort(1).argsort(1)
            criteria = merged & (order < world.criteria)
            verdicts = rollouts ^ (rng.random(rollouts.shape) < world.judge_error)
            reward = (verdicts & criteria[:, None]).sum(2) / np.maximum(criteria.sum(1), 1)[:, None]
        advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, ddof=1, keepdims=True) + 1e-4)
        logits += world.learning_rate * (advantage[:, :, None] * (rollouts - p[:, None])).mean(1)
    p = 1 / (1 + np.exp(-logits))
    return Outcome(p[:, IS_TRUE].mean().item(), p[:, ~IS_TRUE].mean().item())
