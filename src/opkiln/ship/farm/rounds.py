"""Every job of a farm to its result, whatever happens to the workers.

A lost task runs again. Where the whole executor breaks, as a pool of processes does when one of
them is killed, a new one gets what was not finished. If that breaks, too, tasks go on one at a
time, so that the one that ends its worker is found and the others are built.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, wait
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from opkiln.errors import BuildError
from opkiln.ship.farm.tasks import Job, Result, work
from opkiln.ship.prebuild import FAILED, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future

_TIMES = 3  # that a task is given to a worker
_BREAKS = 2  # of the executor, before tasks go on one at a time
_WAKE = 0.2  # seconds, so that an interrupt is seen


class Ended(NamedTuple):
    """A result, and when it came: ``time.monotonic()`` of this process."""

    number: int
    result: Result
    at: float


def results(jobs: Mapping[int, Job], crew: Executor | Callable[[], Executor]) -> Iterator[Ended]:
    """The results, as they come. A crew that makes executors can go on after one has broken."""
    waiting = dict(jobs)
    losses: Counter[int] = Counter()
    breaks = 0
    while waiting:
        batch = dict(islice(waiting.items(), 1 if breaks >= _BREAKS else None))
        try:
            with _running(crew) as executor:
                for ended in _round(batch, executor, losses):
                    del waiting[ended.number]
                    yield ended
        except BrokenExecutor as error:
            breaks += 1
            left = [number for number in batch if number in waiting]
            if isinstance(crew, Executor):
                given_up = list(waiting)
            else:
                losses.update(left if len(left) == 1 else ())
                given_up = [number for number in left if losses[number] >= _TIMES]
            for number in given_up:
                breaks = 0  # whoever it was, the others may go on together
                yield _lost(number, waiting.pop(number), error)


@contextlib.contextmanager
def _running(crew: Executor | Callable[[], Executor]) -> Iterator[Executor]:
    """The executor. One that was made here is ended here, at once if something is wrong."""
    if isinstance(crew, Executor):
        yield crew
        return
    executor = crew()
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False)  # its futures are cancelled already
        raise
    executor.shutdown()


def _round(jobs: Mapping[int, Job], executor: Executor, losses: Counter[int]) -> Iterator[Ended]:
    """The results of one executor. Raises BrokenExecutor."""
    came: dict[int, float] = {}  # not the futures: they hold the bundles

    def submit(number: int) -> Future[Result]:
        future = executor.submit(work, jobs[number])
        future.add_done_callback(lambda _: came.__setitem__(number, time.monotonic()))
        return future

    running = {submit(number): number for number in jobs}
    try:
        while running:
            for future in wait(running, _WAKE, FIRST_COMPLETED).done:
                number = running.pop(future)
                try:
                    result = future.result()
                except BrokenExecutor:
                    raise
                except Exception as error:  # not the task's own: ``work`` raises none
                    losses[number] += 1
                    if losses[number] < _TIMES:
                        running[submit(number)] = number
                    else:
                        yield _lost(number, jobs[number], error)
                else:
                    yield Ended(number, result, came.get(number, time.monotonic()))
    finally:
        for future in running:
            future.cancel()


def _lost(number: int, job: Job, error: Exception) -> Ended:
    told = BuildError(
        f"op {job.op} was not built: its worker was lost",
        why=f"for {job.target}: {type(error).__name__}: {error}",
        hint="run the command again: what was built is kept",
    )
    outcome = Outcome(job.op, FAILED, job.target.backend, str(job.target), error=told)
    return Ended(number, Result(outcome), time.monotonic())
