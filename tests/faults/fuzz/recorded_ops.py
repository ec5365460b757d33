"""What `opkiln cache record` noted, edited by hand or cut off."""

from __future__ import annotations

from fuzz.scratch import file

from opkiln.errors import StoreError
from opkiln.loading import recording


def one(data: bytes) -> None:
    try:
        uses = recording.read(file("ops.jsonl", data))
    except StoreError:
        return
    assert len(set(uses)) == len(uses)
