"""What every test shares: an offline, single-threaded process, tiny models on disk, and fresh interpreters."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

# Before anything imports torch or a Hugging Face library, which read these when they are imported. HF_HOME is a folder
# of this process, so that caches and dynamic modules of other runs cannot make a test pass.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf-ext-test-home-")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("HF_EXT_KERNELS", None)

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def _single_threaded() -> None:
    import torch

    torch.set_num_threads(1)


def run_fresh(code: str, *, env: dict[str, str] | None = None, cwd: Path | None = None, timeout: float = 300) -> str:
    """Run Python code in a new interpreter and return what it printed; fail with its standard error otherwise."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **(env or {})},
        cwd=cwd or tempfile.gettempdir(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if result.returncode != 0:
        raise AssertionError(f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result.stdout


@pytest.fixture(scope="session")
def fresh_python() -> Callable[..., str]:
    """`fresh_python(code, env=..., cwd=..., timeout=...)`: see `run_fresh`."""
    return run_fresh


def save_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per byte (ids 0-255), which needs no training and loses nothing.

    `<|end|>` takes the place of byte 0, so that the vocabulary stays at 256.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, **{symbol: i for i, symbol in enumerate(alphabet[1:], start=1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama (hidden 64, 4 heads, 2 KV heads, 256 tokens) with a byte tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer GPT-2 (Conv1D layers, hidden 64, tied embeddings) with a byte tokenizer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("models") / "tiny-gpt2"
    config = GPT2Config(
        vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder
