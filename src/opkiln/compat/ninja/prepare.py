"""Makes what is preloaded into ninja, and asks a ninja's file whether that can serve it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from functools import partial

from opkiln.base.trust import make_private
from opkiln.building.observing import observer
from opkiln.errors import BuildTimeout, OpkilnError, ToolchainError
from opkiln.machine import uname
from opkiln.machine.binary import elf
from opkiln.machine.toolchain import probing
from opkiln.store.layers import Store, claim

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def prepare(real: str, ready: str, parts: Sequence[tuple[str, str, bool]]) -> str:
    """Have the ``parts`` (name, source, whether it is a program) in the directory ``ready``.
    Returns why this ninja cannot be served; empty if it can."""
    if uname.system() != "linux" or not ready:
        return "no store can be written"
    if re.search(r"[\s:]", ready):
        return f"LD_PRELOAD cannot name {ready}"
    if reason := elf.find_ninja_fault(real):
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
    memory = Store().memory
    try:
        for wait in [
            probing.begin_in_thread(
                partial(observer.make, memory, source, f"{part}/{name}", None, program=program)
            )
            for name, source, program in parts
        ]:
            wait()
        for name, _, _ in parts:
            os.chmod(f"{part}/{name}", 0o700)
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(part, ready)
    except (BuildTimeout, ToolchainError):
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(part, ignore_errors=True)
