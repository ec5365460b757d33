"""What programs say they read: the observer's log, to which any of them can write."""

from __future__ import annotations

from opkiln.building import gather
from opkiln.building.observing import log
from opkiln.machine.facts import CHOICE


def one(data: bytes) -> None:
    seen = log.parse(data)
    if seen is None:
        return
    assert seen.started
    assert seen.complete or not data.endswith(b"\0") or b"\0" in data
    found = gather.list_inputs(seen, "/stage")
    paths = {path for kind, path, _ in found.facts if kind != CHOICE}
    assert not any(path.startswith("/stage/") for path in paths)
    assert not paths & seen.made
