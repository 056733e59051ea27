"""`CaTConfig`: what GRPO's configuration has, and how rollouts become a reference and a reference a reward."""

from dataclasses import dataclass, field

from hf_ext.extras import require

require("trl", extra="trainers")

from trl import GRPOConfig  # noqa: E402

from . import prompts  # noqa: E402

__all__ = ["AGGREGATOR_NAMES", "AUDITS", "REWARDS", "CaTConfig"]

AGGREGATOR_NAMES = ("synthesis", "majority", "min_ppl", "best_of_n", "first")
REWARDS = ("auto", "match", "rubric", "judge_score")
ANCHOR_SOURCES = ("auto", "instance", "path")
AUDITS = ("all", "sample", "off")
ON_RUBRIC_FAILURE = ("skip", "judge_score", "raise")
ON_JUDGE_ERROR = ("continue", "raise")


@dataclass
class CaTConfig(GRPOConfig):
    r"""
    Configuration of [`CaTTrainer`]: every parameter of [`~trl.GRPOConfig`], and these.

    Parameters:
        > The reference

        aggregator (`str`, *optional*, defaults to `"synthesis"`):
            How the rollouts of a group become one reference: `"synthesis"` (the anchor writes it; the paper),
            `"majority"` (the most frequent answer; with `reward="match"` this is TTRL), `"min_ppl"` (the rollout that
            the anchor finds most likely), `"best_of_n"` (the anchor names a rollout) or `"first"` (a control). A
            callable is passed to the trainer.
        include_prompt (`bool`, *optional*, defaults to `False`):
            Show the task to the anchor when it merges or chooses. The paper leaves it out, so that the anchor
            reconciles the rollouts rather than answers again.
        anchor_source (`str`, *optional*, defaults to `"auto"`):
            Where a frozen anchor of a model that is passed as an instance, without PEFT, comes from: `"instance"` (a
            copy of its weights), `"path"` (the checkpoint named in its config), or `"auto"` (the reference model that
            the host loads, if its weights are those of the instance, else a copy).
        anchor_temperature (`float`, *optional*):
            Of the synthesis. 0 is greedy: reproducible whatever the batch. `None`: the rollouts' temperature (paper).
        anchor_max_new_tokens (`int`, *optional*):
            Limit of a synthesis. `None`: `max_completion_length`.
        anchor_batch_size (`int`, *optional*, defaults to `8`):
            Prompts that the anchor reads together.
        rollout_token_budget (`int`, *optional*):
            Tokens of each rollout that the anchor sees; of a longer one 40% head and 60% tail. `None`: what the
            anchor's context leaves, over the number of rollouts.
        strip_thinking (`bool`, *optional*, defaults to `True`):
            Leave out `<think>` parts where answers are compared, criteria written and rollouts judged.

        > The reward

        reward (`str`, *optional*, defaults to `"auto"`):
            `"match"` (the rollout's answer is the reference's), `"rubric"` (share of criteria that it meets),
            `"judge_score"` (a judge's grade from 1 to 10; the paper's peer), or `"auto"`: by the row's column `domain`
            (`"verifiable"` or `"open"`), and without it `match` where the reference marks its answer by `\boxed` or
            `####`, else `rubric`.
        reward_weight (`float`, *optional*, defaults to `1.0`):
            Weight of this reward beside `reward_funcs`, whose own are in `reward_weights`. With 0 nothing is
            aggregated or judged, and the trainer is `GRPOTrainer`.
        min_rubrics (`int`, *optional*, defaults to `5`):
            Fewest criteria of a usable list (paper: at least 5).
        max_rubrics (`int`, *optional*, defaults to `10`):
            Most criteria that are used; it caps what the judge costs.
        rubric_retries (`int`, *optional*, defaults to `1`):
            Further attempts, sampled at temperature 1, when a list has too few criteria.
        rubric_max_new_tokens (`int`, *optional*, defaults to `512`):
            Limit of a list of criteria.
        on_rubric_failure (`str`, *optional*, defaults to `"skip"`):
            When no attempt gave enough criteria: `"skip"` (the group has no reward), `"judge_score"` or `"raise"`.
        judge_include_prompt (`bool`, *optional*, defaults to `False`):
            Show the task to the judge too.
        judge_cache_size (`int`, *optional*, defaults to `20000`):
            Verdicts that are remembered; 0 remembers none.
        on_judge_error (`str`, *optional*, defaults to `"continue"`):
            When a judge, an endpoint or a callable raises, times out or answers nonsense: `"continue"` (logged and
            counted; no verdict, which is never a 0) or `"raise"` (training stops). What no retry can mend, such as a
            refused API key, always stops it.

        > The log and the prompts

        audit (`str`, *optional*, defaults to `"all"`):
            What `cat_audit.jsonl` and `cat_groups.jsonl` in `output_dir` hold: `"all"`, `"sample"` (one group in ten)
            or `"off"`.
        synthesis_template, best_of_n_template, rubric_template, judge_template, score_template (`str`):
            `str.format` templates; the defaults are ours, the paper does not print its own. Their fields: `{n}`,
            `{attempts}` (first two), `{reference}`, `{n_min}`, `{n_max}` (rubric), `{completion}`, `{criterion}`
            (judge), `{reference}`, `{completion}` (score), and `{prompt}` exactly where the task is shown.

    Of the inherited parameters `beta` has another default: 0.04. The paper has a KL term to the initial policy without
    saying how strong; with it the host builds the reference model, which then serves as the anchor too.
    """

    beta: float = field(
        default=0.04,
        metadata={"help": "KL coefficient. Not 0, so that the host builds the reference model that is the anchor."},
    )

    aggregator: str = field(
        default="synthesis",
        metadata={"help": "How rollouts become one reference: synthesis, majority, min_ppl, best_of_n or first."},
    )
    include_prompt: bool = field(
        default=False, metadata={"help": "Show the task to the anchor when it merges or chooses rollouts."}
    )
    anchor_source: str = field(
        default="auto",
        metadata={"help": "Frozen anchor of a model passed as an instance: auto, instance (a copy) or path."},
    )
    anchor_temperature: float | None = field(
        default=None, metadata={"help": "Temperature of the synthesis; 0 is greedy; None is the rollouts'."}
    )
    anchor_max_new_tokens: int | None = field(
        default=None, metadata={"help": "Limit of a synthesis in tokens; None is max_completion_length."}
    )
    anchor_batch_size: int = field(default=8, metadata={"help": "Prompts that the anchor reads together."})
    rollout_token_budget: int | None = field(
        default=None,
        metadata={"help": "Tokens of each rollout that the anchor sees; None divides what its context leaves."},
    )
    strip_thinking: bool = field(
        default=True, metadata={"help": "Leave <think> parts out of answers, references and what is judged."}
    )

    reward: str = field(default="auto", metadata={"help": "match, rubric, judge_score, or auto by row and reference."})
    reward_weight: float = field(
        default=1.0, metadata={"help": "Weight of this reward beside reward_funcs; 0 makes the trainer plain GRPO."}
    )
    min_rubrics: int = field(default=5, metadata={"help": "Fewest criteria of a usable list."})
    max_rubrics: int = field(default=10, metadata={"help": "Most criteria that are used."})
    rubric_retries: int = field(
        default=1, metadata={"help": "Further attempts at temperature 1 when a list has too few criteria."}
    )
    rubric_max_new_tokens: int = field(default=512, metadata={"help": "Limit of a list of criteria in tokens."})
    on_rubric_failure: str = field(
        default="skip", metadata={"help": "When no attempt gave enough criteria: skip, judge_score or raise."}
    )
    judge_include_prompt: bool = field(default=False, metadata={"help": "Show the task to the judge too."})
    judge_cache_size: int = field(default=20_000, metadata={"help": "Verdicts that are remembered; 0 for none."})
    on_judge_error: str = field(
        default="continue",
        metadata={"help": "When a judge, endpoint or callable fails: continue (no verdict) or raise."},
    )

    audit: str = field(
        default="all", metadata={"help": "What cat_audit.jsonl holds: all, sample (one group in ten) or off."}
    )
    synthesis_template: str = field(default=prompts.SYNTHESIS, metadata={"help": "Prompt of the synthesis."})
    best_of_n_template: str = field(default=prompts.BEST_OF_N, metadata={"help": "Prompt of best_of_n."})
    rubric_template: str = field(default=prompts.RUBRIC, metadata={"help": "Prompt for a list of criteria."})
    judge_template: str = field(default=prompts.JUDGE, metadata={"help": "Prompt for one verdict."})
    score_template: str = field(default=prompts.SCORE, metadata={"help": "Prompt for a grade from 1 to 10."})

    def __post_init__(self):
        super().__post_init__()
        for name, allowed in (
            ("aggregator", AGGREGATOR_NAMES),
            ("reward", REWARDS),
            ("anchor_source", ANCHOR_SOURCES),
            ("audit", AUDITS),
            ("on_rubric_failure", ON_RUBRIC_FAILURE),
            ("on_judge_error", ON_JUDGE_ERROR),
        ):
            value = getattr(self, name)
            if value not in allowed:
                hint = "; a callable goes to the trainer's argument aggregator" if name == "aggregator" else ""
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}{hint}")
        for name, least in (
            ("min_rubrics", 1),
            ("max_rubrics", 1),
            ("rubric_retries", 0),
            ("rubric_max_new_tokens", 1),
            ("anchor_batch_size", 1),
            ("judge_cache_size", 0),
            ("anchor_max_new_tokens", 1),
            ("rollout_token_budget", 1),
            ("anchor_temperature", 0),
        ):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if self.min_rubrics > self.max_rubrics:
            raise ValueError(
                f"min_rubrics is {self.min_rubrics} and max_rubrics {self.max_rubrics}; "
                "the first may not be above the second"
            )
        self._check_templates()

    def _check_templates(self) -> None:
        for name, shown, flag, fields in (
            ("synthesis_template", self.include_prompt, "include_prompt", ("attempts",)),
            ("best_of_n_template", self.include_prompt, "include_prompt", ("attempts",)),
            ("judge_template", self.judge_include_prompt, "judge_include_prompt", ("completion", "criterion")),
            ("score_template", self.judge_include_prompt, "judge_include_prompt", ("reference", "completion")),
        ):
            # The defaults come in two forms; which one is meant is known only here.
            template = (prompts.WITH_TASK if shown else prompts.ANSWER_ONLY).get(getattr(self, name))
            if template is not None:
                setattr(self, name, template)
            template = getattr(self, name)
            if not shown and "{prompt}" in template:
                raise ValueError(f"{name} has {{prompt}}, but {flag} is False: set it to True to show the task")
            required = (*fields, "prompt") if shown else fields
            prompts.check_template(name, template, required, ("n",) if "attempts" in fields else ())
        prompts.check_template("rubric_template", self.rubric_template, ("reference",), ("n_min", "n_max"))

    @property
    def template_hashes(self) -> dict[str, str]:
        """A short hash of each template, as the audit log and cache keys hold it."""
        names = ("synthesis", "best_of_n", "rubric", "judge", "score")
        return {name: prompts.template_hash(getattr(self, f"{name}_template")) for name in names}
