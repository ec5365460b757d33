"""Collectives through shared memory beside gloo's, on the ranks of one host.

    python bench/ops/shm_comm.py [--only WORD] [--out FILE] [--ranks 2,4]

For each number of ranks, processes are forked that do each work by turns: the op, the process group
``opkiln_shm`` and gloo. All ranks meet before each turn, and the first one's median counts; its CPU
time is in the column of the host. ``bytes`` are those of a rank's tensor. A bar that is missed
makes the exit code 1. The ranks need the CPUs for themselves: where other programs run, the figures
are those of the scheduler.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import harness
import torch
import torch.distributed as dist
from harness import Bar, Row

from opkiln.comm import ShmGroup, register_backend
from opkiln.ops.shm_comm import functions

if TYPE_CHECKING:
    from collections.abc import Callable

OP, GROUP, GLOO = "opkiln, op", "opkiln_shm", "gloo"
MIB = 1 << 20
LARGE, SMALL = "all-reduce, 64 MiB fp32", "all-reduce, 1 KiB fp32"


def works(shm: ShmGroup, ours: Any, gloo: Any) -> dict[str, tuple[int, int, dict[str, Any]]]:
    """Of each work: the bytes, how often it is done, and who does it how."""
    size = shm.size
    large, small = torch.ones(16 * MIB), torch.ones(256)
    half = torch.ones(32 * MIB, dtype=torch.bfloat16)
    part = torch.empty(16 * MIB // size)

    def reduces(x: torch.Tensor) -> dict[str, Callable[[], object]]:
        return {
            OP: lambda: shm.all_reduce_(x, "max"),  # of ones: the values stay as they are
            GROUP: lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=ours),
            GLOO: lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=gloo),
        }

    def sums(x: torch.Tensor) -> dict[str, Callable[[], object]]:
        return {
            OP: lambda: shm.all_reduce_(x),
            GROUP: lambda: dist.all_reduce(x, group=ours),
            GLOO: lambda: dist.all_reduce(x, group=gloo),
        }

    return {
        SMALL: (1 << 10, 400, sums(torch.zeros_like(small))),
        LARGE: (64 * MIB, 15, sums(torch.zeros_like(large))),
        "all-reduce, 1 MiB fp32": (MIB, 100, sums(torch.zeros(MIB // 4))),
        "all-reduce (max), 64 MiB fp32": (64 * MIB, 7, reduces(large)),
        "all-reduce, 64 MiB bf16": (64 * MIB, 7, sums(torch.zeros_like(half))),
        "reduce-scatter, 64 MiB fp32": (
            64 * MIB,
            7,
            {
                OP: lambda: functions.shm_reduce_scatter_into(part, large, shm.number),
                GLOO: lambda: gloo_of(gloo)._reduce_scatter_base(part, large).wait(),
            },
        ),
        "all-gather, 64 MiB fp32": (
            64 * MIB,
            7,
            {
                OP: lambda: functions.shm_all_gather_into(large, part, shm.number),
                GLOO: lambda: gloo_of(gloo)._allgather_base(large, part).wait(),
            },
        ),
    }


def gloo_of(group: Any) -> Any:
    return group._get_backend(torch.device("cpu"))


def measured(rank: int, size: int, folder: str, only: str) -> list[Row]:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(
        register_backend(), store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10)
    )
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    shm, meeting = ShmGroup.of(), torch.zeros(1)
    assert not shm.fallback, shm.fallback
    rows = []
    for name, (bytes_, repeats, ways) in works(shm, ours, gloo).items():
        if only not in name:
            continue
        times: dict[str, list[float]] = {who: [] for who in ways}
        computed: dict[str, list[float]] = {who: [] for who in ways}
        for turn in range(repeats + 2):
            for who, way in ways.items():
                shm.all_reduce_(meeting)
                begun, cpu = time.perf_counter(), time.process_time()
                way()
                if turn >= 2:
                    times[who].append((time.perf_counter() - begun) * 1e3)
                    computed[who].append((time.process_time() - cpu) * 1e3)
        rows += [
            Row(f"{name}, {size} ranks", who, bytes_, median(taken), median(computed[who]))
            for who, taken in times.items()
        ]
    dist.barrier()
    return rows


def on_ranks(size: int, only: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "rows")
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    rows = measured(rank, size, folder, only)
                    if rank == 0:
                        found.write_text(json.dumps(rows))
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        assert not any(codes), f"ranks ended with {codes}"
        return [Row(*row) for row in json.loads(found.read_text())]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    bandwidth = harness.copy_bandwidth("cpu")
    assert functions.shm_join.load("cpu"), str(functions.shm_join.explain("cpu"))
    sizes = [int(size) for size in asked.ranks.split(",")]
    rows = [row for size in sizes for row in on_ranks(size, asked.only)]
    load = os.getloadavg()[0]
    more = {"load": load}
    harness.report(rows, bandwidth, asked.out, commit=asked.commit, more=more)
    print(f"load {load:.1f}")
    bars = [
        bar
        for size in sizes
        for bar in (
            Bar(f"{LARGE}, {size} ranks", OP, GLOO, 2.0),
            Bar(f"{SMALL}, {size} ranks", OP, GLOO, 3.0),
        )
    ]
    return 1 if harness.missed(bars, rows, bandwidth) else 0


if __name__ == "__main__":
    sys.exit(main())
