"""Programs on PATH, as candidates with the reason each was refused."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from opkiln import facts
from opkiln.record import Record
from opkiln.settings import on_path, origin_of, settings
from opkiln.toolchain.torch_sdk import release


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


def programs(places: Iterable[tuple[str, str]]) -> Iterator[Candidate]:
    """The programs at these places, each once; a place is (a path, or a name on PATH; origin)."""
    seen: set[str] = set()
    for place, origin in places:
        path = first(place)
        if path is None:
            by_name = "/" not in place and origin == "PATH"
            yield Candidate(place, origin, "not on PATH" if by_name else "no such program")
        elif (real := os.path.realpath(path)) not in seen:
            seen.add(real)
            yield Candidate(path, origin)


def matching(pattern: str) -> list[str]:
    """The directories that match a pattern, the highest version first."""
    if not pattern.endswith("*"):
        return [pattern]
    parent, stem = os.path.split(pattern[:-1])
    return [os.path.join(parent, name) for name in newest(facts.listed(parent), stem)]


def newest(names: Iterable[str], stem: str) -> list[str]:
    """The names that are this stem and a version, the highest version first."""
    found = (name for name in names if name.startswith(stem))
    return sorted(found, key=lambda name: (release(name.removeprefix(stem)), name), reverse=True)


def cxx_candidates(machine: str = "") -> Iterator[Candidate]:
    """Host C++ compilers in order of preference: the one the user named, else those on PATH.

    An explicit choice is never replaced by another compiler. A compiler for another ``machine`` has
    its usual name.
    """
    command, origin = origin_of("cxx")
    if machine:
        places = [(f"{machine}-linux-gnu-g++", "PATH")]
    elif command:
        places = [(command[-1], origin)]
    else:
        places = [(name, "PATH") for name in ("g++", "clang++", "c++")]
    return map(_without_remote, programs(places))


def _without_remote(candidate: Candidate) -> Candidate:
    """A compiler is refused if it, or the launcher, compiles on other hosts."""
    if candidate.refused:
        return candidate
    started = first(name) if (name := launcher()) else None
    for each in filter(None, (started, candidate.path)):
        if (program := os.path.basename(os.path.realpath(each))) in REMOTE:
            why = f"{program} compiles on other hosts, where opkiln cannot see what is read"
            return candidate._replace(refused=why)
    return candidate
