"""The pool: what tests have compiled, kept between runs and shared by all clones of a user.

It is a store of the product's, so everything in it is found by content: an edited source, another
compiler or other flags are another key. It may be deleted at any time.

- ``CATALOGUE`` is the store of tests/ops. Its ops are built once.
- ``LAYER`` is listed in ``OPKILN_STORE_LAYERS`` of every other test. It has objects alone, so that
  a compile that was done before becomes a copy, and nothing else about a build changes.
- ``directory`` is for projects whose path is part of what they compile, ``program`` for what is
  compiled beside the product.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from opkiln import settings
from opkiln.base import trust

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = os.environ.get("TEST_POOL") or os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "opkiln-tests"
)
ROOT = Path(_ROOT)
CATALOGUE = ROOT / "catalogue"
LAYER = ROOT / "layer"
OBJECTS = LAYER / settings.LAYOUT / "objects"


_KEPT_SECONDS = 14 * 24 * 3600


def make() -> None:
    """Make the pool's directories, for this user only. Objects of long ago are let go: what is
    still wanted is compiled again."""
    trust.make_private(str(OBJECTS))
    oldest = time.time() - _KEPT_SECONDS
    for leaf in OBJECTS.glob("*/*/*"):
        with contextlib.suppress(OSError):  # another process was first
            if leaf.stat().st_mtime < oldest:
                shutil.rmtree(leaf)


def add(store: Path) -> list[str]:
    """Put the objects of a test's store into the pool. Returns the names of those that it lacked.

    Objects that a test has damaged are added, too; whoever finds one refuses it by its digest.
    """
    objects = store / settings.LAYOUT / "objects"
    if not objects.is_dir():
        return []
    found = []
    for leaf in objects.glob("*/*/*"):
        final = OBJECTS / leaf.relative_to(objects)
        if leaf.name.startswith(".") or final.exists() or not leaf.is_dir():
            continue
        trust.make_private(str(final.parent))
        with tempfile.TemporaryDirectory(prefix=".new-", dir=final.parent) as new:
            copy = Path(new) / "leaf"
            try:
                shutil.copytree(leaf, copy)
                copy.rename(final)
            except OSError:
                continue  # another worker was first, or the test made it unreadable
        found.append(f"{leaf.parent.name}/{leaf.name}")
    return found


@contextlib.contextmanager
def directory(name: str) -> Iterator[Path]:
    """An empty directory that has the same path in every run, for projects that are compiled with
    their own path: so what they compile is found again. One process at a time has it."""
    made = ROOT / "directories" / name
    trust.make_private(str(made.parent))
    with open(made.parent / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(0o700)
        yield made
        shutil.rmtree(made)


def program(argv: list[str]) -> Path:
    """What a compiler makes of one source: compiled now, or before from the same text."""
    text = subprocess.run([*argv, "-E", "-P"], check=True, capture_output=True).stdout
    found = os.stat(os.path.realpath(argv[0]))
    flags = [each for each in argv[1:] if each.startswith("-") and not each.startswith("-I")]
    name = repr([argv[0], found.st_size, found.st_mtime_ns, flags]).encode()
    made = ROOT / "programs" / hashlib.sha256(name + text).hexdigest()
    if not made.exists():
        trust.make_private(str(made.parent))
        with tempfile.TemporaryDirectory(dir=made.parent) as new:
            subprocess.run([*argv, "-o", f"{new}/program"], check=True)
            os.rename(f"{new}/program", made)
    return made
