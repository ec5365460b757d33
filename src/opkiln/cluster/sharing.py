"""Loads that each rank makes when its program does: one rank builds, the others take its library.

``ensure`` needs all ranks at once. A program may load an extension on one rank first, while the
others wait at a barrier. So here ranks wait only for the rank that builds, and that one waits for
no other. The first rank decides for the job: its library is used, or the reference if the op has
one and cannot be built there. A rank that cannot use what was decided raises an error.

There is one record for each op, its sources and its target, and it changes only by compare-and-set:
    None -> Task(tried=(0,))                        rank 0 builds
         -> Task(tried=(0,), failed=((0, why),))    it could not, and nobody builds
         -> Task(tried=(0, 2), failed=...)          rank 2 builds, as if rank 0 had fallen silent
         -> Task(tried=..., made=Made())            what all take; it stays
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from opkiln.base.model import Op
from opkiln.building import recorded
from opkiln.building.prepared import Prepared
from opkiln.building.recorded import RecordedModule
from opkiln.cluster import facts, job, work
from opkiln.cluster.messages import Made, OpTask, key_of
from opkiln.decision import terms
from opkiln.decision.terms import Build, Request, Serve, Trace
from opkiln.errors import ClusterError, OpkilnError, StoreError
from opkiln.settings import settings
from opkiln.store import key, lock, publish
from opkiln.store.bundle import unpack_bytes
from opkiln.store.layers import Store

_TURN = "turn"


class _Known(NamedTuple):
    """The library that this process has agreed on for an op."""

    round: int  # how often it was agreed on: a header may have been edited since
    made: Made
    worker: work.Worker


_known: dict[str, _Known] = {}


def share(op: Op) -> None:
    """Pin the job's library for an op before it is loaded. The first rank builds it.

    Does nothing if there is no group of several ranks, or if ``ensure`` has pinned the op. Raises
    ClusterError if the rank that builds cannot, or if its library cannot be used here, and what a
    build raises.
    """
    if not job.has_group():
        if op.name in _ours and terms.find_pin(op) is _ours[op.name]:
            terms.release(op)  # the job that it was pinned for has ended
        return
    pin = terms.find_pin(op)
    if pin is not None and pin is not _ours.get(op.name) and pin.spec == op.spec:
        return  # `ensure` has pinned it: all ranks have voted
    place = job.find(None, None, None, None, settings.build_timeout)
    if place.world == 1:
        return
    try:
        name = _key(op)
    except OpkilnError:
        terms.release(op)  # nothing can be built for this machine: the load says why
        return
    known = _known.get(name)
    if known is None or (known.made.digest and not known.worker.find(0, known.made, Trace())):
        number = 0 if known is None else known.round + 1
        known = _known[name] = _Sharing(op, place, f"{name}/{number}").run(number)
    if known.made.digest:
        _ours[op.name] = terms.pin(op, known.worker.library(0, known.made.digest))
    else:
        _ours[op.name] = terms.pin(op, None, known.made.reason)


# The pins that were set here, by the op's name. `ensure` may have set another one since.
_ours: dict[tuple[str, str, str], terms.Pin] = {}


def _key(op: Op) -> str:
    """A key that is equal on ranks that can use the same library: it covers the sources, the
    declaration, the target and torch."""
    request = Request(op, agreed=False)
    told = facts.digest(facts.library_facts(request))
    parts = (*op.name, key.intent_key(op.spec, request.target), *told)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


class _Turns:
    """What one rank makes and the others take, until this rank knows what was made."""

    failure = "the rank that built it fell silent"

    def __init__(self, place: job.JobPlace, name: str) -> None:
        self.rank, self.world = place.rank, place.world
        self.lease = job.default_lease(place.world)
        self.channel = job.channel(place, f"load/{name}", max(2 * self.lease, 10.0))

    def can_make(self) -> bool:
        """Whether this rank can make it, or has it and can send it."""
        return True

    def make(self) -> Made:
        """Make it, and send it."""
        raise NotImplementedError

    def give_up(self) -> Made:
        """What is used if no rank makes it."""
        made = Made(reason=self.failure, final=True)
        return self._tell(made) or made

    def agree(self, lease: float) -> Made:
        """What the job uses. This rank makes it if it is its turn, and waits for ``lease`` seconds
        for one that is silent."""
        can_make = self.can_make()
        began = changed = time.monotonic()
        turn: OpTask | None = None
        beat = None
        while True:
            now = time.monotonic()
            maker = -1 if turn is None else turn.maker
            before = turn, beat
            turn, beat = self.channel.look([_TURN, key_of("beat", maker)])
            if turn is not None and turn.made is not None:
                return turn.made
            if (turn, beat) != before:
                changed = now
            silent = now - changed >= lease  # nothing was heard of the rank that builds
            idle = turn is None or turn.maker < 0
            if can_make and (idle or silent):
                if self._begin(turn):
                    can_make = False
                began = changed = time.monotonic()
            elif silent:
                return self.give_up()
            else:
                time.sleep(work.choose_pause(self.world, now - began))

    def _begin(self, turn: OpTask | None) -> bool:
        """Make it in the place of ``turn``, and tell all what came of it. Returns whether it
        was this rank's turn."""
        mine = (OpTask() if turn is None else turn).begin(self.rank)
        if self.channel.swap(_TURN, turn, mine) != mine:
            return False
        with work.keep_beating(self.channel, self.rank, self.lease):
            self._tell(self.make())
        return True

    def _tell(self, made: Made) -> Made | None:
        """Write this rank's result. Returns the one that counts: the first library, if any."""
        (turn,) = self.channel.look([_TURN])
        while (after := (turn or OpTask()).end(self.rank, made)) != turn:
            turn = self.channel.swap(_TURN, turn, after)
        return after.made


class _Sharing(_Turns):
    """One op, until this rank has what the job uses."""

    def __init__(self, op: Op, place: job.JobPlace, name: str) -> None:
        super().__init__(place, name)
        self.op = op
        self.worker = work.Worker([op], self.channel, sees_loaded=False)

    def run(self, number: int) -> _Known:
        name = self.op.spec.name
        # Where it runs as its reference, nobody else need build it.
        reference = terms.prefers_reference(Request(self.op, agreed=False))
        made = self.agree(0.0 if reference else self.lease)
        if made.digest and (reason := self._take(made)):
            what = f"op {name}: rank {self.rank} cannot use the library of rank {made.by}"
            raise ClusterError(f"{what}, which the others use", why=reason)
        if not made.digest and not self.op.has_reference:
            if made.by == self.rank and self.worker.error is not None:
                raise self.worker.error
            what = f"op {name} cannot be built: rank {made.by} tried"
            raise ClusterError(what, why=made.reason)
        return _Known(number, made, self.worker)

    def _take(self, made: Made) -> str:
        """Get the library that was made, unless it is here. Returns why this rank cannot, or ""."""
        if made.digest in self.worker.artifacts[0]:
            return ""
        vote = self.worker.fetch(0, made)
        if vote.digest or made.bundle or terms.prefers_reference(Request(self.op, agreed=False)):
            return vote.reason
        own = self.worker.make(0, ship=False)
        if own.reason or own.digest == made.digest:
            return own.reason
        return f"it cannot be sent, and this rank's own has the SHA-256 {own.digest}"

    def can_make(self) -> bool:
        return isinstance(self.worker.look(0, Request(self.op, agreed=False)), (Serve, Build))

    def make(self) -> Made:
        made = self.worker.make(0, ship=True)
        if not made.digest and self.worker.artifacts[0]:
            # It is here and cannot be sent: it has flags for this CPU, or is in a bundle. So each
            # node makes its own, and all must be equal.
            made = self.worker.make(0, ship=False)
        return made

    def give_up(self) -> Made:
        """Decide for the reference, because no rank builds the op. Raises this rank's own error if
        there is no reference."""
        error = self.worker.error or ClusterError(
            f"op {self.op.spec.title} was not built", why="the rank that built it fell silent"
        )
        if not self.op.has_reference:
            raise error
        made = Made(reason=f"rank {self.rank}: {work.shorten_error(error)}", final=True)
        return self._tell(made) or made


def share_modules(
    modules: Sequence[RecordedModule], place: job.JobPlace, lease: float, signing_key: str | None
) -> Iterator[tuple[str, str, str]]:
    """Have what these modules of other programs need in the store of this node: (name, SHA-256 of
    the bundle, where it is from) of each. One rank of the job compiles each. Raises ClusterError.
    """
    first = place.rank % len(modules) if modules else 0  # the ranks begin with different ones
    for module in (*modules[first:], *modules[:first]):
        shared = _SharedModule(module, place, signing_key)
        shared.lease = lease
        made = shared.agree(lease)
        if not made.digest:
            raise ClusterError(f"{module.name} cannot be built in this job", why=made.reason)
        shared.take(made)
        yield module.name, made.digest, shared.how


class _SharedModule(_Turns):
    """A module of another program."""

    def __init__(
        self, module: RecordedModule, place: job.JobPlace, signing_key: str | None
    ) -> None:
        super().__init__(place, hashlib.sha256(repr(module).encode()).hexdigest()[:32])
        self.module, self.signing_key, self.how = module, signing_key, work.CACHED
        self.store = Store()

    def make(self) -> Made:
        try:
            with publish.scratch("recorded") as stage:
                levels = self.module.restore(stage)
                if recorded.build(self.module, levels, self.store):
                    self.how = work.BUILT
                leaves = recorded.find(levels, self.store)
            if leaves is None:
                raise StoreError("what its commands made was not kept")
            payloads = [leaf.payload for leaf in leaves]
            bundle, size = work.send(payloads, self.channel, self.signing_key)
            return Made(bundle, bundle, size)
        except Exception as error:  # a full disk, no compiler: another rank may do better
            self.failure = work.shorten_error(error)
            return Made(reason=self.failure, final=isinstance(error, work.FINAL))

    def take(self, made: Made) -> None:
        """Have it in the store: fetched, or, if it does not fit here, compiled."""
        with publish.scratch("recorded") as stage:
            levels, root = self.module.restore(stage), self.store.root

            def find() -> bool | None:
                return recorded.find(levels, self.store) is not None or None

            if find():
                return
            if root is not None:
                name, limit = f"fetch-{made.digest[:40]}", settings.build_timeout
                with lock.turn(
                    root, name, find, lambda _: None, what=self.module.name, limit=limit
                ) as turn:
                    if isinstance(turn, lock.Turn):
                        places = Prepared(levels[0][0]).anchors.places
                        data = work.receive(made, self.channel)
                        unpack_bytes(data, root, sha256=made.bundle, places=places)
                        self.how = work.FETCHED
            if not find():
                recorded.build(self.module, levels, self.store)
                self.how = work.BUILT
