"""What an observed command made, as it is kept in the store: the objects of plans' steps, and what
the commands of other programs' builds wrote.

    objects/<aa>/<key of the command>/<key of its facts>/
        0, 1, …         the files that it wrote
        manifest.json   where each belongs: below which anchor, at which path; and its messages
        inputs.json     the facts: all that it read and looked up

A file that belongs below an anchor is put there, wherever that is now. In a text (a depfile, the
messages) the anchors' own paths are written as marks. If another file contains the path of an
anchor, the entry has the fact that the anchor is there, and serves no other place.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import stat
from typing import NamedTuple

from opkiln.base.digest import Signature, open_replacement, read_file, sha256_file
from opkiln.errors import StoreError
from opkiln.machine.facts import Hasher
from opkiln.run import events
from opkiln.store import entry, key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from opkiln.store.entry import Leaf
    from opkiln.store.inventory import Details, StoreEntry
    from opkiln.store.key import Fact
    from opkiln.store.layers import Store

# Change times come from the kernel's coarse clock, which lags by up to one tick.
TICK_NS = 20_000_000
_RUNS, _TEXT = "x", "t"  # kinds of files: a program or library; one with marks


class Written(NamedTuple):
    """A file that a command wrote."""

    anchor: str
    path: str  # below the anchor; of "abs", the whole path
    source: str  # where it is now
    text: bytes | None = None  # its contents with marks in the place of anchors


class Anchors:
    """Directories that may lie elsewhere the next time, by name, and their paths in texts."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = dict(places)
        # A path that a shell or make would quote is not looked for: it binds what contains it.
        plain = {p: name for name, p in places.items() if re.fullmatch(r"(/[\w.@%+=-]+)+", p)}
        self.odd = tuple(name for name, path in places.items() if path not in plain)
        self._names = plain
        paths = sorted(plain, key=len, reverse=True)
        self._paths = re.compile(
            rf"(^|[\s\"'=:,;(){{}}@<>&|\\\[]|(?:^|[\s\"',])-{{1,2}}[A-Za-z]+)"
            rf"({'|'.join(map(re.escape, paths)) or '(?!)'})(?=$|[/\s\"'=:,;(){{}}<>&|\\\]])"
        )

    def hide(self, text: str) -> str:
        """The text with a mark in the place of each anchor's path."""
        return self._paths.sub(lambda found: f"{found[1]}\0{self._names[found[2]]}\0", text)

    def show(self, text: str) -> str:
        """The text with the anchors' present paths in the place of the marks."""
        return re.sub("\0([^\0]*)\0", lambda found: self.places[found[1]], text)

    def named_in(self, data: bytes | mmap.mmap) -> set[str]:
        """The anchors whose paths are in these bytes."""
        return {name for name, path in self.places.items() if data.find(os.fsencode(path)) >= 0}


def find(
    store: Store, name: str, places: Mapping[str, str], hasher: Hasher
) -> tuple[Leaf | None, list[str]]:
    """(what the command of this key made, if all that it read is as it was; why what it made at
    other times is refused). A damaged entry is removed."""
    leaf, refused = store.find_object(name, places, hasher)
    for each in refused:
        if each.damaged and store.root is not None and each.directory.startswith(store.root + "/"):
            # It makes room for what will be made. No lock is held: at worst this removes an intact
            # entry that another process has just published.
            from opkiln.store import publish

            with contextlib.suppress(OSError):  # it stays, and every reader refuses it
                publish.discard(store.root, each.directory)
    return leaf, [each.reason for each in refused]


def put_in_place(leaf: Leaf, anchors: Anchors, *, again: bool = True) -> dict[str, str]:
    """Put each file of an entry where it belongs, in one step, as a new file. If not ``again``, a
    file that is there already stays, which another process may have opened. Returns the digests
    of the files, by path. Raises OSError, ValueError, KeyError: the entry was collected meanwhile,
    or a file cannot be written."""
    digests = {}
    for anchor, path, name, size, sha256, kind in leaf.manifest["files"]:
        full = os.path.join(anchors.places[anchor], path) if anchor != "abs" else path
        source = os.path.join(leaf.directory, name)
        if not again and kind != _TEXT and _is_there(full, size, sha256):
            digests[full] = sha256
            continue
        with open_replacement(full, 0o777 if kind == _RUNS else 0o666) as out:
            if kind == _TEXT:
                text = read_file(source).decode("utf-8", "surrogateescape")
                out.write(anchors.show(text).encode("utf-8", "surrogateescape"))
            else:
                _copy(source, out.fileno())
                digests[full] = sha256
    return digests


def _is_there(path: str, size: int, sha256: str) -> bool:
    try:
        return os.stat(path).st_size == size and sha256_file(path) == sha256
    except OSError:
        return False


def _copy(source: str, out: int) -> None:
    with open(source, "rb") as data:
        with contextlib.suppress(OSError):  # another file system, or one that cannot
            while os.copy_file_range(data.fileno(), out, 1 << 30):
                pass  # where files can share their blocks, they do
            return
        with open(out, "wb", closefd=False) as file:
            shutil.copyfileobj(data, file, 1 << 20)


def keep(
    store: Store,
    name: str,
    files: Sequence[Written],
    facts: tuple[Fact, ...],
    manifest: Mapping[str, Any],
    stage: str,
) -> dict[str, str]:
    """Publish what a command made. Returns the files' digests, by path. If the store cannot take
    it, a note says so. Raises OSError if a file is gone."""
    from opkiln.building import gather  # a hit does without
    from opkiln.store import publish

    rows, digests = [], {}
    size = sum(os.stat(each.source).st_size for each in files)
    where = os.path.join("objects", name[:2], name)
    try:
        with publish.staging(store.root or stage, where, size) as own:
            for number, each in enumerate(files):
                copy = os.path.join(own, str(number))
                # A copy: what comes next in the build may write into the file itself.
                with publish.create(copy, 0o600) as out:
                    if each.text is None:
                        _copy(each.source, out.fileno())
                    else:
                        out.write(each.text)
                runs = os.stat(each.source).st_mode & stat.S_IXUSR
                kind = _TEXT if each.text is not None else _RUNS if runs else ""
                digest = sha256_file(copy)
                if each.text is None:
                    digests[each.source] = digest
                length = os.stat(copy).st_size
                rows.append([each.anchor, each.path, str(number), length, digest, kind])
            if store.root is not None:
                full = {"kind": "object", **manifest, "files": rows}
                leaf = gather.write(own, os.path.join(own, "0"), full, facts, {})
                publish.move(own, store.root, os.path.join(where, leaf))
    except StoreError as error:
        events.emit(events.NOTE, text=str(error))
    return digests


def compare(store: Store, name: str) -> list[tuple[StoreEntry, Details, list[str]]]:
    """What is kept of another program's module, source or output of this name, the newest first,
    each with what has changed where it was made. Raises StoreError."""
    from opkiln.store import inventory

    found = []
    for each in inventory.entries(store.root) if store.root is not None else ():
        more = inventory.details(each)
        if not more.host or name not in (more.group, more.source):
            continue
        changes = ["it is damaged"]
        with contextlib.suppress(OSError, *entry.MALFORMED):
            recorded = entry.read_manifest(each.directory)["deps"]
            rows = entry.read_sidecar(each.directory)["facts"]
            changes = key.find_changes(recorded, rows, dict(more.places), Hasher())
        found.append((each, more, changes))
    return sorted(found, key=lambda one: -one[0].published)


def read_facts(leaf: Leaf) -> tuple[Fact, ...]:
    """What went into the files of an entry. Raises OSError, ValueError, KeyError."""
    return key.read(entry.read_sidecar(leaf.directory)["facts"])


# Whether a file was changed while it was read


def kernel_time(directory: str) -> int:
    """What the kernel writes now as the change time of a file: our own clock may be wrong."""
    os.utime(directory)
    return os.stat(directory).st_ctime_ns


def snapshot_of(paths: Iterable[str]) -> dict[str, str]:
    """The digests of these files, as far as they are there."""
    hasher = Hasher()
    taken: dict[str, str] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # the compiler reports it
            taken[path] = hasher(path)[0]
    return taken


def surely_read(
    read: Iterable[str], unseen: Iterable[str], began: int, snapshot: Mapping[str, str]
) -> bool:
    """Whether a program that began at this time of the kernel's certainly had the files as they
    are now. ``snapshot`` has digests from before it began."""
    hasher = Hasher()

    def is_older(path: str) -> bool:
        return Signature.of(path).ctime_ns < began - TICK_NS

    def was_there(path: str) -> bool:
        way = (path, os.path.realpath(path))
        above = (os.path.join("/", *parts[:n]) for each in way
                 if (parts := each.split("/")[1:]) for n in range(1, len(parts) + 1))  # fmt: skip
        return all(os.lstat(each).st_ctime_ns < began - TICK_NS for each in above)

    def holds(path: str, test: Callable[[str], bool]) -> bool:
        return test(path) or snapshot.get(path) == hasher(path)[0]

    try:
        return all(holds(path, is_older) for path in read) and all(
            holds(path, was_there) for path in unseen
        )
    except FileNotFoundError:
        return False
