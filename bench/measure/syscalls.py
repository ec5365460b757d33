"""``syscalls``: the system calls of a warm import and load, by strace, beside the peers'."""

from __future__ import annotations

from children import Workspace
from measured import Failure, Row, Sample
from strace import traced

from measure import Options

NAME = "syscalls"
PEERS = {
    "opkiln_cpu_adam": "opkiln",
    "load_library": "floor: load_library",
    "cpp_extension": "torch cpp_extension",
    "tvm_ffi_inline": "tvm-ffi",
    "deepspeed_cpu_adam": "DeepSpeed",
}


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """One row for each peer's import and load; quick runs trace opkiln and the floor alone."""
    peers = list(PEERS)[:2] if options.quick else list(PEERS)
    return [row for peer in peers for row in _peer(peer, workspace)]


def _peer(peer: str, workspace: Workspace) -> list[Row]:
    who = PEERS[peer]
    try:
        if peer == "load_library":
            workspace.first_load("opkiln_cpu_adam")
        workspace.first_load(peer)
        found = traced(["child_load.py", peer], workspace.warm)
    except Failure as failure:
        return [Row(NAME, who, "import, load", None, str(failure))]
    return [
        Row(
            NAME,
            who,
            section,
            Sample((float(found[section].total),), "count"),
            found[section].described(),
            details={"calls": dict(found[section].names)},
        )
        for section in ("import", "load")
        if found[section].total
    ]
