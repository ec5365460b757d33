"""Makes what is preloaded into ninja, and asks a ninja's file whether that can serve it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil

from opkiln.base.trust import make_private
from opkiln.building.observing import observer
from opkiln.errors import BuildTimeout, LoadError, OpkilnError, ToolchainError
from opkiln.machine import uname
from opkiln.machine.binary import elf
from opkiln.machine.toolchain.find import has_interpreter
from opkiln.store.layers import Store, claim

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_CALLS = {"posix_spawn", "posix_spawn_file_actions_adddup2", "waitpid"}


def prepare(real: str, ready: str, parts: Sequence[tuple[str, str, bool]]) -> str:
    """Have the ``parts`` (name, source, whether it is a program) in the directory ``ready``.
    Returns why this ninja cannot be served; empty if it can."""
    if uname.system() != "linux" or not ready:
        return "no store can be written"
    if re.search(r"[\s:]", ready):
        return f"LD_PRELOAD cannot name {ready}"
    if reason := _find_fault(real):
        return reason
    try:
        claim(Store().root)
        if not os.path.exists(ready):
            _make(ready, parts)
        # The shim looks at this: the ninja of this path can be served.
        known = f"{ready}/known{real}"
        make_private(os.path.dirname(known))
        with open(known, "wb"):
            pass
        os.utime(known)
    except (OSError, OpkilnError) as error:
        return str(error).partition("\n")[0]
    return ""


def _make(ready: str, parts: Sequence[tuple[str, str, bool]]) -> None:
    part = f"{ready}.{os.getpid()}-{os.urandom(6).hex()}"
    make_private(part)
    try:
        for name, source, program in parts:
            path = os.path.join(part, name)
            observer.make(Store().memory, source, path, None, program=program)
            os.chmod(path, 0o700)
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(part, ready)
    except (BuildTimeout, ToolchainError):
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(part, ignore_errors=True)


def _find_fault(real: str) -> str:
    """Why the calls of a ninja cannot be replaced; empty if they can, or a script starts it."""
    if has_interpreter(real):
        return ""
    try:
        found = elf.read(real)
    except (OSError, LoadError):
        return "it cannot be read"
    if not found.needed:
        return "it is linked statically"
    if not any(each.startswith("libc.so.") for each in found.needed):
        return f"it is linked to {', '.join(found.needed)}, not to this machine's C library"
    if not {symbol for _, symbol, _ in found.symbols} >= _CALLS:
        return "it starts commands in a way that is not known"
    return ""
