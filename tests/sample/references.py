"""The references of a library's functions, beside its other names."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace


def references(op: str) -> SimpleNamespace:
    """What the module of an op's functions has, with the reference of each in its place."""
    module = import_module(f"opkiln.ops.{op}.functions")
    found = {name: getattr(each, "reference", each) for name, each in vars(module).items()}
    return SimpleNamespace(**found)
