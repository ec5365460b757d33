"""Runs the steps of builds in parallel, within the budget, each after its dependencies."""

from __future__ import annotations

import contextvars
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from opkiln.run import budget as budgets
from opkiln.run import events, process
from opkiln.run.child import Completed
from opkiln.settings import settings


def call_in_threads(work: Callable[..., None], calls: Iterable[tuple[Any, ...]]) -> None:
    """Call ``work``, which must not raise, with each tuple of arguments: in a thread for each, if
    there are several. The threads have this thread's settings and display. They are daemons, so
    that they do not delay an interrupt."""
    each_call = list(calls)
    if len(each_call) == 1:
        work(*each_call[0])  # in this thread, so that an interrupt reaches it
        return
    threads = []
    for each in each_call:
        run = contextvars.copy_context().run
        threads.append(threading.Thread(target=run, args=(work, *each), daemon=True))
        threads[-1].start()
    for thread in threads:
        while thread.is_alive():
            # The timeout is needed because the kernel may deliver an interrupt to another thread,
            # and this thread sees it only when it wakes.
            thread.join(0.2)


class Task(NamedTuple):
    """One process to run once the tasks named in ``after``, of the same call, have succeeded."""

    name: str  # unique among the tasks that are executed together
    op: str
    label: str  # for people: a source's name, or one of events.NO_COMPILES
    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    tmpdir: str
    after: tuple[str, ...]
    memory: int  # bytes that it is expected to use
    # Called after a zero exit. If the task ``may_fail``, after any. What it returns is called
    # without arguments once the tasks after this one may have started.
    finish: Callable[[Completed], Callable[[], None] | None] | None
    threads: int = 1  # the most it can use; each one takes a CPU of the budget, and ``memory``
    widened: Callable[[int], tuple[str, ...]] | None = None  # its argv for this many threads
    may_fail: bool = False  # a non-zero exit is a result like any other


class StepFailed(Exception):
    """A task's process ended with a non-zero status."""

    def __init__(self, task: Task, completed: Completed) -> None:
        self.task = task
        self.completed = completed
        super().__init__(task, completed)


def execute(
    tasks: Iterable[Task],
    *,
    timeout: float | None,
    since: float | None = None,
    budget: budgets.Budget | None = None,
) -> dict[str, Completed]:
    """Run every task. Returns the results by task name.

    ``timeout`` applies to each step, from its start. For the steps that start before any has ended,
    it counts from ``since`` (``time.monotonic()``), if that is given. A wait for a free CPU does
    not count: it has the same limit for itself.

    A task's ``finish`` is called in the thread that ran the task. By then the slot has been
    released, and no task that depends on this one has started. What ``finish`` returns is called
    there, too, and has ended when this returns.

    The first failure kills the running tasks, cancels the rest and is raised: StepFailed for a
    non-zero exit, otherwise the exception itself (BuildTimeout, ToolchainError, what ``finish``
    raised). When this raises anything, even KeyboardInterrupt, no process of these tasks is alive.

    Several threads may call this at once; they share the budget.
    """
    known = {task.name: task for task in tasks}
    return _Run(known, timeout, since, budget or budgets.shared_budget()).complete()


class _Run:
    """One call of ``execute``. Hold ``changed`` to read or change its fields."""

    def __init__(
        self,
        tasks: dict[str, Task],
        timeout: float | None,
        since: float | None,
        budget: budgets.Budget,
    ) -> None:
        self.tasks = tasks
        self.timeout = timeout
        self.since = since  # None as soon as a step has ended
        self.budget = budget
        self.changed = threading.Condition()
        self.cancelled = threading.Event()
        self.left = dict(tasks)  # neither started nor done
        self.results: dict[str, Completed] = {}
        self.unfinished = 0  # tasks of which something is left to call
        self.failure: BaseException | None = None
        self.threads: list[threading.Thread] = []
        self.idle = 0

    def complete(self) -> dict[str, Completed]:
        try:
            with self.changed:
                self._add_threads()
                while self.failure is None and (
                    self.unfinished or len(self.results) < len(self.tasks)
                ):
                    # The wait needs a timeout. A signal may arrive just before the wait, or the
                    # kernel may deliver it to another thread. Then its exception is raised here
                    # only after the wait returns.
                    self.changed.wait(0.1)
        finally:
            # Normally all threads are about to end. After an interrupt, this stops them: each
            # kills its process group and waits for it. A second interrupt stops the waiting.
            self._stop()
            for thread in self.threads:
                thread.join()
        if self.failure is not None:
            raise self.failure
        return self.results

    def _stop(self) -> None:
        self.cancelled.set()
        with self.changed:
            self.left.clear()
            self.changed.notify_all()

    def _ready(self) -> list[Task]:
        done = self.results.keys()
        return [task for task in self.left.values() if done >= set(task.after)]

    def _add_threads(self) -> None:
        """Start a thread for each ready task, up to the number that can run at once."""
        most = min(len(self.budget.limits.slots), settings.max_jobs or len(self.tasks))
        for _ in range(min(len(self._ready()) - self.idle, most - len(self.threads))):
            # Copying the context gives the thread the settings that the caller overrode. The
            # threads are daemons, because the caller may be one: if the interpreter exits then,
            # the watchdog kills the processes.
            work = functools.partial(contextvars.copy_context().run, self._work)
            thread = threading.Thread(target=work, name="opkiln-step", daemon=True)
            thread.start()
            self.threads.append(thread)
            self.idle += 1

    def _work(self) -> None:
        while True:
            with self.changed:
                while self.left and not self._ready():
                    self.changed.wait()
                self.idle -= 1
                if not self.left:
                    return
                task = self._ready()[0]
                del self.left[task.name]
                since = self.since
            try:
                completed, rest = self._perform(task, since)
                with self.changed:
                    self.results[task.name] = completed
                    self.since = None
                    self.unfinished += 1
                    self.idle += rest is None
                    self._add_threads()
                    self.changed.notify_all()
                if rest is not None:
                    rest()
            except BaseException as error:
                self._fail(error)
                return
            with self.changed:
                self.unfinished -= 1
                self.idle += rest is not None
                self.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self.changed:
            # Later failures, and those after an interrupt, are only the effect of cancelling.
            if not self.cancelled.is_set():
                self.failure = error
            self._stop()

    def _perform(
        self, task: Task, since: float | None
    ) -> tuple[Completed, Callable[[], None] | None]:
        asked_at = time.monotonic()
        since = asked_at if since is None else since
        about = {"op": task.op, "label": task.label, "step": task.name}

        def report_wait(pid: int, seconds: float) -> None:
            host = os.uname().nodename
            events.emit(
                events.WAITING, op=task.op, pid=pid, host=host, seconds=seconds, what=events.CPU
            )

        with self.budget.hold(
            memory=task.memory, threads=task.threads, cancelled=self.cancelled, waiting=report_wait,
            limit=self.timeout, since=since,
        ) as held:  # fmt: skip
            since += time.monotonic() - asked_at
            events.emit(events.STEP_START, **about)
            threads = min(task.threads, len(held) // self.budget.slots_for(task.memory))
            completed = process.run(
                task.argv if task.widened is None else task.widened(max(1, threads)),
                cwd=task.cwd,
                env=task.env,
                tmpdir=task.tmpdir,
                timeout=self.timeout,
                since=since,
                cancelled=self.cancelled,
                watch_files=True,
            )
            # Before the slot is another step's: their times in a trace must not overlap.
            events.emit(
                events.STEP_END,
                **about,
                wall=completed.wall,
                max_rss=completed.max_rss,
                cached=False,
            )
        if completed.returncode and not task.may_fail:
            raise StepFailed(task, completed)
        return completed, None if task.finish is None else task.finish(completed)
