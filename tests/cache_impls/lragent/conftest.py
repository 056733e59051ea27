"""Tiny models with random adapters of many kinds, and plain peft as the oracle."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch


def _base(**overrides) -> dict:
    return {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
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
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 8}),
    "llama-yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 16}),
    "phi": ("PhiConfig", {"num_key_value_heads": 8, "head_dim": None, "rope_parameters": None}),
    "phi3": ("Phi3Config", {"head_dim": None, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "cohere": ("CohereConfig", {"head_dim": None, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "stablelm": ("StableLmConfig", {"head_dim": None, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "gemma": ("GemmaConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 16, "sliding_window": 24}),
    "gpt2": ("GPT2Config", {}),
}
QV = ("q_proj", "v_proj")
QKV = ("q_proj", "k_proj", "v_proj")


def build(kind: str, seed: int = 0, **overrides):
    """A random model of `MODELS` in eval mode, without adapters."""
    import transformers

    name, fields = MODELS[kind]
    fields = {k: v for k, v in _base(**{**fields, **overrides}).items() if v is not None or k == "eos_token_id"}
    fields |= {"sliding_window": None} if kind == "mistral" else {}
    config = getattr(transformers, name)(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        attention = "eager" if kind == "gemma2" else "sdpa"
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def adapt(base, agents: dict[str, dict] | Sequence[str] = ("plan", "act"), targets=QKV, r: int = 4, **fields):
    """peft on a model: random A and B for each agent, whose own fields win."""
    from peft import LoraConfig, get_peft_model

    agents = agents if isinstance(agents, dict) else {name: {} for name in agents}
    model = None
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for name, own in agents.items():
            options = {"r": r, "lora_alpha": 2 * r, "target_modules": list(targets), **fields, **own}
            config = LoraConfig(init_lora_weights=False, **options)
            if model is None:
                model = get_peft_model(base, config, adapter_name=name)
            else:
                model.add_adapter(name, config)
        model.set_adapter(next(iter(agents)))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.mul_(0.3)
    return model.eval().requires_grad_(False)


def share_a(model, names: Sequence[str] | None = None) -> None:
    """Give all adapters the A of the first, on every projection."""
    from peft.tuners.lora.layer import LoraLayer

    names = names or list(model.peft_config)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for name in names[1:]:
                module.lora_A[name].weight.data.copy_(module.lora_A[names[0]].weight)


@pytest.fixture(scope="session")
def tiny() -> Callable:
    """`tiny(kind="llama", agents=..., targets=..., shared=False, model=..., enable=True, **LoraConfig fields)`."""
    bases: dict = {}

    def make(kind="llama", agents=("plan", "act"), targets=QKV, *, shared=False, enable=True, overrides=None, **own):
        from hf_ext import enable_lragent

        overrides = overrides or {}
        key = (kind, str(sorted(overrides.items())))
        if key not in bases:
            bases[key] = build(kind, **overrides)
        model = adapt(copy.deepcopy(bases[key]), agents, targets, **own)
        if shared:
            share_a(model)
        if enable:
            enable_lragent(model)
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


@pytest.fixture(scope="session")
def plain() -> Callable:
    """`plain(model, agent, ids)`: logits of plain peft, without a cache."""

    def logits(model, agent: str, ids: torch.Tensor, **inputs) -> torch.Tensor:
        before = model.base_model.active_adapters[0]
        model.set_adapter(agent)
        try:
            with torch.no_grad():
                return model(input_ids=ids, use_cache=False, **inputs).logits
        finally:
            model.set_adapter(before)
            model.requires_grad_(False)

    return logits
