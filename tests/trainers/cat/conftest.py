"""A policy of random weights with a byte tokenizer, short runs on it, and rollouts that a test writes itself."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout_func

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaForCausalLM

from hf_ext.trainers.cat import CaTConfig, CaTTrainer

# Exact on a CPU: the hosts' configurations switch both of these on.
EXACT = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
QUIET = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
SHORT = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8, "learning_rate": 1e-3}


def options(**changes: Any) -> dict[str, Any]:
    """Arguments of a configuration for three exact, quick steps."""
    return {**EXACT, **QUIET, **SHORT, "max_steps": 3, **changes}


def config(folder: Path | str, **changes: Any) -> CaTConfig:
    return CaTConfig(str(folder), **options(**{"reward": "match", **changes}))


def parity(text: str) -> str:
    """An answer that random bytes give half of the time: whether the sum of the bytes is even or odd."""
    return str(sum(text.encode()) % 2)


def sums(count: int = 8) -> Dataset:
    """Prompts with a column `gold` that `parity` may hit."""
    return Dataset.from_dict(
        {"prompt": [f"{i}+{i}=" for i in range(count)], "gold": [str(i % 2) for i in range(count)]}
    )


def written(rollouts: Sequence[str]) -> Callable:
    """A rollout function that gives these texts, over and over."""

    def rollout(prompts: list, trainer: Any) -> dict[str, Any]:
        tokenizer = trainer._tokenizer
        texts = [rollouts[i % len(rollouts)] for i in range(len(prompts))]
        end = tokenizer.eos_token_id
        return {
            "prompt_ids": tokenizer([p if isinstance(p, str) else p[-1]["content"] for p in prompts])["input_ids"],
            "completion_ids": [[*tokenizer(text)["input_ids"], end] for text in texts],
            "logprobs": None,
        }

    return rollout


@pytest.fixture(scope="session")
def policy_dir(tiny_llama_dir, tmp_path_factory) -> Path:
    """Folder of the tiny Llama with room for the anchor's prompts in bytes."""
    folder = tmp_path_factory.mktemp("cat") / "policy"
    model = LlamaForCausalLM.from_pretrained(tiny_llama_dir)
    model.config.max_position_embeddings = 8192
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(folder)
    return folder


@pytest.fixture
def make_trainer(policy_dir, tmp_path) -> Callable[..., CaTTrainer]:
    """`make_trainer(judge=..., rollouts=[...], reward="rubric", ...)`: arguments of the trainer or of its config."""
    runs = 0

    def make(model: Any = None, **arguments: Any) -> CaTTrainer:
        nonlocal runs
        runs += 1
        names = ("judge", "anchor", "aggregator", "answer_extractor", "reward_funcs", "peft_config", "callbacks")
        passed = {name: arguments.pop(name) for name in names if callable(arguments.get(name)) or name in arguments}
        if isinstance(passed.get("aggregator"), str):
            arguments["aggregator"] = passed.pop("aggregator")
        rollouts = arguments.pop("rollouts", None)
        data = arguments.pop("train_dataset", None) or sums()
        passed["eval_dataset"] = arguments.pop("eval_dataset", None)
        args = arguments.pop("args", None) or config(tmp_path / f"run{runs}", **arguments)
        passed["rollout_func"] = written(rollouts) if rollouts else None
        model = str(policy_dir) if model is None else model
        return CaTTrainer(model, args=args, train_dataset=data, **passed)

    return make


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differing(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit."""
    assert set(before) == set(after)
    return [name for name in before if not torch.equal(before[name], after[name])]


def history(trainer: Any, *leave_out: str) -> list[dict[str, float]]:
    """What was logged, without times."""
    timed = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")
    return [{k: v for k, v in row.items() if k not in (*timed, *leave_out)} for row in trainer.state.log_history]


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The functions of this file: test files cannot import it."""
    return SimpleNamespace(
        **{f.__name__: f for f in (config, differing, history, options, parity, sums, weights, written)}
    )
