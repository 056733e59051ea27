"""Which tensors a packed checkpoint is made of, and from which tensors of the dense one.

The names of a checkpoint are not always those of the model: transformers renames and merges while it loads. A packed
checkpoint keeps the names of the dense one, so that the same conversions load it, and this module asks transformers'
own renaming where each tensor goes, before and after.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from .configuration import MXFP4Config
from .experts import fused_names
from .linear import packed_shapes
from .loading import is_transposed
from .quantizer import MXFP4HfQuantizer, linear_shape, replace_layer
from .source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Item", "Plan", "Renaming", "make_plan", "split_into_shards", "weights_of"]


@dataclass(frozen=True)
class Item:
    """One tensor of the dense checkpoint and what becomes of it."""

    key: str  # in the dense checkpoint
    target: str  # the parameter of the model that it is, or is a part of
    name: str  # in the packed checkpoint; packed tensors append their suffixes
    shape: tuple[int, ...]  # dense, as stored
    dtype: torch.dtype  # to cast to first
    packed: bool
    transposed: bool  # stored [in, out]; packed as [out, in]
    nbytes: int  # in the packed checkpoint

    @property
    def numel(self) -> int:
        """How many values the dense tensor has."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def rows_by_columns(self) -> tuple[int, ...]:
        """The shape with the inputs last."""
        return self.shape[::-1] if self.transposed else self.shape


@dataclass(frozen=True)
class Plan:
    """What to write."""

    items: list[Item]
    dropped: list[str]  # keys of the dense checkpoint that the model does not use, or that repeat a tied weight
    missing: list[str]  # dense parameters of the model that the checkpoint lacks


class Renaming:
    """Where transformers puts the keys of a checkpoint in one model."""

    def __init__(self, model: "PreTrainedModel", quantizer: MXFP4HfQuantizer | None = None):
        from transformers.conversion_mapping import get_model_conversion_mapping

        mapping = get_model_conversion_mapping(model, None, quantizer)
        self.renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.by_pattern = {pattern: entry for entry in self.converters for pattern in entry.source_patterns}
        self.prefix = model.base_model_prefix
        self.state = model.state_dict()

    def __call__(self, key: str) -> tuple[str | None, WeightConverter | None]:
        """The parameter that ``key`` goes to (None: nowhere), and what converts it on the way, if anything."""
        target, pattern = rename_source_key(key, self.renamings, self.converters, self.prefix, self.state)
        if target not in self.state and key in self.state:
            target, pattern = rename_source_key(key, [], [], self.prefix, self.state)
        if target not in self.state:
            return None, None
        return target, None if pattern is None else self.by_pattern[pattern]

    def only_prefix(self, key: str, target: str) -> bool:
        """Whether two names differ by the base model's prefix only."""
        return target == f"{self.prefix}.{key}" or key == f"{self.prefix}.{target}"


def make_plan(source: Source, model: "PreTrainedModel", names: list[str], config: MXFP4Config) -> Plan:
    """Decide for each tensor of a dense checkpoint under which name, and in which form, it is written.

    Args:
        source: the dense checkpoint.
        model: its model on the meta device; its layers ``names`` are replaced by packed ones.
        names: modules to pack, see `MXFP4HfQuantizer.plan`.
        config: with `modules_to_not_convert` resolved.

    Raises:
        ValueError: a tensor has the wrong shape, a weight to be packed is missing or incomplete, or transformers
            makes it from the checkpoint's tensors by more than stacking rows; the message names the tensor.
    """
    renaming = Renaming(model)
    weights = weights_of(model, names)
    transposed = {target: is_transposed(model.get_submodule(target.rpartition(".")[0])) for target in weights}
    plan = model._get_dtype_plan(source.dtype)
    tied = dict(model.all_tied_weights_keys)
    ignored = set(model._keys_to_ignore_on_save or ())

    placed: dict[str, tuple[str, WeightConverter | None]] = {}
    dropped = []
    for key in sorted(source.tensors, key=dot_natural_key):
        target, converter = renaming(key)
        if target is None or target in ignored:
            dropped.append(key)
        else:
            placed[key] = (target, converter)
    _drop_tied_copies(source, placed, tied, dropped)
    _check_shapes(source, renaming, placed, weights)
    missing = _missing(renaming, {target for target, _ in placed.values()}, tied, weights)

    for name in names:
        replace_layer(model, name, config, placeholder=False)
    packed_renaming = Renaming(model, MXFP4HfQuantizer(config, pre_quantized=True))
    items = []
    for key, (target, converter) in placed.items():
        shape = source.tensors[key].shape
        packed = target in weights
        dtype = _dtype_of(target, renaming.state[target], source.dtype, plan, packed)
        suffixes = [""]
        if packed:
            if converter is not None:
                _check_row_wise(key, target, converter, renaming.state[target].dim(), transposed[target])
            rows, columns = shape[::-1] if transposed[target] else shape[-2:]
            shapes = packed_shapes(rows, columns, config)
            suffixes = [f"_{suffix}" for suffix in shapes]
            lead = 1 if len(shape) == 2 else shape[0]
            nbytes = lead * sum(a * b for a, b in shapes.values())
        else:
            nbytes = source.tensors[key].numel * dtype.itemsize
        name = target if renaming.only_prefix(key, target) else key
        name = _loadable_name(packed_renaming, name, target, suffixes)
        items.append(Item(key, target, name, shape, dtype, packed, packed and transposed[target], nbytes))
    # By file, so that each is read from front to back.
    items.sort(key=lambda item: (source.tensors[item.key].file, dot_natural_key(item.key)))
    return Plan(items, dropped, missing)


def weights_of(model: "PreTrainedModel", names: list[str]) -> set[str]:
    """Names of the dense weights of some modules that are to be packed."""
    weights = set()
    for name in names:
        module = model.get_submodule(name)
        parameters = ("weight",) if linear_shape(module) is not None else fused_names(module)
        weights.update(f"{name}.{parameter}" for parameter in parameters)
    return weights


def _drop_tied_copies(source: Source, placed: dict, tied: dict[str, str], dropped: list[str]) -> None:
    """Leave out what `save_pretrained` leaves out: a tied weight that the checkpoint holds twice, if equal."""
    keys = {target: key for key, (target, _) in placed.items()}
    for copy, original in tied.items():
        if copy in keys and original in keys:
            first, second = keys[copy], keys[original]
            if source.tensors[first].shape == source.tensors[second].shape:
                if torch.equal(source.read(first), source.read(second)):
                    del placed[first]
                    dropped.append(first)


def _check_shapes(source: Source, renaming: Renaming, placed: dict, weights: set[str]) -> None:
    found = dict.fromkeys(weights, 0)
    for key, (target, converter) in placed.items():
        info, expected = source.tensors[key], tuple(renaming.state[target].shape)
        if converter is None and info.shape != expected:
            raise ValueError(
                f"{key} has shape {info.shape} in {source.name}, but its configuration asks for {expected}"
            )
        if target in weights:
            found[target] += info.numel
            if len(info.shape) < 2:
                raise ValueError(f"{key} has shape {info.shape} in {source.name}, which is not a matrix")
    for target, numel in sorted(found.items()):
        if numel == 0:
            raise ValueError(f"{target} is not in {source.name}, so it cannot be quantised")
        if numel != renaming.state[target].numel():
            raise ValueError(
                f"{target} is incomplete in {source.name}: {numel} values of {renaming.state[target].numel()}"
            )


def _missing(renaming: Renaming, found: set[str], tied: dict[str, str], weights: set[str]) -> list[str]:
    produced = set(found)
    for converter in renaming.converters:
        # One tensor that is split while it loads is found under its first target only.
        first, *others = converter.target_patterns
        produced |= {target.replace(first, other) for target in found for other in others if first in target}
    for copy, original in tied.items():
        if copy in produced or original in produced:
            produced |= {copy, original}
    return sorted(set(renaming.state) - produced - weights)


def _check_row_wise(key: str, target: str, converter: WeightConverter, dims: int, transposed: bool) -> None:
    """Raise unless a converter only stacks matrices, or rows of them, which packed tensors allow as well."""
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist) and operation.dim == 0 and dims == 3:
            continue
        if isinstance(operation, Concatenate) and 0 <= operation.dim < dims - 1 and not transposed:
            continue
        break
    else:
        if len(converter.target_patterns) == 1:
            return
        operation = f"a split into {len(converter.target_patterns)}"
    raise ValueError(
        f"{target} is made from {key} by {operation} while it loads, which cannot be done on packed weights; add "
        f"{target.rpartition('.')[0]!r} to modules_to_not_convert, or load with "
        "from_pretrained(quantization_config=...) and save_pretrained"
    )


def _dtype_of(
    target: str, parameter: torch.Tensor, dtype: torch.dtype, plan: dict[str, torch.dtype], packed: bool
) -> torch.dtype:
    for pattern, kept in plan.items():
        if re.search(pattern.replace("*", r".*"), target):
            return kept
    return dtype if packed else parameter.dtype


def _loadable_name(renaming: Renaming, name: str, target: str, suffixes: list[str]) -> str:
    """``name``, or else ``target``: whichever transformers will put where it belongs."""
    for candidate in (name, target):
        if all(renaming(candidate + suffix)[0] == target + suffix for suffix in suffixes):
            return candidate
    raise ValueError(
        f"transformers has no way to load a packed {name} into {target}; add {target.rpartition('.')[0]!r} to "
        "modules_to_not_convert"
    )


def split_into_shards(items: list[Item], max_shard_size: int) -> dict[str, list[Item]]:
    """Items by the file they go to, in order, each file at most ``max_shard_size`` bytes unless one item is larger."""
    shards: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}
