"""``opkiln new --op NAME`` in a package: adds an op, and the lines that declare it.

It adds files and inserts lines; it changes and removes nothing. Every edit is checked before
anything is written: the edited ``pyproject.toml`` must differ from the old one by the new op only,
and the edited ``__init__.py`` must parse.
"""

from __future__ import annotations

import ast
import copy
import os
import re
import shutil
import tomllib
from typing import Any, NamedTuple

from opkiln.errors import StoreError, UsageError
from opkiln.registry import GROUP
from opkiln.ship import scaffold
from opkiln.writing import replace

_HEADER = re.compile(rf"""\s*\[\s*project\s*\.\s*entry-points\s*\.\s*["']{GROUP}["']\s*\]""")
_TABLE = re.compile(r"\s*\[")
_KEYS = re.compile(r"cache-keys\s*=\s*\[")


class Added(NamedTuple):
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
    place = os.path.abspath(start)
    while not os.path.isfile(os.path.join(place, "pyproject.toml")):
        above = os.path.dirname(place)
        if above == place:
            raise UsageError(
                f"no package was found in {os.path.abspath(start)}",
                why="neither it nor a directory above it has a pyproject.toml",
                hint="opkiln new my_ops --op my_add    # writes a new package",
            )
        place = above
    return place


def add(where: str, name: str) -> Added:
    """Add the op ``name`` to the project in ``where``.

    After an error nothing is changed. Raises UsageError for a name that is invalid or taken, and
    for a project that cannot be edited; StoreError if it cannot be written.
    """
    op = scaffold.op_of(name)
    project = _project(where)
    folder = os.path.join(project.folder, "ops", op)
    test = os.path.join("tests", f"test_{op}.py")
    init = os.path.join(project.folder, "__init__.py")
    for path in (folder, test):
        if os.path.lexists(os.path.join(where, path)):
            raise _taken(op, f"{path} exists already")
    inside, test_text = scaffold.op_texts(project.package, op)
    new = {os.path.join(folder, path): text for path, text in inside.items()}
    new[test] = test_text
    ops_init = os.path.join(project.folder, "ops", "__init__.py")
    if not os.path.lexists(os.path.join(where, ops_init)):
        new[ops_init] = scaffold.ops_init()
    changed = {
        "pyproject.toml": _announced(project, op),
        init: _exported(_read(os.path.join(where, init)), project.package, op, init),
    }
    _write(where, new, changed)
    return Added(tuple(sorted(new)), tuple(sorted(changed)))


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
    package = packages.pop() if len(packages) == 1 else scaffold.package_of(name)
    for folder in (os.path.join("src", package), package):
        if os.path.isfile(os.path.join(where, folder, "__init__.py")):
            return _Project(where, package, folder, found, text)
    raise UsageError(
        f"the package {package} is not found in {where}",
        why=f"there is neither src/{package}/__init__.py nor {package}/__init__.py",
    )


def _announced(project: _Project, op: str) -> str:
    """pyproject.toml with the op's entry point and, if there are cache keys, its variables."""
    value = scaffold.entry_point(project.package, op)
    entries = project.settings["project"].get("entry-points", {}).get(GROUP, {})
    if op in entries:
        raise _taken(op, f"pyproject.toml has an entry point {op} = {entries[op]!r}")
    lines = _with_entry(project.text.splitlines(), f'{op} = "{value}"', fresh=not entries)
    variables = (f"OPKILN_BUILD_{op.upper()}", f"DS_BUILD_{op.upper()}")
    keys = project.settings.get("tool", {}).get("uv", {}).get("cache-keys")
    if keys is not None:
        lines = _with_keys(lines, [f'    {{ env = "{each}" }},' for each in variables])
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


def _with_entry(lines: list[str], entry: str, *, fresh: bool) -> list[str]:
    header = next((n for n, line in enumerate(lines) if _HEADER.match(line)), None)
    if header is None:
        table = ["", f'[project.entry-points."{GROUP}"]', entry]
        return [*lines, *table] if fresh else lines
    last = header
    for number in range(header + 1, len(lines)):
        if _TABLE.match(lines[number]):
            break
        if lines[number].strip():
            last = number
    return [*lines[: last + 1], entry, *lines[last + 1 :]]


def _with_keys(lines: list[str], keys: list[str]) -> list[str]:
    """Insert keys at the end of the list of cache keys, if that is found."""
    start = next((n for n, line in enumerate(lines) if _KEYS.match(line)), None)
    if start is None:
        return lines
    end = next((n for n in range(start, len(lines)) if lines[n].strip() == "]"), None)
    if end is None:
        return lines
    before = lines[end - 1]
    if before.strip() and not before.rstrip().endswith((",", "[")) and "#" not in before:
        lines = [*lines[: end - 1], f"{before.rstrip()},", *lines[end:]]
    return [*lines[:end], *keys, *lines[end:]]


def _exported(text: str, package: str, op: str, path: str) -> str:
    """A package's ``__init__.py`` with an import of the op's function after its other imports."""
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise UsageError(
            f"{path} does not parse", why=f"line {error.lineno}: {error.msg}"
        ) from None
    if op in _bound(body):
        raise _taken(op, f"{path} has a name {op} already")
    imports = [each for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
    docstring = body[:1] if body and ast.get_docstring(ast.parse(text)) is not None else []
    after = imports[-1] if imports else docstring[0] if docstring else None
    lines = text.splitlines()
    place = after.end_lineno or 0 if after else 0
    new = [f"from {package}.ops.{op} import {op} as {op}"]
    if not imports:
        new = ["", *new] if docstring else [*new, ""] if lines else new
    end = "\r\n" if "\r\n" in text else "\n"
    return end.join([*lines[:place], *new, *lines[place:]]) + end


def _bound(body: list[ast.stmt]) -> set[str]:
    """The names that a module's statements define."""
    names: set[str] = set()
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.alias):
                names.add((node.asname or node.name).partition(".")[0])
    return names


def _write(where: str, new: dict[str, str], changed: dict[str, str]) -> None:
    """Write new files, then replace the changed ones; after an error everything is as before."""
    before = {path: _read(os.path.join(where, path)) for path in changed}
    made = {_first_missing(where, path) for path in new}
    exchanged: list[str] = []
    try:
        scaffold.write_all(where, new)
        for path, text in changed.items():
            exchanged.append(path)
            replace(os.path.join(where, path), text.encode())
    except BaseException as error:
        for path in exchanged:
            replace(os.path.join(where, path), before[path].encode())
        for place in made:
            if os.path.isdir(place):
                shutil.rmtree(place)
            elif os.path.exists(place):
                os.unlink(place)
        if isinstance(error, OSError):
            raise StoreError(f"{where} cannot be written: {error.strerror}") from error
        raise


def _first_missing(where: str, path: str) -> str:
    """The outermost part of a path that does not exist yet: undoing removes it."""
    place = os.path.join(where, path)
    while not os.path.lexists(above := os.path.dirname(place)):
        place = above
    return place


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read", why=str(error)) from None


def _taken(op: str, why: str) -> UsageError:
    return UsageError(
        f"op {op} cannot be added", why=why, hint=f"opkiln new --op {op}2    # another name"
    )
