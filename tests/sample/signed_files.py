"""Signatures and digests of files, as an entry or a receipt records them."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from opkiln.base.digest import current_signatures

if TYPE_CHECKING:
    from pathlib import Path


def at_rest(path: Path) -> list[int]:
    """The signature of a file that was last changed long before it was read."""
    return [*current_signatures((str(path),)), time.time_ns() + 60_000_000_000]


def just_saved(path: Path) -> list[int]:
    """The signature of a file that was read right after it was changed."""
    return [*current_signatures((str(path),)), path.stat().st_ctime_ns]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
