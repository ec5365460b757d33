"""What a compile read, as a list that proves itself by re-hashing.

Files fall into three kinds:
- *own*: below the source root or an include directory of the author's. Checked on every hit.
- *external*: the compiler's and the system's headers. Checked on a hit wherever a compiler is
  present; a slim image that has neither compiler nor headers cannot and need not.
- *covered*: torch's and Python's headers, which the ABI tag stands for.

A new header that *shadows* one of these on the include path is in no dependency file. So the list
also says which of the names that were included exist below each of the author's directories.

Checking costs a ``stat`` per own file and per directory. Where a signature does not hold, contents
decide: a checkout with other timestamps is still a hit, and an edit under an old timestamp is not.
"""

from __future__ import annotations

import os
from typing import Any

from opkiln.digest import Signature, key, sha256_file
from opkiln.model import ABI_NONE, Plan
from opkiln.plan import anchors_of
from opkiln.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Place = tuple[str, str]  # (anchor, path below it)


class Dep(Record):
    """An own file: where it is, what was in it, and the signature it had."""

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


def parse_depfile(text: str) -> list[str]:
    """The prerequisites of a make-style dependency file, unescaped, in order."""
    _, _, body = text.replace("\\\n", " ").partition(": ")
    paths: list[str] = []
    word: list[str] = []
    index = 0
    while index < len(body):
        char = body[index]
        following = body[index + 1 : index + 2]
        if char == "\\" and following and following in " \\#:[]":
            word.append(following)
            index += 2
        elif char == "$" and following == "$":
            word.append("$")
            index += 2
        elif char in " \t\n":
            if word:
                paths.append("".join(word))
                word = []
            if char == "\n":
                break  # -MP style phony rules may follow; they name the same files
            index += 1
        else:
            word.append(char)
            index += 1
    if word:
        paths.append("".join(word))
    return list(dict.fromkeys(paths))


class Hasher:
    """File digests for the length of one operation, each file read once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Signature]] = {}

    def __call__(self, path: str) -> tuple[str, Signature]:
        """(sha256, signature from just before the read). Raises OSError."""
        known = self._known.get(path)
        if known is None:
            signature = Signature.of(path)
            known = self._known[path] = (sha256_file(path), signature)
        return known


def own_place(plan: Plan, path: str) -> Place | None:
    """Where an own file is, by anchor; None for one that is external or covered."""
    places = anchors_of(plan.spec, plan.toolchain)
    if plan.spec.abi != ABI_NONE and _below(path, places.get("torch", "")) is not None:
        return None
    if _below(path, places.get("python", "")) is not None:
        return None
    if any(_below(path, directory) is not None for directory in plan.toolchain.include_dirs):
        return None
    relative = _below(path, plan.spec.root)
    if relative is not None:
        return "src", relative
    for directory in _author_directories(plan):
        if _below(path, directory) is not None:
            return "abs", path
    return None


def _covered(plan: Plan, path: str) -> bool:
    places = anchors_of(plan.spec, plan.toolchain)
    torch = plan.spec.abi != ABI_NONE and _below(path, places.get("torch", "")) is not None
    return torch or _below(path, places.get("python", "")) is not None


def _below(path: str, directory: str) -> str | None:
    prefix = directory.rstrip("/") + "/"
    return path[len(prefix) :] if len(prefix) > 1 and path.startswith(prefix) else None


def _author_directories(plan: Plan) -> list[str]:
    """Where the author's own includes are looked for: the -I directories, then the sources'."""
    root = plan.spec.root
    inline = {source for source, _ in plan.spec.inline}
    files = (source for source in plan.spec.sources if source not in inline)
    sources = (os.path.dirname(os.path.join(root, source)) for source in files)
    includes = (os.path.join(root, path) for path in plan.spec.include_dirs)
    flagged = (arg[2:] for arg in plan.spec.cxx_args if arg.startswith("-I/"))
    return list(dict.fromkeys(os.path.abspath(path) for path in (*includes, *flagged, *sources)))


def gather(plan: Plan, read: Iterable[str], hasher: Hasher) -> Dependencies:
    """The dependencies of a build that read these files. Raises OSError if one is gone."""
    own: dict[Place, Dep] = {}
    external: dict[str, str] = {}
    paths = [os.path.abspath(path) for path in read]
    inline = {("src", source) for source, _ in plan.spec.inline}
    for path in paths:
        place = own_place(plan, path)
        if place in inline:
            continue  # its text is part of the intent, and its file is gone after the build
        if place is not None:
            digest, signature = hasher(path)
            own[place] = Dep(*place, digest, signature)
        elif not _covered(plan, path):
            external[path] = hasher(path)[0]
    names = _included_names(plan, paths)
    directories = dict.fromkeys(_author_directories(plan))
    own_paths = (path for path in paths if (own_place(plan, path) or None) not in {None, *inline})
    directories.update(dict.fromkeys(os.path.dirname(path) for path in own_paths))
    watches, watched = [], {}
    for directory in directories:
        place = own_place(plan, os.path.join(directory, "x")) or ("abs", directory + "/x")
        anchor, path = place[0], os.path.dirname(place[1])
        watches.append(Watch(anchor, path, present(directory, names)))
        for each in _existing(directory, names):
            relative = os.path.relpath(each, directory)
            watched[each] = (
                anchor,
                path if relative == "." else os.path.join(path, relative),
                Signature.of(each),
            )
    listed = tuple(sorted(external.items()))
    homes = sorted({os.path.dirname(path) for path in external})
    return Dependencies(
        own=tuple(own[place] for place in sorted(own)),
        external=key("external", listed),
        external_files=listed,
        watches=tuple(watches),
        directories=tuple(watched.values()),
        external_directories=tuple((home, Signature.of(home)) for home in homes),
        names=names,
    )


def _included_names(plan: Plan, paths: list[str]) -> tuple[str, ...]:
    """Each file as an ``#include`` may have named it: relative to its search directories."""
    places = anchors_of(plan.spec, plan.toolchain)
    search = [*_author_directories(plan), *plan.toolchain.include_dirs]
    for anchor, more in (("torch", "include"), ("torch", "include/torch/csrc/api/include")):
        if anchor in places:
            search.append(os.path.join(places[anchor], more))
    names = set()
    for path in paths:
        found = [r for directory in search if (r := _below(path, directory)) is not None]
        names.update(found or [os.path.basename(path)])
    return tuple(sorted(names))


def present(directory: str, names: Iterable[str]) -> tuple[str, ...]:
    """Which of these relative names exist below a directory."""
    try:
        here = set(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(
        name
        for name in names
        if name.partition("/")[0] in here
        and ("/" not in name or os.path.lexists(os.path.join(directory, name)))
    )


def _existing(directory: str, names: Iterable[str]) -> list[str]:
    """The directory and those below it where a new file could shadow an included name."""
    if not os.path.isdir(directory):
        return []
    homes = {os.path.dirname(name) for name in names}
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


def deps_key(
    own: Iterable[tuple[str, str, str]], external: str, watches: Iterable[tuple[Any, ...]]
) -> str:
    """The name that a list of dependencies gives."""
    return key("deps", (tuple(own), external, tuple(watches)))


def key_of(dependencies: Dependencies) -> str:
    """The deps_key of a build that just ended."""
    return deps_key((dep[:3] for dep in dependencies.own), dependencies.external,
                    dependencies.watches)  # fmt: skip


def recheck(
    recorded: Mapping[str, Any],
    places: Mapping[str, str],
    hasher: Hasher,
    sidecar: Callable[[], Mapping[str, Any]],
    *,
    external: bool,
) -> tuple[str, list[str]]:
    """(the deps_key of the files as they are now, what changed). Raises OSError, KeyError.

    ``recorded`` is a manifest's ``deps``; ``sidecar`` reads the long lists, which only a directory
    that was touched makes necessary. ``external`` says whether to look at the system's headers.
    """
    changed: list[str] = []
    own = []
    for anchor, path, digest, *fields in recorded["own"]:
        full = os.path.join(places[anchor], path)
        now = digest
        try:
            if not Signature(*fields).holds(full):
                now = hasher(full)[0]
        except FileNotFoundError:
            now = "gone"
        if now != digest:
            changed.append(f"{path} is gone" if now == "gone" else f"{path} changed")
        own.append((anchor, path, now))
    watches = tuple((anchor, path, tuple(names)) for anchor, path, names in recorded["watches"])
    if not all(_holds(os.path.join(places[a], p), fields) for a, p, *fields in recorded["dirs"]):
        names = sidecar()["names"]
        now_watches = tuple(
            (anchor, path, present(os.path.join(places[anchor], path), names))
            for anchor, path, _ in watches
        )
        for (_, path, before), (_, _, after) in zip(watches, now_watches, strict=True):
            changed += [
                f"{path}/{name} is new on the include path" for name in set(after) - set(before)
            ]
        watches = now_watches
    digest = recorded["external"]
    if external and not all(_holds(path, fields) for path, *fields in recorded["external_dirs"]):
        files = tuple((path, _digest_or_gone(path, hasher)) for path, _ in sidecar()["external"])
        if (now := key("external", files)) != digest:
            before_files = dict(sidecar()["external"])
            changed += [f"{path} changed" for path, sha in files if before_files[path] != sha]
            digest = now
    return deps_key(own, digest, watches), changed


def _digest_or_gone(path: str, hasher: Hasher) -> str:
    try:
        return hasher(path)[0]
    except FileNotFoundError:
        return "gone"


def _holds(path: str, fields: Iterable[int]) -> bool:
    try:
        return Signature(*fields).holds(path)
    except FileNotFoundError:
        return False


def to_manifest(dependencies: Dependencies) -> dict[str, Any]:
    """The part of a manifest that a hit reads."""
    return {
        "own": [[*dep[:3], *dep.signature] for dep in dependencies.own],
        "external": dependencies.external,
        "watches": [list(watch) for watch in dependencies.watches],
        "dirs": [[anchor, path, *sig] for anchor, path, sig in dependencies.directories],
        "external_dirs": [[path, *sig] for path, sig in dependencies.external_directories],
    }
