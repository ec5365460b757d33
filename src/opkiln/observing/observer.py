"""The observer: a small library that is preloaded into compilers and linkers.

It is compiled once per host and kept in the store. If it cannot be compiled or kept, steps run
without it, and what they read is inferred from dependency files and flags.
"""

from __future__ import annotations

import os

from opkiln import machine
from opkiln.digest import key, read_file, sha256_file
from opkiln.errors import BuildTimeout, ToolchainError
from opkiln.model import PACKAGE
from opkiln.process import run
from opkiln.toolchain import probing
from opkiln.trust import make_private
from opkiln.writing import write_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.build_model import Toolchain

_SOURCE = os.path.join(PACKAGE, "observing", "observer.c")
_LOG = "OPKILN_OBSERVER_LOG"
_PARENT = "OPKILN_OBSERVER_PARENT"
_COMPILE_SECONDS = 60


def library(memory: tuple[str, ...], toolchain: Toolchain) -> str:
    """The path of the observer; empty if there cannot be one.

    ``memory`` is where the store keeps what it knows of compilers; the first can be written to.
    """
    # A cross compiler runs here, but what it makes does not.
    if not memory or toolchain.cross or machine.system() != "linux":
        return ""
    try:
        here = (machine.architecture(), os.confstr("CS_GNU_LIBC_VERSION"), sha256_file(_SOURCE))
    except (OSError, ValueError):
        return ""
    name = f"observer-{key('observer', here)}"
    # LD_PRELOAD is a list, separated by blanks and colons.
    usable = [place for place in memory if not any(mark in place for mark in " :\t\n")]
    for directory in usable:
        path = os.path.join(directory, name)
        if os.path.exists(path):
            return path
    return _compiled(toolchain.cxx, os.path.join(memory[0], name)) if memory[0] in usable else ""


def _compiled(cxx: str, path: str) -> str:
    try:
        make_private(os.path.dirname(path))
        with probing.scratch() as place:  # the store may be on a network file system
            output = os.path.join(place, "observer")
            flags = ("-x", "c", "-O1", "-shared", "-fPIC", "-o", output, _SOURCE, "-ldl")
            done = run((cxx, *flags), timeout=_COMPILE_SECONDS, tmpdir=place)
            if done.returncode == 0:
                write_private(path, read_file(output))
                return path
    except (OSError, ToolchainError, BuildTimeout):
        pass  # no space, no compiler any more, a machine that hangs: the build itself reports it
    return ""


def environment(observer: str, log: str) -> dict[str, str]:
    """What makes a step write this log, and end with this process."""
    parent = str(os.getpid())
    return {"LD_PRELOAD": observer, _LOG: log, _PARENT: parent} if observer else {}
