"""`hf-ext publish WHAT`."""

from pathlib import Path
from typing import Annotated

import typer


def publish_command(
    what: Annotated[str, typer.Argument(help="A model folder, a kernel folder, or the name of a bundled kernel.")],
    repo_id: Annotated[str | None, typer.Option(help="Hub repository, `owner/name`. A kernel has its own.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate and list what would be uploaded.")] = False,
    private: Annotated[bool, typer.Option(help="Make the repository private if it is created.")] = False,
) -> None:
    """Validate a model or kernel folder and push it to the Hub.

    A kernel is written out once per backend (`torch-cuda`, `torch-rocm`, `torch-xpu`, `torch-cpu`), to the branch of
    its version. The token is that of `hf auth login` or the variable `HF_TOKEN`.

    Examples:

    - `hf-ext publish ./smol-mxfp4 --repo-id me/smol-mxfp4 --dry-run`

    - `hf-ext publish mxfp4_gemm --dry-run`
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from hf_ext.kernel_lookup import kernel_folders
    from hf_ext.publishing import kind_of, publish_kernel, publish_model

    folder = Path(what)
    if not folder.exists() and what in kernel_folders():
        folder = kernel_folders()[what]
    if not folder.is_dir():
        kernels = ", ".join(kernel_folders()) or "none here"
        raise FileNotFoundError(f"{what} is neither a folder nor the name of a bundled kernel ({kernels})")
    publish = publish_kernel if kind_of(folder) == "kernel" else publish_model
    console = Console()
    with console.status(f"{'validating' if dry_run else 'validating and uploading'} {escape(str(folder))}"):
        plan = publish(folder, repo_id, dry_run=dry_run, private=private)
    table = Table(title=f"{plan.repo_id or 'no repository named'} ({plan.repo_type})", title_justify="left")
    table.add_column("file", overflow="fold")
    table.add_column("bytes", justify="right")
    for name, size in plan.files.items():
        table.add_row(escape(name), f"{size:,}")
    console.print(table)
    total = f"{len(plan.files)} files, {sum(plan.files.values()):,} bytes"
    console.print(
        f"dry run: {total} would be uploaded" if dry_run else f"{total} uploaded to {plan.url}", soft_wrap=True
    )
