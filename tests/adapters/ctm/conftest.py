"""Tiny adapters: factors with known subspaces, and saved adapters of a tiny Llama."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


def random_factors(m, n, ranks, seed=0, dtype=torch.float32):
    """A_t [r_t, n] and B_t [m, r_t] with updates of norms of about one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a = [(draw(r, n) / n**0.5).to(dtype) for r in ranks]
    b = [(draw(m, r) / m**0.5).to(dtype) for r in ranks]
    return a, b


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="session")
def factors() -> Callable:
    """`factors(m, n, ranks, seed=0, dtype=...)` -> lists of A and of B."""
    return random_factors


@pytest.fixture(scope="session")
def relative_error() -> Callable:
    """`relative_error(found, expected)` in the Frobenius norm."""
    return relative


@pytest.fixture(scope="session")
def save_adapter(tiny_llama_dir) -> Callable:
    """`save_adapter(folder, seed=0, **lora)`: a random adapter of the tiny Llama as peft saves it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    def save(folder: Path, seed: int = 0, save_arguments: dict | None = None, **arguments) -> Path:
        settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
        config = LoraConfig(**settings | {"init_lora_weights": False} | arguments)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), config)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name:
                        parameter.normal_(std=0.2)
        model.save_pretrained(folder, **save_arguments or {})
        return folder

    return save


@pytest.fixture(scope="session")
def load_adapters(tiny_llama_dir) -> Callable:
    """`load_adapters(a=folder, b=folder)`: the tiny Llama with these adapters."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def load(**folders: Path):
        model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
        names = list(folders)
        model = PeftModel.from_pretrained(model, folders[names[0]], adapter_name=names[0])
        for name in names[1:]:
            model.load_adapter(folders[name], adapter_name=name)
        return model

    return load
