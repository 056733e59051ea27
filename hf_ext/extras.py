"""Optional dependencies: one `ImportError` that names the extra to install, raised when the dependency is used."""

import importlib
import importlib.metadata
import importlib.util
import re
from types import ModuleType

DISTRIBUTION = "hf-ext"


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency.

    Args:
        module: Dotted name of the module, for example `"trl"`.
        extra: The extra of this distribution that brings it, for example `"trainers"`.

    Returns:
        The imported module.

    Raises:
        ImportError: The module is not installed, with the command that installs it; or it is installed and fails to
            import, with its own error as the cause.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        command = f"pip install '{DISTRIBUTION}[{extra}]'"
        if isinstance(error, ModuleNotFoundError) and error.name == top:
            raise ImportError(f"{top} is not installed; it comes with: {command}", name=top) from None
        raise ImportError(f"{top} is installed but fails to import ({error}); try: {command}", name=top) from error


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    return importlib.util.find_spec(module) is not None


def extras_status() -> dict[str, list[str]]:
    """Map each extra of the installed distribution to the requirements of it that are missing or too old.

    An empty list means that the extra is complete. Requirements that do not apply to this platform are left out.

    Raises:
        importlib.metadata.PackageNotFoundError: hf-ext runs from a folder that was never installed.
    """
    from packaging.requirements import Requirement  # a dependency of transformers and accelerate

    requirements = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]

    def missing(extra: str, seen: frozenset[str]) -> set[str]:
        found: set[str] = set()
        for requirement in requirements:
            # A requirement belongs to the extra when its marker holds with the extra and not without it.
            if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
                continue
            if requirement.marker.evaluate({"extra": ""}):
                continue
            if requirement.name == DISTRIBUTION:
                for inner in requirement.extras - seen:
                    found |= missing(inner, seen | {inner})
                continue
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                found.add(str(requirement.name))
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                found.add(f"{requirement.name}{requirement.specifier} (found {version})")
        return found

    names = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    return {name: sorted(missing(name, frozenset({name})), key=str.lower) for name in map(_normalise, names)}


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
