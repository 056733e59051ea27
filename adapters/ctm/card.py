"""The model card of a merged adapter."""

import re
from collections.abc import Sequence
from pathlib import Path

from .report import CtMReport

__all__ = ["TAGS", "model_card"]

TAGS = ["lora", "merge", "ctm", "hf-ext"]
# peft names no task for adapters that are made without one, which most often are those of language models.
_AUTO = {
    None: "AutoModelForCausalLM",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}


def is_repository(name: str) -> bool:
    """Whether a name is that of a repository of the Hub, and no folder here."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and not Path(name).exists()


def model_card(
    name: str, report: CtMReport, base_model: str | None, origins: Sequence[str], task: str | None = None
) -> str:
    """Text of the card: metadata, where the adapter comes from, what it kept, how to load it.

    Args:
        name: title.
        report: figures of the merge.
        base_model: name or path of the base model.
        origins: what to call each adapter, in the report's order.
        task: peft's `task_type`, by which the base model is loaded; None: a causal language model.
    """
    from huggingface_hub import ModelCardData

    hub_id = base_model if base_model and is_repository(base_model) else None
    # A path says where the model lies on somebody's disk.
    shown = hub_id or (Path(base_model).name if base_model else "BASE_MODEL")
    data = ModelCardData(library_name="peft", tags=TAGS, base_model=hub_id)
    config = report.config
    rows = []
    for adapter, weight, origin in zip(report.adapters, report.weights, origins):
        kept = "left out" if not weight else f"{report.mean_energy(adapter):.3f} ({report.min_energy(adapter):.3f})"
        layers = len(report.retained_energy[adapter])
        rows.append(f"| `{origin}` | {weight:g} | {layers} | {report.norm(adapter):.4g} | {kept} |")
    options = ", ".join(f"{key}={value!r}" for key, value in config.to_dict().items())
    auto = _AUTO.get(task, "AutoModel")
    rule = config.rule_name.removeprefix("callable:")
    return (
        f"---\n{data.to_yaml()}\n---\n\n"
        f"# {name}\n\n"
        f"{len(report.adapters)} LoRA adapters of `{shown}` merged into one of rank "
        f"{report.rank}: the rule `{rule}` in the space `{config.space}`.\n\n"
        "| adapter | weight | layers | norm | energy kept, mean (least) over layers |\n"
        "|---|---:|---:|---:|---:|\n" + "\n".join(rows) + "\n\n"
        "Energy kept is the share of an adapter's squared norm that lies in the column and row spaces of the "
        "result.\n\n"
        "## Load it\n\n"
        "```python\n"
        f"from peft import PeftModel\nfrom transformers import {auto}\n\n"
        f'base = {auto}.from_pretrained("{shown}")\n'
        f'model = PeftModel.from_pretrained(base, "{name}")\n'
        "```\n\n"
        "It has one rank in every layer, a scaling of 1 and no patterns, as servers of LoRA adapters want it.\n\n"
        "## How it was made\n\n"
        f"By `hf-ext merge-lora`, with the configuration\n\n```python\nCtMConfig({options})\n```\n\n"
        "The method is from *Compress then Merge: From Multiple LoRAs into One Low-Rank Adapter* (arXiv 2606.03723).\n"
    )
