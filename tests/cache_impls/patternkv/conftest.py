"""Random states, layers that are fed with them, and tiny models of many kinds."""

from collections.abc import Callable, Sequence

import pytest
import torch

from hf_ext.cache_impls.patternkv import PatternKVConfig, PatternKVLayer

SMALL = {"group_size": 16, "residual_length": 32, "num_patterns": 8}


def random_states(
    rows: int = 1,
    tokens: int = 100,
    *,
    heads: int = 2,
    channels: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [rows, heads, tokens, channels] around a few centres, each row and head with its own."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(2):
        centers = 3 * torch.randn(rows, heads, 6, channels, generator=generator)
        which = torch.randint(6, (rows, heads, tokens, 1), generator=generator).expand(-1, -1, -1, channels)
        noise = 0.5 * torch.randn(rows, heads, tokens, channels, generator=generator)
        found.append((centers.gather(2, which) + noise).to(dtype))
    return found[0], found[1]


def feed(
    layer: PatternKVLayer,
    states: tuple[torch.Tensor, torch.Tensor],
    chunks: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
) -> list:
    """Update a layer with states in chunks, as a model would; returns what each update gave."""
    keys, values = states
    rows, tokens = keys.shape[0], keys.shape[2]
    chunks = [tokens] if chunks is None else chunks
    assert sum(chunks) == tokens
    start = torch.tensor(padding or [0] * rows)[:, None]
    positions = (torch.arange(layer.seen, layer.seen + tokens) - start).clamp(min=0)
    results, at = [], 0
    for size in chunks:
        part = slice(at, at + size)
        arguments = {"position_ids": positions[:, part]}
        results.append(layer.update(keys[:, :, part], values[:, :, part], kwargs=arguments))
        at += size
    return results


@pytest.fixture(scope="session")
def small() -> dict[str, int]:
    """Fields of a configuration that packs short texts."""
    return dict(SMALL)


@pytest.fixture(scope="session")
def states() -> Callable:
    """`states(rows, tokens, heads=, channels=, seed=, dtype=)`: see `random_states`."""
    return random_states


@pytest.fixture(scope="session")
def fed() -> Callable:
    """`fed(states, chunks=, padding=, **fields)`: a layer of the small configuration that was fed with states."""

    def make(states, chunks=None, padding=None, **fields) -> PatternKVLayer:
        layer = PatternKVLayer(PatternKVConfig(**{**SMALL, **fields}))
        feed(layer, states, chunks, padding)
        return layer

    make.more = feed
    return make


def _base(**overrides) -> dict:
    return {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.2,
        **overrides,
    }


MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama-mqa": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-3": ("LlamaConfig", {"num_attention_heads": 6, "hidden_size": 96}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 16}),
    "phi3": ("Phi3Config", {"head_dim": None}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 16, "sliding_window": 24}),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 24},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 24,
            "head_dim": 16,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 2,
        },
    ),
    "gpt2": ("GPT2Config", {}),
}


@pytest.fixture(scope="session")
def tiny() -> Callable:
    """`tiny(kind, seed=0, **overrides)`: a random model of `MODELS` in eval mode."""
    import transformers

    made: dict = {}

    def make(kind: str, seed: int = 0, **overrides):
        key = (kind, seed, str(sorted(overrides.items())))
        if key not in made:
            name, fields = MODELS[kind]
            fields = {k: v for k, v in _base(**{**fields, **overrides}).items() if (k, v) != ("head_dim", None)}
            config = getattr(transformers, name)(**fields)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                made[key] = transformers.AutoModelForCausalLM.from_config(config).eval()
        model = made[key]
        # The two have more than SDPA can do: a cap of the logits, a sink in the softmax.
        model.set_attn_implementation("eager" if kind in ("gpt-oss", "gemma2") else "sdpa")
        return model

    return make


@pytest.fixture(scope="session")
def prompts() -> Callable:
    """`prompts(rows, tokens, padding=None)`: inputs of random ids, padded on the left by so many columns a row."""

    def make(rows: int, tokens: int, padding: Sequence[int] | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
        ids = torch.randint(1, 96, (rows, tokens), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        for row, columns in enumerate(padding or ()):
            ids[row, :columns], mask[row, :columns] = 0, 0
        return {"input_ids": ids, "attention_mask": mask}

    return make
