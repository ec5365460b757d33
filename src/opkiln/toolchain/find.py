"""Programs on PATH, as candidates with the reason each was refused."""

from __future__ import annotations

import os

from opkiln import facts
from opkiln.record import Record
from opkiln.settings import on_path, origin_of, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Candidate(Record):
    """A program that was looked at. ``refused`` is empty for one that may be used."""

    path: str
    origin: str  # how it was found: CXX, PATH
    refused: str = ""
    version: str = ""


def refusals(candidates: Iterable[Candidate]) -> str:
    """Each candidate and why it was refused, in a line."""
    return "\n".join(f"{each.path} ({each.origin}): {each.refused}" for each in candidates)


def first(name: str) -> str | None:
    """The program that this name runs, or None."""
    found = next(on_path(name), None)
    if "/" in name:
        facts.runs(name)
    else:
        facts.program(name, found)
    return found


# They may hand out an object without compiling anything. opkiln's digests are part of their keys.
LAUNCHERS = frozenset(("ccache", "sccache"))
# They compile on other hosts, where neither the compiler nor what it reads is seen.
REMOTE = frozenset(("distcc", "icecc"))


def has_interpreter(path: str) -> bool:
    """Whether a file is a script that names its interpreter."""
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def is_launcher(path: str) -> bool:
    """Whether a program that stands for a compiler is a launcher under another name."""
    return os.path.basename(os.path.realpath(path)) in LAUNCHERS


def launcher() -> str | None:
    """The program that starts the compiler: the first word of ``CXX="ccache g++"``."""
    command = settings.cxx
    return command[0] if command and len(command) > 1 else None


def _found(path: str, origin: str) -> Candidate:
    """A compiler that exists. It is refused if it, or the launcher, compiles on other hosts."""
    started = first(name) if (name := launcher()) else None
    for each in filter(None, (started, path)):
        if (program := os.path.basename(os.path.realpath(each))) in REMOTE:
            why = f"{program} compiles on other hosts, where opkiln cannot see what is read"
            return Candidate(path, origin, why)
    return Candidate(path, origin)


def cross_candidates(machine: str) -> Iterator[Candidate]:
    """C++ compilers for another machine, by their usual name."""
    name = f"{machine}-linux-gnu-g++"
    path = first(name)
    yield Candidate(name, "PATH", "not on PATH") if path is None else _found(path, "PATH")


def cxx_candidates() -> Iterator[Candidate]:
    """Host C++ compilers in order of preference: the one the user named, else those on PATH."""
    command, origin = origin_of("cxx")
    if command:
        wanted = command[-1]
        path = first(wanted)
        if path is None:
            yield Candidate(wanted, origin, "no such program")
        else:
            yield _found(path, origin)
        return  # an explicit choice is never replaced by another compiler
    seen: set[str] = set()
    for name in ("g++", "clang++", "c++"):
        path = first(name)
        if path is None:
            yield Candidate(name, "PATH", "not on PATH")
        elif (real := os.path.realpath(path)) not in seen:
            seen.add(real)
            yield _found(path, "PATH")
