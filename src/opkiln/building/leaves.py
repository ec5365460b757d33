"""Writes the leaves of the store: an object or a library with its manifest and its long lists."""

from __future__ import annotations

import os
import shutil
from typing import Any

from opkiln import plan as plans
from opkiln.build_model import Plan
from opkiln.digest import sha256_file
from opkiln.observing import inputs
from opkiln.store import deps, entry


def sidecar(
    plan: Plan,
    read: tuple[str, ...],
    dependencies: deps.Dependencies,
    seen: inputs.Inputs | None,
) -> dict[str, Any]:
    """The long lists of a leaf: every file read, by anchor, and the data that `recheck` needs."""
    places = plans.anchors_of(plan.spec, plan.toolchain)
    inline = {os.path.join(plan.spec.root, source) for source, _ in plan.spec.inline}
    return {
        "read": [list(_anchored(path, places)) for path in read if path not in inline],
        "external": [list(item) for item in dependencies.external_files],
        "names": list(dependencies.names),
        **({} if seen is None else {"observed": _recorded(seen, places)}),
    }


def _recorded(seen: inputs.Inputs, places: dict[str, str]) -> dict[str, Any]:
    """What an object that is found again must still say of itself; ``read`` has its files."""
    absent = [[*_anchored(directory, places), list(names)] for directory, names in seen.absent]
    chosen = [[name, list(paths)] for name, paths in seen.chosen]
    return {"absent": absent, "programs": list(seen.programs), "chosen": chosen}


def seen_inputs(lists: dict[str, Any], places: dict[str, str]) -> inputs.Inputs | None:
    """What a sidecar tells of a step, except its files; None if the step was not observed."""
    saw = lists.get("observed")
    if saw is None:
        return None
    absent = tuple(
        (os.path.join(places[anchor], path), tuple(names)) for anchor, path, names in saw["absent"]
    )
    chosen = tuple((name, tuple(paths)) for name, paths in saw["chosen"])
    return inputs.Inputs((), absent, tuple(saw["programs"]), chosen)


def _anchored(path: str, places: dict[str, str]) -> tuple[str, str]:
    for anchor in ("torch", "python", "wheels", "src", "opkiln"):
        place = places.get(anchor)
        if place and path.startswith(place.rstrip("/") + "/"):
            return anchor, path[len(place.rstrip("/")) + 1 :]
    return "abs", path


def write(
    directory: str,
    payload: str,
    manifest: dict[str, Any],
    dependencies: deps.Dependencies,
    lists: dict[str, Any],
    log: str = "",
) -> None:
    """Write the files of a leaf, ready to be published."""
    os.mkdir(directory, 0o700)
    name = os.path.basename(payload)
    try:
        os.link(payload, os.path.join(directory, name))
    except OSError:  # a file system without hard links
        shutil.copy(payload, directory)
    full = {
        **manifest,
        "schema": entry.SCHEMA,
        "payload": name,
        "size": os.stat(payload).st_size,
        "sha256": sha256_file(payload),
        "deps": deps.to_manifest(dependencies),
    }
    files = {
        entry.MANIFEST: entry.write_manifest(full),
        entry.SIDECAR: entry.write_manifest({**lists, "schema": entry.SCHEMA}),
        entry.LOG: log.encode("utf-8", "surrogateescape"),
    }
    for file, data in files.items():
        with open(os.path.join(directory, file), "wb") as out:
            out.write(data)
