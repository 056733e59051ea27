"""Push model and kernel folders to the Hub: everything is checked before the first byte is sent.

Both functions validate the folder, work out exactly which files would be uploaded under which names, and stop there if
`dry_run` is set: no network, no token. Files that are hidden, `__pycache__` and half-written folders never travel.
"""

import glob
import json
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelCard

# What the tree's one `torch-universal` build becomes on the Hub: the `kernels` library has announced that universal
# builds will go.
BACKENDS = ("cuda", "rocm", "xpu", "cpu")
_UNIVERSAL = "build/torch-universal"
_ADAPTER = "adapter_config.json"
_CARD_HINTS = {"base_model": " (add `base_model: OWNER/NAME`, or quantise with --base-model OWNER/NAME)"}
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True)
class PublishPlan:
    """What was uploaded, or would be.

    Attributes:
        repo_id: `owner/name`; None in a dry run that named none.
        repo_type: `"model"` or `"kernel"`.
        files: Path in the repository -> size in bytes, sorted.
        branches: Branches that get the files.
        url: Address of the repository once it was pushed, else None.
    """

    repo_id: str | None
    repo_type: Literal["model", "kernel"]
    files: dict[str, int]
    branches: tuple[str, ...] = ("main",)
    url: str | None = None


def kind_of(folder: str | Path) -> Literal["model", "kernel"]:
    """Tell a model's or adapter's folder (`config.json`, `adapter_config.json`) from a kernel's (`build.toml`).

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It is neither.
    """
    folder = _existing(folder)
    if (folder / "config.json").is_file() or (folder / _ADAPTER).is_file():
        return "model"
    if (folder / "build.toml").is_file() or (folder / _UNIVERSAL).is_dir():
        return "kernel"
    raise ValueError(f"{folder} is neither a model folder (no config.json) nor a kernel folder (no build.toml)")


def publish_model(
    folder: str | Path,
    repo_id: str | None = None,
    *,
    dry_run: bool = False,
    private: bool = False,
    token: str | None = None,
    api: "HfApi | None" = None,
) -> PublishPlan:
    """Validate a model folder and push it.

    Checked: `config.json`; every safetensors file whole and, with an index, exactly the tensors that the index lists;
    of a quantised model, that each `*_packed` tensor has its `*_scale` (and `*_mbs` where the configuration has macro
    blocks); no pickled weights; a `README.md` whose metadata has `library_name` and `tags`, and `base_model` when the
    model is quantised. A folder of a PEFT adapter is checked in the same way, by its `adapter_config.json`.

    Args:
        folder: The folder, as `save_pretrained` or `hf-ext quantize` wrote it.
        repo_id: `owner/name`. It may be left out in a dry run.
        dry_run: Validate and list only.
        private: Make the repository private if it does not exist yet.
        token: Token to use instead of the one that `hf auth login` or `HF_TOKEN` gives.
        api: Client to use instead of a new `HfApi`.

    Raises:
        FileNotFoundError: The folder or a file that it needs is missing.
        ValueError: Something in the folder is wrong (all that is, in one message), or the repository's name is.
        RuntimeError: Offline, no token, or the Hub refused.
    """
    folder = _existing(folder)
    problems = _model_problems(folder)
    if problems:
        raise ValueError(f"{folder} cannot be published: {'; '.join(problems)}")
    plan = PublishPlan(_checked_repo_id(repo_id, dry_run), "model", _sizes(folder))
    return plan if dry_run else _push(plan, folder, private=private, token=token, api=api)


def publish_kernel(
    folder: str | Path,
    repo_id: str | None = None,
    *,
    dry_run: bool = False,
    private: bool = False,
    token: str | None = None,
    api: "HfApi | None" = None,
) -> PublishPlan:
    """Validate a kernel folder, write its build out once per backend, and push it to a repository of type kernel.

    `build/torch-universal` is uploaded as `build/torch-cuda`, `-rocm`, `-xpu` and `-cpu`, each with its backend in
    `metadata.json`, to `main` and to the branch `v<version>` that `kernels.get_kernel(..., version=N)` reads. Builds
    of an earlier push are replaced. `hf_ext.kernel_tools.check_kernel` validates; it needs the extra `kernels`.

    Args:
        folder: The kernel folder, for example `kernels/mxfp4_gemm`.
        repo_id: `owner/name`. Default: `repo-id` of `build.toml`.
        dry_run, private, token, api: See `publish_model`.

    Raises:
        FileNotFoundError: The folder or a file that it needs is missing.
        ValueError: Something in the folder is wrong (all that is, in one message), or the repository's name is.
        RuntimeError: Offline, no token, or the Hub refused.
    """
    folder = _existing(folder)
    problems = _kernel_problems(folder)
    if problems:
        raise ValueError(f"{folder} cannot be published: {'; '.join(problems)}")
    general = tomllib.loads((folder / "build.toml").read_text(encoding="utf-8"))["general"]
    repo_id = _checked_repo_id(repo_id or general.get("hub", {}).get("repo-id"), dry_run)
    with tempfile.TemporaryDirectory(prefix="hf-ext-publish-") as temporary:
        staged = Path(temporary)
        write_kernel_variants(folder, staged)
        plan = PublishPlan(repo_id, "kernel", _sizes(staged), ("main", f"v{general['version']}"))
        if dry_run:
            return plan
        return _push(plan, staged, private=private, token=token, api=api, delete="build/*")


def write_kernel_variants(folder: str | Path, out: str | Path) -> None:
    """Copy a kernel folder in the form in which it goes to the Hub: one build per backend, none universal.

    Args:
        folder: The kernel folder.
        out: Folder to fill; made if need be.
    """
    folder, out = Path(folder), Path(out)
    for name in _sizes(folder):
        inner = name.removeprefix(_UNIVERSAL + "/")
        targets = [name] if inner == name else [f"build/torch-{backend}/{inner}" for backend in BACKENDS]
        for target in targets:
            (out / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, out / target)
    for backend in BACKENDS:
        file = out / f"build/torch-{backend}/metadata.json"
        metadata = json.loads(file.read_text(encoding="utf-8"))
        metadata["backend"] = {"type": backend}
        file.write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


# --- what is checked -----------------------------------------------------------------------------------------------


def _model_problems(folder: Path) -> list[str]:
    problems: list[str] = []
    if folder.name.endswith(".partial"):
        problems.append("it is the working folder of an unfinished hf-ext quantize (run the same command again)")
    # A folder with both is a model that carries an adapter.
    adapter = (folder / _ADAPTER).is_file() and not (folder / "config.json").is_file()
    config = _json(folder / (_ADAPTER if adapter else "config.json"), problems)
    pickles = [name for name in _sizes(folder) if name.endswith(_PICKLES)]
    if pickles:
        problems.append(f"pickled files are not published ({', '.join(pickles)}): keep safetensors only")
    tensors = _tensor_names(folder, problems)
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        problems.append("quantization_config in config.json is not a table of fields")
        quantization = {}
    if tensors is not None:
        problems += _packing_problems(tensors, quantization)
    problems += _card_problems(
        folder, {"library_name", "tags"} | ({"base_model"} if quantization or adapter else set())
    )
    return problems


def _tensor_names(folder: Path, problems: list[str]) -> set[str] | None:
    """Names of all tensors, or None when the files are not whole (which is then among the problems)."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        problems.append("it has no *.safetensors file")
        return None
    found: dict[str, str] = {}
    before = len(problems)
    for file in files:
        try:
            # Opening checks the header, and that the file is as long as the header says.
            with safe_open(file, "numpy") as opened:
                for name in opened.keys():
                    if name in found:
                        problems.append(f"tensor {name} is in both {found[name]} and {file.name}")
                    found[name] = file.name
        except (SafetensorError, OSError) as error:
            problems.append(f"{file.name} is not a whole safetensors file ({error})")
    if len(problems) > before:
        return None
    for index in sorted(folder.glob("*.safetensors.index.json")):
        listed = _json(index, problems).get("weight_map", {})
        for name, file in listed.items():
            if found.get(name) != file:
                problems.append(f"{index.name} puts tensor {name} in {file}, where it is not")
        extra = sorted(set(found) - set(listed))
        if extra:
            problems.append(f"{index.name} does not list {len(extra)} tensor(s), such as {extra[0]}")
    if len(files) > 1 and not list(folder.glob("*.safetensors.index.json")):
        problems.append(f"{len(files)} safetensors files and no model.safetensors.index.json")
    return set(found)


def _packing_problems(tensors: set[str], quantization: Mapping[str, Any] | None) -> list[str]:
    packed = {name.removesuffix("_packed") for name in tensors if name.endswith("_packed")}
    ours = str((quantization or {}).get("quant_method", "")).startswith("hf_ext_")
    problems = []
    if packed and quantization is None:
        problems.append("it has *_packed tensors and no quantization_config in config.json")
    if ours and not packed:
        problems.append(f"quant_method is {quantization['quant_method']} and no tensor is packed")
    needed = ["_scale"]
    if ours and quantization.get("macro_block_size") is not None:
        needed.append("_mbs")
    for suffix in needed:
        missing = sorted(name + suffix for name in packed if name + suffix not in tensors)
        if missing:
            problems.append(f"{len(missing)} packed tensor(s) lack their {suffix[1:]}: {', '.join(missing[:3])}")
    if ours:
        orphans = sorted(
            name
            for suffix in ("_scale", "_mbs")
            for name in tensors
            if name.endswith(suffix) and name.removesuffix(suffix) not in packed
        )
        if orphans:
            problems.append(f"{len(orphans)} scale(s) lack their packed tensor: {', '.join(orphans[:3])}")
    return problems


def _card_problems(folder: Path, required: set[str]) -> list[str]:
    card = folder / "README.md"
    if not card.is_file():
        return ["it has no README.md (the card; `hf-ext quantize` writes one)"]
    data = _card(card)
    if data is None:
        return ["README.md does not begin with YAML metadata between two lines of ---"]
    fields = data.data.to_dict()
    problems = [
        f"README.md lacks {name} in its metadata{_CARD_HINTS.get(name, '')}"
        for name in sorted(required)
        if not fields.get(name)
    ]
    bases = fields.get("base_model") or []
    for base in [bases] if isinstance(bases, str) else bases:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(base)):
            problems.append(f"base_model in README.md is {base!r}, which is not a repository of the Hub")
    return problems


def _card(path: Path) -> "ModelCard | None":
    from huggingface_hub import ModelCard

    text = path.read_text(encoding="utf-8")
    if not text.startswith("---"):
        return None
    try:
        return ModelCard(text, ignore_metadata_errors=False)
    except Exception:  # yaml's own errors and the library's: either way there is no metadata to be had
        return None


def _kernel_problems(folder: Path) -> list[str]:
    from hf_ext.kernel_tools import check_kernel

    return [f"{finding.name}: {finding.detail}" for finding in check_kernel(folder) if not finding.ok]


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        problems.append(f"{path.name} is missing")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        problems.append(f"{path.name} is not JSON ({error})")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a JSON object")
        return {}
    return value


def _existing(folder: str | Path) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; name a model or kernel folder")
    return folder


def _sizes(folder: Path) -> dict[str, int]:
    """The files that travel: path within the folder -> bytes."""
    found = {}
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            found["/".join(parts)] = file.stat().st_size
    return found


# --- the push ------------------------------------------------------------------------------------------------------


def _checked_repo_id(repo_id: str | None, dry_run: bool) -> str | None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repo_id is None:
        if dry_run:
            return None
        raise ValueError("repo_id is missing: name the repository to push to, OWNER/NAME (--repo-id)")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"repo_id is {repo_id!r}, which the Hub does not take: {error}") from None
    if "/" not in repo_id:
        raise ValueError(f"repo_id is {repo_id!r}; it must name its owner too: OWNER/{repo_id}")
    return repo_id


def _push(
    plan: PublishPlan,
    folder: Path,
    *,
    private: bool,
    token: str | None,
    api: "HfApi | None",
    delete: str | None = None,
) -> PublishPlan:
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if api is None:
        if constants.HF_HUB_OFFLINE:
            raise RuntimeError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or use --dry-run")
        if not (token or get_token()):
            raise RuntimeError("no token of the Hub: run `hf auth login`, or set HF_TOKEN to one that may write")
        api = HfApi(token=token, library_name="hf-ext")
    try:
        url = api.create_repo(plan.repo_id, repo_type=plan.repo_type, private=private or None, exist_ok=True)
        for branch in plan.branches:
            if branch != "main":
                api.create_branch(plan.repo_id, branch=branch, repo_type=plan.repo_type, exist_ok=True)
            api.upload_folder(
                repo_id=plan.repo_id,
                repo_type=plan.repo_type,
                folder_path=folder,
                revision=branch,
                # Exactly the files of the plan: names are patterns to this call.
                allow_patterns=[glob.escape(name) for name in plan.files],
                delete_patterns=delete,
                commit_message="Upload with hf-ext publish",
            )
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        hint = "; the token may not write there" if status in (401, 403) else ""
        raise RuntimeError(f"the Hub refused the push to {plan.repo_id}{hint}: {error}") from error
    # The HTTP client's own errors (no connection, time-out) are no OSError in every version of it.
    except (OSError, *HfHubHTTPError.__bases__) as error:
        raise RuntimeError(f"the push to {plan.repo_id} failed: {error}") from error
    return PublishPlan(plan.repo_id, plan.repo_type, plan.files, plan.branches, str(url))
