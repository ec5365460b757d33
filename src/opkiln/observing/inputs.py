"""What follows from an observation: the files that a step depends on, and the names that must stay
absent."""

from __future__ import annotations

import itertools
import os
from typing import NamedTuple

from opkiln.observing.log import Identity, Observation
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Not files that somebody keeps: devices, and what the kernel says of itself.
_NO_FILES = ("/dev/", "/proc/", "/sys/")


Chosen = tuple[str, tuple[str, ...]]


class Inputs(NamedTuple):
    """The inputs of one step, or of several."""

    files: tuple[str, ...] = ()  # as the programs spelled them
    # (an existing directory, names below it that were looked for in vain). A name with a slash is
    # below a directory that does not exist either; one that ends with a slash is a directory.
    absent: tuple[tuple[str, tuple[str, ...]], ...] = ()
    programs: tuple[str, ...] = ()  # by the paths that they were called by
    # (a name on PATH, its programs up to the one that a script or launcher chose)
    chosen: tuple[Chosen, ...] = ()


def identical(observation: Observation, stage: str) -> bool:
    """Whether each path that a step read still leads to the file that was open."""
    inside = stage.rstrip("/") + "/"
    for path, identities in observation.read.items():
        if path in observation.made or path.startswith((inside, *_NO_FILES)):
            continue
        try:
            if identities != (Identity.now(path),):
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


def of(observation: Observation, stage: str, chosen: Iterable[Chosen] = ()) -> Inputs:
    """The inputs of a step that worked in the directory ``stage``, which is its own."""
    inside = stage.rstrip("/") + "/"

    def counts(path: str) -> bool:
        return not (path.startswith((inside, *_NO_FILES)) or path in observation.made)

    files = tuple(filter(counts, observation.read))
    # A compiler that opens a directory by the name of a header passes it by.
    directories = set(filter(os.path.isdir, files))
    files = tuple(each for each in files if each not in directories)
    # PATH's directories differ between shells, and to which programs they lead is known already.
    path = settings.path
    plain = (each.rstrip("/") for each in observation.absent)
    absent = (each for each in plain if os.path.dirname(each) not in path)
    unusable = {*filter(counts, absent), *(each.rstrip("/") + "/" for each in directories)}
    programs = _programs(observation.programs, filter(counts, observation.called))
    return Inputs(files, _summed_up(unusable), programs, _longest(chosen))


def without(found: Inputs, covered: tuple[str, ...]) -> Inputs:
    """The inputs less the paths that begin with one of these."""

    def counts(path: str) -> bool:
        return not path.startswith(covered)

    kept = tuple(
        (directory, left)
        for directory, names in found.absent
        if (left := tuple(name for name in names if counts(os.path.join(directory, name))))
    )
    return found._replace(
        files=tuple(filter(counts, found.files)),
        absent=kept,
        programs=tuple(filter(counts, found.programs)),
    )


def _programs(begun: tuple[str, ...], called: Iterable[str]) -> tuple[str, ...]:
    """The programs by the paths that they were called by, which may lead elsewhere later. Those
    without one (the first, and those found on PATH) by their own."""
    found = dict.fromkeys(begun)
    for path in called:
        found.pop(os.path.realpath(path), None)
        found[path] = None
    return tuple(found)


def union(parts: Iterable[Inputs]) -> Inputs:
    """The inputs of all these steps."""
    files: dict[str, None] = {}
    programs: dict[str, None] = {}
    absent: dict[str, dict[str, None]] = {}
    chosen: list[Chosen] = []
    for part in parts:
        chosen += part.chosen
        files.update(dict.fromkeys(part.files))
        programs.update(dict.fromkeys(part.programs))
        for directory, names in part.absent:
            absent.setdefault(directory, {}).update(dict.fromkeys(names))
    summed = tuple((directory, tuple(sorted(names))) for directory, names in sorted(absent.items()))
    return Inputs(tuple(files), summed, tuple(programs), _longest(chosen))


def _longest(chosen: Iterable[Chosen]) -> tuple[Chosen, ...]:
    """Each name once: of two lists of programs on PATH, the longer begins with the shorter, so it
    comes after it."""
    return tuple(dict(sorted(chosen)).items())


def _summed_up(paths: Iterable[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Paths that do not exist, by the nearest directory above them that does."""
    absent = _Absent()
    found: dict[str, set[str]] = {}
    for path in itertools.chain.from_iterable(map(absent.ways, paths)):
        place = absent.home(os.path.dirname(path.rstrip("/")) or "/")
        found.setdefault(place, set()).add(path[len(place.rstrip("/")) + 1 :])
    return tuple((place, tuple(sorted(names))) for place, names in sorted(found.items()))


class _Absent:
    """Paths that do not exist, thousands in few directories. Each directory is looked at once."""

    def __init__(self) -> None:
        self._homes: dict[str, str] = {}
        self._broken: dict[str, str] = {}

    def home(self, directory: str) -> str:
        """The directory, or the nearest one above it that exists: at the latest, the root."""
        if directory not in self._homes:
            there = os.path.isdir(directory)
            self._homes[directory] = directory if there else self.home(os.path.dirname(directory))
        return self._homes[directory]

    def ways(self, path: str) -> Iterator[str]:
        """A path that does not exist. If a link on it leads nowhere, also where it would lead: the
        file that is missing there may be made."""
        for _ in range(_MOST_LINKS):
            yield path
            link = self._broken_link(path)
            if not link:
                return
            try:
                path = os.path.join(os.path.dirname(link), os.readlink(link)) + path[len(link) :]
            except OSError:
                return  # it was removed just now

    def _broken_link(self, path: str) -> str:
        """The link on the path that leads nowhere; empty if there is none."""
        if os.path.lexists(path):
            return path if os.path.islink(path) and not os.path.exists(path) else ""
        above = os.path.dirname(path)
        if above == path:
            return ""
        if above not in self._broken:
            self._broken[above] = self._broken_link(above)
        return self._broken[above]


_MOST_LINKS = 40  # as the kernel has it
