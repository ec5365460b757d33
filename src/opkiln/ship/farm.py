"""The build farm: ops for targets, as tasks for any ``concurrent.futures.Executor``.

A worker gets a job and returns a bundle or an error. It raises nothing, because some executors
repeat a task that raised. It keeps its compiled files in its own store.

The coordinator decides as a plain build does (``prebuild.look``): it does not build what the store
has. A result is imported when it comes, and then looked up like any other entry. So a library that
was built from other sources, with other flags or by another compiler is refused here. A wheel or a
bundle is then made from a store that one machine could have filled alone.

A lost task runs again. If the whole executor breaks, as a pool of processes does when one of them
is killed, a new executor gets the tasks that are left. If that breaks, too, tasks run one at a
time, so that the one that ends its worker is found and the others are built.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

from opkiln import __version__
from opkiln.base.model import CPU, flag_settings
from opkiln.decision.archs import target_cpu
from opkiln.errors import BuildError, OpkilnError, SpecError, StoreError, ToolchainError, UsageError
from opkiln.report.layout import count
from opkiln.run import events, progress
from opkiln.run.chrome import ChromeTrace
from opkiln.settings import LAYOUT, override, settings
from opkiln.ship import prebuild, selection
from opkiln.ship.prebuild import BUILT, FAILED, BuildOutcome, BuildRequest
from opkiln.ship.selection import NamedTarget
from opkiln.store import publish
from opkiln.store.bundle import temporary_bundle, unpack_bytes
from opkiln.store.layers import Store

Crew = str | Executor | Callable[[], Executor]

_KEYS = ("ops", "targets")  # of a matrix
_EXAMPLE = 'targets = ["cpu:x86-64-v3", "cuda:9.0a"]'
_TIMES = 3  # that a task is given to a worker
_BREAKS = 2  # of the executor, before tasks go on one at a time
_WAKE = 0.2  # seconds, so that an interrupt is seen


# The worker


class Job(NamedTuple):
    """One op for one target: names and settings, nothing of the coordinator's machine."""

    op: str
    target: NamedTarget  # complete: nothing in it depends on the worker's machine
    settings: tuple[tuple[str, Any], ...] = ()  # flags and the like, by the settings' fields
    jobs: int | None = None  # the most steps at once, on this worker
    version: str = __version__

    def __str__(self) -> str:
        return f"{self.op} {self.target}"


class Result(NamedTuple):
    """The result of a job. ``bundle`` has the library, if there is one."""

    outcome: BuildOutcome
    bundle: bytes = b""
    events: tuple[events.Event, ...] = ()  # ``at`` counts from the end of the task
    worker: str = ""


def work(job: Job) -> Result:
    """Build what a job asks for. Never raises an Exception."""
    seen: list[events.Event] = []
    worker = f"{os.uname().nodename} pid {os.getpid()}"

    def note(event: events.Event) -> None:
        if event.data.get("op") == str(job):  # threads of one worker may have tasks of their own
            seen.append(event)

    try:
        with (
            override(progress="off", trace=None, push=None, record=None),
            override(cache_dir=_store(), **dict(job.settings)),
            events.listen(note),
        ):
            outcome, bundle = _build_bundle(job)
    except Exception as error:  # also a full disk, no more memory
        why = f"{type(error).__name__}: {error}"
        told = error if isinstance(error, OpkilnError) else None
        told = told or BuildError(f"op {job.op} was not built", why=why)
        outcome, bundle = BuildOutcome(job.op, FAILED, error=told), b""
    if outcome.error is not None:
        outcome = outcome._replace(error=_name_worker(outcome.error, job, worker))
    now = time.monotonic()
    relative = tuple(each._replace(at=each.at - now, data=dict(each.data)) for each in seen)
    return Result(outcome._replace(target=str(job.target), path=""), bundle, relative, worker)


@functools.cache
def _store() -> str:
    """This process's own store. A watchdog removes it, also if the process is killed.

    It starts with what the user's store on this host knows of the compilers, because asking them
    takes seconds.
    """
    made = publish.make_scratch("farm")
    os.makedirs(memory := os.path.join(made, LAYOUT, "toolchains"), 0o700)
    for known in filter(os.path.isdir, Store().memory[:1]):
        for name in os.listdir(known):
            with contextlib.suppress(FileNotFoundError):  # another process replaces it just now
                shutil.copy2(os.path.join(known, name), memory)
    return made


def _build_bundle(job: Job) -> tuple[BuildOutcome, bytes]:
    if job.version != __version__:
        raise SpecError(
            f"op {job.op} was not built: opkiln is {__version__} there, and {job.version} here",
            hint=f"pip install opkiln=={job.version}",
        )
    asked = prebuild.requests([job.op], [job.target], named=True)
    (outcome,) = prebuild.prebuild(asked.requests, jobs=job.jobs, names_targets=True)
    if not outcome.path:
        return outcome, b""
    with temporary_bundle([outcome.path]) as made, open(made.path, "rb") as opened:
        return outcome, opened.read()


def _name_worker(error: OpkilnError, job: Job, worker: str) -> OpkilnError:
    """The error with the op and the worker, and without the path of a log, which is removed when
    the worker ends."""
    lines = [line for line in error.why.splitlines() if not line.startswith("log: ")]
    what = error.what if job.op in error.what else f"op {job.op}: {error.what}"
    hint = "" if error.log and error.log in error.hint else error.hint
    return type(error)(what, why="\n".join([*lines, f"for {job.target}, on {worker}"]), hint=hint)


# The coordinator


def build(
    ops: Iterable[str],
    targets: Iterable[str],
    executor: Crew,
    *,
    jobs: int | None = None,
    trace: str | None = None,
) -> list[BuildOutcome]:
    """Build ops for targets, each pair as a task, and return what became of each, in order.

    ``executor`` is one of ``concurrent.futures``, or a function that makes one (then a broken one
    is replaced), or the name of such a function, MODULE:FUNCTION. ``jobs`` is the most steps at
    once on each worker. A failure is an outcome. Raises UsageError for an unknown op, target or
    function, ToolchainError if the function makes no executor.
    """
    asked = prebuild.requests(dict.fromkeys(ops), selection.parse_all(targets), named=True)
    return [*run(asked.requests, executor, jobs=jobs, trace=trace), *asked.refused]


def run(
    asked: Sequence[BuildRequest], crew: Crew, *, jobs: int | None = None, trace: str | None = None
) -> list[BuildOutcome]:
    """``prebuild.prebuild``, on a farm."""
    name = type(crew).__name__ if isinstance(crew, Executor) else "an executor"
    if isinstance(crew, str):
        name, crew = crew, find_function(crew)
    outcomes: dict[int, BuildOutcome] = {}
    tasks: dict[int, Job] = {}
    for number, request in enumerate(asked):
        with selection.use_cpu(request.wanted):
            found = prebuild.look(request)
            # If there is no compiler here, the workers may have one.
            if isinstance(found, BuildOutcome) and not isinstance(found.error, ToolchainError):
                outcomes[number] = found
            else:
                tasks[number] = _job(request, jobs)
    if tasks:
        what, file = f"{count(len(tasks), 'task')} on {name}", trace or settings.trace
        with (
            progress.show_builds(traced=False),
            contextlib.closing(ChromeTrace(file)) if file else contextlib.nullcontext() as recorder,
        ):
            outcomes |= _do_tasks(crew, tasks, asked, what, recorder)
    return [outcomes[number] for number in range(len(asked))]


def _do_tasks(
    crew: Executor | Callable[[], Executor],
    tasks: Mapping[int, Job],
    asked: Sequence[BuildRequest],
    what: str,
    recorder: ChromeTrace | None,
) -> dict[int, BuildOutcome]:
    """Do all tasks, show their progress, and record one trace of all workers."""
    root = Store().root
    if root is None:
        raise StoreError(
            "there is no writable store",
            why="a farm's results are put into it",
            hint="set OPKILN_CACHE_DIR to a writable directory",
        )
    began = time.monotonic()
    outcomes: dict[int, BuildOutcome] = {}
    events.emit(events.BUILD_START, op=what, steps=len(tasks))
    for done, ended in enumerate(results(tasks, crew), 1):
        label, result = str(tasks[ended.number]), ended.result
        outcome = outcomes[ended.number] = _import_result(asked[ended.number], ended, root)
        if recorder is not None:
            # Placed by the time at which its result came: no clock of another machine is read.
            for event in result.events:
                recorder(event._replace(at=event.at + ended.at), result.worker)
        events.emit(
            events.STEP_END, op=what, label=label, step=f"{label} {done}", wall=outcome.seconds,
            max_rss=0, cached=False,
        )  # fmt: skip
        where = f" on {result.worker}" if result.worker else ""
        took = f" in {outcome.seconds:.1f} s" if outcome.path else ""
        text = f"[{done}/{len(tasks)}] {outcome.status} {label}{took}{where}"
        events.emit(events.NOTE, text=text)
    failed = any(each.error is not None for each in outcomes.values())
    events.emit(events.BUILD_END, op=what, ok=not failed, wall=time.monotonic() - began)
    return outcomes


def read_matrix(file: str) -> tuple[list[str], list[NamedTarget]]:
    """The ops and targets in a file, ``matrix.toml``; no ops if it names none. Raises UsageError,
    which names the file and what is wrong in it."""
    try:
        with open(file, "rb") as opened:
            given: dict[str, Any] = tomllib.load(opened)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{file} is not TOML",
            why=str(error),
            hint=f"echo {shlex.quote(_EXAMPLE)} > {shlex.quote(file)}",
        ) from error
    if unknown := sorted(set(given) - set(_KEYS)):
        raise UsageError(
            f"{file}: unknown key {', '.join(unknown)}", why=f"the keys are {', '.join(_KEYS)}"
        )
    for name, value in given.items():
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise UsageError(f"{file}: {name} is not a list of texts", why=f"such as {_EXAMPLE}")
    if not given.get("targets"):
        raise UsageError(f"{file} has no targets", why=f"such as {_EXAMPLE}")
    try:
        targets = selection.parse_all(given["targets"])
    except UsageError as error:
        raise UsageError(f"{file}: {error.what}", why=error.why) from None
    return list(dict.fromkeys(given.get("ops", ()))), targets


def find_function(text: str) -> Callable[[], Executor]:
    """The function that makes executors, by its name, MODULE:FUNCTION. Raises UsageError."""
    module, _, name = text.partition(":")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # whatever the module raises
        raise UsageError(
            f"--executor {text} names a function that cannot be found",
            why=f"{type(error).__name__}: {error}",
            hint="--executor MODULE:FUNCTION; `python -m opkiln` also finds modules in the current "
            "directory",
        ) from error

    def make() -> Executor:
        what = f"--executor {text} made no executor"
        try:
            made = found()
        except Exception as error:  # a package is missing, a scheduler does not answer
            raise ToolchainError(what, why=f"{type(error).__name__}: {error}") from error
        if not isinstance(made, Executor):
            why = f"{type(made).__name__} is not a concurrent.futures.Executor"
            raise UsageError(what, why=why)
        return made

    return make


def _job(request: BuildRequest, jobs: int | None) -> Job:
    """The request as a job, with all that depends on this machine already decided."""
    backend = request.builder.backend
    archs = request.wanted.archs if request.wanted is not None else ""
    with contextlib.suppress(OpkilnError):  # if it cannot be known here, the worker tells why
        if backend == CPU:
            archs = str(target_cpu())
        else:
            archs = ",".join(prebuild.decision_of(request).wanted.archs) or archs
    fields = ("debug", "debug_cuda", *flag_settings(backend))
    given = tuple((field, getattr(settings, field)) for field in fields)
    return Job(request.op, NamedTarget(backend, archs), given, jobs)


def _import_result(request: BuildRequest, ended: Ended, root: str) -> BuildOutcome:
    """Import a result, which must be what a build here would give, and return the outcome."""
    told = ended.result.outcome
    target = str(request.wanted or told.target)
    if not ended.result.bundle:
        return told._replace(target=target)
    try:
        # The farm is trusted as this machine's compilers are.
        unpack_bytes(ended.result.bundle, root, signed=False)
        with selection.use_cpu(request.wanted):
            found = prebuild.look(request)
    except OpkilnError as error:
        return told._replace(status=FAILED, target=target, error=error)
    if isinstance(found, BuildOutcome) and found.path and found.sha256 == told.sha256:
        return found._replace(status=BUILT, seconds=told.seconds)
    differs = BuildError(
        f"op {request.op} came from a worker that differs from this machine",
        why=f"for {told.target}, on {ended.result.worker}: its sources, flags or compilers are not "
        "those that a build here would use, so the parts of a release would not fit together",
        hint=f"opkiln plan {request.op} --target {told.target}    # here and there",
    )
    return told._replace(status=FAILED, target=target, error=differs)


# Every job gets a result, also if workers are lost


class Ended(NamedTuple):
    """A result, and when it came: ``time.monotonic()`` of this process."""

    number: int
    result: Result
    at: float


def results(jobs: Mapping[int, Job], crew: Executor | Callable[[], Executor]) -> Iterator[Ended]:
    """The results, as they come. If an executor breaks and ``crew`` can make another one, the jobs
    that are left go on there."""
    waiting = dict(jobs)
    losses: Counter[int] = Counter()
    breaks = 0
    while waiting:
        batch = dict(islice(waiting.items(), 1 if breaks >= _BREAKS else None))
        try:
            with _open_executor(crew) as executor:
                for ended in _run_all(batch, executor, losses):
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
                breaks = 0  # the others may run together again
                yield _lost_job(number, waiting.pop(number), error)


@contextlib.contextmanager
def _open_executor(crew: Executor | Callable[[], Executor]) -> Iterator[Executor]:
    """The executor. One that is made here is shut down at the end, without waiting after an
    error."""
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


def _run_all(jobs: Mapping[int, Job], executor: Executor, losses: Counter[int]) -> Iterator[Ended]:
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
                        yield _lost_job(number, jobs[number], error)
                else:
                    yield Ended(number, result, came.get(number, time.monotonic()))
    finally:
        for future in running:
            future.cancel()


def _lost_job(number: int, job: Job, error: Exception) -> Ended:
    told = BuildError(
        f"op {job.op} was not built: its worker was lost",
        why=f"for {job.target}: {type(error).__name__}: {error}",
        hint="run the command again: what was built is kept",
    )
    outcome = BuildOutcome(job.op, FAILED, job.target.backend, str(job.target), error=told)
    return Ended(number, Result(outcome), time.monotonic())
