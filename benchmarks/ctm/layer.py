"""Time and peak memory of merging one layer, each in a process of its own that prints one line of JSON."""

import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hf_ext.adapters.ctm import merge_lora_tensors
from hf_ext.benchmarks.ctm.methods import METHODS, merge_by_peft, one_layer_model
from hf_ext.benchmarks.ctm.synthetic import LAYER, random_adapters

__all__ = ["measure", "measure_apart"]

_LONG = 10.0  # seconds; what takes longer is measured once, else the best of five counts
# Time of the processor, not of the clock: on one thread the two are the same on an idle machine, and only this one
# stays true when others use the processor too.
_clock = time.process_time
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(name: str, rows: int, columns: int, count: int, rank: int) -> dict[str, Any]:
    """Merge `count` random adapters of a layer [rows, columns] in this process.

    Returns:
        "seconds" of processor time (the best of five, or the only one), "runs", and "peak_bytes": the most memory
        held beyond what was held before, with the inputs in place and after a small merge that loads whatever is
        loaded on first use.
    """
    method = METHODS[name]

    def prepare(m: int, n: int) -> Any:
        pairs = [adapter[LAYER] for adapter in random_adapters(m, n, count, rank)]
        a_list, b_list = zip(*pairs)
        if method.group == "peft":
            model = one_layer_model(a_list, b_list)
            return lambda: merge_by_peft(model, count, method.rule, rank, 0.5)
        config = method.config(rank, 0.5, 0)
        return lambda: merge_lora_tensors(a_list, b_list, [1.0] * count, config, LAYER)

    prepare(4 * rank, 4 * rank)()
    run = prepare(rows, columns)
    _reset_peak()
    before = _held()
    seconds = [_time(run)]
    peak = _peak() - before
    while seconds[0] < _LONG and len(seconds) < 5:
        seconds.append(_time(run))
    return {"seconds": min(seconds), "runs": len(seconds), "peak_bytes": max(peak, 0)}


def measure_apart(name: str, rows: int, columns: int, count: int, rank: int, threads: int) -> dict[str, Any]:
    """`measure` in a fresh process.

    Raises:
        RuntimeError: The process failed, with the end of what it said.
    """
    command = [sys.executable, "-m", __name__, name, *map(str, (rows, columns, count, rank, threads))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the process that measures {name!r} failed: {done.stderr.strip()[-600:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _time(run: Any) -> float:
    begin = _clock()
    run()
    return _clock() - begin


def _kilobytes(field: str) -> int | None:
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    return int(found[1]) if found else None


def _peak() -> int:
    """The most memory that this process has held, in bytes."""
    if (found := _kilobytes("VmHWM")) is not None:
        return found * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _held() -> int:
    """The memory that this process holds, in bytes; where only the peak is known, that."""
    return found * 1024 if (found := _kilobytes("VmRSS")) is not None else _peak()


def _reset_peak() -> None:
    """Let the peak begin anew from what is held now: that of the imports would hide it. Linux only."""
    if _RESET.exists():
        _RESET.write_text("5")


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[6]))
    print(json.dumps(measure(sys.argv[1], *map(int, sys.argv[2:6]))))
