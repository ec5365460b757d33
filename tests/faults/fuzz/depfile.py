"""What a compiler says it read."""

from __future__ import annotations

from opkiln.store.deps import parse_depfile


def one(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    paths = parse_depfile(text)
    assert sum(map(len, paths)) <= len(text)
    assert len(set(paths)) == len(paths)
    assert all(paths)
