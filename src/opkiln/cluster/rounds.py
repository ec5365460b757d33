"""Which start of a job this is: a number that all ranks have in the names of their keys.

torchrun's store outlives the ranks, and so does a directory. After a restart, the ranks find in it
what those before them have said. torchrun's count of restarts does not help: a node counts only if
the rank that failed was on it, so the nodes have different counts, and the next failure may make
them equal again. So the ranks find it out by themselves:

    round                   a number
    here/<round>/<rank>     the process that is this rank in this round; by compare-and-set

A process that finds another one in its place begins the next round. A process whose predecessor
never came so far finds its place free, in a round that is over. It is told by the outcome of that
round (``MOVED``), which the others write as they go on. If the ranks before them had ended with an
error, that error is what it finds, and the job needs one more restart.
"""

from __future__ import annotations

import secrets
from contextlib import closing

from opkiln.cluster.channel import Channel
from opkiln.cluster.job import Place
from opkiln.cluster.messages import OUTCOME, Outcome
from opkiln.errors import ClusterError
from opkiln.settings import settings

MOVED = Outcome(error="the ranks of the job were started again")
_rounds: dict[tuple[str, str], int] = {}  # of each store and job: the one of this process


def channel(place: Place, name: str, patience: float, *, moved: bool = False) -> Channel:
    """A channel for what has this name in the round of this process. ``moved``: the round that it
    was in is over. Raises ClusterError."""

    def open_channel(name: str) -> Channel:
        return Channel(place.store, name, settings.job_secret, patience)

    job = f"{place.name}/{place.world}"
    known = place.store.where, job
    if moved or known not in _rounds:
        with closing(open_channel(job)) as common:
            number = _rounds[known] = _join(common, place.rank, moved=moved)
        if number:
            with closing(open_channel(f"{job}/{number - 1}/0")) as old:
                old.swap(OUTCOME, None, MOVED)
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
