"""Reads a file of ops and targets, ``matrix.toml``."""

from __future__ import annotations

import shlex
import tomllib
from typing import Any, NamedTuple

from opkiln.errors import UsageError
from opkiln.ship.selection import NamedTarget, parse_all

_KEYS = ("ops", "targets")
_EXAMPLE = 'targets = ["cpu:x86-64-v3", "cuda:9.0a"]'


class Matrix(NamedTuple):
    """What a file asks for. ``ops`` is empty if it names none."""

    ops: tuple[str, ...]
    targets: tuple[NamedTarget, ...]


def read(file: str) -> Matrix:
    """Read a matrix. Raises UsageError, which names the file and what is wrong in it."""
    try:
        with open(file, "rb") as opened:
            given: dict[str, Any] = tomllib.load(opened)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{file} is not TOML",
            why=str(error),
            hint=f"echo {shlex.quote(_EXAMPLE)} > {shlex.quote(file)}",
        ) from error
    if unknown := sorted(set(given) - set(_KEYS)):
        raise UsageError(
            f"{file}: unknown key {', '.join(unknown)}", why=f"the keys are {', '.join(_KEYS)}"
        )
    for name, value in given.items():
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise UsageError(f"{file}: {name} is not a list of texts", why=f"such as {_EXAMPLE}")
    if not given.get("targets"):
        raise UsageError(f"{file} has no targets", why=f"such as {_EXAMPLE}")
    try:
        targets = parse_all(given["targets"])
    except UsageError as error:
        raise UsageError(f"{file}: {error.what}", why=error.why) from None
    return Matrix(tuple(dict.fromkeys(given.get("ops", ()))), tuple(targets))
