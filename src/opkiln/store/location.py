"""Where the store is: the writable root, the layers below it, and the places that were refused.

    OPKILN_CACHE_DIR             if it is set
      <dir>/opkiln-<uid>         instead, if the directory belongs to or is writable by others
    $XDG_CACHE_HOME or ~/.cache  the default
    <tmp>/opkiln-<uid>           no home, a read-only or noexec home, no passwd entry

The first usable place is the writable root. A read-only root still serves hits.
"""

from __future__ import annotations

import os
from contextlib import suppress

from opkiln import trust
from opkiln.errors import StoreError
from opkiln.record import Record
from opkiln.settings import LAYOUT, settings, store_candidates
from opkiln.trust import fault


class Layer(Record):
    """A directory of entries, or a bundle of them: one file (``store.archive``).

    ``listed`` means that the user named it in ``OPKILN_STORE_LAYERS``, which makes it trusted.
    ``unseen`` means that it did not exist when it was checked. If it exists later, its owner has to
    be checked then.
    """

    root: str
    listed: bool = False
    bundle: bool = False
    unseen: bool = False


class Location(Record):
    """Where to read, in order; where to write (or None); notes for the user."""

    layers: tuple[Layer, ...]
    writable: str | None
    notes: tuple[str, ...]


def choose() -> Location:
    """Check the candidates as they are now. Creates nothing, and lists no directory."""
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
            # Includes a layer that does not exist yet: another process may create and fill it.
            layers.append(Layer(inner, unseen=not known))
        if usable:
            writable = inner
            if notes:
                notes.append(f"the store is {candidate}")
            break
        if asked or notes:
            notes.append(f"{candidate} cannot be the store: {reason}")
    for path in settings.store_layers:
        bundle = os.path.isfile(path)
        root = os.path.abspath(path) if bundle else os.path.join(path, LAYOUT)
        layers.append(Layer(root, listed=True, bundle=bundle))
    return Location(tuple(layers), writable, tuple(notes))


def claim(root: str | None) -> None:
    """Create the writable root, and make sure that it is ours before the first write.

    Another user may have created it since it was found missing. Raises StoreError.
    """
    if root is None:
        return
    try:
        reason = trust.claim(root)
    except OSError:
        return  # it is not writable; publishing will report that
    if reason:
        raise StoreError(f"the store cannot be written: {reason}", hint="set OPKILN_CACHE_DIR")


def _examine(path: str) -> tuple[bool, bool, str]:
    """(usable for writing, usable for reading, why not)."""
    where, subject, reason = path, "", ""
    try:
        reason = fault(path, os.lstat(path))
    except FileNotFoundError:
        # Whether it could be created depends on its nearest ancestor.
        while not os.path.lexists(where):
            where = os.path.dirname(where)
        subject = f"{where} is "
    except OSError as error:
        return False, False, error.strerror or str(error)
    if not os.path.isdir(where):
        return False, False, f"{subject}not a directory"
    if reason:
        return False, False, reason
    with suppress(OSError):  # the next access will report the problem
        if os.statvfs(where).f_flag & os.ST_NOEXEC:
            reason = "its file system is mounted noexec, so no library can be loaded from it"
            return False, False, reason
    if not os.access(where, os.W_OK | os.X_OK):
        return False, where == path, f"{subject}read-only"
    return True, where == path, ""
