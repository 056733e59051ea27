"""A recorded trajectory of agents: read, checked, and played over each mode of the cache."""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .cache import LRAgentCache
from .lora import enabled_of

__all__ = ["COMPARED", "Turn", "play", "read_trace", "token_turns"]

COMPARED = ("none", "full", "base_shared", "base_lr_shared")


class Turn(NamedTuple):
    """One call of a model: who was asked, and the whole prompt."""

    agent: str
    prompt: str


def read_trace(path: Path) -> list[Turn]:
    """The turns of `{"turns": [{"agent": "plan", "prompt": "..."}, ...]}`.

    A prompt is the whole text that the agent was given; it begins with the prompt of the turn before.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a trace, or a prompt does not begin with the one before it; the message says where.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    turns = stored.get("turns") if isinstance(stored, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        raise ValueError(f'{path} is no trace: it needs {{"turns": [...]}} with two turns or more')
    found = []
    for number, turn in enumerate(turns, start=1):
        given = {name: turn.get(name) for name in ("agent", "prompt")} if isinstance(turn, dict) else {}
        if not given or not all(isinstance(value, str) and value for value in given.values()):
            raise ValueError(f'{path}, turn {number} needs "agent" and "prompt", both texts, and is {turn!r:.80}')
        found.append(Turn(**given))
    for number, (before, after) in enumerate(zip(found, found[1:]), start=2):
        if not after.prompt.startswith(before.prompt) or len(after.prompt) == len(before.prompt):
            shared = next((i for i, (a, b) in enumerate(zip(before.prompt, after.prompt)) if a != b), None)
            where = f"they part at character {shared}" if shared is not None else "it adds nothing"
            raise ValueError(
                f"{path}, turn {number} does not go on from the prompt of turn {number - 1}: {where}. Agents share "
                "what they have read as one growing text; what is an agent's own comes behind it"
            )
    return found


def token_turns(tokenizer: Any, turns: list[Turn]) -> list[tuple[str, torch.Tensor]]:
    """Agent and token ids [1, n] of each turn; those of a turn begin with those of the turn before."""
    found, ids, seen = [], torch.zeros(1, 0, dtype=torch.int64), 0
    for turn in turns:
        # What a turn adds is tokenized by itself, or the last token of a prompt could change with what follows.
        new = tokenizer(turn.prompt[seen:], return_tensors="pt", add_special_tokens=not seen, verbose=False).input_ids
        ids, seen = torch.cat([ids, new], dim=1), len(turn.prompt)
        found.append((turn.agent, ids))
    return found


@torch.inference_mode()
def play(
    model: Any,
    turns: list[tuple[str, torch.Tensor]],
    mode: str,
    exact: list[torch.Tensor] | None = None,
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Let the agents read their prompts in turn, over a cache of one mode.

    Args:
        model: A peft model after `enable_lragent`, with the agents as adapters.
        turns: From `token_turns`.
        mode: Of the cache.
        exact: What this returned for `"none"`; if given, divergences are taken from it.

    Returns:
        `mode`, `bytes`, `full_bytes`, `ratio`, `read` (tokens that agents read), `ttft` (mean seconds of a turn until
        the first token is known, adapter switching and hashing included), `new_agent_ttft` (of an agent's first turn,
        the trace's first turn left out), `kl` (mean nats a token over what each turn adds, the first left out; None
        without `exact`); and the log-probabilities of each turn on what it adds.

    Raises:
        ValueError: An agent is no adapter of the model, or the mode does not suit the adapters.
    """
    known = model.peft_config
    if missing := sorted({agent for agent, _ in turns} - set(known)):
        raise ValueError(
            f"the trace has agents without an adapter: {', '.join(missing)}; adapters are {', '.join(known)}"
        )
    device = enabled_of(model).base.get_input_embeddings().weight.device
    cache = LRAgentCache(model, mode=mode)
    seconds, firsts, kept, read = [], [], [], 0
    met: set[str] = set()
    held = 0
    for agent, ids in turns:
        start = time.perf_counter()
        with cache.agent(agent):
            cache.sync(ids.to(device))
            rest = ids[:, cache.get_seq_length() :].to(device)
            added = ids.shape[1] - held
            logits = model(input_ids=rest, cache=cache, logits_to_keep=added).logits[0]
        logits[-1].argmax().item()
        seconds.append(time.perf_counter() - start)
        if met and agent not in met:
            firsts.append(seconds[-1])
        met.add(agent)
        held, read = ids.shape[1], read + rest.shape[1]
        kept.append(logits.float().log_softmax(-1).cpu())
    kl = None
    if exact is not None:
        pairs = list(zip(kept, exact))[1:]
        total = sum(F.kl_div(found, other, log_target=True, reduction="sum").item() for found, other in pairs)
        kl = max(total / sum(len(other) for _, other in pairs), 0.0)
    report = cache.memory_report()
    row = {
        "mode": mode,
        "bytes": report["bytes"],
        "full_bytes": report["full_bytes"],
        "ratio": report["ratio"],
        "read": read,
        "ttft": sum(seconds) / len(seconds),
        "new_agent_ttft": sum(firsts) / len(firsts) if firsts else None,
        "kl": kl,
    }
    return row, kept
