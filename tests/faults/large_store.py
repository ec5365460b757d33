"""A store with very many entries, made from two real ones by hard links."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")


def roomy(tmp_path: Path) -> Path:
    """A directory on a file system that makes a million files at once: memory, where it can be."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return tmp_path
    return SHARED_MEMORY if room.f_bavail * room.f_frsize > 4 << 30 else tmp_path


def fill(root: Path, op: Path, built: Path, count: int) -> None:
    """``count`` entries: copies of an op's (each fifth) and of an object's, under other keys."""
    room = os.statvfs(root)
    if room.f_files and room.f_favail < 8 * count:
        pytest.skip(f"{root} has no room for {count} entries")
    sources = {True: _files(op), False: _files(built)}
    for number in range(count):
        name = hashlib.sha256(b"%d" % number).hexdigest()[:40]
        is_op = number % 5 == 0
        if is_op:
            place = f"ops/jit/op{number}/{op.parents[1].name}/{op.parents[0].name}/{op.name}"
        else:
            place = f"objects/{name[:2]}/{name}/{built.name}"
        os.makedirs(directory := os.path.join(root, place), 0o700)
        for file in sources[is_op]:
            _link(file, os.path.join(directory, os.path.basename(file)))


def _files(leaf: Path) -> list[str]:
    return [str(path) for path in leaf.iterdir()]


def _link(file: str, link: str) -> None:
    try:
        os.link(file, link)
    except OSError as error:
        if error.errno not in (errno.EMLINK, errno.EXDEV):
            raise
        shutil.copy(file, link)
