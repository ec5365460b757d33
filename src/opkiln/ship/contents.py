"""What a layer holds that may be shipped: its entries, each looked at before it is."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from opkiln.errors import StoreError
from opkiln.settings import LAYOUT
from opkiln.store import inventory
from opkiln.store.entry import LOG, MANIFEST, SIDECAR, Leaf, Refused, examine, read_sidecar
from opkiln.store.recheck import Hasher, deps_key


class Entry(NamedTuple):
    """One entry of a layer, whose manifest and payload have the digests they should have."""

    place: str  # below the layer: v1/ops/<distribution>/<op>/<intent>/<build>/<deps>
    directory: str
    manifest: dict[str, Any]
    lists: dict[str, Any]  # of its sidecar

    @property
    def payload(self) -> str:
        return os.path.join(self.directory, self.manifest["payload"])

    @property
    def files(self) -> tuple[str, ...]:
        """The names of what is shipped of it: no log, which tells of the machine that built it."""
        return tuple(sorted((MANIFEST, SIDECAR, self.manifest["payload"])))


def entries(layer_dir: str) -> tuple[Entry, ...]:
    """The ops of a layer, by their place. StoreError where there are none, or one is damaged."""
    found = []
    for directory in inventory.directories(os.path.join(layer_dir, LAYOUT, "ops"), 5):
        leaf = examine(directory, {}, Hasher(), listed=True, external=False, own=False)
        if not isinstance(leaf, Leaf):
            reason = leaf.reason if isinstance(leaf, Refused) else f"it has no {MANIFEST}"
            raise StoreError(f"{directory} cannot be shipped: {reason}")
        known = {MANIFEST, SIDECAR, LOG, leaf.manifest["payload"]}
        if more := sorted(set(os.listdir(directory)) - known):
            raise StoreError(f"{directory} cannot be shipped: it also has {', '.join(more)}")
        try:
            lists = read_sidecar(directory)
        except (OSError, ValueError) as error:
            raise StoreError(f"{directory} cannot be shipped: {SIDECAR}: {error}") from error
        place = os.path.relpath(directory, layer_dir)
        if (told := named(leaf.manifest)) != (*place.split("/")[2:4], place.split("/")[-1]):
            raise StoreError(
                f"{directory} cannot be shipped: it is the entry {'/'.join(told)}, elsewhere"
            )
        found.append(Entry(place, directory, leaf.manifest, lists))
    if not found:
        raise StoreError(f"{layer_dir} has no ops to ship", hint="opkiln build --all --out DIR")
    return tuple(sorted(found, key=lambda each: each.place))


def named(manifest: dict[str, Any]) -> tuple[str, str, str]:
    """(distribution, op, deps_key): what a manifest says of the place that it is in."""
    deps = manifest["deps"]
    own = (tuple(each[:3]) for each in deps["own"])
    key = deps_key(own, deps["external"], deps["watches"])
    return manifest["distribution"], manifest["op"], key
