"""The entry point that setuptools calls for every project if opkiln is installed.

Most projects do not use opkiln. For those it only reads their configuration files, and imports
nothing.
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
    """Precompile the ops of a project, if it has any."""
    # A setup.py that uses BuildExtension has imported it.
    if _OURS in sys.modules or _mentions_ops():
        from opkiln.ship import setuptools

        setuptools.finalize(dist)


def _mentions_ops() -> bool:
    """Whether a file of the project names the group. setuptools reads it properly later."""
    for name in _FILES:
        try:
            with open(name, encoding="utf-8") as file:
                if _MENTION in file.read():
                    return True
        except (OSError, UnicodeDecodeError):
            continue  # there is no such file, or setuptools reports what is wrong with it
    return False
