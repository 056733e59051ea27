"""The `hf-ext` command: one table of verbs, each imported when it is used, so that `hf-ext --help` is instant."""

import os
import sys
from collections.abc import Sequence

VERBS = {
    "list": ("hf_ext.cli.methods:list_command", "Methods of this version: what each does and where it lives."),
    "env": ("hf_ext.cli.environment:env_command", "Versions, devices, extras, and which kernels would run and why."),
    "quantize": ("hf_ext.quantizers.cli:quantize", "Quantise a checkpoint to MXFP4 with OAS and MBS."),
    "patch": ("hf_ext.model_patches.cli:app", "Patch a checkpoint with a method's changes to the model."),
    "cache": ("hf_ext.cache_impls.cli:app", "What a saved key/value cache holds."),
    "train": ("hf_ext.cli.train:app", "Train with a method's script: a YAML file, and flags that override it."),
    "merge-lora": ("hf_ext.adapters.cli:merge_lora", "Merge LoRA adapters into one adapter of one rank."),
    "demo": ("hf_ext.benchmarks.demo:main", "The main job on a real model: quantise, measure, plot, reload."),
    "audit": ("hf_ext.cli.audit:app", "Look through what a method wrote down: verdicts of the CaT trainer."),
    "bench": ("hf_ext.cli.bench:app", "Measure a method beside its peers."),
    "publish": ("hf_ext.cli.publish:publish_command", "Validate a model or kernel folder and push it to the Hub."),
    "kernels": ("hf_ext.cli.kernels:app", "List, check and compile kernel repositories."),
}
HELP = (
    "Methods from recent papers at the extension points of the Hugging Face libraries.\n\n"
    "`hf-ext VERB --help` shows the options of a verb and examples."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 success, 1 an error (one line on standard error), 2 wrong usage, 130 Ctrl-C.

    `--debug`, anywhere before a `--`, shows the traceback of an error instead.

    Args:
        argv: Arguments without the program's name; default `sys.argv[1:]`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    # Accepted after the verb too, where the user who has just seen an error adds it.
    arguments = [text for i, text in enumerate(arguments) if i >= end or text != "--debug"]
    from hf_ext.cli.lazy import lazy_app

    try:
        lazy_app(VERBS, help=HELP, root=True)(args=arguments, prog_name="hf-ext")
    except BrokenPipeError:  # `hf-ext list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if debug:
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        sys.exit(1)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
