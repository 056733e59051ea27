"""Checks of kernel repositories that need no GPU: layout and imports, and what the compiler makes of them.

`check_kernel` validates a folder as the `kernels` library would find it. `compile_config` compiles one launch
configuration ahead of time and reads registers, spilled bytes and shared memory off the machine code.
"""

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hf_ext.extras import is_installed, require
from hf_ext.kernel_lookup import import_kernel_folder, interpreter_enabled

__all__ = [
    "DEFAULT_TARGETS",
    "TARGETS",
    "CompileReport",
    "Finding",
    "Target",
    "aot_configs",
    "check_kernel",
    "check_target",
    "compile_config",
    "is_for",
    "nvidia_tool",
]

KIB = 1024
# Shared memory of every configuration we ship: what consumer cards of capability 8.6 to 12 have.
OWN_SHARED_LIMIT = 99 * KIB
# Scalar registers that AMD's compiler parks in lanes of vector registers cost no memory, but a few instructions.
SGPR_SPILL_LIMIT = 100


class Target(NamedTuple):
    """An architecture that kernels are compiled for.

    Attributes:
        backend: Triton's backend, "cuda" or "hip".
        arch: compute capability times ten, or the gfx name.
        warp_size: threads of a warp.
        shared_limit: bytes of shared memory that one program may have there.
    """

    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * KIB),
    "sm_90": Target("cuda", 90, 32, 227 * KIB),
    "sm_100": Target("cuda", 100, 32, 227 * KIB),
    "sm_120": Target("cuda", 120, 32, 99 * KIB),
    "gfx942": Target("hip", "gfx942", 64, 64 * KIB),
    "gfx950": Target("hip", "gfx950", 64, 160 * KIB),
}
DEFAULT_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


class Finding(NamedTuple):
    """One check of a kernel folder: its name, whether it passed, and what was seen."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class CompileReport:
    """What the compiler made of a configuration for a target.

    Attributes:
        name: of the configuration.
        target: of the compilation.
        registers: per thread; vector registers on AMD.
        spilled_bytes: memory per thread for spilled registers (and any other stack).
        shared_bytes: shared memory (LDS) of a program.
        sgpr_spills: AMD's scalar registers kept in lanes of vector registers; 0 on NVIDIA.
        matrix_instructions: matrix instruction -> how often it stands in the text.
        seconds: the compilation took.
        problems: why `ok` is False, in words.
        triton: version of the compiler.
        text: PTX or AMD assembler; not part of `to_dict`.
        binary: the machine code; not part of `to_dict`.
    """

    name: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    sgpr_spills: int
    matrix_instructions: dict[str, int]
    seconds: float
    problems: tuple[str, ...]
    triton: str
    text: str = field(repr=False)
    binary: bytes = field(repr=False)

    @property
    def ok(self) -> bool:
        """Nothing spilled and the shared memory within bounds."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report without the compiled text, as JSON holds it."""
        row = asdict(self)
        del row["text"], row["binary"]
        row["problems"] = list(self.problems)
        return row


# --- layout ---------------------------------------------------------------------------------------------------------


def check_kernel(folder: str | os.PathLike[str]) -> list[Finding]:
    """Check that a folder is a kernel repository that stands on its own.

    Args:
        folder: The repository: build/torch-universal, README.md, build.toml.

    Returns:
        A finding per check.

    Raises:
        ImportError: The `kernels` library is not installed.
    """
    require("kernels", extra="kernels")
    folder = Path(folder).resolve()
    variant = folder / "build" / "torch-universal"
    findings = [_attempt("layout", _check_layout, folder)]
    if not findings[0].ok:
        return findings
    return [
        *findings,
        _attempt("README.md", _check_card, folder),
        _attempt("metadata.json", _check_metadata, variant),
        _attempt("build.toml", _check_build_toml, folder, variant),
        _attempt("imports", _check_imports, variant),
        _attempt("kernels library", _check_local_load, folder, variant),
        _attempt("without hf_ext", _check_bare_load, variant),
    ]


def _attempt(name: str, check, *arguments) -> Finding:
    try:
        return Finding(name, True, check(*arguments))
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}")


def _check_layout(folder: Path) -> str:
    wanted = ["README.md", "build.toml", "build/torch-universal/__init__.py", "build/torch-universal/metadata.json"]
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}")
    variants = sorted(path.name for path in (folder / "build").iterdir() if path.is_dir())
    if variants != ["torch-universal"]:
        raise ValueError(f"build holds {', '.join(variants)}: expected torch-universal only, the form of this tree")
    return f"{len(list((folder / 'build/torch-universal').rglob('*.py')))} modules in torch-universal"


def _check_card(folder: Path) -> str:
    text = (folder / "README.md").read_text(encoding="utf-8")
    header = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if not header:
        raise ValueError("the card has no YAML header between --- lines")
    for line in ("library_name: kernels", "license: apache-2.0", "tags:"):
        if not re.search(rf"^{re.escape(line)}", header[1], re.MULTILINE):
            raise ValueError(f"the card's header lacks `{line}`")
    return "library_name, license and tags"


def _check_metadata(variant: Path) -> str:
    data = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    wanted = {"id": str, "name": str, "version": int, "license": str, "backend": dict, "python-depends": list}
    for key, kind in wanted.items():
        if not isinstance(data.get(key), kind):
            raise ValueError(f"{key}={data.get(key)!r}: expected a {kind.__name__}")
    if not re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", data["name"]):
        raise ValueError(f"name={data['name']!r}: lower-case letters, digits and dashes only")
    if not data["id"].isidentifier():
        raise ValueError(f"id={data['id']!r}: it becomes the module's name and must be an identifier")
    require("kernels", extra="kernels").Metadata.read_from_file(variant / "metadata.json")
    return f"{data['name']}, version {data['version']}"


def _check_build_toml(folder: Path, variant: Path) -> str:
    require("kernels", extra="kernels")
    build = importlib.import_module("kernels._rust").Build.open(folder)
    general = tomllib.loads((folder / "build.toml").read_text(encoding="utf-8"))["general"]
    data = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    for key in ("name", "version", "license"):
        if general[key] != data[key]:
            raise ValueError(f"{key} is {general[key]!r} here and {data[key]!r} in metadata.json")
    if data["backend"]["type"] not in general["backends"]:
        raise ValueError(f"backends={general['backends']} lacks {data['backend']['type']!r} of metadata.json")
    return f"parsed as {type(build).__name__}; {', '.join(general['backends'])}"


def _check_imports(variant: Path) -> str:
    allowed = {"torch", "triton"} | set(sys.stdlib_module_names)
    seen = set()
    for path in sorted(variant.rglob("*.py")):
        depth = len(path.relative_to(variant).parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.Import):
                roots = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots = [node.module.partition(".")[0]]
            elif isinstance(node, ast.ImportFrom) and node.level > depth:
                raise ValueError(f"{path.name}, line {node.lineno}: a relative import that leaves the folder")
            else:
                continue
            foreign = sorted(set(roots) - allowed)
            if foreign:
                raise ValueError(
                    f"{path.name}, line {node.lineno} imports {', '.join(foreign)}: a kernel may import torch, "
                    "triton, the standard library and its own modules"
                )
            seen.update(roots)
    return ", ".join(sorted(seen))


def _check_local_load(folder: Path, variant: Path) -> str:
    module = require("kernels", extra="kernels").get_local_kernel(folder)
    wanted = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
    public = getattr(module, "__all__", None)
    if not public:
        raise ValueError("the module has no __all__, which names its public functions")
    missing = [name for name in public if not hasattr(module, name)]
    if missing:
        raise ValueError(f"__all__ names {', '.join(missing)}, which the module lacks")
    if not module.__name__.startswith(wanted):
        raise ValueError(f"loaded as {module.__name__!r}, expected the id {wanted!r}")
    return f"{module.__name__}: {', '.join(public)}"


# Only site-packages are on the path of an isolated interpreter; an editable hf_ext there is refused by the finder.
_BARE_LOAD = """
import importlib.util, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "hf_ext" or name.startswith("hf_ext."):
            raise ImportError(f"{name} is not available to a kernel")

sys.meta_path.insert(0, Refuse())
spec = importlib.util.spec_from_file_location("_bare_kernel", sys.argv[1] + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules["_bare_kernel"] = module
spec.loader.exec_module(module)
assert not any(name.partition(".")[0] == "hf_ext" for name in sys.modules)
print(*module.__all__)
"""


def _check_bare_load(variant: Path) -> str:
    with tempfile.TemporaryDirectory() as elsewhere:
        result = subprocess.run(
            [sys.executable, "-I", "-c", _BARE_LOAD, str(variant)],
            cwd=elsewhere,
            capture_output=True,
            text=True,
            timeout=300,
        )
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ImportError(last[0])
    return "loads in an isolated interpreter"


# --- ahead of time ---------------------------------------------------------------------------------------------------


def check_target(name: str) -> str:
    """``name`` if it is a known target.

    Raises:
        ValueError: It is not; the message lists them.
    """
    if name not in TARGETS:
        raise ValueError(f"target is {name!r}; known targets: {', '.join(TARGETS)}")
    return name


def is_for(config: dict[str, Any], target: str) -> bool:
    """Whether a configuration ships for a target. Targets beyond the default ones are an extra and never excluded."""
    return target not in DEFAULT_TARGETS or target in config.get("targets", DEFAULT_TARGETS)


def aot_configs(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The configurations that a kernel repository asks to be compiled: what its ``aot.aot_configs()`` returns.

    Raises:
        FileNotFoundError: The folder is no kernel repository, or has no aot.py.
        ImportError: Triton is not installed.
        RuntimeError: Triton's interpreter is on, which cannot compile.
    """
    _require_compiler()
    variant = Path(folder).resolve() / "build" / "torch-universal"
    module = import_kernel_folder(Path(folder))
    if not (variant / "aot.py").is_file():
        raise FileNotFoundError(f"{folder} has no build/torch-universal/aot.py, which lists what to compile")
    # Not importlib.import_module: another copy of the same kernel may hold the name.
    name = f"{module.__name__}.aot"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(module.__file__).parent / "aot.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name].aot_configs()


def _require_compiler() -> None:
    if not is_installed("triton"):
        require("triton", extra="kernels")
    if interpreter_enabled():
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter cannot compile; unset it")


def compile_config(config: dict[str, Any], target: str) -> CompileReport:
    """Compile one configuration for one target, without a device.

    Args:
        config: as `aot_configs` gives them.
        target: a key of ``TARGETS``.

    Returns:
        The report. ``ok`` is False if the compiler fails, if a register was spilled to memory, or if there is more
        shared memory than the target, or our own bound of 99 KiB, allows.

    Raises:
        ValueError: Unknown target, or one that the configuration is not made for.
    """
    check_target(target)
    if not is_for(config, target):
        raise ValueError(f"{config['name']} is made for {', '.join(config['targets'])}, not for {target}")
    _require_compiler()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, where = config["kernel"], TARGETS[target]
    names = list(kernel.arg_names)
    constants = config["constexprs"]
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else config["signature"][name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in config["divisible"]},
    )
    options = {"num_warps": config["num_warps"], "num_stages": config["num_stages"], **config.get("options", {})}
    start = time.perf_counter()
    try:
        compiled = triton.compile(
            source, target=GPUTarget(where.backend, where.arch, where.warp_size), options=options
        )
    except Exception as error:  # of any kind: each pass and assembler raises its own
        seconds = round(time.perf_counter() - start, 2)
        message = str(error).strip().splitlines() or ["no message"]
        problems = (f"does not compile: {type(error).__name__}: {message[0]}",)
        return CompileReport(config["name"], target, 0, 0, 0, 0, {}, seconds, problems, triton.__version__, "", b"")
    seconds = time.perf_counter() - start
    if where.backend == "cuda":
        text, binary = compiled.asm["ptx"], compiled.asm["cubin"]
        registers, spilled = _nvidia_usage(binary)
        sgpr_spills = 0
    else:
        text, binary = compiled.asm["amdgcn"], compiled.asm["hsaco"]
        registers, spilled, sgpr_spills = _amd_usage(text)
    shared = int(compiled.metadata.shared)
    problems = []
    if spilled:
        problems.append(f"{spilled} bytes spilled")
    if sgpr_spills > SGPR_SPILL_LIMIT:
        problems.append(f"{sgpr_spills} scalar registers spilled, at most {SGPR_SPILL_LIMIT}")
    limit = min(where.shared_limit, OWN_SHARED_LIMIT)
    if shared > limit:
        problems.append(f"{shared / KIB:.1f} KiB of shared memory, at most {limit // KIB}")
    return CompileReport(
        name=config["name"],
        target=target,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=shared,
        sgpr_spills=sgpr_spills,
        matrix_instructions=_matrix_instructions(text),
        seconds=round(seconds, 2),
        problems=tuple(problems),
        triton=triton.__version__,
        text=text,
        binary=binary,
    )


def nvidia_tool(name: str) -> Path:
    """A binary utility that comes inside triton: "cuobjdump" or "nvdisasm".

    Raises:
        FileNotFoundError: This build of triton has none.
    """
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise FileNotFoundError(f"triton {triton.__version__} has no {name} at {path}")
    return path


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread: ptxas spills to the stack, and nothing else of ours lives there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(nvidia_tool("cuobjdump")), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    if not usage:
        raise RuntimeError(f"cuobjdump printed no resource usage: {printed!r}")
    return int(usage[1]), int(usage[2])


def _amd_usage(text: str) -> tuple[int, int, int]:
    """Vector registers, bytes of scratch memory and spilled scalar registers from the assembler's metadata."""

    def value(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        if not found:
            raise RuntimeError(f"the AMD assembler has no .{key}")
        return int(found[1])

    spilled = max(value("private_segment_fixed_size"), 4 * value("vgpr_spill_count"))
    return value("vgpr_count"), spilled, value("sgpr_spill_count")


def _matrix_instructions(text: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in re.findall(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma|v_smfmac)[\w.:]*", text):
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))
