"""The two files of a saved cache, as every method here writes and checks them; what they say is each method's own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_ext.runlog import write_json

__all__ = ["SavedFormat"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I16": torch.int16,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class SavedFormat:
    """Names and version of a method's files: tensors as safetensors, all else as JSON.

    Attributes:
        owner: Whose cache it is, with its article, for messages: `"a PatternKV"`.
        config_name: Name of the JSON file.
        tensors_name: Name of the safetensors file.
        version: The JSON file's `format`; no other is read.
        fields: Entries that the JSON file must have, with their types.
    """

    owner: str
    config_name: str
    tensors_name: str
    version: int
    fields: Mapping[str, type]

    def write(self, folder: Path, facts: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Write both files; `facts` are JSON, `tensors` contiguous and on the CPU."""
        folder.mkdir(parents=True, exist_ok=True)
        # The configuration goes last: a folder with one is whole.
        (folder / self.config_name).unlink(missing_ok=True)
        save_file(tensors, folder / self.tensors_name, metadata={"format": "pt"})
        write_json(folder / self.config_name, {"format": self.version, **facts, "tensors": _listed(tensors)})

    def read_facts(self, folder: Path) -> dict[str, Any]:
        """The JSON file of a saved cache.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: The file is damaged, or of another version.
        """
        for name in (self.config_name, self.tensors_name):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} has no {name}: it is not a cache that `save_pretrained` finished")
        path = folder / self.config_name
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        if not isinstance(stored, dict) or "format" not in stored:
            raise ValueError(f"{path} is not of {self.owner} cache: it has no `format`")
        if stored["format"] != self.version:
            raise ValueError(
                f"{folder} has format {stored['format']!r}, and this version of hf_ext reads {self.version}"
            )
        for name, kind in self.fields.items():
            if not isinstance(stored.get(name), kind):
                raise ValueError(f"{path} is damaged: `{name}` is {stored.get(name)!r}, not a {kind.__name__}")
        return stored

    def read_tensors(
        self, folder: Path, stored: Mapping[str, Any], device: torch.device | str, *, only_header: bool = False
    ) -> dict[str, torch.Tensor]:
        """The tensors by name.

        Args:
            folder: Folder of the cache.
            stored: What `read_facts` gave.
            device: Where the tensors go.
            only_header: Read no states: the tensors are on the device "meta".

        Raises:
            ValueError: The file cannot be read, or holds other tensors than the JSON file lists.
        """
        path = folder / self.tensors_name
        try:
            device = torch.device(device)
            # safetensors knows the CPU by one name only: not by "cpu:0".
            place = "cpu" if only_header or device.type == "cpu" else str(device)
            with safe_open(path, framework="pt", device=place) as file:
                tensors = {
                    name: _shell(file.get_slice(name)) if only_header else file.get_tensor(name)
                    for name in file.keys()
                }
        except Exception as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        if _listed(tensors) != stored["tensors"]:
            raise ValueError(f"{path} does not hold the tensors that {self.config_name} lists")
        return tensors


def _listed(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}


def _shell(part: Any) -> torch.Tensor:
    """A tensor without storage, from the header's entry."""
    return torch.empty(part.get_shape(), dtype=_DTYPES[part.get_dtype()], device="meta")
