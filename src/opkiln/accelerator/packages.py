"""Which packages are installed, without importing them."""

from __future__ import annotations


def installed(name: str) -> bool:
    """Whether a package of this name can be imported, or is."""
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except ValueError:
        return True  # a module that somebody put into sys.modules by hand: it has no spec
