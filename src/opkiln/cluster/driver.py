"""Drives the state machine of one rank: a real store, a real clock, threads for the work."""

from __future__ import annotations

import contextvars
import queue
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from opkiln.cluster import protocol
from opkiln.cluster.channel import Channel
from opkiln.cluster.messages import JobOutcome, key_of
from opkiln.cluster.protocol import Done, End, FetchOp, Look, MakeOp, Pause, State
from opkiln.cluster.work import Worker
from opkiln.errors import ClusterError

BEATS = 6  # in a lease
# Seconds between two looks: a part of the time that was waited, so that the end of a short wait is
# seen at once and a long one costs little. The store answers about 40,000 questions a second, and a
# look is two to four of them, so many ranks look less often (bench/cluster_scale.py).
_FIRST_PAUSE, _LAST_PAUSE, _PART, _FOR_EACH_RANK = 0.01, 0.2, 0.03, 0.00015


def agree(state: State, channel: Channel, work: Worker) -> JobOutcome:
    """The outcome that all ranks have. Raises ClusterError if the store cannot be reached."""
    ended: queue.SimpleQueue[Done] = queue.SimpleQueue()
    waited_since = time.monotonic()
    with beating(channel, state.rank, state.lease):
        while True:
            action = protocol.next_action(state)
            if isinstance(action, End):
                return action.outcome
            if isinstance(action, Pause):
                state = protocol.apply_answer(state, action, None, 0)
                with suppress(queue.Empty):
                    pause = pause_of(state.world, time.monotonic() - waited_since)
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


def pause_of(world: int, waited: float) -> float:
    """Seconds until a rank looks again that has waited so long. Random, so that ranks that started
    together do not look together."""
    pause = max(min(max(_FIRST_PAUSE, _PART * waited), _LAST_PAUSE), _FOR_EACH_RANK * world)
    return pause * random.uniform(0.75, 1.25)  # noqa: S311 (spreads the load)


def _start(work: Worker, action: MakeOp | FetchOp, ended: queue.SimpleQueue[Done]) -> None:
    def run() -> None:
        if isinstance(action, MakeOp):
            ended.put(Done(action.op, work.make(action.op, action.ship)))
        else:
            ended.put(Done(action.op, work.fetch(action.op, action.made)))

    # The thread sees this thread's settings. It is a daemon: an error elsewhere must not wait.
    call = contextvars.copy_context().run
    threading.Thread(target=call, args=(run,), name="opkiln-ensure", daemon=True).start()


@contextmanager
def beating(channel: Channel, rank: int, lease: float) -> Iterator[None]:
    """Within the block, this rank counts up its beat from a thread and a connection of its own."""
    beats = channel.another()
    stop = threading.Event()

    def beat() -> None:
        number = 0
        try:
            while not stop.wait(lease / BEATS):
                number += 1
                beats.put(key_of("beat", rank), number)
        except ClusterError:
            return  # the thread that looks finds it, too, and says so

    beats.put(key_of("beat", rank), 0)
    thread = threading.Thread(target=beat, name="opkiln-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
