"""Runs operations on a store, each in a forked process that may be made to stop on the way.

One request (a JSON line) in, one answer (a JSON line) out. Run with ``crash_points.so`` preloaded:
a request with ``at`` stops its process at that call. Nothing is done in the server itself, so every
process starts as a new interpreter would, with its modules imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import opkiln
from opkiln.base import digest
from opkiln.building import build, failure
from opkiln.decision import decide, receipt, search
from opkiln.loading import loader
from opkiln.settings import settings
from opkiln.store import bundle, gc, inventory, layer
from opkiln.store.layers import Store

digest._SETTLED_NS = 20_000_000  # as SETTLED_NS of loaders.py
IMPORTED = (build, decide, failure, receipt, search)

SHIM = ctypes.CDLL(None)
PLENTY = 1 << 40

_KEY = "[0-9a-f]{40}"
_KNOWN = re.compile(
    rf"(ops/[^/]+/[^/]+/{_KEY}/{_KEY}/{_KEY}|objects/[0-9a-f]{{2}}/{_KEY}/{_KEY})/[^/]+"
    rf"|receipts/[^/]+/[^/]+/{_KEY}\.json|toolchains/({_KEY}\.json|observer-{_KEY}-[0-9a-f]{{64}})"
    rf"|locks/[^/]+|failures/[^/]+\.json|logs/[^/]+\.log"
)


def root() -> str:
    found = Store().root
    assert found == f"{settings.cache_dir}/v1"
    return found


# The operations


def load(source: str) -> dict[str, Any]:
    try:
        value = opkiln.load("op", [source], is_python_module=False, abi="none").value()
    except opkiln.errors.CompileError:
        return {"value": None, "origin": "failed"}
    artifact = loader.here.ops["jit", "op", "cpu"].loaded.artifact
    assert artifact is not None
    return {"value": value, "origin": artifact.origin}


def collect() -> dict[str, Any]:
    return {"removed": len(gc.collect(root(), 1, now=True).removed)}


def clear() -> dict[str, Any]:
    return {"removed": len(gc.clear(root()))}


def unpack(file: str) -> dict[str, Any]:
    return {"taken": [each.directory for each in bundle.unpack(file, root())]}


def write(layer_dir: str, file: str) -> dict[str, Any]:
    return {"sha256": bundle.write_bundle(layer_dir, file).sha256}


def sign(site: str, file: str, key: str) -> dict[str, Any]:
    sys.path.append(site)  # where the library for it is, and much else
    from opkiln.store import signing

    return {"sha256": signing.sign(file, key).sha256}


def export(out: str) -> dict[str, Any]:
    found = [each.payload for each in inventory.entries(root()) if each.kind == inventory.OP]
    return {"exported": layer.export(found, out)}


# What is asked of a store afterwards


def damage() -> dict[str, Any]:
    """What `cache verify` finds."""
    return {"faults": [str(fault) for _, fault in inventory.verify(root()) if fault]}


def sweep() -> dict[str, Any]:
    """What is left in the store that belongs to nothing, an hour later and after `cache gc`."""
    base = Path(root())
    old = time.time() - 2 * 3600
    for path in base.rglob("*"):
        os.utime(path, (old, old), follow_symlinks=False)
    gc.collect(str(base), PLENTY)
    left = [str(path.relative_to(base)) for path in base.rglob("*") if not path.is_dir()]
    staged = [str(path) for path in base.glob("staging/*")]
    return {"strays": [*staged, *(name for name in left if not _KNOWN.fullmatch(name))]}


OPERATIONS = {
    each.__name__: each
    for each in (load, collect, clear, unpack, write, sign, export, damage, sweep)
}  # fmt: skip


def child(request: dict[str, Any], out: int) -> None:
    """Ends the process."""
    code = 1
    try:
        if "at" in request:
            fd = os.open(request["log"], os.O_WRONLY | os.O_APPEND) if "log" in request else -1
            SHIM.crash_arm(int(request["at"]), fd)
        answer = OPERATIONS[request["do"]](**request.get("with", {}))
        answer["calls"] = SHIM.crash_calls()
        SHIM.crash_arm(0, -1)
        os.write(out, json.dumps(answer).encode())
        code = 0
    except BaseException:
        os.write(out, json.dumps({"error": traceback.format_exc()}).encode())
    finally:
        os._exit(code)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            child(request, write_end)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            said = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answer = json.loads(said) if said else {}
        print(json.dumps({"status": status, **answer}), flush=True)


if __name__ == "__main__":
    main()
