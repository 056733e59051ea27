"""Lazy exports (PEP 562): a package lists its public names in one table and imports a module at their first use."""

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def attach(
    package: str,
    exports: Mapping[str, Iterable[str]],
    submodules: Iterable[str] = (),
    needs: Mapping[str, Iterable[str]] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the `__getattr__`, `__dir__` and `__all__` of a package that resolves its names on first use.

    Args:
        package: Name of the calling package (`__name__`).
        exports: Absolute module name -> the public names that it defines.
        submodules: Submodules reachable as attributes without an explicit import; they are not in `__all__`.
        needs: Optional library -> the names that cannot be imported without it. Where it is not installed they are
            not in `__all__`, so that `from package import *` works; asking for one by name raises its `ImportError`.

    Returns:
        `(getattr, dir, all)`, to be assigned to `__getattr__`, `__dir__` and `__all__` of the package.

    Example:
        >>> __getattr__, __dir__, __all__ = attach(__name__, {"hf_ext.quantizers.mxfp4": ["MXFP4Config"]})
    """
    home = {name: module for module, names in exports.items() for name in names}
    modules = frozenset(submodules)

    def __getattr__(name: str) -> Any:
        if name in home:
            value = getattr(importlib.import_module(home[name]), name)
        elif name in modules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Later accesses are ordinary attribute look-ups.
        vars(importlib.import_module(package))[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *home, *modules})

    absent = [names for library, names in (needs or {}).items() if importlib.util.find_spec(library) is None]
    return __getattr__, __dir__, sorted(set(home).difference(*absent))
