"""Packed checkpoints in the layout of compressed-tensors, which other readers (vLLM, stock transformers) know.

With blocks of 32 and no macro blocks our bytes are standard MXFP4 under the names that compressed-tensors uses, so an
export changes the configuration and nothing else.
"""

import json
import os
import re
import shutil
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_ext.runlog import write_json, write_text

from .card import model_card
from .configuration import QUANT_METHOD, MXFP4Config
from .experts import is_fused_experts
from .linear import MXFP4Linear
from .plan import Renaming
from .quantizer import linear_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_exportable", "compressed_tensors_config", "dense_linears", "export_compressed_tensors"]

COMPRESSED_TENSORS_FORMAT = "mxfp4-pack-quantized"


def export_compressed_tensors(
    model_or_dir: "PreTrainedModel | str | os.PathLike[str]", dst: str | os.PathLike[str]
) -> Path:
    """Write a packed model so that transformers with compressed-tensors, or vLLM, loads it without hf_ext.

    Args:
        model_or_dir: a quantised model, or a folder that one was saved to.
        dst: the folder to make; must not exist, or be empty.

    Returns:
        The path of ``dst``.

    Raises:
        ValueError: the layout cannot hold it (macro blocks, blocks of 16, fused experts, GPT-2's Conv1D), its readers
            cannot load it (dense experts that they stack), or it is not a model that this package quantised.
        FileExistsError: ``dst`` is not empty.
        FileNotFoundError: the folder does not exist.
    """
    from transformers import PreTrainedModel

    dst = Path(os.path.realpath(dst) if os.path.islink(dst) else os.path.abspath(dst))
    if dst.exists() and (dst.is_file() or any(dst.iterdir())):
        raise FileExistsError(f"{dst} is not empty; choose another folder")
    partial = dst.with_name(dst.name + ".partial")
    if partial.exists():
        raise FileExistsError(f"{partial} is in the way, from an export that was cut short; remove it")
    if isinstance(model_or_dir, PreTrainedModel):
        config = _config_of(model_or_dir)
        check_exportable(model_or_dir, _packed_names(model_or_dir), config)
        dense = dense_linears(model_or_dir)
        model_or_dir.save_pretrained(partial)
        architecture = type(model_or_dir).__name__
    else:
        source = Path(model_or_dir)
        config, dense, architecture = _read_folder(source)
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns("channel_stats.safetensors", "README.md", ".*"))
    path = partial / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["quantization_config"] = compressed_tensors_config(config, dense)
    write_json(path, raw)
    write_text(
        partial / "README.md", model_card(dst.name, config, format="compressed-tensors", architecture=architecture)
    )
    if dst.exists():
        dst.rmdir()
    partial.rename(dst)
    return dst


def check_exportable(model: nn.Module | None, names: list[str], config: MXFP4Config) -> None:
    """Raise unless the layout of compressed-tensors can hold the packed layers ``names`` of a model.

    Raises:
        ValueError: says what it cannot hold, and what to change.
    """
    if config.macro_block_size is not None:
        raise ValueError(
            "compressed-tensors has no macro-block scale; re-quantise with macro_block_size=None (--macro-block none)"
        )
    if config.block_size != 32:
        raise ValueError(
            f"compressed-tensors has MXFP4 in blocks of 32 only, got block_size={config.block_size}; re-quantise with "
            "block_size=32"
        )
    if config.activation is not None and config.scale_rule not in ("oas", "even"):
        raise ValueError(
            f"compressed-tensors rounds activations by the rule 'even', not {config.scale_rule!r}; re-quantise with "
            "scale_rule='oas' (the same but for one value in a binade) or activation=None"
        )
    if config.activation is not None and config.activation_macro_block_size is not None:
        raise ValueError(
            "compressed-tensors has no macro-block scale, for activations either; re-quantise with "
            "activation_macro_block_size=None (--activation-macro-block none)"
        )
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear) or (isinstance(module, MXFP4Linear) and module.source_class is nn.Linear):
            continue
        kind = "a Conv1D layer" if linear_shape(module) or isinstance(module, MXFP4Linear) else "fused experts"
        raise ValueError(
            f"{name} is {kind}, and compressed-tensors holds nn.Linear only; add it to modules_to_not_convert "
            "(--skip), or keep the mxfp4 format"
        )
    if model is not None:
        _check_dense_experts(model, names)


def _check_dense_experts(model: nn.Module, names: list[str]) -> None:
    """Raise for dense experts that transformers' reader of the layout expects to find packed, one by one.

    It makes its conversions that stack experts look for packed tensors, and takes Llama 4's fused experts apart; dense
    ones then fail to load, or are random.
    """
    stacked = [
        target
        for converter in Renaming(model).converters
        if any(source.endswith(".weight") for source in converter.source_patterns)
        for target in converter.target_patterns
    ]
    for name, module in model.named_modules():
        if name in names or not is_fused_experts(module):
            continue
        keys = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
        if type(module).__name__ == "Llama4TextExperts" or any(re.search(t, key) for t in stacked for key in keys):
            raise ValueError(
                f"{name} holds dense experts, which transformers cannot load from a compressed-tensors checkpoint of "
                f"{type(model).__name__}; keep the mxfp4 format"
            )


def compressed_tensors_config(config: MXFP4Config, dense: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of ``config.json`` for a packed model.

    Args:
        config: with blocks of 32 and no macro blocks.
        dense: names of the `nn.Linear` modules that were left dense.
    """
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
        "dynamic": False,
    }
    inputs = None if config.activation is None else weights | {"dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": COMPRESSED_TENSORS_FORMAT,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": COMPRESSED_TENSORS_FORMAT,
        "config_groups": {"group_0": group},
        "ignore": sorted(dense),
        "quantization_status": "compressed",
    }


def _config_of(model: "PreTrainedModel") -> MXFP4Config:
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    if not isinstance(config, MXFP4Config):
        raise ValueError(
            "`model_or_dir` is a model that is not quantised to MXFP4; quantise it first (quantize_model)"
        )
    return config


def _packed_names(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, MXFP4Linear) or hasattr(module, "packed_names")
    ]


def dense_linears(model: nn.Module) -> list[str]:
    """Names of the dense linear layers of a model whose other layers are packed."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _read_folder(folder: Path) -> tuple[MXFP4Config, list[str], str]:
    """Configuration, dense linear layers and architecture of a packed checkpoint, from its ``config.json`` alone."""
    import transformers
    from transformers import AutoConfig
    from transformers.utils.generic import ContextManagers

    from .quantizer import MXFP4HfQuantizer

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist")
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a transformers checkpoint: it has no config.json")
    raw = json.loads(path.read_text(encoding="utf-8")).get("quantization_config") or {}
    if raw.get("quant_method") != QUANT_METHOD:
        raise ValueError(f"{folder} is not quantised by this package (quant_method is {raw.get('quant_method')!r})")
    config = MXFP4Config.from_dict(raw)
    check_exportable(None, [], config)
    model_config = AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, (model_config.architectures or [""])[0], None)
    if cls is None:
        raise ValueError(f"{folder}: transformers has no class {model_config.architectures}")
    with ContextManagers(cls.get_init_context(model_config.dtype, True, False, None)):
        model = cls(deepcopy(model_config))
    names = MXFP4HfQuantizer(config, pre_quantized=True).plan(model)
    check_exportable(model, names, config)
    packed = set(names)
    return config, [name for name in dense_linears(model) if name not in packed], cls.__name__
