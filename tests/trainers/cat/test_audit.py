"""The log of verdicts: one row each, whole after a kill, neither doubled nor lost by a resume, and what it says."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from hf_ext.cli import main
from hf_ext.trainers.cat.aggregators import Group, Reference
from hf_ext.trainers.cat.audit import AuditLog, summarise
from hf_ext.trainers.cat.scoring import Outcome

CRITERIA = [f"criterion {letter}" for letter in "abcde"]


def anchor(messages):
    return json.dumps(CRITERIA) if "criteria" in messages[0]["content"] else "ref"


def judge(items):
    return [None if item.criterion[-1] == "e" else item.completion >= item.criterion[-1] for item in items]


RUBRIC = {"rollouts": list("abcd"), "reward": "rubric", "judge": judge, "anchor": anchor}


def test_every_verdict_is_a_row_and_the_rows_give_the_logged_rewards(make_trainer):
    trainer = make_trainer(**RUBRIC)
    trainer.train()
    rows = trainer._audit.verdicts.rows()
    assert len(rows) == 3 * 2 * 4 * 5  # steps, groups, rollouts, criteria
    keys = [tuple(row[name] for name in ("mode", "step", "group", "rollout", "index")) for row in rows]
    assert len(set(keys)) == len(keys) and {row["step"] for row in rows} == {1, 2, 3}
    logged = [row["rewards/cat/mean"] for row in trainer.state.log_history if "reward" in row]
    for step, mean in enumerate(logged, start=1):
        rewards = {(r["group"], r["rollout"]): r["reward"] for r in rows if r["step"] == step}
        assert np.mean(list(rewards.values())) == pytest.approx(mean)
    first = rows[0]
    assert first["criterion"] == "criterion a" and first["verdict"] is True and first["judge"] == "callable:judge"
    assert rows[4]["verdict"] is None and rows[4]["error"] is None  # unreadable, which is no failure
    # After the first step the same questions are answered from memory.
    assert not any(row["cached"] for row in rows if (row["step"], row["group"]) == (1, 0))
    assert all(row["cached"] for row in rows if row["step"] == 2 and row["verdict"] is not None)

    groups = trainer._audit.groups.rows()
    assert len(groups) == 6 and groups[0]["rollouts"] == list("abcd") and groups[0]["criteria"] == CRITERIA
    assert groups[0]["reference"] == "ref" and groups[0]["prompt"].endswith("=")
    assert set(groups[0]["templates"]) == {"synthesis", "best_of_n", "rubric", "judge", "score"}
    verdicts = [[r["verdict"] for r in rows if (r["step"], r["group"], r["rollout"]) == (1, 0, i)] for i in range(4)]
    assert groups[0]["verdicts"] == verdicts


def test_answers_and_groups_without_a_reference_have_a_row_for_each_rollout(make_trainer):
    trainer = make_trainer(
        rollouts=["7", "x"], aggregator="majority", answer_extractor=lambda t: t if t == "7" else None
    )
    trainer.train()
    rows = trainer._audit.verdicts.rows()
    assert len(rows) == 3 * 8
    assert (rows[0]["criterion"], rows[0]["answer"], rows[0]["verdict"]) == ("the answer is 7", "7", True)
    assert (rows[1]["answer"], rows[1]["verdict"], rows[1]["reward"]) == (None, False, 0.0)
    nothing = make_trainer(rollouts=["7"], aggregator="majority", answer_extractor=lambda text: None, max_steps=1)
    nothing.train()
    rows = nothing._audit.verdicts.rows()
    assert len(rows) == 8 and all(row["verdict"] is row["reward"] is None for row in rows)
    assert rows[0]["error"] == "no rollout has an answer"


@pytest.mark.parametrize(("audit", "count"), [("off", None), ("sample", 24 // 10 + 1)])
def test_less_is_kept_where_that_is_configured(audit, count, make_trainer):
    trainer = make_trainer(rollouts=["7"], aggregator="first", audit=audit, max_steps=12)
    trainer.train()
    assert trainer._audit.verdicts.path.exists() == (count is not None)
    if count is not None:
        groups = trainer._audit.groups.rows()
        assert {(row["step"] + row["group"]) % 10 for row in groups} == {0} and len(groups) == 2


def test_accumulated_batches_are_numbered_within_their_step(make_trainer):
    trainer = make_trainer(
        **RUBRIC, gradient_accumulation_steps=2, steps_per_generation=1, per_device_train_batch_size=4, max_steps=2
    )
    trainer.train()
    found = [(row["step"], row["group"]) for row in trainer._audit.groups.rows()]
    assert found == [(1, 0), (1, 1), (2, 0), (2, 1)]


# --- the end of a run and the next one -------------------------------------------------------------------------------


def test_a_new_run_puts_the_log_of_the_old_one_aside(make_trainer):
    trainer = make_trainer(**RUBRIC)
    trainer.train()
    old = trainer._audit.verdicts.path.read_text()
    again = make_trainer(args=trainer.args, **{k: v for k, v in RUBRIC.items() if k != "reward"})
    again.train()
    folder = again._audit.verdicts.path.parent
    assert (folder / "cat_audit.1.jsonl").read_text() == old and (folder / "cat_groups.1.jsonl").exists()
    assert len(again._audit.verdicts.rows()) == 120


def test_training_once_more_numbers_and_seeds_its_groups_as_the_first_time(make_trainer):
    trainer = make_trainer(**RUBRIC)
    trainer.train()
    first = [(row["step"], row["group"], row["reference_meta"]) for row in trainer._audit.groups.rows()]
    trainer.train()
    assert [(row["step"], row["group"], row["reference_meta"]) for row in trainer._audit.groups.rows()] == first


def test_what_was_evaluated_before_training_stays(tmp_path):
    log = AuditLog(tmp_path)
    group = Group("\ud800 é", ["a"], ["1"])  # half a surrogate pair, as JSON may hold
    outcome = Outcome(Reference("1", "1"), "match", [1.0], verdicts=[[True]])
    about = {"aggregator": "first", "judge": None, "templates": {}}
    log.write("eval", 0, 0, [group], [outcome], about)
    log.begin(0)
    assert len(log.verdicts.rows()) == 1
    log.write("train", 1, 0, [group], [outcome], about)
    log.write("eval", 1, 0, [group], [outcome], about)
    log.write("train", 2, 0, [group], [outcome], about)
    log.begin(1)
    assert [(row["mode"], row["step"]) for row in log.verdicts.rows()] == [("eval", 0), ("train", 1), ("eval", 1)]
    assert len(log.groups.rows()) == 3 and log.groups.rows()[0]["prompt"] == "\ud800 é"


RUN = """
import os, signal, sys
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from datasets import Dataset
from transformers import TrainerCallback
from hf_ext.trainers.cat import CallableJudge, CaTConfig, CaTTrainer

def grade(items):
    return [1 + sum((item.completion + item.reference).encode()) % 10 for item in items]

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(state.global_step, flush=True)
        if state.global_step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

args = CaTConfig(
    sys.argv[2], reward="auto", on_rubric_failure="judge_score",
    num_generations=4, per_device_train_batch_size=8, max_completion_length=8,
    max_steps=6, save_strategy="steps", save_steps=2, learning_rate=1e-3, use_cpu=True, bf16=False,
    gradient_checkpointing=False, report_to=[], disable_tqdm=True, logging_steps=1, rubric_max_new_tokens=4,
    rubric_retries=0,
)
# One epoch: over the end of one, the host's own sampler does not resume in the order of the whole run.
data = Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(16)], "domain": ["open", "verifiable"] * 8})
# The anchor is the initial policy, and samples from seeds of its own: what it writes says whether it still is.
trainer = CaTTrainer(
    sys.argv[1], args=args, train_dataset=data, judge=CallableJudge(len, grade), callbacks=[Kill()],
    answer_extractor=lambda text: str(sum(text.encode()) % 2),
)
trainer.train(resume_from_checkpoint=len(sys.argv) > 4)
"""


@pytest.mark.slow
def test_a_killed_run_has_every_finished_step_and_its_resume_has_the_same_anchor_and_no_row_twice(
    policy_dir, tmp_path
):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN))

    def run(folder, kill_at, *more):
        command = [sys.executable, script, policy_dir, tmp_path / folder, str(kill_at), *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    whole = run("whole", 99)
    assert whole.returncode == 0, whole.stderr
    killed = run("killed", 5)
    assert killed.returncode == -9 and killed.stdout.split()[-1] == "5"

    def rows(folder, name="cat_audit.jsonl"):
        return [json.loads(line) for line in (tmp_path / folder / name).read_text().splitlines()]

    assert {row["step"] for row in rows("killed")} >= {1, 2, 3, 4, 5}
    assert all(sum(row["step"] == step for row in rows("killed")) == 2 * 4 for step in range(1, 6))
    with open(tmp_path / "killed" / "cat_audit.jsonl", "ab") as file:
        file.write(b'{"mode": "train", "st')  # the kill may fall into a write

    resumed = run("killed", 99, "resume")
    assert resumed.returncode == 0, resumed.stderr
    assert [line for line in resumed.stdout.split() if line.isdigit()] == ["5", "6"]
    for name in ("cat_audit.jsonl", "cat_groups.jsonl"):
        want, got = rows("whole", name), rows("killed", name)
        for row in (*want, *got):
            row.pop("cached", None)  # what is in memory does not outlive a process
        assert got == want
    references = [row["reference"] for row in rows("whole", "cat_groups.jsonl")]
    assert len(set(references)) > 6  # written by a model, not by a script
    assert {row["kind"] for row in rows("whole")} == {"match", "judge_score"}
    ends = [
        next((tmp_path / folder / "checkpoint-6").glob("*.safetensors")).read_bytes() for folder in ("whole", "killed")
    ]
    assert ends[0] == ends[1]


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def log_file(make_trainer):
    trainer = make_trainer(**RUBRIC)
    trainer.train()
    return trainer._audit.verdicts.path


def test_criteria_are_sorted_by_how_well_they_separate(log_file):
    found = summarise(log_file)
    assert found["verdicts"] == 120
    by_text = {row["criterion"][-1]: row for row in found["criteria"]}
    assert [row["discrimination"] for row in found["criteria"]] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert by_text["a"]["met"] == 1.0 and by_text["c"]["met"] == 0.5 and by_text["e"]["met"] is None
    assert by_text["e"]["unreadable"] == 24 and found["failures"] == {"unreadable": 24}
    assert [(row["step"], row["scored"], row["without_verdict"]) for row in found["steps"]] == [
        (step, 8, 8) for step in (1, 2, 3)
    ]
    # 1/4, 2/4, 3/4 and 4/4 of the readable verdicts
    assert found["steps"][0]["reward"] == pytest.approx(0.625)


def test_of_rows_with_one_key_the_last_counts(log_file):
    before = summarise(log_file)
    with open(log_file, "a") as file:
        file.write(log_file.read_text())
    assert summarise(log_file) == before


def test_the_command_prints_it_as_tables_and_as_json(log_file, capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main(["audit", "rewards", *map(str, arguments)])
        return stopped.value.code or 0, capsys.readouterr()

    code, shown = call(log_file)
    assert code == 0 and "criterion d" in shown.out and "0.625" in shown.out and "unreadable" in shown.out
    code, shown = call(log_file, "--json")
    assert code == 0 and json.loads(shown.out) == json.loads(json.dumps(summarise(log_file)))
    code, shown = call(log_file, "--limit", 2)
    assert "and 3 more criteria; --limit 0 shows all" in shown.out
    code, shown = call(log_file.parent / "nothing.jsonl")
    assert code == 1 and "is no file; name the cat_audit.jsonl in a run's output_dir" in shown.err
    code, shown = call(log_file.parent / "cat_groups.jsonl")
    assert code == 1 and "this is no cat_audit.jsonl" in shown.err
