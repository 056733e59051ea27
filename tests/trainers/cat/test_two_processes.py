"""Two processes score as one does, also where a group lies on both."""

import json
import os
import subprocess
import sys

import pytest

# Run by two processes once, for all tests, and by the test's own process for what one process finds.
RUN = """
import json, os, sys
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from datasets import Dataset
from hf_ext.chat import ChatReply
from hf_ext.trainers.cat import CaTConfig, CaTTrainer

TEXTS = ["7", "=7", "3", "x", "5", "55", "6", "5", "x", "y", "9", "z"]

def rollout(prompts, trainer):
    # The same rollouts, whichever process works on a row: its place says which.
    tokenizer = trainer._tokenizer
    start = trainer.accelerator.process_index * len(prompts)
    chosen = [TEXTS[(start + i) % len(TEXTS)] for i in range(len(prompts))]
    return {"prompt_ids": tokenizer(prompts)["input_ids"], "logprobs": None,
            "completion_ids": [[*tokenizer(text)["input_ids"], 0] for text in chosen]}

def digit(text):
    return next((c for c in text if c.isdigit()), None)

def judge(items):
    return [(sum(item.completion.encode()) + len(item.criterion)) % 3 > 0 for item in items]

def down(items):
    if int(os.environ.get("RANK", 0)) == 1:
        raise ConnectionError("the judge of process 1 is down")
    return [True] * len(items)

class Anchor:
    name = "scripted"
    def complete(self, conversations, **sampling):
        return [ChatReply("- a b\\n- c d e", "stop") for _ in conversations]

RUBRIC = {"aggregator": "first", "reward": "rubric", "min_rubrics": 1}
CASES = {
    "majority": ({"aggregator": "majority"}, {}),
    "sampled": ({"aggregator": "synthesis", "anchor_max_new_tokens": 12}, {}),
    "sharded": ({"aggregator": "synthesis", "anchor_max_new_tokens": 12}, {}),
    "rubric": (RUBRIC, {"judge": judge, "anchor": Anchor()}),
    "failing": (RUBRIC | {"on_judge_error": "raise"}, {"judge": down, "anchor": Anchor()}),
}

def run(case, folder, out, size):
    options, passed = CASES[case]
    args = CaTConfig(out, num_generations=4, per_device_train_batch_size=size, max_completion_length=8, max_steps=2,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True, logging_steps=1,
        save_strategy="no", learning_rate=1e-3, **{"reward": "match", **options})
    data = Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(6)]})
    trainer = CaTTrainer(folder, args=args, train_dataset=data, rollout_func=rollout, answer_extractor=digit, **passed)
    found = {"world": trainer.accelerator.num_processes}
    if case == "sharded":  # as with FSDP: a process that called the model less often would let the others wait
        anchor = trainer._scorer.tools.anchor
        anchor.synchronized = True
        calls, active = [], anchor.active
        anchor.active = lambda: calls.append(1) or active()
    try:
        trainer.train()
    except Exception as error:
        return found | {"error": repr(error)}
    if case == "sharded":
        found["calls"] = len(calls)
    if trainer.accelerator.is_main_process:
        rows = [json.loads(line) for line in open(f"{out}/cat_audit.jsonl")]
        found["rows"] = [{k: v for k, v in row.items() if k != "cached"} for row in rows]
        names = ("cat/", "rewards/", "reward", "loss", "kl")
        found["logged"] = [{k: v for k, v in row.items() if k.startswith(names)}
                           for row in trainer.state.log_history if "reward" in row]
        found["weights"] = {name: p.double().sum().item() for name, p in trainer.model.named_parameters()}
        found["advantages"] = list(trainer._logs["advantages"])
    return found

if __name__ == "__main__":
    folder, out = sys.argv[1:]
    found = {case: run(case, folder, f"{out}/{case}", size=6) for case in CASES}
    json.dump(found, open(f"{out}/found-{os.environ['RANK']}.json", "w"))
"""


@pytest.fixture(scope="module")
def alone(policy_dir, tmp_path_factory):
    """`alone(case)`: what one process finds with the doubled batch."""
    names = {"__name__": "run"}
    exec(RUN, names)
    return lambda case: names["run"](case, str(policy_dir), str(tmp_path_factory.mktemp("one")), size=12)


@pytest.fixture(scope="module")
def both(policy_dir, tmp_path_factory):
    """What each of two processes finds in every case."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "run.py").write_text(RUN)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    done = subprocess.run(
        [*launcher, folder / "run.py", policy_dir, folder],
        env={**os.environ, "ACCELERATE_USE_CPU": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]
    assert all(case["world"] == 2 for one in found for case in one.values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["majority", "sampled", "rubric"])
def test_two_processes_with_groups_on_both_score_and_learn_as_one_does(case, alone, both):
    # Six rollouts a process and groups of four: the second group lies on both.
    one, two = alone(case), both[0][case]
    assert one["world"] == 1
    assert two["rows"] == one["rows"]  # every verdict, and so every reference
    assert any(row["reward"] not in (None, one["rows"][0]["reward"]) for row in one["rows"])
    assert two["advantages"] == pytest.approx(one["advantages"], abs=1e-6)
    for row, other in zip(two["logged"], one["logged"], strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-4, abs=1e-3)


@pytest.mark.slow
def test_with_sharded_weights_every_process_calls_the_model_equally_often(both):
    # Three groups on two processes: without a dummy call of the second, gathering its share of the weights would hang.
    assert both[0]["sharded"]["calls"] == both[1]["sharded"]["calls"] > 0
    assert both[0]["sharded"]["rows"] == both[0]["sampled"]["rows"]


@pytest.mark.slow
def test_an_error_on_one_process_stops_both(both):
    assert "another process failed" in both[0]["failing"]["error"]
    assert "the judge of process 1 is down" in both[0]["failing"]["error"]
    assert "ConnectionError" in both[1]["failing"]["error"]
