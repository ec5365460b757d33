"""Directories: the store with its layers and remote tiers, the temporary one, shared memory."""

from __future__ import annotations

import os
import re
import shlex
import stat
import tempfile
import time
from collections.abc import Callable

from opkiln.base.trust import fault
from opkiln.decision import terms
from opkiln.errors import StoreError
from opkiln.remote import lockfile
from opkiln.report.commands import root_command
from opkiln.report.doctor.terms import (
    Diagnosis,
    Facts,
    Missing,
    copyable_command,
    failed,
    join,
    passed,
    skipped,
    warned,
)
from opkiln.report.layout import count, size
from opkiln.report.machine import SHARED_MEMORY, Space
from opkiln.report.machine import space as space_at
from opkiln.settings import LAYOUT, origin_of, override, settings, store_candidates
from opkiln.store import archive, inventory, signatures
from opkiln.store.archive import Damaged
from opkiln.store.layers import Layer

# Bytes for builds and their objects: a CUDA op takes tens of MiB.
_LITTLE, _TOO_LITTLE = 1 << 30, 64 << 20
_FEW, _TOO_FEW = 2000, 100  # inodes: an entry takes about ten
_SKEW = 2.0  # seconds: signatures that are younger are not trusted in any case
_LEFTOVER = 3600.0  # seconds after which `cache gc` removes staged files
_SHARED_LEAST = 64 << 20  # bytes: the default of container runtimes


def place(here: Facts) -> Diagnosis:
    """The store is where the user asked for it, and can be written to."""
    location = here.store.location
    if location.writable is None:
        return failed(join("nothing can be written", *location.notes), _move_command())
    directory = space_at(location.writable).path
    try:
        _time_of_a_new_file(directory)
    except OSError as error:
        # Permissions are not enough: a file system may refuse for other reasons.
        return failed(f"nothing can be written to {directory}: {error.strerror}", _move_command())
    if not location.notes:
        return passed(os.path.dirname(location.writable))
    facts = join(*location.notes)
    if any(_is_foreign(path) or _is_open(path) for path in _requested_paths()):
        return skipped(f"{facts}: see store owner, store mode")
    return warned(facts, _make_command(os.path.dirname(location.writable)))


def owner(here: Facts) -> Diagnosis:
    """The directory that was asked for belongs to this user or to root."""
    foreign = [path for path in _requested_paths() if _is_foreign(path)]
    if not foreign:
        return passed(_show_state(lambda found: f"uid {found.st_uid}"))
    facts = "; ".join(f"{path} belongs to uid {os.lstat(path).st_uid}" for path in foreign)
    take_over = root_command(f"chown -R {os.getuid()}:{os.getgid()} {shlex.quote(foreign[0])}")
    command = take_over if _can_take_over(foreign[0]) else _store_command(here)
    return warned(f"{facts}, not to uid {os.getuid()} or root: it is not used", command)


def mode(here: Facts) -> Diagnosis:
    """Nobody else can write to the directory that was asked for."""
    opened = [path for path in _requested_paths() if _is_open(path)]
    if not opened:
        return passed(_show_state(_mode))
    facts = "; ".join(f"{path} has {_mode(os.lstat(path))}" for path in opened)
    close = f"chmod go-w {' '.join(map(shlex.quote, opened))}"
    command = close if all(map(_can_close, opened)) else _store_command(here)
    return warned(f"{facts}: others can write to it, so it is not used", command)


def _mode(found: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(found.st_mode):04o}"


# A variable may name a directory that others use (/tmp, /home/bob). So a command that changes the
# mode or owner is only suggested for a directory that contains nothing but a store.

_LAYOUT = re.compile(r"v[1-9]\d*")
_CONTENTS = {
    "failures", "locks", "logs", "objects", "ops", "receipts", "staging", "toolchains",
}  # fmt: skip


def _can_close(path: str) -> bool:
    """Whether it is safe to remove the others' right to write there: nobody else uses it."""
    found = os.lstat(path)
    return found.st_uid == os.getuid() and not found.st_mode & stat.S_ISVTX and _has_only_a_store()


def _can_take_over(path: str) -> bool:
    """Whether it is a store that another user made in one of our directories."""
    above = os.stat(os.path.dirname(path))
    ours = above.st_uid == os.getuid() and not above.st_mode & 0o022
    return ours and len(_requested_paths()) > 1 and _has_only_a_store()


def _has_only_a_store() -> bool:
    """Whether the requested directory can be changed, and contains at most a store."""
    # opkiln-<uid> is made by the first load that may not use the directory itself.
    allowed = ({LAYOUT, f"opkiln-{os.getuid()}"}, _CONTENTS)
    for path, known in zip(_requested_paths(), allowed, strict=False):
        if os.path.islink(path) or os.path.ismount(path) or space_at(path).read_only:
            return False
        try:
            # Other versions of opkiln have directories of their own next to ours.
            if any(name not in known and not _LAYOUT.fullmatch(name) for name in os.listdir(path)):
                return False
        except OSError:
            return False  # it is not a directory, or cannot be read
    return True


def _store_command(here: Facts) -> str:
    """The command that makes and uses a private directory."""
    root = here.store.root
    return _move_command() or ("" if root is None else _make_command(os.path.dirname(root)))


def _make_command(place: str) -> str:
    """The command that makes a directory and has the store there."""
    quoted = shlex.quote(place)
    return f"mkdir -p -m 700 {quoted} && export OPKILN_CACHE_DIR={quoted}"


def _requested_paths() -> list[str]:
    """The requested root of the store and the layout's directory in it, if they exist."""
    return _existing_paths(next(store_candidates())[0])


def _existing_paths(root: str) -> list[str]:
    return [path for path in (root, os.path.join(root, LAYOUT)) if os.path.lexists(path)]


def _is_foreign(path: str) -> bool:
    return os.lstat(path).st_uid not in (os.getuid(), 0)


def _is_open(path: str) -> bool:
    found = os.lstat(path)
    return not stat.S_ISLNK(found.st_mode) and bool(found.st_mode & 0o022)


def _show_state(shown: Callable[[os.stat_result], str]) -> str:
    asked = _requested_paths()
    return f"{asked[0]}: {shown(os.lstat(asked[0]))}" if asked else "it does not exist yet"


def space(here: Facts) -> Diagnosis:
    """The store has enough space for builds, and is below its own limit."""
    root = here.root
    found = space_at(root)
    held = inventory.sizes(root).total if os.path.isdir(root) else 0
    facts = f"{found} at {found.path}; the store holds {size(held)}"
    limit = int(settings.cache_max_size)
    if found.free < _LITTLE:
        # Collecting helps only if the store itself is large.
        command = "opkiln cache gc --now --max-size 1K" if held > _LITTLE else _move_command()
        return (failed if found.free < _TOO_LITTLE else warned)(facts, command)
    if held > limit:
        return warned(f"{facts}, more than {size(limit)}", "opkiln cache gc")
    return passed(f"{facts} of at most {size(limit)}")


def inodes(here: Facts) -> Diagnosis:
    """The store's file system has inodes left."""
    found = space_at(here.root)
    if found.inodes is None:
        return passed(f"{found.path} has no limit")
    facts = f"{found.inodes} left at {found.path}"
    if found.inodes >= _FEW:
        return passed(facts)
    return (failed if found.inodes < _TOO_FEW else warned)(facts, _move_command())


def noexec(here: Facts) -> Diagnosis:
    """Libraries can be loaded from every layer, and from the directory that the user asked for.

    A store that is mounted noexec is not used, so it is not one of the layers.
    """
    location = here.store.location
    wanted = [os.path.join(path, LAYOUT) for path, asked in store_candidates() if asked][:1]
    own = [path for path in wanted if space_at(path).noexec]
    listed = [layer.root for layer in location.layers if os.path.isdir(layer.root)]
    barred = [*own, *(path for path in listed if path not in own and space_at(path).noexec)]
    if not barred:
        return passed("no layer is mounted noexec")
    facts = f"{', '.join(barred)} is mounted noexec: libraries cannot be loaded from there"
    return failed(facts, _move_command()) if own else warned(facts, "unset OPKILN_STORE_LAYERS")


def layers(here: Facts) -> Diagnosis:
    """The listed read-only layers are valid, and only their owners can write to them."""
    listed = [layer for layer in here.store.location.layers if layer.listed]
    if not listed:
        return passed("none is listed (OPKILN_STORE_LAYERS)")
    asked = list(zip(settings.store_layers, listed, strict=True))
    found = [refusal for each in asked if (refusal := _refusal(*each))]
    if not found:
        return passed(", ".join(path for path, _ in asked))
    return warned(join(*(refusal.evidence for refusal in found)), found[0].command)


def _refusal(path: str, layer: Layer) -> Diagnosis | None:
    """Why a layer is not used; None if it is. ``path`` is as the user wrote it."""
    look = f"ls -ld {shlex.quote(path)}"
    if layer.bundle:
        try:
            with archive.Bundle(path, listed=True):
                return None
        except Damaged as error:
            return warned(f"{path} is damaged: {error}", look)
        except StoreError as error:
            return warned(join(error.what, error.why), copyable_command(error.hint) or look)
    if not os.path.exists(path):
        return warned(f"{path} does not exist", look)
    if not os.path.isdir(layer.root):
        return warned(f"{path} is not a layer: it has no directory {LAYOUT}", look)
    # The listed path may be a symbolic link; the layer's directory in it may not.
    for each, state in ((path, os.stat(path)), (layer.root, os.lstat(layer.root))):
        if reason := fault(each, state, listed=True):
            return warned(reason, f"ls -ld {shlex.quote(each)}")
    return None


def remotes(_: Facts) -> Diagnosis:
    """The settings say which artifacts of remote tiers are trusted. Connects to no tier."""
    urls = settings.remotes
    if not urls:
        return passed("none is named (OPKILN_REMOTES)")
    named = ", ".join(urls)
    if reason := terms.why_no_tier_is_asked():
        facts = f"{named}: not asked, {reason}"
        return passed(facts) if settings.push is not None else warned(facts, "unset OPKILN_REMOTES")
    try:
        keys = signatures.keys_to_trust() or ()
        locked = lockfile.read(settings.lock) if settings.lock else ()
    except StoreError as error:
        return warned(f"{named}: not asked, {error.what}", copyable_command(error.hint))
    trusted = f"{count(len(keys), 'trusted key')}, {count(len(locked), 'artifact')} in a lock file"
    return passed(f"{named}; {trusted}")


def clock(here: Facts) -> Diagnosis:
    """Files that are written to the store get the time of this machine."""
    directory, before = space_at(here.root).path, time.time()
    try:
        written = _time_of_a_new_file(directory)
    except OSError:
        return skipped(f"nothing can be written to {directory}: see store")
    skew = written - before
    how = f"{abs(skew):.1f} s {'ahead' if skew > 0 else 'old'}"
    facts = f"a file written to {directory} now is {how}"
    if abs(skew) > _SKEW:
        why = "the file server's clock differs, so files are hashed more often"
        return warned(f"{facts}: {why}", "timedatectl set-ntp true")
    return passed(facts)


def _time_of_a_new_file(directory: str) -> float:
    """The current time on a file system. Raises OSError."""
    with tempfile.NamedTemporaryFile(prefix=".opkiln-doctor-", dir=directory) as file:
        file.write(b"x")
        file.flush()  # a full file system allows the name and refuses the first byte
        return os.fstat(file.fileno()).st_mtime


def leftovers(here: Facts) -> Diagnosis:
    """There are no staged files of killed processes. (The kernel releases their locks.)"""
    staging, now = os.path.join(here.root, "staging"), time.time()
    old = 0
    for name in inventory.list_names(staging):
        path = os.path.join(staging, name)
        inside = (os.path.join(path, each) for each in inventory.list_names(path))
        try:
            newest = max(os.lstat(each).st_mtime for each in (path, *inside))
        except FileNotFoundError:
            continue  # it was published just now
        old += newest < now - _LEFTOVER
    if old:
        left = f"{count(old, 'directory', 'directories')} in {staging}"
        return warned(f"{left} that a killed process left", "opkiln cache gc")
    return passed("no process left anything behind")


def _move_command() -> str:
    """The command that moves the store to a usable directory; empty if there is none."""
    asked, origin = origin_of("cache_dir")
    if asked:
        with override(cache_dir=None):
            usual, expected = next(store_candidates())
        found = space_at(usual)
        if (
            expected
            and found.free >= _LITTLE
            and not found.noexec
            and os.access(found.path, os.W_OK)
            and not any(_is_foreign(path) or _is_open(path) for path in _existing_paths(usual))
        ):
            return f"unset {origin}"
    other = _usable_directory()
    return _make_command(os.path.join(other, f"opkiln-{os.getuid()}-store")) if other else ""


def _usable_directory() -> str:
    """A writable directory with enough space, where libraries can be loaded; empty if none."""
    for place in ("/tmp", "/var/tmp", os.path.expanduser("~"), "/dev/shm"):
        if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            found = space_at(place)
            if not found.noexec and not found.read_only and found.free >= _LITTLE:
                return place
    return ""


# Where builds work


def tmpdir(_: Facts) -> Diagnosis:
    """The temporary directory exists and can be written to. Writes a file to find out."""
    path = _tmpdir()
    if not os.path.lexists(path):
        return failed(f"{_label(path)} does not exist", f"mkdir -p -m 700 {shlex.quote(path)}")
    if not os.path.isdir(path):
        return failed(f"{_label(path)} is not a directory", _tmpdir_command())
    try:
        _time_of_a_new_file(path)
    except OSError as error:
        return failed(f"{_label(path)} cannot be written to: {error.strerror}", _tmpdir_command())
    return passed(_label(path))


def tmpdir_noexec(_: Facts) -> Diagnosis:
    """Libraries can be loaded from the temporary directory, for load tests."""
    found = _tmpdir_space()
    if found.noexec:
        why = "is mounted noexec: libraries that are built there cannot be loaded"
        return failed(f"{_label(found.path)} {why}", _tmpdir_command())
    return passed(f"{found.path} is not mounted noexec")


def tmpdir_space(_: Facts) -> Diagnosis:
    """The temporary directory has enough space for builds."""
    found = _tmpdir_space()
    facts = f"{found} at {found.path}"
    if found.inodes is not None and found.inodes < _TOO_FEW:
        return failed(f"{facts}, and only {found.inodes} inodes", _tmpdir_command())
    if found.free >= _LITTLE:
        return passed(facts)
    return (failed if found.free < _TOO_LITTLE else warned)(facts, _tmpdir_command())


def _tmpdir() -> str:
    return os.path.abspath(settings.tmpdir or "/tmp")


def _tmpdir_space() -> Space:
    if not os.path.isdir(_tmpdir()):
        raise Missing(f"{_tmpdir()} does not exist: see tmpdir")
    return space_at(_tmpdir())


def _label(path: str) -> str:
    origin = origin_of("tmpdir")[1]
    return f"{origin}={path}" if origin.isupper() else path


def _tmpdir_command() -> str:
    """The command that moves builds to a usable directory; empty if there is none."""
    other = _usable_directory()
    return f"export OPKILN_TMPDIR={shlex.quote(other)}" if other else ""


def shared_memory(_: Facts) -> Diagnosis:
    """/dev/shm can be used: builds share their budget there, data loaders and NCCL their data."""
    try:
        found = space_at(SHARED_MEMORY)
        with tempfile.TemporaryFile(prefix="opkiln-doctor-", dir=SHARED_MEMORY):
            pass
    except OSError as error:
        return warned(
            f"{SHARED_MEMORY} cannot be written to ({error.strerror}): builds share their budget "
            "through the temporary directory instead, and torch's data loaders may fail",
            root_command(f"mount -t tmpfs -o size=8G,mode=1777 tmpfs {SHARED_MEMORY}"),
        )
    facts = str(found)
    larger = root_command(f"mount -o remount,size=8G {SHARED_MEMORY}")
    if found.total <= _SHARED_LEAST:
        return warned(
            f"{facts}: enough for builds, but data loaders and NCCL share memory through it "
            "(containers: --shm-size=8g)",
            larger,
        )
    return warned(f"{facts}: it is full", larger) if found.free < 1 << 20 else passed(facts)
