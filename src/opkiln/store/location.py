"""Where the store is: the writable root, the layers below it, and what was refused.

    OPKILN_CACHE_DIR            asked for
      not ours, or others may write there  -> <dir>/opkiln-<uid>, private
    $XDG_CACHE_HOME or ~/.cache  the default
    <tmp>/opkiln-<uid>           no home, a read-only or noexec home, no passwd entry

The first that can be used is the writable root. A root that is only readable still serves hits.
"""

from __future__ import annotations

import os

from opkiln import trust
from opkiln.errors import StoreError
from opkiln.record import Record
from opkiln.settings import LAYOUT, settings, store_candidates
from opkiln.trust import fault


class Layer(Record):
    """A directory of entries, or a bundle of them: one file (``store.archive``).

    ``listed``: the user named it, which is what makes it trusted. ``unseen``: it was not there when
    it was looked at, so whoever made it since is still to be looked at.
    """

    root: str
    listed: bool = False
    bundle: bool = False
    unseen: bool = False


class Location(Record):
    """Where to read, in order; where to write (None: nowhere); what to tell the user."""

    layers: tuple[Layer, ...]
    writable: str | None
    notes: tuple[str, ...]


def choose() -> Location:
    """Look at the candidates as they are now. Makes nothing, and reads no directory."""
    layers: list[Layer] = []
    notes: list[str] = []
    writable: str | None = None
    for candidate, asked in store_candidates():
        usable, readable, reason = _examine(candidate)
        inner = os.path.join(candidate, LAYOUT)
        known = (usable or readable) and os.path.lexists(inner)
        if known and (foreign := fault(inner, os.lstat(inner))):
            usable, readable, reason = False, False, foreign
        if readable or usable:
            # Also one that is still to be made: another process may make and fill it meanwhile.
            layers.append(Layer(inner, unseen=not known))
        if usable:
            writable = os.path.join(candidate, LAYOUT)
            if notes:
                notes.append(f"the store is {candidate}")
            break
        if asked or notes:
            notes.append(f"{candidate} cannot be the store: {reason}")
    listed = map(_listed, settings.store_layers)
    return Location((*layers, *listed), writable, tuple(notes))


def _listed(path: str) -> Layer:
    if os.path.isfile(path):
        return Layer(os.path.abspath(path), listed=True, bundle=True)
    return Layer(os.path.join(path, LAYOUT), listed=True)


def claim(root: str | None) -> None:
    """Make the writable root and make sure that it is ours before the first write.

    Somebody may have made it since it was found missing. Raises StoreError.
    """
    if root is None:
        return
    try:
        reason = trust.claim(root)
    except OSError:
        return  # it cannot be written at all, which the publish will say
    if reason:
        raise StoreError(f"the store cannot be written: {reason}", hint="set OPKILN_CACHE_DIR")


def _examine(path: str) -> tuple[bool, bool, str]:
    """(usable for writing, usable for reading, why not)."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return _creatable(path)
    except OSError as error:
        return False, False, error.strerror or str(error)
    if not os.path.isdir(path):
        return False, False, "not a directory"
    reason = fault(path, found)
    if reason:
        return False, False, reason
    if _noexec(path):
        return False, False, _NOEXEC
    if not os.access(path, os.W_OK | os.X_OK):
        return False, True, "read-only"
    return True, True, ""


def _creatable(path: str) -> tuple[bool, bool, str]:
    """Whether a directory that is not there could be made: its nearest ancestor decides."""
    parent = os.path.dirname(path)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        return False, False, f"{parent} is not a directory"
    if _noexec(parent):
        return False, False, _NOEXEC
    if not os.access(parent, os.W_OK | os.X_OK):
        return False, False, f"{parent} is read-only"
    return True, False, ""


_NOEXEC = "its file system is mounted noexec, so that no library can be loaded from there"


def _noexec(path: str) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except OSError:
        return False  # it will be known when something is read there
