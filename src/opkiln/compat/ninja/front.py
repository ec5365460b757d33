"""Starts the real ninja, with the library that asks the store preloaded."""

from __future__ import annotations

import os
import sys

from opkiln import settings
from opkiln.base.digest import key, sha256_file
from opkiln.base.model import PACKAGE
from opkiln.errors import OpkilnError, UsageError
from opkiln.machine import uname
from opkiln.store.layers import Store

_HERE = os.path.join(PACKAGE, "compat", "ninja")
SHIM = os.path.join(_HERE, "bin")
_OBSERVER = os.path.join(PACKAGE, "building", "observing", "observer.c")
_PARTS = (
    ("hook", os.path.join(_HERE, "hook.c"), False),
    ("step", os.path.join(_HERE, "step.c"), True),
    ("observer", _OBSERVER, False),
)


def start(arguments: list[str]) -> int:
    """Become ninja with these arguments. Raises UsageError if there is none."""
    try:
        real = next(filter(_is_real, settings.on_path("ninja")), None)
        if real is None:
            raise UsageError("there is no ninja on PATH", hint="pip install ninja")
        given = settings.whole_environment()
        if reason := _find_reason(real):
            if settings.settings.progress not in ("quiet", "off"):
                sys.stderr.write(f"opkiln: {real} runs without the store: {reason}\n")
                sys.stderr.flush()
        else:
            hook = os.path.join(ready_directory(), "hook")
            given |= {"_OPKILN_NINJA_PRELOAD": given.get("LD_PRELOAD", ""), "LD_PRELOAD": hook}
            given |= environment()
        os.execve(real, ["ninja", *arguments], given)  # noqa: S606 (argv as given, no shell)
    except OpkilnError as error:
        sys.stderr.write(f"opkiln: {error}\n")
        return error.exit_code


def _find_reason(real: str) -> str:
    """Why this ninja cannot be served; empty if it can."""
    ready = ready_directory()
    try:
        if os.stat(f"{ready}/known{real}").st_mtime > os.stat(real).st_mtime:
            return ""
    except OSError:
        pass  # it was not asked yet
    from opkiln.compat.ninja import prepare

    return prepare.prepare(real, ready, _PARTS)


def _is_real(path: str) -> bool:
    return not path.endswith("/opkiln/compat/ninja/bin/ninja")


def environment() -> dict[str, str]:
    """What the shim and the preloaded library want to know."""
    return {
        "_OPKILN_NINJA": ready_directory(),
        "_OPKILN_NINJA_PYTHON": sys.executable,
        "_OPKILN_NINJA_MAIN": os.path.join(_HERE, "program.py"),
    }


def ready_directory() -> str:
    """Where the store keeps the library and the programs; empty if it cannot be written."""
    memory = Store().memory
    parts = tuple(sha256_file(source) for _, source, _ in _PARTS)
    name = key("ninja", (uname.architecture(), os.confstr("CS_GNU_LIBC_VERSION"), parts))
    return os.path.join(memory[0], f"ninja-{name}") if memory else ""
