"""The packed tokens of one side of a layer, keys or values: codes, scales, pattern ids, and the banks of patterns."""

from typing import NamedTuple

import torch

from .configuration import PASSTHROUGH_BITS, PatternKVConfig
from .quantization import (
    assign_narrowest,
    assign_nearest,
    dequantize_groups,
    gate_accepts,
    mine_patterns,
    new_pattern,
    pack_codes,
    quantize_groups,
    unpack_codes,
)

__all__ = ["PackedStates", "PackedView"]

# Windows that a full buffer grows by while decoding.
GROWTH = 8
# Tokens of a prompt that are packed at once, in whole windows.
_PROMPT_BLOCK = 2048
# Largest index that an unsigned byte holds.
_BYTE_MAX = 255


class PackedView(NamedTuple):
    """The tensors of a `PackedStates`, cut to the tokens in use; arguments of the attention kernel.

    Attributes:
        codes: uint8 [B, H, P, D * bits / 8], planar.
        scale, zero: float16 or float32, [B, H, P / group, D] for keys, [B, H, P, D / group] for values.
        ids: uint8 or int16 [B, H, P]; 0 is the zero vector.
        bank: [B or 1, H, m, D] in the model's dtype, float16 for float32; row 0 is zero.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    ids: torch.Tensor
    bank: torch.Tensor


class PackedStates:
    """Buffers that grow by windows; rows may have different numbers of tokens and patterns, which the layer counts.

    Args:
        config: of the cache.
        side: "key": scales per channel over groups of tokens; "value": per token over groups of channels.
    """

    NAMES = ("codes", "scale", "zero", "ids", "bank")

    def __init__(self, config: PatternKVConfig, side: str):
        self.config = config
        self.side = side
        self.bits = config.nbits_key if side == "key" else config.nbits_value
        self.axis = -2 if side == "key" else -1
        self.codes = self.scale = self.zero = self.ids = self.bank = None

    # --- what is stored ---

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The buffers by name, capacity included; empty before the first window."""
        return {name: tensor for name in self.NAMES if (tensor := getattr(self, name)) is not None}

    def allocate(self, like: torch.Tensor, tokens: int) -> None:
        """Make buffers for `tokens` tokens of states like `like` [B, H, T, D], and the zero pattern."""
        rows, heads, _, channels = like.shape
        self.group = self.config.group_size if self.side == "key" else self.config.value_group(channels)
        self.channels = channels
        self.dtype = like.dtype
        scopes = rows if self.config.bank_scope == "sequence" else 1
        # A residual is taken from its pattern as stored, so 16 bits serve a model of more as well.
        kept = torch.float16 if like.dtype in (torch.float32, torch.float64) else like.dtype
        self.bank = like.new_zeros(scopes, heads, 1, channels, dtype=kept)
        passthrough = self.bits == PASSTHROUGH_BITS
        width = channels if passthrough else channels * self.bits // 8
        grouped = (tokens // self.group, channels) if self.axis == -2 else (tokens, channels // self.group)
        empty = like.new_zeros
        self.codes = empty(rows, heads, tokens, width, dtype=torch.float32 if passthrough else torch.uint8)
        self.scale = empty(rows, heads, *grouped, dtype=torch.float16)
        self.zero = empty(rows, heads, *grouped, dtype=torch.float16)
        self.ids = empty(rows, heads, tokens, dtype=torch.uint8)
        self._share_ids()

    def _share_ids(self) -> None:
        """Without patterns all ids are 0: let one byte stand for them."""
        if not self.config.num_patterns:
            self.ids = self.codes.new_zeros(1, 1, 1, dtype=torch.uint8).expand(self.codes.shape[:3])

    def adopt(self, like: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        """Take tensors that were written to a file, for states like `like`."""
        self.allocate(like[:, :, :0], 0)
        for name in self.NAMES:
            setattr(self, name, tensors[name])
        self._share_ids()

    def reserve(self, tokens: int) -> None:
        """Grow the buffers until they hold `tokens` tokens, by whole blocks of windows."""
        have = self.codes.shape[2]
        if tokens <= have:
            return
        block = GROWTH * self.config.residual_length
        capacity = have + -(-(tokens - have) // block) * block
        for name in ("codes", "scale", "zero", "ids"):
            old = getattr(self, name)
            if name == "ids" and not self.config.num_patterns:
                continue
            length = capacity // self.group if name in ("scale", "zero") and self.axis == -2 else capacity
            new = old.new_zeros(*old.shape[:2], length, *old.shape[3:])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)
        self._share_ids()

    def view(self, tokens: int) -> PackedView:
        """The first `tokens` tokens, without copies."""
        groups = tokens // self.group if self.axis == -2 else tokens
        return PackedView(
            self.codes[:, :, :tokens],
            self.scale[:, :, :groups],
            self.zero[:, :, :groups],
            self.ids[:, :, :tokens],
            self.bank,
        )

    def bytes_in_use(self, tokens: int, patterns: int) -> int:
        """Bytes of the first `tokens` tokens and `patterns` patterns: spare room of growing buffers left out."""
        used = self.view(tokens)
        used = used._replace(bank=used.bank[:, :, :patterns])
        # One byte may stand for all ids.
        return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in used)

    def bits_in_use(self, tokens: int, patterns: int) -> float:
        """The same in bits per element."""
        rows, heads = self.codes.shape[:2]
        return 8 * self.bytes_in_use(tokens, patterns) / (rows * heads * tokens * self.channels)

    # --- writing ---

    def append(self, rows: list[int], offset: int, window: torch.Tensor, patterns: int, *, first: bool) -> int:
        """Pack whole windows of rows that stand at the same place.

        Args:
            rows: Indices of the rows.
            offset: Tokens that they have packed already.
            window: float [len(rows), H, n * residual_length, D].
            patterns: Patterns of these rows, the zero vector included.
            first: Whether it is their first flush, whose patterns are there and which adds none.

        Returns:
            The patterns of these rows now.
        """
        length = self.config.residual_length
        # A prompt's windows do not depend on each other; a few at a time keep what float32 needs small.
        step = max(1, _PROMPT_BLOCK // length) * length if first else length
        for start in range(0, window.shape[2], step):
            part = window[:, :, start : start + step].float()
            if not first:
                patterns = self._add_pattern(rows, part, patterns)
            self._write(rows, offset + start, part, patterns, first)
        return patterns

    def mine(self, rows: list[int], states: torch.Tensor) -> int:
        """Mine the banks of these rows from float [len(rows), H, N, D]; returns their patterns, the zero one too."""
        config = self.config
        if not config.num_patterns:
            return 1
        tokens, most = states.shape[2], config.mining_max_tokens
        if most is not None and tokens > most:
            states = states[:, :, torch.arange(most, device=states.device) * tokens // most]
        x = states.float()
        if config.bank_scope == "batch":
            x = x.mean(0, keepdim=True)
        found = mine_patterns(x, config.num_patterns, iterations=config.mining_iters, seed=config.seed)
        self._grow_bank(1 + found.shape[2])
        self.bank[self._scopes(rows), :, 1 : 1 + found.shape[2]] = self._stored(found)
        return 1 + found.shape[2]

    def _stored(self, patterns: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(self.bank.dtype).max
        return patterns.clamp(-limit, limit).to(self.bank.dtype)

    def _scopes(self, rows: list[int]) -> list[int]:
        return rows if self.config.bank_scope == "sequence" else [0]

    def _grow_bank(self, patterns: int, block: int = 0) -> None:
        have = self.bank.shape[2]
        if patterns > have:
            extra = patterns - have + block
            self.bank = torch.cat([self.bank, self.bank.new_zeros(*self.bank.shape[:2], extra, self.channels)], dim=2)
        if self.bank.shape[2] > _BYTE_MAX + 1 and self.ids.dtype == torch.uint8:
            self.ids = self.ids.to(torch.int16)

    def _add_pattern(self, rows: list[int], window: torch.Tensor, patterns: int) -> int:
        config = self.config
        full = config.max_patterns is not None and patterns - 1 >= config.max_patterns
        if config.new_pattern == "none" or not config.num_patterns or full:
            return patterns
        if config.bank_scope == "batch":
            window = window.transpose(0, 1).flatten(1, 2)[None]  # the range over the rows too
        self._grow_bank(patterns + 1, block=GROWTH - 1)
        self.bank[self._scopes(rows), :, patterns] = self._stored(new_pattern(window, config.new_pattern))
        return patterns + 1

    def _write(self, rows: list[int], offset: int, x: torch.Tensor, patterns: int, first: bool) -> None:
        # Residuals are taken from the pattern as it is stored, rounded.
        bank = self.bank[self._scopes(rows), :, :patterns].float().expand(len(rows), -1, -1, -1)
        ids, residual = self._align(x, bank, first)
        end = offset + x.shape[2]
        if self.config.num_patterns:
            self._store("ids", rows, offset, end, ids.to(self.ids.dtype))
        if self.bits == PASSTHROUGH_BITS:
            self._store("codes", rows, offset, end, residual)
            return
        quantized = quantize_groups(residual, self.bits, group=self.group, axis=self.axis, fit=self.config.scale_fit)
        if quantized.scale.dtype == torch.float32 and self.scale.dtype == torch.float16:
            self.scale, self.zero = self.scale.float(), self.zero.float()
        self._store("codes", rows, offset, end, pack_codes(quantized.codes, self.bits))
        by = self.group if self.axis == -2 else 1
        self._store("scale", rows, offset // by, end // by, quantized.scale.to(self.scale.dtype))
        self._store("zero", rows, offset // by, end // by, quantized.zero.to(self.zero.dtype))

    def _store(self, name: str, rows: list[int], start: int, end: int, value: torch.Tensor) -> None:
        buffer = getattr(self, name)
        if len(rows) == buffer.shape[0]:  # rows are in order
            buffer[:, :, start:end] = value
        else:
            buffer[torch.tensor(rows, device=buffer.device), :, start:end] = value

    def _align(self, x: torch.Tensor, bank: torch.Tensor, first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Pattern ids [.., T] of float32 tokens [.., T, D], and their residuals; gates applied."""
        if bank.shape[2] == 1:
            return torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device), x
        rule = self.config.assign
        by_distance = {"paper": first, "l2": True, "range": False, "matched": self.side == "key"}[rule]
        ids = 1 + (assign_nearest if by_distance else assign_narrowest)(x, bank[:, :, 1:])

        def residual(ids: torch.Tensor) -> torch.Tensor:
            return x - bank.gather(2, ids[..., None].expand(-1, -1, -1, x.shape[-1]))

        found = residual(ids)
        if self.side == "value":
            ids = ids.masked_fill(~self._value_gate(x, found), 0)
        elif self.config.key_gate == "window":
            ids = ids.masked_fill(~self._key_gate(x, found), 0)
        else:
            return ids, found
        return ids, residual(ids)

    def _value_gate(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        def spread(y: torch.Tensor) -> torch.Tensor:
            low, high = y.aminmax(dim=-1)
            return high - low

        if self.config.value_gate == "none":
            return torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        rho = spread(residual) / spread(x).clamp(min=1e-12)
        return rho < 1 if self.config.value_gate == "narrower" else gate_accepts(rho, x.shape[-1])

    def _key_gate(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Per window and head: whether patterns lower the sum of squared ranges, and so the expected error."""
        length = self.config.residual_length

        def cost(y: torch.Tensor) -> torch.Tensor:
            low, high = y.unflatten(2, (-1, length // self.group, self.group)).aminmax(dim=-2)
            return (high - low).square().sum((-1, -2))

        return (cost(residual) < cost(x)).repeat_interleave(length, dim=-1)

    # --- reading ---

    def dequantize(self, tokens: int) -> torch.Tensor:
        """The first `tokens` tokens in the dtype of the model, [B, H, tokens, D]."""
        packed = self.view(tokens)
        if self.bits == PASSTHROUGH_BITS:
            states = packed.codes.clone()
        else:
            codes = unpack_codes(packed.codes, self.bits)
            states = dequantize_groups(codes, packed.scale, packed.zero, axis=self.axis)
        if self.config.num_patterns:
            bank = packed.bank.float().expand(states.shape[0], -1, -1, -1)
            # One table of all rows and heads: picking whole vectors is much faster than a gather by channel.
            first = torch.arange(bank.shape[:2].numel(), device=bank.device).view(*bank.shape[:2], 1) * bank.shape[2]
            states += bank.flatten(0, 2).index_select(0, (packed.ids + first).flatten()).view_as(states)
        return states.to(self.dtype)

    # --- rows ---

    def select(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        for name, tensor in self.tensors.items():
            if name != "bank" or self.config.bank_scope == "sequence":
                setattr(self, name, tensor.index_select(0, indices.to(tensor.device)))
        if self.codes is not None:
            self._share_ids()

    def to(self, device: torch.device | str) -> None:
        """Move every buffer."""
        for name, tensor in self.tensors.items():
            setattr(self, name, tensor.to(device, non_blocking=True))
        if self.codes is not None:
            self._share_ids()

    def shorten(self, tokens: int) -> None:
        """Release what stands behind the first `tokens` tokens."""
        for name, tensor in self.view(tokens)._asdict().items():
            if name != "bank":
                setattr(self, name, tensor.clone())
        self._share_ids()
