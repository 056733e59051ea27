"""What the LRAgent benchmark measures: divergence of an agent's predictions, bytes, and time to the first token."""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_ext.cache_impls.lragent import LRAgentCache, enable_lragent

__all__ = ["compare", "llama_8b_report", "log_probs_of", "read", "times_to_first_token"]


@torch.inference_mode()
def read(model: Any, cache: LRAgentCache, agent: str, ids: torch.Tensor) -> None:
    """Let an agent read what it has not read of the tokens [1, T]."""
    with cache.agent(agent):
        rest = ids[:, cache.get_seq_length() :]
        if rest.shape[1]:
            model(input_ids=rest, cache=cache, logits_to_keep=1)


@torch.inference_mode()
def log_probs_of(model: Any, mode: str, ids: torch.Tensor, prefix: int) -> tuple[torch.Tensor, int]:
    """Predictions of agent `"second"` behind a prefix that agent `"first"` has read.

    Args:
        model: With both adapters, after `enable_lragent`.
        mode: Of the cache.
        ids: int64 [1, T].
        prefix: Tokens that the first agent reads; the second goes on from there.

    Returns:
        Log-probabilities [T - prefix - 1, vocabulary] of the tokens behind the prefix's next, and how many tokens
        the second agent had to read in all.
    """
    cache = LRAgentCache(model, mode=mode)
    if mode != "none":
        read(model, cache, "first", ids[:, :prefix])
    with cache.agent("second"):
        start = cache.get_seq_length()
        logits = model(input_ids=ids[:, start:], cache=cache, logits_to_keep=ids.shape[1] - prefix).logits
    return logits[0, :-1].float().log_softmax(-1), ids.shape[1] - start


def compare(found: torch.Tensor, exact: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """KL(exact || found) in nats a token, the loss on the targets, and the share of equal best tokens."""
    return {
        "kl": F.kl_div(found, exact, log_target=True, reduction="sum").item() / len(exact),
        "loss": F.nll_loss(found, targets).item(),
        "agreement": (found.argmax(-1) == exact.argmax(-1)).float().mean().item(),
    }


def llama_8b_report(agents: int, rank: int, tokens: int, generated: int, mode: str) -> dict[str, Any]:
    """Memory report of a cache of the shape of Llama 3.1 8B: 32 layers, 8 KV heads of 128 channels, bfloat16.

    The model has that cache and little else (hidden size 64, 8 query heads), so that a CPU can fill it.

    Args:
        agents: Adapters on k_proj and v_proj.
        rank: Of each.
        tokens: Of the trajectory that all read.
        generated: Tokens that the last agent adds one by one, so that buffers grow.
        mode: Of the cache.
    """
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    lora = LoraConfig(r=rank, target_modules=["k_proj", "v_proj"])
    model = get_peft_model(base, lora, adapter_name="agent0", autocast_adapter_dtype=False)
    for number in range(1, agents):
        model.add_adapter(f"agent{number}", lora, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # or adapters of one A would have one content, and be one agent
            torch.nn.init.normal_(parameter, std=0.01)
        elif "lora_A" in name and mode == "base_lr_shared":
            parameter.data.fill_(0.01)
    model.eval()
    enable_lragent(model)
    cache = LRAgentCache(model, mode=mode)
    ids = torch.randint(1, 128, (1, tokens))
    for number in range(agents):
        read(model, cache, f"agent{number}", ids)
    last = f"agent{agents - 1}"
    if generated:
        with cache.agent(last):
            model.generate(input_ids=ids, cache=cache, max_new_tokens=generated, do_sample=False)
    return cache.memory_report()


def times_to_first_token(
    model: Any, modes: list[str], ids: torch.Tensor, held: int, repeats: int, say: Callable[[str], None]
) -> dict[str, list[tuple[float, float]]]:
    """Seconds until agent `"second"` has its first token, in each mode, on a trajectory that `"first"` has read.

    Args:
        model: With both adapters, after `enable_lragent`.
        modes: Of the cache; `"DynamicCache"` is plain peft with one cache for both, which is what `"full"` does.
        ids: int64 [1, T].
        held: Tokens that the first agent has read.
        repeats: Of each, one after another, so that a busy machine slows all alike.
        say: Called with a line of progress.

    Returns:
        Mode -> of each repeat, seconds of the processor and of the clock. With one thread the former are what it
        takes, whoever else uses the machine.
    """
    caches: dict[str, Any] = {}
    for mode in modes:
        if mode == "DynamicCache":
            caches[mode] = DynamicCache(config=model.config)
            model.set_adapter("first")
            with torch.inference_mode():
                model(input_ids=ids[:, :held], cache=caches[mode], logits_to_keep=1)
        else:
            caches[mode] = LRAgentCache(model, mode=mode)
            read(model, caches[mode], "first", ids[:, :held])
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    mask = torch.ones_like(ids)
    for number in range(repeats):
        for mode in modes:
            cache = copy.deepcopy(caches[mode])
            start, used = time.perf_counter(), time.process_time()
            if mode == "DynamicCache":
                model.set_adapter("second")
                model.generate(input_ids=ids, attention_mask=mask, cache=cache, max_new_tokens=1, do_sample=False)
            else:
                with cache.agent("second"):
                    model.generate(input_ids=ids, attention_mask=mask, cache=cache, max_new_tokens=1, do_sample=False)
            found[mode].append((time.process_time() - used, time.perf_counter() - start))
            say(f"{mode}, {number + 1} of {repeats}: {found[mode][-1][0]:.2f} s of the processor")
    return found
