"""Training on the sums, by each kind of reference, and what is measured on held-out ones."""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from hf_ext.benchmarks.cat.sums import ATTEMPTS, Pair, is_right, problems, question, solution, synthesis_prompt
from hf_ext.chat import ChatReply, generate_replies, render_conversation
from hf_ext.trainers.answers import answers_match, extract_answer
from hf_ext.trainers.cat import CaTConfig, CaTTrainer

__all__ = ["LABELS", "LONGER", "METHODS", "VOTE", "Budget", "accuracy", "aggregate", "load", "train"]

# Name -> what the references come from.
METHODS = {
    "GRPO, true labels": "labels",
    "CaT, synthesis": "synthesis",
    "CaT, scripted anchor": "scripted",
    "TTRL, majority vote": "majority",
    "CaT, twice the steps": "synthesis",
}
LABELS = "GRPO, true labels"
VOTE = "TTRL, majority vote"
LONGER = "CaT, twice the steps"
SCRIPTED_RIGHT = 0.85
MAX_TOKENS = 28  # the longest working has 23
CHANGING = 10  # steps at either end over which logged figures are averaged


class Budget(NamedTuple):
    """How long is trained and how much is measured.

    Attributes:
        steps: Optimiser steps.
        prompts: Groups of eight a step.
        learning_rate: Of AdamW, falling linearly to 0.
        every: Steps between measurements on the way.
        held_out: Sums that the final figure is measured on, with two samples each; on the way a quarter of them.
    """

    steps: int = 80
    prompts: int = 8
    learning_rate: float = 3e-4
    every: int = 20
    held_out: int = 400


def load(folder: Path | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A base model and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def _write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], temperature: float, seed: int
) -> list[ChatReply]:
    ids = [
        tokenizer(render_conversation(tokenizer, [{"role": "user", "content": text}]), add_special_tokens=False)
        for text in texts
    ]
    return generate_replies(
        model,
        tokenizer,
        [entry["input_ids"] for entry in ids],
        batch_size=200,
        max_new_tokens=MAX_TOKENS,
        temperature=temperature,
        seed=seed,
    )


def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], seed: int, samples: int = 2
) -> dict[str, float]:
    """Share of right single samples at temperature 1, its standard error over sums, and the tokens of one."""
    replies = _write(model, tokenizer, [question(pair) for pair in pairs for _ in range(samples)], 1.0, seed)
    right = torch.tensor([is_right(reply.text, pairs[i // samples]) for i, reply in enumerate(replies)]).float()
    of_sums = right.view(len(pairs), samples).mean(1)
    return {
        "accuracy": right.mean().item(),
        "standard_error": (of_sums.std() / len(pairs) ** 0.5).item(),
        **_tokens(replies, len(replies)),
    }


def _tokens(replies: Sequence[ChatReply], answers: int) -> dict[str, float]:
    return {
        "tokens_read": sum(reply.prompt_tokens for reply in replies) / answers,
        "tokens_written": sum(reply.completion_tokens for reply in replies) / answers,
    }


def aggregate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], seed: int
) -> dict[str, dict[str, float]]:
    """Inference-time aggregation of eight samples: by vote, and by the synthesis that CaT trains with.

    Returns:
        For each rule its accuracy and the tokens read and written for one answer. Of the synthesis also how often it
        is not the vote's answer, and right then; and how often it is right with no sample right.
    """
    samples = _write(model, tokenizer, [question(pair) for pair in pairs for _ in range(ATTEMPTS)], 1.0, seed)
    groups = [[reply.text for reply in samples[i : i + ATTEMPTS]] for i in range(0, len(samples), ATTEMPTS)]
    votes = [Counter(map(extract_answer, texts)).most_common(1)[0][0] for texts in groups]
    vote_right = torch.tensor([answers_match(vote, solution(pair)) for vote, pair in zip(votes, pairs)])
    merged = _write(model, tokenizer, [synthesis_prompt(texts) for texts in groups], 1.0, seed)
    right = torch.tensor([is_right(reply.text, pair) for reply, pair in zip(merged, pairs)])
    differs = torch.tensor([not answers_match(extract_answer(r.text), vote) for r, vote in zip(merged, votes)])
    any_right = torch.tensor([any(is_right(text, pair) for text in texts) for texts, pair in zip(groups, pairs)])
    error = (len(pairs)) ** -0.5
    return {
        "vote of 8": {
            "accuracy": vote_right.float().mean().item(),
            "standard_error": vote_right.float().std().item() * error,
            **_tokens(samples, len(pairs)),
        },
        "synthesis of 8": {
            "accuracy": right.float().mean().item(),
            "standard_error": right.float().std().item() * error,
            **_tokens([*samples, *merged], len(pairs)),
            "differs_from_vote": differs.float().mean().item(),
            "right_where_it_differs": right[differs].float().mean().item() if differs.any() else 0.0,
            "right_with_all_wrong": (right & ~any_right).float().mean().item(),
        },
    }


def _scripted(seed: int):
    """An aggregator that sees the label and is right with a fixed probability, whatever the rollouts are."""
    rng = random.Random(seed)

    def scripted(prompt: Any, completions: list[str], solution: str, **row: Any) -> str:
        off = 0 if rng.random() < SCRIPTED_RIGHT else rng.choice((-10, -2, -1, 1, 2, 10))
        return f"#### {int(solution) + off}"

    return scripted


def _label_reward(completions: list, solution: list[str], **kwargs: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [float(answers_match(extract_answer(text), right)) for text, right in zip(texts, solution)]


class _Measure(TrainerCallback):
    """Measures single samples on held-out sums on the way."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], every: int) -> None:
        self.tokenizer, self.pairs, self.every = tokenizer, pairs, every
        self.curve: list[tuple[int, float]] = []
        self.seconds = 0.0

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            begun = time.perf_counter()
            found = accuracy(model, self.tokenizer, self.pairs, seed=0)
            self.curve.append((state.global_step, found["accuracy"]))
            self.seconds += time.perf_counter() - begun


def train(folder: Path | str, method: str, seed: int, budget: Budget) -> dict[str, Any]:
    """Train a base model by a method and measure it.

    Args:
        folder: The base model.
        method: A name in `METHODS`.
        seed: Of sums, rollouts and the measurement.
        budget: How long.

    Returns:
        Accuracy of the trained policy, the curve, what was logged over the first and the last steps, and times.
    """
    model, tokenizer = load(folder)
    rows = [
        {"prompt": [{"role": "user", "content": question(pair)}], "solution": solution(pair)}
        for pair in problems(min(3000, budget.steps * budget.prompts), seed=100 + seed, held_out=False)
    ]
    held_out = problems(budget.held_out, seed=1, held_out=True)
    measure = _Measure(tokenizer, held_out[: budget.held_out // 4], budget.every)
    kind = METHODS[method]
    with tempfile.TemporaryDirectory() as out:
        fields = {
            "output_dir": out,
            "per_device_train_batch_size": budget.prompts * ATTEMPTS,
            "num_generations": ATTEMPTS,
            "max_completion_length": MAX_TOKENS,
            "max_steps": budget.steps,
            "learning_rate": budget.learning_rate,
            "beta": 0.04,
            "seed": seed,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
        }
        host = {"model": model, "train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
        if kind == "labels":
            trainer = GRPOTrainer(reward_funcs=_label_reward, args=GRPOConfig(**fields), callbacks=[measure], **host)
        else:
            fields |= {"reward": "match", "audit": "off", "anchor_batch_size": budget.prompts}
            fields |= {} if kind == "scripted" else {"aggregator": kind}
            aggregator = _scripted(seed) if kind == "scripted" else None
            trainer = CaTTrainer(args=CaTConfig(**fields), callbacks=[measure], aggregator=aggregator, **host)
        trainer.remove_callback(PrinterCallback)
        begun = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begun - measure.seconds
        logs = [entry for entry in trainer.state.log_history if "reward" in entry]
        policy = trainer.model.eval()
    final = accuracy(policy, tokenizer, held_out, seed=seed)
    return {
        **final,
        "curve": [*measure.curve, (budget.steps, final["accuracy"])],
        "first": _means(logs[:CHANGING]),
        "last": _means(logs[-CHANGING:]),
        "seconds": seconds,
        "seconds_a_step": seconds / budget.steps,
        "budget": budget._asdict(),
    }


def _means(logs: list[dict[str, float]]) -> dict[str, float]:
    names = {
        "reward": "reward",
        "completions/mean_length": "length",
        "entropy": "entropy",
        "kl": "kl",
        "cat/reference_acc": "reference_accuracy",
        "cat/rollout_acc": "rollout_accuracy",
        "cat/disagree_majority": "differs_from_vote",
        "cat/novel_reference": "in_no_rollout",
        "cat/reference_fail": "without_reference",
    }
    found = {}
    for name, short in names.items():
        # A step in which nothing could be scored has none, or one that is no number.
        values = [value for entry in logs if (value := entry.get(name)) is not None and value == value]
        if values:
            found[short] = sum(values) / len(values)
    return found
