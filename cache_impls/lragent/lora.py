"""The peft side, and nothing of it elsewhere: which projections are cached, and how an adapter's part is left out.

peft calls `variant.forward(module, active_adapter=, x=, result=)` in place of its own sum for an adapter that has an
entry in `module.lora_variant`. While an agent is active its adapters have one here that keeps A x and returns the base
result. peft declares variants private, so a test holds this file to the installed version.
"""

import contextlib
import copy
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer, get_layer_types_and_kwargs

from hf_ext.extras import require

from .configuration import LRAgentConfig
from .content import Survey, adapter_key, base_fingerprint, sampled, versions
from .functional import Layout, rotate

require("peft", extra="adapters")

from peft import PeftModel  # noqa: E402
from peft.tuners.lora import LoraModel  # noqa: E402
from peft.tuners.lora.layer import LoraLayer, LoraVariant  # noqa: E402
from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: E402
from peft.utils.other import AuxiliaryTrainingWrapper  # noqa: E402

__all__ = [
    "Agent",
    "AttentionRecord",
    "Enabled",
    "Matrices",
    "create_shared_a_adapter",
    "disable_lragent",
    "enable_lragent",
    "enabled_of",
    "record_of",
]

# Projections whose output holds queries, keys and values one after the other.
_FUSED = ("qkv_proj",)
# Also fused, but with heads interleaved or as a Conv1D.
_UNKNOWN = ("query_key_value", "c_attn", "Wqkv", "kv_a_proj_with_mqa", "kv_proj", "attn_qkv")
_SIDES = ("k", "v")


class Projection(NamedTuple):
    """Where keys or values come from: a child of the attention layer, and which of its output channels."""

    attention: nn.Module
    name: str
    rows: slice

    @property
    def module(self) -> nn.Module:
        """The child as it is now: peft replaces it when its first adapter comes."""
        return getattr(self.attention, self.name)


class Matrices(NamedTuple):
    """What an agent applies to the u of one side: B [Hk * D, r] and its scaling."""

    b: torch.Tensor
    scale: float


@dataclass
class AttentionRecord:
    """What is known of one attention layer."""

    index: int
    module: nn.Module
    projections: dict[str, Projection]
    path: str
    # By side, why the adapter's part cannot be kept apart; empty: it can.
    refused: dict[str, str] = field(default_factory=dict)
    layout: Layout | None = "half"
    # Of this call: whether the adapter's part is left out, u by side, cosines and sines.
    split: bool = False
    u: dict[str, torch.Tensor] = field(default_factory=dict)
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    # What the attention function applies; set by the cache's update, taken by the function.
    low_rank: Any = None

    def start(self, split: bool, rotary: Any) -> None:
        """Forget the last call."""
        self.split, self.rotary, self.low_rank = split, rotary, None
        self.u.clear()


@dataclass
class Agent:
    """An adapter while it is active: its name, the hash of its content, and what it adds to each cached projection."""

    name: str
    key: str
    # (layer, side) -> B and scaling, only of those that are kept apart
    matrices: dict[tuple[int, str], Matrices]

    def rank(self, side: str) -> int:
        """Rank of the adapter on a side; 0: none there."""
        return max((m.b.shape[1] for (_, s), m in self.matrices.items() if s == side), default=0)


class SplitLoRA(LoraVariant):
    """Keeps A x of cached projections and leaves the adapter's part out of their output, if the layer splits."""

    def __init__(self, agent: str, uses: list[tuple[AttentionRecord, str]]):
        self.agent = agent
        self.uses = uses

    def forward(  # type: ignore[override]  # static in peft, but called on the instance
        self, module: LoraLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """peft's hook: the output of the projection, without the adapter's part in the channels that are cached."""
        reduced = module.lora_A[active_adapter](x)
        b, scaling = module.lora_B[active_adapter], module.scaling[active_adapter]
        record = self.uses[0][0]
        if not record.split:
            return result + b(reduced) * scaling
        if active_adapter != self.agent or any(side in record.u for _, side in self.uses):
            raise ValueError(
                f"adapter {active_adapter!r} runs while agent {self.agent!r} is active: an LRAgentCache serves one "
                "adapter at a time, without `adapter_names`"
            )
        for _, side in self.uses:
            record.u[side] = reduced
        kept = [record.projections[side].rows for _, side in self.uses]
        first = min(rows.start for rows in kept)
        if first == 0 and len(kept) == 1 and kept[0].stop == result.shape[-1]:
            return result
        # A fused projection: what is no cached channel gets its part as usual.
        part = nn.functional.linear(reduced, b.weight) * scaling
        for rows in kept:
            part[..., rows] = 0
        return result + part


class Enabled:
    """What `enable_lragent` put on a model: hooks, and a record of each attention layer."""

    def __init__(self, model: PeftModel, config: LRAgentConfig):
        self.config = config
        self.base = model.get_base_model()
        self.records = _attention_records(self.base, config)
        self.active: Any = None  # the cache whose agent is active
        self._fingerprint: tuple[Any, str] | None = None
        decoder = self.base.get_decoder() if hasattr(self.base, "get_decoder") else self.base
        self._handles = [decoder.register_forward_pre_hook(self._decoder_hook(decoder), with_kwargs=True)]
        for record in self.records:
            hook = self._attention_hook(record)
            self._handles.append(record.module.register_forward_pre_hook(hook, with_kwargs=True))
            record.module._lragent_record = record
        try:
            _probe(self)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        for record in self.records:
            if record_of(record.module) is record:
                del record.module._lragent_record

    def _attention_hook(self, record: AttentionRecord) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if module is not record.module:
                return
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            active = self.active is not None and cache is self.active
            record.start(active and self.active.splits, kwargs.get("position_embeddings"))

        return hook

    # Functions, not methods: a copy of the model takes them along as they are, and they see that it is not theirs.
    def _decoder_hook(self, decoder: nn.Module) -> Any:
        from .cache import LRAgentCache

        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            if not isinstance(cache, LRAgentCache) or module is not decoder:
                return
            if cache is not self.active:
                raise ValueError("an LRAgentCache is used inside `with cache.agent(name):` of that very cache only")
            ids = kwargs.get("input_ids", args[0] if args else None)
            if ids is None:
                raise ValueError(
                    "`inputs_embeds` without `input_ids`: an LRAgentCache knows what it holds by token ids; pass those"
                )
            cache.begin(ids, kwargs.get("attention_mask"))

        return hook

    def fingerprint(self, survey: Survey | None = None) -> str:
        """Hash of the base weights, taken again when they may have changed."""
        survey = survey or Survey(self.base)
        watched = versions(tensor for _, tensor in survey.base_tensors()), sampled(survey.wrapped_weights())
        if self._fingerprint is None or self._fingerprint[0] != watched:
            self._fingerprint = watched, base_fingerprint(survey)
        return self._fingerprint[1]

    def key(self, adapter: str, survey: Survey | None = None) -> str:
        """Hash of an adapter's content and of the base weights."""
        survey = survey or Survey(self.base)
        return adapter_key(survey, adapter, self.fingerprint(survey))

    def shared_a(self, model: PeftModel) -> str | None:
        """None if all adapters have equal A on every cached projection, else what differs."""
        names = [name for name, config in model.peft_config.items() if hasattr(config, "lora_alpha")]
        for record in self.records:
            for side in record.projections:
                if record.refused.get(side) or f"{side}_proj" not in self.config.targets:
                    continue
                module = record.projections[side].module
                found = {n: module.lora_A[n].weight for n in names if n in getattr(module, "lora_A", {})}
                where = f"{record.path}, {side}_proj"
                if found and (absent := [name for name in names if name not in found]):
                    return f"adapter {absent[0]!r} has no LoRA on {where}, where {next(iter(found))!r} has"
                for one, other in itertools.pairwise(found):
                    if not torch.equal(found[one], found[other]):
                        return f"adapters {one!r} and {other!r} have different A on {where}"
        return None

    def matrices(self, adapter: str) -> dict[tuple[int, str], Matrices]:
        """B and scaling of an adapter, by layer and side, of what is kept apart.

        Raises:
            ValueError: The adapter cannot be kept apart on a cached projection.
        """
        found = {}
        for record in self.records:
            for side, projection in record.projections.items():
                module = projection.module
                if f"{side}_proj" not in self.config.targets or adapter not in getattr(module, "lora_A", {}):
                    continue
                if record.refused.get(side):
                    raise ValueError(
                        f"adapter {adapter!r} has LoRA on {record.path}, {side}_proj, but {record.refused[side]}: "
                        "train it without, or leave its part in the shared states by "
                        f"LRAgentConfig(targets={tuple(t for t in self.config.targets if t[0] != side)!r})"
                    )
                b = module.lora_B[adapter].weight.detach()
                found[record.index, side] = Matrices(b[projection.rows], module.scaling[adapter])
        return found

    @contextlib.contextmanager
    def activate(self, model: PeftModel, agent: Agent, cache: Any, survey: Survey) -> Iterator[None]:
        """Make an adapter the active one and split the cached projections; put all back in the end."""
        before = model.base_model.active_adapters[0]
        switch = before != agent.name
        names = (before, agent.name) if switch else ()
        wants = [(t, t.requires_grad) for name in names for _, t in survey.adapter_tensors(name)]
        variants = self._variants(agent) if cache.splits else {}
        kept = {module: dict(module.lora_variant) for module in variants}
        try:
            if switch:
                model.set_adapter(agent.name)
                _restore_gradients(wants)
            for module, variant in variants.items():
                # Of all its adapters: one that runs though it is not the agent's must not go unnoticed.
                module.lora_variant.update({name: variant for name in module.lora_A})
            self.active = cache
            yield
        finally:
            self.active = None
            for module, variant in kept.items():
                module.lora_variant.clear()
                module.lora_variant.update({n: v for n, v in variant.items() if n in module.lora_A})
            if switch and before in model.peft_config:
                model.set_adapter(before)
                _restore_gradients(wants)
            for record in self.records:
                record.start(False, None)

    def _variants(self, agent: Agent) -> dict[LoraLayer, SplitLoRA]:
        uses: dict[LoraLayer, list[tuple[AttentionRecord, str]]] = {}
        for record in self.records:
            for side, projection in record.projections.items():
                if (record.index, side) in agent.matrices:
                    uses.setdefault(projection.module, []).append((record, side))
        return {module: SplitLoRA(agent.name, found) for module, found in uses.items()}


def _restore_gradients(wants: list[tuple[torch.Tensor, bool]]) -> None:
    for tensor, wanted in wants:
        if tensor.requires_grad != wanted:
            tensor.requires_grad_(wanted)


_ENABLED: "weakref.WeakKeyDictionary[nn.Module, Enabled]" = weakref.WeakKeyDictionary()


def record_of(module: nn.Module) -> AttentionRecord | None:
    """The record of an attention layer of a model for which `enable_lragent` was called."""
    return getattr(module, "_lragent_record", None)


def enabled_of(model: nn.Module) -> Enabled:
    """What `enable_lragent` put on the model.

    Raises:
        ValueError: It was not called.
    """
    found = _ENABLED.get(model) if isinstance(model, nn.Module) else None
    if found is None:
        raise ValueError(
            f"an LRAgentCache needs a peft model prepared by `enable_lragent(model)`, got {type(model).__name__}"
            + (" without it: call it first" if isinstance(model, PeftModel) else ": wrap it with peft first")
        )
    return found


def enable_lragent(model: PeftModel, config: LRAgentConfig | None = None) -> None:
    """Prepare a peft model for `LRAgentCache`. Without such a cache it computes what it did before, bit for bit.

    Runs the base model on four tokens to see that every layer caches the rotated output of its key projection and the
    output of its value projection, and how it rotates.

    Args:
        model: A `PeftModel` with LoRA adapters.
        config: Its `targets` say which projections are kept apart. Default: `LRAgentConfig()`.

    Raises:
        ValueError: The model is no `PeftModel` with LoRA, none of its adapters is on a cached projection, or its
            attention cannot be split.
    """
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, LoraModel):
        kind = f"a PeftModel of {type(model.base_model).__name__}" if isinstance(model, PeftModel) else ""
        raise ValueError(
            f"`model` must be a PeftModel with LoRA adapters, got {kind or type(model).__name__}: wrap it with "
            "`peft.PeftModel.from_pretrained` or `peft.get_peft_model`"
        )
    config = config or LRAgentConfig()
    if not isinstance(config, LRAgentConfig):
        raise ValueError(f"`config` must be an LRAgentConfig, got {type(config).__name__}")
    if model in _ENABLED:
        if _ENABLED[model].config.targets == config.targets:
            return
        disable_lragent(model)
    check_model(model, Survey(model.get_base_model()))
    enabled = Enabled(model, config)
    try:
        adapters = [name for name in model.peft_config if _cached_layers(enabled, name)]
        if not adapters:
            raise ValueError(
                f"no adapter of the model ({', '.join(model.peft_config)}) has LoRA on {' or '.join(config.targets)}: "
                "there is nothing to keep apart; one DynamicCache for each adapter, or for all, is what you want"
            )
        for name in adapters:
            check_adapter(model, enabled, name)
    except BaseException:
        enabled.remove()
        raise
    _ENABLED[model] = enabled


def disable_lragent(model: PeftModel) -> None:
    """Undo `enable_lragent`.

    Raises:
        ValueError: It was not called, or an agent is active.
    """
    enabled = enabled_of(model)
    if enabled.active is not None:
        raise ValueError("an agent is active: leave its `with` block first")
    enabled.remove()
    del _ENABLED[model]


def create_shared_a_adapter(
    model: PeftModel, name: str, like: str, targets: tuple[str, ...] = ("k_proj", "v_proj")
) -> None:
    """Add an adapter of the configuration of another one, with its A of cached projections, frozen.

    Train it with any trainer: agents of equal A share their low-rank states too (`mode="base_lr_shared"`). It is saved
    and loaded as any LoRA adapter.

    Args:
        model: The peft model.
        name: Of the new adapter.
        like: The adapter to take after.
        targets: Projections whose A is copied and frozen.

    Raises:
        ValueError: The name is taken, `like` is no adapter, or it has no LoRA on the targets.
    """
    if not isinstance(model, PeftModel):
        raise ValueError(f"`model` must be a PeftModel, got {type(model).__name__}")
    if name in model.peft_config:
        raise ValueError(f"`name` is {name!r}, which the model has already ({', '.join(model.peft_config)})")
    if like not in model.peft_config:
        raise ValueError(f"`like` is {like!r}, and the model's adapters are {', '.join(model.peft_config)}")
    names = {part for target in targets for part in (target, *_FUSED)}
    modules = [
        module
        for path, module in model.named_modules()
        if isinstance(module, LoraLayer) and path.split(".")[-1] in names and like in module.lora_A
    ]
    if not modules:
        raise ValueError(f"adapter {like!r} has no LoRA on {' or '.join(targets)}, so there is no A to share")
    config = copy.deepcopy(model.peft_config[like])
    config.inference_mode = False
    model.add_adapter(name, config)
    with torch.no_grad():
        for module in modules:
            shared = module.lora_A[name].weight
            shared.copy_(module.lora_A[like].weight)
    freeze_shared_a(model, name, targets)


def freeze_shared_a(model: PeftModel, name: str, targets: tuple[str, ...] = ("k_proj", "v_proj")) -> None:
    """Make an adapter the active one and all of it trainable but A of cached projections.

    `create_shared_a_adapter` does it; peft's own `set_adapter` makes all of an adapter trainable again.
    """
    names = {part for target in targets for part in (target, *_FUSED)}
    model.set_adapter(name)
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer) and path.split(".")[-1] in names and name in module.lora_A:
            module.lora_A[name].weight.requires_grad_(False)


# --- what is refused ------------------------------------------------------------------------------------------------


def check_model(model: PeftModel, survey: Survey) -> None:
    """Refuse a model in a state that no agent can use.

    Raises:
        ValueError: An adapter is merged, all are disabled or several are active.
    """
    for _, module in survey.tuned:
        if module.merged_adapters:
            raise ValueError(
                f"adapter {module.merged_adapters[0]!r} is merged into the base weights: call "
                "model.unmerge_adapter() first, or every agent's states would hold it"
            )
        if module.disable_adapters:
            raise ValueError(
                "the adapters are disabled, so that the states would be the base model's: leave `disable_adapter()` "
                "or call model.base_model.enable_adapter_layers() first"
            )
    active = model.base_model.active_adapters
    if len(active) > 1:
        raise ValueError(
            f"adapters {', '.join(map(repr, active))} are active at once; an agent is one adapter: merge them into "
            f"one with `add_weighted_adapter`, or call model.set_adapter({active[0]!r})"
        )


def check_inference(model: PeftModel, survey: Survey) -> None:
    """Refuse a model in training mode.

    Raises:
        ValueError: It is, or dropout is on in an adapter.
    """
    dropout = any(isinstance(module, nn.Dropout) and module.training and module.p for _, module in survey.modules)
    if model.get_base_model().training or dropout:
        raise ValueError("the model is in training mode, and an LRAgentCache is for inference only: call model.eval()")


def check_adapter(model: PeftModel, enabled: Enabled, name: str) -> None:
    """Refuse an adapter that cannot be kept apart.

    Raises:
        ValueError: There is none of that name, it is not plain LoRA on a cached projection, or it has no LoRA at all.
    """
    if name not in model.peft_config:
        raise ValueError(
            f"agent {name!r} is no adapter of the model; its adapters are {', '.join(model.peft_config)}: load it by "
            f"model.load_adapter(folder, adapter_name={name!r})"
        )
    for record, side, module in _cached_layers(enabled, name):
        where = f"adapter {name!r} on {record.path}, {side}_proj,"
        variant = module.lora_variant.get(name)
        if variant is not None and not isinstance(variant, SplitLoRA):
            kind = "DoRA" if module.use_dora.get(name) else type(variant).__name__.removesuffix("LinearVariant")
            raise ValueError(f"{where} is {kind}, whose part is not B A x: only plain LoRA can be kept apart")
        if module.lora_bias.get(name):
            raise ValueError(f"{where} has `lora_bias=True`: its bias belongs to no base weight; train it without")
    enabled.matrices(name)
    for record in enabled.records:
        for side, projection in record.projections.items():
            if isinstance(projection.module, AuxiliaryTrainingWrapper):
                raise ValueError(
                    f"{record.path}, {side}_proj is in `modules_to_save`: agents have no base projection in common"
                )


def _cached_layers(enabled: Enabled, name: str) -> list[tuple[AttentionRecord, str, LoraLayer]]:
    return [
        (record, side, projection.module)
        for record in enabled.records
        for side, projection in record.projections.items()
        if f"{side}_proj" in enabled.config.targets and name in getattr(projection.module, "lora_A", {})
    ]


# --- the model's attention layers -----------------------------------------------------------------------------------


def _attention_records(base: nn.Module, config: LRAgentConfig) -> list[AttentionRecord]:
    """One record per layer.

    Raises:
        ValueError: Layers are not all of full attention, or their projections are not known.
    """
    decoder = base.config.get_text_config(decoder=True)
    if base.config.is_encoder_decoder:
        raise ValueError(f"LRAgent is for decoder-only models, and model_type={decoder.model_type!r} is none")
    kinds, _ = get_layer_types_and_kwargs(decoder)
    if other := sorted(set(kinds) - {"full_attention"}):
        raise ValueError(
            f"model_type={decoder.model_type!r} has layers of {', '.join(other)}: agents can share states of full "
            "attention only, since the others forget or mix what they have read"
        )
    records, unknown = [], set()
    for path, module in base.named_modules():
        children = dict(module.named_children())
        unknown |= set(_UNKNOWN) & set(children)
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            continue
        fused = next((name for name in _FUSED if name in children), None)
        if fused is not None:
            size = module.head_dim
            queries = decoder.num_attention_heads * size
            keys = decoder.num_key_value_heads * size
            found = {
                "k": Projection(module, fused, slice(queries, queries + keys)),
                "v": Projection(module, fused, slice(queries + keys, queries + 2 * keys)),
            }
        elif "k_proj" in children and "v_proj" in children:
            widths = {f"{side}_proj": _width(children[f"{side}_proj"]) for side in _SIDES}
            found = {name[0]: Projection(module, name, slice(0, width)) for name, width in widths.items()}
        else:
            continue
        records.append(AttentionRecord(index, module, found, path))
    records.sort(key=lambda record: record.index)
    if [record.index for record in records] != list(range(len(kinds))):
        named = f" (it has {', '.join(sorted(unknown))})" if unknown else ""
        raise ValueError(
            f"model_type={decoder.model_type!r} has no k_proj and v_proj, or qkv_proj, in each of its {len(kinds)} "
            f"attention layers{named}: its keys and values cannot be told apart from the adapter's part"
        )
    return records


def _width(module: nn.Module) -> int:
    return (module.get_base_layer() if isinstance(module, BaseTunerLayer) else module).out_features


class _ProbeLayer(DynamicLayer):
    """Remembers what it was given."""

    given: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, key_states, value_states, *args, **kwargs):
        self.given = key_states, value_states
        return super().update(key_states, value_states, *args, **kwargs)


@torch.no_grad()
def _probe(enabled: Enabled) -> None:
    """Run four tokens through the base model and see what each layer caches.

    Raises:
        ValueError: The cached values are not the value projection's output.
    """
    base, records = enabled.base, enabled.records
    if any(tensor.device.type == "meta" for tensor in base.parameters()):
        raise ValueError("the model is on the device meta: load its weights first")
    outputs: dict[tuple[int, str], torch.Tensor] = {}
    handles = []

    def keep(record: AttentionRecord, side: str) -> Any:
        rows = record.projections[side].rows

        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            outputs[record.index, side] = output[..., rows]

        return hook

    for record in records:
        handles += [p.module.register_forward_hook(keep(record, side)) for side, p in record.projections.items()]
    training = {module: module.training for module in base.modules()}
    cache = Cache(layers=[_ProbeLayer() for _ in records])
    device = base.get_input_embeddings().weight.device
    ids = torch.arange(4, device=device)[None] % base.config.get_text_config(decoder=True).vocab_size
    tuned = [m for m in base.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    flags = [(m, m._disable_adapters) for m in tuned]
    try:
        base.eval()
        for module in tuned:
            module._disable_adapters = True
        base(input_ids=ids, cache=cache, use_cache=True)
        for record in records:
            _compare(record, cache.layers[record.index].given, outputs, base)
    finally:
        for module, flag in flags:
            module._disable_adapters = flag
        for module, flag in training.items():
            module.training = flag
        for handle in handles:
            handle.remove()
        for record in records:
            record.start(False, None)


def _compare(record: AttentionRecord, given: Any, outputs: dict[tuple[int, str], torch.Tensor], base: Any) -> None:
    """Learn a layer's rotation from what it cached."""
    kind = type(base).__name__
    if given is None:
        raise ValueError(f"{record.path} of {kind} never called `cache.update`: its states cannot be shared")
    for side, states in zip(_SIDES, given):
        made = outputs.get((record.index, side))
        shape = (states.shape[0], states.shape[2], states.shape[1], states.shape[3])
        if made is None or made.numel() != states.numel():
            record.refused[side] = f"{kind} does not cache the output of {side}_proj"
            continue
        made = made.reshape(shape).transpose(1, 2)
        if side == "v" or record.rotary is None:
            candidates: dict[Any, torch.Tensor] = {None: made}
        else:
            cos, sin = record.rotary
            candidates = {layout: rotate(made, cos, sin, layout) for layout in ("half", "interleaved")}
            candidates[None] = made
        bound = 2e-2 * states.abs().max()
        fitting = [layout for layout, guess in candidates.items() if (guess - states).abs().max() <= bound]
        if not fitting:
            norm = next((n for n, _ in record.module.named_children() if side in n.split("_") and "norm" in n), None)
            reason = f"its {norm} after {side}_proj" if norm else f"what it does after {side}_proj"
            record.refused[side] = f"{kind} does not cache the rotated output of {side}_proj ({reason} is not linear)"
        elif side == "k":
            record.layout = fitting[0]
