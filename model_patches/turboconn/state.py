"""The state of the links in a cache: an extra layer of any dynamic `Cache`, so that beams and crops carry it along."""

import torch
from transformers.cache_utils import Cache, DummyLayer


class TurboStateLayer(DummyLayer):
    """What the source layers wrote for the last tokens of each sequence, as the last layer of a `Cache`.

    `Cache` loops over its layers to reorder beams, crop, repeat and select rows, so the state follows every operation
    of `generate` and needs no cache class of its own. It is a `DummyLayer` because those are the layers that masks and
    offloading pass over: this one holds no keys and values.

    Args:
        group_size: `g`: tokens that a link reaches back, hence the states that the next token needs.
        history: Tokens whose states are kept, at least `g`: a crop may remove `history - g`.

    Attributes:
        states: `[S, B, n, d]`, the last `n` tokens' (`g` tokens of zeros stand before the first); None when empty.
        seen: Tokens written, those whose states are no longer kept included.
    """

    is_compileable = False

    def __init__(self, group_size: int, history: int) -> None:
        super().__init__()
        self.group_size, self.history = group_size, history
        self.states: torch.Tensor | None = None
        self.seen = 0
        self.record_past = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tokens={self.seen})"

    def wanted(self, tokens: int) -> int:
        """Of how many of the last tokens `append` keeps the states when `tokens` are new."""
        # A crop to come may remove all that is written now (assisted generation, which asks for it beforehand).
        return self.history + (tokens if self.record_past else 0)

    def append(self, states: torch.Tensor, tokens: int | None = None) -> None:
        """Add the states of new tokens and forget those that are too old.

        Args:
            states: `[S, B, n, d]`.
            tokens: How many tokens are new, where `states` are of the last of them only, `wanted(tokens)` or more.
        """
        tokens = states.shape[2] if tokens is None else tokens
        kept = self.wanted(tokens)
        if self.states is None:
            number, batch, _, width = states.shape
            self.states = states.new_zeros(number, batch, self.group_size, width)
        missing = kept - states.shape[2]
        if missing > 0:
            states = torch.cat([self.states[:, :, -missing:], states.to(self.states.device)], dim=2)
        self.states = states[:, :, -kept:]
        self.seen += tokens

    def window(self) -> torch.Tensor | None:
        """`[S, B, g, d]`: the states that the next `g` tokens' links read; None when nothing was written yet."""
        return None if self.states is None else self.states[:, :, -self.group_size :]

    def get_seq_length(self) -> int:
        """Tokens written."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys for a mask: those of a layer that keeps everything."""
        return self.seen + query_length, 0

    def activate_past_recording(self) -> None:
        """Keep the states of all tokens of the next call until `crop` is called."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: A positive number, or more tokens than the kept states allow.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): a positive length is not supported; crop(-n) removes n tokens"
            )
        if self.states is None:
            return
        removed = -tokens_to_remove
        if removed >= self.seen:
            self.reset()
            return
        kept = self.states.shape[2]
        if kept - removed < self.group_size:
            raise ValueError(
                f"crop({tokens_to_remove}) removes {removed} tokens, but the links' states of only {kept} tokens are "
                f"kept and the next token needs {self.group_size} of them: at most {kept - self.group_size} can be "
                f"removed. Set TurboConnConfig(history={removed + self.group_size}) or more, or call "
                "cache.activate_past_recording() before the call that is to be undone"
            )
        self.seen -= removed
        self.states = self.states[:, :, max(0, kept - removed - self.history) : kept - removed]

    def reset(self) -> None:
        """Forget everything."""
        self.states, self.seen = None, 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row `i` continue what row `beam_idx[i]` was."""
        if self.states is not None:
            self.states = self.states.index_select(1, beam_idx.to(self.states.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, one after the other."""
        if self.states is not None:
            self.states = self.states.repeat_interleave(repeats, dim=1)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` only."""
        if self.states is not None:
            self.states = self.states[:, indices]


def state_layer(cache: Cache) -> TurboStateLayer | None:
    """The state of the links in a cache, or None when it has none.

    Recognised by what it can do: a cache may come from another copy of this file.
    """
    last = cache.layers[-1] if cache.layers else None
    return last if hasattr(last, "window") and hasattr(last, "append") else None
