"""Garbage collection: make a store smaller while other processes read it and write to it.

An entry is removed by renaming it into ``staging/`` and deleting it there. So a reader finds the
whole entry or nothing. If a collector is killed, the next one removes what it left. An entry that
turns out to be in use is renamed back.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from opkiln.base.digest import is_temporary, read_file
from opkiln.settings import settings
from opkiln.store import inventory, publish
from opkiln.store.inventory import StoreEntry

GRACE = 24 * 3600.0  # seconds that an entry is kept, since another host may have it mapped
_LEFTOVER = 3600.0  # seconds after which a staging directory counts as abandoned
_RECORDS = 30 * 24 * 3600.0  # seconds that the logs of failed builds are kept
# (directory of the store, depth of the files in it, seconds that they are kept)
_SWEPT = (
    ("staging", 1, _LEFTOVER), ("logs", 1, _RECORDS), ("failures", 1, _RECORDS),
    ("toolchains", 1, None), ("receipts", 3, None), ("tuned", 3, None),
)  # fmt: skip

_AT_ONCE = 20_000  # the most entries to choose for removal before the store is scanned again

# The names that publish.make_scratch gives, and no others: programs that use opkiln also call their
# temporary directories "opkiln-…", and mkdtemp adds eight characters.
_SCRATCH = re.compile(r"opkiln-.+-[0-9a-f]{16}\Z")


class Collected(NamedTuple):
    """The result of `collect`."""

    removed: tuple[StoreEntry, ...]
    swept: tuple[str, ...]  # leftovers of processes that died
    before: int
    after: int
    limit: int
    in_use: int  # entries kept because a process on this host has them mapped
    recent: int  # entries kept because they are within the grace period

    @property
    def freed(self) -> int:
        return self.before - self.after


def discard(root: str, found: StoreEntry) -> None:
    """Remove one whole entry. It may be gone already. Raises StoreError."""
    with inventory.report_errors("removed", found.directory):
        publish.discard(root, found.directory)


def collect(
    root: str, limit: int, *, now: bool = False, tell: Callable[[str], None] | None = None
) -> Collected:
    """Shrink a store to ``limit`` bytes of entries, and remove leftovers of dead processes. The
    entries that were unused longest go first.

    An entry that a process on this host has mapped stays. Unless ``now`` is set, so does one that
    was published or read within the grace period: another host may have it mapped. ``tell`` is
    called for each entry with "looked at" or "removed". Raises StoreError if something cannot be
    removed.
    """
    clock = time.time()
    swept = [*_sweep_store(root, clock), *_sweep_scratch(clock)]
    since = math.inf if now else clock - GRACE
    removed: list[StoreEntry] = []
    spared: set[str] = set()
    before = left = 0
    while True:
        total, recent, oldest = _survey(root, since, spared, tell)
        if not removed and not spared:
            before = left = total
        if left <= limit or not oldest:
            break
        for each in _take(root, oldest, left - limit, spared):
            removed.append(each)
            left -= each.size
            if tell is not None:
                tell("removed")
        if left <= limit:
            break
    _sweep_receipts(root)
    _prune(root)
    kept = (len(spared), recent if left > limit else 0)
    return Collected(tuple(removed), tuple(swept), before, left, limit, *kept)


def _survey(
    root: str, since: float, spared: set[str], tell: Callable[[str], None] | None
) -> tuple[int, int, list[StoreEntry]]:
    """(bytes of all entries, how many were used after ``since``, the longest unused of the others).
    The list is limited: a store may have more entries than fit into memory."""
    total = recent = 0

    def eligible() -> Iterator[StoreEntry]:
        nonlocal total, recent
        for each in inventory.entries(root):
            total += each.size
            if tell is not None:
                tell("looked at")
            if each.used > since:
                recent += 1
            elif each.directory not in spared:
                yield each

    oldest = heapq.nsmallest(_AT_ONCE, eligible(), key=lambda each: each.used)
    return total, recent, oldest


def _take(
    root: str, oldest: list[StoreEntry], excess: int, spared: set[str]
) -> Iterator[StoreEntry]:
    """Remove entries until ``excess`` bytes are gone. Yields each removed entry. Adds those that
    are in use to ``spared``.

    Between the check and setting it aside, a process may open an entry. Once it is set aside,
    nobody can open it. So a second check is final, and an entry that is in use is put back.
    """
    running = processes()
    aside: list[tuple[StoreEntry, str]] = []
    for each in oldest:
        if running.uses(each):
            spared.add(each.directory)
            continue
        with inventory.report_errors("removed", each.directory):
            trash = publish.set_aside(root, each.directory)
        if trash is not None:
            aside.append((each, trash))
            excess -= each.size
            if excess <= 0:
                break
    running = processes()
    for each, trash in aside:
        moved = os.path.join(trash, os.path.basename(each.payload)) if each.payload else ""
        if running.uses(each._replace(payload=moved)):
            with inventory.report_errors("put back", each.directory):
                publish.put_back(trash, each.directory)
            spared.add(each.directory)
        else:
            publish.remove(trash)
            yield each


def clear(root: str, chosen: Callable[[StoreEntry], bool] | None = None) -> list[StoreEntry]:
    """Remove everything, or only the ops' entries that are ``chosen`` and their objects. Running
    processes keep what they have open. A running build still publishes its result. Raises
    StoreError."""
    found = list(inventory.entries(root))
    if chosen is not None:
        ours = [each for each in found if each.kind == inventory.OP and chosen(each)]
        sources = {source for each in ours for source in inventory.details(each).sources}
        objects = [each for each in found if each.kind == inventory.OBJECT]
        found = [*ours, *(each for each in objects if inventory.details(each).source in sources)]
    for each in found:
        discard(root, each)
    if chosen is None:
        for top in ("toolchains", "logs", "failures"):
            publish.remove(os.path.join(root, top))
        _sweep_store(root, time.time())
    _sweep_receipts(root)
    _prune(root)
    return found


class Processes(NamedTuple):
    """The files that the processes of this host use, as far as we may read that."""

    paths: frozenset[str]  # mapped and open files, working directories
    files: frozenset[tuple[int, str]]  # (inode, name) of mapped and open files

    def uses(self, found: StoreEntry) -> bool:
        """Whether a process has the entry's payload mapped, or is about to map it. Compares the
        path, and also the inode and name. The path differs in another mount of the same directory
        (a container's). The inode differs on an overlay file system."""
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

    def runs_below(self, directory: str) -> bool:
        """Whether a process has its working directory or a mapped file at or below a directory."""
        real = os.path.realpath(directory)
        return any(path == real or path.startswith(real + "/") for path in self.paths)


def processes() -> Processes:
    """Read /proc for every process that we may inspect: this user's, or all of them as root."""
    paths: set[str] = set()
    files: set[tuple[int, str]] = set()
    for name in inventory.list_names("/proc"):
        if not name.isdigit():
            continue
        try:
            paths.add(os.readlink(f"/proc/{name}/cwd"))
            # Read open files before mapped ones: the dynamic linker opens, maps, then closes. The
            # other order could miss a file.
            for path, inode in _open_files(name):
                paths.add(path)
                files.add((inode, os.path.basename(path)))
            with open(f"/proc/{name}/maps", encoding="utf-8", errors="surrogateescape") as maps:
                for line in maps:
                    # address, permissions, offset, device, inode, path (which may contain blanks)
                    fields = line.rstrip("\n").split(None, 5)
                    if len(fields) == 6 and fields[5].startswith("/"):
                        paths.add(fields[5])
                        files.add((int(fields[4]), os.path.basename(fields[5])))
        except OSError:
            continue  # it ended, or it belongs to another user
    return Processes(frozenset(paths), frozenset(files))


def _open_files(pid: str) -> Iterator[tuple[str, int]]:
    """(path, inode) of the files that a process has open. Raises OSError."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            path = os.readlink(f"/proc/{pid}/fd/{name}")
            if path.startswith("/") and not path.startswith(("/dev/", "/proc/")):
                yield path, os.stat(f"/proc/{pid}/fd/{name}").st_ino
        except FileNotFoundError:
            continue  # closed in the meantime


def _sweep_store(root: str, clock: float) -> list[str]:
    """Remove staging directories of dead publishers, old records of failures, and files that were
    never finished."""
    swept = []
    for top, depth, age in _SWEPT:
        for path in inventory.directories(os.path.join(root, top), depth):
            # If an old file still has its temporary name, its writer is dead.
            limit = _LEFTOVER if is_temporary(path) else age
            if limit is not None and _modification_time(path, clock) < clock - limit:
                _remove(path)
                swept.append(path)
    return swept


def _sweep_receipts(root: str) -> None:
    """Remove the receipts of entries that are gone: nothing else would remove them."""
    for path in inventory.directories(os.path.join(root, "receipts"), 3):
        try:
            payload = json.loads(read_file(path))["payload"]
            if os.path.exists(os.path.join(root, payload)):
                continue
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # damaged, or just being written: its writer does not need it
        _remove(path)


def _sweep_scratch(clock: float) -> list[str]:
    """Remove build directories whose process died with its watchdog (a reboot, a container)."""
    # No step runs longer than the build timeout, and each step writes. So a directory that has not
    # changed for twice that time does not belong to a running build.
    age = max(_LEFTOVER, 2 * settings.build_timeout)
    base = publish.scratch_root()
    old = []
    for name in inventory.list_names(base):
        path = os.path.join(base, name)
        if (
            _SCRATCH.match(name)
            and _is_ours(path)
            and _modification_time(path, clock) < clock - age
        ):
            old.append(path)
    if not old:
        return []
    # If no store is writable, a library is loaded from such a directory and stays mapped for as
    # long as its process lives.
    running = processes()
    swept = [path for path in old if not running.runs_below(path)]
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


def _modification_time(path: str, clock: float) -> float:
    """When a file, or a directory or something directly in it, was last changed. Returns ``clock``
    if it is gone."""
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
    with inventory.report_errors("removed", path), suppress(FileNotFoundError):
        os.unlink(path)


def _prune(root: str) -> None:
    """Remove the directories that removed entries left empty."""
    for _, top, depth in inventory.LEVELS:
        for level in range(depth - 1, 0, -1):
            for directory in inventory.directories(os.path.join(root, top), level):
                with suppress(OSError):  # something has just been published there
                    if not os.listdir(directory):
                        os.rmdir(directory)
