"""The work of ``opkiln new``: writes a package with an op, its reference, tests and CI; or an op.

The templates are the files in ``ship/new``, each with the suffix ``.in``.

An existing package gets new files and new lines; nothing is changed or removed. Every edit is
checked before anything is written: the edited ``pyproject.toml`` must differ from the old one by
the new op only, and the edited ``__init__.py`` must parse.
"""

from __future__ import annotations

import ast
import copy
import keyword
import os
import re
import shutil
import symtable
import sys
import tomllib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from opkiln import settings
from opkiln.base.digest import replace
from opkiln.builder.parameters import CPP_KEYWORDS
from opkiln.builder.registry import GROUP, bundled_ops
from opkiln.errors import StoreError, UsageError

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
# The files of an op, in the folder of its package and beside it.
_OP_FILES = {
    "op_init.py": "{folder}/ops/{op}/__init__.py",
    "op.cpp": "{folder}/ops/{op}/{op}.cpp",
    "op.cu": "{folder}/ops/{op}/{op}.cu",
    "test_op.py": "tests/test_{op}.py",
}
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
_HEADER = re.compile(rf"""\s*\[\s*project\s*\.\s*entry-points\s*\.\s*["']{GROUP}["']\s*\]""")
_TABLE = re.compile(r"\s*\[")
_KEYS = re.compile(r"cache-keys\s*=\s*\[")


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
            f"{target} cannot be written: {error.strerror}", hint="cd to a writable directory"
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
        *_name_checks(package),
        (package in sys.stdlib_module_names, f"{package} is a module of Python's standard library"),
        (package in _TAKEN, taken),
    ))  # fmt: skip
    return package


def _name_checks(name: str) -> tuple[tuple[bool, str], ...]:
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
    variables = {each for row in settings.table() for each in row.names}
    own = {f"OPKILN_BUILD_{op.upper()}", f"DS_BUILD_{op.upper()}"}
    letters = "a name has letters, digits and single '_' between them, and starts with a letter"
    _refuse(f"{name!r} cannot be the name of an op", "opkiln new my_ops --op my_add", (
        (not _OP_NAME.fullmatch(op), letters),
        *_name_checks(op),
        (op in CPP_KEYWORDS, f"{op} is a keyword of C++"),
        (op in bundled_ops(), "opkiln has an op of this name"),
        (op in _OCCUPIED, "the files of an op use this name for something else"),
        (op.startswith("test"), "pytest takes functions of such a name for tests"),
        (bool(variables & own), f"the variable OPKILN_BUILD_{op.upper()} has another meaning"),
    ))  # fmt: skip
    return op


def op_texts(package: str, op: str, folder: str) -> dict[str, str]:
    """The text of each file of an op, by its path. ``folder`` is the package's."""
    values = _op_values(package, op)
    return {
        place.format(folder=folder, op=op): _fill_template(template, values)
        for template, place in _OP_FILES.items()
    }


def _entry_point(package: str, op: str) -> str:
    """The entry point of an op in ``pyproject.toml``: the place of its decorated function.

    Each op has a line. A line for a whole module would find the functions that are decorated in
    that module, and not those that it imports from the folders of the ops.
    """
    return f"{package}.ops.{op}:{op}"


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
    values["UV"] = _fill_template("uv.toml", values).rstrip("\n")
    texts = {
        place.format(package=package): _fill_template(template.format(backend=backend), values)
        for template, place in files.items()
    }
    return texts | op_texts(package, op, f"src/{package}")


def _op_values(package: str, op: str) -> dict[str, str]:
    return {
        "PACKAGE": package,
        "OP": op,
        "ENTRY": _entry_point(package, op),
        "SUITE": "Test" + "".join(part.capitalize() for part in op.split("_")),
        "VARIABLE": op.upper(),
    }


def _fill_template(template: str, values: dict[str, str]) -> str:
    with open(os.path.join(_TEMPLATES, f"{template}.in"), encoding="utf-8") as file:
        text = file.read()
    # An unknown word is a mistake in a template: a KeyError.
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], text)


# One more op in a package


class AddedOp(NamedTuple):
    """The paths that were written, in the project's directory."""

    new: tuple[str, ...]
    changed: tuple[str, ...]


class _Project(NamedTuple):
    where: str  # the directory of pyproject.toml
    package: str  # its import name
    folder: str  # of the package, in ``where``
    settings: dict[str, Any]  # pyproject.toml, parsed
    text: str  # pyproject.toml, unparsed


def find(start: str) -> str:
    """The nearest directory with a pyproject.toml, from ``start`` upward. Raises UsageError."""
    here = Path(os.path.abspath(start))
    for place in (here, *here.parents):
        if (place / "pyproject.toml").is_file():
            return str(place)
    raise UsageError(
        f"no package was found in {here}",
        why="neither it nor a directory above it has a pyproject.toml",
        hint="opkiln new my_ops --op my_add    # writes a new package",
    )


def add(where: str, name: str) -> AddedOp:
    """Add the op ``name`` to the project in ``where``.

    After an error nothing is changed. Raises UsageError for a name that is invalid or taken, and
    for a project that cannot be edited; StoreError if it cannot be written.
    """
    op = op_of(name)
    project = _project(where)
    init, ops = (os.path.join(project.folder, each) for each in ("__init__.py", "ops"))
    for path in (os.path.join(ops, op), os.path.join("tests", f"test_{op}.py")):
        if os.path.lexists(os.path.join(where, path)):
            raise _taken_error(op, f"{path} exists already")
    new = op_texts(project.package, op, project.folder)
    if not os.path.lexists(os.path.join(where, ops, "__init__.py")):
        new[os.path.join(ops, "__init__.py")] = _fill_template("ops_init.py", {})
    changed = {
        "pyproject.toml": _add_entry_point(project, op),
        init: _add_import(_read(os.path.join(where, init)), project.package, op, init),
    }
    _write(where, new, changed)
    return AddedOp(tuple(sorted(new)), tuple(sorted(changed)))


def _project(where: str) -> _Project:
    text = _read(os.path.join(where, "pyproject.toml"))
    try:
        found = tomllib.loads(text)
        name = found["project"]["name"]
        values = found["project"].get("entry-points", {}).get(GROUP, {}).values()
        packages = {value.partition(":")[0].partition(".")[0].strip() for value in values}
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{os.path.join(where, 'pyproject.toml')} does not describe a package",
            why=f"it must be valid and name a [project]: {error}",
            hint="opkiln new my_ops --op my_add    # writes a new package",
        ) from None
    package = packages.pop() if len(packages) == 1 else package_of(name)
    for folder in (os.path.join("src", package), package):
        if os.path.isfile(os.path.join(where, folder, "__init__.py")):
            return _Project(where, package, folder, found, text)
    raise UsageError(
        f"the package {package} is not found in {where}",
        why=f"there is neither src/{package}/__init__.py nor {package}/__init__.py",
    )


def _add_entry_point(project: _Project, op: str) -> str:
    """pyproject.toml with the op's entry point and, if there are cache keys, its variables."""
    value = _entry_point(project.package, op)
    entries = project.settings["project"].get("entry-points", {}).get(GROUP, {})
    if op in entries:
        raise _taken_error(op, f"pyproject.toml has an entry point {op} = {entries[op]!r}")
    lines = _insert_entry(project.text.splitlines(), f'{op} = "{value}"', fresh=not entries)
    variables = (f"OPKILN_BUILD_{op.upper()}", f"DS_BUILD_{op.upper()}")
    keys = project.settings.get("tool", {}).get("uv", {}).get("cache-keys")
    if keys is not None:
        lines = _insert_keys(lines, [f'    {{ env = "{each}" }},' for each in variables])
    end = "\r\n" if "\r\n" in project.text else "\n"
    text = end.join(lines) + end
    wanted = copy.deepcopy(project.settings)
    wanted["project"].setdefault("entry-points", {}).setdefault(GROUP, {})[op] = value
    if keys is not None:
        wanted["tool"]["uv"]["cache-keys"] += [{"env": each} for each in variables]
    try:
        understood = tomllib.loads(text) == wanted
    except tomllib.TOMLDecodeError:
        understood = False
    if not understood:
        # It has a form that this code does not edit, such as an inline table.
        raise UsageError(
            f"the op cannot be added to {os.path.join(project.where, 'pyproject.toml')}",
            why=f'it has no table [project.entry-points."{GROUP}"] with one op per line',
            hint=f'add the entry point by hand: {op} = "{value}"',
        )
    return text


def _insert_entry(lines: list[str], entry: str, *, fresh: bool) -> list[str]:
    header = next((n for n, line in enumerate(lines) if _HEADER.match(line)), None)
    if header is None:
        table = ["", f'[project.entry-points."{GROUP}"]', entry]
        return [*lines, *table] if fresh else lines
    end = next((n for n in range(header + 1, len(lines)) if _TABLE.match(lines[n])), len(lines))
    while not lines[end - 1].strip():
        end -= 1
    return [*lines[:end], entry, *lines[end:]]


def _insert_keys(lines: list[str], keys: list[str]) -> list[str]:
    """Insert keys at the end of the list of cache keys, if that is found."""
    start = next((n for n, line in enumerate(lines) if _KEYS.match(line)), len(lines))
    end = next((n for n in range(start, len(lines)) if lines[n].strip() == "]"), None)
    if end is None:
        return lines
    before = lines[end - 1]
    if before.strip() and not before.rstrip().endswith((",", "[")) and "#" not in before:
        lines = [*lines[: end - 1], f"{before.rstrip()},", *lines[end:]]
    return [*lines[:end], *keys, *lines[end:]]


def _add_import(text: str, package: str, op: str, path: str) -> str:
    """A package's ``__init__.py`` with an import of the op's function after its other imports."""
    try:
        tree, names = ast.parse(text), symtable.symtable(text, path, "exec").get_symbols()
    except SyntaxError as error:
        raise UsageError(
            f"{path} does not parse", why=f"line {error.lineno}: {error.msg}"
        ) from None
    if op in {each.get_name() for each in names if each.is_assigned() or each.is_imported()}:
        raise _taken_error(op, f"{path} has a name {op} already")
    imports = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    docstring = tree.body[:1] if ast.get_docstring(tree) is not None else []
    lines = text.splitlines()
    place = max((each.end_lineno or 0 for each in imports or docstring), default=0)
    new = [f"from {package}.ops.{op} import {op} as {op}"]
    if not imports:
        new = ["", *new] if docstring else [*new, ""] if lines else new
    end = "\r\n" if "\r\n" in text else "\n"
    return end.join([*lines[:place], *new, *lines[place:]]) + end


def _write(where: str, new: dict[str, str], changed: dict[str, str]) -> None:
    """Write new files, then replace the changed ones; after an error everything is as before."""
    try:
        with ExitStack() as undo:
            for path in new:
                undo.callback(_remove, _first_missing(os.path.join(where, path)))
            write_all(where, new)
            for path, text in changed.items():
                place = os.path.join(where, path)
                undo.callback(replace, place, _read(place).encode())
                replace(place, text.encode())
            undo.pop_all()
    except OSError as error:
        raise StoreError(f"{where} cannot be written: {error.strerror}") from error


def _first_missing(place: str) -> str:
    """The outermost part of a path that does not exist yet: undoing removes it."""
    while not os.path.lexists(above := os.path.dirname(place)):
        place = above
    return place


def _remove(place: str) -> None:
    if os.path.isdir(place):
        shutil.rmtree(place)
    elif os.path.exists(place):
        os.unlink(place)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read", why=str(error)) from None


def _taken_error(op: str, why: str) -> UsageError:
    return UsageError(
        f"op {op} cannot be added", why=why, hint=f"opkiln new --op {op}2    # another name"
    )
