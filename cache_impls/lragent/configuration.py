"""Options of the LRAgent cache."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["MODES", "TARGETS", "LRAgentConfig"]

MODES = ("auto", "base_shared", "base_lr_shared", "full", "none")
TARGETS = ("k_proj", "v_proj")


@dataclass(frozen=True)
class LRAgentConfig:
    """What the agents of an `LRAgentCache` share. Never changed by a cache; one config serves many.

    Marks: [P] the paper's, read in the authors' code or text; [D] a departure or extension of ours.

    Args:
        mode (`"auto"`, `"base_shared"`, `"base_lr_shared"`, `"full"` or `"none"`, *optional*, defaults to `"auto"`):
            `"base_shared"`: one base part for all, low-rank states for each agent, which must read every token itself
            [P]. `"base_lr_shared"`: low-rank states shared too, which needs adapters of one A; a token that any agent
            has read costs the others nothing [P]. `"full"`: the states of whoever read a token first, its adapter's
            part included; what sharing a `DynamicCache` does [P, a baseline]. `"none"`: a cache for each [P, a
            baseline]. `"auto"`: `"base_lr_shared"` if all adapters of the model have equal A on every cached
            projection, else `"base_shared"` [D].
        targets (`tuple[str, ...]`, *optional*, defaults to `("k_proj", "v_proj")`):
            Cached projections whose adapter part is kept apart. The authors' runtime knows `v_proj` only [D]. What is
            left out here is shared with the adapter's part of whoever read the token.
        check_prefix (`bool`, *optional*, defaults to `True`):
            Compare each prompt that `generate` gets with the tokens that the cache holds, and drop the states from
            where they part [D]. False: trust the caller, as with a `DynamicCache`.

    Raises:
        ValueError: A field has a value that it cannot have; the message names it.

    Example:
        >>> LRAgentConfig(mode="base_shared", targets=("v_proj",)).mode
        'base_shared'
    """

    mode: Literal["auto", "base_shared", "base_lr_shared", "full", "none"] = "auto"
    targets: tuple[str, ...] = TARGETS
    check_prefix: bool = True

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"`mode` must be one of {', '.join(map(repr, MODES))}, got {self.mode!r}")
        if isinstance(self.targets, list):  # from JSON
            object.__setattr__(self, "targets", tuple(self.targets))
        known = isinstance(self.targets, tuple) and all(name in TARGETS for name in self.targets)
        if not known or not self.targets or len(set(self.targets)) != len(self.targets):
            raise ValueError(f"`targets` must be one or both of {', '.join(map(repr, TARGETS))}, got {self.targets!r}")
        if type(self.check_prefix) is not bool:
            raise ValueError(f"`check_prefix` must be True or False, got {self.check_prefix!r}")

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON has them."""
        return {**dataclasses.asdict(self), "targets": list(self.targets)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "LRAgentConfig":
        """The config with these fields.

        Raises:
            ValueError: A field that there is not, or a value that it cannot have.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(
                f"unknown fields of LRAgentConfig: {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        return cls(**fields)

    def to_json_file(self, path: str | os.PathLike[str]) -> None:
        """Write the fields as JSON."""
        from hf_ext.runlog import write_json

        write_json(path, self.to_dict())

    @classmethod
    def from_json_file(cls, path: str | os.PathLike[str]) -> "LRAgentConfig":
        """Read what `to_json_file` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
