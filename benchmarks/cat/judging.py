"""SmolLM2 as judge and anchor: what the shared prefix saves, and one training end to end.

Times are of the processor, not of the clock: other work on the machine does not count.
"""

import json
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from hf_ext.trainers.cat import CaTConfig, CaTTrainer
from hf_ext.trainers.cat.judges import JudgeItem, TransformersJudge

__all__ = ["end_to_end", "throughput"]

WORDS = "the cell divides when its copies of the genome are complete and its proteins have been made".split()
CRITERIA = [
    "The answer names the organ in which the process takes place.",
    "The answer explains what starts the process.",
    "The answer gives at least one example from everyday life.",
    "The answer states in which order the steps follow each other.",
    "The answer avoids claims that it does not support.",
    "The answer mentions how long the process usually takes.",
    "The answer says what happens if one step fails.",
    "The answer is written in complete sentences.",
]
PROMPTS = [
    "Why do we have seasons on Earth?",
    "How should a beginner start to learn to swim?",
    "What makes bread rise?",
    "Explain to a child what a magnet does.",
]


def throughput(folder: Path, length: int = 512, repeats: int = 2) -> list[dict[str, Any]]:
    """Processor time of eight verdicts on an answer: criteria on a shared prefix, and one at a time.

    Args:
        folder: The judge's model.
        length: Tokens of the answer.
        repeats: Answers; the best time counts.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ways = {
        "prefix shared": TransformersJudge(model, tokenizer, readout="logits", batch_size=len(CRITERIA)),
        "one at a time": TransformersJudge(model, tokenizer, readout="logits", batch_size=1, share_prefix=False),
    }
    rng = random.Random(0)
    rows, odds = [], {}
    for way, judge in ways.items():
        fed, seconds = 0, []

        def count(module, args, kwargs):
            nonlocal fed
            fed += kwargs["input_ids"].numel()

        handle = model.register_forward_pre_hook(count, with_kwargs=True)
        for repeat in range(repeats):
            rng.seed(repeat)
            text = " ".join(rng.choices(WORDS, k=length))
            answer = tokenizer.decode(tokenizer(text)["input_ids"][:length])
            items = [JudgeItem(None, answer, criterion) for criterion in CRITERIA]
            begun = time.process_time()
            odds[way, repeat] = judge.log_odds(items)
            seconds.append(time.process_time() - begun)
        handle.remove()
        rows.append({"way": way, "seconds": min(seconds), "tokens_fed": fed / repeats, "verdicts": len(CRITERIA)})
    for row in rows:
        row["largest_difference"] = max(
            abs(a - b)
            for repeat in range(repeats)
            for a, b in zip(odds["prefix shared", repeat], odds["one at a time", repeat])
        )
    return rows


def end_to_end(folder: Path, steps: int = 4, group: int = 8, length: int = 64) -> dict[str, Any]:
    """Train SmolLM2 with LoRA on four open prompts, itself as anchor and judge; beside it plain GRPO's step.

    Args:
        folder: The model.
        steps: Of one prompt each.
        group: Rollouts of a prompt.
        length: Tokens of a rollout.
    """
    from peft import LoraConfig

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS])
    found: dict[str, Any] = {}
    for name in ("GRPO", "CaT"):
        with tempfile.TemporaryDirectory() as out:
            fields = {
                "output_dir": out,
                "per_device_train_batch_size": group,
                "num_generations": group,
                "max_completion_length": length,
                "max_steps": steps,
                "learning_rate": 1e-5,
                "beta": 0.04,
                "seed": 0,
                "logging_steps": 1,
                "save_strategy": "no",
                "report_to": "none",
                "use_cpu": True,
                "bf16": False,
                "gradient_checkpointing": False,
                "disable_tqdm": True,
                "model_init_kwargs": {"dtype": "float32"},
            }
            host = {"model": str(folder), "train_dataset": data, "peft_config": LoraConfig(task_type="CAUSAL_LM")}
            if name == "GRPO":
                trainer = GRPOTrainer(reward_funcs=_distinct_words, args=GRPOConfig(**fields), **host)
            else:
                config = CaTConfig(**fields, reward="rubric", rubric_max_new_tokens=256)
                trainer = CaTTrainer(args=config, judge="anchor", **host)
            begun = time.process_time()
            trainer.train()
            found[f"seconds_a_step_{name.lower()}"] = (time.process_time() - begun) / steps
            if name == "CaT":
                found |= _audited(Path(out), trainer)
    found["ratio"] = found["seconds_a_step_cat"] / found["seconds_a_step_grpo"]
    return {**found, "steps": steps, "group": group, "length": length}


def _distinct_words(completions: list, **kwargs: Any) -> list[float]:
    texts = [re.findall(r"\w+", completion[0]["content"].lower()) for completion in completions]
    return [len(set(words)) / max(1, len(words)) for words in texts]


def _audited(out: Path, trainer: CaTTrainer) -> dict[str, Any]:
    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]

    groups, verdicts = rows("cat_groups.jsonl"), rows("cat_audit.jsonl")
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "groups_audited": len(groups),
        "verdicts_audited": len(verdicts),
        "log": [{name: value for name, value in entry.items() if name.startswith("cat/")} for entry in logs],
    }
