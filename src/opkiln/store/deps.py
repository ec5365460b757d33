"""The dependencies of a build: which files the compiler read, with their digests.

There are three kinds of files:
- *external*: the compiler's and the system's headers, found on the compiler's own search path.
  They are checked on a hit if there is a compiler. A slim image without compiler and headers cannot
  check them and does not need to.
- *covered*: torch's and Python's headers, if the ABI tag represents them.
- *own*: everything else, anywhere. Checked on every hit.

A new header may *shadow* one of these on the include path. No dependency file lists it. So the list
also records which of the names that were included (or tested with ``__has_include``) exist below
each directory of the include path.

Where the steps were observed, more is known and nothing need be guessed: every file that any of
their programs read, whatever named it, each name that was looked for in vain and where, and the
programs themselves.

Paths stay as the compiler wrote them: ``a/../b`` is not ``b`` if ``a`` is a symbolic link.
"""

from __future__ import annotations

import os
from typing import Any

from opkiln import images
from opkiln.build_model import Plan
from opkiln.digest import LARGEST, Signature, key, read_file, sha256_file
from opkiln.model import ABI_NONE, ABI_TORCH, PACKAGE, PYTHON
from opkiln.observing.inputs import Inputs
from opkiln.plan import anchors_of
from opkiln.record import Record
from opkiln.store.recheck import PROGRAM, Hasher, Names, choice, deps_key, listing
from opkiln.toolchain import probing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from opkiln.store.libraries import Libraries

Place = tuple[str, str]  # (anchor, path below it)

_INCLUDE_FLAGS = ("-I", "-isystem", "-iquote", "-idirafter")


class Appeared(Exception):
    """A file was made while a compiler was looking for it: what it read is not certain."""


class Dep(Record):
    """An own file: its place, and the digest and signature that it had."""

    anchor: str
    path: str
    sha256: str
    signature: Signature


class Watch(Record):
    """One of the author's directories, and which included names exist below it."""

    anchor: str
    path: str
    present: tuple[str, ...]


class Dependencies(Record):
    """Everything a build read. ``external_files`` and ``names`` go to the sidecar."""

    own: tuple[Dep, ...]
    external: str  # digest over external_files
    external_files: tuple[tuple[str, str], ...]  # (path, sha256)
    watches: tuple[Watch, ...]
    directories: tuple[tuple[str, str, Signature], ...]  # watched: (anchor, path, signature)
    external_directories: tuple[tuple[str, Signature], ...]
    names: tuple[str, ...]  # every name, relative to the directory it was found in
    # (a name on PATH, its programs up to the one that ran), for those that a script chose
    chosen: tuple[tuple[str, tuple[str, ...]], ...] = ()


def parse_depfile(text: str) -> list[str]:
    """The prerequisites of a make-style dependency file, unescaped, in order.

    Compilers quote as little as make needs. In a run of backslashes before a blank, half of them
    are quotes. Before ``#`` or ``:``, one of them is. Elsewhere, none is.
    """
    _, _, body = text.replace("\\\n", " ").partition(": ")
    paths: list[str] = []
    word: list[str] = []
    index = 0
    while index < len(body):
        char = body[index]
        index += 1
        if char == "\\":
            run = 1
            while body[index : index + 1] == "\\":
                index, run = index + 1, run + 1
            following = body[index : index + 1]
            if following in (" ", "\t"):
                word.append("\\" * (run // 2))
                if run % 2:
                    word.append(following)
                    index += 1
            else:
                quoting = 1 if following in ("#", ":") else 0
                word.append("\\" * (run - quoting))
        elif char == "$" and body[index : index + 1] == "$":
            word.append("$")
            index += 1
        elif char in " \t\n":
            if word:
                paths.append("".join(word))
                word = []
            if char == "\n":
                break  # phony rules (-MP) may follow; they name the same files
        else:
            word.append(char)
    if word:
        paths.append("".join(word))
    return list(dict.fromkeys(paths))


# Where compilers keep their own headers, below a toolkit's root.
_TOOLKIT_PARTS = ("nvvm", "targets", "lib/clang", "lib/llvm", "llvm", "amdgcn")


class Owners:
    """Whose a file is that a build of this plan read. A build asks that of thousands of files."""

    def __init__(self, plan: Plan) -> None:
        spec, device = plan.spec, plan.toolchain.device
        places = anchors_of(spec, plan.toolchain)
        self.authors = _author_directories(plan)
        # The compilers' own search path: headers of the system, of the device toolkit, and of the
        # wheels that complete the toolkit.
        system = plan.toolchain.include_dirs
        if device is not None:
            system += device.include_dirs
            if device.wheel_include_dirs and spec.abi != ABI_NONE:
                wheels = places["wheels"]
                system += tuple(os.path.join(wheels, path) for path in device.wheel_include_dirs)
        self.system = system
        tagged = spec.kind == PYTHON or spec.abi == ABI_TORCH  # the tag has Python's version
        represented = [places.get("torch", "")] if spec.abi != ABI_NONE else []
        represented += [places.get("python", "")] if tagged else []
        self._covered = _prefixes(represented)
        self._roots = [
            (anchor, _prefixes([path]))
            for anchor, path in (("src", spec.root), ("opkiln", PACKAGE))
        ]
        self._system = _prefixes(system)
        self._home = _prefixes([] if device is None else [device.home])
        self._authors = _prefixes([spec.root, *self.authors])
        parts = () if device is None else (f"{device.home}/{part}" for part in _TOOLKIT_PARTS)
        self._toolkit = (*self._system, *_prefixes(parts))

    def own_place(self, path: str) -> Place | None:
        """The place of an own file or directory; None for one that is external or covered."""
        plain = os.path.normpath(path) + "/"  # so that a directory is below itself
        if plain.startswith(self._covered) or self._is_systems(path, plain):
            return None
        return self.place(path)

    def place(self, path: str) -> Place:
        """The place of any file."""
        for anchor, prefix in self._roots:
            if prefix and path.startswith(prefix):
                return anchor, path[len(prefix[0]) :].rstrip("/")
        return "abs", path.rstrip("/") or path

    def covers(self, path: str) -> bool:
        """Whether the ABI tag represents a file: it is torch's or Python's."""
        return os.path.normpath(path).startswith(self._covered)

    def in_toolkit(self, path: str) -> bool:
        """Whether a file is below the root of the device compiler."""
        return os.path.normpath(path).startswith(self._home)

    def is_users(self, path: str, installations: tuple[str, ...] | None) -> bool:
        """Whether people, not a package manager, put an external file where it is.

        The headers that a compiler is installed with are not theirs: they are many, and who
        replaces one replaces all. If ``installations`` are not known, those are all on its path.
        """
        if path.startswith("/usr/local/"):
            return True
        if path.startswith(_SYSTEM):
            return False
        on_its_path = path.startswith(self._system)
        return not (on_its_path and (installations is None or path.startswith(installations)))

    def _is_systems(self, path: str, plain: str) -> bool:
        if plain.startswith(self._system):
            return True
        # nvcc reaches its headers through symbolic links. hipcc reaches those of its compiler. All
        # of them are inside the toolkit. But the toolkit's root may be /usr, which may also contain
        # the author's directories.
        if not plain.startswith(self._home) or path.startswith(self._authors):
            return False
        return plain.startswith(self._toolkit) or os.path.realpath(path).startswith(self._toolkit)


def _prefixes(directories: Iterable[str]) -> tuple[str, ...]:
    """What the paths of files below these directories start with. The root is not one of them."""
    plain = (directory.rstrip("/") for directory in directories)
    return tuple(directory + "/" for directory in plain if directory)


def _below(path: str, directory: str) -> str | None:
    prefix = directory.rstrip("/") + "/"
    return path[len(prefix) :] if len(prefix) > 1 and path.startswith(prefix) else None


def _author_directories(plan: Plan) -> list[str]:
    """Directories searched before the compiler's own path: -I and the like, and the sources'."""
    root = plan.spec.root
    inline = {source for source, _ in plan.spec.inline}
    files = (source for source in plan.spec.sources if source not in inline)
    sources = (os.path.dirname(os.path.join(root, source)) for source in files)
    includes = (os.path.join(root, path) for path in plan.spec.include_dirs)
    users = dict(plan.target.flags)
    flags = (
        *plan.spec.cxx_args, *plan.spec.device_args,
        *users.get("cppflags", ()), *users.get("cxxflags", ()), *users.get("cudaflags", ()),
    )  # fmt: skip
    searched = (*users.get("cpath", ()), *users.get("cplus_include_path", ()))
    named = (*includes, *_flagged(flags), *searched, *sources)
    return list(dict.fromkeys(os.path.abspath(path) for path in named))


def _flagged(flags: tuple[str, ...]) -> Iterator[str]:
    """The absolute directories of ``-I/dir``, ``-isystem /dir`` and the like."""
    for flag, following in zip(flags, (*flags[1:], ""), strict=False):
        option = next((each for each in _INCLUDE_FLAGS if flag.startswith(each)), None)
        if option is not None:
            path = following if flag == option else flag[len(option) :]
            if os.path.isabs(path):
                yield path


# Where a system and its packages keep their files.
_SYSTEM = ("/bin/", "/etc/", "/lib/", "/lib64/", "/opt/", "/sbin/", "/usr/")


def gather(
    plan: Plan,
    read: Iterable[str],
    hasher: Hasher,
    linked: Libraries | None = None,
    seen: Inputs | None = None,
    memory: tuple[str, ...] = (),
) -> Dependencies:
    """The dependencies of a build that read these files and linked these libraries.

    ``seen`` is what was observed; its files are among those of ``read``. ``memory`` is where the
    store keeps what it knows of compilers. Raises OSError if a file
    is gone, and Appeared if a name that was looked for in vain exists by now.
    """
    images.forget()
    paths = list(read)
    owners = Owners(plan)
    places = {path: owners.own_place(path) for path in paths}
    names = set(_included_names(plan, owners, paths))
    for path, place in places.items():
        if place is not None:
            names |= _asked_for(path)
    directories = dict.fromkeys(owners.authors)
    if linked is not None:
        paths += linked.files
        places.update((path, owners.own_place(path)) for path in linked.files)
        names.update(linked.names)
        directories.update(dict.fromkeys(linked.directories))
    more = _Observed(plan, owners, seen)
    names |= more.names
    directories.update(dict.fromkeys(more.directories))
    own: dict[Place, Dep] = {}
    external: dict[str, str] = {}
    inline = {("src", source) for source, _ in plan.spec.inline}
    for path in paths:
        place = None if path in more.system_files else places[path]
        if place is None:
            if not owners.covers(path) and path not in more.shared_libraries:
                external[path] = hasher(path)[0]
        elif place not in inline:  # its text is in the intent key, and its file is removed
            digest, signature = hasher(path)
            own[place] = Dep(*place, digest, signature)
            directories[os.path.dirname(path)] = None
    wanted = tuple(sorted(names))
    looked_for = Names(wanted)
    watches = []
    watched: dict[str, tuple[str, str, Signature]] = {}
    for directory in directories:
        there = looked_for.present(directory)
        more.require_absent(directory, there)
        watches.append(Watch(*owners.place(directory + "/"), there))
        for each in _existing(directory, looked_for.homes):
            watched[each] = (*owners.place(each + "/"), Signature.of(each))
    system = [path for path in (*owners.system, *more.system_directories) if os.path.isdir(path)]
    listings = []
    for path in dict.fromkeys(system):
        there = looked_for.present(path)
        more.require_absent(path, there)
        listings.append((path + "/", listing(there)))
    programs = {path: _program_digest(path, memory) for path in more.programs}
    chosen = () if seen is None else seen.chosen
    choices = [(PROGRAM + name, choice(paths)) for name, paths in chosen]
    listed = tuple(sorted([*external.items(), *programs.items(), *listings, *choices]))
    homes = sorted({*system, *(os.path.dirname(path) for path in external)})
    # Package managers replace files, which changes the directory. People overwrite files in place,
    # which does not. So what people put there is watched one by one: programs, files in /usr/local,
    # the libraries that the op names, and the parts of a compiler that is not the system's.
    asked = () if linked is None else linked.names
    local = sorted(
        path
        for path in external
        if os.path.basename(path) in asked
        or (owners.is_users(path, more.installations) and not owners.in_toolkit(path))
    )
    singly = dict.fromkeys((*homes, *local, *programs))
    return Dependencies(
        own=tuple(own[place] for place in sorted(own)),
        external=key("external", listed),
        external_files=listed,
        watches=tuple(watches),
        directories=tuple(watched.values()),
        external_directories=tuple((path, Signature.of(path)) for path in singly),
        names=wanted,
        chosen=chosen,
    )


_programs: dict[str, tuple[str, Signature]] = {}  # digests of compilers' programs, by path


def _program_digest(path: str, memory: tuple[str, ...]) -> str:
    """The digest of a program that a step started. Every step of a build starts the same ones, of
    a hundred megabytes together: each is hashed once, and remembered as long as its signature
    holds. Raises OSError."""
    known = _programs.get(path)
    if known is None or not known[1].holds(path):
        subject, signature = f"program {path}", Signature.of(path)
        record = probing.recall(memory, subject)
        if record is None:
            record = {"sha256": sha256_file(path)}
            probing.remember(memory, subject, record, [path], asked_at=signature.read_at)
        known = _programs[path] = (record["sha256"], signature)
    return known[0]


class _Observed:
    """What was observed beyond the dependency files, sorted by whose it is."""

    def __init__(self, plan: Plan, owners: Owners, seen: Inputs | None) -> None:
        self.installations = None if seen is None else tuple(_installations(seen.programs))
        seen = Inputs() if seen is None else seen
        self._authors = _prefixes([plan.spec.root, *owners.authors])
        self._systems = (*_SYSTEM, *(self.installations or ()))
        self._compilers = _compilers(plan)
        self.system_files = {path for path in seen.files if self._is_systems(path)}
        # The dynamic linker finds them again where the result runs.
        self.shared_libraries = {path for path in self.system_files if _is_shared_library(path)}
        self.programs = seen.programs
        self.names: set[str] = set()
        self.directories: list[str] = []  # where names were looked for: the author's
        self.system_directories: list[str] = []
        self._absent: dict[str, frozenset[str]] = {}
        for directory, absent in seen.absent:
            if owners.covers(directory):
                continue
            if plan.spec.inline and _below(directory + "/", plan.spec.root) is not None:
                continue  # a directory that only this build has
            self._absent[directory] = frozenset(absent)
            self.names.update(name.rstrip("/") for name in absent)
            systems = self._is_systems(directory) or owners.own_place(directory + "/") is None
            (self.system_directories if systems else self.directories).append(directory)

    def require_absent(self, directory: str, there: tuple[str, ...]) -> None:
        """Compare what exists below a directory with what was looked for there in vain. It must be
        the list that is recorded: a name that appeared since would be taken for one that was read.
        Raises Appeared."""
        absent = self._absent.get(directory, frozenset())
        for name in there:
            plain = name.rstrip("/")
            if plain in absent or (plain + "/" in absent and name == plain):
                raise Appeared(os.path.join(directory, name))

    def _is_systems(self, path: str) -> bool:
        if path == "/" or path in self._compilers:
            return True
        plain = os.path.normpath(path) + "/"
        return plain.startswith(self._systems) and not plain.startswith(self._authors)


def _compilers(plan: Plan) -> set[str]:
    device = plan.toolchain.device
    return {plan.toolchain.cxx, "" if device is None else device.path}


def _installations(programs: Iterable[str]) -> set[str]:
    """The prefixes that programs are installed below: a compiler in a user's directory brings its
    own headers, libraries and start files, as those of the system do."""
    found = set()
    for program in programs:
        parts = program.split("/")
        places = [index for index, part in enumerate(parts) if part in _PARTS]
        prefix = "/".join(parts[: places[0]]) if places else ""
        if prefix and any(os.path.isdir(f"{prefix}/{part}") for part in ("lib", "lib64")):
            found.add(prefix + "/")
    return found - {os.path.expanduser("~") + "/"}


_PARTS = ("bin", "lib", "lib64", "libexec")  # of an installation


def _is_shared_library(path: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(18)
    return head[:4] == b"\x7fELF" and head[16:18] in (b"\x03\0", b"\0\x03")  # ET_DYN


def _asked_for(path: str) -> set[str]:
    """The names that a file tests with ``__has_include``: a missing one may appear later."""
    import re

    text = read_file(path, LARGEST)
    asked = re.findall(rb"__has_include(?:_next)?\s*\(\s*[<\"]([^>\"\n]+)", text)
    return {os.fsdecode(name) for name in asked}


def _included_names(plan: Plan, owners: Owners, paths: list[str]) -> Iterator[str]:
    """Each file under the names that an ``#include`` may use: relative to a search directory."""
    places = anchors_of(plan.spec, plan.toolchain)
    search = [*owners.authors, *owners.system]
    for anchor, more in (("torch", "include"), ("torch", "include/torch/csrc/api/include")):
        if anchor in places:
            search.append(os.path.join(places[anchor], more))
    for path in paths:
        found = [r for directory in search if (r := _below(path, directory)) is not None]
        yield from found or [os.path.basename(path)]


def _existing(directory: str, homes: Iterable[str]) -> list[str]:
    """The directory, and those below it where a new file could shadow an included name. ``homes``
    are the directories of the names.

    If the directory does not exist, its nearest ancestor: that changes when the directory is made.
    """
    if not os.path.isdir(directory):
        while not os.path.isdir(directory):
            directory = os.path.dirname(directory)
        return [directory]
    found = {directory}
    for home in homes:
        step = directory
        for part in home.split("/") if home else ():
            step = os.path.join(step, part)
            if not os.path.isdir(step):
                break
            found.add(step)
    return sorted(found)


def own_digests(plan: Plan, dependencies: Dependencies) -> dict[str, str]:
    """The author's files by path, with their digests."""
    places = anchors_of(plan.spec, plan.toolchain)
    return {os.path.join(places[dep.anchor], dep.path): dep.sha256 for dep in dependencies.own}


def key_of(dependencies: Dependencies) -> str:
    """The deps_key of a build that has just ended."""
    return deps_key((dep[:3] for dep in dependencies.own), dependencies.external,
                    dependencies.watches)  # fmt: skip


def to_manifest(dependencies: Dependencies) -> dict[str, Any]:
    """The dependencies as a manifest records them for a hit."""
    chosen = [[name, list(paths)] for name, paths in dependencies.chosen]
    return {
        "own": [[*dep[:3], *dep.signature] for dep in dependencies.own],
        "external": dependencies.external,
        "watches": [list(watch) for watch in dependencies.watches],
        "dirs": [[anchor, path, *sig] for anchor, path, sig in dependencies.directories],
        "external_dirs": [[path, *sig] for path, sig in dependencies.external_directories],
        **({"chosen": chosen} if chosen else {}),
    }
