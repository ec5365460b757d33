"""The parts of a manifest, and the type of each.

A matching digest shows that a file is intact, not that opkiln wrote it. So the types are checked
once, when a manifest is read, and all other code can rely on them. Missing parts are not an error
here: the code that needs a part reports it. Unknown parts are ignored.
"""

from __future__ import annotations

from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# A shape is a type, a list of one shape, a dict of parts (all optional), a Row, or Named.
_NUMBER = (int, float)


class Row:
    """A list that begins with fixed parts. With ``rest``, any number of items of that shape follow;
    in a manifest these are numbers."""

    def __init__(self, *parts: Any, rest: Any = None) -> None:
        self.parts = parts
        self.rest = rest
        self.flat = {type}.issuperset(map(type, parts))  # no lists or objects in it


class Named:
    """A dict with any keys, and one shape for all of its values."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


_TEXTS = [str]
_MANIFEST = {
    "kind": str,
    "op": str,
    "distribution": str,
    "spec": str,
    "payload": str,
    "size": int,
    "sha256": str,
    "source": str,
    "wall": _NUMBER,
    "seconds": _NUMBER,
    "created": _NUMBER,
    "max_rss": int,
    "toolchain": Named(str),
    "target": {
        "backend": str,
        "system": str,
        "machine": str,
        "cpu": str,
        "cpu_features": _TEXTS,
        "abi_tag": str,
        "debug": bool,
        "flags": [Row(str, _TEXTS)],
        "archs": _TEXTS,
    },
    "needs": {
        "cpu": _TEXTS,
        "sonames": _TEXTS,
        "symbols": [Row(str, str, str)],
        "images": _TEXTS,
    },
    "deps": {
        "own": [Row(str, str, str)],
        "others": str,
    },
    "fetched": Named(str),
    # Parts of a sidecar, of a bundle's index and of its signatures.
    "facts": [Row(str, str, str, str, rest=int)],  # kind, anchor, path, value, signature
    "inputs": {
        "spec": {"sources": _TEXTS},
        "target": Named(object),
        "toolchain": Named({"version": str, "identity": str}),
        "torch": Named(str),
        "steps": [_TEXTS],
    },
    "members": [Row(str, int, str)],
    "signatures": [Row(str, str)],
}
_WORDS = {
    str: "a string",
    int: "a number",
    bool: "true or false",
    _NUMBER: "a number",
}


def wrong(body: dict[str, Any]) -> str:
    """A message about the first part that has the wrong type; empty if there is none."""
    return _wrong(body, _MANIFEST, "")


# Comparing types is enough, because JSON has no subclasses.


def _wrong(value: Any, shape: Any, where: str) -> str:
    if isinstance(shape, (type, tuple)):
        fits = shape is object or type(value) in (shape if isinstance(shape, tuple) else (shape,))
        return "" if fits else _mismatch(value, where, _WORDS[shape])
    if isinstance(shape, (dict, Named)):
        if type(value) is not dict:
            return _mismatch(value, where, "an object")
        shapes = dict.fromkeys(value, shape.shape) if isinstance(shape, Named) else shape
        parts = [
            (each, shapes[name], f"{where}.{name}" if where else name)
            for name, each in value.items()
            if name in shapes
        ]
    else:
        if type(value) is not list:
            return _mismatch(value, where, "a list")
        row = shape if isinstance(shape, Row) else Row(rest=shape[0])
        count, more = len(row.parts), row.rest is not None
        if len(value) < count or (len(value) > count and not more):
            return f"{where} has {len(value)} parts, not {count}{' and more' if more else ''}"
        parts = [
            (value[place], row.parts[place] if place < count else row.rest, f"{where}[{place}]")
            for place in _of_each_type(value, row)
        ]
    return next(filter(None, (_wrong(*part) for part in parts)), "")


def _of_each_type(value: list[Any], row: Row) -> Sequence[int]:
    """The places in a list to look at. A sidecar has thousands of rows: of those whose parts have
    equal types, one is enough."""
    if row.parts or not (row.rest is str or (isinstance(row.rest, Row) and row.rest.flat)):
        return range(len(value))
    types = [tuple(map(type, each)) if type(each) is list else type(each) for each in value]
    return sorted(map(types.index, set(types)))


def _mismatch(value: Any, where: str, expected: str) -> str:
    shown = repr(value)
    return f"{where} is {shown if len(shown) <= 40 else shown[:39] + '…'}, not {expected}"
