"""`hf-ext quantize`."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hf_ext.quantizers.mxfp4.checkpoint import Report

__all__ = ["quantize"]

_CALIBRATION_WINDOWS = 2
_MAX_CHARACTERS_A_WINDOW = 2**14  # a window is 512 tokens; no more text than this is read for each


def quantize(
    src: Annotated[str, typer.Argument(help="Dense checkpoint: a folder, or a model of the Hub (ORG/NAME).")],
    dst: Annotated[Path, typer.Argument(help="Folder to make.")],
    scale_rule: Annotated[
        str, typer.Option(help="How a block's scale follows from its maximum: ocp, ceil, oas, even or mse.")
    ] = "oas",
    macro_block: Annotated[
        str, typer.Option(help="Values that share an 8-bit scale mantissa: 128, 64, 32 or none.")
    ] = "128",
    block_size: Annotated[int, typer.Option(help="Values that share a power-of-two scale: 32 or 16.")] = 32,
    search: Annotated[
        str,
        typer.Option(help="How mantissas are chosen: static, dynamic, weighted, or auto (weighted if calibrated)."),
    ] = "auto",
    search_exponents: Annotated[bool, typer.Option("--search-exponents", help="Try neighbouring exponents.")] = False,
    search_slots: Annotated[int, typer.Option(help="Mantissas that a search tries; divides 256.")] = 16,
    activation: Annotated[str, typer.Option(help="Round the inputs of the layers as well: none or mxfp4.")] = "none",
    activation_macro_block: Annotated[str, typer.Option(help="Macro block of the inputs: 128, 64, 32, none.")] = "64",
    calibration: Annotated[
        str | None,
        typer.Option(help="Text that the search is weighted by: a text file, .jsonl with `text`, or a dataset."),
    ] = None,
    calibration_windows: Annotated[
        int, typer.Option(help="Windows of 512 tokens taken of it.")
    ] = _CALIBRATION_WINDOWS,
    skip: Annotated[
        list[str] | None, typer.Option(help="Module to leave dense, besides the output head; repeatable.")
    ] = None,
    format: Annotated[
        str, typer.Option(help="mxfp4, or compressed-tensors for readers without hf-ext (needs --macro-block none).")
    ] = "mxfp4",
    eval_ppl: Annotated[
        Path | None, typer.Option(help="Text file; prints the perplexity on it, dense and packed.")
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="Name of a GGUF file in SRC to read.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype to load SRC in and to keep dense tensors in; default its own.")
    ] = None,
    base_model: Annotated[str | None, typer.Option(help="Repository of the dense model, for the card.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file of weights.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST when the new one is complete.")] = False,
) -> None:
    """Quantise a checkpoint to MXFP4 with overflow-aware (OAS) and macro-block scaling (MBS).

    Tensor by tensor, in little memory. Works in `DST.partial`; after an interruption the same command goes on where it
    stopped. The result loads with `import hf_ext` and `from_pretrained`; with `--format compressed-tensors` without
    hf-ext, in transformers and vLLM.

    Examples:

    - `hf-ext quantize HuggingFaceTB/SmolLM2-135M-Instruct smol-mxfp4`

    - `hf-ext quantize ./model ./packed --scale-rule oas --macro-block 128 --calibration corpus.txt --search-exponents`

    - `hf-ext quantize ./model ./for-vllm --format compressed-tensors --macro-block none`

    - `hf-ext quantize ./folder ./packed --gguf-file model.Q4_1.gguf --eval-ppl text.txt`
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    if eval_ppl is not None and not eval_ppl.is_file():
        raise FileNotFoundError(f"--eval-ppl: {eval_ppl} is not a file")
    text = None if calibration is None else list(_read_calibration(calibration, calibration_windows))
    console = Console()
    with console.status("importing transformers"):
        from hf_ext.quantizers.mxfp4.checkpoint import quantize_checkpoint
        from hf_ext.quantizers.mxfp4.configuration import MXFP4Config

    config = MXFP4Config(
        block_size=block_size,
        scale_rule=scale_rule,
        macro_block_size=_size("--macro-block", macro_block),
        weight_search=search,
        search_exponents=search_exponents,
        search_slots=search_slots,
        activation=None if activation == "none" else activation,
        activation_macro_block_size=_size("--activation-macro-block", activation_macro_block),
    )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("opening" if text is None else "opening and calibrating", total=None)

        def show(done: int, total: int, name: str) -> None:
            bars.update(task, completed=done, total=total, description=name)

        report = quantize_checkpoint(
            src,
            dst,
            config,
            calibration=text,
            calibration_windows=calibration_windows if text is not None else None,
            skip=skip or (),
            format=format,
            gguf_file=gguf_file,
            dtype=dtype,
            base_model=base_model,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            progress=show,
        )
    console.print(_table(report))
    console.print(
        f"{report.bits_per_weight:.4f} bits a weight in the packed layers, {report.total_bits_per_weight:.4f} in the "
        f"whole checkpoint; {report.seconds:.1f} s"
        + (f"; {report.resumed} of {report.shards} shards were there already" if report.resumed else ""),
        soft_wrap=True,
    )
    if report.dropped:
        console.print(
            f"{len(report.dropped)} tensor(s) of the source left out, unused by the model or copies of tied weights: "
            f"{', '.join(report.dropped[:5])}",
            soft_wrap=True,
        )
    if eval_ppl is not None:
        with console.status("perplexity"):
            dense, packed = _perplexities(src, gguf_file, dtype, report, eval_ppl.read_text(encoding="utf-8"))
        console.print(f"perplexity on {eval_ppl.name}: {dense:.3f} dense, {packed:.3f} packed", soft_wrap=True)
    console.print(f"packed checkpoint in {report.path}", soft_wrap=True)


def _size(option: str, value: str) -> int | None:
    if value.lower() == "none":
        return None
    if value not in ("128", "64", "32"):
        raise ValueError(f"{option} must be 128, 64, 32 or none; got {value!r}")
    return int(value)


def _read_calibration(name: str, windows: int) -> Iterator[str]:
    """Texts of a file or a dataset, no more than a calibration can use."""
    if windows < 1:
        raise ValueError(f"--calibration-windows must be at least 1, got {windows}")
    left = windows * _MAX_CHARACTERS_A_WINDOW
    for text in _texts(name, left):
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _texts(name: str, most: int) -> Iterator[str]:
    path = Path(name)
    if path.is_file() and path.suffix in (".jsonl", ".json"):
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of(_parse(line, path, number), f"{path}, line {number}")
    elif path.is_file():
        with open(path, encoding="utf-8", errors="strict") as file:
            try:
                yield file.read(most)
            except UnicodeDecodeError as error:
                raise ValueError(f"--calibration: {path} is not a text in UTF-8: {error}") from None
    elif path.suffix in (".txt", ".jsonl", ".json", ".md"):
        raise FileNotFoundError(f"--calibration: {path} does not exist")
    else:
        from hf_ext.extras import require

        datasets = require("datasets", extra="tasks")
        try:
            rows = datasets.load_dataset(name, split="train", streaming=True)
        except Exception as error:  # a dozen kinds of failure, one meaning
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"--calibration: {name} is neither a file nor a dataset with `train`: {reason}"
            ) from error
        for number, row in enumerate(itertools.islice(rows, most), start=1):
            yield _text_of(row, f"{name}, row {number}")


def _parse(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"--calibration: {path}, line {number} is not JSON: {error}") from None


def _text_of(row: Any, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError(f"--calibration: {where} has no field `text`")
    return row["text"]


def _table(report: "Report") -> Any:
    from rich.table import Table

    table = Table(title="Packed layers", title_justify="left")
    table.add_column("layers", overflow="fold")
    for name in ("count", "relative error", "dense", "packed"):
        table.add_column(name, justify="right")
    for kind, layers in report.by_kind().items():
        _add_row(table, kind.removesuffix(".weight"), layers)
    table.add_section()
    _add_row(table, "all packed layers", report.layers)
    table.add_row("left dense", "", "", "", _mib(report.dense_bytes))
    return table


def _add_row(table: Any, name: str, layers: list) -> None:
    from hf_ext.quantizers.mxfp4.checkpoint import relative_error

    dense, packed = (sum(getattr(layer, f"{kind}_bytes") for layer in layers) for kind in ("dense", "packed"))
    table.add_row(name, str(len(layers)), f"{relative_error(layers):.4f}", _mib(dense), _mib(packed))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


def _perplexities(
    src: str, gguf_file: str | None, dtype: str | None, report: "Report", text: str
) -> tuple[float, float]:
    """Of the dense and of the packed model, one after the other."""
    from transformers import AutoTokenizer, CompressedTensorsConfig

    from hf_ext.quantizers.mxfp4.evaluation import perplexity
    from hf_ext.quantizers.mxfp4.source import open_source, quiet

    tokenizer = AutoTokenizer.from_pretrained(report.path)
    source = open_source(src, gguf_file=gguf_file, dtype=dtype)
    cls = source.model_class
    with quiet():
        model = source.model or cls.from_pretrained(source.folder, dtype=source.dtype)
    dense = perplexity(model.eval(), tokenizer, text)
    del model, source
    arguments = {}
    if report.format == "compressed-tensors":
        arguments["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    with quiet():
        model = cls.from_pretrained(report.path, **arguments)
    return dense, perplexity(model, tokenizer, text)
