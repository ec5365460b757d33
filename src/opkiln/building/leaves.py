"""The leaves of the store: an object or a library with its manifest, its long lists, and what the
machine that loads it must have."""

from __future__ import annotations

import os
import shutil
from typing import Any

from opkiln.arch import cpu
from opkiln.binary import elf
from opkiln.build_model import Plan
from opkiln.digest import sha256_file
from opkiln.model import CUDA, ROCM
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


def needs_of(path: str, plan: Plan) -> dict[str, Any]:
    """What a library requires, by its ELF tables, for a manifest. ``decision.fit`` compares that
    with the machine.

    ``cpu`` lists the CPU features by the kernel's names. ``images`` is the device code that the
    file really contains. ``symbols`` lists symbols that other libraries must define, with the
    library and the version they were linked to. One symbol for each version is enough, because a
    library that has one symbol of a version has all of them. Raises LoadError.
    """
    found, target = elf.read(path), plan.target
    symbols = {(soname, version or name): name for soname, name, version in found.symbols}
    versions = {(soname, name): version for soname, name, version in found.symbols}
    return {
        "cpu": sorted(cpu.kernel_names(cpu.requires(target.cpu, target.cpu_features))),
        "sonames": list(found.needed),
        "symbols": sorted(
            [soname, name, versions[soname, name]] for (soname, _), name in symbols.items()
        ),
        "images": list(_images(path, target.backend)),
    }


def _images(path: str, backend: str) -> tuple[str, ...]:
    if backend not in (CUDA, ROCM):
        return ()
    from opkiln.binary import fatbin

    return fatbin.images(path) if backend == CUDA else fatbin.hip_images(path)
