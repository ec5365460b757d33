"""Checks whether the files that an entry was built from are unchanged on disk.

The check costs a ``stat`` per own file and per directory. If a signature does not match, the
contents decide. So a checkout with other timestamps is still a hit, and an edit under an old
timestamp is not. Entries shipped to another machine have no signatures (``bundles.layer``), so the
contents decide there too.
"""

from __future__ import annotations

import os
import stat
from itertools import islice
from typing import Any

from opkiln import evidence
from opkiln.digest import Signature, key, sha256_file
from opkiln.model import OUTSIDE
from opkiln.settings import on_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class Hasher:
    """File digests for the length of one operation. Reads each file once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Signature]] = {}

    def __call__(self, path: str) -> tuple[str, Signature]:
        """(SHA-256, signature taken just before the read). Raises OSError."""
        known = self._known.get(path)
        if known is None:
            signature = Signature.of(path)
            known = self._known[path] = (sha256_file(path), signature)
        return known


class Names:
    """Relative names to look for below many directories."""

    def __init__(self, names: Iterable[str]) -> None:
        self._all = tuple(names)
        # By their first part: a directory's listing tells which of them can exist there.
        self._by_first: dict[str, list[int]] = {}
        for index, name in enumerate(self._all):
            self._by_first.setdefault(name.partition("/")[0], []).append(index)
        self.homes = frozenset(map(os.path.dirname, self._all))

    def present(self, directory: str) -> tuple[str, ...]:
        """Which of the names exist below a directory; one of a directory ends with a slash.

        What a compiler can open counts: not a link that leads nowhere, and a directory is not a
        header.
        """
        try:
            with os.scandir(directory) as entries:
                here = {entry.name: entry for entry in entries if entry.name in self._by_first}
            possible = sorted(index for first in (*here, "..") for index in
                              self._by_first.get(first, ()))  # fmt: skip
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except PermissionError:
            # It cannot be listed, but a compiler may still open files in it.
            here, possible = {}, list(range(len(self._all)))
        found = []
        for index in possible:
            name = self._all[index]
            entry = here.get(name)
            if entry is not None and not entry.is_symlink():
                is_directory = entry.is_dir()
            else:
                try:
                    is_directory = stat.S_ISDIR(os.stat(os.path.join(directory, name)).st_mode)
                except OSError:
                    continue
            found.append(name + "/" if is_directory else name)
        return tuple(found)


def listing(there: tuple[str, ...]) -> str:
    """The digest of what ``Names.present`` gives."""
    return key("listing", there)


# In a list of files: what PATH leads to, by a program's name.
PROGRAM = "PATH:"


def choice(paths: Iterable[str]) -> str:
    """The digest of the programs that a name leads to."""
    return key("choice", tuple(paths))


def deps_key(
    own: Iterable[tuple[str, str, str]], external: str, watches: Iterable[tuple[Any, ...]]
) -> str:
    """The key of a list of dependencies."""
    return key("deps", (tuple(own), external, tuple(watches)))


def recheck(
    recorded: Mapping[str, Any],
    places: Mapping[str, str],
    hasher: Hasher,
    sidecar: Callable[[], Mapping[str, Any]],
    *,
    external: bool,
) -> tuple[str, list[str]]:
    """(deps_key of the files as they are now, list of changes). Raises OSError, KeyError.

    ``recorded`` is a manifest's ``deps``. ``sidecar`` reads the long lists. It is called only if a
    directory was touched. ``external`` says whether to check the system's headers.
    """
    changed: list[str] = []
    own = []
    evidence.start_entry()
    for anchor, path, digest, *fields in recorded["own"]:
        full = os.path.join(places[anchor], path)
        now, signature = digest, fields
        try:
            if not Signature(*fields).holds(full):
                now, signature = hasher(full)
            evidence.entry_file(full, signature, now)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            if anchor != OUTSIDE and not isinstance(error, FileNotFoundError):
                raise
            now = digest if anchor == OUTSIDE else "gone"
        if now != digest:
            changed.append(f"{path} is gone" if now == "gone" else f"{path} changed")
        own.append((anchor, path, now))
    watches = tuple((anchor, path, tuple(names)) for anchor, path, names in recorded["watches"])
    directories = [(os.path.join(places[a], p), fields) for a, p, *fields in recorded["dirs"]]
    held = all(_holds(path, fields) for path, fields in directories)
    for path, fields in directories:
        evidence.directory(path, fields if held else None)
    if not held:
        looked_for = Names(sidecar()["names"])
        now_watches = tuple(
            (anchor, path, looked_for.present(os.path.join(places[anchor], path)))
            for anchor, path, _ in watches
        )
        for (_, path, before), (_, _, after) in zip(watches, now_watches, strict=True):
            changed += [
                f"{path}/{name} is new on the include path"
                for name in sorted(set(after) - set(before))
            ]
        watches = now_watches
    for anchor, path, names in watches:
        evidence.watch(os.path.join(places[anchor], path), names)
    digest = recorded["external"]
    if external:
        digest, more = _recheck_external(recorded, hasher, sidecar)
        changed += more
    return deps_key(own, digest, watches), changed


def _recheck_external(
    recorded: Mapping[str, Any], hasher: Hasher, sidecar: Callable[[], Mapping[str, Any]]
) -> tuple[str, list[str]]:
    """(digest of the system's files as they are now, list of changes)."""
    looked_at = recorded["external_dirs"]
    touched = {path for path, *fields in looked_at if not _holds(path, fields)}
    for path, *fields in looked_at:
        evidence.entry_file(path, None if path in touched else fields)
    chosen = dict(recorded.get("chosen", ()))
    now_chosen = {name: _on_path(name, paths) for name, paths in chosen.items()}
    for name, paths in chosen.items():
        evidence.entry_program(name, paths)
    if not touched and now_chosen == chosen:
        return recorded["external"], []
    lists = sidecar()
    signed = {path for path, *_ in looked_at}
    looked_for = Names(lists["names"])
    files = tuple(
        (path, choice(now_chosen[path.removeprefix(PROGRAM)]))
        if path.startswith(PROGRAM)
        else (path, _now(path, sha, looked_for, touched, signed, hasher))
        for path, sha in lists["external"]
    )
    before = (sha for _, sha in lists["external"])
    changed = [path for (path, now), sha in zip(files, before, strict=True) if now != sha]
    return key("external", files), [f"{path} changed" for path in changed]


def _on_path(name: str, before: list[str]) -> list[str]:
    """The programs that are on PATH now in the place of these."""
    return list(islice(on_path(name), len(before)))


def _now(
    path: str, then: str, names: Names, touched: set[str], signed: set[str], hasher: Hasher
) -> str:
    """The digest of an external file, or of which names exist below a directory (``a/``).

    A file is hashed if its own signature has changed; if it has none, if that of its directory has.
    """
    if path.endswith("/"):
        return listing(names.present(path))
    watched = path if path in signed else os.path.dirname(path)
    return _digest_or_gone(path, hasher) if watched in touched else then


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
