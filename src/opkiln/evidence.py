"""What a decision read: facts that a later process can check without making the decision again.

Code that reads something to decide says so here, at the place where it reads it. While nobody
collects, that costs a look at one variable. ``decision.receipt`` writes the facts down.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from contextvars import ContextVar

from opkiln.digest import Signature
from opkiln.settings import executable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Evidence:
    """The facts of one decision. JSON can hold every one of them."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, ...]] = {}  # path: signature
        # name: the paths that PATH leads to, in order; None at the end says that these are all
        self.programs: dict[str, list[str | None]] = {}
        self.absent: dict[str, None] = {}
        self.complete = True  # False: the decision also rests on something else
        self.start_entry()

    def start_entry(self) -> None:
        """An entry is about to be compared with the files as they are: forget those of others."""
        self.entry: list[tuple[str, str, str, Signature]] = []  # as ``entry`` has them


_collected: ContextVar[Evidence | None] = ContextVar("opkiln_evidence", default=None)


@contextmanager
def collecting() -> Iterator[Evidence]:
    """Collect what is read in this block."""
    found = Evidence()
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def file(path: str, signature: Iterable[int] | None = None) -> None:
    """A file, or a directory's list of names, was read. ``signature`` is from before the read."""
    found = _collected.get()
    if found is None:
        return
    try:
        signed = tuple(Signature.of(path) if signature is None else signature)
    except OSError:
        found.complete = False  # it is gone already
        return
    if found.files.setdefault(path, signed)[:-1] != signed[:-1]:
        found.complete = False  # it changed between two looks


def absent(path: str) -> None:
    """There is nothing at this path, or nothing that can be used."""
    found = _collected.get()
    if found is not None:
        found.absent[path] = None


def exists(path: str) -> bool:
    """Whether there is a file or directory: which one, and that it stays so, is a fact."""
    return _noted(path, os.path.exists(path))


def runs(path: str) -> bool:
    """As ``exists``, of a program."""
    return _noted(path, executable(path))


def _noted(path: str, found: bool) -> bool:
    if found:
        file(path)
    else:
        absent(path)
    return found


def listed(directory: str) -> list[str]:
    """The names in a directory, none if it cannot be listed. That these are all is a fact."""
    try:
        signature = Signature.of(directory)
        names = os.listdir(directory)
    except OSError:
        absent(directory)
        return []
    file(directory, signature)
    return names


def start_entry() -> None:
    """``Evidence.start_entry``."""
    found = _collected.get()
    if found is not None:
        found.start_entry()


def entry(kind: str, path: str, value: str, signature: Signature) -> None:
    """A fact of an entry holds (``store.facts``). ``signature`` is from before the look."""
    found = _collected.get()
    if found is not None:
        found.entry.append((kind, path, value, signature))


def program(name: str, path: str | None) -> None:
    """A name was looked up on PATH."""
    found = _collected.get()
    if found is not None:
        found.programs.setdefault(name, [path])


def programs(name: str, paths: list[str]) -> None:
    """All programs of a name on PATH were looked at."""
    found = _collected.get()
    if found is not None:
        found.programs[name] = [*paths, None]


def incomplete() -> None:
    """The decision rests on something that cannot be checked later."""
    found = _collected.get()
    if found is not None:
        found.complete = False
