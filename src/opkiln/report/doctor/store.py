"""The store: where it is, whose, and whether it has room, may be executed from and tells time."""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
import time
from typing import NamedTuple

from opkiln.errors import StoreError
from opkiln.report.doctor import room
from opkiln.report.doctor.finding import (
    Outcome,
    copyable,
    failed,
    joined,
    passed,
    skipped,
    warned,
)
from opkiln.report.doctor.here import Here
from opkiln.report.doctor.packages import as_root
from opkiln.report.layout import count, size
from opkiln.settings import LAYOUT, origin_of, override, settings, store_candidates
from opkiln.store import archive, inventory
from opkiln.store.archive import Damaged
from opkiln.trust import fault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.store.location import Layer

_LITTLE, _TOO_LITTLE = 1 << 30, 64 << 20  # bytes: a CUDA op with its objects takes tens of MiB
_FEW, _TOO_FEW = 2000, 100  # inodes: an entry takes about ten
_SKEW = 2.0  # seconds, within which no signature is believed anyway
_LEFTOVER = 3600.0  # seconds after which `cache gc` takes what is staged for abandoned


def place(here: Here) -> Outcome:
    """Where the store is, and why not where it was asked for."""
    location = here.store.location
    if location.writable is None:
        return failed(joined("nothing can be written", *location.notes), _move())
    directory = room.of(location.writable).path
    try:
        _time_of_a_new_file(directory)
    except OSError as error:
        # Permissions do not tell all: a file system may refuse for reasons of its own.
        return failed(f"nothing can be written to {directory}: {error.strerror}", _move())
    if not location.notes:
        return passed(os.path.dirname(location.writable))
    facts = joined(*location.notes)
    if any(_foreign(path) or _open(path) for path in _asked()):
        return skipped(f"{facts}: see store owner, store mode")
    in_use = os.path.dirname(location.writable)
    command = f"export OPKILN_CACHE_DIR={shlex.quote(in_use)}"
    return warned(facts, f"mkdir -p -m 700 {shlex.quote(in_use)} && {command}")


def owner(here: Here) -> Outcome:
    """The directory that was asked for is this user's or root's."""
    foreign = [path for path in _asked() if _foreign(path)]
    if not foreign:
        return passed(_state(lambda found: f"uid {found.st_uid}"))
    facts = "; ".join(f"{path} belongs to uid {os.lstat(path).st_uid}" for path in foreign)
    if _takeable(foreign[0]):
        command = as_root(f"chown -R {os.getuid()}:{os.getgid()} {shlex.quote(foreign[0])}")
    else:
        command = _private(here)
    return warned(f"{facts}, not to uid {os.getuid()} or root: it is not used", command)


def mode(here: Here) -> Outcome:
    """Nobody else can write to the directory that was asked for."""
    opened = [path for path in _asked() if _open(path)]
    if not opened:
        return passed(_state(lambda found: f"mode {stat.S_IMODE(found.st_mode):04o}"))
    facts = "; ".join(
        f"{path} has mode {stat.S_IMODE(os.lstat(path).st_mode):04o}" for path in opened
    )
    if all(map(_closable, opened)):
        command = f"chmod go-w {' '.join(map(shlex.quote, opened))}"
    else:
        command = _private(here)
    return warned(f"{facts}: others can write to it, so it is not used", command)


# A directory that a variable names may be everybody's (/tmp) or somebody's (/home/bob): a command
# that changes its mode or owner is for one that is the store's and nothing else.

_CONTENTS = {
    "failures", "locks", "logs", "objects", "ops", "receipts", "staging", "toolchains",
}  # fmt: skip


def _closable(path: str) -> bool:
    """Whether taking the others' right to write takes it from nobody who needs it."""
    found = os.lstat(path)
    return found.st_uid == os.getuid() and not found.st_mode & stat.S_ISVTX and _only_a_store()


def _takeable(path: str) -> bool:
    """Whether it is a store that another user left in a directory of ours."""
    above = os.stat(os.path.dirname(path))
    ours = above.st_uid == os.getuid() and not above.st_mode & 0o022
    return ours and len(_asked()) > 1 and _only_a_store()


def _only_a_store() -> bool:
    """Whether the directory that was asked for can be changed, and holds a store or nothing."""
    # The second is made, and for us alone, by the first load that may not use the directory.
    allowed = ({LAYOUT, f"opkiln-{os.getuid()}"}, _CONTENTS)
    for path, known in zip(_asked(), allowed, strict=False):
        if os.path.islink(path) or os.path.ismount(path) or room.of(path).read_only:
            return False
        try:
            if not set(os.listdir(path)) <= known:
                return False
        except OSError:
            return False  # no directory, or not even ours to read
    return True


def _private(here: Here) -> str:
    """The command for a directory that is this user's alone."""
    if command := _move():
        return command
    writable = here.store.root
    if writable is None:
        return ""
    in_use = shlex.quote(os.path.dirname(writable))
    return f"mkdir -p -m 700 {in_use} && export OPKILN_CACHE_DIR={in_use}"


def _asked() -> list[str]:
    """The root that the user expects, and the layout's directory in it, where they exist."""
    return _within(next(store_candidates())[0])


def _within(root: str) -> list[str]:
    return [path for path in (root, os.path.join(root, LAYOUT)) if os.path.lexists(path)]


def _foreign(path: str) -> bool:
    return os.lstat(path).st_uid not in (os.getuid(), 0)


def _open(path: str) -> bool:
    found = os.lstat(path)
    return not stat.S_ISLNK(found.st_mode) and bool(found.st_mode & 0o022)


def _state(shown: Callable[[os.stat_result], str]) -> str:
    asked = _asked()
    return f"{asked[0]}: {shown(os.lstat(asked[0]))}" if asked else "it is still to be made"


def space(here: Here) -> Outcome:
    """The store has room for what is built, and keeps to its own limit."""
    root = here.store.root
    if root is None:
        return skipped("nothing can be written: see store")
    found = room.of(root)
    facts = f"{size(found.free)} free of {size(found.total)} at {found.path}"
    held = inventory.sizes(root).total if os.path.isdir(root) else 0
    limit = int(settings.cache_max_size)
    if found.free < _LITTLE:
        # Collecting helps where the store itself holds what is missing.
        command = "opkiln cache gc --now --max-size 1K" if held > _LITTLE else _move()
        verdict = failed if found.free < _TOO_LITTLE else warned
        return verdict(f"{facts}; the store holds {size(held)}", command)
    if held > limit:
        return warned(f"{facts}; the store holds {size(held)}, more than {size(limit)}",
                      "opkiln cache gc")  # fmt: skip
    return passed(f"{facts}; the store holds {size(held)} of at most {size(limit)}")


def inodes(here: Here) -> Outcome:
    """The store's file system can hold more files."""
    root = here.store.root
    if root is None:
        return skipped("nothing can be written: see store")
    found = room.of(root)
    if found.inodes is None:
        return passed(f"{found.path} makes them as needed")
    facts = f"{found.inodes} left at {found.path}"
    if found.inodes >= _FEW:
        return passed(facts)
    return (failed if found.inodes < _TOO_FEW else warned)(facts, _move())


def noexec(here: Here) -> Outcome:
    """Libraries can be loaded from every directory of the store, and from where it was asked for.

    A store on such a file system is passed over, so that it is not among the layers.
    """
    location = here.store.location
    wanted = [os.path.join(path, LAYOUT) for path, asked in store_candidates() if asked][:1]
    own = [path for path in wanted if room.of(path).noexec]
    listed = [layer.root for layer in location.layers if os.path.isdir(layer.root)]
    barred = [*own, *(path for path in listed if path not in own and room.of(path).noexec)]
    if not barred:
        return passed("no part of it is on a file system mounted noexec")
    facts = f"{', '.join(barred)} is on a file system mounted noexec: nothing loads from there"
    return failed(facts, _move()) if own else warned(facts, "unset OPKILN_STORE_LAYERS")


def layers(here: Here) -> Outcome:
    """The read-only layers that were listed are layers, and not open to everybody."""
    listed = [layer for layer in here.store.location.layers if layer.listed]
    if not listed:
        return passed("none is listed (OPKILN_STORE_LAYERS)")
    asked = list(zip(settings.store_layers, listed, strict=True))
    found = [refusal for each in asked if (refusal := _refusal(*each))]
    if not found:
        return passed(", ".join(path for path, _ in asked))
    return warned(joined(*(refusal.reason for refusal in found)), found[0].command)


class _Refusal(NamedTuple):
    reason: str
    command: str


def _refusal(path: str, layer: Layer) -> _Refusal | None:
    """Why nothing is taken from a layer, by the path that the user wrote."""
    look = f"ls -ld {shlex.quote(path)}"
    if layer.bundle:
        return _refused_bundle(path, look)
    if not os.path.exists(path):
        return _Refusal(f"{path} is not there", look)
    if not os.path.isdir(layer.root):
        return _Refusal(f"{path} is not a layer: it has no directory {LAYOUT}", look)
    # What was listed may be a symbolic link; what is in it may not.
    for each, state in ((path, os.stat(path)), (layer.root, os.lstat(layer.root))):
        if reason := fault(each, state, listed=True):
            return _Refusal(reason, f"ls -ld {shlex.quote(each)}")
    return None


def _refused_bundle(path: str, look: str) -> _Refusal | None:
    try:
        with archive.Bundle(path, listed=True):
            return None
    except Damaged as error:
        return _Refusal(f"{path} is damaged: {error}", look)
    except StoreError as error:
        return _Refusal(joined(error.what, error.why), copyable(error.hint) or look)


def clock(here: Here) -> Outcome:
    """Files that are written to the store get this machine's time."""
    root = here.store.root
    if root is None:
        return skipped("nothing can be written: see store")
    directory, before = room.of(root).path, time.time()
    try:
        written = _time_of_a_new_file(directory)
    except OSError:
        return skipped(f"nothing can be written to {directory}: see store")
    skew = written - before
    facts = (
        f"a file written to {directory} now is {abs(skew):.1f} s {'ahead' if skew > 0 else 'old'}"
    )
    if abs(skew) > _SKEW:
        return warned(
            f"{facts}: the file server's clock differs, so files are hashed that need not be",
            "timedatectl set-ntp true",
        )
    return passed(facts)


def _time_of_a_new_file(directory: str) -> float:
    """What the file system takes for now. Raises OSError."""
    with tempfile.NamedTemporaryFile(prefix=".opkiln-doctor-", dir=directory) as file:
        file.write(b"x")
        file.flush()  # a full file system refuses the first byte, not the name
        return os.fstat(file.fileno()).st_mtime


def leftovers(here: Here) -> Outcome:
    """Nothing that a killed process staged lies about. Locks cannot: the kernel holds them."""
    root = here.store.root
    if root is None:
        return skipped("nothing can be written: see store")
    staging, now = os.path.join(root, "staging"), time.time()
    old = []
    for name in inventory.names_in(staging):
        path = os.path.join(staging, name)
        try:
            newest = max(os.lstat(each).st_mtime for each in (path, *_inside(path)))
        except FileNotFoundError:
            continue  # it is being published at this moment
        if newest < now - _LEFTOVER:
            old.append(path)
    if old:
        noun = count(len(old), "directory") if len(old) == 1 else f"{len(old)} directories"
        return warned(f"{noun} in {staging} that a killed process left", "opkiln cache gc")
    return passed("nothing is left of processes that died")


def _inside(path: str) -> list[str]:
    return [os.path.join(path, name) for name in inventory.names_in(path)]


def _move() -> str:
    """The command that puts the store where there is room; empty where there is none."""
    asked, origin = origin_of("cache_dir")
    if asked:
        with override(cache_dir=None):
            usual, expected = next(store_candidates())
        found = room.of(usual)
        if (
            expected
            and found.free >= _LITTLE
            and not found.noexec
            and os.access(found.path, os.W_OK)
            and not any(_foreign(path) or _open(path) for path in _within(usual))
        ):
            return f"unset {origin}"
    other = room.elsewhere(_LITTLE)
    if not other:
        return ""
    place = shlex.quote(os.path.join(other, f"opkiln-{os.getuid()}-store"))
    return f"mkdir -p -m 700 {place} && export OPKILN_CACHE_DIR={place}"
