"""Kills ranks of groups for test_shm_comm.py.

    python shm_kills.py FOLDER COUNT

Of three ranks that are about to share memory, or do collectives without end, one gets SIGKILL. The
others must raise an error that names it, within the group's timeout. The last line is JSON: how
many were killed, and what went wrong.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from opkiln.comm import ShmGroup
from opkiln.errors import ClusterError
from opkiln.ops.shm_comm import functions

RANKS = 3
SLACK = 5.0  # seconds: for a machine that does other things, too


def rank_of(rank: int, folder: Path, timeout: float) -> None:
    """Ends by an error, which it writes down with how long it took after the kill."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    sizes = (64, 5_000, 600_000)
    try:
        group = ShmGroup(store, rank, RANKS, timedelta(seconds=timeout))
        (folder / f"joined.{rank}").touch()
        for i in range(10**9):
            x = torch.ones(sizes[i % 3])
            if group.all_reduce(x)[-1] != RANKS:
                raise AssertionError("a wrong sum")
            group.all_gather(x)
            group.reduce_scatter(x[: x.numel() // RANKS * RANKS])
    except (RuntimeError, ClusterError) as error:
        (folder / f"error.{rank}").write_text(str(error))


def kill_one(number: int, folder: Path) -> str:
    """What went wrong when a rank was killed, or nothing."""
    folder.mkdir()
    draw = random.Random(number)
    victim = draw.randrange(RANKS)
    early = number % 5 == 4  # before all have the memory: the others wait for the whole timeout
    timeout = 2.0 if early else 20.0
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            try:
                rank_of(rank, folder, timeout)
            finally:
                os._exit(0)
        pids.append(pid)
    if not early:
        while not all((folder / f"joined.{rank}").exists() for rank in range(RANKS)):
            time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.03 if early else 0.1))
    os.kill(pids[victim], signal.SIGKILL)
    killed = time.monotonic()
    wrong = []
    for rank, pid in enumerate(pids):
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() - killed > timeout + SLACK:
                wrong.append(f"rank {rank} hangs")
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.01)
        told = folder / f"error.{rank}"
        text = told.read_text() if told.exists() else "no error"
        if rank != victim and f"rank {victim} " not in text:
            wrong.append(f"rank {rank}: {text}")
    return f"{number}: rank {victim} was killed: {'; '.join(wrong)}" if wrong else ""


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a rank would write to all of torch's objects
    assert functions.shm_join.load("cpu"), str(functions.shm_join.explain("cpu"))
    wrong = [text for number in range(count) if (text := kill_one(number, folder / str(number)))]
    print(json.dumps({"killed": count, "wrong": wrong}))


if __name__ == "__main__":
    main()
