"""One layer of an LRAgent cache: base states in lanes, low-rank states by agent."""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

__all__ = ["Growing", "LRAgentLayer", "LowRank"]

SHARED = "*"


def plain_tensors(method: Any) -> Any:
    """Make what a method keeps ordinary tensors: those of inference mode cannot be written to once it has ended."""
    return torch.inference_mode(False)(torch.no_grad()(method))


class Growing:
    """A tensor that grows along one dimension, with room for some more tokens: at least 32, and a sixteenth.

    Args:
        dim: The dimension of the tokens.
    """

    def __init__(self, dim: int):
        self.dim = dim
        self.data: torch.Tensor | None = None
        self.length = 0

    @plain_tensors
    def write(self, start: int, states: torch.Tensor) -> None:
        """Put states at `start`, at most the length, and end with them."""
        count = states.shape[self.dim]
        end = start + count
        if self.data is None:
            # A prompt gets its own size, as in a DynamicCache; room is made when it grows.
            self.data = states.detach().clone(memory_format=torch.contiguous_format)
        else:
            if self.data.device != states.device:  # read from files, or offloaded
                self.data = self.data.to(states.device)
            if end > self.data.shape[self.dim]:
                shape = list(self.data.shape)
                shape[self.dim] = end + max(32, end // 16)
                grown = self.data.new_empty(shape)
                grown.narrow(self.dim, 0, start).copy_(self.data.narrow(self.dim, 0, start))
                self.data = grown
            self.data.narrow(self.dim, start, count).copy_(states.detach())
        self.length = end

    def view(self, length: int | None = None) -> torch.Tensor:
        """The first tokens, without a copy."""
        return self.data.narrow(self.dim, 0, self.length if length is None else length)

    def crop(self, length: int) -> None:
        """Keep the first tokens. The memory of the others stays until there is room for many more than are left."""
        self.length = min(self.length, length)
        if self.data is None:
            return
        if not self.length:
            self.data = None
        elif self.data.shape[self.dim] > self.length + max(64, self.length // 8):
            self._keep(self.view().clone())

    def select(self, rows: torch.Tensor) -> None:
        """Put rows in this order."""
        if self.data is not None:
            self._keep(self.view().index_select(0, rows.to(self.data.device)))

    @plain_tensors
    def _keep(self, data: torch.Tensor) -> None:
        self.data = data.clone() if data.is_inference() else data

    @plain_tensors
    def to(self, device: torch.device | str) -> None:
        """Move to a device."""
        if self.data is not None:
            self.data = self.data.to(device, non_blocking=True)

    def bytes_in_use(self) -> int:
        """Bytes of the tokens, room left out."""
        return 0 if self.data is None else self.view().numel() * self.data.element_size()


class Base:
    """Base states of a lane: keys after their rotation and values, [B, H, T, D]."""

    def __init__(self):
        self.keys, self.values = Growing(2), Growing(2)

    @property
    def length(self) -> int:
        """Tokens."""
        return self.keys.length

    def parts(self) -> dict[str, Growing]:
        """What it keeps, by name."""
        return {"keys": self.keys, "values": self.values}


class LowRank:
    """Low-rank states of an agent, or of all: u = A x of the keys' and the values' adapter, [B, T, r].

    `length` counts tokens that the agent has read, also where an adapter leaves this layer alone.
    """

    def __init__(self):
        self.u_k, self.u_v = Growing(1), Growing(1)
        self.length = 0

    def write(self, start: int, count: int, u_k: torch.Tensor | None, u_v: torch.Tensor | None) -> None:
        """Put the states of `count` tokens at `start`."""
        for side, u in ((self.u_k, u_k), (self.u_v, u_v)):
            if u is not None:
                side.write(start, u)
        self.length = start + count

    def crop(self, length: int) -> None:
        """Keep the first tokens."""
        self.length = min(self.length, length)
        self.u_k.crop(length)
        self.u_v.crop(length)

    def parts(self) -> dict[str, Growing]:
        """What it keeps, by name."""
        return {"u_k": self.u_k, "u_v": self.u_v}


class LRAgentLayer(DynamicLayer):
    """Base states and low-rank states of one full-attention layer.

    A lane holds one run of base states: `"*"` that of all agents, or, with `mode="none"`, one per agent. `low_rank`
    holds u by agent, or under `"*"` if it is shared. `LRAgentCache` sets the focus: whose view `update` appends to and
    `get_seq_length` tells of.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, **kwargs):
        super().__init__()
        self._clear()

    def _clear(self) -> None:
        self.lanes: dict[str, Base] = {}
        self.low_rank: dict[str, LowRank] = {}
        # The lane that is read and written, and the agent whose u goes along; None: nobody's.
        self.lane: str | None = None
        self.agent: str | None = None

    # `keys` and `values` are attributes of the host's layers; here they are what the focus sees of the base part.

    @property
    def keys(self) -> torch.Tensor | None:
        """Base keys [B, H, T, D] that the focus sees, without the adapter's part."""
        return self._seen("keys")

    @keys.setter
    def keys(self, _: Any) -> None:
        pass

    @property
    def values(self) -> torch.Tensor | None:
        """Base values [B, H, T, D] that the focus sees, without the adapter's part."""
        return self._seen("values")

    @values.setter
    def values(self, _: Any) -> None:
        pass

    def _seen(self, name: str) -> torch.Tensor | None:
        base = self.lanes.get(self.lane or next(iter(self.lanes), SHARED))
        return base.parts()[name].view(self.get_seq_length()) if base is not None and base.length else None

    def focus(self, lane: str | None, agent: str | None) -> None:
        """Set whose states are read and written from now on."""
        self.lane, self.agent = lane, agent

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take dtype and device from the first states."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        u_k: torch.Tensor | None = None,
        u_v: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append what is new and return the base states that the new queries attend to.

        Tokens that the lane holds already keep the states of their owner; the agent's own u is kept all the same.

        Args:
            key_states, value_states: base states [B, H, n, D], keys after their rotation.
            u_k, u_v: [B, n, r] of this agent, or None.

        Returns:
            Views [B, H, T, D] of the base keys and values; `low_rank` has u.

        Raises:
            ValueError: No agent is in focus, or the states are of another batch, model or dtype than those before.
        """
        if self.lane is None:
            raise ValueError("an LRAgentCache is used inside `with cache.agent(name):` only, and no agent is active")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        base = self.lanes.setdefault(self.lane, Base())
        self._check(base, key_states, value_states)
        start, count = self.get_seq_length(), key_states.shape[2]
        fresh = start + count - base.length
        if fresh > 0:
            at = base.length
            base.keys.write(at, key_states[:, :, count - fresh :])
            base.values.write(at, value_states[:, :, count - fresh :])
        if self.agent is not None:
            own = self.low_rank.setdefault(self.agent, LowRank())
            own.write(start, count, *(None if u is None else u.to(key_states.dtype) for u in (u_k, u_v)))
        return base.keys.view(start + count), base.values.view(start + count)

    def _check(self, base: Base, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for name, new, old in (("key", key_states, base.keys.data), ("value", value_states, base.values.data)):
            if old is None:
                continue
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

    def get_seq_length(self) -> int:
        """Tokens that the agent in focus need not read any more; without one, those of the longest lane."""
        if self.lane is None:
            return max((base.length for base in self.lanes.values()), default=0)
        base = self.lanes.get(self.lane)
        held = 0 if base is None else base.length
        if self.agent is None:
            return held
        own = self.low_rank.get(self.agent)
        return 0 if own is None else min(own.length, held)

    # --- what generation does to a cache ---

    def _lanes(self) -> list[str]:
        """Lanes that an operation on rows or tokens is for: that of the focus, or all."""
        return list(self.lanes) if self.lane is None else [name for name in self.lanes if name == self.lane]

    def holdings(self) -> dict[str, Growing]:
        """Every growing tensor of the layer, by name."""
        found = {f"base.{lane}.{n}": part for lane, base in self.lanes.items() for n, part in base.parts().items()}
        found |= {f"low.{key}.{n}": part for key, low in self.low_rank.items() for n, part in low.parts().items()}
        return {name: part for name, part in found.items() if part.data is not None}

    def cut(self, lane: str, length: int) -> None:
        """Keep the first tokens of a lane, and of every u that goes with it."""
        base = self.lanes.get(lane)
        if base is not None:
            base.keys.crop(length)
            base.values.crop(length)
            if not length:
                del self.lanes[lane]
        for low in self.low_rank.values():  # with lanes of their own, agents have no u
            low.crop(length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, given as a negative number, of the focus's view; without one, of all lanes.

        An agent that is behind the others loses its own u only: the base part is the others' too.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"`crop` takes a negative number, the tokens to remove from the end, got {tokens_to_remove}"
            )
        if not tokens_to_remove:
            return
        for lane in self._lanes():
            held = self.lanes[lane].length
            view = held if self.lane is None else self.get_seq_length()
            left = max(0, view + tokens_to_remove)
            if view < held and self.agent is not None:
                self.low_rank[self.agent].crop(left)
            else:
                self.cut(lane, left)

    def reset(self) -> None:
        """Forget everything; the focus stays."""
        lane, agent = self.lane, self.agent
        super().reset()
        self._clear()
        self.focus(lane, agent)

    def _select(self, rows: torch.Tensor) -> None:
        for lane in self._lanes():
            for part in self.lanes[lane].parts().values():
                part.select(rows)
        for low in self.low_rank.values():
            for part in low.parts().values():
                part.select(rows)

    def _rows(self) -> int:
        return next((self.lanes[lane].keys.data.shape[0] for lane in self._lanes()), 0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Put the rows in the order of the beams."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._select(torch.arange(self._rows()).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, given by number or by a mask."""
        self._select(torch.arange(self._rows())[torch.as_tensor(indices).cpu()])

    def offload(self) -> None:
        """Move everything to the CPU."""
        for part in self.holdings().values():
            part.to("cpu")

    def prefetch(self) -> None:
        """Move everything back."""
        for part in self.holdings().values():
            part.to(self.device)
