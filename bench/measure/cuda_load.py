"""``cuda-load``: import and load of the finished one-kernel CUDA op, in fresh processes with torch.

The variants take turns, so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

from children import Workspace, load
from measured import Failure, Row, Sample

from measure import Options

NAME = "cuda-load"
OPKILN, FLOOR = "cuda_opkiln_builder", "cuda_load_library"
PEERS = {
    OPKILN: ("opkiln", "builder class"),
    FLOOR: ("floor: load_library", "the same file"),
    "cuda_tvm_ffi": ("tvm-ffi", "load_inline"),
    "cuda_cpp_extension": ("torch cpp_extension", "load_inline"),
}

Times = dict[str, list[dict[str, float]]]


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """Import, load and both together of every variant, and opkiln's ratio to each."""
    failures: dict[str, str] = {}
    for peer in PEERS:
        try:
            if peer != FLOOR:  # which loads what opkiln built
                workspace.first_load(peer)
            load(peer, workspace.warm)  # once more: bytecode written, pages cached
        except Failure as failure:
            failures[peer] = str(failure)
    times: Times = {peer: [] for peer in PEERS if peer not in failures}
    for _ in range(options.times(5, 2)):
        for peer, taken in times.items():
            if peer not in failures:
                try:
                    taken.append(load(peer, workspace.warm))
                except Failure as failure:
                    failures[peer] = str(failure)
    table: list[Row] = []
    for peer, (who, what) in PEERS.items():
        if peer in failures:
            table.append(Row(NAME, who, what, None, failures[peer]))
        else:
            table += _variant(peer, times, failures)
    return table


def _variant(peer: str, times: Times, failures: dict[str, str]) -> list[Row]:
    who, what = PEERS[peer]
    together = _sample(times[peer], "import", "load")
    ratio = None
    if peer != OPKILN and OPKILN not in failures:
        ratio = _sample(times[OPKILN], "import", "load").median / together.median
    return [
        Row(NAME, who, "import", _sample(times[peer], "import")),
        Row(NAME, who, f"load ({what})", _sample(times[peer], "load")),
        Row(NAME, who, "together", together, ratio=ratio),
    ]


def _sample(taken: list[dict[str, float]], *parts: str) -> Sample:
    return Sample(tuple(sum(one[part] for part in parts) * 1e3 for one in taken), "ms")
