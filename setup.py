"""Package discovery: root folder `quantizers/` is `hf_ext.quantizers`, so nothing lands under a bare top-level name.

All metadata is in pyproject.toml. This file exists because setuptools' declarative discovery cannot add a prefix; it
finds every method folder by itself, so that a new method needs no packaging edit.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
WINGS = (
    "quantizers",
    "cache_impls",
    "model_patches",
    "trainers",
    "adapters",
    "generation",
    "tasks",
    "metrics",
    "benchmarks",
)
DATA = [
    f"**/*.{suffix}"
    for suffix in ("md", "json", "jsonl", "csv", "toml", "yaml", "yml", "txt", "jinja", "png", "svg", "gz", "py")
]

package_dir = {"hf_ext": "hf_ext"}
packages = find_packages(str(ROOT), include=["hf_ext", "hf_ext.*"])
for wing in WINGS:
    if not (ROOT / wing / "__init__.py").is_file():
        raise SystemExit(f"setup.py: {wing}/__init__.py is missing, so hf_ext.{wing} would be left out of the package")
    package_dir[f"hf_ext.{wing}"] = wing
    packages += [f"hf_ext.{wing}", *(f"hf_ext.{wing}.{name}" for name in find_packages(str(ROOT / wing)))]

package_data = {"": DATA, "hf_ext": ["py.typed"]}
if (ROOT / "kernels").is_dir():
    # Kernel repositories are data, loaded by path: as importable `kernels` they would shadow the library of that name.
    package_dir["hf_ext._kernels"] = "kernels"
    packages.append("hf_ext._kernels")
    package_data["hf_ext._kernels"] = ["**/*"]

setup(
    package_dir=package_dir,
    packages=packages,
    package_data=package_data,
    exclude_package_data={"": ["**/__pycache__/*", "**/*.pyc"], "hf_ext._kernels": ["*/tests/*"]},
    zip_safe=False,
)
