"""Facts: what a build read, looked up and listed, and whether all of that still holds.

A fact is a path, what was known of it (``observing.inputs``) and its value: of a file, the digest
of its contents. There are no classes of files: a header of the package, of torch and of the
compiler, a program and the libraries that it loaded each count by themselves, wherever they are.

With each fact goes the signature of the file as it was. Where the signature holds, so does the
fact. Elsewhere the value is asked for again. So a checkout with other times is still a hit, and an
edit under an old time is not.

A machine without a compiler, and one that a library was shipped to, cannot have all of these files.
There the *author's* count: those of the package, and those below directories that its declaration
names.
"""

from __future__ import annotations

import os
import stat
from itertools import islice
from typing import Any

from opkiln import evidence
from opkiln.digest import Signature, key, sha256_file
from opkiln.model import OUTSIDE
from opkiln.observing import linker
from opkiln.observing.inputs import (
    ABSENT,
    DIRECTORY,
    FILE,
    LIBRARIES,
    LINK,
    LISTING,
    PROGRAM,
)
from opkiln.record import Record
from opkiln.settings import executable, on_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

CHOICE = "choice"  # of a name on PATH: the programs that it leads to, up to the one that ran

GONE, HIDDEN = "\0gone", "\0hidden"  # in the place of a value: no link has such a text
_RUNS = "*"  # after the digest of a file that may be run
_AUTHORS = ("src", "opkiln", OUTSIDE)


class Fact(Record):
    """What was known of a path. The path is below its anchor, so that it can be found again where
    the package or torch is installed elsewhere."""

    kind: str
    anchor: str
    path: str
    value: str  # of several names, as ``joined`` gives it
    signature: Signature

    @property
    def sha256(self) -> str:
        """Of an author's file; else empty."""
        is_file = self.kind in (FILE, PROGRAM) and self.anchor in _AUTHORS
        return self.value.rstrip(_RUNS) if is_file else ""


class Hasher:
    """File digests for the length of one operation. Reads each file once."""

    def __init__(self, digest: Callable[[str], str] = sha256_file) -> None:
        self._digest = digest
        self._known: dict[str, tuple[str, Signature]] = {}

    def __call__(self, path: str) -> tuple[str, Signature]:
        """(SHA-256, signature taken just before the read). Raises OSError."""
        known = self._known.get(path)
        if known is None:
            signature = Signature.of(path)
            known = self._known[path] = (self._digest(path), signature)
        return known


# Values


def joined(names: Iterable[str]) -> str:
    """Names as one value; no name has a NUL."""
    return "\0".join(names)


def parted(value: str) -> list[str]:
    return value.split("\0") if value else []


def value(kind: str, path: str, then: str, hasher: Hasher) -> str:
    """What is known of a path now, where ``then`` was known before. Raises OSError."""
    try:
        return _ask(kind, path, then, hasher)
    except (FileNotFoundError, NotADirectoryError):
        return GONE
    except IsADirectoryError:
        return DIRECTORY
    except PermissionError:
        return HIDDEN


def _ask(kind: str, path: str, then: str, hasher: Hasher) -> str:
    if kind == FILE:
        return hasher(path)[0]
    if kind == PROGRAM:
        return hasher(path)[0] + (_RUNS if executable(path) else "")
    if kind == DIRECTORY:
        return DIRECTORY if os.path.isdir(path) else GONE
    if kind == LISTING:
        return key("listing", tuple(sorted(os.listdir(path))))
    if kind == LINK:
        return os.readlink(path) if stat.S_ISLNK(os.lstat(path).st_mode) else ""
    if kind == ABSENT:
        # What a compiler can open counts: not a link that leads nowhere.
        absent = (name for name in parted(then) if not os.path.exists(os.path.join(path, name)))
        return joined(absent)
    if kind == LIBRARIES:
        return joined(linker.listed(path, [each.partition("/")[0] for each in parted(then)]))
    return joined(islice(on_path(path), len(parted(then))))  # CHOICE


def signature_of(kind: str, path: str, then: str = "") -> Signature:
    """What holds as long as the value does. No ``stat`` shows where a link or PATH leads, nor what
    is missing behind a link or in a directory below. Raises OSError."""
    if kind in (LINK, CHOICE) or (kind == LIBRARIES and not os.path.exists(path)):
        return UNSIGNED
    signature = Signature.of(path)
    if kind == ABSENT:
        below = {name.partition("/")[0] for name in parted(then)}
        if any(os.path.lexists(os.path.join(path, name)) for name in below):
            return UNSIGNED
    return signature


UNSIGNED = Signature(0, 0, 0, 0, 0)  # holds for no file


# Keeping them


def to_manifest(facts: Iterable[Fact]) -> dict[str, Any]:
    """The facts as a manifest names them: the author's files, and a digest of all others."""
    listed = tuple(facts)
    own = {fact[1:3]: fact.sha256 for fact in listed if fact.sha256}
    others = tuple(fact[:4] for fact in listed if not fact.sha256 or fact.value != fact.sha256)
    return {
        "own": [[anchor, path, sha256] for (anchor, path), sha256 in own.items()],
        "others": key("facts", others),
    }


def deps_key(recorded: Mapping[str, Any]) -> str:
    """The key of what a manifest's ``deps`` name: the name of its entry."""
    return key("deps", (tuple(map(tuple, recorded["own"])), recorded["others"]))


def read(rows: Iterable[list[Any]]) -> tuple[Fact, ...]:
    """The facts of a sidecar."""
    return tuple(
        Fact(kind, anchor, path, value, Signature(*signature))
        for kind, anchor, path, value, *signature in rows
    )


def rows(facts: Iterable[Fact]) -> list[list[Any]]:
    """The facts as a sidecar has them."""
    return [[*fact[:4], *fact.signature] for fact in facts]


# Asking again


def changes(
    recorded: Mapping[str, Any],
    rows: Iterable[list[Any]] | None,
    places: Mapping[str, str],
    hasher: Hasher,
) -> list[str]:
    """What does not hold any more of an entry, in words. Raises OSError, KeyError.

    ``recorded`` is a manifest's ``deps``, ``rows`` are its sidecar's facts; without them, the
    author's files count alone.
    """
    evidence.start_entry()
    if rows is None:
        return _changed_files(recorded["own"], places, hasher)
    return broken(read(rows), places, hasher)


def broken(facts: Iterable[Fact], places: Mapping[str, str], hasher: Hasher) -> list[str]:
    """The facts that do not hold any more, in words. Raises OSError."""
    found = []
    for fact in facts:
        place = places.get(fact.anchor, "")
        # Not with a slash at the end, which would follow a link.
        path = os.path.join(place, fact.path) if fact.path else place
        if _holds(fact.signature, path):
            signature, now = fact.signature, fact.value
        else:
            signature = _now(fact.kind, path, fact.value)
            now = value(fact.kind, path, fact.value, hasher)
        if now == fact.value:
            evidence.entry(fact.kind, path, fact.value, signature)
        elif fact.kind == ABSENT:
            new = {*parted(fact.value)} - {*parted(now)}
            found += [f"{os.path.join(path, name)} is new" for name in sorted(new)]
        else:
            found.append(f"{fact.path} {_CHANGES.get(now, 'changed')}")
    return found


_CHANGES = {GONE: "is gone", HIDDEN: "cannot be read"}


def _holds(signature: Signature, path: str) -> bool:
    try:
        return signature.holds(path)
    except OSError:
        return False


def _now(kind: str, path: str, then: str) -> Signature:
    try:
        return signature_of(kind, path, then)
    except OSError:
        return UNSIGNED


def _changed_files(
    own: Iterable[tuple[str, str, str]], places: Mapping[str, str], hasher: Hasher
) -> list[str]:
    """One that is outside of the package is compared only where there is one."""
    found = []
    for anchor, path, sha256 in own:
        full = os.path.join(places[anchor], path)
        try:
            now, signature = hasher(full)
            evidence.entry(FILE, full, sha256, signature)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            if anchor == OUTSIDE:
                continue
            if not isinstance(error, FileNotFoundError):
                raise
            now = GONE
        if now != sha256:
            found.append(f"{path} {'is gone' if now == GONE else 'changed'}")
    return found
