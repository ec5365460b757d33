"""The installed packages, found without importlib.metadata where none of them matters: importing
that takes longer than everything else in a command's start."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import EntryPoint

_METADATA = (".dist-info", ".egg-info")


def entry_points(group: str) -> list[EntryPoint]:
    """The entry points of a group, in the order of ``sys.path``."""
    if not _may_declare(group):
        return []
    from importlib.metadata import entry_points

    return list(entry_points(group=group))


def _may_declare(group: str) -> bool:
    """Whether an installed package may have entry points of a group."""
    mark = group.encode()
    for path in _metadata():
        try:
            with open(os.path.join(path, "entry_points.txt"), "rb") as file:
                if mark in file.read():
                    return True
        except FileNotFoundError:
            continue  # it declares nothing
        except NotADirectoryError:
            if not path.endswith(_METADATA):
                return True
    return False


def may_be_installed(name: str) -> bool:
    """Whether a package may be installed. ``name`` has lower case letters and hyphens."""
    for path in _metadata():
        found = os.path.basename(path).lower().replace("_", "-").replace(".", "-")
        if found.startswith(f"{name}-") or not path.endswith(_METADATA):
            return True
    return False


def _metadata() -> Iterator[str]:
    """What the installed packages say of themselves; and each path that is not a directory, such as
    a zip file, which may contain anything."""
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except NotADirectoryError:
            yield place
        except OSError:
            continue
        else:
            yield from (os.path.join(place, name) for name in names if name.endswith(_METADATA))
