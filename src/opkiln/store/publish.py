"""Publishing: a finished directory appears in the store as a whole, or not at all.

Compilers write to a private node-local directory. What is kept is copied into ``staging/`` in the
store, synced, and renamed into place. The rename fails if another process has published the
entry in the meantime. The loser of that race then uses what it built itself.

The worst that a crash can leave is a directory in ``staging/``. It is never read, and gc removes
it.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from opkiln.base.digest import FULL
from opkiln.base.trust import make_private
from opkiln.errors import StoreError
from opkiln.settings import settings

_LOST = (errno.EEXIST, errno.ENOTEMPTY)


def scratch_root() -> str:
    """The node-local directory for builds: ``OPKILN_TMPDIR``, ``TMPDIR`` or /tmp."""
    return settings.tmpdir or "/tmp"


@contextmanager
def scratch(prefix: str) -> Iterator[str]:
    """A private node-local directory. It is removed afterwards, even if this process is killed."""
    from opkiln.run import process

    path = make_scratch(prefix)
    try:
        yield path
    finally:
        process.remove_scratch(path)


def make_scratch(prefix: str) -> str:
    """A new private node-local directory. It is removed when this process ends. Raises
    StoreError."""
    from opkiln.run import process

    try:
        return process.make_scratch(scratch_root(), prefix)
    except OSError as error:
        raise StoreError(
            f"cannot create a build directory in {scratch_root()}: {error.strerror}",
            hint="set OPKILN_TMPDIR to a writable node-local directory",
        ) from error


def room_in_words(room: os.statvfs_result) -> str:
    """The free space of a file system, in words. A disk without free inodes is full, too."""
    if room.f_files and not room.f_favail:
        return f"no inode is free there: it has {room.f_files} files, the most that it can have"
    return (
        f"{room.f_bavail * room.f_frsize} of {room.f_blocks * room.f_frsize} bytes are free there"
    )


def _why_full(error: OSError, directory: str) -> str:
    if error.errno not in FULL:
        return ""
    try:
        return room_in_words(os.statvfs(directory))
    except OSError:
        return ""  # it is gone: then the error itself says why


@contextmanager
def staging(root: str, relative: str, size: int) -> Iterator[str]:
    """A private directory in the store, for the files of a new entry; ``move`` follows. What is
    left in it is removed. Any OSError in the block becomes a StoreError, with the path and
    ``size``, the number of bytes."""
    path = os.path.join(root, "staging", secrets.token_hex(12))
    try:
        make_private(os.path.dirname(path))
        os.mkdir(path, 0o700)
        yield path
    except OSError as error:
        raise StoreError(
            f"{os.path.join(root, relative)} cannot be written ({size} bytes): "
            f"{error.strerror or error}",
            why=_why_full(error, root),
            hint="free space with `opkiln cache gc`, or set OPKILN_CACHE_DIR",
        ) from error
    finally:
        remove(path)


def move(staged: str, root: str, relative: str) -> str:
    """Move a directory of ``staging`` to ``root/relative``. Returns that path. The entry there may
    be another process's, if that one was faster. Raises OSError."""
    final = os.path.join(root, relative)
    # Not each after its copy: the first sync writes what the others need.
    for name in os.listdir(staged):
        sync(os.path.join(staged, name))
    sync(staged)
    try:
        _rename(staged, final)
    except OSError as error:
        if error.errno not in _LOST:
            raise
    else:
        sync(os.path.dirname(final))
    return final


def publish(source: str, root: str, relative: str) -> str:
    """Copy a finished directory to ``root/relative``. Returns as ``move``. Raises as
    ``staging``."""
    size = sum(entry.stat().st_size for entry in os.scandir(source))
    with staging(root, relative, size) as staged:
        for name in sorted(os.listdir(source)):
            _copy(os.path.join(source, name), os.path.join(staged, name))
        return move(staged, root, relative)


def _rename(staging: str, final: str) -> None:
    attempts = 10
    while True:
        try:
            make_private(os.path.dirname(final))
            os.rename(staging, final)
        except FileNotFoundError:
            # A collector has just removed the empty parent. Each run of gc does so only once.
            attempts -= 1
            if not attempts or not os.path.isdir(staging):
                raise
        else:
            return


def discard(root: str, directory: str) -> None:
    """Remove a whole entry, so that its name is free. Readers keep the files they have open.
    Another process may have removed it already. Raises OSError if it cannot be moved."""
    trash = set_aside(root, directory)
    if trash is not None:
        remove(trash)


def set_aside(root: str, directory: str) -> str | None:
    """Move an entry to a place where nobody looks for entries. Returns its new path, or None if it
    is gone already. Raises OSError if it cannot be moved."""
    trash = os.path.join(root, "staging", "damaged-" + secrets.token_hex(12))
    try:
        make_private(os.path.dirname(trash))
        os.utime(directory)  # otherwise another collector would take it for an old leftover
        os.rename(directory, trash)
    except FileNotFoundError:
        return None
    return trash


def put_back(trash: str, directory: str) -> None:
    """Undo ``set_aside``. If the same entry has been published since, that one stays. Raises
    OSError."""
    try:
        _rename(trash, directory)
    except OSError as error:
        if error.errno not in _LOST:
            raise
        remove(trash)


def remove(path: str) -> None:
    """Remove one of our directory trees. It may be gone already."""
    shutil.rmtree(path, ignore_errors=True)


def private_copy(path: str) -> str:
    """A copy of a verified file that lasts as long as this process. Raises OSError, StoreError."""
    return shutil.copy(path, make_scratch("private"))


def create(path: str, mode: int) -> BinaryIO:
    """A new file. Raises OSError; FileExistsError if there is one already."""
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def _copy(source: str, destination: str) -> None:
    mode = 0o700 if os.access(source, os.X_OK) else 0o600
    with create(destination, mode) as out, open(source, "rb") as data:
        shutil.copyfileobj(data, out, 1 << 20)


def sync(path: str) -> None:
    """Make a file, or the names in a directory, survive a power failure. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # from some network file systems
            raise
    finally:
        os.close(fd)
