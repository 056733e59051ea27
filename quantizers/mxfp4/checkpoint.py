"""From a dense checkpoint on disk to a packed one, tensor by tensor, without ever holding the model.

Work happens in ``DST.partial``. A shard appears there under its name only when it is whole, so that a killed run goes
on where it stopped, and the folder is renamed to ``DST`` when everything is in it.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import fcntl
except ImportError:  # Windows, where two runs are told apart by nothing
    fcntl = None

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging

import hf_ext
from hf_ext.runlog import write_json, write_text

from . import numerics, reference
from .calibration import collect_channel_stats, token_batches
from .card import model_card
from .configuration import MXFP4Config, check_module_pattern
from .export import check_exportable, compressed_tensors_config, dense_linears
from .linear import pack_weight
from .plan import Item, make_plan, split_into_shards
from .quantizer import MXFP4HfQuantizer, load_channel_stats, stats_keys
from .source import Source, digest, meta_model, open_source, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["FORMATS", "LayerReport", "Report", "quantize_checkpoint", "relative_error"]

FORMATS = ("mxfp4", "compressed-tensors")
CHANNEL_STATS = "channel_stats.safetensors"
_SPARE_BYTES = 2**20  # for configuration, card and index

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class LayerReport:
    """One packed tensor: its size and what the rounding did to it."""

    name: str
    numel: int
    dense_bytes: int
    packed_bytes: int
    squared_error: float
    squared_norm: float

    @property
    def kind(self) -> str:
        """The name with its numbers replaced by ``*``: what layers of all depths share."""
        return re.sub(r"(?<=\.)\d+(?=\.)", "*", self.name)


@dataclass(frozen=True)
class Report:
    """What `quantize_checkpoint` did.

    Attributes:
        path: the finished folder.
        format: its layout.
        config: as stored, the skipped modules and the search resolved.
        layers: every packed tensor.
        dense_values, dense_bytes: of the tensors that stay dense.
        dropped: keys of the source that the model does not use, or that repeat a tied weight.
        shards, resumed: how many files of weights there are, and how many an earlier run had finished.
        seconds: of this run.
    """

    path: Path
    format: str
    config: MXFP4Config
    layers: list[LayerReport]
    dense_values: int
    dense_bytes: int
    dropped: list[str] = field(default_factory=list)
    shards: int = 1
    resumed: int = 0
    seconds: float = 0.0

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a weight in the packed layers."""
        return 8 * sum(layer.packed_bytes for layer in self.layers) / sum(layer.numel for layer in self.layers)

    @property
    def total_bits_per_weight(self) -> float:
        """Stored bits a weight in the whole checkpoint."""
        stored = sum(layer.packed_bytes for layer in self.layers) + self.dense_bytes
        return 8 * stored / (sum(layer.numel for layer in self.layers) + self.dense_values)

    @property
    def relative_error(self) -> float:
        """``|W - W^| / |W|`` over all packed weights."""
        return relative_error(self.layers)

    def by_kind(self) -> dict[str, list[LayerReport]]:
        """Layers grouped by `LayerReport.kind`, in the order of the checkpoint."""
        groups: dict[str, list[LayerReport]] = {}
        for layer in self.layers:
            groups.setdefault(layer.kind, []).append(layer)
        return groups


def relative_error(layers: list[LayerReport]) -> float:
    """``|W - W^| / |W|`` over the weights of some layers."""
    norm = sum(layer.squared_norm for layer in layers)
    return (sum(layer.squared_error for layer in layers) / norm) ** 0.5 if norm else 0.0


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    config: MXFP4Config | None = None,
    *,
    calibration: Any = None,
    calibration_windows: int | None = None,
    tokenizer: Any = None,
    skip: list[str] | tuple[str, ...] = (),
    format: str = "mxfp4",
    gguf_file: str | None = None,
    dtype: torch.dtype | str | None = None,
    base_model: str | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Write a packed checkpoint that loads as ``from_pretrained(src, quantization_config=config)`` does.

    At most one dense weight and one shard of output are in memory (with a calibration, or from GGUF, the dense model
    is in memory first). A run that was killed is resumed by the same call; whether it is the same is told by a hash of
    the source's files, the configuration, the format and the calibration.

    Args:
        src: a folder with safetensors (one file or sharded), or the id of a model on the Hub.
        dst: the folder to make; must not exist, or be empty, unless ``overwrite``.
        config: default `MXFP4Config()`; not modified.
        calibration: text, dataset rows or token ids, see `calibration.token_batches`; weighs the search by the inputs.
        calibration_windows: how many windows of 512 tokens to take of it; default 2.
        tokenizer: for text; default the source's own.
        skip: modules to leave dense besides those of ``config.modules_to_not_convert`` (or its defaults).
        format: ``"mxfp4"``, or ``"compressed-tensors"`` for other readers (block 32 without macro blocks only).
        gguf_file: name of a GGUF file in ``src`` to read instead of safetensors.
        dtype: to load the source in, as for `from_pretrained`: what stays dense is stored in it.
        base_model: repository of the dense model for the card; default ``src`` if it is on the Hub.
        overwrite: replace ``dst`` when the new checkpoint is complete, and discard the remains of other runs.
        max_shard_size: bytes, or ``"5GB"``.
        progress: called as ``progress(done, total, name)`` in dense bytes, after each tensor.

    Raises:
        FileExistsError: ``dst`` is not empty, or ``DST.partial`` is of a run with other arguments.
        RuntimeError: another process is writing ``DST.partial``.
        FileNotFoundError: ``src`` does not exist.
        ValueError: ``src`` is not a dense transformers checkpoint, a weight is not finite (it is named), or the
            configuration does not fit the model or the format.
        OSError: a file of ``src`` is damaged, or there is no space left.
    """
    start = time.monotonic()
    config = MXFP4Config() if config is None else config
    _check_arguments(config, format, calibration)
    shard_bytes = _shard_bytes(max_shard_size)
    # A link is followed, so that the folder that it names is made or replaced, and not the link.
    dst = Path(os.path.realpath(dst) if os.path.islink(dst) else os.path.abspath(dst))
    _check_destination(src, dst, overwrite)

    source = open_source(src, gguf_file=gguf_file, dtype=dtype)
    model = meta_model(source)
    quantizer = MXFP4HfQuantizer(config, pre_quantized=False)
    if skip:
        _add_skips(quantizer, model, list(skip))
    names = quantizer.plan(model)
    if format == "compressed-tensors":
        check_exportable(model, names, quantizer.quantization_config)
    batches = _calibration_batches(calibration, calibration_windows, tokenizer, source)
    given_stats = load_channel_stats(config.channel_stats) if config.channel_stats is not None else None
    if given_stats is not None:
        quantizer.channel_stats = given_stats
    if batches is None:
        quantizer.check_stats(model, names)  # before any work; a calibration's are checked when they are there
    expected = _stats_sizes(model, names)
    plan = make_plan(source, model, names, quantizer.quantization_config)
    if plan.missing:
        logger.warning(
            f"{len(plan.missing)} tensor(s) of the model are not in {source.name} and will be random when it is "
            f"loaded: {', '.join(plan.missing[:5])}"
        )
    shards = split_into_shards(plan.items, shard_bytes)

    fingerprint = digest(
        [
            hf_ext.__version__,
            source.identity,
            str(source.dtype),
            quantizer.quantization_config.to_dict() | {"channel_stats": None},
            format,
            [batch.tolist() for batch in batches] if batches is not None else None,
            _stats_digest(given_stats),
            {name: [item.name for item in items] for name, items in shards.items()},
        ]
    )
    workspace = _Workspace(dst, fingerprint, overwrite)
    workspace.check_space(
        sum(item.nbytes for name, items in shards.items() for item in items if not workspace.has(name))
    )
    with workspace.opened():
        if batches is not None:
            quantizer.channel_stats = workspace.channel_stats(lambda: _collect(source, batches, names))
            _check_collected(quantizer, expected)
        stored = _stored_config(quantizer)
        resumed = _write_shards(source, shards, quantizer, workspace, progress)
        layers = [layer for name in shards for layer in workspace.layers(name)]
        dense = [item for item in plan.items if not item.packed]
        report = Report(
            path=dst,
            format=format,
            config=stored,
            layers=layers,
            dense_values=sum(item.numel for item in dense),
            dense_bytes=sum(item.nbytes for item in dense),
            dropped=plan.dropped,
            shards=len(shards),
            resumed=resumed,
        )
        _write_companions(source, model, shards, workspace, report, base_model, quantizer)
        workspace.finish()
    return replace(report, seconds=time.monotonic() - start)


# ---------------------------------------------------------------------------------------------------------------------
# Before any work
# ---------------------------------------------------------------------------------------------------------------------


def _check_arguments(config: MXFP4Config, format: str, calibration: Any) -> None:
    if format not in FORMATS:
        raise ValueError(f"`format` must be one of {', '.join(map(repr, FORMATS))}; got {format!r}")
    if config.dequantize:
        raise ValueError(
            "`dequantize=True` is for loading packed checkpoints; it has no meaning in quantize_checkpoint"
        )
    if format == "compressed-tensors":
        check_exportable(None, [], config)
    if calibration is None:
        return
    if config.channel_stats is not None:
        raise ValueError("pass `calibration` or `config.channel_stats`, not both")
    if config.weight_search in ("static", "dynamic"):
        raise ValueError(
            f"`calibration` is only used by weight_search='auto' or 'weighted', got {config.weight_search!r}"
        )


def _shard_bytes(size: int | str) -> int:
    from transformers.utils.hub import convert_file_size_to_int

    try:
        number = convert_file_size_to_int(size)
    except (ValueError, TypeError, AttributeError):  # what it raises for anything but an int or a string
        number = 0
    if number < 1:
        raise ValueError(f"`max_shard_size` must be a number of bytes or like '5GB', got {size!r}")
    return number


def _check_destination(src: str | os.PathLike[str], dst: Path, overwrite: bool) -> None:
    if os.path.isdir(src):
        source, target = os.path.realpath(src), os.path.realpath(dst)
        if target == source or source.startswith(target + os.sep):
            raise ValueError(f"{dst} is, or contains, the source {src}; choose another folder")
    if dst.is_file():
        raise FileExistsError(f"{dst} is a file")
    if dst.is_dir() and any(dst.iterdir()) and not overwrite:
        raise FileExistsError(f"{dst} is not empty; choose another folder, or pass overwrite (--overwrite)")


def _calibration_batches(
    calibration: Any, windows: int | None, tokenizer: Any, source: Source
) -> list[torch.Tensor] | None:
    if calibration is None:
        return None
    if windows is not None and windows < 1:
        raise ValueError(f"`calibration_windows` must be at least 1, got {windows}")
    if tokenizer is None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf_file)
        except Exception:  # no tokenizer is no fault if the calibration is token ids; token_batches says so if not
            tokenizer = None
    return list(token_batches(calibration, tokenizer, windows=windows))


def _add_skips(quantizer: MXFP4HfQuantizer, model: "PreTrainedModel", skip: list[str]) -> None:
    config = quantizer.quantization_config
    modules = [name for name, _ in model.named_modules() if name]
    for entry in skip:
        check_module_pattern("skip", entry)
        if not entry or all(should_convert_module(name, [entry]) for name in modules):
            raise ValueError(f"`skip` names no module of {type(model).__name__}: {entry!r}")
    base = quantizer.get_modules_to_not_convert(model, config.modules_to_not_convert, model._keep_in_fp32_modules)
    config.modules_to_not_convert = sorted({*base, *skip})


def _stats_sizes(model: "PreTrainedModel", names: list[str]) -> dict[str, int]:
    return {key: size for name in names for key, size in stats_keys(name, model.get_submodule(name)).items()}


def _stats_digest(stats: dict[str, torch.Tensor] | None) -> str | None:
    if stats is None:
        return None
    return digest({name: tensor.to(torch.float32).tolist() for name, tensor in stats.items()})


def _collect(source: Source, batches: list[torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    model = source.model
    if model is None:
        with quiet():
            model = source.model_class.from_pretrained(source.folder, dtype=source.dtype)
    return collect_channel_stats(model, batches, modules=names)


def _check_collected(quantizer: MXFP4HfQuantizer, expected: dict[str, int]) -> None:
    missing = [key for key in expected if key not in quantizer.channel_stats]
    if missing:
        raise ValueError(
            f"the calibration reached {len(expected) - len(missing)} of {len(expected)} weights, not {missing[0]} for "
            "example; pass more text (--calibration-windows)"
        )


def _stored_config(quantizer: MXFP4HfQuantizer) -> MXFP4Config:
    config = quantizer.quantization_config
    search = config.resolve_search(bool(quantizer.channel_stats))
    # The file of statistics is a path of this machine, which means nothing to a reader of the checkpoint.
    return MXFP4Config(**config.__dict__ | {"weight_search": _storable(config, search), "channel_stats": None})


def _storable(config: MXFP4Config, search: str) -> str:
    has_choice = config.macro_block_size is not None or config.search_exponents or config.scale_rule == "mse"
    return search if has_choice else config.weight_search


# ---------------------------------------------------------------------------------------------------------------------
# The folder that is being made
# ---------------------------------------------------------------------------------------------------------------------


class _Workspace:
    """``DST.partial``: what is finished in it, and its renaming to ``DST``.

    ``.quantize/state.json`` in it says which run it is of; ``.quantize/SHARD.json`` keeps the report of a shard.
    """

    def __init__(self, dst: Path, fingerprint: str, overwrite: bool):
        self.dst = dst
        self.folder = dst.with_name(dst.name + ".partial")
        self.private = self.folder / ".quantize"
        self.fingerprint = fingerprint
        self.overwrite = overwrite
        if not self.folder.exists():
            return
        with self._alone():
            if self._found() == fingerprint:
                return
            if not overwrite:
                raise FileExistsError(
                    f"{self.folder} holds an unfinished run with another source, configuration, format or "
                    "calibration; finish that one, remove the folder, or pass overwrite (--overwrite)"
                )
            _remove(self.folder)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder against other processes, whose shards would get among ours; freed when a process dies."""
        descriptor = os.open(self.folder, os.O_RDONLY) if fcntl is not None else None
        try:
            if descriptor is not None:
                with contextlib.suppress(OSError):  # a file system without locks
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        message = f"{self.folder} is being written by another process; wait, or choose another folder"
                        raise RuntimeError(message) from None
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _found(self) -> str | None:
        try:
            return json.loads((self.private / "state.json").read_text(encoding="utf-8"))["fingerprint"]
        except (OSError, ValueError, KeyError):
            return None

    def has(self, shard: str) -> bool:
        """Whether an earlier run finished a shard."""
        return (self.folder / shard).is_file() and (self.private / f"{shard}.json").is_file()

    def check_space(self, needed: int) -> None:
        """Raise OSError unless the disk has room for ``needed`` bytes."""
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if free < needed + _SPARE_BYTES:
            raise OSError(
                errno.ENOSPC,
                f"not enough space for {self.dst}: {_mib(needed + _SPARE_BYTES)} needed, {_mib(free)} free",
            )

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder, and say clearly when the disk is full."""
        try:
            self.private.mkdir(parents=True, exist_ok=True)
            with self._alone():
                write_json(self.private / "state.json", {"fingerprint": self.fingerprint})
                yield
        except (OSError, SafetensorError) as error:
            if getattr(error, "errno", None) != errno.ENOSPC and f"os error {errno.ENOSPC}" not in str(error):
                raise
            for leftover in self.folder.glob(".*.tmp"):
                leftover.unlink()
            raise OSError(
                errno.ENOSPC,
                f"no space left while writing {self.folder}; free some and run the same command again, which goes on "
                "from the last finished shard",
            ) from error

    def write_tensors(self, name: str, tensors: dict[str, torch.Tensor], layers: list[LayerReport]) -> None:
        """Write a shard; it appears under its name only when it is whole and on the disk."""
        write_json(self.private / f"{name}.json", [asdict(layer) for layer in layers])
        _write_safetensors(self.folder / name, tensors)

    def layers(self, shard: str) -> list[LayerReport]:
        """The report of a finished shard."""
        rows = json.loads((self.private / f"{shard}.json").read_text(encoding="utf-8"))
        return [LayerReport(**row) for row in rows]

    def channel_stats(self, collect: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The statistics of an earlier run, else those of ``collect()``, which are kept."""
        path = self.folder / CHANNEL_STATS
        if not path.exists():
            _write_safetensors(path, collect())
        return load_channel_stats(str(path))

    def finish(self) -> None:
        """Rename to ``DST``; an old ``DST`` goes aside first and is removed last."""
        old = self.dst.with_name(f".{self.dst.name}.{self.fingerprint}.old")  # a name that nobody else's folder has
        if self.dst.exists():
            if any(self.dst.iterdir()):
                if not self.overwrite:
                    raise FileExistsError(
                        f"{self.dst} was filled in the meantime; the finished checkpoint is in {self.folder}"
                    )
                if old.exists():
                    shutil.rmtree(old)
                self.dst.rename(old)
            else:
                self.dst.rmdir()
        self.folder.rename(self.dst)
        shutil.rmtree(self.dst / self.private.name)
        if old.exists():
            shutil.rmtree(old)


def _write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    save_file(tensors, temporary, metadata={"format": "pt"})
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(temporary, 0o666 & ~umask)  # safetensors makes files that only their owner can read
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


# ---------------------------------------------------------------------------------------------------------------------
# The work
# ---------------------------------------------------------------------------------------------------------------------


def _write_shards(
    source: Source,
    shards: dict[str, list[Item]],
    quantizer: MXFP4HfQuantizer,
    workspace: _Workspace,
    progress: Callable[[int, int, str], None] | None,
) -> int:
    """Write the shards that are not there yet; returns how many were."""
    total = sum(item.numel * item.dtype.itemsize for items in shards.values() for item in items)
    done = resumed = 0
    for name, items in shards.items():
        if workspace.has(name):
            resumed += 1
            done += sum(item.numel * item.dtype.itemsize for item in items)
            if progress is not None:
                progress(done, total, name)
            continue
        tensors: dict[str, torch.Tensor] = {}
        layers: list[LayerReport] = []
        for item in items:
            dense = source.read(item.key)
            if item.packed:
                layers.append(_pack(item, dense, quantizer, tensors))
            else:
                # Never a view of the source: it would keep the whole file mapped until the shard is written.
                tensors[item.name] = dense.clone() if dense.dtype == item.dtype else dense.to(item.dtype)
            del dense
            done += item.numel * item.dtype.itemsize
            if progress is not None:
                progress(done, total, item.key)
        workspace.write_tensors(name, tensors, layers)
    return resumed


def _pack(
    item: Item, dense: torch.Tensor, quantizer: MXFP4HfQuantizer, tensors: dict[str, torch.Tensor]
) -> LayerReport:
    weight = dense.to(item.dtype)
    if item.transposed:
        weight = weight.t()
    config = quantizer.quantization_config
    try:
        packed = pack_weight(weight, config, quantizer.channel_stats.get(item.target.removesuffix(".weight")))
    except ValueError as error:
        raise ValueError(f"{item.key}: {error}") from error
    error, norm = _squared_error(weight, packed, config)
    for suffix, tensor in packed.items():
        tensors[f"{item.name}_{suffix}"] = tensor.contiguous()
    return LayerReport(item.name, item.numel, item.numel * item.dtype.itemsize, item.nbytes, error, norm)


def _squared_error(weight: torch.Tensor, packed: dict[str, torch.Tensor], config: MXFP4Config) -> tuple[float, float]:
    """``|W - W^|^2`` and ``|W|^2``, a tile of rows at a time."""
    weight = weight.flatten(0, -2)
    flat = {suffix: tensor.flatten(0, -2) for suffix, tensor in packed.items()}
    error = norm = 0.0
    for rows in reference.row_tiles(flat["packed"]):
        tile = {suffix: tensor[rows] for suffix, tensor in flat.items()}
        restored = numerics.dequantize_packed(
            tile["packed"],
            tile["scale"],
            tile.get("mbs"),
            block_size=config.block_size,
            macro_block_size=config.macro_block_size or 128,
        )
        dense = weight[rows].to(torch.float32)
        norm += dense.square().sum(dtype=torch.float64).item()
        error += restored.sub_(dense).square_().sum(dtype=torch.float64).item()
    return error, norm


def _write_companions(
    source: Source,
    model: "PreTrainedModel",
    shards: dict[str, list[Item]],
    workspace: _Workspace,
    report: Report,
    base_model: str | None,
    quantizer: MXFP4HfQuantizer,
) -> None:
    """Everything but the weights: index, configuration, tokenizer and its like, card."""
    folder = workspace.folder
    for path in source.side_files():
        (folder / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(source.folder / path, folder / path)
    if source.gguf_file is not None:
        _write_gguf_companions(source, folder)
    if len(shards) > 1:
        weight_map = {}
        for name, items in shards.items():
            for item in items:
                suffixes = ("_packed", "_scale", "_mbs") if item.packed else ("",)
                if report.config.macro_block_size is None:
                    suffixes = tuple(suffix for suffix in suffixes if suffix != "_mbs")
                weight_map |= {item.name + suffix: name for suffix in suffixes}
        total = sum(item.nbytes for items in shards.values() for item in items)
        values = sum(item.numel for items in shards.values() for item in items)
        index = {"metadata": {"total_parameters": values, "total_size": total}, "weight_map": weight_map}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")
    if report.format == "compressed-tensors":
        (folder / CHANNEL_STATS).unlink(missing_ok=True)  # other readers take every safetensors file for weights
    _write_config(model, source, folder, report)
    data = source.card_data()
    card = model_card(
        report.path.name,
        report.config,
        format=report.format,
        architecture=source.model_class.__name__,
        base_model=base_model or source.hub_id,
        source_data=data,
        bits_per_weight=report.bits_per_weight,
        total_bits_per_weight=report.total_bits_per_weight,
        relative_error=report.relative_error,
        calibrated=bool(quantizer.channel_stats),
    )
    write_text(folder / "README.md", card)


def _write_config(model: "PreTrainedModel", source: Source, folder: Path, report: Report) -> None:
    config = model.config
    config.architectures = [source.model_class.__name__]
    config.dtype = str(source.dtype).removeprefix("torch.")
    if report.format == "mxfp4":
        config.quantization_config = report.config
    config.save_pretrained(folder)
    if report.format == "compressed-tensors":
        path = folder / "config.json"
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw["quantization_config"] = compressed_tensors_config(report.config, dense_linears(model))
        write_json(path, raw)


def _write_gguf_companions(source: Source, folder: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf_file).save_pretrained(folder)
    GenerationConfig.from_model_config(source.config).save_pretrained(folder)
