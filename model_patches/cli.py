"""`hf-ext patch METHOD SRC DST`: a method's patch on a checkpoint, with the options of that method."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_ext.cli.lazy import lazy_app

__all__ = ["PATCHES", "app", "turboconn"]

PATCHES = {
    "turboconn": (
        "hf_ext.model_patches.cli:turboconn",
        "Links from higher layers of one token to lower layers of a later one.",
    ),
}
app = lazy_app(PATCHES, help="Patch a checkpoint: `hf-ext patch METHOD SRC DST`. The result needs no hf_ext to load.")

Source = Annotated[str, typer.Argument(help="Checkpoint: a folder, or a model of the Hub (ORG/NAME).")]
Destination = Annotated[Path, typer.Argument(help="Folder to make.")]
Dtype = Annotated[str, typer.Option(help="Type to load and write the weights in; auto is the source's own.")]
BaseModel = Annotated[str | None, typer.Option(help="Repository of the base model, for the card.")]
ShardSize = Annotated[str, typer.Option(help="Largest file of weights.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST when the new one is complete.")]


def turboconn(
    src: Source,
    dst: Destination,
    links: Annotated[
        str,
        typer.Option(help="dense, cascade, all, sparse, or pairs SOURCE:TARGET of layers, such as 15:0,16:1."),
    ] = "dense",
    rank: Annotated[str, typer.Option(help="Rank of each link's matrix, or none for full matrices.")] = "none",
    group_size: Annotated[int, typer.Option(help="Tokens that a link reaches back; so many run in parallel.")] = 1,
    gate: Annotated[str, typer.Option(help="none, scalar or input.")] = "none",
    train_mode: Annotated[str, typer.Option(help="exact, jacobi or auto.")] = "exact",
    n_iters: Annotated[int, typer.Option(help="Parallel passes of jacobi and auto.")] = 4,
    bptt_window: Annotated[
        int | None, typer.Option(help="Groups after which the carried state is cut from the gradient; default never.")
    ] = None,
    history: Annotated[
        int | None, typer.Option(help="Tokens whose states a cache keeps; default group size + 8.")
    ] = None,
    target_scale: Annotated[
        bool, typer.Option("--target-scale", help="Scale what is added by the size of what it is added to.")
    ] = False,
    dtype: Dtype = "auto",
    base_model: BaseModel = None,
    max_shard_size: ShardSize = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Put TurboConn links on a decoder; they start at zero, so the result says what the source says until trained.

    Supported: Llama, Mistral, Qwen2, Qwen3, SmolLM3, OLMo 2, Phi-3, Gemma 2 and 3 (text). The result carries its code:
    `AutoModelForCausalLM.from_pretrained(DST, trust_remote_code=True)` loads it where hf_ext is not installed.

    Examples:

    - `hf-ext patch turboconn HuggingFaceTB/SmolLM2-135M-Instruct smol-turbo --rank 64`

    - `hf-ext patch turboconn ./model ./turbo --links sparse --group-size 4`

    - `hf-ext patch turboconn ./model ./turbo --links 15:0,20:4`
    """
    from rich.console import Console

    console = Console()
    with console.status("importing transformers"):
        from hf_ext.model_patches.checkpoint import write_patched
        from hf_ext.model_patches.turboconn import TurboConnConfig, patch
        from hf_ext.model_patches.turboconn.patching import check_config

    config = TurboConnConfig(
        links=_links(links),
        rank=_rank(rank),
        gate=gate,
        group_size=group_size,
        train_mode=train_mode,
        n_iters=n_iters,
        bptt_window=bptt_window,
        history=history,
        target_scale=target_scale,
    )
    with console.status("patching"):
        done = write_patched(
            src,
            dst,
            check=lambda values: check_config(values, config),
            apply=lambda model: patch(model, config),
            card=_turboconn_card,
            tags=["hf-ext", "turboconn"],
            dtype=dtype,
            base_model=base_model,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
        )
    pairs = config.pairs(done.model.config.num_hidden_layers)
    console.print(
        f"{len(pairs)} link(s): {done.added:,} parameters on {done.parameters:,}, {done.added / done.parameters:.1%}; "
        "they start at zero",
        soft_wrap=True,
    )
    console.print(f"patched checkpoint in {done.path}; load it with trust_remote_code=True", soft_wrap=True)


def _links(value: str) -> str | list[tuple[int, int]]:
    if ":" not in value:
        return value
    try:
        return [tuple(int(layer) for layer in pair.split(":")) for pair in value.split(",")]
    except ValueError:
        raise ValueError(f"--links is {value!r}; pairs are written SOURCE:TARGET, such as 15:0,16:1") from None


def _rank(value: str) -> int | None:
    if value.lower() == "none":
        return None
    if not value.isdecimal():
        raise ValueError(f"--rank is {value!r}; it must be a whole number or none")
    return int(value)


def _turboconn_card(name: str, model: Any) -> str:
    settings = model.model.turbo_config
    pairs = ", ".join(f"{source} to {target}" for source, target in settings.pairs(model.config.num_hidden_layers))
    size = "full matrices" if settings.rank is None else f"matrices of rank {settings.rank}"
    return f"""# {name}

A `{type(model).turboconn_base.__name__}` with TurboConn links
([arXiv 2602.17993](https://arxiv.org/abs/2602.17993), our reading of its abstract): what a layer writes for one token
is added to what a lower layer reads {settings.group_size} token(s) later. Layers joined: {pairs} ({size}).

The links start at zero: until it is fine-tuned, this model says exactly what its base says. A model trained with the
authors' own code has another form and does not load here.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
```

Without `trust_remote_code=True` loading stops with an error, so that the links cannot get lost unnoticed. With peft,
name the modules (`target_modules`) and keep the links with the adapter (`modules_to_save=["turbo_links"]`). Fine-tune
with gradient clipping at 1.0 and a lower learning rate than the base stands.
"""
