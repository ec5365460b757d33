"""Making a store smaller, while others read it and write to it.

An entry is taken away by renaming it into ``staging/`` and deleting it there: a reader finds it
whole or not at all, and what a killed collector leaves is swept by the next one. What turns out to
be in use after all is renamed back.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from typing import NamedTuple

from opkiln.settings import settings
from opkiln.store import publish
from opkiln.store.inventory import (
    LEVELS,
    OBJECT,
    OP,
    Entry,
    cannot,
    details,
    directories,
    entries,
    names_in,
)

GRACE = 24 * 3600.0  # seconds that an entry is left alone for another host that may have mapped it
_LEFTOVER = 3600.0  # seconds after which a staging directory has no owner any more
_RECORDS = 30 * 24 * 3600.0  # seconds that the logs of failed builds are kept

_SCRATCH = re.compile(r"opkiln-.+-[a-z0-9_]{8}\Z")  # as publish.make_scratch names them


class Collected(NamedTuple):
    """What `collect` did."""

    removed: tuple[Entry, ...]
    swept: tuple[str, ...]  # leftovers of processes that died
    before: int
    after: int
    limit: int
    in_use: int  # entries kept because a process here has them mapped
    recent: int  # entries kept because they are within the grace period

    @property
    def freed(self) -> int:
        return self.before - self.after


def discard(root: str, found: Entry) -> None:
    """Take one entry away, whole. One that is gone already is fine. Raises StoreError."""
    try:
        publish.discard(root, found.directory)
    except OSError as error:
        raise cannot("removed", found.directory, error) from error


def collect(root: str, limit: int, *, now: bool = False) -> Collected:
    """Shrink a store to ``limit`` bytes of entries, the longest unused first.

    Never removes an entry that a process on this host has mapped, nor, unless ``now``, one that was
    published or read within the grace period: another host may have it mapped. Leftovers of dead
    processes are swept. Raises StoreError where something cannot be removed.
    """
    clock = time.time()
    swept = [*_sweep_store(root, clock), *_sweep_scratch(clock)]
    found = sorted(entries(root), key=lambda each: each.used)
    before = left = sum(each.size for each in found)
    removed: list[Entry] = []
    recent = in_use = 0
    candidates = iter(found)
    while left > limit:
        running, aside = processes(), []
        for each in candidates:
            if not now and each.used > clock - GRACE:
                recent += 1
            elif running.uses(each):
                in_use += 1
            elif (trash := _set_aside(root, each)) is not None:
                aside.append((each, trash))
                left -= each.size
                if left <= limit:
                    break
        kept = _remove_unused(aside)
        removed += [each for each, _ in aside if each not in kept]
        in_use += len(kept)
        left += sum(each.size for each in kept)
        if not kept:
            break
    _sweep_receipts(root)
    _prune(root)
    return Collected(tuple(removed), tuple(swept), before, left, limit, in_use, recent)


def _set_aside(root: str, found: Entry) -> str | None:
    try:
        return publish.set_aside(root, found.directory)
    except OSError as error:
        raise cannot("removed", found.directory, error) from error


def _remove_unused(aside: list[tuple[Entry, str]]) -> set[Entry]:
    """Remove what was set aside, but for what is in use; that is put back, and returned.

    Somebody may have opened an entry after the look at who uses what, and before it was set aside.
    Nobody can open it any more, so this second look is the last word.
    """
    running = processes() if aside else None
    kept = set()
    for each, trash in aside:
        moved = os.path.join(trash, os.path.basename(each.payload)) if each.payload else ""
        if running is not None and running.uses(each._replace(payload=moved)):
            try:
                publish.put_back(trash, each.directory)
            except OSError as error:
                raise cannot("put back", each.directory, error) from error
            kept.add(each)
        else:
            publish.remove(trash)
    return kept


def clear(root: str, op: str | None = None) -> list[Entry]:
    """Remove everything, or an op's entries and objects. Running processes keep what they have
    open; a build that is under way publishes what it makes. Raises StoreError."""
    found = list(entries(root))
    if op is not None:
        ours = [each for each in found if each.kind == OP and each.name == op]
        sources = {source for each in ours for source in details(each).sources}
        objects = [each for each in found if each.kind == OBJECT]
        found = [*ours, *(each for each in objects if details(each).source in sources)]
    for each in found:
        discard(root, each)
    if op is None:
        for top in ("toolchains", "logs", "failures"):
            publish.remove(os.path.join(root, top))
        _sweep_store(root, time.time())
    _sweep_receipts(root)
    _prune(root)
    return found


class Processes(NamedTuple):
    """What the readable processes of this host hold."""

    paths: frozenset[str]  # mapped files, working directories
    files: frozenset[tuple[int, str]]  # (inode, name) of mapped files

    def uses(self, found: Entry) -> bool:
        """Whether one of them has the entry's payload mapped.

        By path, and by inode and name: another mount of the same directory (a container's) has
        other paths, an overlay file system has other inodes.
        """
        if not found.payload:
            return False
        try:
            inode = os.stat(found.payload).st_ino
        except OSError:
            return False
        return (
            os.path.realpath(found.payload) in self.paths
            or (inode, os.path.basename(found.payload)) in self.files
        )

    def below(self, directory: str) -> bool:
        """Whether one of them works in a directory, or has something below it mapped."""
        real = os.path.realpath(directory)
        return any(path == real or path.startswith(real + "/") for path in self.paths)


def processes() -> Processes:
    """Look at every process that may be looked at: this user's, or all of them as root."""
    paths: set[str] = set()
    files: set[tuple[int, str]] = set()
    for name in names_in("/proc"):
        if not name.isdigit():
            continue
        try:
            paths.add(os.readlink(f"/proc/{name}/cwd"))
            with open(f"/proc/{name}/maps", encoding="utf-8", errors="surrogateescape") as maps:
                for line in maps:
                    # address, permissions, offset, device, inode, path (which may hold blanks)
                    fields = line.rstrip("\n").split(None, 5)
                    if len(fields) == 6 and fields[5].startswith("/"):
                        paths.add(fields[5])
                        files.add((int(fields[4]), os.path.basename(fields[5])))
        except OSError:
            continue  # it ended, or it is somebody else's
    return Processes(frozenset(paths), frozenset(files))


def _sweep_store(root: str, clock: float) -> list[str]:
    """Staging directories of publishers that died, and old records of failures."""
    swept = []
    limits = {"staging": _LEFTOVER, "logs": _RECORDS, "failures": _RECORDS}
    for top, age in limits.items():
        for name in names_in(os.path.join(root, top)):
            path = os.path.join(root, top, name)
            if _modified(path, clock) < clock - age:
                _remove(path)
                swept.append(path)
    # Renamed once they are written; what is old and has its first name has no writer any more.
    for top, depth in (("toolchains", 1), ("failures", 1), ("logs", 1), ("receipts", 3)):
        for path in directories(os.path.join(root, top), depth):
            final = path.endswith((".json", ".log"))
            if not final and _modified(path, clock) < clock - _LEFTOVER:
                _remove(path)
                swept.append(path)
    return swept


def _sweep_receipts(root: str) -> None:
    """Receipts for entries that are gone: nobody believes them, and nobody else removes them."""
    for path in directories(os.path.join(root, "receipts"), 3):
        try:
            with open(path, "rb") as file:
                payload = json.loads(file.read())["payload"]
            if os.path.exists(os.path.join(root, payload)):
                continue
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # damaged, or just being written: then its writer does without
        _remove(path)


def _sweep_scratch(clock: float) -> list[str]:
    """Build directories whose process died together with its watchdog (a reboot, a container)."""
    # No step runs longer than the build timeout, and each one writes: twice that is no live build.
    age = max(_LEFTOVER, 2 * settings.build_timeout)
    base = publish.scratch_root()
    old = []
    for name in names_in(base):
        path = os.path.join(base, name)
        if _SCRATCH.match(name) and _is_ours(path) and _modified(path, clock) < clock - age:
            old.append(path)
    if not old:
        return []
    # A library that no store could take is loaded from such a directory, for as long as it likes.
    running = processes()
    swept = [path for path in old if not running.below(path)]
    for path in swept:
        _remove(path)
    return swept


def _is_ours(path: str) -> bool:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    private = stat.S_IMODE(found.st_mode) == 0o700
    return stat.S_ISDIR(found.st_mode) and private and found.st_uid == os.getuid()


def _modified(path: str, clock: float) -> float:
    """When a file, a directory or something directly in it was last changed; now if it is gone."""
    try:
        newest = os.lstat(path).st_mtime
        if os.path.isdir(path) and not os.path.islink(path):
            for file in os.scandir(path):
                newest = max(newest, file.stat(follow_symlinks=False).st_mtime)
    except FileNotFoundError:
        return clock
    return newest


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        publish.remove(path)
        return
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot("removed", path, error) from error


def _prune(root: str) -> None:
    """Remove the directories that removed entries left empty."""
    for _, top, depth in LEVELS:
        for level in range(depth - 1, 0, -1):
            for directory in directories(os.path.join(root, top), level):
                try:
                    if not os.listdir(directory):
                        os.rmdir(directory)
                except OSError:
                    continue  # something was published there just now
