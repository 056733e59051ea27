"""Options of the PatternKV cache."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["PatternKVConfig"]

_BITS = (2, 4, 8)
# Stores residuals as they are, to test everything around the rounding; not a format.
PASSTHROUGH_BITS = 16
# What ids of two bytes can name beside the zero pattern, and what torch takes as a seed.
_MAX_PATTERNS = 2**15 - 1
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class PatternKVConfig:
    """How a `PatternKVCache` quantizes keys and values. Never changed by a cache; one config serves many.

    Marks: [P] the paper's choice, read in the authors' code; [D] a departure of ours. The defaults
    are what loses least at its size where we measured; `PatternKVConfig.paper()` sets all of [P].

    Args:
        nbits (`int`, *optional*, defaults to 2):
            Bits of a code: 2, 4 or 8.
        nbits_key (`int`, *optional*):
            Bits of the keys' codes. Default: `nbits`.
        nbits_value (`int`, *optional*):
            Bits of the values' codes. Default: `nbits`.
        num_patterns (`int`, *optional*, defaults to 32):
            Patterns mined per head from the first tokens, keys and values apart [P]. 0 turns patterns off, which
            leaves KIVI's scheme: keys per channel, values per token.
        group_size (`int`, *optional*, defaults to 128):
            Tokens that share a key scale, per channel [P]; channels that share a value scale, per token, at most
            `head_dim` of them.
        group_size_value (`int`, *optional*):
            Channels that share a value scale. Default: `group_size`, at most `head_dim`.
        residual_length (`int`, *optional*, defaults to 128):
            Tokens of a window: newer ones stay in full precision until a window is full [P].
        sink_length (`int`, *optional*, defaults to 4):
            First tokens of a row that stay in full precision for ever [D: the paper has none].
        assign (`"paper"`, `"l2"`, `"range"` or `"matched"`, *optional*, defaults to `"paper"`):
            How a token picks its pattern: by squared distance in the prompt and by the range of the residual in
            decoded windows [P]; by one of the two throughout; or distance for keys and range for values [D].
        value_gate (`"test"`, `"narrower"` or `"none"`, *optional*, defaults to `"test"`):
            When a value uses its pattern: if the expected error falls significantly [P], if the range gets narrower,
            or always.
        key_gate (`"window"` or `"none"`, *optional*, defaults to `"window"`):
            Whether a window of keys goes without patterns where they would widen its ranges [D], or never [P].
        new_pattern (`"midrange"`, `"mean"` or `"none"`, *optional*, defaults to `"midrange"`):
            The pattern that each window after the first flush adds: the middle of its range per channel [P], its mean,
            or none.
        scale_fit (`"mse"` or `"minmax"`, *optional*, defaults to `"mse"`):
            Scales are fitted to the least squared error of a group [D], or span its range [P]; the bytes are as many.
        bank_scope (`"sequence"` or `"batch"`, *optional*, defaults to `"sequence"`):
            One bank of patterns per row [D], or one mined from the mean over the batch [P], which needs rows of equal
            length. They are the same for one row.
        max_patterns (`int`, *optional*):
            Patterns of a head from which on windows add none; those that are mined stay. Default: no bound [P].
        mining_iters (`int`, *optional*, defaults to 30):
            Iterations of k-means at most [P].
        mining_max_tokens (`int`, *optional*, defaults to 4096):
            Tokens that k-means looks at, evenly spaced [D]. None: all [P].
        seed (`int`, *optional*, defaults to 0):
            Of the draws of k-means [P].
        return_packed (`"auto"`, `True` or `False`, *optional*, defaults to `"auto"`):
            Whether a decode step hands the packed states to the attention function. `"auto"`: when the model's
            attention implementation is `"patternkv"`.

    Raises:
        ValueError: A field has a value that it cannot have; the message names it.

    Example:
        >>> PatternKVConfig(nbits=2, nbits_key=4).nbits_value
        2
    """

    nbits: int = 2
    nbits_key: int | None = None
    nbits_value: int | None = None
    num_patterns: int = 32
    group_size: int = 128
    group_size_value: int | None = None
    residual_length: int = 128
    sink_length: int = 4
    assign: Literal["paper", "l2", "range", "matched"] = "paper"
    value_gate: Literal["test", "narrower", "none"] = "test"
    key_gate: Literal["window", "none"] = "window"
    new_pattern: Literal["midrange", "mean", "none"] = "midrange"
    scale_fit: Literal["minmax", "mse"] = "mse"
    bank_scope: Literal["sequence", "batch"] = "sequence"
    max_patterns: int | None = None
    mining_iters: int = 30
    mining_max_tokens: int | None = 4096
    seed: int = 0
    return_packed: bool | Literal["auto"] = "auto"

    def __post_init__(self):
        for name in ("nbits_key", "nbits_value"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.nbits)
        for name in ("nbits", "nbits_key", "nbits_value"):
            value = getattr(self, name)
            if type(value) is not int or value not in (*_BITS, PASSTHROUGH_BITS):
                raise ValueError(f"`{name}` must be 2, 4 or 8, got {value!r}: a byte must hold whole codes")
        choices = {
            "assign": ("paper", "l2", "range", "matched"),
            "value_gate": ("test", "narrower", "none"),
            "key_gate": ("window", "none"),
            "new_pattern": ("midrange", "mean", "none"),
            "scale_fit": ("minmax", "mse"),
            "bank_scope": ("sequence", "batch"),
            "return_packed": ("auto", True, False),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                listed = ", ".join(repr(value) for value in allowed)
                raise ValueError(f"`{name}` must be one of {listed}, got {getattr(self, name)!r}")
        least = {
            "num_patterns": 0,
            "group_size": 8,
            "residual_length": 8,
            "sink_length": 0,
            "mining_iters": 1,
            "seed": 0,
        }
        optional = {"group_size_value": 8, "max_patterns": 1, "mining_max_tokens": 1}
        for name, lowest in (least | optional).items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"`{name}` must be an integer of at least {lowest}, got {value!r}")
        for name, highest in (("num_patterns", _MAX_PATTERNS), ("seed", _MAX_SEED)):
            if getattr(self, name) > highest:
                raise ValueError(f"`{name}` must be at most {highest}, got {getattr(self, name)!r}")
        if self.residual_length % self.group_size:
            raise ValueError(
                f"`residual_length` must be a multiple of `group_size`, got {self.residual_length} and "
                f"{self.group_size}: a window is packed in whole groups"
            )

    @classmethod
    def paper(cls, nbits: int = 2, **fields: Any) -> "PatternKVConfig":
        """Every choice of the paper: no sinks, scales from ranges, no gate of keys, one bank mined over the batch."""
        chosen = {"sink_length": 0, "key_gate": "none", "scale_fit": "minmax", "bank_scope": "batch"}
        chosen["mining_max_tokens"] = None
        return cls(nbits=nbits, **{**chosen, **fields})

    @classmethod
    def kivi(cls, nbits: int = 2, group_size: int = 32, **fields: Any) -> "PatternKVConfig":
        """KIVI's scheme in the same code: no patterns and no sinks."""
        chosen = {"num_patterns": 0, "sink_length": 0, "new_pattern": "none", "scale_fit": "minmax"}
        return cls(nbits=nbits, group_size=group_size, **{**chosen, **fields})

    def value_group(self, head_dim: int) -> int:
        """Channels that share a value scale at this head dimension.

        Raises:
            ValueError: The head dimension is not a multiple of them, or codes do not fill whole bytes.
        """
        group = min(self.group_size_value or self.group_size, head_dim)
        if head_dim % group:
            raise ValueError(
                f"`group_size_value` is {group}, which does not divide head_dim={head_dim}; set it to a divisor, for "
                f"example {next(size for size in range(group, 0, -1) if head_dim % size == 0)}"
            )
        return group

    def bits_per_element(self, head_dim: int, tokens: int) -> tuple[float, float]:
        """Bits of a packed key and value element after a prompt of so many tokens, sinks and tail apart.

        bits + 32 / group (scale and zero) + bits of an id / head_dim + 16 patterns / packed tokens, the zero pattern
        counted; ids take two bytes from 256 patterns on.

        Raises:
            ValueError: So few tokens fill no window.
        """
        packed = max(0, tokens - self.sink_length) // self.residual_length * self.residual_length
        if not packed:
            raise ValueError(
                f"{tokens} tokens fill no window: {self.sink_length + self.residual_length} are the first to be packed"
            )
        bank = 16 * (1 + self.num_patterns) / packed
        ids = (8 if self.num_patterns < 256 else 16) / head_dim if self.num_patterns else 0.0
        groups = self.group_size, self.value_group(head_dim)
        key, value = (
            bits + 32 / group + ids + bank for bits, group in zip((self.nbits_key, self.nbits_value), groups)
        )
        return key, value

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "PatternKVConfig":
        """The config with these fields.

        Raises:
            ValueError: A field that there is not, or a value that it cannot have.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(
                f"unknown fields of PatternKVConfig: {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        return cls(**fields)

    def to_json_file(self, path: str | os.PathLike[str]) -> None:
        """Write the fields as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_json_file(cls, path: str | os.PathLike[str]) -> "PatternKVConfig":
        """Read what `to_json_file` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
