"""Instruction counts of a compiled kernel, from its machine code (NVIDIA) or its assembler (AMD)."""

import re
import subprocess
import tempfile
from typing import NamedTuple

from hf_ext.kernel_tools import TARGETS, CompileReport, nvidia_tool

__all__ = ["InstructionCounts", "count_instructions"]

_NVIDIA_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)$")
_NVIDIA_JUMP = re.compile(r"`\((\.L_x?_?\d+)\)")
_AMD_LINE = re.compile(r"^\t((?:s|v|ds|buffer|global|flat|scratch)_\w+)(.*)$")
_LABEL = re.compile(r"^(\.L\w+):")
# HMMA (Ampere), HGMMA (Hopper), UTC*MMA (Blackwell's tensor memory), v_mfma (AMD).
_MATRIX = re.compile(r"^(?:HMMA|HGMMA|UTC\w*MMA|OMMA|QMMA|v_s?mfma)")


class InstructionCounts(NamedTuple):
    """Counts of static instructions, one per line of machine code.

    Attributes:
        total: of the whole kernel.
        loop: of the shortest loop that holds a matrix instruction: one step along K (or over tokens). 0 if none does.
        loop_matrix: matrix instructions among those of the loop.
    """

    total: int
    loop: int
    loop_matrix: int


def count_instructions(report: CompileReport) -> InstructionCounts:
    """Count the instructions of a compiled kernel.

    Args:
        report: with its text and binary, as `hf_ext.kernel_tools.compile_config` gives it.

    Raises:
        ValueError: The report is of a kernel that did not compile.
    """
    if not report.binary:
        raise ValueError(f"{report.name} did not compile for {report.target}: {'; '.join(report.problems)}")
    if TARGETS[report.target].backend == "cuda":
        return _count(_disassemble(report.binary), _NVIDIA_LINE, _NVIDIA_JUMP, "BRA")
    return _count(report.text, _AMD_LINE, re.compile(r"(\.LBB\w+)"), "s_cbranch")


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(nvidia_tool("nvdisasm")), "--print-code", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _count(text: str, line: re.Pattern, jump: re.Pattern, branch: str) -> InstructionCounts:
    names: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    # What stands behind the first exit are waits on barriers, moved out of the way: they jump back, and are no loops.
    ended = False
    for row in text.splitlines():
        if label := _LABEL.match(row):
            labels[label[1]] = len(names)
        elif found := line.match(row):
            names.append(found[1])
            ended = ended or found[1] in ("EXIT", "s_endpgm")
            target = jump.search(found[2]) if found[1].startswith(branch) else None
            if not ended and target and target[1] in labels:  # the label stands above: a jump back
                loops.append((labels[target[1]], len(names)))
    matrix = [index for index, name in enumerate(names) if _MATRIX.match(name)]
    bodies = [
        (end - start, inside) for start, end in loops if (inside := sum(start <= index < end for index in matrix))
    ]
    return InstructionCounts(len(names), *(min(bodies) if bodies else (0, 0)))
