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


def _place() -> str:
    chosen: str | None = settings.tmpdir
    return chosen if chosen and os.path.isdir(chosen) else "/tmp"


def unwritable() -> bool:
    """Whether no probe has a directory to compile in: then nothing is known of any compiler."""
    return not os.access(_place(), os.W_OK | os.X_OK)


@contextmanager
def scratch() -> Iterator[str]:
    """A private node-local directory that is gone afterwards, also when this process is killed.

    Where the user's choice does not exist, the system's serves: a build says so. Raises OSError.
    """
    path = os.path.abspath(f"{_place()}/opkiln-probe-{os.urandom(4).hex()}")
    # The watchdog first: a process killed between the two would leave what nobody knows of.
    process.register_scratch(path)
    try:
        os.mkdir(path, 0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        process.release_scratch(path)
