"""Layers as they are shipped, made without a compiler: entries with nothing to depend on."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from opkiln.store import entry, key
from sample.levels import X86_V1

if TYPE_CHECKING:
    from pathlib import Path

DEPS: dict[str, Any] = key.manifest_facts([])
NAME = key.deps_key(DEPS)


def add(
    layer: Path,
    op: str,
    payload: bytes,
    *,
    intent: str = "a" * 40,
    build: str = "b" * 40,
    distribution: str = "somebody",
    changes: dict[str, Any] | None = None,
) -> Path:
    """Add an entry to a layer; ``changes`` go into its manifest. Returns its directory."""
    leaf = layer / "v1" / "ops" / distribution / op / intent / build / NAME
    leaf.mkdir(parents=True)
    manifest = {
        "schema": entry.SCHEMA,
        "kind": "plain",
        "op": op,
        "distribution": distribution,
        "payload": f"{op}.so",
        "size": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(),
        "deps": DEPS,
        "target": {"backend": "cpu", "cpu": X86_V1, "cpu_features": [], "archs": []},
        **(changes or {}),
    }
    (leaf / f"{op}.so").write_bytes(payload)
    (leaf / "manifest.json").write_bytes(entry.write_manifest(manifest))
    (leaf / "inputs.json").write_bytes(entry.write_manifest({"schema": entry.SCHEMA}))
    return leaf
