"""One layer of a PatternKV cache: sinks, packed windows, and a tail in full precision, per row."""

import copy
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from .attention import PackedKV
from .configuration import PatternKVConfig
from .packed import PackedStates

__all__ = ["PatternKVLayer"]


def _plain_tensors(method: Any) -> Any:
    """Make what a method keeps ordinary tensors: those of inference mode cannot be written to once it has ended."""
    return torch.inference_mode(False)(torch.no_grad()(method))


class PatternKVLayer(DynamicLayer):
    """Keys and values of a full-attention layer, quantized to mined patterns once a window of them is complete.

    Tokens are kept by row, counted from the row's first token that is no padding: `sink_length` tokens in full
    precision, then whole windows of `residual_length` packed tokens, then a tail in full precision (`keys` and
    `values`, which are the last columns of the batch). So a padded row has the codes that it would have alone. Nothing
    that is packed is ever packed again.

    Args:
        config: Of the cache.
        attention: Object with `_attn_implementation`, the model's config; decides `return_packed="auto"`.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, config: PatternKVConfig, attention: Any = None, **kwargs):
        super().__init__()
        self.config = config
        self.attention = attention
        self._clear()

    def _clear(self) -> None:
        self.sink_keys = self.sink_values = None
        self.key_states = PackedStates(self.config, "key")
        self.value_states = PackedStates(self.config, "value")
        # By row: columns of padding before the first token, packed tokens, patterns (the zero vector counted).
        self.start: list[int] = []
        self.packed: list[int] = []
        self.key_patterns: list[int] = []
        self.value_patterns: list[int] = []
        self.seen = 0
        self.record_past = False

    # --- writing ---

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take dtype, device and shapes from the first states [B, H, T, D]."""
        self.device = key_states.device
        self.dtype = key_states.dtype
        self.keys = key_states.detach()[:, :, :0]
        self.values = value_states.detach()[:, :, :0]
        self.config.value_group(value_states.shape[-1])
        for name, bits, size in (
            ("nbits_key", self.config.nbits_key, key_states.shape[-1]),
            ("nbits_value", self.config.nbits_value, value_states.shape[-1]),
        ):
            if size * min(bits, 8) % 8:
                raise ValueError(f"`{name}`={bits} does not fill whole bytes with head_dim={size}")
        rows = key_states.shape[0]
        self.start, self.packed = [0] * rows, [0] * rows
        self.key_patterns, self.value_patterns = [1] * rows, [1] * rows
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[PackedKV, PackedKV]:
        """Append states and return all that the new queries attend to.

        Args:
            key_states, value_states: [B, H, T, D], keys after their rotation.
            kwargs: `kwargs`, a dict that may hold `position_ids` [B, T], from which padding on the left is read.

        Returns:
            Keys and values [B, H, all tokens, D], those of this call exact, those packed before as they are read back;
            or, for one new token and a model that attends by "patternkv", a `PackedKV` for each.

        Raises:
            ValueError: The states are of another batch or model than those before.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        if self.keys.device != key_states.device:  # read from files, or offloaded
            self.device = key_states.device
            self.prefetch()
        tokens = key_states.shape[2]
        if self.seen == 0 and tokens:
            self.start = _padding(kwargs.get("kwargs") or {}, key_states.shape[0], tokens)
            if self.config.bank_scope == "batch" and len(set(self.start)) > 1:
                raise ValueError(
                    '`bank_scope`="batch" mines one bank from the mean over the rows, which needs rows of equal '
                    f'length, but they are padded by {self.start} tokens; use bank_scope="sequence"'
                )
        fresh = self.seen == 0
        # What is kept has no gradient: the codes would have none, and a graph would stay alive as long as the cache.
        self.keys = torch.cat([self.keys, key_states.detach()], dim=2)
        self.values = torch.cat([self.values, value_states.detach()], dim=2)
        self.seen += tokens
        if fresh:
            result = key_states, value_states
        elif tokens == 1 and self._returns_packed():
            handle = PackedKV(self)
            result = handle, handle
        else:
            result = self.dequantize()
        self._flush()
        if isinstance(result[0], PackedKV):
            result[0].take_banks(self)
        return result

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for name, new, old in (("key", key_states, self.keys), ("value", value_states, self.values)):
            if new.shape[0] != old.shape[0]:
                raise ValueError(
                    f"the cache holds {old.shape[0]} rows and got {new.shape[0]}: use `batch_repeat_interleave` or "
                    "`batch_select_indices` to change the batch, or a new cache"
                )
            if new.shape[1] != old.shape[1] or new.shape[3] != old.shape[3]:
                raise ValueError(
                    f"the cache holds {name} states of {old.shape[1]} heads of {old.shape[3]} channels and got "
                    f"{new.shape[1]} of {new.shape[3]}: it belongs to another model"
                )
            if new.dtype != old.dtype:
                raise ValueError(
                    f"the cache holds {name} states in {old.dtype} and got {new.dtype}: load the model with "
                    f"dtype={old.dtype}, or make a new cache"
                )

    def _returns_packed(self) -> bool:
        choice = self.config.return_packed
        if choice == "auto":
            choice = getattr(self.attention, "_attn_implementation", None) == "patternkv"
        # The private passthrough has no codes to attend over.
        return bool(choice) and max(self.config.nbits_key, self.config.nbits_value) <= 8 and any(self.packed)

    @_plain_tensors
    def _flush(self) -> None:
        """Pack every whole window of the tail; with a past to record, the last window's worth of tokens stays."""
        config, length = self.config, self.config.residual_length
        spare = length if self.record_past else 0
        groups: dict[tuple[int, int, int, int], list[int]] = {}
        for row, (start, packed) in enumerate(zip(self.start, self.packed)):
            first_free = start + config.sink_length + packed
            windows = (self.seen - spare - first_free) // length
            if windows > 0:
                # Rows of a group stand at the same place; at a first flush they also mine from equally many tokens.
                groups.setdefault((packed, windows, self.seen - first_free, start if not packed else -1), []).append(
                    row
                )
        if not groups:
            return
        tail = self.keys.shape[2]
        most = max(packed + windows * length for packed, windows, _, _ in groups)
        for states, side in ((self.key_states, self.keys), (self.value_states, self.values)):
            if states.codes is None:
                states.allocate(side, most)
            states.reserve(most)
        if self.sink_keys is None:  # sinks leave the tail with their row's first window
            shape = (*self.keys.shape[:2], config.sink_length)
            self.sink_keys = self.keys.new_zeros(*shape, self.keys.shape[3])
            self.sink_values = self.values.new_zeros(*shape, self.values.shape[3])
        for (packed, windows, remaining, _), rows in groups.items():
            column = tail - remaining
            picked = slice(None) if len(rows) == len(self.start) else torch.tensor(rows, device=self.keys.device)
            for states, side, sinks, patterns in (
                (self.key_states, self.keys[picked], self.sink_keys, self.key_patterns),
                (self.value_states, self.values[picked], self.sink_values, self.value_patterns),
            ):
                first = not packed
                if first:
                    sinks[picked] = side[:, :, column - config.sink_length : column]
                    count = states.mine(rows, side[:, :, column:])
                else:
                    count = patterns[rows[0]]
                window = side[:, :, column : column + windows * length]
                count = states.append(rows, packed, window, count, first=first)
                for row in rows:
                    patterns[row] = count
            for row in rows:
                self.packed[row] = packed + windows * length
        self._trim()

    def _first_column(self, row: int) -> int:
        """Column of the row's first token that is in the tail."""
        packed = self.packed[row]
        return self.start[row] + (self.config.sink_length + packed if packed else 0)

    def _trim(self) -> None:
        """Drop the columns of the tail that no row needs any more."""
        keep = self.seen - min(self._first_column(row) for row in range(len(self.start)))
        if keep < self.keys.shape[2]:
            # A copy: a slice would keep the whole prompt alive.
            self.keys = self.keys[:, :, self.keys.shape[2] - keep :].clone()
            self.values = self.values[:, :, self.values.shape[2] - keep :].clone()

    # --- reading ---

    def dequantize(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values as a query of the next call would see them, [B, H, seen, D] in the model's dtype.

        Columns of padding hold what masks must hide.
        """
        longest = max(self.packed, default=0)
        if not longest:
            return self._pad_left(self.keys), self._pad_left(self.values)
        parts = []
        index = self._column_index(longest)
        for states, sinks, tail in (
            (self.key_states, self.sink_keys, self.keys),
            (self.value_states, self.sink_values, self.values),
        ):
            whole = torch.cat([sinks, states.dequantize(longest), tail], dim=2)
            if index is not None:
                whole = whole.gather(2, index[:, None, :, None].expand(-1, whole.shape[1], -1, whole.shape[3]))
            parts.append(whole)
        return parts[0], parts[1]

    def _pad_left(self, tail: torch.Tensor) -> torch.Tensor:
        missing = self.seen - tail.shape[2]
        return torch.nn.functional.pad(tail, (0, 0, missing, 0)) if missing else tail

    def _column_index(self, longest: int) -> torch.Tensor | None:
        """Where each column of the batch lies in [sinks, packed, tail], int64 [B, seen]; None if in that order."""
        sinks, tail = self.config.sink_length, self.keys.shape[2]
        if not any(self.start) and len(set(self.packed)) == 1 and sinks + longest + tail == self.seen:
            return None
        device = self.keys.device
        column = torch.arange(self.seen, device=device)
        start = torch.tensor(self.start, device=device)[:, None]
        packed = torch.tensor([sinks + p if p else 0 for p in self.packed], device=device)[:, None]
        place = column - start
        return torch.where(place < packed, place.clamp(min=0), sinks + longest + column - (self.seen - tail))

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return self.seen

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that the layer keeps alive, by name."""
        found = {
            "keys": self.keys,
            "values": self.values,
            "sink_keys": self.sink_keys,
            "sink_values": self.sink_values,
        }
        found |= {f"key_{name}": tensor for name, tensor in self.key_states.tensors.items()}
        found |= {f"value_{name}": tensor for name, tensor in self.value_states.tensors.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    # --- what generation does to a cache ---

    @_plain_tensors
    def __deepcopy__(self, memo: dict[int, Any]) -> "PatternKVLayer":
        # The options and the model's config are the model's and the user's own objects, not this cache's.
        memo |= {id(self.config): self.config, id(self.attention): self.attention}
        twin = memo[id(self)] = type(self).__new__(type(self))
        vars(twin).update((name, copy.deepcopy(value, memo)) for name, value in vars(self).items())
        return twin

    def reset(self) -> None:
        """Forget everything, patterns included."""
        super().reset()
        self._clear()

    def activate_past_recording(self) -> None:
        """Keep the last `residual_length` tokens unpacked from now on, so that cropping up to that many is exact."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, given as a negative number.

        Tokens of the tail are removed exactly. Beyond it, whole windows go, and what remains of a window that is cut
        stays in the tail as it was read back from its codes.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"`crop` takes a negative number, the tokens to remove from the end, got {tokens_to_remove}"
            )
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        left = self.seen + tokens_to_remove
        if left <= 0:
            recording = self.record_past
            self.reset()
            self.record_past = recording
            return
        if any(self._first_column(row) > left for row in range(len(self.start))):
            self._unpack_beyond(left)
        tail = max(0, self.keys.shape[2] + tokens_to_remove)
        self.keys, self.values = self.keys[:, :, :tail], self.values[:, :, :tail]
        self.seen = left
        # A row of which only padding is left begins with what comes next.
        self.start = [min(start, left) for start in self.start]
        if self.record_past:
            self._flush()

    @_plain_tensors
    def _unpack_beyond(self, left: int) -> None:
        """Bring back into the tail what rows hold of the windows that reach beyond column `left`."""
        sinks, length = self.config.sink_length, self.config.residual_length
        keys, values = self.dequantize()
        for row, start in enumerate(self.start):
            inside = max(0, left - start - sinks) // length * length
            self.packed[row] = min(self.packed[row], inside)
        begin = min(self._first_column(row) for row in range(len(self.start)))
        self.keys, self.values = keys[:, :, begin:].clone(), values[:, :, begin:].clone()
        most = max(self.packed)
        for states, counts in ((self.key_states, self.key_patterns), (self.value_states, self.value_patterns)):
            if most:
                states.shorten(most)
            for row, packed in enumerate(self.packed):
                # Those of windows that are gone may be written over; the mined ones stay.
                mined = min(self.config.num_patterns, counts[row] - 1)
                used = int(states.ids[row, :, :packed].max()) if packed else 0
                counts[row] = 1 + max(mined, used) if packed else 1
        if not most:
            self.sink_keys = self.sink_values = None
            self.key_states = PackedStates(self.config, "key")
            self.value_states = PackedStates(self.config, "value")

    @_plain_tensors
    def _select(self, indices: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        order = indices.tolist()
        for name in ("start", "packed", "key_patterns", "value_patterns"):
            setattr(self, name, [getattr(self, name)[row] for row in order])
        for name in ("keys", "values", "sink_keys", "sink_values"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, indices.to(tensor.device)))
        self.key_states.select(indices)
        self.value_states.select(indices)
        if order:
            self._trim()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Put the rows in the order of the beams."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._select(torch.arange(len(self.start)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, given by number or by a mask."""
        self._select(torch.arange(len(self.start))[torch.as_tensor(indices).cpu()])

    def offload(self) -> None:
        """Move everything to the CPU."""
        self._move("cpu")

    def prefetch(self) -> None:
        """Move everything back."""
        if self.is_initialized:
            self._move(self.device)

    @_plain_tensors
    def _move(self, device: torch.device | str) -> None:
        if not self.is_initialized:
            return
        for name in ("keys", "values", "sink_keys", "sink_values"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.to(device, non_blocking=True))
        self.key_states.to(device)
        self.value_states.to(device)


def _padding(arguments: dict[str, Any], rows: int, tokens: int) -> list[int]:
    """Columns of padding on the left of each row, read from position ids that count up from 0 to the last column."""
    positions = arguments.get("position_ids")
    if positions is None:
        return [0] * rows
    if positions.ndim == 3:  # multimodal positions: the first plane is the text's
        positions = positions[0]
    if positions.shape[-1] != tokens:
        return [0] * rows
    positions = positions.expand(rows, -1)
    start = tokens - 1 - positions[:, -1]
    expected = torch.arange(tokens, device=positions.device) - start[:, None]
    # Under padding, generate writes one number below 2; an image's positions there would be others.
    right = torch.where(expected < 0, positions < 2, positions == expected).all(-1) & (start >= 0)
    return torch.where(right, start, 0).tolist()
