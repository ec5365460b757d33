"""What a decision read: facts that a later process can check without making the decision again.

Code that reads something to decide says so here, at the place where it reads it. While nobody
collects, that costs a look at one variable. ``decision.receipt`` writes the facts down.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from opkiln.digest import Signature

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Evidence:
    """The facts of one decision. JSON can hold every one of them."""

    def __init__(self) -> None:
        self.files: dict[str, list[Any]] = {}  # path: signature, then a digest or ""
        # name: the paths that PATH leads to, in order; None at the end says that these are all
        self.programs: dict[str, list[str | None]] = {}
        self.absent: dict[str, None] = {}
        self.complete = True  # False: the decision also rests on something else
        self.start_entry()

    def start_entry(self) -> None:
        """An entry is about to be compared with the files as they are: forget those of others."""
        self.entry_files: dict[str, list[Any]] = {}
        self.directories: dict[str, list[int]] = {}  # of the include path: signature
        self.watches: list[list[Any]] = []  # directory, the included names that exist below it
        self.entry_programs: dict[str, list[str | None]] = {}


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
    if found is not None:
        found.files[path] = [*_signature(found, path, signature), ""]


def entry_file(path: str, signature: Iterable[int] | None = None, sha256: str = "") -> None:
    """As ``file``, for an entry. With ``sha256``, a file whose signature has changed is compared by
    its contents."""
    found = _collected.get()
    if found is not None:
        found.entry_files[path] = [*_signature(found, path, signature), sha256]


def start_entry() -> None:
    """``Evidence.start_entry``."""
    found = _collected.get()
    if found is not None:
        found.start_entry()


def directory(path: str, signature: Iterable[int] | None = None) -> None:
    """Names that an entry's sources include were looked for in a directory."""
    found = _collected.get()
    if found is not None:
        found.directories[path] = [*_signature(found, path, signature)]


def watch(path: str, present: Iterable[str]) -> None:
    """Of the names that an entry's sources include, only these exist below a directory."""
    found = _collected.get()
    if found is not None:
        found.watches.append([path, list(present)])


def program(name: str, path: str | None) -> None:
    """A name was looked up on PATH."""
    found = _collected.get()
    if found is not None:
        found.programs.setdefault(name, [path])


def entry_program(name: str, paths: Iterable[str]) -> None:
    """A compiler of an entry looked up a name on PATH, which leads to these programs."""
    found = _collected.get()
    if found is not None:
        found.entry_programs[name] = [*paths]


def programs(name: str, paths: list[str]) -> None:
    """All programs of a name on PATH were looked at."""
    found = _collected.get()
    if found is not None:
        found.programs[name] = [*paths, None]


def add(unchanged: Iterable[list[Any]], absent: Iterable[str]) -> None:
    """Signed paths, and paths that do not exist."""
    found = _collected.get()
    if found is not None:
        for path, *signature in unchanged:
            found.files.setdefault(path, [*signature, ""])
        found.absent.update(dict.fromkeys(absent))


def incomplete() -> None:
    """The decision rests on something that cannot be checked later."""
    found = _collected.get()
    if found is not None:
        found.complete = False


def _signature(found: Evidence, path: str, given: Iterable[int] | None) -> Iterable[int]:
    if given is not None:
        return given
    try:
        return Signature.of(path)
    except OSError:
        found.complete = False  # it is gone already
        return ()
