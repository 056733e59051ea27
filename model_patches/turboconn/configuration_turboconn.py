"""Configuration of TurboConn: the method's own settings, and the model configurations that carry them.

This file travels to the Hub with the model. `AutoConfig` finds the generated configuration classes here by name
(`TurboConnLlamaConfig`, ...), through `auto_map` of `config.json`.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import transformers

# model_type of the base -> (start of its configuration's name, start of its classes' names)
FAMILIES = {
    "gemma2": ("Gemma2", "Gemma2"),
    "gemma3_text": ("Gemma3Text", "Gemma3"),
    "llama": ("Llama", "Llama"),
    "mistral": ("Mistral", "Mistral"),
    "olmo2": ("Olmo2", "Olmo2"),
    "phi3": ("Phi3", "Phi3"),
    "qwen2": ("Qwen2", "Qwen2"),
    "qwen3": ("Qwen3", "Qwen3"),
    "smollm3": ("SmolLM3", "SmolLM3"),
}
PREFIX = "TurboConn"
LINK_SETS = ("dense", "cascade", "all", "sparse")
GATES = ("none", "scalar", "input")
TRAIN_MODES = ("exact", "jacobi", "auto")


@dataclass
class TurboConnConfig:
    """Settings of the links from higher layers of one token to lower layers of a later one.

    The paper's method section was not available to us: every default below is ours, chosen as its line says.

    Args:
        links: Which links. `"dense"` (default, what the paper argues for): from layer `L//2 + i` to layer `i`, for
            every `i < L//2`; `"cascade"`: from `L-1-i` to `i`; `"all"`: every upper layer to every lower one (give a
            `rank`); `"sparse"`: only the last layer to the first, the control; or a list of pairs
            `(source, target)` of layer indices with `0 <= target < source < L`. A link reads what layer `source`
            writes and adds to what layer `target` reads.
        rank: Rank of each link's matrix; `None` (default) is the full `[d, d]` matrix.
        gate: `"none"` (default), `"scalar"` (a learned factor that starts at 1) or `"input"` (a learned sigmoid of
            the state, which starts at 0.88).
        group_size: Tokens that a link reaches back (`g`). The `g` tokens of a group run in parallel, so training and
            reading a prompt of `N` tokens take `N/g` steps in sequence. Default 1.
        train_mode: `"exact"` (default): the recurrence and back-propagation through all of it; `"jacobi"`: `n_iters`
            parallel passes, exact for `n_iters >= N/g` and an approximation below; `"auto"`: Jacobi while its
            measured error is below `gap_tol`, exact otherwise. Evaluation and generation are always exact.
        n_iters: Parallel passes of `"jacobi"` and `"auto"`. Default 4, about the cost of exact training at `g = 4`.
        gap_tol: Largest error of Jacobi that `"auto"` accepts, and above which a warning is given: the largest
            difference of a final hidden state from the exact one, as a fraction of their root mean square.
        gap_every: Training passes between two measurements of that error by `"auto"`, each of which costs one exact
            pass without gradients. Default 50.
        bptt_window: Chunks after which the carried state is cut from the gradient (the attention's keys and values
            are not); `None` (default) never.
        history: Tokens whose states a cache keeps, so that it can be cropped by up to `history - group_size` tokens.
            Default `group_size + 8`. Assisted generation keeps what it needs by itself.
        target_scale: Multiply each contribution by the root mean square of the stream that it is added to, taken as a
            constant. Default False; an ablation.

    Raises:
        ValueError: A value out of range; the message names it and what is allowed.
    """

    links: str | list[tuple[int, int]] = "dense"
    rank: int | None = None
    gate: str = "none"
    group_size: int = 1
    train_mode: str = "exact"
    n_iters: int = 4
    gap_tol: float = 1e-2
    gap_every: int = 50
    bptt_window: int | None = None
    history: int | None = None
    target_scale: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.links, str):
            _one_of("links", self.links, LINK_SETS, " or a list of pairs (source, target)")
        else:
            self.links = _checked_pairs(self.links)
        _one_of("gate", self.gate, GATES)
        _one_of("train_mode", self.train_mode, TRAIN_MODES)
        for name in ("group_size", "n_iters", "gap_every"):
            _at_least("TurboConnConfig", name, getattr(self, name), 1)
        for name in ("rank", "bptt_window"):
            if getattr(self, name) is not None:
                _at_least("TurboConnConfig", name, getattr(self, name), 1, " or None")
        if self.history is None:
            self.history = self.group_size + 8
        _at_least("TurboConnConfig", "history", self.history, self.group_size, " (group_size)")
        number = isinstance(self.gap_tol, int | float) and not isinstance(self.gap_tol, bool)
        if not number or not math.isfinite(self.gap_tol) or self.gap_tol <= 0:
            raise ValueError(f"gap_tol is {self.gap_tol!r}; it must be a number above 0")
        if not isinstance(self.target_scale, bool):
            raise ValueError(f"target_scale is {self.target_scale!r}; it must be True or False")

    def pairs(self, num_layers: int) -> list[tuple[int, int]]:
        """The links of a model as (source, target), sorted by target and then source.

        Args:
            num_layers: Number `L` of decoder layers.

        Raises:
            ValueError: Fewer than two layers, or an explicit pair that lies outside of the model.
        """
        if num_layers < 2:
            raise ValueError(f"the model has {num_layers} layer; a link needs a higher and a lower one, so at least 2")
        half = num_layers // 2
        if self.links == "dense":
            found = [(half + i, i) for i in range(half)]
        elif self.links == "cascade":
            found = [(num_layers - 1 - i, i) for i in range(half)]
        elif self.links == "all":
            found = [(source, target) for target in range(half) for source in range(half, num_layers)]
        elif self.links == "sparse":
            found = [(num_layers - 1, 0)]
        else:
            found = [tuple(pair) for pair in self.links]
            outside = [pair for pair in found if pair[0] >= num_layers]
            if outside:
                raise ValueError(
                    f"links has the pair {outside[0]}, but the model has {num_layers} layers: "
                    f"a pair is (source, target) with 0 <= target < source <= {num_layers - 1}"
                )
        return sorted(found, key=lambda pair: (pair[1], pair[0]))

    def check_model(self, config: Any) -> list[tuple[int, int]]:
        """Refuse a model that the settings do not fit.

        Args:
            config: The model's configuration.

        Returns:
            Its links, as `pairs` gives them.

        Raises:
            ValueError: A pair outside of the model, a `rank` above its width (more parameters than the full matrix),
                or attention that is not causal.
        """
        if self.rank is not None and self.rank > config.hidden_size:
            raise ValueError(
                f"rank is {self.rank}; it must be at most the model's hidden_size, {config.hidden_size}, or None"
            )
        if getattr(config, "use_bidirectional_attention", False):
            raise ValueError(
                "the config has use_bidirectional_attention=True: a link carries what earlier tokens have computed, "
                "so attention must be causal"
            )
        return self.pairs(config.num_hidden_layers)

    def to_dict(self) -> dict[str, Any]:
        """The settings as a dictionary that JSON can hold."""
        values = asdict(self)
        if not isinstance(self.links, str):
            values["links"] = [list(pair) for pair in self.links]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TurboConnConfig":
        """The settings from `to_dict`, checked again.

        Raises:
            ValueError: Not a dictionary, or one with an unknown name.
        """
        if not isinstance(values, dict):
            raise ValueError(f"turboconn is {values!r}; it must be a dictionary as TurboConnConfig.to_dict writes it")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown TurboConn setting {unknown[0]!r}; the settings are {', '.join(known)}")
        return cls(**values)


def _one_of(name: str, value: Any, allowed: tuple[str, ...], more: str = "") -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}{more}")


def _at_least(owner: str, name: str, value: Any, least: int, more: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}{more}")


def _checked_pairs(links: Any) -> list[tuple[int, int]]:
    """Explicit pairs as tuples.

    Raises:
        ValueError: None at all, not pairs of whole numbers, a source that is not above its target, or a duplicate.
    """
    if not isinstance(links, list | tuple) or not links:
        raise ValueError(
            f"links is {links!r}; it must be one of {', '.join(map(repr, LINK_SETS))} or a list of pairs "
            "(source, target)"
        )
    pairs = []
    for pair in links:
        whole = isinstance(pair, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in pair)
        if not whole or len(pair) != 2:
            raise ValueError(f"links has {pair!r}; a link is a pair (source, target) of layer indices")
        source, target = pair
        if target < 0 or source <= target:
            raise ValueError(
                f"links has the pair ({source}, {target}): the source must lie above the target, 0 <= target < source"
            )
        if (source, target) in pairs:
            raise ValueError(f"links has the pair ({source}, {target}) twice; name each link once")
        pairs.append((source, target))
    return pairs


def supported() -> str:
    """The supported architectures, for messages."""
    return ", ".join(f"{names[1]}ForCausalLM" for names in FAMILIES.values())


def model_config_class(model_type: str) -> type:
    """The configuration class of a patched model: the base's, with a `model_type` of its own and field `turboconn`.

    Its own `model_type`, because with the base's a folder that is loaded without `trust_remote_code=True` would give
    the base model without a word.

    Args:
        model_type: The base's, one of `FAMILIES`.
    """
    base = getattr(transformers, f"{FAMILIES[model_type][0]}Config")
    name = PREFIX + base.__name__
    if name not in globals():
        body = {
            "__module__": __name__,
            "__qualname__": name,
            "__doc__": f"`{base.__name__}` of a model with TurboConn links, whose settings are in `turboconn`.",
            "model_type": f"turboconn_{model_type}",
            "turboconn_base": base,
            "_auto_class": "AutoConfig",
        }
        globals()[name] = type(base)(name, (base,), body)
    return globals()[name]


def __getattr__(name: str) -> type:
    for model_type, (start, _) in FAMILIES.items():
        if name == f"{PREFIX}{start}Config":
            return model_config_class(model_type)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
