"""One task of the farm, as a worker sees it: a job comes in, a bundle or an error goes out.

``work`` raises nothing, because some executors run again what raised. It keeps its compiled files
in a store of its own, which ends with the worker. What it returns depends on the job and on what is
installed on the worker; the coordinator checks the latter.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from typing import Any, NamedTuple

from opkiln import __version__
from opkiln.bundles import layer
from opkiln.bundles.bundle import write_bundle
from opkiln.engine import events
from opkiln.errors import BuildError, OpkilnError, SpecError
from opkiln.settings import LAYOUT, override
from opkiln.ship import prebuild
from opkiln.ship.prebuild import FAILED, Outcome
from opkiln.ship.selection import NamedTarget
from opkiln.store import publish
from opkiln.store.layers import Store


class Job(NamedTuple):
    """One op for one target: names and settings, nothing of the coordinator's machine."""

    op: str
    target: NamedTarget  # nothing in it is left for the worker's machine to say
    settings: tuple[tuple[str, Any], ...] = ()  # flags and the like, by the settings' fields
    jobs: int | None = None  # the most steps at once, on this worker
    version: str = __version__

    def __str__(self) -> str:
        return f"{self.op} {self.target}"


class Result(NamedTuple):
    """What became of a job. ``bundle`` has the library, if there is one."""

    outcome: Outcome
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
            events.listening(note),
        ):
            outcome, bundle = _made(job)
    except OpkilnError as error:
        outcome, bundle = Outcome(job.op, FAILED, error=error), b""
    except Exception as error:  # a full disk, no more memory
        told = BuildError(f"op {job.op} was not built", why=f"{type(error).__name__}: {error}")
        outcome, bundle = Outcome(job.op, FAILED, error=told), b""
    if outcome.error is not None:
        outcome = outcome._replace(error=_from_elsewhere(outcome.error, job, worker))
    now = time.monotonic()
    relative = tuple(each._replace(at=each.at - now, data=dict(each.data)) for each in seen)
    return Result(outcome._replace(target=str(job.target), path=""), bundle, relative, worker)


@functools.cache
def _store() -> str:
    """This process's own store. A watchdog removes it, also if the process is killed.

    It has what the user's store on this host knows of the compilers: to ask them takes seconds.
    """
    made = publish.make_scratch("farm")
    os.makedirs(memory := os.path.join(made, LAYOUT, "toolchains"), 0o700)
    for known in filter(os.path.isdir, Store().memory[:1]):
        for name in os.listdir(known):
            with contextlib.suppress(FileNotFoundError):  # another process replaces it just now
                shutil.copy2(os.path.join(known, name), memory)
    return made


def _made(job: Job) -> tuple[Outcome, bytes]:
    if job.version != __version__:
        raise SpecError(
            f"op {job.op} was not built: opkiln is {__version__} there, and {job.version} here",
            hint=f"pip install opkiln=={job.version}",
        )
    asked = prebuild.requests([job.op], [job.target], named=True)
    (outcome,) = prebuild.prebuild(asked.requests, jobs=job.jobs, names_targets=True)
    if not outcome.path:
        return outcome, b""
    with publish.scratch("send") as stage:
        layers, file = os.path.join(stage, "layer"), os.path.join(stage, "bundle")
        layer.export([outcome.path], layers)
        write_bundle(layers, file)
        with open(file, "rb") as opened:
            return outcome, opened.read()


def _from_elsewhere(error: OpkilnError, job: Job, worker: str) -> OpkilnError:
    """The error as the coordinator tells it: with the op and the worker, without a log's path,
    since that log ends with the worker."""
    lines = [line for line in error.why.splitlines() if not line.startswith("log: ")]
    what = error.what if job.op in error.what else f"op {job.op}: {error.what}"
    hint = "" if error.log and error.log in error.hint else error.hint
    return type(error)(what, why="\n".join([*lines, f"for {job.target}, on {worker}"]), hint=hint)
