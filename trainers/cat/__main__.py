"""Train with CaT: GRPO whose reward comes from the rollouts themselves.

Run by `hf-ext train cat`, `accelerate launch -m hf_ext.trainers.cat` or `torchrun -m hf_ext.trainers.cat`, with
`--config FILE.yaml` and flags that override it.
"""

import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_ext.extras import require

require("trl", extra="trainers")

from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config  # noqa: E402

from hf_ext.chat import EndpointChat  # noqa: E402
from hf_ext.trainers.cat.cat_config import CaTConfig  # noqa: E402
from hf_ext.trainers.cat.cat_trainer import CaTTrainer  # noqa: E402
from hf_ext.trainers.cat.judges import EndpointJudge  # noqa: E402


@dataclass
class CaTScriptArguments(ScriptArguments):
    """
    Arguments of the script beside those of the configuration and the model.

    Args:
        judge (`str`, *optional*):
            `"anchor"`, a model's path or id, or `module:name` of a judge or function. With `judge_base_url` it is the
            model's name at the endpoint.
        judge_base_url (`str`, *optional*):
            Address of an OpenAI-compatible endpoint; its key is read from `OPENAI_API_KEY`.
        judge_grouped (`bool`, *optional*, defaults to `False`):
            Ask the endpoint for all criteria of a rollout at once.
        judge_max_concurrency (`int`, *optional*, defaults to `16`):
            Requests under way at the same time.
        judge_timeout (`float`, *optional*, defaults to `60.0`):
            Seconds that one attempt may wait.
        anchor (`str`, *optional*):
            `"policy"`, a model's path or id, or `module:name` of a function of messages. With `anchor_base_url` it is
            the model's name at the endpoint. Default: the initial policy.
        anchor_base_url (`str`, *optional*):
            Address of an OpenAI-compatible endpoint.
        aggregator_func (`str`, *optional*):
            `module:name` of a function in place of `aggregator`.
        answer_extractor (`str`, *optional*):
            `module:name` of a function that finds the final answer of a text.
        reward_funcs (`list[str]`, *optional*):
            `module:name` of further rewards.
    """

    judge: str | None = field(
        default=None, metadata={"help": 'Who answers criteria: "anchor", a model, or module:name of a judge.'}
    )
    judge_base_url: str | None = field(
        default=None, metadata={"help": "OpenAI-compatible endpoint at which `judge` is the model's name."}
    )
    judge_grouped: bool = field(default=False, metadata={"help": "One request for all criteria of a rollout."})
    judge_max_concurrency: int = field(default=16, metadata={"help": "Requests to the endpoint at a time."})
    judge_timeout: float = field(default=60.0, metadata={"help": "Seconds that one attempt may wait."})
    anchor: str | None = field(
        default=None, metadata={"help": 'The anchor, if not the initial policy: "policy", a model, or module:name.'}
    )
    anchor_base_url: str | None = field(
        default=None, metadata={"help": "OpenAI-compatible endpoint at which `anchor` is the model's name."}
    )
    aggregator_func: str | None = field(
        default=None, metadata={"help": "module:name of fn(prompt, completions, **row) -> str."}
    )
    answer_extractor: str | None = field(default=None, metadata={"help": "module:name of fn(text) -> str or None."})
    reward_funcs: list[str] | None = field(default=None, metadata={"help": "module:name of further rewards."})


def load_object(path: str) -> Any:
    """What `package.module:name` names; modules of the working folder are found too.

    Raises:
        ValueError: It is no such path, or the module has no such name.
        ImportError: The module cannot be imported.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{path!r} is no Python path; write package.module:name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {name}")
        found = getattr(found, part)
    return found


def load_data(name: str | None, config: str | None = None, streaming: bool = False) -> Any:
    """The dataset of a JSON-lines file, of a folder that `save_to_disk` wrote, or of a name that `load_dataset` knows.

    Raises:
        ValueError: There is no name.
        FileNotFoundError: It looks like a file that is not there.
    """
    datasets = require("datasets", extra="trainers")
    if not name:
        raise ValueError("dataset_name is missing: a .jsonl file, a dataset's folder, or a name on the Hub")
    path = Path(name)
    if path.suffix in (".json", ".jsonl"):
        if not path.is_file():
            raise FileNotFoundError(f"dataset_name is {name!r}, and there is no such file")
        return datasets.load_dataset("json", data_files=str(path), streaming=streaming)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        found = datasets.load_from_disk(name)
        return found if isinstance(found, dict) else datasets.DatasetDict(train=found)
    return datasets.load_dataset(name, name=config, streaming=streaming)


def make_judge(script: CaTScriptArguments) -> Any:
    """The judge that the arguments describe, as `CaTTrainer` takes it."""
    if script.judge_base_url:
        return EndpointJudge(
            script.judge_base_url,
            script.judge or "",
            max_concurrency=script.judge_max_concurrency,
            timeout=script.judge_timeout,
            grouped=script.judge_grouped,
        )
    return load_object(script.judge) if script.judge and ":" in script.judge else script.judge


def make_anchor(script: CaTScriptArguments) -> Any:
    """The anchor that the arguments describe, as `CaTTrainer` takes it."""
    if script.anchor_base_url:
        return EndpointChat(script.anchor_base_url, script.anchor or "")
    return load_object(script.anchor) if script.anchor and ":" in script.anchor else script.anchor


def main(script: CaTScriptArguments, training: CaTConfig, model: ModelConfig) -> None:
    """Train as the arguments say, and save the model."""
    if not model.model_name_or_path:
        raise ValueError("model_name_or_path is missing: the policy's path or id")
    data = load_data(script.dataset_name, script.dataset_config, script.dataset_streaming)
    evaluates = training.eval_strategy != "no"
    for split in [script.dataset_train_split] + [script.dataset_test_split] * evaluates:
        if split not in data:
            raise ValueError(f"{script.dataset_name} has no split {split!r}; it has {', '.join(data)}")
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    trainer = CaTTrainer(
        model=model.model_name_or_path,
        reward_funcs=[load_object(path) for path in script.reward_funcs or []],
        args=training,
        train_dataset=data[script.dataset_train_split],
        eval_dataset=data[script.dataset_test_split] if evaluates else None,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        aggregator=load_object(script.aggregator_func) if script.aggregator_func else None,
        judge=make_judge(script),
        anchor=make_anchor(script),
        answer_extractor=load_object(script.answer_extractor) if script.answer_extractor else None,
    )
    resume = training.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    trainer.save_model(training.output_dir)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    trainer.accelerator.print(f"model in {training.output_dir}")
    if training.audit != "off" and training.reward_weight != 0:
        trainer.accelerator.print(f"verdicts: hf-ext audit rewards {training.output_dir}/cat_audit.jsonl")
    trainer.end()


if __name__ == "__main__":
    main(*TrlParser((CaTScriptArguments, CaTConfig, ModelConfig)).parse_args_and_config())
