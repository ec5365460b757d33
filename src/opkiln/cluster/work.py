"""The work of a rank for an agreement (report, build, send, fetch, find), and the driver of its
state machine.

Every question goes to the one decision (``decision.decide``), as a load's does.
"""

from __future__ import annotations

import contextvars
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from opkiln import errors
from opkiln.base.model import Artifact, Op
from opkiln.cluster import facts, protocol
from opkiln.cluster.channel import Channel
from opkiln.cluster.messages import Hello, JobOutcome, Made, Offer, Vote, key_of
from opkiln.cluster.program import Programs
from opkiln.cluster.protocol import Done, End, FetchOp, Look, MakeOp, Pause, State
from opkiln.decision import prebuilt, terms
from opkiln.decision.terms import Build, Outcome, Request, Serve, Trace
from opkiln.loading import loader
from opkiln.machine import uname
from opkiln.machine.arch import cpu
from opkiln.settings import settings
from opkiln.store import layers, lock, signing, tuned
from opkiln.store.bundle import temporary_bundle, unpack_bytes
from opkiln.store.layers import Store

# Errors of the input: they are the same wherever it is built. Any other may be one machine's.
FINAL = (errors.CompileError, errors.InputError, errors.StepRefused, errors.UsageError)
_LONGEST = 1500  # characters of an error that are told to other ranks

CACHED, BUILT, FETCHED, BESIDE = "cached", "built", "fetched", "found on this node"


class Worker:
    """The ops of one agreement, as this rank sees them."""

    def __init__(
        self,
        ops: Sequence[Op],
        channel: Channel | None = None,
        signing_key: str | None = None,
        *,
        sees_loaded: bool = True,
    ) -> None:
        """``sees_loaded=False`` ignores the libraries that this process has loaded."""
        self.signing_key = signing_key
        self.sees_loaded = sees_loaded
        self.error: Exception | None = None  # why the last build failed here, or is impossible
        self.ops = tuple(ops)
        self.channel = channel
        self.artifacts: list[dict[str, Artifact]] = [{} for _ in ops]  # by op and digest
        self.how = ["" for _ in ops]
        self.functions: list[facts.Functions] = [{} for _ in ops]
        self.facts: list[facts.Facts] = [{} for _ in ops]
        self._programs = Programs()

    def hello(self) -> Hello:
        """The libraries that this rank has, and the ops that it can build. Raises UsageError for a
        wrong declaration."""
        root = Store().root
        layers.claim(root)
        host = os.uname().nodename
        node = host
        if root is not None and os.path.isdir(root):
            found = os.stat(root)
            node = f"{host}:{found.st_dev}:{found.st_ino}"
        offers = tuple(self._offer(number, op) for number, op in enumerate(self.ops))
        return Hello(host, os.getpid(), node, offers)

    def _offer(self, number: int, op: Op) -> Offer:
        request = Request(op, agreed=False)
        self.functions[number] = facts.functions_of(op)
        self.facts[number] = {
            **facts.library_facts(request),
            **facts.function_facts(op, self.functions[number], self._programs),
        }
        told = facts.digest(self.facts[number])
        offer = Offer(op.spec.name, told, native_only=terms.why_no_reference(request))
        if (loaded := self._find_loaded(op)) is not None:
            self.keep(number, loaded, CACHED)
            return offer._replace(digest=loaded.sha256)
        outcome = self.look(number, request)
        if isinstance(outcome, Serve):
            return offer._replace(digest=outcome.artifact.sha256)
        if isinstance(outcome, Build):
            target = outcome.plan.target
            needs = cpu.requires(target.cpu, tuple(target.cpu_features))
            return offer._replace(can_build=True, cpu=tuple(sorted(needs)))
        if isinstance(outcome.error, errors.UsageError):
            raise outcome.error
        here = tuple(sorted(cpu.features_of(uname.cpu_flags())))
        return offer._replace(reason=shorten_error(outcome.error), cpu=here)

    def look(self, number: int, request: Request) -> Outcome:
        """The decision for an op here. A library that is already here is kept."""
        outcome = loader.resolve(request)
        if isinstance(outcome, Serve):
            self.keep(number, outcome.artifact, CACHED)
        elif not isinstance(outcome, Build):
            self.error = outcome.error
        return outcome

    def list_tuned(self) -> tuple[str, ...]:
        """The choices for the ops that are kept here (``tune=``)."""
        ops = {(op.spec.distribution, op.spec.name.partition("__")[0]) for op in self.ops}
        found: dict[tuned.Question, str] = {}
        for place in Store().location.layers:
            for each in tuned.read_choices(place.root) if not place.bundle else ():
                if (each.question.distribution, each.question.op) in ops:
                    found.setdefault(each.question, tuned.to_text(each))
        return tuple(sorted(found.values()))

    def keep_tuned(self, texts: Sequence[str]) -> None:
        """Copy another rank's choices into the store. One that cannot be kept is measured here."""
        store = Store()
        if store.root is None:
            return
        for text in texts:
            with suppress(OSError, *tuned.MALFORMED):
                choice = tuned.from_text(text)
                if tuned.find(store, choice.question) != choice:
                    tuned.keep(store.root, choice)

    def change_finder(self, number: int) -> Callable[[Op], str]:
        """A function that names the parts of an op that differ from what this rank reported."""
        return partial(facts.find_change, self.facts[number], self.functions[number])

    def keep(self, op: int, artifact: Artifact, how: str) -> None:
        self.artifacts[op][artifact.sha256] = artifact
        self.how[op] = how

    def library(self, op: int, digest: str) -> Artifact:
        """The library that this rank voted for."""
        if digest not in self.artifacts[op]:
            raise errors.ClusterError(
                f"op {self.ops[op].spec.name}: the agreed library is not here"
            )
        return self.artifacts[op][digest]

    # Called by the driver. Nothing is raised here: all ranks are told of an error.

    def make(self, op: int, ship: bool) -> Made:
        """Build an op, or take what is here; put it into the job's store if it is to be sent."""
        try:
            known = next(iter(self.artifacts[op].values()), None)
            if known is None:
                known, _ = loader.obtain(Request(self.ops[op], must_be_native=True, agreed=False))
                self.keep(op, known, BUILT if known.origin == "built" else CACHED)
            if not ship:
                return Made(known.sha256)
            bundle, size = self._send(known)
            return Made(known.sha256, bundle, size)
        except Exception as error:  # a full disk, no more memory: another rank may do better
            self.error = error
            return Made(reason=shorten_error(error), final=isinstance(error, FINAL))

    def _send(self, artifact: Artifact) -> tuple[str, int]:
        assert self.channel is not None
        return send([artifact.path], self.channel, self.signing_key)

    def fetch(self, op: int, made: Made) -> Vote:
        """Get the library that was made: from the store of this node, or from the job's."""
        try:
            return self._fetch(op, made)
        except Exception as error:  # as above: the other ranks must not wait for this one
            return Vote(reason=shorten_error(error))

    def _fetch(self, op: int, made: Made) -> Vote:
        request = Request(self.ops[op], agreed=False)
        if terms.prefers_reference(request):
            return Vote(reason="OPKILN_MODE=reference")
        if (loaded := self._find_loaded(self.ops[op])) is not None:
            raise errors.ReloadError(
                f"op {self.ops[op].spec.name} was loaded before, from another library",
                why=f"SHA-256 {loaded.sha256[:16]}, not {made.digest[:16]}",
            )
        if self.find(op, made, trace := Trace()):
            return Vote(made.digest)
        root, lacking = request.store.root, "it is not in the store of this node"
        if made.bundle and root is not None and self.channel is not None:
            layers.claim(root)
            with lock.turn(
                root,
                f"fetch-{made.digest[:40]}",
                lambda: self.find(op, made, Trace()) or None,
                lambda _: None,
                what=f"op {self.ops[op].spec.name}",
                limit=settings.build_timeout,
            ) as turn:
                if fetches := isinstance(turn, lock.Turn):
                    self._import(made, root)
            if self.find(op, made, trace := Trace()):
                self.how[op] = FETCHED if fetches else BESIDE
                return Vote(made.digest)
            lacking = "it was fetched, and is not in the store"
        return Vote(reason=[lacking, *trace.refusals()][-1][:_LONGEST])

    def _import(self, made: Made, root: str) -> None:
        assert self.channel is not None
        unpack_bytes(receive(made, self.channel), root, sha256=made.bundle)

    def _find_loaded(self, op: Op) -> Artifact | None:
        """The library that this process has opened for an op."""
        loaded = loader.loaded_here().get(op.name) if self.sees_loaded else None
        return None if loaded is None else loaded[0].artifact

    def find(self, op: int, made: Made, trace: Trace) -> bool:
        """Whether this node has this library and can use it. If so, it is kept."""
        request = Request(self.ops[op], agreed=False)
        layers = request.store.location.layers
        listed = [each.root for each in layers if each.listed and os.path.lexists(each.root)]
        own = [each.root for each in layers if not each.listed]
        found = prebuilt.find(request, listed, trace, prebuilt.LAYER, own, only=made.digest)
        if found is None:
            return False
        self.keep(op, found, BESIDE)
        return True


_PATIENCE = 120.0  # seconds for one part of a bundle: a part takes a second at 8 Mbit/s


def send(payloads: Sequence[str], channel: Channel, signing_key: str | None) -> tuple[str, int]:
    """Put a bundle of these files of the store into the job's store: (its SHA-256, its size)."""
    with temporary_bundle(payloads) as made:
        if signing_key is not None:
            signing.sign(made.path, signing_key)
        with open(made.path, "rb") as opened:
            data = opened.read()
    return channel.another(_PATIENCE).put_bundle(data), len(data)


def receive(made: Made, channel: Channel) -> bytes:
    """The bundle that a rank has sent."""
    return channel.another(_PATIENCE).get_bundle(made.bundle, made.size)


def shorten_error(error: Exception) -> str:
    """The text by which other ranks are told of an error."""
    if not isinstance(error, errors.OpkilnError):
        return f"{type(error).__name__}: {error}"[:_LONGEST]
    return f"{error.what}\n{error.why}".rstrip()[:_LONGEST]


# The driver of the state machine: a real store, a real clock, threads for the work

BEATS = 6  # in a lease
# Seconds between two looks: a part of the time that was waited, so that the end of a short wait is
# seen at once and a long one costs little. The store answers about 40,000 questions a second, and a
# look is two to four of them, so the ranks of a large job look less often (bench/cluster_scale.py).
_FIRST_PAUSE, _LAST_PAUSE, _PART, _FOR_EACH_RANK = 0.01, 0.2, 0.03, 0.00015


def agree(state: State, channel: Channel, work: Worker) -> JobOutcome:
    """The outcome that all ranks have. Raises ClusterError if the store cannot be reached."""
    ended: queue.SimpleQueue[Done] = queue.SimpleQueue()
    waited_since = time.monotonic()
    with keep_beating(channel, state.rank, state.lease):
        while True:
            action = protocol.next_action(state)
            if isinstance(action, End):
                return action.outcome
            if isinstance(action, Pause):
                state = protocol.apply_answer(state, action, None, 0)
                with suppress(queue.Empty):
                    pause = choose_pause(state.world, time.monotonic() - waited_since)
                    state = protocol.apply_done(state, ended.get(timeout=pause))
                    waited_since = time.monotonic()
                continue
            if isinstance(action, (MakeOp, FetchOp)):
                started = state.started
                state = protocol.apply_answer(state, action, None, 0)
                if state.started != started:
                    _start(work, action, ended)
                continue
            now = time.monotonic()
            answer = channel.do(action)
            state = protocol.apply_answer(state, action, answer, now)
            if not isinstance(action, Look):
                waited_since = time.monotonic()


def choose_pause(world: int, waited: float) -> float:
    """Seconds until a rank that has waited this long looks again. They are random, so that ranks
    that started together do not look together."""
    pause = max(min(max(_FIRST_PAUSE, _PART * waited), _LAST_PAUSE), _FOR_EACH_RANK * world)
    return pause * random.uniform(0.75, 1.25)  # noqa: S311 (spreads the load)


def _start(work: Worker, action: MakeOp | FetchOp, ended: queue.SimpleQueue[Done]) -> None:
    def run() -> None:
        if isinstance(action, MakeOp):
            ended.put(Done(action.op, work.make(action.op, action.ship)))
        else:
            ended.put(Done(action.op, work.fetch(action.op, action.made)))

    # The thread has this thread's settings. It is a daemon: after an error nobody waits for it.
    call = contextvars.copy_context().run
    threading.Thread(target=call, args=(run,), name="opkiln-ensure", daemon=True).start()


@contextmanager
def keep_beating(channel: Channel, rank: int, lease: float) -> Iterator[None]:
    """Within the block, this rank counts up its beat from a thread and a connection of its own."""
    beats = channel.another()
    stop = threading.Event()

    def beat() -> None:
        number = 0
        try:
            while not stop.wait(lease / BEATS):
                number += 1
                beats.put(key_of("beat", rank), number)
        except errors.ClusterError:
            return  # the main thread finds the same error and raises it

    beats.put(key_of("beat", rank), 0)
    thread = threading.Thread(target=beat, name="opkiln-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
