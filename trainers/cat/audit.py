"""The audit log: every verdict is a row on the disk before the step that it decides, and what the rows say.

`cat_audit.jsonl` has one row a verdict, `cat_groups.jsonl` one row a group with the texts that verdicts refer to. Rows
are numbered by the step that trains on them (the rollouts of a fresh run are those of step 1) and in evaluation by the
step that was finished before.
"""

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_ext.runlog import RunLog, atomic_write, read_rows, row_line

from .aggregators import Group
from .prompts import prompt_text
from .rewards import discrimination
from .scoring import Outcome

__all__ = ["GROUPS_FILE", "VERDICTS_FILE", "AuditLog", "summarise", "verdict_rows"]

logger = logging.getLogger(__name__)

VERDICTS_FILE = "cat_audit.jsonl"
GROUPS_FILE = "cat_groups.jsonl"
GROUP_KEY = ("mode", "step", "group")
VERDICT_KEY = (*GROUP_KEY, "rollout", "index")
SAMPLE = 10  # audit="sample" keeps one group in so many


class AuditLog:
    """Writes the two files of a run.

    Args:
        folder: The run's `output_dir`.
        keep: `"all"`, `"sample"` or `"off"`.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: str = "all") -> None:
        self.keep = keep
        self.verdicts = RunLog(Path(folder) / VERDICTS_FILE, VERDICT_KEY)
        self.groups = RunLog(Path(folder) / GROUPS_FILE, GROUP_KEY)

    def begin(self, step: int) -> None:
        """Make the files those of a run that goes on after `step`.

        Rows of later steps are dropped: the resumed run does these steps again and writes their rows again. A run
        that starts anew puts the files of an earlier one aside (`cat_audit.1.jsonl`).
        """
        if self.keep == "off":
            return
        logs = (self.groups, self.verdicts)
        later = any(row["step"] > step for log in logs for row in log.rows())
        if not later:
            return
        if step == 0:
            number = 1
            while any(_aside(log.path, number).exists() for log in logs):
                number += 1
            for log in logs:
                if log.path.exists():
                    os.replace(log.path, _aside(log.path, number))
            logger.warning("the audit files of an earlier run are now %s", _aside(self.verdicts.path, number))
            return
        for log in logs:
            kept = [row for row in log.rows() if row["step"] <= step]
            with atomic_write(log.path, "wb") as file:
                file.writelines(map(row_line, kept))

    def write(
        self,
        mode: str,
        step: int,
        first: int,
        groups: Sequence[Group],
        outcomes: Sequence[Outcome],
        about: dict[str, Any],
    ) -> None:
        """Append the rows of a batch of groups and flush them to the disk.

        Args:
            mode: `"train"` or `"eval"`.
            step: See the module.
            first: Number of the first group within the step.
            groups: The rollouts.
            outcomes: What was found about them.
            about: `aggregator`, `judge` and `templates`, the same for every group.
        """
        if self.keep == "off":
            return
        group_rows, rows = [], []
        for number, (group, outcome) in enumerate(zip(groups, outcomes), start=first):
            if self.keep == "sample" and (step + number) % SAMPLE:
                continue
            key = {"mode": mode, "step": step, "group": number}
            group_rows.append(
                {
                    **key,
                    "kind": outcome.kind,
                    "aggregator": about["aggregator"],
                    "prompt": prompt_text(group.prompt),
                    "rollouts": group.completions,
                    "answers": group.answers,
                    "reference": outcome.reference.text,
                    "reference_answer": outcome.reference.answer,
                    "reference_meta": outcome.reference.meta,
                    "criteria": outcome.criteria,
                    "verdicts": outcome.verdicts,
                    "rewards": outcome.rewards,
                    "failures": outcome.failures,
                    "templates": about["templates"],
                }
            )
            rows += verdict_rows(key, group, outcome, about["judge"])
        self.groups.extend(group_rows)
        self.verdicts.extend(rows)


def _aside(path: Path, number: int) -> Path:
    return path.with_suffix(f".{number}{path.suffix}")


def verdict_rows(key: dict[str, Any], group: Group, outcome: Outcome, judge: str | None) -> list[dict[str, Any]]:
    """The rows of a group: one for each verdict or grade; a rollout without any has one that says why."""
    rows = []
    failure = "; ".join(outcome.failures) or None
    asked = outcome.kind in ("rubric", "judge_score")
    for i, reward in enumerate(outcome.rewards):
        common = {**key, "rollout": i, "kind": outcome.kind, "reward": reward}
        if outcome.kind == "match":
            expected = outcome.reference.answer
            rows.append(
                {
                    **common,
                    "index": 0,
                    "criterion": None if expected is None else f"the answer is {expected}",
                    "answer": group.answers[i],
                    "verdict": outcome.verdicts[i][0],
                    "error": failure if outcome.verdicts[i][0] is None else None,
                }
            )
            continue
        questions = (outcome.criteria if outcome.kind == "rubric" else ["grade"]) if asked else []
        for j, question in enumerate(questions):
            row = {
                **common,
                "index": j,
                "criterion": question if outcome.kind == "rubric" else None,
                "verdict": outcome.verdicts[i][j] if outcome.kind == "rubric" else None,
                "error": outcome.errors[i][j],
                "cached": outcome.cached[i][j],
                "judge": judge,
            }
            if outcome.kind == "judge_score":
                row["grade"] = outcome.grades[i]
            rows.append(row)
        if not questions:
            rows.append({**common, "index": 0, "criterion": None, "verdict": None, "error": failure})
    return rows


# --- reading -------------------------------------------------------------------------------------------------------


def summarise(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a verdict log says: criteria by how well they separate rollouts, failures, rewards by step.

    Args:
        path: A `cat_audit.jsonl`; of rows with the same key the last counts.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a verdict log.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; name the {VERDICTS_FILE} in a run's output_dir")
    latest = {}
    for number, row in enumerate(read_rows(path), start=1):
        missing = [name for name in (*VERDICT_KEY, "verdict", "reward") if name not in row]
        if missing:
            raise ValueError(f"{path}, row {number} lacks {', '.join(missing)}: this is no {VERDICTS_FILE}")
        latest[tuple(row[name] for name in VERDICT_KEY)] = row
    rows = list(latest.values())

    by_criterion: dict[str, dict[tuple, list[bool | None]]] = defaultdict(lambda: defaultdict(list))
    failures: Counter[str] = Counter()
    steps: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        steps[row["mode"], row["step"]].append(row)
        if row.get("criterion") and row["kind"] == "rubric":
            by_criterion[row["criterion"]][row["mode"], row["step"], row["group"]].append(row["verdict"])
        if row.get("error"):
            failures[row["error"]] += 1
        elif row["verdict"] is None and row.get("grade") is None:
            failures["unreadable"] += 1
    criteria = [_about_criterion(text, list(groups.values())) for text, groups in by_criterion.items()]
    criteria.sort(key=lambda c: (-c["discrimination"], -c["groups"], c["criterion"]))
    return {
        "file": str(path),
        "verdicts": len(rows),
        "criteria": criteria,
        "failures": dict(failures.most_common()),
        "steps": [_about_step(mode, step, steps[mode, step]) for mode, step in sorted(steps)],
    }


def _about_criterion(text: str, groups: list[list[bool | None]]) -> dict[str, Any]:
    verdicts = [verdict for group in groups for verdict in group]
    readable = [verdict for verdict in verdicts if verdict is not None]
    return {
        "criterion": text,
        "discrimination": fmean(discrimination([[v] for v in group])[0] for group in groups),
        "met": fmean(readable) if readable else None,
        "groups": len(groups),
        "verdicts": len(verdicts),
        "unreadable": len(verdicts) - len(readable),
    }


def _about_step(mode: str, step: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = {(row["group"], row["rollout"]): row["reward"] for row in rows}
    scored = [reward for reward in rewards.values() if reward is not None]
    return {
        "mode": mode,
        "step": step,
        "groups": len({row["group"] for row in rows}),
        "rollouts": len(rewards),
        "scored": len(scored),
        "reward": fmean(scored) if scored else None,
        "verdicts": len(rows),
        "without_verdict": sum(row["verdict"] is None and row.get("grade") is None for row in rows),
    }
