"""Two processes score as one does, also where a group lies on both."""

import json
import os
import subprocess
import sys

import pytest

RUN = """
import json, os, sys
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
import torch
from datasets import Dataset
from hf_ext.trainers.cat import CaTConfig, CaTTrainer
from trl.trainer.utils import RepeatSampler

folder, out, size, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
world = int(os.environ.get("WORLD_SIZE", 1))
texts = ["7", "=7", "3", "x", "5", "55", "6", "5", "x", "y", "9", "z"]

def rollout(prompts, trainer):
    # The same rollouts, wherever a row is worked on: `prompt` says which group it is, its place which member.
    tokenizer = trainer._tokenizer
    start = trainer.accelerator.process_index * len(prompts)
    chosen = [texts[(start + i) % len(texts)] for i in range(len(prompts))]
    return {"prompt_ids": tokenizer(prompts)["input_ids"], "logprobs": None,
            "completion_ids": [[*tokenizer(text)["input_ids"], 0] for text in chosen]}

def digit(text):
    return next((c for c in text if c.isdigit()), None)

def judge(items):
    return [(sum(item.completion.encode()) + len(item.criterion)) % 3 > 0 for item in items]

extra = {
    "majority": {"aggregator": "majority", "reward": "match"},
    "min_ppl": {"aggregator": "min_ppl", "reward": "match"},
    "sampled": {"aggregator": "synthesis", "reward": "match", "anchor_max_new_tokens": 40},
    "rubric": {"aggregator": "first", "reward": "rubric", "min_rubrics": 1, "rubric_max_new_tokens": 60},
    "failing": {"aggregator": "first", "reward": "rubric", "min_rubrics": 1},
}[how]
passed = {"judge": judge} if how in ("rubric", "failing") else {}
if how == "rubric":
    class Anchor:
        name, reply = "scripted", "- a b\\n- c d e"
        def complete(self, conversations, **sampling):
            from hf_ext.chat import ChatReply
            return [ChatReply(self.reply, "stop") for _ in conversations]
    passed["anchor"] = Anchor()
if how == "failing":
    passed["anchor"] = lambda messages: "- a b"
    def judge(items):
        if int(os.environ.get("RANK", 0)) == 1: raise RuntimeError("the judge of process 1 is down")
        return [True] * len(items)
    passed["judge"] = judge
    extra["on_judge_error"] = "raise"

args = CaTConfig(out, num_generations=4, per_device_train_batch_size=size, max_completion_length=8, max_steps=2,
    use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True, logging_steps=1,
    save_strategy="no", learning_rate=1e-3, **extra)
data = Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(6)]})
trainer = CaTTrainer(folder, args=args, train_dataset=data, rollout_func=rollout, answer_extractor=digit, **passed)
assert trainer.accelerator.num_processes == world == int(sys.argv[5])
if os.environ.get("PRETEND_SHARDED"):
    trainer._scorer.tools.anchor.synchronized = True
trainer.train()
if trainer.accelerator.is_main_process:
    rows = [json.loads(line) for line in open(f"{out}/cat_audit.jsonl")]
    logged = [{k: v for k, v in r.items() if k.startswith(("cat/", "rewards/", "reward", "loss", "kl"))}
              for r in trainer.state.log_history if "reward" in r]
    weights = {n: p.double().sum().item() for n, p in trainer.model.named_parameters()}
    json.dump([[{k: v for k, v in row.items() if k != "cached"} for row in rows], logged, weights,
               list(trainer._logs["advantages"])], open(f"{out}/found.json", "w"))
"""


def run(folder, policy_dir, tmp_path, size: int, how: str, processes: int, **environment):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    out = tmp_path / folder
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", "0"]
        launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    command = [*launcher, script, policy_dir, out, str(size), how, str(processes)]
    env = {**os.environ, "ACCELERATE_USE_CPU": "1", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    return done, json.loads((out / "found.json").read_text()) if (out / "found.json").exists() else None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["majority", "sampled", "rubric"])
def test_two_processes_with_groups_on_both_score_and_learn_as_one_does(how, policy_dir, tmp_path):
    # Six rollouts a process and groups of four: the second group lies on both.
    one, alone = run("one", policy_dir, tmp_path, 12, how, 1)
    assert one.returncode == 0, one.stderr
    two, both = run("two", policy_dir, tmp_path, 6, how, 2)
    assert two.returncode == 0, two.stderr
    assert both[0] == alone[0]  # every verdict, and so every reference
    assert any(row["reward"] not in (None, alone[0][0]["reward"]) for row in alone[0])
    assert both[3] == pytest.approx(alone[3], abs=1e-6)
    for row, other in zip(both[1], alone[1]):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert both[2] == pytest.approx(alone[2], rel=1e-4, abs=1e-3)


@pytest.mark.slow
def test_with_sharded_weights_every_process_calls_the_model_equally_often(policy_dir, tmp_path):
    # Three groups on two processes: without the dummy calls of the second the counts would differ, and gathering hang.
    done, found = run("sharded", policy_dir, tmp_path, 6, "sampled", 2, PRETEND_SHARDED="1")
    assert done.returncode == 0, done.stderr
    plain, expected = run("plain", policy_dir, tmp_path, 12, "sampled", 1)
    assert found[0] == expected[0]


@pytest.mark.slow
def test_an_error_on_one_process_stops_both(policy_dir, tmp_path):
    done, found = run("failing", policy_dir, tmp_path, 6, "failing", 2)
    assert done.returncode != 0 and found is None
    assert "the judge of process 1 is down" in done.stderr
