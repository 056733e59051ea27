"""Dense checkpoints to read from, one tensor at a time: a folder, a repository of the Hub, or a GGUF file."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["Source", "TensorInfo", "digest", "meta_model", "open_source", "quiet"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What travels with the weights: tokenizer, chat template, processors, generation settings, their code, licence.
_SIDE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
_SIDE_NAMES = ("LICENSE", "NOTICE")
_NOT_SIDE = ("config.json", "quantization_config.json", "adapter_config.json")
_MAX_SIDE_BYTES = 2**28


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint without its data."""

    shape: tuple[int, ...]
    file: str  # its file's name, or "" for a tensor in memory

    @property
    def numel(self) -> int:
        """How many values it has."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass
class Source:
    """A dense checkpoint.

    Attributes:
        name: how the user called it.
        hub_id: its repository on the Hub, if it came from there.
        folder: where its other files are.
        config: of the model.
        model_class: that `from_pretrained` would make of it.
        dtype: that `from_pretrained` would load it in.
        tensors: what it holds, by key.
        read: gives one tensor by its key, and keeps none.
        identity: changes when its content does (names, sizes and times of its files).
        gguf_file: name of the GGUF file it was read from, if it was.
        model: that file's model, dense, in memory.
    """

    name: str
    hub_id: str | None
    folder: Path
    config: "PreTrainedConfig"
    model_class: type["PreTrainedModel"]
    dtype: torch.dtype
    tensors: dict[str, TensorInfo]
    read: Callable[[str], torch.Tensor]
    identity: list[Any]
    gguf_file: str | None = None
    model: "PreTrainedModel | None" = None

    def side_files(self) -> list[Path]:
        """Files that belong beside the weights, without config.json and the card; relative to `folder`."""
        found: list[Path] = []
        if self.gguf_file is not None:
            return found
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith(".") or path.name in _NOT_SIDE or path.name.endswith(".index.json"):
                continue
            if path.is_dir():
                if path.name == "additional_chat_templates":
                    found += [file.relative_to(self.folder) for file in sorted(path.glob("*.jinja"))]
            elif path.suffix in _SIDE_SUFFIXES or path.name.startswith(_SIDE_NAMES):
                if path.stat().st_size <= _MAX_SIDE_BYTES:
                    found.append(path.relative_to(self.folder))
        return found

    def card_data(self) -> dict[str, Any]:
        """The metadata of the source's own card; empty without one that can be read."""
        from huggingface_hub import ModelCard

        path = self.folder / "README.md"
        if not path.is_file() or self.gguf_file is not None:
            return {}
        try:
            return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
        except Exception:  # a foreign file: any fault in its YAML means that there is nothing to carry over
            return {}


def open_source(
    src: str | os.PathLike[str], *, gguf_file: str | None = None, dtype: torch.dtype | str | None = None
) -> Source:
    """Open a dense checkpoint and check that it is whole; reads no weights, except for GGUF.

    Args:
        src: a folder with safetensors, one file or sharded, or the id of a model on the Hub.
        gguf_file: name of a GGUF file in ``src``; it is expanded by transformers, in memory.
        dtype: to load in; default what `from_pretrained` would take (GGUF: float32).

    Raises:
        FileNotFoundError: ``src`` does not exist, or one of its shards.
        ValueError: it is not a dense transformers checkpoint.
        OSError: a file is damaged or cut short.
    """
    if isinstance(dtype, str):
        known = getattr(torch, dtype, None)
        if not isinstance(known, torch.dtype) or not known.is_floating_point:
            raise ValueError(f"`dtype` must be a float dtype such as 'bfloat16', got {dtype!r}")
        dtype = known
    folder, hub_id = _locate(src, gguf_file)
    if gguf_file is not None:
        return _open_gguf(str(src), hub_id, folder, gguf_file, dtype)
    config = _read_config(folder, src)
    files, metadata, weight_map = _weight_files(folder, src)
    tensors = _read_headers(folder, files, weight_map)
    cls = _model_class(config, src)
    return Source(
        name=str(src),
        hub_id=hub_id,
        folder=folder,
        config=config,
        model_class=cls,
        dtype=_resolve_dtype(dtype, config, [str(folder / name) for name in files], metadata),
        tensors=tensors,
        read=lambda key: _read_tensor(folder / tensors[key].file, key),
        identity=[_identity(folder / name) for name in ("config.json", *files)],
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' warnings and progress bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def meta_model(source: Source) -> "PreTrainedModel":
    """The model of a source as `from_pretrained` builds it before it loads any weight: on the meta device."""
    from transformers.utils.generic import ContextManagers

    with ContextManagers(source.model_class.get_init_context(source.dtype, True, False, None)):
        return source.model_class(deepcopy(source.config))


def _locate(src: str | os.PathLike[str], gguf_file: str | None) -> tuple[Path, str | None]:
    path = Path(src)
    if path.is_dir():
        return path, None
    if path.exists():
        hint = f"; for a GGUF file pass its folder and gguf_file={path.name!r}" if path.suffix == ".gguf" else ""
        raise ValueError(f"{path} is a file, not the folder of a checkpoint{hint}")
    name = str(src)
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise FileNotFoundError(f"{name} does not exist; pass a folder or the id of a model on the Hub (ORG/NAME)")
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in _SIDE_SUFFIXES] + [f"{prefix}*" for prefix in _SIDE_NAMES]
    patterns += ["README.md"] + ([gguf_file] if gguf_file else ["*.safetensors"])
    try:
        return Path(snapshot_download(name, allow_patterns=patterns)), name
    except Exception as error:  # the Hub client has a dozen kinds of failure; to the user they are one
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(f"{name} is neither a folder nor a model that the Hub gives: {reason}") from error


def _read_config(folder: Path, src: Any) -> "PreTrainedConfig":
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        gguf = next((found.name for found in sorted(folder.glob("*.gguf"))), None)
        hint = "" if gguf is None else f"; for its GGUF file pass gguf_file={gguf!r} (--gguf-file)"
        raise ValueError(f"{src} is not a transformers checkpoint: it has no config.json{hint}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is not a model's configuration: it holds a {type(raw).__name__}")
    quantised = raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown method")
        raise ValueError(f"{src} is quantised already ({method}); quantise the dense checkpoint that it was made from")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever a model's configuration class raises
        raise ValueError(f"transformers cannot read {path}: {str(error).strip().splitlines()[0]}") from error


def _model_class(config: "PreTrainedConfig", src: Any) -> type["PreTrainedModel"]:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    for name in config.architectures or []:
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            if cls.config_class is not None and not isinstance(config, cls.config_class):
                raise ValueError(f"{src}: {name} of its `architectures` is no model of a {type(config).__name__}")
            return cls
    if not config.architectures and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    raise ValueError(
        f"{src}: transformers has no class {' or '.join(config.architectures or [])!r}; models with code of their own "
        "are quantised by from_pretrained(..., trust_remote_code=True, quantization_config=MXFP4Config())"
    )


def _weight_files(folder: Path, src: Any) -> tuple[list[str], dict | None, dict[str, str] | None]:
    if (folder / SINGLE).is_file():  # transformers prefers it to an index
        return [SINGLE], None, None
    if not (folder / INDEX).is_file():
        other = next((path.name for path in sorted(folder.glob("*")) if path.suffix in (".bin", ".gguf", ".h5")), None)
        found = f" (found {other})" if other else ""
        hint = f"; for GGUF pass gguf_file={other!r}" if other and other.endswith(".gguf") else ""
        raise ValueError(f"{src} has no safetensors weights: neither {SINGLE} nor {INDEX}{found}{hint}")
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        weight_map = dict(index["weight_map"])
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError("a file in `weight_map` is not a name")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} is not an index of safetensors shards: {error}") from None
    files = sorted(set(weight_map.values()))
    for name in files:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing; {INDEX} lists it")
    return files, index.get("metadata"), weight_map


def _read_headers(folder: Path, files: list[str], weight_map: dict[str, str] | None) -> dict[str, TensorInfo]:
    tensors = {}
    for name in files:
        with _open(folder / name) as file:
            for key in file.keys():
                if weight_map is None or weight_map.get(key) == name:
                    tensors[key] = TensorInfo(tuple(file.get_slice(key).get_shape()), name)
    missing = sorted(set(weight_map or ()) - set(tensors))
    if missing:
        raise ValueError(f"{folder}: {missing[0]} is in the index but not in {weight_map[missing[0]]}")
    return tensors


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt")
    except FileNotFoundError:
        raise
    except Exception as error:
        raise OSError(f"{path} is not a complete safetensors file: {error}") from error
    with file:
        yield file


def _read_tensor(path: Path, key: str) -> torch.Tensor:
    # Opened anew for each tensor: the file is mapped into memory, and pages that were read count until it is closed.
    with _open(path) as file:
        return file.get_tensor(key)


def _resolve_dtype(
    dtype: torch.dtype | None, config: "PreTrainedConfig", files: list[str], metadata: dict | None
) -> torch.dtype:
    from transformers.modeling_utils import _get_dtype

    with quiet():
        return _get_dtype("auto" if dtype is None else dtype, files, config, metadata, None, True)[1]


def _identity(path: Path) -> list[Any]:
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]


def _open_gguf(name: str, hub_id: str | None, folder: Path, gguf_file: str, dtype: torch.dtype | None) -> Source:
    from transformers import AutoModelForCausalLM, GgufConfig

    from hf_ext.extras import require

    path = folder / gguf_file
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    require("gguf", extra="demo")
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                gguf_file=gguf_file,
                dtype=dtype or torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
    except ImportError:
        raise
    except Exception as error:
        raise OSError(f"transformers cannot read {path}: {str(error).strip().splitlines()[0]}") from error
    state = model.state_dict()
    for duplicate in model.all_tied_weights_keys:
        state.pop(duplicate, None)
    return Source(
        name=name,
        hub_id=hub_id,
        folder=folder,
        config=model.config,
        model_class=type(model),
        dtype=model.dtype,
        tensors={key: TensorInfo(tuple(tensor.shape), "") for key, tensor in state.items()},
        read=state.__getitem__,
        identity=[_identity(path)],
        gguf_file=gguf_file,
        model=model,
    )


def digest(value: Any) -> str:
    """A short hash of anything that goes into JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
