"""`CaTTrainer`: GRPO whose reward comes from the rollouts themselves."""

import os
import random
import textwrap
from collections.abc import Callable
from typing import Any

from hf_ext.extras import require

require("trl", extra="trainers")

import torch  # noqa: E402
from accelerate.utils import gather_object, is_peft_model  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOTrainer  # noqa: E402
from trl.trainer.utils import get_config_model_id  # noqa: E402

from ..answers import answers_match, extract_answer  # noqa: E402
from .aggregators import AGGREGATORS, Group, Tools, make_aggregator  # noqa: E402
from .anchor import resolve_anchor  # noqa: E402
from .audit import AuditLog  # noqa: E402
from .cat_config import CaTConfig  # noqa: E402
from .judges import CachedJudge, as_judge  # noqa: E402
from .prompts import completion_text  # noqa: E402
from .rewards import answer_classes, discrimination, fill_unscorable  # noqa: E402
from .scoring import EMPTY_ROLLOUT, Outcome, Scorer, answer_finder  # noqa: E402

__all__ = ["CaTTrainer"]


class CaTTrainer(GRPOTrainer):
    """
    Trainer for Compute as Teacher (CaT): GRPO without labels.

    The rollouts of a prompt are merged into one pseudo-reference by an anchor (the initial policy, frozen), and each
    rollout is rewarded by the reference's final answer or by criteria that the anchor writes from it. Loss, generation
    and everything else are [`~trl.GRPOTrainer`]'s.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The policy; the anchor is what it is now.
        reward_funcs (`RewardFunc | list[RewardFunc]`, *optional*):
            Further rewards beside CaT's, as in [`~trl.GRPOTrainer`].
        args ([`CaTConfig`], *optional*):
            Configuration.
        train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks, optimizers,
        quantization_config, peft_config, tools, rollout_func, environment_factory:
            As in [`~trl.GRPOTrainer`]. Of the dataset only `prompt` is needed; `domain` chooses the reward with
            `reward="auto"`, and a `solution` is logged against, never rewarded.
        aggregator (`Callable`, *optional*):
            `fn(prompt, completions, **row) -> str` in place of `args.aggregator`.
        judge (*optional*):
            Who answers the criteria: a [`TransformersJudge`], an [`EndpointJudge`], a [`CallableJudge`], anything else
            with `name` and `judge(items)`, a path of a model, a function of a list of [`JudgeItem`], or `"anchor"`.
        anchor (*optional*):
            Another anchor: a model, its path, a chat back end of `hf_ext.chat`, `fn(messages) -> str`, or `"policy"`
            for the policy as it moves. It generates with transformers in this process, whatever makes the rollouts;
            with an adapter and `use_vllm=True` one must be given.
        answer_extractor (`Callable`, *optional*):
            `fn(text) -> str | None` in place of `hf_ext.trainers.answers.extract_answer`.
    """

    _tag_names = ["trl", "cat"]
    _name = "CaT"
    _paper = {
        "title": "Compute as Teacher: Turning Inference Compute Into Reference-Free Supervision",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @inproceedings{compute_as_teacher_2026,
                title        = {{Compute as Teacher: Turning Inference Compute Into Reference-Free Supervision}},
                booktitle    = {International Conference on Machine Learning},
                year         = 2026,
            }"""),
    }

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: CaTConfig | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
        *,
        aggregator: Callable[..., str] | None = None,
        judge: Any = None,
        anchor: Any = None,
        answer_extractor: Callable[[str], str | None] | None = None,
    ):
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = CaTConfig(f"{model_name.split('/')[-1]}-CaT")
        if not isinstance(args, CaTConfig):
            raise TypeError(f"args is a {type(args).__name__}; CaTTrainer takes a CaTConfig")
        own = _as_list(reward_funcs)
        self._check(args, own, aggregator, judge, anchor, environment_factory)
        if args.use_vllm and anchor is None and _wants_anchor(args, aggregator, judge):
            if peft_config is not None or is_peft_model(model):
                # Not bit for bit what they were, so that the policy without its adapter drifts from step to step.
                raise ValueError(
                    "use_vllm=True merges the adapter into the base weights and takes it out again at every step, so "
                    "the base is no frozen anchor; pass anchor= (an endpoint, a second model, its path), or set "
                    "use_vllm=False"
                )
        weights = args.reward_weights
        if weights is not None and len(weights) != len(own):
            raise ValueError(
                f"reward_weights has {len(weights)} numbers for {len(own)} reward function(s); CaT's own weight is "
                "reward_weight"
            )
        processors = reward_processing_classes
        if processors is not None:
            processors = [*_as_list(processors), None]
        passed_instance = not isinstance(model, str)

        self._cat_reward = _CaTReward(self)
        try:
            # The host compares their number with its functions, among which CaT's is.
            args.reward_weights = None if weights is None else [*weights, args.reward_weight]
            super().__init__(
                model=model,
                reward_funcs=[*own, self._cat_reward],
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=processors,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        finally:
            args.reward_weights = weights
        self.reward_weights[len(own)] = args.reward_weight

        # From here the host's random state is that of its first step: nothing may move it.
        with self._own_randomness():
            self._scorer = self._make_scorer(aggregator, judge, anchor, answer_extractor, passed_instance)
        self._audit = AuditLog(args.output_dir, args.audit if self.accelerator.is_main_process else "off")
        self._next_group: dict[tuple[str, int], int] = {}
        self.add_callback(_AuditCallback(self))

    # -- setting up ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _check(args, own, aggregator, judge, anchor, environment_factory) -> None:
        """Refuse what cannot work before a model is loaded."""
        if args.reward_weight == 0 and not own and environment_factory is None:
            raise ValueError("reward_weight is 0 and there are no reward_funcs: nothing would be rewarded")
        if aggregator is not None and not callable(aggregator):
            raise TypeError(
                f"aggregator is {aggregator!r}; here it is fn(prompt, completions, **row) -> str, a name goes to "
                "CaTConfig(aggregator=...)"
            )
        if judge is None and args.reward != "match" and args.reward_weight != 0:
            raise ValueError(
                f"reward={args.reward!r} needs a judge: pass judge=TransformersJudge(...), EndpointJudge(...), "
                'CallableJudge(...) or "anchor"; or set reward="match" where answers can be compared'
            )
        if args.sync_ref_model and anchor is None and _wants_anchor(args, aggregator, judge):
            raise ValueError(
                "sync_ref_model=True moves the reference model, so it cannot be the frozen anchor; pass anchor= (a "
                'model, a path, an endpoint, or "policy" for one that moves), or set sync_ref_model=False'
            )

    def _make_scorer(self, aggregator, judge, anchor, answer_extractor, passed_instance: bool) -> Scorer | None:
        args = self.args
        if args.reward_weight == 0:
            return None
        tools = Tools(
            args,
            answer_finder(answer_extractor or extract_answer, args.strip_thinking),
            answers_match,
            default_max_new_tokens=self.max_completion_length,
            default_temperature=self.temperature,
        )
        rule = make_aggregator(aggregator or args.aggregator, tools)
        if anchor is not None or _wants_anchor(args, aggregator, judge):
            loading = dict(args.model_init_kwargs or {})
            loading.setdefault("trust_remote_code", args.trust_remote_code)
            loading.setdefault("dtype", self.model.dtype)
            tools.anchor = resolve_anchor(self, anchor, passed_instance=passed_instance, loading=loading)
        rule.check(self.num_generations)
        if judge is not None:
            judge = as_judge(judge, tools.anchor, self.accelerator.device)
            if "judge_score" in (args.reward, args.on_rubric_failure) and not hasattr(judge, "grade"):
                raise ValueError(f"judge_score needs a judge with grade(items); {judge.name} has none")
            judge = CachedJudge(judge, size=args.judge_cache_size, on_error=args.on_judge_error)
        return Scorer(tools, rule, judge)

    def _own_randomness(self):
        """A context in which torch's random state may be used and is put back."""
        device = self.accelerator.device
        return torch.random.fork_rng([device.index or 0] if device.type == "cuda" else [])

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """The host's card, and who gave the rewards."""
        super().create_model_card(model_name=model_name, dataset_name=dataset_name, tags=tags)
        if self._scorer is None or not self.is_world_process_zero():
            return
        anchor, judge = self._scorer.tools.anchor, self._scorer.judge
        rows = {
            "aggregator": self._scorer.aggregator.name,
            "anchor": anchor.name if anchor is not None else "none",
            "reward": self.args.reward,
            "judge": judge.name if judge is not None else "none",
            "rollouts a prompt": self.num_generations,
            "templates": ", ".join(f"{name} {value}" for name, value in self.args.template_hashes.items()),
        }
        table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        with open(os.path.join(self.args.output_dir, "README.md"), "a", encoding="utf-8") as file:
            file.write(f"\n## How it was rewarded\n\n| | |\n|---|---|\n{table}\n")

    # -- the reward ---------------------------------------------------------------------------------------------------

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._scorer is None or rewards.shape[1] == 1:
            return rewards
        # The host counts a missing reward as 0 where another is there; that would punish an outage.
        return fill_unscorable(rewards, self.reward_funcs.index(self._cat_reward), self._group_size())

    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    @torch.no_grad()
    def _score(
        self, prompts: list, completions: list, columns: dict[str, list], log_extra: Callable, log_metric: Callable
    ) -> list[float | None]:
        """CaT's reward of the local rollouts."""
        if self._scorer is None:
            return [None] * len(prompts)
        mode = "train" if self.model.training else "eval"
        step = self.state.global_step + (mode == "train")
        groups = self._groups(prompts, completions, columns, mode, step)
        outcomes = self._work(groups)
        first = self._next_group.get((mode, step), 0)
        self._next_group[mode, step] = first + len(groups)
        self._audit.write(mode, step, first, groups, outcomes, self._about())
        for name, value in metrics(groups, outcomes, self._scorer.tools).items():
            log_metric(name, value)
        start, size = self.accelerator.process_index * len(prompts), self._group_size()
        here = [divmod(i, size) for i in range(start, start + len(prompts))]
        log_extra("reference", [outcomes[g].reference.text for g, _ in here])
        rewards = [outcomes[g].rewards[i] for g, i in here]
        if any(outcome.kind in ("rubric", "judge_score") for outcome in outcomes):
            log_extra("rubric_score", rewards)
        return rewards

    def _groups(self, prompts: list, completions: list, columns: dict[str, list], mode: str, step: int) -> list[Group]:
        """All groups of all processes: runs of rollouts in global order, the same on every process."""
        size = self._group_size()
        start = self.accelerator.process_index * len(prompts)
        rows = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions)):
            leads = (start + i) % size == 0
            row = {name: values[i] for name, values in columns.items()} if leads else None
            rows.append((completion_text(completion), prompt if leads else None, row))
        rows = gather_object(rows)
        if len(rows) % size:
            raise ValueError(
                f"a batch of {len(rows)} rollouts holds no whole groups of {size}: make the global batch size a "
                "multiple of num_generations"
            )
        first = self._next_group.get((mode, step), 0)
        answer_of = self._scorer.tools.answer_of
        groups = []
        for number, at in enumerate(range(0, len(rows), size), start=first):
            texts = [text for text, _, _ in rows[at : at + size]]
            _, prompt, row = rows[at]
            # Of step and position, so that a group is scored alike on any number of processes and after a resume.
            seed = random.Random(f"{self.args.seed}/{mode}/{step}/{number}").getrandbits(62)
            groups.append(Group(prompt, texts, [answer_of(text) for text in texts], row, seed))
        return groups

    def _work(self, groups: list[Group]) -> list[Outcome]:
        """Score the groups, each on one process, and share what was found. An error on one process stops all."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        error = None
        found: list = []
        try:
            with self._own_randomness():
                found = self._scorer(groups[rank::world])
        except Exception as caught:
            error = caught
        if world == 1:
            if error is not None:
                raise error
            return found
        errors = [text for text in gather_object([None if error is None else repr(error)]) if text]
        if errors:
            raise error if error is not None else RuntimeError(f"another process failed: {errors[0]}")
        shared = gather_object([(rank + i * world, outcome) for i, outcome in enumerate(found)])
        return [outcome for _, outcome in sorted(shared, key=lambda pair: pair[0])]

    def _about(self) -> dict[str, Any]:
        judge = self._scorer.judge
        return {
            "aggregator": self._scorer.aggregator.name,
            "judge": judge.name if judge is not None else None,
            "templates": self.args.template_hashes,
        }


class _CaTReward:
    """The reward function that the host calls. Its trainer does not travel with it in a pickle."""

    __name__ = "cat"

    def __init__(self, trainer: CaTTrainer) -> None:
        self.trainer = trainer

    def __getstate__(self) -> dict[str, Any]:
        return {"trainer": None}

    def __call__(self, prompts, completions, completion_ids=None, log_extra=None, log_metric=None, **columns):
        if self.trainer is None:
            raise RuntimeError("this reward was unpickled: it needs the groups of its trainer, which did not travel")
        left_out = ("trainer_state", "environments", "image", "images")
        columns = {name: values for name, values in columns.items() if name not in left_out}
        return self.trainer._score(prompts, completions, columns, log_extra, log_metric)


class _AuditCallback(TrainerCallback):
    """Makes the log that of this run when training begins: the step is that of the checkpoint only then."""

    def __init__(self, trainer: CaTTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._audit.begin(state.global_step)
        # A second `train()` of one trainer numbers, and so seeds, its groups as the first did.
        numbers = self.trainer._next_group
        for mode, step in [key for key in numbers if key[1] > state.global_step]:
            del numbers[mode, step]


def metrics(groups: list[Group], outcomes: list[Outcome], tools: Tools) -> dict[str, float]:
    """What is logged about a batch, as shares or means; without the entries that do not apply to it."""
    found: dict[str, list[float]] = {}

    def add(name: str, values) -> None:
        found.setdefault(f"cat/{name}", []).extend(map(float, values))

    for group, outcome in zip(groups, outcomes):
        reference = outcome.reference
        add("reward", (reward for reward in outcome.rewards if reward is not None))
        add("empty_rollout", (not text.strip() for text in group.completions))
        add("reference_fail", [outcome.kind == "none" or (outcome.kind == "match" and reference.answer is None)])
        if outcome.criteria or any(failure.startswith("rubric:") for failure in outcome.failures):
            add("rubric_fail", [not outcome.criteria])
        if outcome.criteria:
            add("n_rubrics", [len(outcome.criteria)])
            add("criterion_discrimination", discrimination(outcome.verdicts))
        values = outcome.verdicts if outcome.kind == "rubric" else [[grade] for grade in outcome.grades]
        if outcome.kind in ("rubric", "judge_score"):
            asked = [
                (value, error, cached)
                for row, errors, hits in zip(values, outcome.errors, outcome.cached)
                for value, error, cached in zip(row, errors, hits)
                if error != EMPTY_ROLLOUT
            ]
            add("judge_none", (value is None for value, _, _ in asked))
            add("judge_error", (error is not None for _, error, _ in asked))
            add("cache_hit", (cached for _, _, cached in asked))
        if reference.answer is not None:
            classes = answer_classes(group.answers, tools.match)
            add("novel_reference", [not any(tools.match(reference.answer, group.answers[c[0]]) for c in classes)])
            if classes:
                add("disagree_majority", [not tools.match(reference.answer, group.answers[classes[0][0]])])
        solution = group.row.get("solution")
        if isinstance(solution, str) and outcome.kind != "rubric":
            gold = tools.answer_of(solution) or solution
            add("reference_acc", [reference.answer is not None and tools.match(reference.answer, gold)])
            add("rollout_acc", (answer is not None and tools.match(answer, gold) for answer in group.answers))
    return {name: sum(values) / len(values) for name, values in found.items() if values}


def _wants_anchor(args: CaTConfig, aggregator: Any, judge: Any) -> bool:
    """Whether anything asks the anchor: the rule that makes references, who writes criteria, or the judge."""
    if args.reward_weight == 0:
        return False
    by_rule = aggregator is None and AGGREGATORS[args.aggregator].uses_anchor
    return by_rule or args.reward in ("auto", "rubric") or (isinstance(judge, str) and judge == "anchor")


def _as_list(value) -> list:
    return [] if value is None else list(value) if isinstance(value, list) else [value]
