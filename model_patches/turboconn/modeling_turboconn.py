"""TurboConn models: any supported decoder with links from higher layers of one token to lower layers of a later one.

This file travels to the Hub with the model. The classes are generated from the library's own, by name
(`TurboConnLlamaForCausalLM`, ...), when they are asked for; `auto_map` of `config.json` does so.

The recurrence lives in the backbone (`model.model`) and not in the causal language model, because TRL's trainers go
round the `forward` of the latter. It calls the library's `forward` once per chunk of `group_size` tokens.
"""

import functools
import math
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .chunks import (
    SLICED,
    Tokens,
    chunk_masks,
    is_packed,
    is_padding_mask,
    joined,
    links_between,
    refuse_packed,
)
from .configuration_turboconn import FAMILIES, PREFIX, TurboConnConfig, model_config_class
from .links import LinksInto, TurboLinks, shift, source_layers, target_layers
from .state import TurboStateLayer, state_layer

logger = logging.get_logger(__name__)

LINKS = "turbo_links"


class _Run:
    """What one backbone and its hooks share: what to add to targets, and what sources have written."""

    def __init__(self) -> None:
        # Of a pass: threads (a server's, or DataParallel's replicas, which share this object) take turns.
        self.lock = threading.RLock()
        self.on = True
        self.added: list[torch.Tensor] | None = None
        self.taken: list[torch.Tensor | None] | None = None
        self.gap: float | None = None  # Jacobi's last measured error
        self.calls = 0  # training passes since that measurement

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())


class _WithLinks:
    """Initialises the links. For both classes: the library asks each nested model for its own modules' weights."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LinksInto):
            module.reset_parameters()
        else:
            super()._init_weights(module)


class TurboBackbone(_WithLinks):
    """What a decoder's backbone (`LlamaModel`, ...) becomes. Use `patch`, or load a patched checkpoint."""

    def setup_links(self) -> None:
        """Read the settings from the config, make the links and hook the layers that they join.

        Raises:
            ValueError: The settings do not fit the model.
        """
        config = self.config
        self.turbo_config = TurboConnConfig.from_dict(config.turboconn)
        pairs = self.turbo_config.check_model(config)
        self.turbo_run = _Run()
        self.turbo_sources, self.turbo_targets = source_layers(pairs), target_layers(pairs)
        links = TurboLinks(
            pairs, config.hidden_size, self.turbo_config.rank, self.turbo_config.gate, config.rms_norm_eps
        )
        self.add_module(LINKS, links)
        # Bound methods in a `partial`: they survive deepcopy and pickling, which closures over the model do not.
        self.turbo_handles = []
        for row, source in enumerate(self.turbo_sources):
            hook = functools.partial(self._take, row)
            self.turbo_handles.append(self.layers[source].register_forward_hook(hook))
        for place, target in enumerate(self.turbo_targets):
            hook = functools.partial(self._add, place)
            self.turbo_handles.append(self.layers[target].register_forward_pre_hook(hook, with_kwargs=True))
        # The library knows by the name of the class what `output_hidden_states` and the like can record.
        _CAN_RECORD_REGISTRY[self] = self._can_record_outputs

    def remove_links(self) -> None:
        """Take away the hooks and the links, whose weights are lost."""
        for handle in self.turbo_handles:
            handle.remove()
        for name in (LINKS, "turbo_config", "turbo_run", "turbo_sources", "turbo_targets", "turbo_handles"):
            delattr(self, name)

    def set_links(self, on: bool) -> None:
        """Switch the links off (the base model's own single pass) or on again."""
        self.turbo_run.on = bool(on)

    @property
    def jacobi_gap(self) -> float | None:
        """Error of Jacobi when it was last measured, as `TurboConnConfig.gap_tol` counts it; None before."""
        return self.turbo_run.gap

    def _take(self, row: int, module: nn.Module, args: tuple, output: Any) -> None:
        if self.turbo_run.taken is not None:
            self.turbo_run.taken[row] = output[0] if isinstance(output, tuple) else output

    def _add(self, place: int, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self.turbo_run.added is None:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        added = self.turbo_run.added[place]
        if self.turbo_config.target_scale:
            added = added * hidden.detach().float().square().mean(-1, keepdim=True).sqrt()
        hidden = hidden + added.to(device=hidden.device, dtype=hidden.dtype)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """The base's forward with links: same arguments, same output.

        A token whose `position_ids` are below `group_size` has no link to read: its document begins there.

        Raises:
            ValueError: A static cache, a cache that was filled without the links, packed rows that the attention
                implementation cannot keep apart, and the like; the message says what would work.
        """
        inputs = {"attention_mask": attention_mask, "position_ids": position_ids, **kwargs}
        if not self.turbo_run.on:
            inputs |= {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "cache": cache, "use_cache": use_cache}
            return super().forward(**inputs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        return_dict = inputs.pop("return_dict", getattr(self.config, "return_dict", True))
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if self.training and cache is None and not use_cache and self._parallel(inputs_embeds, inputs):
            output = self._jacobi(inputs_embeds, **inputs)
        else:
            if use_cache is None:
                use_cache = bool(getattr(self.config, "use_cache", False)) and not self._checkpoints()
            output = self._exact(inputs_embeds, cache, use_cache, **inputs)
        return output.to_tuple() if return_dict is False else output  # None, from peft, is no wish

    def _call(self, **inputs: Any) -> Any:
        """The library's forward for one pass over some tokens, with the hooks at work."""
        return super().forward(**inputs)

    def _pass(
        self, states: torch.Tensor | None, valid: torch.Tensor | None, **inputs: Any
    ) -> tuple[Any, torch.Tensor]:
        """One pass of the base model, its links reading `states`.

        Args:
            states: `[S, B, n, d]`, what the sources wrote `group_size` tokens before; None for no links.
            valid: `[B or 1, n]`, where a link may be read; None for everywhere.
            **inputs: For the base's forward.

        Returns:
            The base's output, and what the sources wrote, `[S, B, n, d]`.
        """
        run = self.turbo_run
        added = None if states is None else self.turbo_links(states, valid)
        with run.lock:
            run.added, run.taken = added, [None] * len(self.turbo_sources)
            try:
                output = self._call(**inputs)
                device = run.taken[0].device  # layers may lie on several
                return output, torch.stack([taken.to(device) for taken in run.taken])
            finally:
                run.added = run.taken = None

    # --- parallel passes -------------------------------------------------------------------------------------------

    def _parallel(self, embeds: torch.Tensor, inputs: dict[str, Any]) -> bool:
        """Whether this training pass is Jacobi's; measures its error when it is time to."""
        settings, run = self.turbo_config, self.turbo_run
        if settings.train_mode == "exact":
            return False
        if settings.n_iters * settings.group_size >= embeds.shape[1]:
            return True  # as many passes as chunks: no approximation
        if settings.train_mode == "jacobi" and self.config._attn_implementation not in SLICED:
            if is_packed(inputs["attention_mask"], inputs["position_ids"], inputs):
                return True  # there is no exact pass to measure against
        if torch.is_grad_enabled():
            if run.gap is None or run.calls >= settings.gap_every:
                run.gap, run.calls = self._measure_gap(embeds, inputs), 0
                if run.gap > settings.gap_tol:
                    use = "exact training is used" if settings.train_mode == "auto" else "use train_mode='exact'"
                    logger.warning(
                        f"TurboConn: {settings.n_iters} Jacobi passes are off by {run.gap:.2g} of the hidden states' "
                        f"root mean square (gap_tol is {settings.gap_tol:g}); {use}, or more n_iters"
                    )
            run.calls += 1
        return settings.train_mode == "jacobi" or run.gap is None or run.gap <= settings.gap_tol

    @torch.no_grad()
    def _measure_gap(self, embeds: torch.Tensor, inputs: dict[str, Any]) -> float:
        """Largest error of Jacobi's last hidden states on one batch, over the exact ones' root mean square."""
        inputs = {name: value for name, value in inputs.items() if not name.startswith("output_")}
        mask = inputs.get("attention_mask")
        training = [module for module in self.modules() if module.training]
        self.eval()  # dropout would differ between the two
        try:
            exact = self._exact(embeds, None, False, **inputs).last_hidden_state.float()
            error = (self._jacobi(embeds, **inputs).last_hidden_state.float() - exact).abs().amax(-1)
        finally:
            for module in training:
                module.training = True
        size = exact.square().mean(-1)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            error, size = error[mask != 0], size[mask != 0]
        return (error.max() / size.mean().sqrt()).item()

    def _jacobi(
        self,
        embeds: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """`n_iters` passes over all tokens at once; the links of a pass read what the pass before it wrote.

        The base model keeps packed documents apart by itself: there is no cache.
        """
        group, length = self.turbo_config.group_size, embeds.shape[1]
        padding, valid = links_between(attention_mask, position_ids, 0, group)
        inputs = {"inputs_embeds": embeds, "attention_mask": attention_mask, "position_ids": position_ids}
        states = None
        for _ in range(min(self.turbo_config.n_iters, math.ceil(length / group))):
            output, states = self._pass(states, valid, cache=None, use_cache=False, **inputs, **kwargs)
            if padding is not None:
                states = states.masked_fill(padding[None, ..., None], 0)
            states = shift(states, group)
        return output

    # --- the exact recurrence --------------------------------------------------------------------------------------

    def _exact(
        self,
        embeds: torch.Tensor,
        cache: Cache | None,
        use_cache: bool,
        attention_mask: Any = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Chunks of `group_size` tokens, one after the other, with a cache that keeps gradients."""
        group, length, layer, past = self.turbo_config.group_size, embeds.shape[1], None, 0
        fresh, ready = cache is None, not is_padding_mask(attention_mask)
        packed = fresh and length > 1 and is_packed(attention_mask, position_ids, kwargs)
        if packed:
            refuse_packed(self.config._attn_implementation, position_ids)
        if fresh:
            # Whatever the caller wants back, later chunks must see the keys and values of earlier ones. Packed rows
            # and ready masks need a cache that drops none.
            cache = DynamicCache() if packed or ready or not use_cache else DynamicCache(config=self.config)
        else:
            layer, past = self._checked_state(cache, embeds.shape[0])
        if attention_mask is not None and not ready:
            if attention_mask.shape[1] != past + length:
                raise ValueError(
                    f"attention_mask has {attention_mask.shape[1]} columns; it must have one for each of the {past} "
                    f"tokens in the cache and the {length} new ones"
                )
            if length > 1 and bool(attention_mask.all()):
                attention_mask = None
        padding, valid = links_between(attention_mask, position_ids, past, group)
        documents = position_ids if packed else None
        masks = chunk_masks(self.config, embeds, attention_mask, documents, cache, past, group)
        tokens = Tokens(embeds, position_ids, masks, padding, valid, kwargs)
        window = None if layer is None else layer.window()
        if window is None:
            window = embeds.new_zeros(len(self.turbo_sources), embeds.shape[0], group, embeds.shape[2])

        recorded = any(kwargs.get(name) for name in ("output_hidden_states", "output_attentions"))
        segments = fresh and not use_cache and not recorded and self._checkpoints()
        if use_cache and layer is None:
            layer = TurboStateLayer(group, self.turbo_config.history)
        with self._library_checkpointing_off():
            if segments:
                return self._checkpointed(tokens, window)
            kept = layer.wanted(length) if use_cache else 0
            outputs, states, _ = self._chunks(tokens, 0, length, window, cache, kept)
        if use_cache:
            if state_layer(cache) is None:  # by now the cache has all its other layers, those made on the way too
                cache.layers.append(layer)
            layer.append(torch.cat(states, dim=2), length)
        output = joined(outputs, past)
        output["cache"] = cache if use_cache else None
        return output

    def _chunks(
        self, tokens: Tokens, start: int, end: int, window: torch.Tensor, cache: Cache, kept: int = 0
    ) -> tuple[list[Any], list[torch.Tensor], torch.Tensor]:
        """The chunks of the tokens `start` to `end`, of which `start` is a multiple of `group_size`.

        Args:
            tokens: All tokens of the call.
            window: `[S, B, g, d]`, the states that the first chunk's links read.
            cache: Holds what came before; gets the new keys and values.
            kept: Of how many of the last tokens to return the states, at least.

        Returns:
            Each chunk's output, the states of the last chunks, and the window of the next.
        """
        group, cut = self.turbo_config.group_size, self.turbo_config.bptt_window
        outputs, written = [], deque(maxlen=math.ceil(kept / group) + 1)
        for first in range(start, end, group):
            last = min(first + group, end)
            number = last - first
            if cut is not None and first and first // group % cut == 0:
                window = window.detach()
            valid = None if tokens.valid is None else tokens.valid[:, first:last]
            inputs = tokens.inputs(first, last)
            output, states = self._pass(window[:, :, :number], valid, cache=cache, use_cache=True, **inputs)
            if tokens.padding is not None:
                states = states.masked_fill(tokens.padding[None, :, first:last, None], 0)
            window = states if number == group else torch.cat([window[:, :, number:], states], dim=2)
            outputs.append(output)
            written.append(states)
        return outputs, list(written), window

    def _checkpointed(self, tokens: Tokens, window: torch.Tensor) -> Any:
        """As `_chunks` over all tokens, but what a segment of chunks computed is computed again in the backward pass.

        The library checkpoints each layer without the cache, which would cut every chunk off from its past. Here keys
        and values go into the checkpointed function as tensors, one pair a layer and earlier segment, so that nothing
        of the size of tokens times tokens is kept.
        """
        layers, group, length = self.config.num_hidden_layers, self.turbo_config.group_size, tokens.embeds.shape[1]
        step = group * math.isqrt(math.ceil(length / group) - 1) + group  # about sqrt(chunks) segments of as many

        def segment(start: int, embeds: torch.Tensor, window: torch.Tensor, *pieces: torch.Tensor) -> tuple:
            cache = DynamicCache()
            for index in range(layers if start else 0):
                keys, values = pieces[2 * index :: 2 * layers], pieces[2 * index + 1 :: 2 * layers]
                cache.update(torch.cat(keys, dim=-2), torch.cat(values, dim=-2), index)
            end = min(start + step, length)
            with self._library_checkpointing_off():  # in the recomputation too, which comes when all is long over
                outputs, _, window = self._chunks(replace(tokens, embeds=embeds), start, end, window, cache)
            hidden = torch.cat([output.last_hidden_state for output in outputs], dim=1)
            # Copies: a view would keep the keys and values of all tokens before alive.
            new = [side[..., start:, :].clone() for layer in cache.layers for side in (layer.keys, layer.values)]
            return hidden, window, *new

        options = getattr(getattr(self, "_gradient_checkpointing_func", None), "keywords", None) or {}
        options = {**options, "use_reentrant": False}
        pieces, parts = [], []
        for start in range(0, length, step):
            part, window, *new = checkpoint(segment, start, tokens.embeds, window, *pieces, **options)
            parts.append(part)
            pieces += new
        return BaseModelOutputWithPast(last_hidden_state=torch.cat(parts, dim=1))

    def _checkpoints(self) -> bool:
        return self.training and torch.is_grad_enabled() and getattr(self, "gradient_checkpointing", False)

    @contextmanager
    def _library_checkpointing_off(self) -> Iterator[None]:
        """Keep the library from checkpointing layers, for which it takes their cache away."""
        found = []
        if self._checkpoints():
            found = [module for module in self.modules() if getattr(module, "gradient_checkpointing", False)]
        for module in found:
            module.gradient_checkpointing = False
        try:
            yield
        finally:
            for module in found:
                module.gradient_checkpointing = True

    # --- caches ------------------------------------------------------------------------------------------------------

    def add_state_layer(self, cache: Any) -> None:
        """Give an empty dynamic cache its place for the links' states, as the first call would; others are left."""
        if not isinstance(cache, Cache) or cache.get_seq_length() > 0 or state_layer(cache) is not None:
            return
        while cache.layer_class_to_replicate is not None and len(cache.layers) < self.config.num_hidden_layers:
            cache.layers.append(cache.layer_class_to_replicate())
        if len(cache.layers) == self.config.num_hidden_layers and not cache.is_compileable:
            cache.layers.append(TurboStateLayer(self.turbo_config.group_size, self.turbo_config.history))

    def _checked_state(self, cache: Any, batch: int) -> tuple[TurboStateLayer | None, int]:
        """The state in a caller's cache, and how many tokens that holds.

        Raises:
            ValueError: The cache is of a kind without room for the state, or does not hold one that fits.
        """
        if not isinstance(cache, Cache) or cache.is_compileable:
            raise ValueError(
                f"{type(cache).__name__} cannot hold the states of TurboConn's links, which grow with the sequence; "
                "use a DynamicCache (cache_implementation='dynamic', the default) or a quantized cache"
            )
        layer, past = state_layer(cache), cache.get_seq_length()
        seen = 0 if layer is None else layer.seen
        if seen != past:
            raise ValueError(
                f"the cache holds {past} tokens but the links' states of {seen}: it was filled without the links (by "
                "the base model, or after set_links(False)), or cropped further than the states reach. Start with an "
                "empty cache"
            )
        if past and layer.states.shape[1] != batch:
            raise ValueError(f"the cache holds {layer.states.shape[1]} sequences, but {batch} were given")
        return layer, past


class TurboCausalLM(_WithLinks):
    """What a causal language model (`LlamaForCausalLM`, ...) becomes: its backbone has links."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.model.__class__ = backbone_class(type(self.model))
        self.model.setup_links()
        self.post_init()

    def set_links(self, on: bool) -> None:
        """Switch the links off (the base model's own single pass) or on again."""
        self.model.set_links(on)

    def save_pretrained(self, save_directory: Any, *args: Any, keep_links: bool = True, **kwargs: Any) -> Any:
        """Save the model, with the code that it needs, or with `keep_links=False` the base model without links."""
        if keep_links:
            return super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("state_dict") is not None:
            kept = {name: value for name, value in kwargs["state_dict"].items() if f"{LINKS}." not in name}
            kwargs["state_dict"] = kept
        patched, config = type(self), self.config
        settings, auto_map = config.turboconn, config.__dict__.pop("auto_map", None)
        links = self.model._modules.pop(LINKS)
        config_class = type(config)
        try:
            del config.turboconn
            config.__class__, self.__class__ = config_class.turboconn_base, patched.turboconn_base
            return self.save_pretrained(save_directory, *args, **kwargs)
        finally:
            config.__class__, self.__class__ = config_class, patched
            config.turboconn = settings
            if auto_map is not None:
                config.auto_map = auto_map
            self.model._modules[LINKS] = links

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> Any:
        wanted = generation_config.cache_implementation
        if self.model.turbo_run.on and wanted in ALL_STATIC_CACHE_IMPLEMENTATIONS:
            raise ValueError(
                f"cache_implementation is {wanted!r}: a static cache cannot hold the states of TurboConn's links; use "
                "'dynamic' (the default), 'offloaded' or 'quantized'"
            )
        prepared = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if self.model.turbo_run.on:
            # Before the first call, so that assisted generation can tell the layer to record.
            self.model.add_state_layer(model_kwargs.get("cache"))
            if generation_config.is_assistant and model_kwargs.get("cache") is not None:
                model_kwargs["cache"].activate_past_recording()
        return prepared


def backbone_class(base: type) -> type:
    """The class of a backbone with links, made from the library's."""
    return _generated(TurboBackbone, base, {})


def causal_class(base: type) -> type:
    """The class of a causal language model with links, made from the library's."""
    config = model_config_class(base.config_class.model_type)
    return _generated(TurboCausalLM, base, {"config_class": config, "_auto_class": "AutoModelForCausalLM"})


def _generated(mixin: type, base: type, body: dict[str, Any]) -> type:
    name = PREFIX + base.__name__
    if name not in globals():  # as a module attribute, so that instances can be pickled
        doc = f"`{base.__name__}` with TurboConn links."
        names = {"__module__": __name__, "__doc__": doc, "turboconn_base": base, **body}
        globals()[name] = type(name, (mixin, base), names)
    return globals()[name]


def __getattr__(name: str) -> type:
    for _, start in FAMILIES.values():
        if name == f"{PREFIX}{start}ForCausalLM":
            return causal_class(getattr(transformers, f"{start}ForCausalLM"))
        for kind in ("Model", "TextModel"):
            if name == f"{PREFIX}{start}{kind}" and hasattr(transformers, f"{start}{kind}"):
                return backbone_class(getattr(transformers, f"{start}{kind}"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
