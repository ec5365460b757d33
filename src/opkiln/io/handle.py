"""``AsyncIO``: reads and writes of tensors that go on while the program does something else."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import warnings
import weakref
from concurrent.futures import CancelledError
from contextlib import ExitStack
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkiln.base import forks
from opkiln.errors import ArgumentError, UsageError
from opkiln.ops.async_io import functions
from opkiln.ops.async_io.engines import choose
from opkiln.ops.async_io.functions import CANCELLED, RUNNING, close_descriptors
from opkiln.ops.gds import device as devices

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    Path = str | os.PathLike[str] | int

_SLICE = 100  # milliseconds: Ctrl-C is noticed between two waits
_LAST = (1 << 63) - 1  # the largest offset that the system has
_MANY = 1000  # requests that nobody has waited for
_FLAGS = {False: os.O_RDONLY, True: os.O_RDWR | os.O_CREAT}


class Transfer(NamedTuple):
    """A tensor, the file that it is read from or written to, and where it begins there."""

    tensor: Tensor  # what is filled or written
    path: Path  # the file's name, or a descriptor
    offset: int = 0  # in bytes, from the beginning of the file


class _Range(NamedTuple):
    path: Path
    offset: int
    size: int


class _RequestQueue:
    """A queue of ``async_io`` or ``gds``, and its requests that nobody has waited for."""

    def __init__(self, handle: Tensor, gds: devices.DeviceQueue | None = None) -> None:
        self.handle, self.gds = handle, gds
        self.process = os.getpid()
        self.pending: dict[int, FileRequest] = {}

    def call(self, name: str, *arguments: Any) -> Any:
        """The op's function of this name. It takes the queue first."""
        if self.gds is None:
            return getattr(functions, f"aio_{name}")(self.handle, *arguments)
        return getattr(self.gds.functions, f"gds_{name}")(self.handle, *arguments)


class FileRequest:
    """A read or a write that was begun. It ends whether or not anybody keeps this object, and the
    tensors stay in memory until then."""

    def __init__(
        self, queue: _RequestQueue, number: int, parts: list[_Range], partial: bool
    ) -> None:
        self._queue, self._number, self._parts, self._partial = queue, number, parts, partial
        self._outcome: list[int] | None = None
        self._words = ""  # of CUDA's driver, if it failed

    def done(self) -> bool:
        """Whether it has ended, in whatever way. Does not wait."""
        return self._poll(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; the bytes that were transferred, of all tensors together.

        Raises OSError with the system's reason and the file's name; EOFError if a file ends too
        early, unless it was begun with ``partial=True``; CancelledError after ``cancel()``;
        TimeoutError after ``timeout`` seconds, and then the request goes on.
        """
        end = inf if timeout is None else time.monotonic() + timeout
        while not self._poll(round(max(0, min(_SLICE, 1000 * (end - time.monotonic()))))):
            if time.monotonic() >= end:
                raise TimeoutError(f"the request has not ended within {timeout} s")
        self._queue.pending.pop(self._number, None)
        if (error := self.error()) is not None:
            raise error
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """The bytes of each tensor that were transferred. Raises UsageError before the end."""
        if self._outcome is None:
            raise UsageError("the request has not ended", hint="request.wait()")
        return self._outcome[3:]

    def cancel(self) -> None:
        """Transfer no more than what is under way. ``wait`` still waits for that."""
        if self._outcome is None:
            self._queue.call("cancel", self._number)

    def error(self) -> Exception | None:
        """The error that ``wait`` would raise; None if there is none, and before the end."""
        if self._outcome is None:
            return None
        state, error, failed, *sizes = self._outcome
        if error:
            said = os.strerror(error)
            if self._words:
                said = f"{said}: {self._words}"
            return OSError(error, said, str(self._parts[failed].path))
        if state == CANCELLED:
            return CancelledError(f"cancelled after {sum(sizes)} bytes")
        for part, size in zip(self._parts, sizes, strict=True):
            if size < part.size and not self._partial:
                return EOFError(
                    f"{part.path}: {part.size} bytes are asked for from offset {part.offset} on, "
                    f"and the file ends after {size}"
                )
        return None

    def _poll(self, milliseconds: int) -> bool:
        if self._outcome is not None:
            return True
        try:
            found = self._queue.call("wait", self._number, milliseconds).tolist()
            if found[0] == RUNNING:
                return False
            if found[1] == errno.EIO and self._queue.gds is not None:
                self._words = devices.failure(self._queue.gds)
            self._outcome = found  # kept first: an interrupt may come between the two
            self._queue.call("forget", self._number)
        except RuntimeError:  # the queue no longer knows it if another thread had the outcome first
            if self._outcome is None:
                raise
        return True


class AsyncIO:
    """Asynchronous, parallel, direct reads and writes between tensors and files. Tensors may be in
    host memory or on a GPU.

        with AsyncIO() as files:
            request = files.read(tensor, "weights.bin")
            ...                     # compute
            request.wait()

    ``engine`` is "auto", "io_uring", "libaio" or "threads"; ``opkiln.io.engines()`` says which can
    be used here. "cufile" and "copies" are for tensors on GPUs, and then "auto" is for the others;
    see ``how()`` and ``opkiln.io.device_engines()``. A transfer is cut into blocks of
    ``block_size`` bytes, of which ``depth`` are under way at a time; ``threads`` is how many of
    them the engine of threads, and those for GPUs, run at once. ``direct=False`` goes through the
    page cache. Any thread may use it.

    Offsets, sizes and memory may be odd: what direct I/O cannot do goes through a buffer, or, at
    both ends of a write, through the page cache. Until a request has ended, tensors that are read
    to hold anything, and tensors that are written must not change. A request with tensors of a GPU
    begins when the current stream has finished its work; after the request, any stream may use
    them. Leaving the block, ``close()`` and dropping the object wait for all requests.
    Raises UsageError for an engine that cannot be used (for "cufile" the first request with a
    tensor of a GPU does), and ArgumentError.
    """

    def __init__(
        self,
        engine: str = "auto",
        *,
        depth: int = 32,
        block_size: int = 1 << 20,
        threads: int = 8,
        direct: bool = True,
    ) -> None:
        for name, value, most in (("depth", depth, 4096), ("threads", threads, 1024)):
            if not 1 <= value <= most:
                raise ArgumentError(f"{name} is {value}, expected 1 to {most}")
        if not 512 <= block_size <= 1 << 30:
            raise ArgumentError(f"block_size is {block_size}, expected 512 to {1 << 30} bytes")
        self._for_devices = engine
        self.engine = choose("auto" if engine in devices.ORDER else engine)
        self.depth, self.block_size, self.threads = depth, block_size, threads
        self.direct = direct
        like = torch.empty(0, device="cpu")  # whatever the default device is
        handle = functions.aio_open(like, self.engine, depth, block_size, min(threads, depth))
        self._queue = _RequestQueue(handle)
        self._queues = [self._queue]  # and the one for devices, when there is one
        self._guard = forks.lock()
        self._registered: dict[int, Tensor] = {}
        self._closer = weakref.finalize(self, _close_queues, self._queues, self._registered)

    def read(
        self, tensor: Tensor, path: Path, offset: int = 0, *, partial: bool = False
    ) -> FileRequest:
        """Begin to fill a tensor from a file, from ``offset`` on. ``path`` may be a descriptor.

        If the file ends before the tensor, ``wait`` raises EOFError. With ``partial=True`` it gives
        the bytes that there were. Raises OSError, ArgumentError.
        """
        return self.read_all([Transfer(tensor, path, offset)], partial=partial)

    def write(self, tensor: Tensor, path: Path, offset: int = 0) -> FileRequest:
        """Begin to write a tensor to a file, from ``offset`` on. The file is made if it is not
        there, and is never made shorter. Raises OSError, ArgumentError."""
        return self.write_all([Transfer(tensor, path, offset)])

    def read_all(self, transfers: Sequence[Transfer], *, partial: bool = False) -> FileRequest:
        """``read`` of several tensors, from one file or from several, as one request."""
        return self._begin(transfers, "read_", write=False, partial=partial)

    def write_all(self, transfers: Sequence[Transfer]) -> FileRequest:
        """``write`` of several tensors as one request. Their ranges must not overlap."""
        return self._begin(transfers, "write", write=True, partial=False)

    def how(self) -> devices.How | None:
        """The way that the bytes of tensors on GPUs took so far, and why it was chosen. None
        before the first request with such a tensor. Raises UsageError if this is closed."""
        self._check_open()
        gds = self._queues[-1].gds
        return None if gds is None else devices.how(gds)

    def register(self, tensor: Tensor) -> None:
        """Make a GPU's tensor known to cuFile, which then reads and writes it without a buffer of
        its own. It pays for tensors that are used often. The tensor is kept until ``unregister`` or
        ``close``, and its requests must have ended before that. Raises UsageError."""
        self._check_open()
        if self._for_devices == devices.COPIES:
            raise UsageError("this AsyncIO copies, and does not use cuFile")
        memory = _as_bytes(tensor, write=False)
        devices.register(memory)
        self._registered[memory.data_ptr()] = memory

    def unregister(self, tensor: Tensor) -> None:
        """Undo ``register``. No effect for another tensor. Raises UsageError."""
        memory = self._registered.pop(tensor.data_ptr(), None)
        if memory is not None:
            devices.unregister(memory)

    def wait(self) -> None:
        """Wait for all requests that nobody has waited for. Raises the first error of ``wait``."""
        pending = [each for queue in list(self._queues) for each in list(queue.pending.values())]
        for each in pending:
            while not each._poll(_SLICE):
                pass
            each._queue.pending.pop(each._number, None)
        for each in pending:
            if (error := each.error()) is not None:
                raise error

    def close(self) -> None:
        """``wait``, and take no more requests. Calling it again has no effect."""
        try:
            if self._closer.alive:
                self.wait()
        finally:
            self._closer()

    def __enter__(self) -> AsyncIO:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            with warnings.catch_warnings():  # the error in the block matters more
                warnings.simplefilter("ignore", RuntimeWarning)
                self._closer()

    def _begin(
        self, transfers: Sequence[Transfer], function: str, *, write: bool, partial: bool
    ) -> FileRequest:
        self._check_open()
        memory = [_as_bytes(each.tensor, write) for each in transfers]
        for each, room in zip(transfers, memory, strict=True):
            most = _LAST - room.numel()
            if not 0 <= each.offset <= most:
                raise ArgumentError(f"offset is {each.offset}, expected 0 to {most}")
        queue = self._queue_for(memory)
        paths = list(dict.fromkeys(each.path for each in transfers))
        descriptors: list[int] = []
        try:
            for path in paths:
                descriptors += _open(path, write, self.direct)
            offsets = [each.offset for each in transfers]
            files = [paths.index(each.path) for each in transfers]
        except BaseException:
            close_descriptors(descriptors)
            raise
        # From here on the op closes them, also if it raises. So an interrupt that comes after it
        # took them does not close what the queue uses.
        with torch.no_grad():
            number = int(queue.call(function, memory, offsets, files, descriptors))
        parts = [
            _Range(each.path, each.offset, size.numel())
            for each, size in zip(transfers, memory, strict=True)
        ]
        made = queue.pending[number] = FileRequest(queue, number, parts, partial)
        if len(queue.pending) > _MANY:
            for other, request in list(queue.pending.items()):
                if request.done() and request.error() is None:
                    queue.pending.pop(other, None)  # another thread may have waited for it
        return made

    def _check_open(self) -> None:
        if not self._closer.alive:
            raise UsageError("this AsyncIO is closed")

    def _queue_for(self, memory: list[Tensor]) -> _RequestQueue:
        """The queue for these tensors. Waits for what their devices were given to do."""
        there = [each for each in memory if not _is_on_host(each)]
        if not there:
            return self._queue
        for device in {each.device for each in there if each.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()
        with self._guard:
            if len(self._queues) == 1:
                gds = devices.open_queue(
                    self._for_devices, there[0], self.depth, self.block_size,
                    min(self.threads, self.depth), host_too=there[0].device.type == "cpu",
                )  # fmt: skip
                self._queues.append(_RequestQueue(gds.handle, gds))
            return self._queues[1]


def _close_queues(queues: list[_RequestQueue], registered: dict[int, Tensor]) -> None:
    """Wait for the requests that are left, warn of those that failed, and close the queues."""
    if queues[0].process != os.getpid():  # a fork: the requests are its parent's
        return
    with ExitStack() as rest:  # calls all, the last one first, also if one raises
        for each in registered.values():
            rest.callback(devices.unregister, each)
        for queue in queues:
            rest.callback(_finish, queue)
    registered.clear()


def _finish(queue: _RequestQueue) -> None:
    try:
        for each in list(queue.pending.values()):
            while not each._poll(_SLICE):
                pass
            if (error := each.error()) is not None:
                warnings.warn(
                    f"a request of an AsyncIO that was dropped has failed: {error}",
                    RuntimeWarning,  # a ResourceWarning is not shown by default
                    stacklevel=2,
                )
    finally:
        queue.pending.clear()
        queue.call("close")


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _as_bytes(tensor: Tensor, write: bool) -> Tensor:
    """The tensor's memory as bytes. If the tensor is only to be written to a file and is not
    contiguous, a contiguous copy."""
    if tensor.device.type == "meta":
        raise ArgumentError("the tensor is on meta, expected host memory or a GPU's")
    if not tensor.is_contiguous() and not write:
        raise ArgumentError(
            f"the tensor has shape {tuple(tensor.shape)} and strides {tensor.stride()}: "
            "only a contiguous one can be read to"
        )
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _open(path: Path, write: bool, direct: bool) -> list[int]:
    """A descriptor of the file, and one for direct I/O, or -1 if there is none."""
    flags = _FLAGS[write] | os.O_CLOEXEC
    plain = _reopen(path, flags) if isinstance(path, int) else os.open(path, flags, 0o666)
    mode = os.fstat(plain).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        os.close(plain)
        raise ArgumentError(f"{path} is neither a file nor a block device")
    if not direct:
        return [plain, -1]
    try:  # by the descriptor: the name may be another file's by now
        return [plain, os.open(f"/proc/self/fd/{plain}", flags & ~os.O_CREAT | os.O_DIRECT)]
    except OSError:  # a file system without direct I/O, or no /proc
        return [plain, -1]


def _reopen(descriptor: int, flags: int) -> int:
    """A descriptor of the same file with these flags. Raises ArgumentError, OSError.

    A duplicate would keep the flags of the given one: with O_APPEND, Linux writes at the end of the
    file whatever the offset; with O_DIRECT, it refuses parts of pages.
    """
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags & ~os.O_CREAT)
    except OSError:  # no /proc, or the file may no longer be opened
        has = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        for name in ("O_APPEND", "O_DIRECT"):
            if has & getattr(os, name):
                raise ArgumentError(f"descriptor {descriptor} was opened with {name}") from None
        return os.dup(descriptor)
