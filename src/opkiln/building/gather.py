"""What the steps of a build depend on, by what they were observed to do: as facts, in manifests."""

from __future__ import annotations

import os
import shutil
from typing import Any, NamedTuple

from opkiln.base import digest
from opkiln.base.build_model import Plan
from opkiln.base.digest import sha256_file
from opkiln.base.model import CUDA, OUTSIDE, ROCM
from opkiln.building.observing.log import LISTED, NOT_A_LINK, Identity, Observation
from opkiln.machine.arch import cpu
from opkiln.machine.binary import elf
from opkiln.machine.facts import (
    ABSENT,
    CHOICE,
    DIRECTORY,
    FILE,
    GONE,
    HIDDEN,
    LIBRARIES,
    LINK,
    LISTING,
    PROGRAM,
    UNSIGNED,
    Hasher,
    ask_again,
    join_names,
    merge_values,
)
from opkiln.plan.plan import anchors_of
from opkiln.store import entry, key, publish
from opkiln.store.key import Fact

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


# Not files that somebody keeps: what the kernel says of itself.
_NO_FILES = ("/proc/", "/sys/")


class Inputs(NamedTuple):
    """The inputs of one step, or of several."""

    # (kind of ``machine.facts``, path as it was spelled, what must not change). The last is empty
    # where the kind says it. Of ABSENT, it is the names that were looked for in vain in a directory
    # (one with a slash is below a directory that does not exist either). Of CHOICE, it is the
    # programs of a name on PATH up to the one that a script or launcher chose. Of LIBRARIES, it is
    # the names of the shared libraries that programs need.
    facts: tuple[tuple[str, str, str], ...] = ()
    # What the dynamic linker itself looked at: its list, and libraries that it did not load. No
    # record says what was there then.
    unseen: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for kind, path, _ in self.facts if kind in (FILE, PROGRAM))


def _list_outside(
    paths: Iterable[str], observation: Observation, stage: str, covered: tuple[str, ...] = ()
) -> list[str]:
    """The files that somebody keeps, and not the step's own."""
    own = (stage.rstrip("/") + "/", *covered, *_NO_FILES)
    made = observation.made
    return [path for path in paths if not f"{path}/".startswith(own) and path not in made]


def identical(observation: Observation, stage: str) -> bool:
    """Whether each path that a step read still leads to the file that was open."""
    try:
        for path in _list_outside(observation.read, observation, stage):
            if observation.read[path] != (Identity.now(path),):
                return False
        passed = {*_list_outside((path for _, path in observation.passed), observation, stage)}
        for (kind, path), identities in observation.passed.items():
            if path not in passed:
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


def list_inputs(
    observation: Observation,
    stage: str,
    called: Iterable[str] = (),
    chosen: Iterable[tuple[str, tuple[str, ...]]] = (),
    searched: Iterable[str] = (),
    unlinked: Callable[[str], str] = str,
    covered: tuple[str, ...] = (),
) -> Inputs:
    """The inputs of a step that worked in the directory ``stage``, which is its own.

    ``called`` are paths that programs were started by: they may lead elsewhere later. ``searched``
    are directories where their shared libraries were looked for before those of the system.
    ``unlinked`` gives the real path of one that leads out of the stage. What begins with
    ``covered`` does not count.
    """

    def outside(paths: Iterable[str]) -> list[str]:
        return _list_outside(map(unlinked, paths), observation, stage, covered)

    paths: dict[str, str] = {}  # a later kind replaces an earlier one, which says less
    files = outside(observation.read)
    # That a directory is there follows from a file that was found in it.
    above = set[str]()
    for path in files:
        while (path := path.rpartition("/")[0]) and path not in above:
            above.add(path)
    for path in outside(map(_strip_dot, observation.directories)):
        if path not in above:
            paths[path] = DIRECTORY
    paths.update(dict.fromkeys(files, FILE))
    looked_up = (*observation.found, *called)
    paths.update(dict.fromkeys(outside(looked_up), PROGRAM))
    names = map(os.path.basename, outside(observation.loaded))
    libraries = {*observation.libraries, *(name for name in names if ".so" in name)}
    missing, there = elf.search(searched, libraries)
    unseen = {path for path in outside(there) if path not in paths}
    paths.update(dict.fromkeys(unseen, FILE))
    if libraries and os.path.exists(elf.LIST):
        unseen.add(elf.LIST)
    found = [(kind, path, "") for path, kind in paths.items()]
    found += [(LISTING, path, "") for path in outside(map(_strip_dot, observation.listed))]
    found += [(LINK, path, "") for path in _links(outside(observation.led))]
    found += [(CHOICE, name, join_names(programs)) for name, programs in chosen]
    absent = set(outside(each.rstrip("/") for each in observation.absent))
    absent.update(outside(missing))
    if libraries:
        found.append((LIBRARIES, elf.LIST, join_names(sorted(libraries))))
        if os.path.exists(elf.PRELOADS):
            found.append((FILE, elf.PRELOADS, ""))
        else:
            absent.add(elf.PRELOADS)
    found += [
        (ABSENT, place, join_names(sorted(names)))
        for place, names in _nearest_directories(absent).items()
    ]
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


def _strip_dot(directory: str) -> str:
    """Without the dot that gcc adds to see whether a path is a directory."""
    return directory.removesuffix("/.").rstrip("/") or "/"


def union(parts: Iterable[Inputs]) -> Inputs:
    """The inputs of all these steps, in order."""
    found: dict[tuple[str, str], str] = {}
    unseen: set[str] = set()
    for part in parts:
        unseen.update(part.unseen)
        for kind, path, what in part.facts:
            known = found.setdefault((kind, path), what)
            found[kind, path] = merge_values(kind, known, what)
    facts = ((*place, what) for place, what in sorted(found.items()))
    return Inputs(tuple(facts), tuple(sorted(unseen)))


def _nearest_directories(paths: Iterable[str]) -> dict[str, set[str]]:
    """Paths that do not exist, by the nearest directory above them that does."""
    homes: dict[str, str] = {}  # thousands of paths are in few directories: each is looked at once

    def home(directory: str) -> str:
        if directory not in homes:
            there = os.path.isdir(directory)
            homes[directory] = directory if there else home(os.path.dirname(directory))
        return homes[directory]

    found: dict[str, set[str]] = {}
    for path in paths:
        place = home(path.rstrip("/").rpartition("/")[0] or "/")
        found.setdefault(place, set()).add(path[len(place.rstrip("/")) + 1 :])
    return found


class Appeared(Exception):
    """A file was made while a compiler was looking for it: what it read is not certain."""


def facts_of(place: Places, inputs: Inputs, hasher: Hasher) -> tuple[Fact, ...]:
    """The facts that the inputs of a step come to. Raises OSError if a file is gone, and Appeared
    if a name that was looked for in vain exists by now."""
    digest.forget_mounts()
    found = []
    for kind, path, then in inputs.facts:
        if kind == CHOICE:
            found.append(Fact(CHOICE, "path", path, then, UNSIGNED))
        elif place.is_kept(path):
            now, signature = ask_again(kind, path, then, hasher)
            if kind == ABSENT and now != then:
                raise Appeared(path)
            if now in (GONE, HIDDEN):
                raise FileNotFoundError(path)
            found.append(Fact(kind, *place.locate(path), now, signature))
    return tuple(found)


class Places:
    """The directories that may lie elsewhere the next time, by name."""

    def __init__(
        self, anchors: Mapping[str, str], authors: Iterable[str] = (), removed: str = ""
    ) -> None:
        """Files below the directories of ``authors`` count as theirs, and none below ``removed``
        counts."""
        known = [(name, place.rstrip("/") + "/") for name, place in anchors.items() if place]
        # The nearest counts: an environment with torch may be in the package's directory.
        self._anchors = sorted(known, key=lambda each: -len(each[1]))
        self._authors = tuple(path.rstrip("/") + "/" for path in authors)
        self._removed = removed and removed.rstrip("/") + "/"

    def is_kept(self, path: str) -> bool:
        return not (self._removed and (path + "/").startswith(self._removed))

    def locate(self, path: str) -> tuple[str, str]:
        """(anchor, path below it)."""
        for anchor, place in self._anchors:
            if (path + "/").startswith(place):
                return anchor, path[len(place) :]
        return (OUTSIDE if path.startswith(self._authors) else "abs"), path


def places_of(plan: Plan) -> Places:
    """Where a plan's files lie."""
    places = anchors_of(plan.spec, plan.toolchain)
    named = ("src", "opkiln", "torch", "python", "wheels")
    # The text of an inline source is in the intent key, and its file is removed.
    removed = plan.spec.root if plan.spec.inline else ""
    anchors = {name: places[name] for name in named if name in places}
    return Places(anchors, _declared_directories(plan), removed)


def _declared_directories(plan: Plan) -> Iterator[str]:
    """The directories outside of its package that an op's declaration names."""
    flags = (*plan.spec.cxx_args, *plan.spec.device_args)
    yield from (os.path.join(plan.spec.root, path) for path in plan.spec.include_dirs)
    for flag, following in zip(flags, (*flags[1:], ""), strict=False):
        option = next((each for each in _INCLUDE_FLAGS if flag.startswith(each)), None)
        if option is not None:
            path = following if flag == option else flag[len(option) :]
            if os.path.isabs(path):
                yield path


_INCLUDE_FLAGS = ("-I", "-isystem", "-iquote", "-idirafter")


class Disagree(Exception):
    """Two steps saw different values of one path."""


def union_of_facts(parts: Iterable[Iterable[Fact]]) -> tuple[Fact, ...]:
    """The facts of all these steps. Raises Disagree."""
    found: dict[tuple[str, str, str], Fact] = {}
    for fact in (fact for part in parts for fact in part):
        known = found.setdefault(fact[:3], fact)
        if known.value == fact.value:
            continue
        try:
            both = merge_values(fact.kind, known.value, fact.value)
        except ValueError:
            raise Disagree(fact.path) from None
        # The directory may have changed between the two looks. Then its signature proves nothing.
        earlier = min(known.signature, fact.signature, key=lambda each: each.read_at)
        signature = earlier if known.signature[:-1] == fact.signature[:-1] else UNSIGNED
        found[fact[:3]] = known._replace(value=both, signature=signature)
    return tuple(found[place] for place in sorted(found))


def write(
    directory: str,
    payload: str,
    manifest: dict[str, Any],
    found: tuple[key.Fact, ...],
    lists: dict[str, Any],
    log: str = "",
) -> str:
    """Write the files of a leaf, ready to be published. The payload may be there already. Returns
    the leaf's name."""
    os.makedirs(directory, 0o700, exist_ok=True)
    name = os.path.basename(payload)
    if os.path.dirname(payload) != directory:
        try:
            os.link(payload, os.path.join(directory, name))
        except OSError:  # a file system without hard links
            shutil.copy(payload, directory)
    full = {
        **manifest,
        "schema": entry.SCHEMA,
        "payload": name,
        "size": os.stat(payload).st_size,
        "sha256": sha256_file(payload),
        "deps": key.manifest_facts(found),
    }
    long = {**lists, "facts": key.rows(found), "schema": entry.SCHEMA}
    files = {
        entry.MANIFEST: entry.write_manifest(full),
        entry.SIDECAR: entry.write_manifest(long),
        entry.LOG: log.encode("utf-8", "surrogateescape"),
    }
    for file, data in files.items():
        with publish.create(os.path.join(directory, file), 0o600) as out:
            out.write(data)
    return key.deps_key(full["deps"])


def needs_of(path: str, plan: Plan) -> dict[str, Any]:
    """What a library requires, by its ELF tables, for a manifest.
    ``decision.prebuilt`` compares that with the machine.

    ``cpu`` lists the CPU features by the kernel's names. ``images`` is the device code that the
    file really contains. ``symbols`` lists symbols that other libraries must define, with the
    library and the version they were linked to. One symbol for each version is enough, because a
    library that has one symbol of a version has all of them. Raises LoadError.
    """
    found, target = elf.read(path), plan.target
    symbols = {(soname, version or name): name for soname, name, version in found.symbols}
    versions = {(soname, name): version for soname, name, version in found.symbols}
    return {
        "cpu": sorted(cpu.kernel_names(cpu.requires(target.cpu, target.cpu_features))),
        "sonames": list(found.needed),
        "symbols": sorted(
            [soname, name, versions[soname, name]] for (soname, _), name in symbols.items()
        ),
        "images": list(_images(path, target.backend)),
    }


def _images(path: str, backend: str) -> tuple[str, ...]:
    if backend not in (CUDA, ROCM):
        return ()
    from opkiln.machine.binary import fatbin

    return fatbin.images(path) if backend == CUDA else fatbin.hip_images(path)
