"""What programs say they read: the observer's log, to which any of them can write."""

from __future__ import annotations

from opkiln.observing import inputs, log


def one(data: bytes) -> None:
    seen = log.parse(data)
    if seen is None:
        return
    assert seen.started
    assert seen.complete or not data.endswith(b"\0") or b"\0" in data
    found = inputs.of(seen, "/stage")
    assert not any(path.startswith("/stage/") for _, path in found.paths)
    assert not {path for _, path in found.paths} & seen.made
