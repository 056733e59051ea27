"""Registration with transformers: `import hf_ext` is enough, before or after transformers, and imports neither.

transformers knows a quantization method once its classes are in two dictionaries of `transformers.quantizers.auto`. If
that module is loaded already, our classes are entered at once. Otherwise a finder on `sys.meta_path` wraps the loader
of that one module, enters the classes right after the module has run, and takes itself off `sys.meta_path`.

At that moment `transformers.modeling_utils` is often only half imported (it is what imports the quantizers), so a
module named in `TABLE` must import, at its top level, nothing from transformers but `transformers.utils` and the
submodules `transformers.quantizers.auto`, `.base` and `.quantizers_utils`.

A registration that fails must not break `import transformers` for a user who may not need it, and must not be silent
either: transformers loads a checkpoint of an unknown method with random weights after a mere warning. So the failure
is a `RuntimeWarning` with its cause, and the method's name is bound to a configuration class that raises that cause as
an `ImportError` when a checkpoint of the method is loaded.
"""

import importlib
import importlib.abc
import sys
import threading
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

TARGET = "transformers.quantizers.auto"


class Registration(NamedTuple):
    """One thing to register: `module.function()`, idempotent, enters the quantization method `quant_method`."""

    quant_method: str
    module: str
    function: str = "register"


TABLE: tuple[Registration, ...] = (Registration("hf_ext_mxfp4", "hf_ext.quantizers.mxfp4.quantizer"),)

_lock = threading.Lock()
_finder: "_RegistrationFinder | None" = None


def install() -> None:
    """Register with transformers now if its quantizers are loaded, else when they are. Harmless when repeated."""
    if _is_loaded():
        register_all()
        return
    global _finder
    with _lock:
        if _finder is None or _finder not in sys.meta_path:
            _finder = _RegistrationFinder()
            sys.meta_path.insert(0, _finder)


def register_all() -> None:
    """Call every registration of `TABLE`, importing transformers if need be. See the module's text for failures.

    It is idempotent, and what to call after `importlib.reload(transformers.quantizers.auto)`, which empties the
    dictionaries.
    """
    for entry in TABLE:
        if _is_initializing(entry.module):
            continue
        try:
            getattr(importlib.import_module(entry.module), entry.function)()
        except Exception as error:  # whatever it is: transformers' own import must go on
            _register_failure(entry, error)


def _register_failure(entry: Registration, error: Exception) -> None:
    cause = f"{type(error).__name__}: {error}"
    message = (
        f"hf_ext could not register the quantization method {entry.quant_method!r} with transformers ({cause}); "
        "loading a checkpoint of that method will raise an ImportError"
    )
    warnings.warn(message, RuntimeWarning, stacklevel=2)

    class UnavailableConfig:
        """Stands in for the configuration of a method whose registration failed: using it raises the cause."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise ImportError(
                f"hf_ext could not register {entry.quant_method!r} with transformers: {cause}"
            ) from error

        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> "UnavailableConfig":
            return cls()

    auto = sys.modules[TARGET]
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(entry.quant_method, UnavailableConfig)
    auto.AUTO_QUANTIZER_MAPPING.setdefault(entry.quant_method, UnavailableConfig)


def _is_initializing(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and getattr(module.__spec__, "_initializing", False)


def _is_loaded() -> bool:
    return TARGET in sys.modules and not _is_initializing(TARGET)


def _fire(finder: "_RegistrationFinder") -> None:
    with _lock:  # not held while registering: that imports modules, which take locks of their own
        if finder.fired:
            return
        finder.fired = True
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    register_all()


class _RegistrationFinder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: asks the other finders for `TARGET` and wraps the loader that they name."""

    def __init__(self) -> None:
        self.fired = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TARGET:
            # hf_ext may have been imported while TARGET was running (another thread, or below it): catch up here.
            if _is_loaded():
                _fire(self)
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader, self)
                return spec
        return None


class _RegisteringLoader(importlib.abc.Loader):
    """Delegates everything to the real loader, gives it back its place when the module runs, then registers."""

    def __init__(self, loader: Any, finder: _RegistrationFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module looks as if we had never been there: reload, pickling, inspect and pkgutil see its
        # own loader.
        module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _fire(self._finder)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # unpickling and copying ask before __init__ has run
            raise AttributeError(name)
        return getattr(self._loader, name)
