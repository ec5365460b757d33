"""A process group of torch.distributed over shared memory, for the CPU.

    dist.init_process_group(opkiln.comm.register_backend())

It has all-reduce, reduce-scatter and all-gather of its own, and leaves the other collectives to
gloo. So do groups on several hosts: they run on gloo alone, with a FallbackWarning.
"""

from __future__ import annotations

import os
import queue
import threading
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from opkiln.base import forks
from opkiln.errors import ClusterError, FallbackWarning
from opkiln.ops.checks import NATIVE
from opkiln.ops.shm_comm import functions
from opkiln.ops.shm_comm.group import ShmGroup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

BACKEND = "opkiln_shm"
_OPS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
)


def register_backend() -> str:
    """Tell torch.distributed of the backend; its name, "opkiln_shm". Calling it again has no
    effect."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, ShmProcessGroup, devices=["cpu"])
    return BACKEND


class ShmProcessGroup(dist.ProcessGroup):
    """What ``init_process_group`` and ``new_group`` make. ``shm`` is the group of shared memory, or
    None if gloo does everything; ``fallback`` says why."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # Not with the store: torch's class takes that from C++ code alone.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        # What this class does not override, torch's own class gives to this backend.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.shm: ShmGroup | None = None
        self.fallback = ""
        try:
            shm = ShmGroup(PrefixStore("shm", store), rank, size, timeout, gloo=self._gloo)
        except ClusterError as error:
            self.fallback = error.what
        else:
            self.fallback = shm.fallback
            self.shm = None if shm.fallback else shm
        if self.fallback:
            warnings.warn(
                f"{BACKEND}: gloo serves this group: {self.fallback}", FallbackWarning, stacklevel=2
            )
        self._lane = _Lane()
        weakref.finalize(self, self._lane.end)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    def allreduce(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, *rest: Any, **named: Any
    ) -> Any:
        op = _op_of(opts)
        if self.shm is None or op is None or not _is_served(tensors, floating=True):
            return self._gloo.allreduce(tensors, *_given_options(opts), *rest, **named)
        (x,), number = tensors, self.shm.number
        return self._run(lambda: functions.shm_all_reduce_(x.detach(), number, op), [x], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> Any:
        op = _op_of(opts)
        if (
            self.shm is None
            or op is None
            or not _is_served(outputs, floating=True)
            or len(inputs) != 1
            or not _is_alike(inputs[0], outputs[0], self.size())
        ):
            return self._gloo.reduce_scatter(outputs, inputs, *_given_options(opts), *rest)
        (out,), (parts,), number = outputs, inputs, self.shm.number

        def work() -> None:
            whole = torch.stack([part.detach() for part in parts])
            _write(out, lambda to: functions.shm_reduce_scatter_into(to, whole, number, op))

        return self._run(work, [out], opts)

    def reduce_scatter_single(self, out: Any, x: Any, opts: Any = None) -> Any:
        op = _op_of(opts)
        if self.shm is None or op is None or not _is_served([x, out], floating=True, count=2):
            return self._gloo._reduce_scatter_base(out, x, *_given_options(opts))
        number = self.shm.number

        def work() -> None:
            whole = x.detach().contiguous()
            _write(out, lambda to: functions.shm_reduce_scatter_into(to, whole, number, op))

        return self._run(work, [out], opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> Any:
        if (
            self.shm is None
            or not _is_served(inputs, floating=False)
            or len(outputs) != 1
            or not _is_alike(outputs[0], inputs[0], self.size())
        ):
            return self._gloo.allgather(outputs, inputs, *_given_options(opts), *rest)
        (parts,), (x,), number = outputs, inputs, self.shm.number

        def work() -> None:
            whole = functions.shm_all_gather(x.detach().unsqueeze(0), number)
            for part, found in zip(parts, whole, strict=True):
                part.detach().copy_(found)

        return self._run(work, list(parts), opts)

    def all_gather_single(self, out: Any, x: Any, opts: Any = None) -> Any:
        if self.shm is None or not _is_served([x, out], floating=False, count=2):
            return self._gloo._allgather_base(out, x, *_given_options(opts))
        number = self.shm.number

        def work() -> None:
            part = x.detach().contiguous()
            _write(out, lambda to: functions.shm_all_gather_into(to, part, number))

        return self._run(work, [out], opts)

    # The names before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    _allgather_base = all_gather_single  # type: ignore[assignment]

    def _run(self, work: Callable[[], None], results: list[Tensor], opts: Any) -> _Work:
        """Do the work, in its turn. A caller that does not wait gets it done by another thread."""
        return self._lane.run(work, results, waits=not getattr(opts, "asyncOp", True))


class _Work(dist.Work):
    """A collective that is done, or that the lane will do."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self._results = results
        self._error: Exception | None = None
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        # An exception that a callback raises is one for torch's C++ code (DDP), too.
        self._future = self._ended.then(self._outcome)

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        self._ended.set_result(None)

    def _outcome(self, _: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._results

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 (the group's timeout holds)
        self._ended.wait()
        self._outcome(None)
        return True

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return self._ended.done()

    def is_success(self) -> bool:
        return self._ended.done() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._results


class _Lane:
    """Collectives of one group, one after the other in the order in which they were asked for."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = forks.lock()
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], _Work] | None] | None = None
        self._unfinished = 0

    def run(self, work: Callable[[], None], results: list[Tensor], *, waits: bool) -> _Work:
        if os.getpid() != self._pid:
            raise RuntimeError("a forked child cannot use its parent's process group")
        made = _Work(results)
        with self._lock:
            here = waits and self._unfinished == 0
            self._unfinished += 1
            if not here:
                if self._waiting is None:
                    self._waiting = queue.SimpleQueue()
                    threading.Thread(
                        target=self._serve, args=(self._waiting,), name=BACKEND, daemon=True
                    ).start()
                self._waiting.put((work, made))
        if here:
            self._do(work, made)
        return made

    def _serve(self, waiting: queue.SimpleQueue[Any]) -> None:
        while (item := waiting.get()) is not None:
            self._do(*item)
            del item  # or its tensors would stay until the next one

    def _do(self, work: Callable[[], None], made: _Work) -> None:
        error = None
        try:
            with torch.no_grad():
                work()
        except Exception as caught:
            error = caught
        with self._lock:
            self._unfinished -= 1
        made.finish(error)

    def end(self) -> None:
        """Let the thread end when it has done what was asked for."""
        if self._waiting is not None:
            self._waiting.put(None)


def _op_of(opts: Any) -> str | None:
    """The op's name for shared memory, or None if it has none. Without options it is a sum."""
    if opts is None:
        return "sum"
    asked = getattr(opts, "reduceOp", None)
    return next((name for op, name in _OPS if asked == op), None)


def _given_options(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _is_served(tensors: Any, *, floating: bool, count: int = 1) -> bool:
    """Whether shared memory serves tensors like these. Only of what all ranks have in common: one
    that went to gloo alone would wait for the others."""
    return (
        isinstance(tensors, list | tuple)
        and len(tensors) == count
        and all(
            each.device.type == "cpu"
            and each.layout == torch.strided
            and (each.dtype in NATIVE or (not floating and not each.is_complex()))
            for each in tensors
        )
    )


def _is_alike(parts: list[Tensor], x: Tensor, size: int) -> bool:
    return len(parts) == size and all(
        part.shape == x.shape and part.dtype == x.dtype for part in parts
    )


def _write(out: Tensor, fill: Callable[[Tensor], None]) -> None:
    """Fill a tensor by a function that takes contiguous ones."""
    to = out.detach()
    whole = (
        to if to.is_contiguous() else torch.empty_like(to, memory_format=torch.contiguous_format)
    )
    fill(whole)
    if whole is not to:
        to.copy_(whole)
