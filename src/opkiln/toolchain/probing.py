"""A directory for what a probe compiles."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager

from opkiln import process
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def scratch() -> Iterator[str]:
    """A private node-local directory that is gone afterwards, also when this process is killed.

    Where the user's choice does not exist, the system's serves: a build says so. Raises OSError.
    """
    chosen = settings.tmpdir
    place = chosen if chosen and os.path.isdir(chosen) else "/tmp"
    path = os.path.abspath(f"{place}/opkiln-probe-{os.urandom(4).hex()}")
    # The watchdog first: a process killed between the two would leave what nobody knows of.
    process.register_scratch(path)
    try:
        os.mkdir(path, 0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        process.release_scratch(path)
