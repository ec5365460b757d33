"""The store's small records: receipts, remembered probes, a lock's holder, a builder's failure."""

from __future__ import annotations

import os
from pathlib import Path

from fuzz.scratch import directory

from opkiln.base.model import Artifact, OpSpec
from opkiln.decision import receipt
from opkiln.errors import OpkilnError
from opkiln.machine.toolchain import probing
from opkiln.store import gc, lock

SPEC = OpSpec(name="op", distribution="somebody", sources=("op.cpp",), root="/nowhere")


def one(data: bytes) -> None:
    base = Path(directory(), "records")
    base.mkdir(mode=0o700, exist_ok=True)
    _receipt(base, data)
    _memo(base, data)
    _lock(base, data)


def _receipt(base: Path, data: bytes) -> None:
    root = base / "v1"
    path = root / "receipts" / "somebody" / "op" / "x.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for each in (base, root, path.parent):
        each.chmod(0o700)
    path.write_bytes(data)
    path.chmod(0o600)
    (root / "op.so").write_bytes(b"\x7fELF")
    (root / "op.so").chmod(0o600)
    place, receipt._place = receipt._place, lambda *_: (str(root), str(path))
    try:
        found = receipt.recall(SPEC)
    finally:
        receipt._place = place
    assert found is None or isinstance(found, Artifact)
    gc._sweep_receipts(str(root))


def _memo(base: Path, data: bytes) -> None:
    Path(probing._path(str(base), "g++")).write_bytes(data)
    found = probing.recall((str(base),), "g++")
    assert found is None or isinstance(found, dict)


def _lock(base: Path, data: bytes) -> None:
    path = base / "failure.json"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        lock._read_holder(fd)
    finally:
        os.close(fd)
    try:
        lock._raise_failure(str(path), {"token"}, 60.0)
    except OpkilnError:
        pass
