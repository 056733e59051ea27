"""Merging saved adapters into one folder, layer by layer, without a base model."""

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_ext.extras import require
from hf_ext.runlog import write_json, write_text

from .card import is_repository, model_card
from .config import CtMConfig
from .report import CtMReport, LayerReport
from .saved import CONFIG, WEIGHTS, SavedAdapter, open_adapter
from .sources import check_weights, merge_layer, merged_config, natural_order, result_dtype

require("peft", extra="adapters")

__all__ = ["merge_adapter_folders"]

OWN_CONFIG = "ctm_config.json"
_Progress = Callable[[int, int, str], None]


def merge_adapter_folders(
    paths: Sequence[str | os.PathLike[str]],
    output_dir: str | os.PathLike[str],
    weights: Sequence[float] | None = None,
    config: CtMConfig | None = None,
    *,
    names: Sequence[str] | None = None,
    overwrite: bool = False,
    base_model: str | None = None,
    allow_different_bases: bool = False,
    workers: int | None = None,
    progress: _Progress | None = None,
    **kwargs: Any,
) -> CtMReport:
    """Merge saved LoRA adapters into a folder that peft loads and that servers of LoRA take.

    The base model is not needed. One layer of all adapters is in memory at a time, and the result. The folder appears
    when it is complete: `adapter_config.json`, `adapter_model.safetensors`, `ctm_config.json` and a card.

    Args:
        paths: folders as `PeftModel.save_pretrained` writes them, or repositories of the Hub (ORG/NAME, or
            ORG/NAME/FOLDER for an adapter inside one).
        output_dir: folder to make.
        weights: one number each; negative subtracts, 0 leaves an adapter out. None: `config.default_weights`.
        config: default `CtMConfig()`.
        names: what to call the adapters in the report and the card; default the folders' names.
        overwrite: replace an `output_dir` that an earlier merge made, once the new one is complete.
        base_model: what to call the base model in the result; default what the adapters call it.
        allow_different_bases: merge adapters whose configurations name different base models.
        workers: layers to merge at a time; default the number of processors if torch has one thread, else 1.
        progress: called as `progress(done, total, layer)` after each layer.
        **kwargs: fields of `CtMConfig` that differ from `config`.

    Returns:
        What was kept, per layer and adapter.

    Raises:
        FileNotFoundError: a folder, a repository or a file of it that is not there.
        FileExistsError: `output_dir` exists, and is not to be overwritten or not the result of a merge.
        OSError: a file that is damaged or cut short.
        ValueError: an adapter that is not plain LoRA, adapters that do not fit, weights that do not fit, entries that
            are not finite. Nothing is written then.

    Example:
        >>> merge_adapter_folders(["sql", "math"], "both", rank=16, combination_type="ties")
    """
    config = replace(config or CtMConfig(), **kwargs)
    if isinstance(paths, str | os.PathLike):
        raise ValueError(f"`paths` must be a list of folders, got {paths!r}")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError(f"`workers` must be an integer of at least 1 or None, got {workers!r}")
    # Where the output is a symbolic link the result goes to where it points, and the link stays.
    paths, title, output = list(paths), Path(os.path.abspath(output_dir)).name, Path(os.path.realpath(output_dir))
    names = _names(paths) if names is None else list(names)
    if len(names) != len(paths):
        raise ValueError(f"`names` has {len(names)} entries for {len(paths)} adapters")
    weights = check_weights(weights, names, config)
    _check_output(output, paths, overwrite)

    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_adapter(path, name)) for path, name in zip(paths, names)]
        live = [place for place, weight in enumerate(weights) if weight]
        sources = [files[place] for place in live]
        found_base = _base_model(sources, allow_different_bases)
        base_model = base_model or found_base
        layers = sorted({layer for source in sources for layer in source.layers}, key=natural_order)
        _check_overlap(sources)
        rank = config.rank or max(source.rank(layer) for source in sources for layer in source.layers)
        dtype = result_dtype(config, sources[0].name, sources[0].dtype())
        lora = merged_config([source.config for source in sources], layers, rank, base_model)
        copies = _saved_embeddings(sources)

        def merge(layer: str) -> tuple[torch.Tensor, torch.Tensor, LayerReport]:
            parts = [
                files[place].factors(layer, place, weights[place]) for place in live if layer in files[place].layers
            ]
            with torch.no_grad():
                return merge_layer(layer, parts, config, rank, dtype)

        report = CtMReport(config, names, weights, rank, output=str(output_dir))
        report.left_out = [name for name, weight in zip(names, weights) if not weight]
        tensors = dict(copies)
        for done, (layer, (a, b, figures)) in enumerate(zip(layers, _map(merge, layers, workers)), start=1):
            key_a, key_b = next(source.layers[layer] for source in sources if layer in source.layers)
            tensors[key_a], tensors[key_b] = a, b
            report.layers.append(figures)
            if progress is not None:
                progress(done, len(layers), layer)

    fields = {name: sorted(value) if isinstance(value, set) else value for name, value in lora.to_dict().items()}
    _check_output(output, paths, overwrite)  # it may have appeared meanwhile
    with _appearing(output) as folder:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        write_json(folder / OWN_CONFIG, config.to_dict())
        # A folder's own path says where it lies on somebody's disk.
        origins = [name if Path(path).is_dir() else str(path) for path, name in zip(paths, names)]
        write_text(folder / "README.md", model_card(title, report, base_model, origins, fields["task_type"]))
        # safetensors makes files that only their owner can read; servers often run as somebody else.
        (folder / WEIGHTS).chmod((folder / OWN_CONFIG).stat().st_mode)
        # The file by which a folder is known as an adapter comes last.
        write_json(folder / CONFIG, fields)
    if report.warning:
        warnings.warn(report.warning, stacklevel=2)
    return report


# --- what belongs together -----------------------------------------------------------------------------------------


def _names(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The folders' own names, longer where they would be the same."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for path in paths:
        same = [other for other in paths if _same_place(path, other)]
        if len(same) > 1:
            raise ValueError(f"adapter {path} is named twice; name it once, with the sum of its weights")
    length = 1
    while len({entry[-length:] for entry in parts}) < len(parts) and length < max(map(len, parts)):
        length += 1
    return ["/".join(entry[-length:]) for entry in parts]


def _same_place(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _base_model(sources: Sequence[SavedAdapter], allow: bool) -> str | None:
    """The base model's name: a repository's where one adapter has it, else the first that is named.

    A repository and a folder of the same last name are taken for one model, with a warning.

    Raises:
        ValueError: the adapters name different models.
    """
    found = [source.config.get("base_model_name_or_path") for source in sources]
    names = list(dict.fromkeys(name for name in found if name))
    repositories = [name for name in names if is_repository(name)]
    places = {os.path.realpath(name) for name in names if name not in repositories}
    last_parts = {name.rstrip("/").rsplit("/", 1)[-1].lower() for name in (*repositories, *places)}
    if max(len(repositories), len(places), len(last_parts)) > 1 and not allow:
        raise ValueError(
            f"adapters were trained on different base models: {', '.join(names)}; if these are the same, allow it "
            "(allow_different_bases=True, --allow-different-bases)"
        )
    if len(names) > 1:
        warnings.warn(f"the adapters call their base model differently: {', '.join(names)}", stacklevel=3)
    revisions = {source.config.get("revision") for source in sources}
    if len(revisions) > 1:
        listed = ", ".join(map(str, revisions))
        warnings.warn(f"the adapters name different revisions of their base model: {listed}", stacklevel=3)
    return (repositories or names or [None])[0]


def _check_overlap(sources: Sequence[SavedAdapter]) -> None:
    for source in sources:
        others = [other for other in sources if other is not source]
        if others and not any(source.layers.keys() & other.layers.keys() for other in others):
            warnings.warn(
                f"adapter {source.name!r} shares no layer with the others (one of its layers: "
                f"{next(iter(source.layers))}): is it of the same kind of model?",
                stacklevel=3,
            )


def _saved_embeddings(sources: Sequence[SavedAdapter]) -> dict[str, torch.Tensor]:
    """The base's own embeddings that peft saved beside factors of them, if all adapters agree about them.

    Raises:
        ValueError: they differ: the base model was resized or trained differently.
    """
    found: dict[str, tuple[str, torch.Tensor]] = {}
    for source in sources:
        for key in source.embeddings:
            tensor = source.read(key)
            first, known = found.setdefault(key, (source.name, tensor))
            if known is not tensor and (known.dtype != tensor.dtype or not torch.equal(known, tensor)):
                raise ValueError(
                    f"adapters {first!r} and {source.name!r} were saved with different base embeddings ({key}): their "
                    "base models differ, or were resized; save them with save_embedding_layers=False"
                )
    return {key: tensor.contiguous() for key, (_, tensor) in found.items()}


# --- work and output -----------------------------------------------------------------------------------------------


def _map(function: Callable[[str], Any], layers: Sequence[str], workers: int | None) -> Iterator[Any]:
    if workers is None:
        # With more threads torch splits the work within a layer itself.
        workers = _processors() if torch.get_num_threads() == 1 else 1
    if workers < 2:
        yield from map(function, layers)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(function, layers)
    finally:
        pool.shutdown(cancel_futures=True)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_output(output: Path, paths: Sequence[str | os.PathLike[str]], overwrite: bool) -> None:
    for path in paths:
        there = Path(os.path.realpath(path))
        if Path(path).is_dir() and (output == there or output in there.parents):
            raise ValueError(f"the output {output} is, or holds, the adapter {path}; name another folder")
    above = next(folder for folder in output.parents if folder.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"the output {output} cannot be made: {above} is no folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(f"the output {output} cannot be made: {above} is not writable")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    # A folder of a training run is an adapter too, and holds more than that.
    if not (output / OWN_CONFIG).is_file():
        raise FileExistsError(f"{output} exists and is not the result of a merge; name another folder")
    if not overwrite:
        raise FileExistsError(f"{output} exists already; overwrite it (overwrite=True, --overwrite) or name another")


@contextlib.contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """A folder that takes the place of `output` when the block has ended without an error.

    A kill leaves a hidden folder `.NAME.*.partial` beside it. Between the two renames that replace an old output, it
    leaves no output, and old and new in that folder, both whole.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename is atomic within one file system only.
    work = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}.", suffix=".partial"))
    try:
        new = work / "new"
        new.mkdir()
        yield new
        if output.exists():
            output.rename(work / "old")
        new.rename(output)
    finally:
        if (work / "old").exists() and not output.exists():
            (work / "old").rename(output)
        shutil.rmtree(work, ignore_errors=True)
