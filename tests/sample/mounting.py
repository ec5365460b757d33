"""Mounts that several processes share, and nobody else sees."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextmanager
def held(command: Sequence[str]) -> Iterator[list[str]]:
    """What to put before commands so that they see the mounts that ``command`` makes.

    ``command`` ends by executing what is appended to it.
    """
    holder = subprocess.Popen([*command, "sh", "-c", "echo; read line"], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        yield ["nsenter", "--target", str(holder.pid), "--mount"]
    finally:
        holder.communicate("")
