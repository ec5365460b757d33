"""The place of this process in its job: its rank, the store through which the ranks talk, and the
number of the job's start, which all ranks have in the names of their keys.

torchrun's store outlives the ranks, and so does a directory. After a restart, the ranks find in it
the records of their predecessors. torchrun's count of restarts does not help: a node counts only if
the rank that failed was on it, so the nodes have different counts, and the next failure may make
them equal again. So the ranks find out the number themselves:

    round                   a number
    here/<round>/<rank>     the process that is this rank in this round; by compare-and-set

A process that finds another one in its place begins the next round. If its predecessor never came
so far, it finds its place free, in a round that is over. The outcome of that round tells it so: the
others write ``MOVED`` there as they go on. If the earlier ranks ended with an error, the process
finds that error instead, and the job needs one more restart.
"""

from __future__ import annotations

import os
import re
import secrets
import time
import zlib
from datetime import timedelta
from typing import Any, NamedTuple

from opkiln.cluster.channel import Channel
from opkiln.cluster.messages import OUTCOME, JobOutcome
from opkiln.cluster.stores import KeyValues, Memory, SharedDirectory, Torch, require_open
from opkiln.errors import ClusterError, UsageError
from opkiln.settings import place_in_job, settings

_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.2  # seconds between two looks whether the store is there
# Kept for the life of the process: the store may be served by it, and other ranks, or the program's
# own init_process_group, may still use it.
_kept: list[Any] = []
_stores: dict[tuple[int, int], Any] = {}
_rounds: dict[tuple[str, str], int] = {}  # of each store and job: the one of this process
MOVED = JobOutcome(error="the ranks of the job were started again")


class JobPlace(NamedTuple):
    """A rank's place in a job."""

    rank: int
    world: int
    store: KeyValues
    name: str  # the job's
    serves: bool = False  # whether this process serves the store


def find(
    group: Any, store: Any, rank: int | None, world_size: int | None, timeout: float
) -> JobPlace:
    """The place of this process. Raises UsageError, ClusterError."""
    if group is not None and store is not None:
        raise UsageError("ensure() takes a group or a store, not both")
    told = place_in_job()
    if store is not None:
        if rank is None or world_size is None:
            if told is None:
                raise UsageError(
                    "ensure() does not know this process's rank",
                    why="a store was given, and no launcher says the rank",
                    hint="opkiln.ensure(ops, store=store, rank=..., world_size=...)",
                )
            rank, world_size = told
        is_path = isinstance(store, (str, os.PathLike))
        values: KeyValues = SharedDirectory(os.fspath(store)) if is_path else Torch(store)
        return JobPlace(rank, world_size, values, _name("store"))
    if group is not None or has_group():
        return _place_in_group(group)
    if told is None or told[1] == 1:
        return JobPlace(0, 1, Memory(), _name("alone"))
    return _place_by_launcher(*told, timeout)


def default_lease(world: int) -> float:
    """The lease of a job with this many ranks: their beats must leave the store time for others."""
    return max(6.0, world / 1000)


def has_group() -> bool:
    """Whether this process has a default process group."""
    import sys

    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _place_in_group(group: Any) -> JobPlace:
    from torch import distributed

    group = distributed.group.WORLD if group is None else group
    rank = distributed.get_rank(group)
    if rank < 0:
        raise UsageError("ensure() was called by a rank that is not in the group")
    world = distributed.get_world_size(group)
    store = group.get_group_store()
    _kept.append(store)
    serves = rank == 0 and not settings.agent_store
    name = _name(str(getattr(group, "group_name", "")))
    return JobPlace(rank, world, Torch(store), name, serves)


def _place_by_launcher(rank: int, world: int, timeout: float) -> JobPlace:
    """The place by the launcher's variables, before the program has made a process group."""
    from torch import distributed

    address, port = settings.master_addr, settings.master_port
    if address is None and settings.slurm_nodes is not None:
        address = first_host(settings.slurm_nodes)
    if port is None and settings.slurm_nodes is not None:
        number = zlib.crc32(f"{settings.run_id}.{settings.slurm_step}".encode())
        port = 20000 + number % 30000
    if address is None or port is None:
        raise UsageError(
            f"rank {rank} of {world} does not know how to reach the others",
            why="there is no process group, and MASTER_ADDR and MASTER_PORT are not set",
            hint="torchrun ...    # or set them, or opkiln.ensure(ops, store=...)",
        )
    serves = rank == 0 and not settings.agent_store
    if (rank, world) not in _stores:
        try:
            if rank != 0:
                _await_server(address, port, timeout)
            # As init_process_group makes it later, and both share the server. But this one does not
            # wait until all ranks are there: it could not say who is missing.
            _stores[rank, world] = distributed.TCPStore(  # type: ignore[attr-defined]
                address,
                port,
                is_master=serves,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise ClusterError(
                f"rank {rank} of {world} cannot reach the job's store at {address}:{port}",
                why=str(error).splitlines()[0] if str(error) else type(error).__name__,
                hint="rank 0 serves it: is it running, and does a firewall let the port through?",
            ) from error
    return JobPlace(rank, world, Torch(_stores[rank, world]), _name("launcher"), serves)


def _await_server(address: str, port: int, timeout: float) -> None:
    """Wait until the port is open. torch would try again, too, but half a second later or more, and
    all ranks wait for the one that sleeps. Raises ConnectionRefusedError if it stays closed.
    """
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
    while True:
        try:
            return require_open(address, port)
        except ConnectionRefusedError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(pause)
        pause = min(1.5 * pause, _LAST_PAUSE)


def _name(kind: str) -> str:
    """The name that distinguishes this job from others that use the same store."""
    parts = (settings.run_id or "job", kind)
    return "/".join(re.sub(r"[^\w.-]", "_", part) for part in parts)


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it: ``gpu[003-007,9],login1`` is ``gpu003``."""
    found = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?", nodes)
    if found is None:
        raise UsageError(f"{nodes!r} is not a list of Slurm's nodes")
    name, numbers = found.groups()
    return str(name) + (re.split("[-,]", numbers)[0] if numbers else "")


def channel(place: JobPlace, name: str, patience: float, *, moved: bool = False) -> Channel:
    """A channel for messages under this name, in this process's round. ``moved`` says that its last
    round is over. Raises ClusterError."""

    def open_channel(name: str) -> Channel:
        return Channel(place.store, name, settings.job_secret, patience)

    job = f"{place.name}/{place.world}"
    known = place.store.where, job
    if moved or known not in _rounds:
        number = _rounds[known] = _join(open_channel(job), place.rank, moved=moved)
        if number:
            open_channel(f"{job}/{number - 1}/0").swap(OUTCOME, None, MOVED)
    return open_channel(f"{job}/{_rounds[known]}/{name}")


def _join(common: Channel, rank: int, *, moved: bool) -> int:
    token = secrets.token_hex(8)
    while True:
        (known,) = common.look(["round"])
        number = known or 0
        if common.swap(f"here/{number}/{rank}", None, token) == token:
            return int(number)
        if moved:
            raise ClusterError(
                f"rank {rank} of the job is another process now",
                why="two processes have this rank, or it was started again while this one ran",
            )
        common.swap("round", known, number + 1)
