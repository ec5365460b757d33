"""Facts: what was known of a path, and whether that still holds.

A fact is a path, what was known of it and its value: of a file, the digest of its contents. There
are no classes of files: a header of the package, of torch and of the compiler, a program and the
libraries that it loaded each count by themselves, wherever they are.

Each fact has the signature of the file as it was. If the signature holds, so does the fact. If not,
the value is computed again. So a checkout with other times is still a hit, and an edit under an old
time is not.

The files that a build read become facts in its entry (``store.key``). Answers of compilers are
remembered with facts (``toolchain.probing``). Code that decides calls ``note_…`` where it reads,
and the facts become a receipt (``decision.receipt``). If nothing is collected, that costs almost
nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice

from opkiln.base.digest import Signature, key, sha256_file
from opkiln.settings import executable, on_path

# The kinds of facts: what is known of a path, and must not change.
FILE = "file"  # its contents
PROGRAM = "program"  # its contents, and whether it may be run
DIRECTORY = "directory"  # that it is one
LISTING = "listing"  # the names in it
LINK = "link"  # its text; empty if it is something else
ABSENT = "absent"  # of a directory: which names are not below it
LIBRARIES = "libraries"  # of the dynamic linker's list: where these lead
CHOICE = "choice"  # of a name on PATH: the programs that it leads to, up to the one that ran
PLACE = "place"  # of a directory that may lie elsewhere: where it lies

_ASKED_BY_NAME = (ABSENT, LIBRARIES, CHOICE)

GONE, HIDDEN = "\0gone", "\0hidden"  # in the place of a value: no link has such a text
RUNS = "*"  # after the digest of a file that may be run


_read: dict[str, tuple[str, Signature]] = {}


def digest_of(path: str) -> str:
    """SHA-256 of a file, which is read again only if it may have changed since this process read
    it. Raises OSError."""
    known = _read.get(path)
    if known is None or not known[1].holds(path):
        signature = Signature.of(path)
        known = _read[path] = (sha256_file(path), signature)
    return known[0]


class Hasher:
    """What is known of files for the length of one operation. Looks at each file once."""

    def __init__(self, digest: Callable[[str], str] = digest_of) -> None:
        self._digest = digest
        self._known: dict[str, tuple[str, Signature]] = {}
        self._held: dict[str, list[int]] = {}
        self._answers: dict[tuple[str, str, str], tuple[str, Signature]] = {}

    def __call__(self, path: str) -> tuple[str, Signature]:
        """(SHA-256, signature taken just before the look). Raises OSError."""
        known = self._known.get(path)
        if known is None:
            signature = Signature.of(path)
            known = self._known[path] = (self._digest(path), signature)
        return known

    def recorded_holds(self, path: str, recorded: list[int]) -> bool:
        """Whether a recorded signature certainly holds. Raises OSError."""
        # All but the last number, the time of the look, is compared with the file.
        held = self._held.get(path)
        if held is not None and held[:-1] == recorded[:-1] and held[-1] <= recorded[-1]:
            return True
        if not Signature.recorded_holds(path, recorded):
            return False
        self._held[path] = recorded
        return True

    def ask_again(self, kind: str, path: str, then: str) -> tuple[str, Signature]:
        """As the function. Raises OSError."""
        known = self._answers.get((kind, path, then))
        if known is None:
            known = self._answers[kind, path, then] = ask_again(kind, path, then, self)
        return known


# Values


def join_names(names: Iterable[str]) -> str:
    """Names as one value; no name has a NUL."""
    return "\0".join(names)


def split_names(value: str) -> list[str]:
    return value.split("\0") if value else []


def merge_values(kind: str, one: str, other: str) -> str:
    """The value of a path that two steps knew. Raises ValueError if they disagree."""
    if one == other:
        return one
    if kind in (ABSENT, LIBRARIES):
        return join_names(sorted({*split_names(one), *split_names(other)}))
    if kind == CHOICE:  # of two lists of programs, the longer begins with the other
        return max(one, other, key=len)
    raise ValueError(f"{kind}: {one!r} and {other!r}")


def value(kind: str, path: str, then: str, hasher: Hasher) -> str:
    """The value of a path now; ``then`` is the value before. Raises OSError."""
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
        return hasher(path)[0] + (RUNS if executable(path) else "")
    if kind == DIRECTORY:
        return DIRECTORY if os.path.isdir(path) else GONE
    if kind == PLACE:
        return path
    if kind == LISTING:
        return key("listing", tuple(sorted(os.listdir(path))))
    if kind == LINK:
        return os.readlink(path) if stat.S_ISLNK(os.lstat(path).st_mode) else ""
    if kind == ABSENT:
        # What a compiler can open counts: not a link that leads nowhere.
        absent = (
            name for name in split_names(then) if not os.path.exists(os.path.join(path, name))
        )
        return join_names(absent)
    if kind == LIBRARIES:
        from opkiln.machine.binary import elf  # not for a hit

        return join_names(
            elf.read_list(path, [each.partition("/")[0] for each in split_names(then)])
        )
    return join_names(islice(choices(path), len(split_names(then))))  # CHOICE


def choices(name: str) -> Iterator[str]:
    """The programs of a name that PATH leads to, in order, each once however PATH is spelled."""
    seen = set()
    for path in on_path(name):
        directory, last = os.path.split(path)
        real = os.path.join(os.path.realpath(directory), last)
        if real not in seen:
            seen.add(real)
            yield real


def signature_of(kind: str, path: str, then: str = "") -> Signature:
    """A signature that holds as long as the value does. UNSIGNED for a link or a name on PATH, and
    for names that are missing behind a link or further below: no ``stat`` shows a change there.
    Raises OSError."""
    if kind in (LINK, CHOICE, PLACE) or (kind == LIBRARIES and not os.path.exists(path)):
        return UNSIGNED
    signature = Signature.of(path)
    if kind == ABSENT:
        below = {name.partition("/")[0] for name in split_names(then)}
        if any(os.path.lexists(os.path.join(path, name)) for name in below):
            return UNSIGNED
    return signature


UNSIGNED = Signature(0, 0, 0, 0, 0)  # holds for no file


_answers: dict[tuple[str, str, str], tuple[str, Signature]] = {}


def ask_again(kind: str, path: str, then: str, hasher: Hasher) -> tuple[str, Signature]:
    """(the value of a path now, the signature under which it holds). Computed again only if it may
    have changed since this process asked. Raises OSError."""
    about = kind, path, then if kind in _ASKED_BY_NAME else ""
    try:
        if (known := _answers.get(about)) and Signature.recorded_holds(path, known[1]):
            return known
        signature = signature_of(kind, path, then)
    except OSError:
        signature = UNSIGNED
    found = value(kind, path, then, hasher), signature
    if signature.settled:
        _answers[about] = found
    return found


# What a decision read


class Evidence:
    """The facts of one decision. JSON can hold every one of them."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, ...]] = {}  # path: signature
        # name: the paths that PATH leads to, in order; None at the end says that these are all
        self.programs: dict[str, list[str | None]] = {}
        self.absent: dict[str, None] = {}
        self.complete = True  # False: the decision also rests on something else
        self.entry: list[tuple[str, str, str, Signature]] = []  # the arguments of ``note_entry``


_collected: ContextVar[Evidence | None] = ContextVar("opkiln_evidence", default=None)


@contextmanager
def collect(found: Evidence | None = None, *, keep: bool = True) -> Iterator[Evidence]:
    """Collect the facts that are read in this block, in addition to those in ``found``. If they
    are not to be kept, the result is incomplete and noting them costs nothing."""
    if found is None:
        found = Evidence()
    if not keep:
        found.complete = False
        yield found
        return
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def is_collected() -> bool:
    """Whether somebody collects what is read."""
    return _collected.get() is not None


def note_file(path: str, signature: Iterable[int] | None = None) -> None:
    """Note that a file, or a directory's list of names, was read. ``signature`` is from before the
    read."""
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


def _evidence() -> Evidence:
    """The facts that are being collected, or some that nobody reads."""
    return _collected.get() or Evidence()


def note_absent(path: str) -> None:
    """Note that there is nothing at this path, or nothing that can be used."""
    _evidence().absent[path] = None


def exists(path: str) -> bool:
    """Whether a path exists. Notes the answer."""
    return _note(path, os.path.exists(path))


def is_program(path: str) -> bool:
    """Whether a path is a program. Notes the answer."""
    return _note(path, executable(path))


def _note(path: str, found: bool) -> bool:
    if found:
        note_file(path)
    else:
        note_absent(path)
    return found


def list_directory(directory: str) -> list[str]:
    """The names in a directory, none if it cannot be listed. Notes the answer."""
    try:
        signature = Signature.of(directory)
        names = os.listdir(directory)
    except OSError:
        note_absent(directory)
        return []
    note_file(directory, signature)
    return names


def start_entry() -> None:
    """Forget the facts of other entries: another entry will be compared with the files."""
    _evidence().entry = []


def note_entry(kind: str, path: str, value: str, signature: Signature) -> None:
    """Note that a fact of an entry holds (``store.key``). ``signature`` is from before the look."""
    _evidence().entry.append((kind, path, value, signature))


def note_program(name: str, path: str | None) -> None:
    """Note where a name on PATH leads."""
    _evidence().programs.setdefault(name, [path])


def note_programs(name: str, paths: list[str]) -> None:
    """Note all programs of a name on PATH."""
    _evidence().programs[name] = [*paths, None]


def note_incomplete() -> None:
    """Note that the decision rests on something that cannot be checked later."""
    _evidence().complete = False
