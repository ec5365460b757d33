"""Writes the leaves of the store: an object or a library with its manifest and its long lists."""

from __future__ import annotations

import os
import shutil
from typing import Any

from opkiln.digest import sha256_file
from opkiln.store import deps, entry


def write(
    directory: str,
    payload: str,
    manifest: dict[str, Any],
    found: tuple[deps.Fact, ...],
    lists: dict[str, Any],
    log: str = "",
) -> str:
    """Write the files of a leaf, ready to be published. Returns its name."""
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
        "deps": deps.to_manifest(found),
    }
    long = {**lists, "facts": deps.rows(found), "schema": entry.SCHEMA}
    files = {
        entry.MANIFEST: entry.write_manifest(full),
        entry.SIDECAR: entry.write_manifest(long),
        entry.LOG: log.encode("utf-8", "surrogateescape"),
    }
    for file, data in files.items():
        with open(os.path.join(directory, file), "wb") as out:
            out.write(data)
    return deps.deps_key(full["deps"])
