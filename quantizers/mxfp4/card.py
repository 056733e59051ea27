"""The model card of a packed checkpoint."""

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .configuration import QUANT_METHOD, MXFP4Config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TAGS", "config_expression", "model_card", "prepare_card", "remove_card"]

TAGS = ["hf-ext", "mxfp4", "quantized"]
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
_TRANSFORMERS_TEMPLATE = "This model card has been automatically generated"
_NOT_SHOWN = ("channel_stats", "dequantize", "kernel", "quant_method", "modules_to_not_convert")


def config_expression(config: MXFP4Config) -> str:
    """``MXFP4Config(...)`` with what differs from the defaults, as one would write it."""
    changed = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in fields(config)
        if field.name not in _NOT_SHOWN and getattr(config, field.name) != field.default
    ]
    return f"MXFP4Config({', '.join(changed)})"


def model_card(
    name: str,
    config: MXFP4Config,
    *,
    format: str = "mxfp4",
    architecture: str = "AutoModelForCausalLM",
    base_model: str | None = None,
    source_data: dict[str, Any] | None = None,
    bits_per_weight: float | None = None,
    total_bits_per_weight: float | None = None,
    relative_error: float | None = None,
    calibrated: bool = False,
) -> str:
    """The text of ``README.md``, metadata first.

    Args:
        name: what the snippet loads: a repository or a folder.
        config: how the weights were quantised.
        format: ``"mxfp4"`` or ``"compressed-tensors"``.
        architecture: class of the model, for the snippet.
        base_model: repository of the dense model, if it has one.
        source_data: metadata of the dense model's card; its license, language and task are carried over.
        bits_per_weight, total_bits_per_weight: of the packed layers, and of all weights.
        relative_error: ``|W - W^| / |W|`` over all packed weights.
        calibrated: whether the search was weighted by the inputs of a calibration text.
    """
    from huggingface_hub import ModelCardData

    source_data = source_data or {}
    carried = {key: source_data[key] for key in _CARRIED if source_data.get(key)}
    if base_model is not None:
        carried |= {"base_model": base_model, "base_model_relation": "quantized"}
    tags = [*TAGS, "compressed-tensors"] if format == "compressed-tensors" else TAGS
    data = ModelCardData(library_name="transformers", tags=list(tags), **carried)
    bits = config.bits_per_weight if bits_per_weight is None else bits_per_weight
    figures = [f"- {bits:.4g} bits a weight in the packed layers"]
    if total_bits_per_weight is not None:
        figures.append(f"- {total_bits_per_weight:.4g} bits a weight over the whole checkpoint")
    if relative_error is not None:
        figures.append(f"- relative error of the packed weights, `|W - W^| / |W|`: {relative_error:.4f}")
    origin = "A dense checkpoint" if base_model is None else f"[{base_model}](https://huggingface.co/{base_model})"
    how = ", the search weighted by the inputs of a calibration text" if calibrated else ""
    activation = " Inputs of the packed layers are rounded to MXFP4 as well (W4A4)." if config.activation else ""
    body = _STANDARD if format == "compressed-tensors" else _OWN
    return (
        f"---\n{data.to_yaml()}\n---\n\n"
        f"# {Path(name).name}\n\n"
        f"{origin} with its linear layers in MXFP4: four-bit floats (E2M1) that share a power-of-two scale in blocks "
        f"of {config.block_size}{_macro_clause(config)}.{activation}\n\n"
        f"{chr(10).join(figures)}\n\n"
        f"{body.format(name=name, auto=_auto_class(architecture), method=QUANT_METHOD)}\n"
        "## How it was made\n\n"
        f"By hf-ext{how}, with the configuration\n\n"
        f"```python\n{config_expression(config)}\n```\n\n"
        "The scale rule (OAS) and the macro-block scale (MBS) are from *Unveiling the Potential of Quantization with "
        "MXFP4: Strategies for Quantization Error Reduction* (arXiv 2603.08713).\n"
    )


def _macro_clause(config: MXFP4Config) -> str:
    if config.macro_block_size is None:
        return ""
    return f", and an 8-bit mantissa of that scale in macro blocks of {config.macro_block_size}"


def _auto_class(architecture: str) -> str:
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "AutoModelForCausalLM"
    return architecture


_OWN = """## Load it

```python
import hf_ext  # makes transformers know the format
from transformers import {auto}

model = {auto}.from_pretrained("{name}")
```

> **`import hf_ext` is needed.** Without it transformers does not know `quant_method: {method}`: it only warns, and
> then loads a dense model with **random weights**.
"""
_STANDARD = """## Load it

The layout is `mxfp4-pack-quantized` of [compressed-tensors](https://github.com/vllm-project/compressed-tensors);
hf-ext is not needed.

```python
from transformers import {auto}, CompressedTensorsConfig

model = {auto}.from_pretrained("{name}", quantization_config=CompressedTensorsConfig(dequantize=True))
```
"""


def prepare_card(model: "PreTrainedModel") -> None:
    """Let `push_to_hub` of a quantised model write our card.

    transformers has a hook for tags (`add_model_tags`) and none for the text: it saves its template over whatever
    `save_pretrained` wrote. The upload is the one step after that, so it is wrapped here, on this object alone.
    A card that the repository has already is kept.
    """
    model.add_model_tags(TAGS)
    model._upload_modified_files = _upload_modified_files.__get__(model)


def remove_card(model: "PreTrainedModel") -> None:
    """Undo `prepare_card`, for a model that is dense again."""
    model.__dict__.pop("_upload_modified_files", None)
    model.model_tags = [tag for tag in model.model_tags or [] if tag not in TAGS]


def _upload_modified_files(self: "PreTrainedModel", working_dir: str | os.PathLike[str], *args: Any, **kwargs: Any):
    quantizer = self.hf_quantizer
    config = quantizer.quantization_config
    path = Path(working_dir) / "README.md"
    if not path.exists() or _TRANSFORMERS_TEMPLATE in path.read_text("utf-8"):
        repository = args[0] if args else kwargs["repo_id"]
        base = getattr(self.config, "_name_or_path", "")
        text = model_card(
            str(repository),
            config,
            architecture=type(self).__name__,
            base_model=base if base.count("/") == 1 and not os.path.exists(base) else None,
            calibrated=bool(quantizer.channel_stats),
        )
        path.write_text(text, encoding="utf-8")
    return type(self)._upload_modified_files(self, working_dir, *args, **kwargs)
