"""Lists and verifies the entries of a layer. A cache hit uses nothing in this file."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from opkiln.errors import StoreError
from opkiln.machine.facts import Hasher
from opkiln.store import entry
from opkiln.store.key import deps_key

OP, OBJECT = "op", "object"

# ops/<distribution>/<op>/<intent>/<build>/<deps> and objects/<aa>/<step>/<deps>
LEVELS = ((OP, "ops", 5), (OBJECT, "objects", 3))


class StoreEntry(NamedTuple):
    """One leaf, described from its directory alone.

    A hit must not write, so ``used`` comes from the file system. It is the time when the entry was
    published or its payload was last read, whichever is later. Most mounts (``relatime``) keep the
    access time to within a day; some (``noatime``) do not keep it.
    """

    directory: str
    kind: str  # op, object
    name: str  # the op's name, or the first characters of an object's key
    distribution: str  # the package that owns the op; "" for an object
    size: int
    published: float
    used: float
    payload: str  # "" if it is missing


class Details(NamedTuple):
    """The description of an entry by its files. Fields are empty if they cannot be read."""

    made_for: str  # "x86-64-v4", "cuda 9.0a, x86-64"
    compiler: str
    source: str  # of an object; of another program's command, what that is called
    sources: tuple[str, ...]  # of an op
    damaged: str
    host: str = ""  # the other program whose command made the object: "ninja", "flashinfer"
    group: str = ""  # what it is a part of there
    rebuilt: str = ""  # why it was made again, as far as an older entry told
    places: tuple[tuple[str, str], ...] = ()  # where: the command's directory, and its roots


class HostModule(NamedTuple):
    """The entries of what another program built as one thing."""

    host: str
    group: str
    entries: int
    size: int
    published: float  # the newest
    used: float
    newest: str  # what it is called
    rebuilt: str  # why it was made again
    directory: str  # where it was made


class Sizes(NamedTuple):
    """The number of entries in a layer, and their sizes in bytes."""

    ops: int
    op_bytes: int
    objects: int
    object_bytes: int
    other_bytes: int  # logs, locks, cached probes, staging directories

    @property
    def total(self) -> int:
        return self.op_bytes + self.object_bytes + self.other_bytes


class Fault(NamedTuple):
    """An entry that failed `verify`. If it is not ``damaged``, other users may still use it."""

    directory: str
    reason: str
    damaged: bool
    removed: bool = False


def entries(root: str) -> Iterator[StoreEntry]:
    """Every leaf of a layer, good or not, sorted by path. Raises StoreError."""
    for kind, top, depth in LEVELS:
        for directory in directories(os.path.join(root, top), depth):
            found = _entry(directory, kind)
            if found is not None:
                yield found


def newest(root: str) -> Iterator[StoreEntry]:
    """The newest entry for each op and intent, unless it is damaged. Raises StoreError."""
    found: dict[tuple[str, ...], StoreEntry] = {}
    for each in entries(root):
        if each.kind != OP or not each.payload:
            continue
        intent = tuple(each.directory.split("/")[-5:-2])
        if intent not in found or found[intent].published < each.published:
            found[intent] = each
    for each in found.values():
        if not details(each).damaged:
            yield each


def directories(directory: str, depth: int) -> Iterator[str]:
    """The paths exactly ``depth`` levels below a directory, sorted."""
    names = []
    # No names: it was never created, was just collected, or is a stray file.
    with report_errors("read", directory), suppress(FileNotFoundError, NotADirectoryError):
        names = sorted(os.listdir(directory))
    for name in names:
        path = os.path.join(directory, name)
        if depth == 1:
            yield path
        else:
            yield from directories(path, depth - 1)


def _entry(directory: str, kind: str) -> StoreEntry | None:
    with report_errors("read", directory), suppress(FileNotFoundError):  # it was just collected
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode):
            return None
        size, used, payload = 0, found.st_mtime, ""
        for file in os.scandir(directory):
            status = file.stat(follow_symlinks=False)
            size += status.st_size
            if file.name not in (entry.MANIFEST, entry.SIDECAR, entry.LOG):
                payload = file.path
                used = max(used, status.st_atime)
        parts = directory.split("/")
        owner, name = (parts[-5], parts[-4]) if kind == OP else ("", parts[-2][:12])
        return StoreEntry(directory, kind, name, owner, size, found.st_mtime, used, payload)
    return None


def details(found: StoreEntry) -> Details:
    """Read an entry's manifest and sidecar. Does not raise for a damaged entry."""
    try:
        manifest = entry.read_manifest(found.directory)
        if found.kind == OBJECT:
            host, group, rebuilt = (manifest.get(each, "") for each in ("host", "group", "rebuilt"))
            places = tuple(manifest.get("places", {}).items())
            label = str(manifest["source"])
            return Details("", "", label, (), "", host, group, rebuilt, places)
        inputs = entry.read_sidecar(found.directory)["inputs"]
        target = manifest["target"]
        device = f"{target['backend']} {';'.join(target['archs'])}, " if target["archs"] else ""
        return Details(
            made_for=device + "+".join((target["cpu"], *target["cpu_features"])),
            compiler=", ".join(
                each["version"] if family in ("gcc", "clang") else f"{family} {each['version']}"
                for family, each in inputs["toolchain"].items()
            ),
            source="",
            sources=tuple(inputs["spec"]["sources"]),
            damaged="",
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Details("", "", "", (), entry.describe_error(error) or type(error).__name__)


def host_modules(listed: Iterable[StoreEntry]) -> list[HostModule]:
    """What other programs built, of the entries of a layer, by program and name."""
    found: dict[tuple[str, str], HostModule] = {}
    for each in listed:
        if each.kind != OBJECT or not (more := details(each)).host:
            continue
        where = more.host, more.group
        known = found.get(where, HostModule(*where, 0, 0, 0.0, 0.0, "", "", ""))
        if each.published >= known.published:
            known = known._replace(
                published=each.published, newest=more.source, rebuilt=more.rebuilt,
                directory=dict(more.places).get("dir", ""),
            )  # fmt: skip
        found[where] = known._replace(
            entries=known.entries + 1, size=known.size + each.size, used=max(known.used, each.used)
        )
    return [found[where] for where in sorted(found)]


def sizes(root: str, listed: Iterable[StoreEntry] | None = None) -> Sizes:
    """Count a layer's entries, which may be listed already. May miss entries that appear or vanish
    during the count. Raises StoreError."""
    count = {OP: 0, OBJECT: 0}
    total = {OP: 0, OBJECT: 0}
    for found in entries(root) if listed is None else listed:
        count[found.kind] += 1
        total[found.kind] += found.size
    others = (top for top in list_names(root) if top not in ("ops", "objects"))
    other = sum(_tree_size(os.path.join(root, top)) for top in others)
    return Sizes(count[OP], total[OP], count[OBJECT], total[OBJECT], other)


def verify(root: str, *, listed: bool = False) -> Iterator[tuple[StoreEntry, Fault | None]]:
    """Re-hash every entry of a layer. Yields each entry with its fault, if any."""
    for found in entries(root):
        fault = _fault(found, listed)
        _restore_access_time(found)
        yield found, fault


def _fault(found: StoreEntry, listed: bool) -> Fault | None:
    directory = found.directory
    answer = entry.examine(directory, {}, Hasher(), listed=listed, whole=False, own=False)
    if not os.path.isdir(directory):
        return None  # collected during the check, which may look like damage
    if isinstance(answer, entry.Refused):
        return Fault(directory, answer.reason.removeprefix("damaged: "), answer.damaged)
    if answer is None:
        return Fault(directory, f"{entry.MANIFEST} is missing", True)
    try:
        entry.read_sidecar(directory)
        name = deps_key(answer.manifest["deps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Fault(directory, entry.describe_error(error), True)
    if name != os.path.basename(directory):
        return Fault(directory, "its name does not match its dependencies", True)
    return None


def _restore_access_time(found: StoreEntry) -> None:
    """Undo the effect of hashing on the access time: a full scan does not count as use."""
    if not found.payload:
        return
    with suppress(OSError):  # it was just collected, or we may not write to this layer
        now = os.stat(found.payload)
        os.utime(found.payload, (found.used, now.st_mtime))


def list_names(directory: str) -> list[str]:
    """A directory's listing, sorted; empty if it does not exist or cannot be read."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _tree_size(path: str) -> int:
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # a lock or a staging directory, just removed
                total += os.lstat(os.path.join(directory, name)).st_size
    return total


@contextmanager
def report_errors(action: str, path: str) -> Iterator[None]:
    """Turn an OSError within the block into a StoreError: the path cannot be ``action``, which is
    "read", "removed" or "put back"."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path} cannot be {action}: {error.strerror or error}",
            hint=f"ls -ld {shlex.quote(path)}",
        ) from error
