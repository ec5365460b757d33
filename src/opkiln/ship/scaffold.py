"""What ``opkiln new`` writes: a package with one op, its reference, its tests and its CI.

The templates are the files in ``ship/new``, each with the suffix ``.in``.
"""

from __future__ import annotations

import keyword
import os
import re
import shutil
import sys

from opkiln.errors import StoreError, UsageError

SETUPTOOLS, HATCHLING = "setuptools", "hatchling"
BACKENDS = (SETUPTOOLS, HATCHLING)

_TEMPLATES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "new")
_OP = "src/{package}/ops/scaled_add"
_FILES = {
    "pyproject.{backend}.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "test.yml": ".github/workflows/test.yml",
    "package_init.py": "src/{package}/__init__.py",
    "ops_init.py": "src/{package}/ops/__init__.py",
    "op_init.py": f"{_OP}/__init__.py",
    "op.py": f"{_OP}/op.py",
    "reference.py": f"{_OP}/reference.py",
    "fake.py": f"{_OP}/fake.py",
    "gradients.py": f"{_OP}/gradients.py",
    "cpu.cpp": f"{_OP}/cpu.cpp",
    "cuda.cu": f"{_OP}/cuda.cu",
    "cuda_binding.cpp": f"{_OP}/cuda_binding.cpp",
    "scaled_add.h": f"{_OP}/scaled_add.h",
    "checks.h": f"{_OP}/checks.h",
    "test_scaled_add.py": "tests/test_scaled_add.py",
}
_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # what an index takes, less digits
# A package of such a name would hide another, or have its ops in a namespace of torch's own.
_TAKEN = frozenset((
    "opkiln", "torch", "torchgen", "functorch", "aten", "prim", "prims", "c10", "c10d", "inductor",
    "quantized", "quantized_decomposed", "onednn", "mkl", "mkldnn", "profiler", "rngprims",
    "higher_order", "debugprims", "torchvision", "torchaudio", "numpy", "test", "tests",
    "setuptools", "hatchling", "pytest", "click", "src", "ops",
))  # fmt: skip


def write(name: str, parent: str, backend: str = SETUPTOOLS) -> list[str]:
    """Write the package ``name`` into the new directory ``parent/name``; its files, in order.

    The directory appears whole or not at all. Raises UsageError for a name that cannot be a
    package's or a directory that is there, StoreError where it cannot be written.
    """
    package = package_of(name)
    target = os.path.join(parent, name)
    if os.path.lexists(target):
        raise UsageError(
            f"{target} exists already",
            why="a new package is written into a new directory",
            hint=f"cd elsewhere, or: opkiln new {name}2",
        )
    texts = _rendered(name, package, backend)
    # Beside the target, so that it appears there in one step.
    staged = os.path.join(parent, f".{name}.{os.getpid()}-{os.urandom(6).hex()}")
    try:
        for path, text in texts.items():
            place = os.path.join(staged, path)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "w", encoding="utf-8") as file:
                file.write(text)
        os.rename(staged, target)
    except OSError as error:
        raise StoreError(
            f"{target} cannot be written: {error.strerror}",
            hint="cd to a directory that can be written to",
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return sorted(texts)


def package_of(name: str) -> str:
    """The package by which a project of this name is imported. Raises UsageError."""
    package = re.sub(r"[-_.]+", "_", name).lower()
    why = ""
    if not name.isascii() or not _NAME.fullmatch(name):
        why = "a name is letters, digits, '-', '_' and '.', from a letter to a letter or digit"
    elif len(package) > 60:
        why = "it has more than 60 characters"
    elif keyword.iskeyword(package) or keyword.issoftkeyword(package):
        why = f"{package} is a word of Python's"
    elif package in sys.stdlib_module_names:
        why = f"{package} is a module of Python's own library"
    elif package in _TAKEN:
        why = f"{package} is the name of another package, or of a namespace that torch has"
    if why:
        raise UsageError(f"{name!r} cannot be the name of a package", why=why, hint=_EXAMPLE)
    return package


_EXAMPLE = "opkiln new my_ops"


def _rendered(name: str, package: str, backend: str) -> dict[str, str]:
    """The text of each file, by its path in the package."""
    from opkiln import __version__

    if backend not in BACKENDS:
        raise UsageError(f"{backend!r} is no build backend; there are " + " and ".join(BACKENDS))
    release = ".".join(__version__.split("+")[0].split(".")[:2])
    values = {
        "NAME": name,
        "PACKAGE": package,
        "BACKEND": backend,
        "OPKILN": release,
        "UV": _template("uv.toml").rstrip("\n"),
    }
    return {
        place.format(package=package): _filled(_template(template.format(backend=backend)), values)
        for template, place in _FILES.items()
    }


def _template(name: str) -> str:
    with open(os.path.join(_TEMPLATES, f"{name}.in"), encoding="utf-8") as file:
        return file.read()


def _filled(text: str, values: dict[str, str]) -> str:
    # A word that is no key is an error of ours, and a KeyError.
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], text)
