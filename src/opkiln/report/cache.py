"""The store: where it is and why, its size, the room that is left, and what was built last."""

from __future__ import annotations

import heapq
import os
from typing import NamedTuple

from opkiln.errors import StoreError
from opkiln.report.machine import Space, space
from opkiln.settings import settings
from opkiln.store import entry, inventory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.store.layers import Store

# A store may hold thousands of entries; of the newest, a report tells.
_SHOWN = 40


class Build(NamedTuple):
    """What an entry's manifest says of how it came to be."""

    op: str
    distribution: str
    made_for: str  # "cpu", "cuda 9.0a"
    ended: float  # seconds since the epoch
    seconds: float
    max_rss: int  # bytes, of the largest compile; 0 where none ran
    directory: str


class StoreStatus(NamedTuple):
    """Where entries are read and written."""

    root: str | None  # None: nothing can be written
    layers: tuple[str, ...]
    notes: tuple[str, ...]  # why it is not where it was asked to be, or cannot be read
    sizes: inventory.Sizes | None
    limit: int
    space: Space | None
    builds: tuple[Build, ...]  # the newest first


def status(store: Store) -> StoreStatus:
    """The layers, and what is in the one that is written to."""
    root, notes = store.root, store.location.notes
    sizes: inventory.Sizes | None = None
    builds: list[Build] = []
    if root is not None:
        try:
            sizes, builds = inventory.sizes(root), _builds(root)
        except StoreError as error:
            notes = (*notes, error.what)  # a report is what is looked at when this happens
    return StoreStatus(
        root=root,
        layers=tuple(layer.root for layer in store.location.layers),
        notes=notes,
        sizes=sizes,
        limit=settings.cache_max_size,
        space=None if root is None else space(root),
        builds=tuple(builds),
    )


def _builds(root: str) -> list[Build]:
    ops = (each for each in inventory.entries(root) if each.kind == inventory.OP)
    newest = heapq.nlargest(_SHOWN, ops, key=lambda each: each.published)
    found = [_build(each.directory) for each in newest]
    return sorted((each for each in found if each is not None), key=lambda each: -each.ended)


def _build(directory: str) -> Build | None:
    try:
        with open(os.path.join(directory, entry.MANIFEST), "rb") as file:
            manifest = entry.parse_manifest(file.read())
        target = manifest["target"]
        made_for = " ".join((target["backend"], ";".join(target["archs"]))).strip()
        return Build(
            op=str(manifest["op"]),
            distribution=str(manifest["distribution"]),
            made_for=made_for,
            ended=float(manifest["created"]),
            seconds=float(manifest["seconds"]),
            max_rss=int(manifest["max_rss"]),
            directory=directory,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # damaged, or collected meanwhile: `cache verify` speaks of these
