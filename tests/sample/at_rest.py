"""Files at rest. One that changed shortly before it was read is always hashed: within two seconds,
which tests shorten."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from opkiln.base import digest

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SETTLED_NS = 50_000_000
# Code for the start of a child.
IN_CHILD = f"from opkiln.base import digest; digest._SETTLED_NS = {SETTLED_NS}\n"


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time in this process."""
    monkeypatch.setattr(digest, "_SETTLED_NS", SETTLED_NS)


def wait(*roots: Path) -> None:
    """Wait until these files, and those below them, have come to rest."""
    paths = [path for root in roots for path in (root, *root.rglob("*"))]
    newest = max(os.lstat(path).st_ctime for path in paths)
    time.sleep(max(0.0, newest + SETTLED_NS / 1e9 + 0.02 - time.time()))
