"""The caches that the PatternKV benchmark compares, and the texts it compares them on."""

import asyncio
import hashlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import DynamicCache
from transformers.cache_utils import Cache, QuantizedCache

from hf_ext.benchmarks import language_model as lm
from hf_ext.benchmarks.patternkv.measure import rotated_cache
from hf_ext.cache_impls.patternkv import PatternKVCache, PatternKVConfig

__all__ = ["FULL", "SETTINGS", "TEXTS", "Setting", "load_text"]

FULL = "full"


class Setting(NamedTuple):
    """A cache to compare.

    Attributes:
        group: Which series of the plot it belongs to.
        make: Makes it from the model's config and a seed.
        bits: Bits an element by its layout, scales in 16 bits; None where the cache reports them itself.
        package: Distribution that it needs beyond ours; empty if none.
        seeds: How many seeds change its outcome.
        decoded: Whether it is also measured on decoded windows.
    """

    group: str
    make: Callable[[Any, int], Cache]
    bits: float | None = None
    package: str = ""
    seeds: int = 1
    decoded: bool = False


def _ours(group: str, config: PatternKVConfig, seeds: int = 1, decoded: bool = False) -> Setting:
    fields = config.to_dict()
    return Setting(
        group,
        lambda model, seed: PatternKVCache(model, PatternKVConfig.from_dict({**fields, "seed": seed})),
        seeds=seeds,
        decoded=decoded,
    )


def _host(backend: str, bits: int, package: str) -> Setting:
    # Groups of 64 along the channels of a token, both sides, by default.
    return Setting(
        "transformers", lambda model, _: QuantizedCache(backend, model, nbits=bits), bits + 32 / 64, package=package
    )


def _kivi(group: int, fit: str = "minmax", bits: int = 2, key_bits: int | None = None) -> PatternKVConfig:
    return PatternKVConfig.kivi(bits, group, sink_length=4, scale_fit=fit, nbits_key=key_bits)


SETTINGS: dict[str, Setting] = {
    FULL: Setting("full", lambda model, _: DynamicCache(config=model), 16.0),
    "transformers quanto 2 bit": _host("quanto", 2, "optimum-quanto"),
    "transformers quanto 4 bit": _host("quanto", 4, "optimum-quanto"),
    "transformers hqq 2 bit": _host("hqq", 2, "hqq"),
    "transformers hqq 4 bit": _host("hqq", 4, "hqq"),
    "rotation + codebook 2 bit": Setting("rotation", lambda model, seed: rotated_cache(model, 2, seed), 2 + 16 / 64),
    "rotation + codebook 4 bit": Setting("rotation", lambda model, seed: rotated_cache(model, 4, seed), 4 + 16 / 64),
    "KIVI 2 bit, g 128": _ours("kivi", _kivi(128), decoded=True),
    "KIVI 2 bit, g 64": _ours("kivi", _kivi(64)),
    "KIVI 2 bit, g 32": _ours("kivi", _kivi(32)),
    "KIVI K4 V2, g 128": _ours("kivi", _kivi(128, key_bits=4)),
    "KIVI 4 bit, g 128": _ours("kivi", _kivi(128, bits=4)),
    "patterns off, fitted, g 128": _ours("fitted kivi", _kivi(128, "mse"), decoded=True),
    "patterns off, fitted, g 64": _ours("fitted kivi", _kivi(64, "mse")),
    "patterns off, fitted, g 32": _ours("fitted kivi", _kivi(32, "mse")),
    "PatternKV paper()": _ours("paper", PatternKVConfig.paper(2), seeds=3),
    "PatternKV, range scales": _ours("range", PatternKVConfig(scale_fit="minmax"), seeds=3, decoded=True),
    "PatternKV, range scales, 4 bit": _ours("range", PatternKVConfig(nbits=4, scale_fit="minmax")),
    "PatternKV default": _ours("default", PatternKVConfig(), seeds=3, decoded=True),
    "PatternKV default, g 64": _ours("default", PatternKVConfig(group_size=64)),
    "PatternKV default, g 32": _ours("default", PatternKVConfig(group_size=32, group_size_value=64)),
    "PatternKV default, K4 V2": _ours("default", PatternKVConfig(nbits_key=4)),
    "PatternKV default, 4 bit": _ours("default", PatternKVConfig(nbits=4)),
}


def _changelog() -> str:
    spec = importlib.util.find_spec("idlelib")
    file = Path(spec.origin).with_name("NEWS.txt") if spec else None
    if file is None or not file.is_file():
        raise FileNotFoundError(
            "this Python has no idlelib/NEWS.txt, the text 'changelog': run with --texts without it"
        )
    return file.read_text(encoding="utf-8")


def _code() -> str:
    folder = Path(inspect.getfile(asyncio)).parent
    return "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))


# None of them is a text that a preset was chosen on (argparse.py and IDLE's help page).
TEXTS: dict[str, str] = {
    "wikipedia": lm.TEXTS["wikipedia"][1],
    "news": lm.TEXTS["news"][1],
    "pydoc": lm.TEXTS["pydoc"][1],
    "changelog": "IDLE's list of changes, idlelib/NEWS.txt; differs between patch versions",
    "code": "Python source code: asyncio/*.py; differs between patch versions",
}
_OWN = {"changelog": _changelog, "code": _code}


def load_text(name: str) -> lm.Text:
    """One of `TEXTS`.

    Raises:
        ValueError: An unknown name, or a file that is not the pinned one.
        FileNotFoundError: This Python comes without the file.
    """
    if name not in TEXTS:
        raise ValueError(f"text {name!r} is unknown; known: {', '.join(TEXTS)}")
    if name not in _OWN:
        return lm.load_text(name)
    text = _OWN[name]()
    return lm.Text(name, text, hashlib.sha256(text.encode()).hexdigest(), TEXTS[name])
