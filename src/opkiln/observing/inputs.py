"""What follows from an observation: what a step depends on, and the names that must stay absent."""

from __future__ import annotations

import os
from typing import NamedTuple

from opkiln.binary import linker
from opkiln.facts import (
    ABSENT,
    CHOICE,
    DIRECTORY,
    FILE,
    LIBRARIES,
    LINK,
    LISTING,
    PROGRAM,
    joined,
    parted,
    together,
)
from opkiln.observing.log import LISTED, NOT_A_LINK, Identity, Observation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Not files that somebody keeps: what the kernel says of itself.
_NO_FILES = ("/proc/", "/sys/")


class Inputs(NamedTuple):
    """The inputs of one step, or of several."""

    # (kind, path as it was spelled, what has to stay so), as ``opkiln.facts`` has them, where the
    # kind alone does not say it: of an existing directory, the names that were looked for in vain
    # (one with a slash is below a directory that does not exist either); of a name on PATH, its
    # programs up to the one that a script or launcher chose; of the dynamic linker's list, the
    # names of shared libraries that programs need.
    facts: tuple[tuple[str, str, str], ...] = ()
    # What the dynamic linker itself looked at: its list, and libraries that it did not load. No
    # record says what was there then.
    unseen: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for kind, path, _ in self.facts if kind in (FILE, PROGRAM))


def _is_outside(path: str, observation: Observation, stage: str) -> bool:
    """Whether a path is a file that somebody keeps, and not the step's own."""
    own = stage.rstrip("/") + "/"
    return not f"{path}/".startswith((own, *_NO_FILES)) and path not in observation.made


def identical(observation: Observation, stage: str) -> bool:
    """Whether each path that a step read still leads to the file that was open."""
    try:
        for path, identities in observation.read.items():
            if _is_outside(path, observation, stage) and identities != (Identity.now(path),):
                return False
        for (kind, path), identities in observation.passed.items():
            if not _is_outside(path, observation, stage):
                continue
            counts = kind == LISTED or os.path.islink(path)
            now = Identity.now(path, follow=kind == LISTED) if counts else NOT_A_LINK
            if identities != (now,):
                return False
    except OSError:
        return False
    return True


def agree(one: Observation, other: Observation) -> bool:
    """Whether two steps read the same files behind the paths that both read."""
    return all(
        other.read.get(path, files) == files
        for path, files in one.read.items()
        if not path.startswith(_NO_FILES)
    )


def of(
    observation: Observation,
    stage: str,
    called: Iterable[str] = (),
    chosen: Iterable[tuple[str, tuple[str, ...]]] = (),
    searched: Iterable[str] = (),
    unlinked: Callable[[str], str] = str,
) -> Inputs:
    """The inputs of a step that worked in the directory ``stage``, which is its own.

    ``called`` are paths that programs were started by: they may lead elsewhere later. ``searched``
    are directories where their shared libraries were looked for before those of the system.
    ``unlinked`` gives the real path of one that leads out of the stage.
    """

    def outside(paths: Iterable[str]) -> Iterator[str]:
        return (path for path in map(unlinked, paths) if _is_outside(path, observation, stage))

    paths: dict[str, str] = {}  # the more that is known, the later it is added
    files = tuple(outside(observation.read))
    # That a directory is there follows from a file that was found in it.
    above = {directory for path in files for directory in _above(path)}
    for path in outside(map(_plain, observation.directories)):
        if path not in above:
            paths[path] = DIRECTORY
    paths.update(dict.fromkeys(files, FILE))
    looked_up = (*observation.found, *called)
    paths.update(dict.fromkeys(outside(looked_up), PROGRAM))
    names = map(os.path.basename, outside(observation.loaded))
    libraries = {*observation.libraries, *(name for name in names if ".so" in name)}
    missing, there = linker.search(searched, libraries)
    unseen = {path for path in outside(there) if path not in paths}
    paths.update(dict.fromkeys(unseen, FILE))
    if libraries and os.path.exists(linker.LIST):
        unseen.add(linker.LIST)
    found = [(kind, path, "") for path, kind in paths.items()]
    found += [(LISTING, path, "") for path in outside(map(_plain, observation.listed))]
    found += [(LINK, path, "") for path in _links(outside(observation.led))]
    found += [(CHOICE, name, joined(programs)) for name, programs in chosen]
    absent = set(outside(each.rstrip("/") for each in observation.absent))
    absent.update(outside(missing))
    if libraries:
        found.append((LIBRARIES, linker.LIST, joined(sorted(libraries))))
        if os.path.exists(linker.PRELOADS):
            found.append((FILE, linker.PRELOADS, ""))
        else:
            absent.add(linker.PRELOADS)
    found += [(ABSENT, place, joined(sorted(names))) for place, names in _homes(absent).items()]
    return union([Inputs(tuple(found), tuple(unseen))])


def _links(paths: Iterable[str]) -> set[str]:
    """These paths, and the symbolic links on them and on those that they lead to."""
    found: set[str] = set()
    for path in paths:
        found.add(path)
        way, rest = "", path.split("/")[1:][::-1]
        for _ in range(_MOST_STEPS):
            if not rest:
                break
            part = rest.pop()
            if part in ("", "."):
                continue
            way = os.path.dirname(way) if part == ".." else f"{way}/{part}"
            if os.path.islink(way):
                found.add(way)
                try:
                    text = os.readlink(way)
                except OSError:
                    break  # it was removed just now, which the check of all facts notices
                way = "" if text.startswith("/") else os.path.dirname(way)
                rest += text.split("/")[::-1]
    return found


_MOST_STEPS = 1000  # links that lead in a circle end


def _plain(directory: str) -> str:
    """Without the dot that gcc adds to see whether a path is a directory."""
    return directory.removesuffix("/.").rstrip("/") or "/"


def _above(path: str) -> Iterator[str]:
    while (path := os.path.dirname(path)) not in ("", "/"):
        yield path


def without(found: Inputs, covered: tuple[str, ...]) -> Inputs:
    """The inputs less the paths that begin with one of these."""

    def counts(path: str) -> bool:
        return not path.startswith(covered)

    kept = []
    for kind, path, what in found.facts:
        if kind == ABSENT:
            left = joined(each for each in parted(what) if counts(os.path.join(path, each)))
            kept += [(kind, path, left)] if left else []
        elif counts(path + "/"):
            kept.append((kind, path, what))
    return Inputs(tuple(kept), tuple(path for path in found.unseen if counts(path + "/")))


def union(parts: Iterable[Inputs]) -> Inputs:
    """The inputs of all these steps, in order."""
    found: dict[tuple[str, str], str] = {}
    unseen: set[str] = set()
    for part in parts:
        unseen.update(part.unseen)
        for kind, path, what in part.facts:
            known = found.setdefault((kind, path), what)
            found[kind, path] = together(kind, known, what)
    facts = ((*place, what) for place, what in sorted(found.items()))
    return Inputs(tuple(facts), tuple(sorted(unseen)))


def _homes(paths: Iterable[str]) -> dict[str, set[str]]:
    """Paths that do not exist, by the nearest directory above them that does."""
    homes: dict[str, str] = {}  # thousands of paths are in few directories: each is looked at once

    def home(directory: str) -> str:
        if directory not in homes:
            there = os.path.isdir(directory)
            homes[directory] = directory if there else home(os.path.dirname(directory))
        return homes[directory]

    found: dict[str, set[str]] = {}
    for path in paths:
        place = home(os.path.dirname(path.rstrip("/")) or "/")
        found.setdefault(place, set()).add(path[len(place.rstrip("/")) + 1 :])
    return found
