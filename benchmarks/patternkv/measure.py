"""What the PatternKV benchmark measures with: full states of a prompt, caches filled with them, scored continuations.

A prompt goes through the model once. Its keys and values then fill every cache to be compared, which is what a
prefill would have done (the prompt attends to its own exact states in all of them), and the next tokens are scored in
one call.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

__all__ = [
    "Prompt",
    "RotatedLayer",
    "Score",
    "decode_seconds",
    "fill",
    "greedy",
    "prefill",
    "rotated_cache",
    "score",
    "window_seconds",
]


@dataclass
class Prompt:
    """A prompt's states and what follows it.

    Attributes:
        states: (keys, values) of each layer, [1, H, T, D].
        following: The tokens to score, [1, n].
        log_probs: Of the full cache on them, float32 [n, vocabulary].
        loss: Mean negative log-likelihood of the full cache, nats.
        seconds: The prefill took.
    """

    states: list[tuple[torch.Tensor, torch.Tensor]]
    following: torch.Tensor
    log_probs: torch.Tensor
    loss: float
    seconds: float

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.states[0][0].shape[2]


@dataclass
class Score:
    """A cache's continuation beside that of the full cache.

    Attributes:
        kl: Mean KL(full || cache), nats a token.
        loss: Mean negative log-likelihood, nats a token.
        agreement: Share of positions whose most likely token is the full cache's.
        key_error, value_error: |x - x^|^2 / |x|^2 over all layers, of the prompt's states.
    """

    kl: float
    loss: float
    agreement: float
    key_error: float
    value_error: float
    seconds: dict[str, float] = field(default_factory=dict)


@torch.inference_mode()
def prefill(model: torch.nn.Module, tokens: torch.Tensor, length: int, chunk: int = 512) -> Prompt:
    """Run `length` tokens of `tokens` [n] and score the others with a full cache."""
    cache = DynamicCache(config=model.config)
    start = time.perf_counter()
    for part in tokens[None, :length].split(chunk, dim=1):
        model(input_ids=part, cache=cache, logits_to_keep=1)
    seconds = time.perf_counter() - start
    states = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    following = tokens[None, length:]
    logits = model(input_ids=following, cache=cache).logits[0].float()
    log_probs = logits.log_softmax(-1)
    loss = F.nll_loss(log_probs[:-1], following[0, 1:]).item()
    return Prompt(states, following, log_probs, loss, seconds)


def fill(cache: Cache, states: list[tuple[torch.Tensor, torch.Tensor]], pieces: Sequence[int] | None = None) -> Cache:
    """Give a cache the states of a prompt, as a prefill would, or in pieces of so many tokens each."""
    start = 0
    for size in pieces or [states[0][0].shape[2]]:
        positions = torch.arange(start, start + size)[None]
        for index, (keys, values) in enumerate(states):
            part = slice(start, start + size)
            cache.update(keys[:, :, part], values[:, :, part], index, kwargs={"position_ids": positions})
        start += size
    return cache


def read_back(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer's prompt as its next query would see them."""
    if hasattr(layer, "dequantize"):
        return layer.dequantize()
    if hasattr(layer, "_quantized_keys"):
        return layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
    return layer.keys, layer.values


@torch.inference_mode()
def score(
    model: torch.nn.Module, prompt: Prompt, cache: Cache, pieces: Sequence[int] | None = None
) -> tuple[Score, Cache]:
    """Fill a new cache with the prompt, in pieces or at once, and score what follows.

    Returns:
        The score, and the cache with the prompt and the continuation.
    """
    start = time.perf_counter()
    fill(cache, prompt.states, pieces)
    filled = time.perf_counter()
    errors = torch.zeros(2, 2, dtype=torch.float64)
    for layer, full in zip(cache.layers, prompt.states):
        for side, (kept, exact) in enumerate(zip(read_back(layer), full)):
            errors[side, 0] += (kept[..., : exact.shape[2], :].double() - exact.double()).square().sum()
            errors[side, 1] += exact.double().square().sum()
    before = time.perf_counter()
    logits = model(input_ids=prompt.following, cache=cache).logits[0].float()
    seconds = {"fill": filled - start, "score": time.perf_counter() - before}
    log_probs = logits.log_softmax(-1)
    divergence = F.kl_div(log_probs, prompt.log_probs, log_target=True, reduction="sum").item() / len(log_probs)
    loss = F.nll_loss(log_probs[:-1], prompt.following[0, 1:]).item()
    agreement = (log_probs.argmax(-1) == prompt.log_probs.argmax(-1)).float().mean().item()
    key_error, value_error = (errors[:, 0] / errors[:, 1]).tolist()
    return Score(divergence, loss, agreement, key_error, value_error, seconds), cache


@torch.inference_mode()
def greedy(model: torch.nn.Module, cache: Cache, prompt: Prompt, count: int) -> list[int]:
    """The `count` tokens that a cache filled with the prompt continues the first scored token with."""
    fill(cache, prompt.states)
    token, found = prompt.following[:, :1], []
    for _ in range(count):
        token = model(input_ids=token, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
        found.append(token.item())
    return found


@torch.inference_mode()
def decode_seconds(model: torch.nn.Module, cache: Cache, steps: int = 5) -> float:
    """Best wall-clock seconds of a forward pass of one token."""
    token = torch.ones(1, 1, dtype=torch.int64)
    model(input_ids=token, cache=cache)
    times = []
    gc.collect()
    for _ in range(steps):
        start = time.perf_counter()
        model(input_ids=token, cache=cache)
        times.append(time.perf_counter() - start)
    return min(times)


@torch.inference_mode()
def window_seconds(model: torch.nn.Module, cache: Cache, states: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Wall-clock seconds of the step that completes a window, after `states` have filled the cache up to it."""
    fill(cache, states)
    start = time.perf_counter()
    model(input_ids=torch.ones(1, 1, dtype=torch.int64), cache=cache)
    return time.perf_counter() - start


class RotatedLayer(DynamicLayer):
    """A rotation and a scalar codebook, in the manner of TurboQuant, emulated: it keeps what would be read back.

    Each key and value vector is scaled to unit length (a float16 norm is kept), turned by a random orthogonal matrix,
    and each coordinate rounded to the nearest of the 2^bits levels that suit a normal distribution best. Takes
    bits + 16 / D bits an element.

    Args:
        bits: 2 or 4.
        seed: Of the rotation.
    """

    def __init__(self, bits: int, seed: int = 0, **kwargs: Any):
        super().__init__()
        self.bits, self.seed = bits, seed
        self.levels = normal_levels(2**bits)

    def update(self, key_states, value_states, *args, **kwargs):
        """Append; what was there before is read back rounded, what is new is exact once."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            generator = torch.Generator().manual_seed(self.seed)
            self.turn = torch.linalg.qr(torch.randn(key_states.shape[-1], key_states.shape[-1], generator=generator))[
                0
            ]
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        self.keys = torch.cat([self.keys, self._round(key_states)], dim=-2)
        self.values = torch.cat([self.values, self._round(value_states)], dim=-2)
        return keys, values

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1] ** 0.5
        norm = x.norm(dim=-1, keepdim=True).half().float()
        y = (x / norm.clamp(min=1e-12)) @ self.turn * size
        borders = (self.levels[1:] + self.levels[:-1]) / 2
        return (self.levels[torch.bucketize(y, borders)] / size) @ self.turn.T * norm


def normal_levels(count: int) -> torch.Tensor:
    """The `count` levels with the least squared error for a standard normal variable (Lloyd-Max)."""
    x = torch.distributions.Normal(0, 1).icdf((torch.arange(20001) + 0.5) / 20001)
    levels = x[torch.arange(count) * 20001 // count + 20001 // (2 * count)].clone()
    for _ in range(300):
        index = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        levels = torch.zeros(count).scatter_add_(0, index, x) / torch.bincount(index, minlength=count)
    return levels


def rotated_cache(config: Any, bits: int, seed: int = 0) -> Cache:
    """A cache of `RotatedLayer`."""
    return Cache(layers=[RotatedLayer(bits, seed) for _ in range(config.num_hidden_layers)])
