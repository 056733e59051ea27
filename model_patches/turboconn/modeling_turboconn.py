"""TurboConn models: any supported decoder with links from higher layers of one token to lower layers of a later one.

This file travels to the Hub with the model. The classes are generated from the library's own, by name
(`TurboConnLlamaForCausalLM`, ...), when they are asked for; `auto_map` of `config.json` does so.

The recurrence lives in the backbone (`model.model`) and not in the causal language model, because TRL's trainers go
round the `forward` of the latter. It calls the library's `forward` once per chunk of `group_size` tokens.
"""

import functools
from typing import Any

import torch
import transformers
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils.deprecation import deprecate_kwarg

from .configuration_turboconn import FAMILIES, PREFIX, TurboConnConfig, model_config_class
from .links import LinksInto, TurboLinks, source_layers, target_layers
from .state import TurboStateLayer, state_layer

LINKS = "turbo_links"


class _Run:
    """What the hooks of one backbone share during a call: what to add to targets, and what sources have written."""

    def __init__(self) -> None:
        self.on = True
        self.added: list[torch.Tensor] | None = None
        self.taken: list[torch.Tensor | None] | None = None


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
        """Read the settings from the config, make the links and hook the layers that they join."""
        config = self.config
        self.turbo_config = TurboConnConfig.from_dict(config.turboconn)
        self.turbo_config.check_width(config.hidden_size)
        pairs = self.turbo_config.pairs(config.num_hidden_layers)
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

    def remove_links(self) -> None:
        """Take away the hooks and the links, whose weights are lost."""
        for handle in self.turbo_handles:
            handle.remove()
        for name in (LINKS, "turbo_config", "turbo_run", "turbo_sources", "turbo_targets", "turbo_handles"):
            delattr(self, name)

    def set_links(self, on: bool) -> None:
        """Switch the links off (the base model's own single pass) or on again."""
        self.turbo_run.on = bool(on)

    def _take(self, row: int, module: nn.Module, args: tuple, output: Any) -> None:
        if self.turbo_run.taken is not None:
            self.turbo_run.taken[row] = output[0] if isinstance(output, tuple) else output

    def _add(self, place: int, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self.turbo_run.added is None:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        added = self.turbo_run.added[place].to(device=hidden.device, dtype=hidden.dtype)
        if self.turbo_config.target_scale:
            added = added * hidden.detach().float().square().mean(-1, keepdim=True).sqrt().to(hidden.dtype)
        hidden = hidden + added
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """The base's forward with links: same arguments, same output.

        Raises:
            ValueError: A static cache, a cache that another model has filled, packed rows that the attention
                implementation cannot keep apart; the message says what would work.
        """
        arguments = dict(attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        if not self.turbo_run.on:
            arguments |= dict(cache=cache, use_cache=use_cache)
            return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **arguments)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, one of them")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if use_cache is None:
            use_cache = bool(getattr(self.config, "use_cache", False))
        return self._exact(inputs_embeds, cache, use_cache, **arguments)

    def _exact(
        self,
        embeds: torch.Tensor,
        cache: Cache | None,
        use_cache: bool,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Chunks of `group_size` tokens, one after the other, with a cache that keeps gradients."""
        settings, run, length = self.turbo_config, self.turbo_run, embeds.shape[1]
        group, layer = settings.group_size, None
        if cache is None:
            # Whatever the caller wants back, later chunks must see the keys and values of earlier ones.
            cache = DynamicCache(config=self.config) if use_cache else DynamicCache()
        else:
            layer = state_layer(cache)
        past = cache.get_seq_length()
        window = None if layer is None else layer.window()
        if window is None:
            window = embeds.new_zeros(len(self.turbo_sources), embeds.shape[0], group, embeds.shape[2])
        padding = None
        if attention_mask is not None:
            padding = attention_mask[:, past:] == 0
        valid = None if position_ids is None else position_ids >= group

        outputs, kept = [], []
        for start in range(0, length, group):
            end = min(start + group, length)
            chunk = slice(start, end)
            run.added = self.turbo_links(window[:, :, : end - start], None if valid is None else valid[:, chunk])
            run.taken = [None] * len(self.turbo_sources)
            try:
                output = super().forward(
                    inputs_embeds=embeds[:, chunk],
                    attention_mask=None if attention_mask is None else attention_mask[:, : past + end],
                    position_ids=None if position_ids is None else position_ids[:, chunk],
                    cache=cache,
                    use_cache=True,
                    **kwargs,
                )
                states = torch.stack(run.taken)
            finally:
                run.added = run.taken = None
            if padding is not None:
                states = states.masked_fill(padding[None, :, chunk, None], 0)
            window = states if end - start == group else torch.cat([window[:, :, end - start :], states], dim=2)
            outputs.append(output)
            kept.append(states)
        if use_cache:
            if layer is None:
                layer = TurboStateLayer(group, settings.history)
                cache.layers.append(layer)
            layer.append(torch.cat(kept, dim=2))
        if len(outputs) > 1:
            output["last_hidden_state"] = torch.cat([output.last_hidden_state for output in outputs], dim=1)
        output["cache"] = cache if use_cache else None
        return output


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


def backbone_class(base: type) -> type:
    """The class of a backbone with links, made from the library's."""
    return _generated(TurboBackbone, base, {"turboconn_base": base})


def causal_class(base: type) -> type:
    """The class of a causal language model with links, made from the library's."""
    body = {
        "config_class": model_config_class(base.config_class.model_type),
        "turboconn_base": base,
        "_auto_class": "AutoModelForCausalLM",
    }
    return _generated(TurboCausalLM, base, body)


def _generated(mixin: type, base: type, body: dict[str, Any]) -> type:
    name = PREFIX + base.__name__
    if name not in globals():  # as a module attribute, so that instances can be pickled
        doc = f"`{base.__name__}` with TurboConn links."
        globals()[name] = type(name, (mixin, base), {"__module__": __name__, "__doc__": doc, **body})
    return globals()[name]


def __getattr__(name: str) -> type:
    for _, start in FAMILIES.values():
        base = getattr(transformers, f"{start}ForCausalLM", None) if name == f"{PREFIX}{start}ForCausalLM" else None
        if base is not None:
            return causal_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
