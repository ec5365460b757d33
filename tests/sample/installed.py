"""What this environment has installed, asked without an import."""

from __future__ import annotations

from importlib import metadata

import pytest


def require(*distributions: str) -> None:
    """Skip the test if one of these is not installed.

    Importing pip, as ``pytest.importorskip`` would, has setuptools refuse to be imported in the
    rest of the process: the two want different versions of distutils.
    """
    for name in distributions:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
