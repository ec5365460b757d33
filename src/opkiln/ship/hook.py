"""What setuptools calls for every project that is built beside an installed opkiln.

Most of them have nothing to do with it: so this looks at their files, and imports nothing for them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from setuptools import Distribution

_OURS = "opkiln.ship.setuptools"
_FILES = ("pyproject.toml", "setup.cfg", "setup.py")
_MENTION = "opkiln.ops"  # the group of entry points, as the registry has it


def finalize(dist: Distribution) -> None:
    """Have the ops of a project precompiled, where it has ops."""
    # A setup.py that uses BuildExtension has imported it.
    if _OURS in sys.modules or _mentions_ops():
        from opkiln.ship import setuptools

        setuptools.finalize(dist)


def _mentions_ops() -> bool:
    """Whether a file of the project in the current directory names the group. What it says there is
    read when setuptools has read it."""
    for name in _FILES:
        try:
            with open(name, encoding="utf-8") as file:
                if _MENTION in file.read():
                    return True
        except (OSError, UnicodeDecodeError):
            continue  # there is none, or it is for setuptools to say what is wrong with it
    return False
