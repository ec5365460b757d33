"""What ``opkiln.ensure`` asks of the process that serves the job's store, by the number of ranks.

    python bench/cluster_scale.py --keep          # all of results/cluster_scale.json: an hour
    python bench/cluster_scale.py --ranks 512     # one size, printed only
    python bench/cluster_scale.py --ranks 1024 --case missing

It is a simulation. The ranks are the shipped state machine (``opkiln.cluster.protocol``, with what
leads it and what it says), the shipped pauses and beats (``work``), and the shipped requests
(``channel``, ``stores.Torch``). The clock, the network, the store's server, the compiler and the
disks are simulated: events in the order of their times. The server does one request after the
other, as TCPStore does; its speeds were measured with a real one (``SPEEDS``).

The time that ranks need to think is not in it; that of the leader is given beside it.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from opkiln.cluster import protocol, work
from opkiln.cluster.channel import PART, Channel
from opkiln.cluster.job import default_lease
from opkiln.cluster.messages import Hello, JobOutcome, Made, Offer, Vote, key_of
from opkiln.cluster.protocol import Done, End, FetchOp, Look, MakeOp, Pause
from opkiln.cluster.stores import Torch

RESULT = Path(__file__).resolve().parent / "results" / "cluster_scale.json"
SIZES = (1, 8, 64, 512, 1024, 4096, 16384, 100_000)
PER_NODE = 8
# Measured on two cores with a TCPStore (libuv) and one client, but for the network's latency.
SPEEDS = {
    "seconds of a request": 1 / 42_000,
    "seconds of a key more in a check": 0.7e-6,
    "seconds of a key more in a multi_get": 4.7e-6,
    "bytes a second in": 0.9e9,
    "bytes a second out": 2.5e9,
    "seconds of the network, there and back (assumed)": 100e-6,
}
_REQUEST, _CHECKED, _GOT, _IN, _OUT, ROUND_TRIP = SPEEDS.values()


class Case(NamedTuple):
    """What a job finds."""

    name: str
    cached: bool = False  # every node has the library
    megabytes: int = 1  # of the bundle
    missing: bool = False  # the last rank never calls ensure(); the others wait for LATE seconds


CASES = (
    Case("warm", cached=True),
    Case("cold, 1 MB"),
    Case("cold, 32 MB", megabytes=32),
    Case("one rank is missing", missing=True),
)
COMPILE, UNPACK, SPREAD, LATE = 4.0, 0.05, 1.0, 20.0  # seconds; calls come within SPREAD


class Server:
    """The contents of the store, as torch's client shows them, and what its server had to do."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lists: dict[str, bytearray] = {}
        self.kinds: Counter[str] = Counter()
        self.bytes_in = self.bytes_out = 0
        self.busy = 0.0
        self.free_at = 0.0
        self.asked: list[float] = []  # seconds for each request of the call that is being made

    def _did(self, kind: str, received: int, sent: int, more: float = 0.0) -> None:
        self.kinds[kind] += 1
        self.bytes_in += received
        self.bytes_out += sent
        self.asked.append(_REQUEST + more + received / _IN + sent / _OUT)

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value
        self._did("set", len(key) + len(value), 0)

    def append(self, key: str, value: str) -> None:
        self.lists.setdefault(key, bytearray()).extend(value.encode())
        self.values[key] = b""
        self._did("append", len(key) + len(value), 0)

    def get(self, key: str) -> bytes:
        found = self._value(key)
        self._did("get", len(key), len(found))
        return found

    def _value(self, key: str) -> bytes:
        return bytes(self.lists[key]) if key in self.lists else self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._did("check", sum(map(len, keys)), 1, (len(keys) - 1) * _CHECKED)
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = [self._value(key) for key in keys]
        size = sum(map(len, found))
        self._did("multi_get", sum(map(len, keys)), size, (len(keys) - 1) * _GOT)
        return found

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        now = self.values.get(key)
        if now == expected.encode() or (now is None and not expected):
            now = self.values[key] = value.encode()
        assert now is not None
        self._did("compare_set", len(key) + len(expected) + len(value), len(now))
        return now

    def has_extended_api(self) -> bool:
        return True


class Direct(Channel):
    """A channel without a thread: the simulation says when it is asked, and how long it takes."""

    def _ask(self, call: Callable[[], Any], what: str) -> Any:  # noqa: ARG002
        return call()

    def _open(self, key: str, data: bytes) -> Any:
        """All ranks read the same few records again and again. Each is decoded once."""
        if (known := _decoded.get(data)) is None:
            known = _decoded[data] = super()._open(key, data)
        return known


_decoded: dict[bytes, Any] = {}


class Node:
    """The store of one node. One of its ranks fetches, the others wait."""

    def __init__(self) -> None:
        self.fetching = self.here = False
        self.waiting: list[tuple[Rank, FetchOp]] = []


class Rank:
    """One process."""

    def __init__(self, number: int, state: protocol.State, node: Node, channel: Channel) -> None:
        self.number, self.state, self.node = number, state, node
        self.channel = channel
        self.ended: JobOutcome | str | None = None
        self.paused = 0  # counts pauses, so that the end of an old one wakes nobody
        self.waiting = False
        self.waited_since = 0.0
        self.beats = 0
        self.called = self.left = 0.0


class Simulation:
    """One job."""

    def __init__(self, ranks: int, case: Case, lease: float) -> None:
        self.case, self.lease = case, lease
        self.patience = max(2 * lease, 10.0)
        self.now = 0.0
        self.server = Server()
        self.channel = self.connected()  # for beats and bundles; a rank has one of its own besides
        self.part = bytes(min(PART, case.megabytes << 20))
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = count()
        self.longest = 0.0  # wait for an answer
        self.leader_cpu = 0.0
        self.makes = self.fetches = 0
        nodes = [Node() for _ in range(-(-ranks // PER_NODE))]
        self.ranks = []
        nobody = (None,) * ranks  # shared: tuples of its own for each rank would take 160 GB
        for number in range(ranks):
            state = protocol.start(
                number, 1, hello_of(number, case.cached), lease=lease,
                deadline=1800.0, timeout=1800.0, serves=number == 0,
            )._replace(world=ranks, hellos=nobody, ballots=nobody)  # fmt: skip
            node = nodes[number // PER_NODE]
            self.ranks.append(Rank(number, state, node, self.connected()))

    def connected(self) -> Direct:
        return Direct(Torch(self.server), JOB, None, self.patience)

    def at(self, when: float, call: Callable[..., None], *given: Any) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), call, given))

    def run(self) -> None:
        for rank in self.ranks:
            rank.called = random.uniform(0, SPREAD) if len(self.ranks) > 1 else 0.0
            if self.case.missing:
                rank.state = rank.state._replace(deadline=rank.called + LATE, timeout=LATE)
            if self.case.missing and rank is self.ranks[-1]:
                rank.ended = "missing"
            else:
                self.at(rank.called, self.begin, rank)
        while self.events:
            self.now, _, call, given = heapq.heappop(self.events)
            call(*given)

    # The network and the server

    def ask(self, rank: Rank, calls: Iterator[Callable[[], Any]], patience: float,
            then: Callable[[list[Any]], None]) -> None:  # fmt: skip
        """Make the calls one after the other, each with its patience; then go on with answers."""
        answers: list[Any] = []

        def following() -> None:
            call = next(calls, None)
            if call is None:
                then(answers)
            else:
                self.at(self.now + ROUND_TRIP / 2, arrive, call, self.now)

        def arrive(call: Callable[[], Any], began: float) -> None:
            if rank.ended is not None:
                return
            if self.ranks[0].ended is not None:  # it serves the store
                rank.ended, rank.left = "the job's store is gone", self.now
                return
            self.server.asked = []
            answers.append(call())
            if self.server.asked:
                serve(self.server.asked, 0, began)
            else:
                following()

        def serve(asked: list[float], number: int, began: float) -> None:
            done = self.serve(asked[number])
            answered = done + ROUND_TRIP / 2
            if answered - began > patience:
                self.at(max(self.now, began + patience), self.give_up, rank)
            elif number + 1 < len(asked):
                self.at(answered + ROUND_TRIP / 2, serve, asked, number + 1, began)
            else:
                self.longest = max(self.longest, answered - began)
                self.at(answered, following)

        following()

    def serve(self, seconds: float) -> float:
        """When a request that arrives now is done."""
        self.server.free_at = max(self.now, self.server.free_at) + seconds
        self.server.busy += seconds
        return self.server.free_at

    def tell(self, key: str, value: Any) -> None:
        """A set: torch's client does not wait for an answer."""
        self.server.asked = []
        self.channel.put(key, value)
        self.serve(sum(self.server.asked))

    def give_up(self, rank: Rank) -> None:
        """As ``Channel`` does if the store has not answered."""
        if rank.ended is None:
            rank.ended, rank.left = "the job's store does not answer", self.now

    # The ranks

    def begin(self, rank: Rank) -> None:
        rank.waited_since = self.now
        self.beat(rank)
        self.step(rank)

    def beat(self, rank: Rank) -> None:
        if rank.ended is None:
            self.tell(key_of("beat", rank.number), rank.beats)
            rank.beats += 1
            self.at(self.now + self.lease / work.BEATS, self.beat, rank)

    def step(self, rank: Rank) -> None:
        """As ``work.agree``, up to the next thing that takes time."""
        while rank.ended is None:
            began = time.process_time()
            action = protocol.next_action(rank.state)
            if rank.state.leader == rank.number:
                self.leader_cpu += time.process_time() - began
            if isinstance(action, End):
                rank.ended, rank.left = action.outcome, self.now
            elif isinstance(action, Pause):
                rank.paused += 1
                rank.waiting = True
                pause = work.choose_pause(len(self.ranks), self.now - rank.waited_since)
                self.at(self.now + pause, self.resume, rank, rank.paused)
                return
            elif isinstance(action, (MakeOp, FetchOp)):
                started = rank.state.started
                rank.state = protocol.apply_answer(rank.state, action, None, 0)
                if rank.state.started != started:
                    (self.make if isinstance(action, MakeOp) else self.fetch)(rank, action)
            else:
                self.ask_for(rank, action)
                return

    def resume(self, rank: Rank, paused: int) -> None:
        if rank.waiting and rank.paused == paused:
            rank.waiting = False
            rank.state = protocol.apply_answer(rank.state, Pause(), None, 0)
            self.step(rank)

    def ask_for(self, rank: Rank, action: Any) -> None:
        asked_at = self.now

        def answered(answers: list[Any]) -> None:
            began = time.process_time()
            rank.state = protocol.apply_answer(rank.state, action, answers[0], asked_at)
            if rank.state.leader == rank.number:
                self.leader_cpu += time.process_time() - began
            if not isinstance(action, Look):
                rank.waited_since = self.now
            self.step(rank)

        self.ask(rank, iter([lambda: rank.channel.do(action)]), self.patience, answered)

    # Their work

    def done(self, rank: Rank, op: int, got: Made | Vote) -> None:
        if rank.ended is not None:
            return
        rank.state, rank.waited_since = protocol.apply_done(rank.state, Done(op, got)), self.now
        if rank.waiting:
            self.resume(rank, rank.paused)

    def make(self, rank: Rank, action: MakeOp) -> None:
        self.makes += 1
        rank.node.here = True
        size = self.case.megabytes << 20

        def built() -> None:
            self.ask(rank, self.parts("put") if action.ship else iter(()), 120.0, sent)

        def sent(_: list[Any]) -> None:
            self.done(rank, action.op, Made(LIBRARY, BUNDLE if action.ship else "", size))

        self.at(self.now + COMPILE, built)

    def fetch(self, rank: Rank, action: FetchOp) -> None:
        node = rank.node
        if node.here:
            self.at(self.now + UNPACK, self.done, rank, action.op, Vote(LIBRARY))
            return
        node.waiting.append((rank, action))
        if not node.fetching:
            node.fetching = True
            self.fetches += 1
            self.ask(rank, self.parts("look"), 120.0, lambda _: self.at(
                self.now + UNPACK, self.arrived, node
            ))  # fmt: skip

    def arrived(self, node: Node) -> None:
        node.here = True
        for rank, action in node.waiting:
            self.done(rank, action.op, Vote(LIBRARY))

    def parts(self, kind: str) -> Iterator[Callable[[], Any]]:
        store = Torch(self.server)
        for number in range(-(-(self.case.megabytes << 20) // PART)):
            key = f"opkiln/{JOB}/bundle/{BUNDLE}/{number}"
            if kind == "put":
                yield lambda key=key: store.put(key, self.part)  # type: ignore[misc]
            else:
                yield lambda key=key: store.look([key])  # type: ignore[misc]


JOB, LIBRARY, BUNDLE = "4711/0/launcher/0", "1f" * 32, "2e" * 32


def hello_of(rank: int, cached: bool) -> Hello:
    """What a rank says of one op: as long as what real ones say."""
    node = rank // PER_NODE
    facts = (
        ("opkiln", "0.1.0"), ("declaration", "3d" * 8), ("set of sources", "4c" * 8),
        ("torch", "2.13.0+cu130"),
    )  # fmt: skip
    cpu = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4_2")
    offer = Offer("fused_adam", facts, digest=LIBRARY, can_build=False)
    if not cached:
        offer = Offer("fused_adam", facts, can_build=True, cpu=cpu)
    return Hello(f"node{node:05}", 10_000 + rank, f"node{node:05}:2049:{node}", (offer,))


def simulated(ranks: int, case: Case, lease: float | None = None) -> dict[str, Any]:
    """One row of the results."""
    random.seed(ranks)
    began = time.process_time()
    job = Simulation(ranks, case, default_lease(ranks) if lease is None else lease)
    gc.freeze()  # the ranks stay: searching them for garbage again and again takes most of the time
    job.run()
    gc.unfreeze()
    ends = Counter(
        each.ended if isinstance(each.ended, str) else each.ended.error or "agreed"
        for each in job.ranks
        if each.ended is not None
    )
    server = job.server
    last_call = max(each.called for each in job.ranks)
    took = max(each.left for each in job.ranks) - last_call
    # The rank that ends last, after its own deadline.
    late = max(each.left - each.state.deadline for each in job.ranks)
    return {
        "case": case.name, "ranks": ranks, "lease_s": job.lease,
        "agreed": ends["agreed"], "errors": {k: v for k, v in ends.items() if k != "agreed"},
        "seconds": round(took, 3),
        "seconds_others": round(max(e.left for e in job.ranks[1:] or job.ranks) - last_call, 3),
        **({"late_s": round(late, 3)} if case.missing else {}),
        "requests": sum(server.kinds.values()), "kinds": dict(sorted(server.kinds.items())),
        "bytes_in": server.bytes_in, "bytes_out": server.bytes_out,
        "store_busy_s": round(server.busy, 3), "longest_answer_s": round(job.longest, 3),
        "leader_cpu_s": round(job.leader_cpu, 2),
        "builds": job.makes, "fetches": job.fetches,
        "simulation_cpu_s": round(time.process_time() - began, 1),
    }  # fmt: skip


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="only this size")
    parser.add_argument("--lease", type=float, help="seconds, instead of what ensure() takes")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--keep", action="store_true", help="put the rows into the results")
    given = parser.parse_args(words)
    for ranks in (given.ranks,) if given.ranks else SIZES:
        for case in (each for each in CASES if given.case in each.name):
            if case.missing and ranks == 1:
                continue  # nobody would wait
            row = simulated(ranks, case, given.lease)
            print(json.dumps(row), flush=True)
            if given.keep:
                write(row)
    return 0


def write(row: dict[str, Any]) -> None:
    """Put a row into the results, in the place of the one of that size and case."""
    before = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    names = [case.name for case in CASES]
    place = {(each["ranks"], names.index(each["case"])): each for each in (*before, row)}
    rows = [place[at] for at in sorted(place)]
    document = {
        "what": "simulation of the shipped protocol; no figure here is of a real cluster",
        "speeds": SPEEDS, "ranks_per_node": PER_NODE, "compile_s": COMPILE,
        "spread_of_calls_s": SPREAD, "rows": rows,
    }  # fmt: skip
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
