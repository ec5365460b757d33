"""The executors that a farm runs on, by their names: local processes, Dask, Ray, MPI, Slurm.

Each is the executor of its own package, or the thinnest cover over what that package has instead
of one. They are imported when they are asked for.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from opkiln import process
from opkiln.errors import ToolchainError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

FORMS = "processes=N, dask://HOST:PORT, ray, ray://HOST:PORT, mpi, slurm=SHARED_DIR"
_RETRIES = 2  # what a scheduler does by itself when it loses a worker
_POLL = 0.5  # seconds
_QUEUE = 5.0  # seconds between two looks at Slurm's queue
_MINUTES = 60  # the most that a job of Slurm takes, unless SBATCH_TIMELIMIT says otherwise


def named(text: str, jobs: int | None = None) -> Callable[[], Executor]:
    """What makes the executor of this name; called again, it makes a new one.

    ``jobs`` are the CPUs that one task takes, where a scheduler wants to know. Raises UsageError
    for an unknown name, ToolchainError if its package is missing.
    """
    kind, mark, rest = text.partition("=") if "=" in text else text.partition("://")
    if kind == "processes" and mark == "=" and rest.isdecimal() and int(rest) > 0:
        # Spawned, not forked: the coordinator has threads, and may have torch.
        return lambda: ProcessPoolExecutor(int(rest), mp_context=get_context("spawn"))
    if kind == "dask" and mark == "://" and rest:
        dask = _package("distributed", text, "distributed")
        return lambda: Dask(dask, rest)
    if text == "ray" or (kind == "ray" and mark == "://" and rest):
        ray = _package("ray", text, "ray")
        return lambda: Ray(ray, text if rest else None)
    if text == "mpi":
        mpi = _package("mpi4py.futures", text, "mpi4py")
        return lambda: _executor(mpi.MPIPoolExecutor())
    if kind == "slurm" and mark == "=" and rest:
        submitit = _package("submitit", text, "submitit")
        return lambda: Submitted(submitit.AutoExecutor(rest, cluster="slurm"), jobs, squeue)
    raise UsageError(
        f"--executor {text}: there is no such executor",
        why=f"they are {FORMS}",
        hint="--executor processes=4",
    )


def _package(module: str, text: str, distribution: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ToolchainError(
            f"--executor {text} needs the package {distribution}",
            why=f"{type(error).__name__}: {error}",
            hint=f"pip install {distribution}",
        ) from error


def _executor(made: Any) -> Executor:
    assert isinstance(made, Executor)
    return made


class Dask(Executor):
    """Dask's executor, which does not end its connection, with that connection."""

    def __init__(self, dask: Any, address: str) -> None:
        self._client = dask.Client(f"tcp://{address}")
        # Not pure: the same job may give another answer after something was mended.
        self._executor = self._client.get_executor(retries=_RETRIES, pure=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = self._executor.submit(fn, *args, **kwargs)
        return future

    def shutdown(self, wait: bool = True, **_: Any) -> None:
        self._executor.shutdown(wait)
        self._client.close()


class Ray(Executor):
    """Ray's tasks as futures. Ray has no executor of its own."""

    def __init__(self, ray: Any, address: str | None) -> None:
        self._ray = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            ray.init(address, log_to_driver=False, logging_level="warning")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        task = self._ray.remote(fn).options(max_retries=_RETRIES)
        future: Future[Any] = task.remote(*args, **kwargs).future()
        return future

    def shutdown(self, *_: Any, **__: Any) -> None:
        if self._ours:
            self._ray.shutdown()


def squeue() -> set[str] | None:
    """The numbers of the jobs that Slurm has not ended; None if it does not answer."""
    try:
        done = process.capture(["squeue", "--me", "--noheader", "--format=%A"], timeout=60.0)
    except ToolchainError:
        return None
    return set(done.stdout.split()) if done.returncode == 0 else None


class Submitted(Executor):
    """Jobs of submitit as futures: a thread asks for those that have ended.

    A job that is killed leaves no result. submitit learns of it from Slurm's accounting, which not
    every cluster has, so ``queue`` is asked, too: a job that is missing there twice, without a
    result, is lost.
    """

    def __init__(
        self,
        executor: Any,
        jobs: int | None,
        queue: Callable[[], set[str] | None] = lambda: None,
    ) -> None:
        cpus = {} if jobs is None else {"cpus_per_task": jobs}
        executor.update_parameters(timeout_min=_MINUTES, **cpus)  # submitit's own limit is short
        self._executor = executor
        self._running: list[tuple[Any, Future[Any]]] = []
        self._queue = queue
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="opkiln-farm", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        job = self._executor.submit(fn, *args, **kwargs)
        future.set_running_or_notify_cancel()
        with self._lock:
            self._running.append((job, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while wait and not cancel_futures and self._running:
            time.sleep(_POLL)
        self._closed.set()
        self._thread.join()
        for job, _ in self._running:
            job.cancel()

    def _watch(self) -> None:
        missing: set[str] = set()
        asked = time.monotonic()
        while not self._closed.wait(_POLL):
            lost: set[str] = set()
            running = list(self._running)
            if running and time.monotonic() - asked >= _QUEUE:
                asked, there = time.monotonic(), self._queue()
                now = set() if there is None else {str(job.job_id) for job, _ in running} - there
                # Twice: a file system that nodes share may show a result late.
                lost, missing = missing & now, now
            for job, future in running:
                if job.done():
                    self._end(job, future)
                elif str(job.job_id) in lost:
                    told = f"Slurm ended job {job.job_id}, which left no result"
                    future.set_exception(RuntimeError(f"{told}; its log is {job.paths.stderr}"))
                else:
                    continue
                with self._lock:
                    self._running.remove((job, future))

    def _end(self, job: Any, future: Future[Any]) -> None:
        try:
            future.set_result(job.result())
        except Exception as error:  # the job was lost; it is the farm that decides what follows
            future.set_exception(error)
