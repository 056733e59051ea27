"""Sums of two numbers by a small model that errs: the task of the CaT benchmark, and the model's training.

The model works a sum out digit by digit and ends with `#### answer`. It is trained on such workings with errors in
them, so its samples have the same: slips that differ from sample to sample, and carries that are left out in most
samples of the same sums (a vote does not repair those). It is also trained to merge eight workings of a sum that it
is not shown, with CaT's own prompt and mostly right targets: what an instruction-tuned model brings along.
"""

import dataclasses
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_ext.benchmarks.language_model import cache_folder
from hf_ext.extras import require
from hf_ext.runlog import write_json
from hf_ext.trainers.answers import answers_match, extract_answer

require("trl", extra="trainers")

from hf_ext.trainers.cat import prompts  # noqa: E402

__all__ = [
    "NOISES",
    "Noise",
    "Recipe",
    "base_model",
    "chat_tokenizer",
    "is_right",
    "problems",
    "question",
    "solution",
    "synthesis_prompt",
    "train_base",
    "train_llama",
    "working",
]

CHAT_TEMPLATE = (
    "{%- if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{%- for message in messages %}<|{{ message['role'] }}|>{{ message['content'] or '' }}"
    "{%- for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
ATTEMPTS = 8
Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Noise:
    """How often a working errs.

    Attributes:
        forget_even: A carry is left out, where the last digit of the first number is even: the systematic part.
        forget_odd: The same where it is odd.
        slip: One of the two digit sums is off by 1 to 4: the spread part.
    """

    forget_even: float
    forget_odd: float
    slip: float


NOISES = {"systematic": Noise(0.8, 0.2, 0.16), "spread": Noise(0.0, 0.0, 0.42)}
CLEAN = Noise(0.0, 0.0, 0.0)


def question(pair: Pair) -> str:
    """The prompt of a sum."""
    return f"{pair[0]}+{pair[1]}"


def solution(pair: Pair) -> str:
    """The right answer of a sum."""
    return str(sum(pair))


def is_right(text: str | None, pair: Pair) -> bool:
    """Whether a working ends with the right answer."""
    return text is not None and answers_match(extract_answer(text), solution(pair))


def working(pair: Pair, noise: Noise = CLEAN, rng: random.Random | None = None) -> str:
    """A sum worked out: units, tens with the carry, answer.

    Args:
        pair: Two numbers from 10 to 99.
        noise: The errors; by default there are none.
        rng: Draws them.
    """
    (tens_a, units_a), (tens_b, units_b) = (divmod(number, 10) for number in pair)
    slip = rng.choice(("units", "tens")) if rng and rng.random() < noise.slip else None

    def off(value: int) -> int:
        return max(0, value + rng.choice((-1, 1)) * rng.randint(1, 4))

    units = units_a + units_b
    if slip == "units":
        units = off(units)
    carry = units >= 10
    forget = noise.forget_odd if units_a % 2 else noise.forget_even
    if carry and rng and rng.random() < forget:
        carry = False
    tens = tens_a + tens_b + carry
    if slip == "tens":
        tens = off(tens)
    steps = f"{units_a}+{units_b}={units}\n{tens_a}+{tens_b}{'+1' if carry else ''}={tens}"
    return f"{steps}\n#### {10 * tens + units % 10}"


def problems(count: int, seed: int, held_out: bool) -> list[Pair]:
    """Different sums; no held-out one is ever among the others."""
    rng = random.Random(seed)
    found: dict[Pair, None] = {}
    while len(found) < count:
        pair = (rng.randint(10, 99), rng.randint(10, 99))
        if (hashlib.sha256(question(pair).encode()).digest()[0] < 32) == held_out:  # an eighth of all
            found[pair] = None
    return list(found)


def synthesis_prompt(texts: list[str]) -> str:
    """What CaT's anchor is shown by default."""
    return prompts.SYNTHESIS.format(n=len(texts), attempts=prompts.number_attempts(texts))


def chat_tokenizer(texts: list[str], vocabulary: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE of these texts with a chat template; digits are tokens of their own, phrases may be one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


# --- the base model ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained and how.

    Attributes:
        noise: Name in `NOISES`.
        hidden, layers, heads: Of the Llama; its inner width is three times `hidden`.
        steps: Optimiser steps.
        batch: Workings a step; an eighth as many syntheses.
        right: Share of syntheses whose target is right; of the others it is one of the attempts.
        learning_rate: Peak of Muon, for matrices inside the layers; AdamW takes the rest at a fifth.
        seed: For weights and examples.
    """

    noise: str = "systematic"
    hidden: int = 96
    layers: int = 3
    heads: int = 4
    steps: int = 900
    batch: int = 64
    right: float = 0.92
    learning_rate: float = 0.02
    seed: int = 0


def _examples(recipe: Recipe) -> Iterator[tuple[list[tuple[str, str]], list[tuple[str, str]]]]:
    """Batches of (prompt, reply) pairs: workings, and syntheses."""
    rng = random.Random(recipe.seed)
    noise = NOISES[recipe.noise]
    pairs = problems(6000, seed=0, held_out=False)
    while True:
        workings = [(question(pair), working(pair, noise, rng)) for pair in rng.choices(pairs, k=recipe.batch)]
        syntheses = []
        for pair in rng.choices(pairs, k=recipe.batch // 8):
            # From all right to worse than the model is: the anchor will see what a policy in training writes.
            scale = rng.uniform(0, 1.2)
            level = Noise(*(min(1.0, rate * scale) for rate in dataclasses.astuple(noise)))
            attempts = [working(pair, level, rng) for _ in range(ATTEMPTS)]
            target = working(pair) if rng.random() < recipe.right else rng.choice(attempts)
            syntheses.append((synthesis_prompt(attempts), target))
        yield workings, syntheses


def _loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[tuple[str, str]]
) -> torch.Tensor:
    """Mean negative log-likelihood of the replies' tokens."""
    start, end = f"<|user|>{{}}{tokenizer.eos_token}<|assistant|>", tokenizer.eos_token
    ids, labels = [], []
    for prompt, reply in examples:
        before, after = tokenizer(start.format(prompt))["input_ids"], tokenizer(reply + end)["input_ids"]
        ids.append(before + after)
        labels.append([-100] * len(before) + after)
    width = max(map(len, ids))
    pad = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids])
    target = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
    # Causal attention: what is padded on the right is seen by nothing that counts.
    hidden = model.model(input_ids=pad).last_hidden_state[:, :-1]
    chosen = target[:, 1:] != -100
    return F.cross_entropy(model.lm_head(hidden[chosen]), target[:, 1:][chosen])


def train_llama(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    batches: Iterable[Sequence[Sequence[tuple[str, str]]]],
    *,
    hidden: int,
    layers: int,
    heads: int,
    steps: int,
    learning_rate: float,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> None:
    """Train a small Llama to reply to prompts, and write it with its tokenizer.

    Args:
        folder: Where to.
        tokenizer: With the chat template of `chat_tokenizer`.
        batches: For each step, lists of (prompt, reply); the loss is the sum of the lists' means, on the replies.
        hidden, layers, heads: Size; the inner width is three times `hidden`.
        steps: Optimiser steps.
        learning_rate: Peak of Muon, for matrices inside the layers; AdamW takes the rest at a fifth.
        seed: For the weights.
        say: Gets a line of progress now and then.
    """
    begun = time.time()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=hidden,
                intermediate_size=3 * hidden,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                max_position_embeddings=1024,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                tie_word_embeddings=True,
            )
        )
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    optimisers = [
        torch.optim.Muon(inner, lr=learning_rate, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=learning_rate / 5, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimiser, optimiser.defaults["lr"], total_steps=steps, pct_start=0.05, cycle_momentum=False
        )
        for optimiser in optimisers
    ]
    for step, lists in zip(range(steps), batches):
        losses = [_loss(model, tokenizer, examples) for examples in lists]
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules):
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            schedule.step()
        if step % 100 == 0 or step == steps - 1:
            shown = ", ".join(f"{loss.item():.3f}" for loss in losses)
            say(f"step {step}: loss {shown}, {time.time() - begun:.0f} s")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_base(folder: Path, recipe: Recipe, say: Callable[[str], None] = print) -> Path:
    """Train the model and write it with its tokenizer; the folder appears when it is whole.

    Args:
        folder: Where to; kept as it is if it is there.
        recipe: What to train.
        say: Gets a line of progress now and then: the losses of workings and of syntheses.
    """
    if folder.exists():
        return folder
    corpus = [getattr(prompts, name) for name in ("SYNTHESIS", "RUBRIC", "JUDGE", "SCORE", "BEST_OF_N")] * 20
    corpus += [working(pair) for pair in problems(50, 0, False)] * 4
    corpus += [synthesis_prompt([working(pair) for pair in problems(8, i, False)]) for i in range(40)]
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    train_llama(
        partial,
        chat_tokenizer(corpus),
        _examples(recipe),
        hidden=recipe.hidden,
        layers=recipe.layers,
        heads=recipe.heads,
        steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        seed=recipe.seed,
        say=say,
    )
    write_json(partial / "recipe.json", dataclasses.asdict(recipe))
    os.replace(partial, folder)
    return folder


def base_model(recipe: Recipe, say: Callable[[str], None] = print) -> Path:
    """The folder of a trained base model in the cache; its name carries a hash of the recipe and of CaT's prompt."""
    fields = json.dumps([dataclasses.asdict(recipe), dataclasses.astuple(NOISES[recipe.noise]), prompts.SYNTHESIS])
    name = f"cat-sums-{recipe.noise}-{hashlib.sha256(fields.encode()).hexdigest()[:10]}"
    return train_base(cache_folder() / name, recipe, say)
