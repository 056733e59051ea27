"""Tiny models of every supported family, and the same with links of random weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from hf_ext.model_patches.turboconn import TurboConnConfig, patch

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention"] * 2
# Family -> what its configuration needs beyond the sizes; windows of 6 are exceeded by rows of 12 tokens.
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED},
    "Qwen3": {},
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0]},
    "Olmo2": {},
    "Phi3": {"sliding_window": 6},
    "Gemma2": {"sliding_window": 6, "layer_types": MIXED, "query_pre_attn_scalar": 8},
    "Gemma3": {"sliding_window": 6, "layer_types": MIXED, "query_pre_attn_scalar": 8},
}


def make_model(family: str = "Llama", *, seed: int = 0, attention: str | None = None, **fields: Any) -> Any:
    """A random model of 4 layers, d 32 and grouped queries, in eval mode."""
    name = "Gemma3Text" if family == "Gemma3" else family
    sizes = {key: value for key, value in SIZES.items() if not (key == "head_dim" and family in ("Qwen2", "Phi3"))}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **FAMILIES[family], **fields})
    if attention is not None:  # else the family's own choice: sdpa, but for Gemma 2
        config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def fill_links(model: Any, scale: float = 0.05, seed: int = 1) -> Any:
    """Give every weight of the links a random value, so that they change what the model says."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.model.turbo_links.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.add_(scale * noise)
    return model


def make_linked(family: str = "Llama", *, scale: float = 0.05, model: dict | None = None, **fields: Any) -> Any:
    """A patched random model whose links are at work."""
    return fill_links(patch(make_model(family, **(model or {})), TurboConnConfig(**fields)), scale)


def make_ids(rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Random token ids without the special ones."""
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """`tiny(family, seed=, attention=, **config fields)`: see `make_model`."""
    return make_model


@pytest.fixture(scope="session")
def linked() -> Callable[..., Any]:
    """`linked(family, scale=, model={...}, **TurboConnConfig fields)`: see `make_linked`."""
    return make_linked


@pytest.fixture(scope="session")
def fill() -> Callable[..., Any]:
    """`fill(model, scale)`: see `fill_links`."""
    return fill_links


@pytest.fixture(scope="session")
def ids() -> Callable[..., torch.Tensor]:
    """`ids(rows, length, seed)`: see `make_ids`."""
    return make_ids


QUICK = ("Llama", "Gemma2")  # plain, and with windows, scaled embeddings and norms after the blocks


@pytest.fixture(
    scope="session",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def family(request) -> str:
    """Every supported family in turn."""
    return request.param
