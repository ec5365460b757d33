"""What a decision read, and what of it does not hold any more."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from opkiln.base.digest import Signature
from opkiln.machine import facts
from opkiln.machine.toolchain import find

if TYPE_CHECKING:
    from opkiln.base.build_model import DeviceCompiler, Toolchain
    from opkiln.machine.facts import Evidence
    from opkiln.machine.toolchain.find import Family


def recalled(
    kind: Family, memory: tuple[str, ...], wanted: str | None, host: Toolchain
) -> tuple[DeviceCompiler | None, Evidence]:
    """The remembered choice of a device compiler, and what it rests on."""
    with facts.collect() as read:
        return find.recall(kind, memory, wanted, host), read


def broken(read: Evidence) -> set[str]:
    """The paths that are not as they were."""
    gone = {path for path in read.files if not os.path.exists(path)}
    changed = {
        path
        for path, signature in read.files.items()
        if path not in gone and not Signature(*signature).holds(path)
    }
    return gone | changed | {path for path in read.absent if os.path.lexists(path)}
