"""LRAgent as a transformers `Cache`: one store of base states for agents that are LoRA adapters of one model."""

import contextlib
import copy
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache

from .attention import NAME, LowRankView
from .configuration import LRAgentConfig
from .content import Survey, Watch
from .functional import common_prefix
from .layer import SHARED, Growing, LRAgentLayer
from .lora import Agent, check_adapter, check_inference, check_model, enabled_of

__all__ = ["LRAgentCache", "Track"]


class Track:
    """What a lane holds beside its states: token ids, visibility, rotations, and who read which token first."""

    def __init__(self):
        self.ids, self.visible = Growing(1), Growing(1)
        self.cos, self.sin = Growing(1), Growing(1)
        # (end, key of the agent's content), in order: tokens up to `end` that the one before does not cover.
        self.owners: list[tuple[int, str]] = []
        self.turn = 0  # tokens that were there when the last call of `generate` began

    @property
    def length(self) -> int:
        """Tokens."""
        return self.ids.length

    def parts(self) -> dict[str, Growing]:
        """What it keeps, by name."""
        found = {"ids": self.ids, "visible": self.visible, "cos": self.cos, "sin": self.sin}
        return {name: part for name, part in found.items() if part.data is not None}

    def append(self, ids: torch.Tensor, visible: torch.Tensor, owner: str) -> None:
        """Add tokens [B, n] that an agent is about to read."""
        start = self.length
        self.ids.write(start, ids)
        self.visible.write(start, visible)
        if self.owners and self.owners[-1][1] == owner:
            self.owners.pop()
        self.owners.append((self.length, owner))

    def rotate_by(self, start: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Keep the rotations [B or 1, n, R] of the tokens from `start` on, unless they are there."""
        fresh = start + cos.shape[1] - self.cos.length
        if fresh <= 0:
            return
        for held, new in ((self.cos, cos), (self.sin, sin)):
            if held.data is not None and held.data.shape[0] != new.shape[0]:
                rows = max(held.data.shape[0], new.shape[0])
                held.data = held.data.expand(rows, -1, -1).clone()
                new = new.expand(rows, -1, -1)
            held.write(held.length, new[:, new.shape[1] - fresh :])

    def cut(self, length: int) -> None:
        """Keep the first tokens."""
        for part in self.parts().values():
            part.crop(length)
        kept, start = [], 0
        for end, owner in self.owners:
            if start < length:
                kept.append((min(end, length), owner))
            start = end
        self.owners = kept
        self.turn = min(self.turn, length)

    def first_of(self, owner: str) -> int | None:
        """The first token that an agent's content read, or None."""
        start = 0
        for end, key in self.owners:
            if key == owner:
                return start
            start = end
        return None

    def select(self, rows: torch.Tensor) -> None:
        """Put rows in this order."""
        count = self.ids.data.shape[0] if self.ids.data is not None else 1
        for part in self.parts().values():
            if part.data.shape[0] == count:  # one row of rotations may serve all
                part.select(rows)


class LRAgentCache(Cache):
    """A key/value cache that agents share, each a LoRA adapter of one model.

    Args:
        model (`PeftModel`):
            The model, after `enable_lragent(model)`.
        config (`LRAgentConfig`, *optional*):
            What is shared. Default: `LRAgentConfig()`.
        fields:
            Fields of `LRAgentConfig`, in place of `config`.

    Raises:
        ValueError: `enable_lragent` was not called, or was with other targets, or both kinds of options are given.

    Example:
        >>> enable_lragent(model)
        >>> cache = LRAgentCache(model)
        >>> with cache.agent("planner"):
        ...     ids = model.generate(input_ids=ids, cache=cache, max_new_tokens=64)
        >>> with cache.agent("actor"):
        ...     ids = model.generate(input_ids=ids, cache=cache, max_new_tokens=64)
        >>> cache.memory_report()["ratio"]

    States belong to what an adapter contains, not to its name: a hash of all its tensors, its scaling and the base
    weights. What an adapter has read before it was changed is dropped when an agent next becomes active.
    """

    def __init__(self, model: Any, config: LRAgentConfig | None = None, **fields: Any):
        if config is not None and fields:
            raise ValueError(f"give `config` or its fields ({', '.join(sorted(fields))}), not both")
        enabled = enabled_of(model)
        self.config = config or LRAgentConfig.from_dict({"targets": enabled.config.targets, **fields})
        if self.config.targets != enabled.config.targets:
            raise ValueError(
                f"the cache's targets are {self.config.targets} and the model's {enabled.config.targets}: call "
                "enable_lragent(model, config) with the same config"
            )
        self.model = model
        # The mode that "auto" became, once an agent was active.
        self.mode: str | None = None if self.config.mode == "auto" else self.config.mode
        self.agents: dict[str, str] = {}  # name -> key of its content when it was last active
        self.tracks: dict[str, Track] = {}
        self._agent: Agent | None = None
        self._watch: Watch | None = None
        self._warned = False
        super().__init__(layers=[LRAgentLayer() for _ in enabled.records])

    # --- agents ---

    @property
    def splits(self) -> bool:
        """Whether the adapter's part is kept apart from the base part."""
        return self.mode in ("base_shared", "base_lr_shared")

    @contextlib.contextmanager
    def agent(self, name: str) -> Iterator["LRAgentCache"]:
        """Make an adapter of the model the active one, and this cache its cache, until the block ends.

        Inside, `model.generate(..., cache=cache)` reads only what nobody has read for this agent. It compares the
        prompt with the tokens that are held, as `sync` does.

        Args:
            name: The adapter's name.

        Raises:
            ValueError: There is no such adapter or it cannot be kept apart, adapters are merged, disabled or several
                active, the model is in training mode, another agent is active, or the mode needs equal A and they
                are not.
        """
        enabled = enabled_of(self.model)
        if enabled.active is not None:
            raise ValueError("another agent of this model is active: agents take turns, leave its `with` block first")
        survey = Survey(enabled.base)
        check_inference(self.model, survey)
        check_model(self.model, survey)
        check_adapter(self.model, enabled, name)
        self._choose_mode(enabled)
        self._drop_changed(enabled, name, survey)
        self._level()
        agent = Agent(name, self.agents[name], enabled.matrices(name) if self.splits else {})
        attention, base = enabled.base.config._attn_implementation, enabled.base
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave)
            stack.enter_context(enabled.activate(self.model, agent, self, survey))
            stack.enter_context(_watched_generate(base, self))
            if self.splits:
                stack.callback(base.set_attn_implementation, attention)
                base.set_attn_implementation(NAME)
            self._agent, self._watch = agent, Watch(survey, name)
            lane = agent.key if self.mode == "none" else SHARED
            # An agent without low-rank states of its own sees the base states as they are.
            own = {"base_shared": agent.key, "base_lr_shared": SHARED}.get(self.mode) if agent.matrices else None
            for layer in self.layers:
                layer.focus(lane, own)
            yield self

    def _leave(self) -> None:
        self._agent = self._watch = None
        for layer in self.layers:
            layer.focus(None, None)
        self._level()

    def _choose_mode(self, enabled: Any) -> None:
        if self.config.mode not in ("auto", "base_lr_shared"):
            return
        differing = enabled.shared_a(self.model) if self.mode in (None, "base_lr_shared") else None
        if self.config.mode == "base_lr_shared":
            if differing:
                raise ValueError(
                    f'mode="base_lr_shared" needs adapters of one A: {differing}; make them by '
                    '`create_shared_a_adapter`, or use mode="auto" or "base_shared"'
                )
        elif self.mode is None:
            self.mode = "base_shared" if differing else "base_lr_shared"
        elif differing:
            # The base states stay as good as they were; low-rank ones of another A are nobody's any more.
            self.mode = "base_shared"
            for layer in self.layers:
                layer.low_rank.clear()

    def _drop_changed(self, enabled: Any, name: str, survey: Survey) -> None:
        """Forget what adapters read whose content is another one now."""
        known = self.model.peft_config
        found = {other: enabled.key(other, survey) for other in {*self.agents, name} if other in known}
        before = dict(self.agents)
        self.agents |= found
        for stale in set(before.values()) - set(self.agents.values()):
            for lane, track in list(self.tracks.items()):
                first = 0 if lane == stale else track.first_of(stale)
                if first is not None:
                    self._cut(lane, first)
            for layer in self.layers:
                layer.low_rank.pop(stale, None)

    def _level(self) -> None:
        """Bring layers that a broken call left at different lengths to that of the shortest."""
        for lane, track in list(self.tracks.items()):
            held = [layer.lanes[lane].length if lane in layer.lanes else 0 for layer in self.layers]
            if {track.length, *held} != {track.length}:
                self._cut(lane, min(track.length, *held))
        for key in {key for layer in self.layers for key in layer.low_rank}:
            lengths = [layer.low_rank[key].length if key in layer.low_rank else 0 for layer in self.layers]
            if len(set(lengths)) > 1:
                for layer in self.layers:
                    if key in layer.low_rank:
                        layer.low_rank[key].crop(min(lengths))

    # --- tokens ---

    def sync(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Keep what is held of a prompt's prefix, and drop the states behind it.

        At least the prompt's last token is left to be read. `generate` inside `agent()` calls this, unless
        `check_prefix=False`.

        Args:
            input_ids: int64 [B, n], the whole prompt.
            attention_mask: [B, n], if rows are padded.

        Returns:
            Tokens that need not be read.
        """
        for lane in self._lanes():
            track = self.tracks[lane]
            held, ids = track.ids.view(), input_ids
            if held.shape[0] != ids.shape[0]:
                if held.shape[0] % ids.shape[0]:
                    continue  # the layers will say so
                ids = ids.repeat_interleave(held.shape[0] // ids.shape[0], dim=0)
            prefix = common_prefix(held, ids)
            if attention_mask is not None and attention_mask.ndim == 2 and prefix:
                mask = attention_mask.bool()
                if mask.shape[0] != held.shape[0]:
                    mask = mask.repeat_interleave(held.shape[0] // mask.shape[0], dim=0)
                prefix = min(prefix, common_prefix(track.visible.view(), mask))
            if prefix < min(track.length, ids.shape[1]) or (prefix < track.length and self._agent is None):
                self._warn_of_cut(track, prefix)
                self._cut(lane, prefix)
            view, most = self.get_seq_length(), ids.shape[1] - 1  # one token must be read, for its logits
            if view > most:
                key = self.layers[0].agent
                if self._agent is not None and key not in (None, SHARED):
                    # What others have read stays: `begin` will see whether this agent goes on with the same tokens.
                    for layer in self.layers:
                        layer.low_rank[key].crop(most)
                else:
                    self._cut(lane, most)
            track.turn = track.length
        return self.get_seq_length()

    def _warn_of_cut(self, track: Track, prefix: int) -> None:
        if prefix < track.turn and not self._warned:
            self._warned = True
            warnings.warn(
                f"the prompt shares only its first {prefix} tokens with the {track.length} that the cache holds, less "
                f"than the {track.turn} before the last turn: the states behind are dropped, and read again. Put what "
                "differs between agents, such as a role's instruction, behind the shared trajectory",
                stacklevel=4,
            )

    def begin(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        """Note the tokens of a forward call; the hook of `enable_lragent` calls it.

        Raises:
            ValueError: The batch is another one, or the adapter was changed since it became active.
        """
        agent, enabled = self._agent, enabled_of(self.model)
        if enabled.base.training:
            raise ValueError("the model is in training mode, and an LRAgentCache is for inference: call model.eval()")
        if self._watch.changed():
            raise ValueError(
                f"adapter {agent.name!r} was changed while it is active, so its states would be of two contents: "
                "leave the `with` block of `agent()` first"
            )
        lane = agent.key if self.mode == "none" else SHARED
        track = self.tracks.setdefault(lane, Track())
        start, count = self.get_seq_length(), input_ids.shape[1]
        visible = torch.ones_like(input_ids, dtype=torch.bool)
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            if attention_mask.shape[1] >= start + count:
                visible = attention_mask[:, start : start + count].bool()
        if track.length and track.ids.data.shape[0] != input_ids.shape[0]:
            raise ValueError(
                f"the cache holds {track.ids.data.shape[0]} rows and got {input_ids.shape[0]}: use "
                "`batch_repeat_interleave` or `batch_select_indices` to change the batch, or a new cache"
            )
        known = min(count, track.length - start)
        if known > 0:
            # Others have read on from here; what they read must be what this agent reads now.
            same = min(
                common_prefix(track.ids.view()[:, start:], input_ids),
                common_prefix(track.visible.view()[:, start:], visible),
            )
            if same < known:
                self._cut(lane, start + same)
                known = same
        known = max(known, 0)
        if known < count:
            track = self.tracks.setdefault(lane, track)
            track.append(input_ids[:, known:], visible[:, known:], agent.key)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the base states of a layer and what its adapter made of the tokens; see `LRAgentLayer.update`.

        Raises:
            ValueError: No agent is active, the cache has no such layer, or the adapter did not run.
        """
        if self._agent is None:
            raise ValueError("an LRAgentCache is used inside `with cache.agent(name):` only, and no agent is active")
        records = enabled_of(self.model).records
        if layer_idx >= len(records):
            raise ValueError(f"layer {layer_idx} of a cache of {len(records)} layers: it belongs to another model")
        record, layer, agent = records[layer_idx], self.layers[layer_idx], self._agent
        track = self.tracks[agent.key if self.mode == "none" else SHARED]
        found = {}
        for side in ("k", "v"):
            if (layer_idx, side) in agent.matrices:
                if side not in record.u or record.u[side].shape[:2] != key_states.shape[::2]:
                    raise ValueError(
                        f"adapter {agent.name!r} did not run on {record.path}, {side}_proj, for all rows: it is "
                        "disabled, merged or switched inside `with cache.agent(...)`, or rows have `adapter_names`"
                    )
                found[f"u_{side}"] = record.u[side]
        start = layer.get_seq_length()
        keys, values = super().update(key_states, value_states, layer_idx, *args, **found, **kwargs)
        if not self.splits:
            return keys, values
        if record.rotary is not None and record.layout and "k_proj" in self.config.targets:
            track.rotate_by(start, *record.rotary)
        if found:
            record.low_rank = self._view(agent, record, layer, track, keys.shape[2])
        return keys, values

    def _view(self, agent: Agent, record: Any, layer: LRAgentLayer, track: Track, tokens: int) -> LowRankView:
        low = layer.low_rank[layer.agent]
        key, value = (agent.matrices.get((record.index, side)) for side in ("k", "v"))
        turned = key is not None and record.layout is not None
        return LowRankView(
            low.u_k.view(tokens) if key else None,
            low.u_v.view(tokens) if value else None,
            key.b if key else None,
            value.b if value else None,
            key.scale if key else 1.0,
            value.scale if value else 1.0,
            track.cos.view(tokens) if turned else None,
            track.sin.view(tokens) if turned else None,
            record.layout,
        )

    # --- what generation does to a cache ---

    def _lanes(self) -> list[str]:
        """Lanes that an operation is for: that of the active agent, or all."""
        if self._agent is None:
            return list(self.tracks)
        lane = self._agent.key if self.mode == "none" else SHARED
        return [lane] if lane in self.tracks else []

    def _cut(self, lane: str, length: int) -> None:
        """Keep the first tokens of a lane, for all agents."""
        for layer in self.layers:
            layer.cut(lane, length)
        self.tracks[lane].cut(length)
        if not length:
            del self.tracks[lane]

    def _crop(self, lane: str, tokens_to_remove: int) -> None:
        track = self.tracks[lane]
        view = track.length if self._agent is None else self.get_seq_length()
        left = max(0, view + tokens_to_remove)
        if view < track.length and self._agent is not None:
            # Behind the others: its own low-rank states go, the base states are theirs too.
            for layer in self.layers:
                layer.crop(tokens_to_remove)
        elif left < view:
            self._cut(lane, left)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, given as a negative number; inside `agent()` those of the agent's view."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"`crop` takes a negative number, the tokens to remove from the end, got {tokens_to_remove}"
            )
        if tokens_to_remove:
            for lane in self._lanes():
                self._crop(lane, tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens and agents."""
        super().reset()
        self.tracks.clear()
        if self._agent is None:
            self.agents.clear()
            self.mode = None if self.config.mode == "auto" else self.config.mode

    def _select(self, rows: torch.Tensor) -> None:
        for lane in self._lanes():
            self.tracks[lane].select(rows)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Put the rows in the order of the beams, of base and low-rank states and of the tokens."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        rows = self._rows()
        super().batch_repeat_interleave(repeats)
        self._select(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, given by number or by a mask."""
        rows = self._rows()
        super().batch_select_indices(indices)
        self._select(torch.arange(rows)[torch.as_tensor(indices).cpu()])

    def _rows(self) -> int:
        return next((self.tracks[lane].ids.data.shape[0] for lane in self._lanes()), 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LRAgentCache":
        # The model and the options are the user's own objects, not this cache's. A copy has no active agent.
        memo |= {id(self.model): self.model, id(self.config): self.config}
        twin = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            vars(twin)[name] = None if name in ("_agent", "_watch") else copy.deepcopy(value, memo)
        for layer in twin.layers:
            layer.focus(None, None)
        return twin

    # --- memory ---

    def memory_report(self) -> dict[str, Any]:
        """Bytes that the cache keeps allocated, beside those of a cache for each agent.

        Returns:
            `bytes` (all storages on the device, spare room of growing buffers included), `host_bytes` (of offloaded
            layers), `full_bytes` (a `DynamicCache` of the same tokens for each agent that was active), `ratio` (full
            over `bytes`), `one_full_bytes` (one such cache), and by part, in use: `base_bytes`, `low_rank_bytes`,
            `token_bytes` (ids, visibility, rotations), and `spare_bytes`; `tokens`, `agents`, `mode`.
        """
        base = low = tokens = kept = host = 0
        for layer in self.layers:
            device = torch.device(getattr(layer, "device", "cpu"))
            for name, part in layer.holdings().items():
                size = part.data.untyped_storage().nbytes()
                kept, host = (kept + size, host) if part.data.device.type == device.type else (kept, host + size)
                if name.startswith("base."):
                    base += part.bytes_in_use()
                else:
                    low += part.bytes_in_use()
        for track in self.tracks.values():
            for part in track.parts().values():
                kept += part.data.untyped_storage().nbytes()
                tokens += part.bytes_in_use()
        # Outside of `agent()`, or inside one: what has been read is the same.
        lengths = {lane: track.length for lane, track in self.tracks.items()}
        longest = max(lengths, key=lengths.get, default=None)
        one = sum(
            part.bytes_in_use()
            for layer in self.layers
            if longest in layer.lanes
            for part in layer.lanes[longest].parts().values()
        )
        agents = set(self.agents.values())
        full = (
            sum(
                sum(part.bytes_in_use() for layer in self.layers for part in layer.lanes[lane].parts().values())
                for lane in lengths
            )
            if self.mode == "none"
            else one * len(agents)
        )
        return {
            "bytes": kept,
            "host_bytes": host,
            "full_bytes": full,
            "ratio": full / kept if kept else 1.0,
            "one_full_bytes": one,
            "base_bytes": base,
            "low_rank_bytes": low,
            "token_bytes": tokens,
            "spare_bytes": kept + host - base - low - tokens,
            "tokens": max(lengths.values(), default=0),
            "agents": len(agents),
            "mode": self.mode or self.config.mode,
        }

    # --- files ---

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Write the cache: states, ids and rotations as safetensors, the rest as JSON.

        Args:
            save_directory: Folder; made if need be.

        Raises:
            ValueError: An agent is active.
        """
        from .files import write_cache

        if self._agent is not None:
            raise ValueError("an agent is active: leave its `with` block first, then save")
        write_cache(self, Path(save_directory))

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], model: Any, *, device: torch.device | str | None = None
    ) -> "LRAgentCache":
        """Read a cache that `save_pretrained` wrote.

        Args:
            folder: The folder.
            model: The peft model, after `enable_lragent`, with adapters of the content that the file tells of.
            device: Where the tensors go. Default: where the model is.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: The files are damaged, of another version, of other base weights, or of an adapter whose
                content the model does not have; the message names it.
        """
        from .files import read_cache

        return read_cache(cls, Path(folder), model, device)


@contextlib.contextmanager
def _watched_generate(base: Any, cache: LRAgentCache) -> Iterator[None]:
    """Show the cache each prompt before `generate` cuts it: nothing else in the call sees prompt and cache at once."""
    original, had = base.generate, "generate" in vars(base)

    def generate(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("cache", kwargs.get("past_key_values"))
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        mask = kwargs.get("attention_mask")
        if given is cache and cache.config.check_prefix and isinstance(ids, torch.Tensor):
            # A mask longer than the ids: these are only what is new.
            if mask is None or mask.shape[1] <= ids.shape[1]:
                cache.sync(ids, mask)
        return original(*args, **kwargs)

    base.generate = generate
    try:
        yield
    finally:
        if had:
            base.generate = original
        else:
            del base.generate
