"""Patch a checkpoint on disk: the source's weights and side files in, a folder that loads without hf_ext out."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_ext.runlog import write_text

# What belongs beside the weights: tokenizer, chat template, processors, licence. The model writes its own settings.
_SIDE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_SIDE_NAMES = ("LICENSE", "NOTICE")
_WRITTEN = ("config.json", "generation_config.json", "adapter_config.json")
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")


@dataclass(frozen=True)
class Patched:
    """What was written.

    Attributes:
        path: The folder.
        parameters: Parameters of the base model.
        added: Parameters that the patch brought.
        model: The patched model.
    """

    path: Path
    parameters: int
    added: int
    model: Any


def write_patched(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    check: Callable[[dict[str, Any]], None],
    apply: Callable[[Any], Any],
    card: Callable[[str, Any], str],
    tags: list[str],
    dtype: str = "auto",
    base_model: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
) -> Patched:
    """Load a checkpoint, patch it, and write it with everything that belongs to it.

    Work happens in `DST.partial`, which takes the name `DST` when it is complete.

    Args:
        src: Folder with `config.json` and safetensors, or a model of the Hub.
        dst: Folder to make.
        check: Raises if it does not like the content of `config.json`; called before weights are read.
        apply: Patches the loaded model.
        card: (name of the folder, patched model) -> the body of the card.
        tags: Of the card.
        dtype: To load in, and so to write in; `"auto"` is the source's.
        base_model: Repository of the source, for the card; default `src` when that is one.
        max_shard_size: Largest file of weights.
        overwrite: Replace `dst` when the new folder is complete.

    Raises:
        FileNotFoundError: `src` does not exist.
        FileExistsError: `dst` is there.
        ValueError: Not a checkpoint that can be patched.
    """
    dst = Path(dst)
    blocking = [parent for parent in dst.parents if parent.is_file()]
    if blocking:
        raise ValueError(f"{dst} cannot be made: {blocking[0]} is a file; name another folder")
    if Path.cwd().is_relative_to(dst.resolve()):  # it would be replaced under the caller's feet
        raise ValueError(f"{dst} is the folder that you are in, or above it; name a folder to make")
    if dst.exists() and not overwrite and (not dst.is_dir() or any(dst.iterdir())):
        raise FileExistsError(f"{dst} exists; name another folder, or replace it with --overwrite (overwrite=True)")
    folder, hub_id = _locate(src)
    if dst.exists() and dst.resolve() == folder.resolve():
        raise ValueError(f"{dst} is the source itself; name another folder")
    check(_read_config(folder))

    import torch
    from transformers import AutoModelForCausalLM

    known = getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(known, torch.dtype) and known.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}; it must be a float type such as 'float32' or 'bfloat16', or 'auto'")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    before = _count(model)
    model = apply(model)
    partial = dst.with_name(dst.name + ".partial")
    if partial.exists():  # of a run that was killed
        shutil.rmtree(partial)
    partial.parent.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(partial, max_shard_size=max_shard_size)
    for path in _side_files(folder):
        (partial / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / path, partial / path)
    base_model = base_model or hub_id
    write_text(partial / "README.md", _front_matter(folder, tags, base_model) + card(dst.name, model))
    if dst.exists():
        old = dst.with_name(dst.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        dst.rename(old)
        partial.rename(dst)
        shutil.rmtree(old)
    else:
        partial.rename(dst)
    return Patched(dst, before, _count(model) - before, model)


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _locate(src: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """The source's folder, and its repository if it came from the Hub."""
    path, name = Path(src), str(src)
    if path.is_dir():
        return path, None
    if path.exists():
        raise ValueError(f"{path} is a file, not the folder of a checkpoint")
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise FileNotFoundError(f"{name} does not exist; pass a folder or the id of a model on the Hub (ORG/NAME)")
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in (*_SIDE_SUFFIXES, ".safetensors")]
    patterns += [f"{start}*" for start in _SIDE_NAMES] + ["README.md"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns)), name
    except Exception as error:  # the Hub client has a dozen kinds of failure; to the user they are one
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(f"{name} is neither a folder nor a model that the Hub gives: {reason}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a transformers checkpoint: it has no config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a model's configuration: it holds a {type(values).__name__}")
    return values


def _side_files(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name == "additional_chat_templates":
            found += [file.relative_to(folder) for file in sorted(path.glob("*.jinja"))]
        if path.name.startswith(".") or path.name in _WRITTEN or path.name.endswith(".index.json"):
            continue
        if path.is_file() and (path.suffix in _SIDE_SUFFIXES or path.name.startswith(_SIDE_NAMES)):
            found.append(path.relative_to(folder))
    return found


def _front_matter(folder: Path, tags: list[str], base_model: str | None) -> str:
    from huggingface_hub import ModelCard, ModelCardData

    try:
        theirs = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no card, or a foreign one with any fault in its YAML: nothing to carry over
        theirs = {}
    carried = {key: theirs[key] for key in _CARRIED if theirs.get(key)}
    carried.setdefault("pipeline_tag", "text-generation")
    if base_model is not None:
        carried |= {"base_model": base_model, "base_model_relation": "finetune"}
    return f"---\n{ModelCardData(library_name='transformers', tags=tags, **carried).to_yaml()}\n---\n\n"
