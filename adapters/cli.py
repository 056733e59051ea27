"""`hf-ext merge-lora`."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hf_ext.adapters.ctm.report import CtMReport

__all__ = ["merge_lora"]


def merge_lora(
    adapters: Annotated[list[str], typer.Argument(help="Folders of LoRA adapters, or of the Hub: ORG/NAME[/FOLDER].")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make.")],
    method: Annotated[str, typer.Option(help="The method; ctm is the only one.")] = "ctm",
    combine: Annotated[
        str, typer.Option(help="Merge rule: linear, ties, dare_linear, dare_ties, magnitude_prune, tsv or iso.")
    ] = "ties",
    rank: Annotated[int | None, typer.Option(help="Rank of the result; default the largest of the adapters'.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="One number per adapter, in quotes, e.g. '1 -1 0.5'; default 1 each, 1/T where the rule adds up."
        ),
    ] = None,
    density: Annotated[float, typer.Option(help="Share of entries that ties, dare and magnitude_prune keep.")] = 0.5,
    ties_density: Annotated[
        float | None, typer.Option(help="dare_ties: also trim to this share of what was kept.")
    ] = None,
    space: Annotated[
        str, typer.Option(help="Where the rule works: ctm (shared subspaces), core (then cut) or full (dense, slow).")
    ] = "ctm",
    sides: Annotated[str, typer.Option(help="Sides that ctm compresses: both, left, right or auto.")] = "both",
    beta: Annotated[float, typer.Option(help="How much norms count for the subspaces: 0 not at all, 1 fully.")] = 0.25,
    majority_sign: Annotated[str, typer.Option(help="How ties elects signs: total or frequency.")] = "total",
    scale: Annotated[float, typer.Option(help="Factor on the result.")] = 1.0,
    factor: Annotated[str, typer.Option(help="How the result is split: balanced or left.")] = "balanced",
    dtype: Annotated[str | None, typer.Option(help="Dtype of the result; default that of the first adapter.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the dare rules.")] = 0,
    base_model: Annotated[
        str | None, typer.Option(help="What to call the base model in the result; default what the adapters call it.")
    ] = None,
    allow_different_bases: Annotated[
        bool, typer.Option("--allow-different-bases", help="Merge although the adapters name different base models.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the output when the new one is complete.")
    ] = (False),
    report: Annotated[Path | None, typer.Option(help="File to write all figures to, as JSON.")] = None,
    push_to_hub: Annotated[str | None, typer.Option(help="Repository of the Hub to push the result to.")] = None,
) -> None:
    """Merge LoRA adapters of one base model into one adapter of one rank, which peft loads and servers take.

    By Compress then Merge (CtM): the adapters are written in subspaces that all share, merged there, and read straight
    off as one LoRA. The base model is not needed. The table at the end says how much of each adapter is kept.

    Examples:

    - `hf-ext merge-lora sql math code -o all --combine ties --rank 16`

    - `hf-ext merge-lora sql math -o both --combine linear --weights "0.7 0.3" --space core`

    - `hf-ext merge-lora me/lora-sql me/lora-math -o both --report both.json --push-to-hub me/lora-both`
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if method != "ctm":
        raise ValueError(f"--method is {method!r}; this version has ctm")
    adapters, numbers = _split_weights(adapters, weights)
    if report is not None:
        above = next(folder for folder in report.resolve().parents if folder.exists())
        if report.is_dir() or report.resolve() == output.resolve():
            raise ValueError(f"--report: {report} is a folder; name a file")
        if not above.is_dir():
            raise ValueError(f"--report: {report} cannot be written, {above} is no folder")
    console = Console()
    with console.status("importing torch and peft"):
        import torch

        from hf_ext.adapters.ctm import CtMConfig, merge_adapter_folders
        from hf_ext.adapters.ctm.saved import servable_problems

    config = CtMConfig(
        rank=rank,
        combination_type=combine,
        space=space,
        beta=beta,
        sides=sides,
        density=density,
        ties_density=ties_density,
        majority_sign_method=majority_sign,
        scaling_coeff=scale,
        seed=seed,
        factor=factor,
        dtype=dtype,
    )
    torch.set_num_threads(1)  # layers side by side are faster than threads inside these small matrices
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=console, transient=True) as bars,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        task = bars.add_task("opening", total=None)

        def show(done: int, total: int, layer: str) -> None:
            bars.update(task, completed=done, total=total, description=layer)

        result = merge_adapter_folders(
            adapters,
            output,
            numbers,
            config,
            overwrite=overwrite,
            base_model=base_model,
            allow_different_bases=allow_different_bases,
            progress=show,
        )
    for warning in {str(entry.message): entry for entry in caught if entry.category is UserWarning}:
        console.print(f"warning: {warning}", soft_wrap=True, markup=False)
    console.print(_table(result))
    if space == "ctm" and result.recommended_space == "core" and len(adapters) > 1:
        console.print(
            "little of these adapters is shared and their norms are alike: --space core may serve them better",
            soft_wrap=True,
        )
    problems = servable_problems(output)
    served = f"no, {'; '.join(problems[:3])}" if problems else f"yes, at --max-lora-rank {result.rank} or more"
    console.print(f"fit for vLLM: {served}", soft_wrap=True, markup=False)
    if report is not None:
        from hf_ext.runlog import write_text

        write_text(report, result.to_json_string())
        console.print(f"figures in {report}", soft_wrap=True, markup=False)
    console.print(f"merged adapter of rank {result.rank} in {output}", soft_wrap=True, markup=False)
    if push_to_hub is not None:
        from hf_ext.publishing import publish_model

        with console.status(f"pushing to {push_to_hub}"):
            plan = publish_model(output, push_to_hub)
        console.print(f"pushed to {plan.url}", soft_wrap=True, markup=False)


def _split_weights(adapters: list[str], weights: str | None) -> tuple[list[str], list[float] | None]:
    """Adapters and weights apart: of `--weights 1 1 0.5` without quotes, all but the first arrive as adapters."""
    if weights is None:
        return adapters, None
    rest = [text for text in adapters if _is_number(text) and not Path(text).exists()]
    parts = weights.replace(",", " ").split()
    if not parts or not all(map(_is_number, parts)):
        raise ValueError(f"--weights is {weights!r}; give numbers, one per adapter, such as '1 1 0.5'")
    return [text for text in adapters if text not in rest], [float(text) for text in (*parts, *rest)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _table(result: "CtMReport") -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"Energy kept at rank {result.rank}", title_justify="left")
    table.add_column("adapter", overflow="fold")
    for column in ("weight", "layers", "norm", "mean", "least"):
        table.add_column(column, justify="right")
    for name, weight in zip(result.adapters, result.weights):
        if name in result.left_out:
            table.add_row(escape(name), "0", "", "", "left out", "")
            continue
        table.add_row(
            escape(name),
            f"{weight:g}",
            str(len(result.retained_energy[name])),
            f"{result.norm(name):.4g}",
            f"{result.mean_energy(name):.3f}",
            f"{result.min_energy(name):.3f}",
        )
    return table
