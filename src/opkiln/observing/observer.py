"""The observer: a small library that is preloaded into compilers and linkers.

It is compiled once per host and kept in the store, under a name that has its digest. Each build
uses a copy in its own directory, which nobody else removes. If there cannot be one, steps run
without it, and what they make serves the process that made it alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil

from opkiln import machine
from opkiln.digest import key, read_file, sha256_file
from opkiln.errors import BuildTimeout, ToolchainError
from opkiln.model import PACKAGE
from opkiln.observing.log import start
from opkiln.process import run
from opkiln.toolchain import host, probing
from opkiln.trust import make_private
from opkiln.writing import write_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.build_model import Toolchain

_SOURCE = os.path.join(PACKAGE, "observing", "observer.c")
_LOG = "OPKILN_OBSERVER_LOG"
_PARENT = "OPKILN_OBSERVER_PARENT"
_COMPILE_SECONDS = 60


def library(memory: tuple[str, ...], toolchain: Toolchain, stage: str) -> str:
    """The path of the observer for a build in the directory ``stage``; empty if there is none.

    ``memory`` is where the store keeps what it knows of compilers; the first can be written to.
    """
    if machine.system() != "linux":
        return ""
    path = os.path.join(stage, "observer")
    try:
        if not os.path.exists(path):
            _make(memory, toolchain, path + ".part")
            os.rename(path + ".part", path)
        # LD_PRELOAD is a list, separated by blanks and colons.
        return _held(path) if any(mark in path for mark in " :\t\n") else path
    except (OSError, ValueError, ToolchainError, BuildTimeout):
        return ""  # no space, no compiler any more, a machine that hangs: the build reports it


def _make(memory: tuple[str, ...], toolchain: Toolchain, path: str) -> None:
    """Put the observer there: a copy of the one that is kept, or a new one, which is kept."""
    here = (machine.architecture(), os.confstr("CS_GNU_LIBC_VERSION"), sha256_file(_SOURCE))
    name = f"{_PREFIX}{key('observer', here)}-"
    for kept in (each for directory in memory for each in _stored(directory, name)):
        with contextlib.suppress(FileNotFoundError):  # `opkiln cache gc` may run
            shutil.copyfile(kept, path)
            if is_intact(kept, path):
                return
    # A cross compiler runs here, but what it makes does not.
    cxx = host.choose(memory).cxx if toolchain.cross else toolchain.cxx
    flags = ("-x", "c", "-O2", "-s", "-shared", "-fPIC", "-o", path, _SOURCE, "-ldl")
    done = run((cxx, *flags), timeout=_COMPILE_SECONDS, tmpdir=os.path.dirname(path))
    if done.returncode != 0:
        raise ToolchainError(f"{cxx} cannot compile {_SOURCE}", why=done.output)
    with contextlib.suppress(OSError):  # the store is full or cannot be written
        for directory in memory[:1]:
            make_private(directory)
            write_private(os.path.join(directory, name + sha256_file(path)), read_file(path))


_descriptors: dict[str, int] = {}  # by digest: an open copy, for as long as this process runs


def _held(path: str) -> str:
    """A plain path by which children can open the observer."""
    data = read_file(path)
    name = sha256_file(path)
    if name not in _descriptors:
        _descriptors[name] = os.memfd_create("observer")
        os.write(_descriptors[name], data)
    return f"/proc/{os.getpid()}/fd/{_descriptors[name]}"


_PREFIX = "observer-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{40}-[0-9a-f]{64}")


def is_intact(kept: str, path: str = "") -> bool:
    """Whether a stored observer, or its copy at ``path``, is what its name says."""
    return sha256_file(path or kept) == kept.rpartition("-")[2]


def _stored(directory: str, name: str) -> Iterator[str]:
    """Those that are kept, and not what another process is just writing there."""
    try:
        found = [each for each in os.listdir(directory) if each.startswith(name)]
    except OSError:
        return  # nothing was kept there yet
    yield from (os.path.join(directory, each) for each in found if _NAME.fullmatch(each))


def damaged(directory: str) -> list[str]:
    """The observers in a memory of compilers that are not what their names say."""
    names = os.listdir(directory) if os.path.isdir(directory) else ()
    stored = (os.path.join(directory, name) for name in names if _NAME.fullmatch(name))
    return [path for path in stored if not is_intact(path)]


def note(memory: tuple[str, ...], cxx: str, unobserved: str) -> None:
    """Keep in mind why what a compiler does could not be observed; empty if it could."""
    if unobserved != noted(memory, cxx):
        probing.remember(memory, _subject(cxx), {"why": unobserved}, [cxx])


def noted(memory: tuple[str, ...], cxx: str) -> str:
    """Why what this compiler does could not be observed when it was last used; empty if it was."""
    known = probing.recall(memory, _subject(cxx))
    return "" if known is None else known["why"]


def _subject(cxx: str) -> str:
    return f"unobserved {cxx}"


def environment(observer: str, log: str) -> dict[str, str]:
    """What makes a step write this log, and end with this process. Raises OSError."""
    if not observer:
        return {}
    start(log)
    return {"LD_PRELOAD": observer, _LOG: log, _PARENT: str(os.getpid())}
