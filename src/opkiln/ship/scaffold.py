"""What ``opkiln new`` writes: a package with an op, its reference, its tests and its CI.

The templates are the files in ``ship/new``, each with the suffix ``.in``. ``add_op.py`` adds an op
to an existing package.
"""

from __future__ import annotations

import keyword
import os
import re
import shutil
import sys

from opkiln import settings
from opkiln.authoring.parameters import CPP_KEYWORDS
from opkiln.errors import StoreError, UsageError
from opkiln.registry import bundled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

SETUPTOOLS, HATCHLING = "setuptools", "hatchling"
BACKENDS = (SETUPTOOLS, HATCHLING)
GITHUB, GITLAB, NO_CI = "github", "gitlab", "none"
# The CI services, each with its template and the file's place in the package.
CI = {
    GITHUB: ("test.yml", ".github/workflows/test.yml"),
    GITLAB: ("gitlab-ci.yml", ".gitlab-ci.yml"),
}

_TEMPLATES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "new")
_PACKAGE_FILES = {
    "pyproject.{backend}.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "package_init.py": "src/{package}/__init__.py",
    "ops_init.py": "src/{package}/ops/__init__.py",
}
# The files of an op's folder.
_OP_FILES = {
    "op_init.py": "__init__.py",
    "op.cpp": "{op}.cpp",
    "op.cu": "{op}.cu",
}
_TEST = "test_op.py"
_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # what PyPI allows, and a letter first
_OP_NAME = re.compile(r"[a-z](_?[a-z0-9])*")
# A package of such a name would hide another, or put its ops into one of torch's namespaces.
_TAKEN = frozenset((
    "opkiln", "torch", "torchgen", "functorch", "aten", "prim", "prims", "c10", "c10d", "inductor",
    "quantized", "quantized_decomposed", "onednn", "mkl", "mkldnn", "profiler", "rngprims",
    "higher_order", "debugprims", "torchvision", "torchaudio", "numpy", "test", "tests",
    "setuptools", "hatchling", "pytest", "click", "src", "ops",
))  # fmt: skip
# Names that the templates use for something else, and one that torch.ops does.
_OCCUPIED = frozenset((
    "device", "kernel", "make", "message", "name", "op_tests", "opk", "opkiln", "ops", "pytest",
    "request", "samples", "size", "torch", "x", "y",
))  # fmt: skip
_SUFFIXES = ("_ops", "_op", "_kernels", "_kernel")


def write(
    name: str, parent: str, backend: str = SETUPTOOLS, op: str = "", ci: str = GITHUB
) -> list[str]:
    """Write the package ``name`` into the new directory ``parent/name``, and return its files.

    It has the op ``op``, or one named after the package, and a file for the CI service ``ci``. The
    directory appears whole or not at all.
    Raises UsageError for an invalid name or an existing directory, StoreError if it cannot be
    written.
    """
    package = package_of(name)
    op = op_of(op) if op else default_op(package)
    target = os.path.join(parent, name)
    if os.path.lexists(target):
        add = os.path.isfile(os.path.join(target, "pyproject.toml"))
        raise UsageError(
            f"{target} exists already",
            why="a new package is written into a new directory",
            hint=f"opkiln new {name} --op NAME    # adds an op to it"
            if add
            else f"cd elsewhere, or: opkiln new {name}2",
        )
    texts = _package_texts(name, package, backend, op, ci)
    # In the same directory as the target, so that one rename puts it there.
    staged = os.path.join(parent, f".{name}.{os.getpid()}-{os.urandom(6).hex()}")
    try:
        write_all(staged, texts)
        os.rename(staged, target)
    except OSError as error:
        raise StoreError(
            f"{target} cannot be written: {error.strerror}",
            hint="cd to a writable directory",
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return sorted(texts)


def write_all(directory: str, texts: dict[str, str]) -> None:
    """Write new files into a directory. Raises OSError, also if a file exists."""
    for path, text in texts.items():
        place = os.path.join(directory, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "x", encoding="utf-8") as file:
            file.write(text)


def package_of(name: str) -> str:
    """The import name of a project. Raises UsageError."""
    package = re.sub(r"[-_.]+", "_", name).lower()
    letters = "a name has letters, digits, '-', '_' and '.'; it starts with a letter"
    taken = f"{package} is the name of another package, or of one of torch's namespaces"
    _refuse(f"{name!r} cannot be the name of a package", "opkiln new my_ops", (
        (not name.isascii() or not _NAME.fullmatch(name), letters),
        *_for_any_name(package),
        (package in sys.stdlib_module_names, f"{package} is a module of Python's standard library"),
        (package in _TAKEN, taken),
    ))  # fmt: skip
    return package


def _for_any_name(name: str) -> tuple[tuple[bool, str], ...]:
    is_keyword = keyword.iskeyword(name) or keyword.issoftkeyword(name)
    return (
        (len(name) > 60, "it has more than 60 characters"),
        (is_keyword, f"{name} is a keyword of Python"),
    )


def _refuse(what: str, hint: str, checks: Iterable[tuple[bool, str]]) -> None:
    """Raise UsageError for the first of (whether it is wrong, why) that is."""
    for wrong, why in checks:
        if wrong:
            raise UsageError(what, why=why, hint=hint)


def default_op(package: str) -> str:
    """The default name of a package's first op: ``demo_add`` for ``demo_ops``."""
    stem = next((package.removesuffix(s) for s in _SUFFIXES if package.endswith(s)), package)
    return f"{stem}_add"


def op_of(name: str) -> str:
    """An op's name in code, from what the user typed. Raises UsageError."""
    op = name.strip().lower().replace("-", "_")
    variables = {each for row in settings.table() for each in (row.variable, *row.aliases)}
    own = {f"OPKILN_BUILD_{op.upper()}", f"DS_BUILD_{op.upper()}"}
    letters = "a name has letters, digits and single '_' between them, and starts with a letter"
    _refuse(f"{name!r} cannot be the name of an op", "opkiln new my_ops --op my_add", (
        (not _OP_NAME.fullmatch(op), letters),
        *_for_any_name(op),
        (op in CPP_KEYWORDS, f"{op} is a keyword of C++"),
        (op in bundled(), "opkiln has an op of this name"),
        (op in _OCCUPIED, "the files of an op use this name for something else"),
        (op.startswith("test"), "pytest takes functions of such a name for tests"),
        (bool(variables & own), f"the variable OPKILN_BUILD_{op.upper()} has another meaning"),
    ))  # fmt: skip
    return op


def op_texts(package: str, op: str) -> tuple[dict[str, str], str]:
    """(the text of each file in an op's folder, the text of its test)."""
    values = _op_values(package, op)
    texts = {place.format(op=op): _filled(name, values) for name, place in _OP_FILES.items()}
    return texts, _filled(_TEST, values)


def entry_point(package: str, op: str) -> str:
    """What ``pyproject.toml`` says of an op: where its decorated function is.

    Each op has a line. A line for a whole module would find the functions that are decorated in
    that module, and not those that it imports from the folders of the ops.
    """
    return f"{package}.ops.{op}:{op}"


def ops_init() -> str:
    """The text of ``ops/__init__.py``."""
    return _filled("ops_init.py", {})


def _package_texts(name: str, package: str, backend: str, op: str, ci: str) -> dict[str, str]:
    """The text of each file, by its path in the package."""
    from packaging.version import Version

    from opkiln import __version__

    if backend not in BACKENDS:
        raise UsageError(f"unknown build backend {backend!r}", why="known: " + ", ".join(BACKENDS))
    files, row = dict(_PACKAGE_FILES), ""
    if ci != NO_CI:
        template, place = CI[ci]
        files[template] = place
        row = f"| `{place}` | runs the tests, and keeps the compiled ops for the next run |\n"
    release = ".".join(map(str, Version(__version__).release[:2]))
    values = {
        **_op_values(package, op),
        "NAME": name,
        "BACKEND": backend,
        "CI": row,
        "OPKILN": release,
    }
    values["UV"] = _filled("uv.toml", values).rstrip("\n")
    texts = {
        place.format(package=package): _filled(template.format(backend=backend), values)
        for template, place in files.items()
    }
    inside, test = op_texts(package, op)
    texts |= {f"src/{package}/ops/{op}/{place}": text for place, text in inside.items()}
    return {**texts, f"tests/test_{op}.py": test}


def _op_values(package: str, op: str) -> dict[str, str]:
    return {
        "PACKAGE": package,
        "OP": op,
        "ENTRY": entry_point(package, op),
        "SUITE": "Test" + "".join(part.capitalize() for part in op.split("_")),
        "VARIABLE": op.upper(),
    }


def _filled(template: str, values: dict[str, str]) -> str:
    with open(os.path.join(_TEMPLATES, f"{template}.in"), encoding="utf-8") as file:
        text = file.read()
    # An unknown word is a mistake in a template: a KeyError.
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], text)
