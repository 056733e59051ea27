"""CaT without training: a reference from given answers, criteria from a reference, rewards, and data for SFT."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_ext.extras import require

from ..answers import answers_match, extract_answer
from .aggregators import Group, Reference, Tools, make_aggregator
from .anchor import Anchor, BackendAnchor, CallableAnchor, preserved
from .cat_config import CaTConfig
from .judges import CachedJudge, as_judge
from .rubrics import Rubric, propose_rubrics
from .scoring import Outcome, Scorer, answer_finder

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["make_sft_dataset", "propose_rubric", "score", "synthesize"]


def _config(options: Mapping[str, Any]) -> CaTConfig:
    names = {field.name for field in dataclasses.fields(CaTConfig)}
    unknown = sorted(set(options) - names)
    if unknown:
        raise ValueError(f"{unknown[0]} is no option of CaTConfig")
    # The trainer's part of the configuration is not used; it must only be valid on any machine.
    return CaTConfig(output_dir="unused", report_to=[], **{"bf16": False, "gradient_checkpointing": False, **options})


def _tools(
    model: Any,
    tokenizer: "PreTrainedTokenizerBase | None",
    config: CaTConfig,
    answer_extractor: Callable[[str], str | None] | None = None,
) -> Tools:
    if isinstance(model, (Anchor, BackendAnchor, CallableAnchor)) or model is None:
        anchor = model
    elif hasattr(model, "complete"):
        anchor = BackendAnchor(model)
    elif hasattr(model, "generate"):
        if tokenizer is None:
            raise ValueError("tokenizer is missing: a model needs its own")
        anchor = _Lent(model, tokenizer, batch_size=config.anchor_batch_size)
    elif callable(model):
        anchor = CallableAnchor(model)
    else:
        raise TypeError(f"model is a {type(model).__name__}; it must be a model, a chat back end or fn(messages)")
    answer_of = answer_finder(answer_extractor or extract_answer, config.strip_thinking)
    return Tools(
        config,
        answer_of,
        answers_match,
        anchor,
        default_max_new_tokens=config.max_completion_length,
        default_temperature=config.temperature,
    )


class _Lent(Anchor):
    """A caller's model: not frozen, and given back in the mode in which it came."""

    def __init__(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", **kwargs: Any) -> None:
        super().__init__(None, tokenizer, name=f"transformers:{model.name_or_path}", **kwargs)
        self.model = model

    @contextlib.contextmanager
    def active(self) -> "Iterator[PreTrainedModel]":
        """The model in evaluation mode."""
        with preserved(self.model), torch.no_grad():
            yield self.model.eval()


def synthesize(
    model: Any,
    tokenizer: "PreTrainedTokenizerBase | None",
    completions: Sequence[str],
    *,
    prompt: Any = "",
    aggregator: str | Callable[..., str] = "synthesis",
    seed: int = 0,
    answer_extractor: Callable[[str], str | None] | None = None,
    **options: Any,
) -> Reference:
    """Merge several answers to one task into one.

    Args:
        model: A model, a chat back end of `hf_ext.chat`, or `fn(messages) -> str`.
        tokenizer: Of the model; None for the others.
        completions: The answers.
        prompt: The task, for rules and options that show it; the default hides it.
        aggregator: A name of `CaTConfig.aggregator`, or `fn(prompt, completions) -> str`.
        seed: Of order and sampling.
        answer_extractor: In place of `hf_ext.trainers.answers.extract_answer`.
        **options: Fields of `CaTConfig`, for example `anchor_temperature=0.0` or `max_completion_length=512`.

    Returns:
        The reference: `text`, `answer` (or None), and `meta` with what went wrong.

    Raises:
        ValueError: No completions, an unknown option, or answers that do not fit into the model's context.
    """
    if not completions:
        raise ValueError("completions is empty: there is nothing to merge")
    tools = _tools(model, tokenizer, _config(options), answer_extractor)
    rule = make_aggregator(aggregator, tools)
    if rule.needs_anchor and tools.anchor is None:
        raise ValueError(f"aggregator {rule.name} needs a model")
    rule.check(len(completions))
    texts = list(completions)
    return rule([Group(prompt, texts, [tools.answer_of(text) for text in texts], seed=seed)])[0]


def propose_rubric(
    model: Any, tokenizer: "PreTrainedTokenizerBase | None", reference: str, *, seed: int = 0, **options: Any
) -> list[str]:
    """Criteria that a good answer to the reference's task must meet, written by a model.

    Args:
        model, tokenizer, seed, **options: See `synthesize`.
        reference: The answer that they are true of.

    Raises:
        ValueError: The reference is empty.
        RuntimeError: No attempt gave `min_rubrics` criteria.
    """
    if not reference.strip():
        raise ValueError("reference is empty: there is nothing to write criteria from")
    rubric = propose_rubrics(_tools(model, tokenizer, _config(options)), [reference], [seed])[0]
    if rubric.error:
        raise RuntimeError(f"no usable rubric after {rubric.attempts} attempt(s): {rubric.error}")
    return rubric.criteria


def score(
    completions: Sequence[str],
    *,
    reference: str | None = None,
    criteria: Sequence[str] | None = None,
    judge: Any = None,
    prompt: str | None = None,
    answer_extractor: Callable[[str], str | None] | None = None,
    **options: Any,
) -> Outcome:
    """Reward answers as in training: by the reference's final answer, or by given criteria and a judge.

    Args:
        completions: The answers.
        reference: For `match` and for a grade (`reward="judge_score"`).
        criteria: For a rubric; the reference is not needed then.
        judge: See `CaTTrainer`, without `"anchor"`.
        prompt: The task, shown with `judge_include_prompt=True`.
        answer_extractor, **options: See `synthesize`.

    Returns:
        An `Outcome`: `rewards`, `verdicts`, and what went wrong.

    Raises:
        ValueError: Neither reference nor criteria, or a judge is missing.
    """
    if reference is None and not criteria:
        raise ValueError("give a reference to compare with, or criteria for a judge")
    kind = "rubric" if criteria else options.get("reward", "match")
    if kind != "match" and judge is None:
        raise ValueError(f"{kind} needs a judge: TransformersJudge(...), EndpointJudge(...) or CallableJudge(...)")
    config = _config({**options, "reward": kind})
    tools = _tools(None, None, config, answer_extractor)
    text = reference if reference is not None else "\n".join(criteria)
    cached = None
    if judge is not None:
        cached = CachedJudge(as_judge(judge), size=config.judge_cache_size, on_error=config.on_judge_error)
    scorer = Scorer(tools, lambda groups: [Reference(text, tools.answer_of(text)) for _ in groups], cached)
    texts = list(completions)
    group = Group(prompt or "", texts, [tools.answer_of(answer) for answer in texts])
    return scorer([group], {0: Rubric(list(criteria))} if criteria else {})[0]


def make_sft_dataset(
    rows: Iterable[Mapping[str, Any]],
    model: Any,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    aggregator: str | Callable[..., str] = "synthesis",
    **options: Any,
) -> "Dataset":
    """Prompts with pseudo-references as completions: the data of the paper's CaT-SFT peer.

    Args:
        rows: Each with `prompt` (text or messages) and `completions`, a list of texts.
        model, tokenizer, aggregator, **options: See `synthesize`.

    Returns:
        A dataset with `prompt` and `completion` in the form of the prompts; rows without a reference are left out.

    Raises:
        ValueError: No row has a reference.
    """
    datasets = require("datasets", extra="trainers")
    found = []
    for seed, row in enumerate(rows):
        reference = synthesize(
            model,
            tokenizer,
            row["completions"],
            prompt=row["prompt"],
            aggregator=aggregator,
            seed=seed,
            **options,
        )
        if reference.text.strip():
            chat = not isinstance(row["prompt"], str)
            completion = [{"role": "assistant", "content": reference.text}] if chat else reference.text
            found.append({"prompt": row["prompt"], "completion": completion})
    if not found:
        raise ValueError("no row has a reference: see the field meta of what synthesize returns for one")
    return datasets.Dataset.from_list(found)
