"""DeepSpeed's modules ``async_io``, ``gds`` and ``pin_memory`` over opkiln's ops of these names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial, partialmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from opkiln.base import forks
from opkiln.errors import FallbackWarning, UsageError
from opkiln.io.handle import AsyncIO as Files
from opkiln.ops.gds import device as devices
from opkiln.ops.pin_memory.pool import PinnedPool

_ALIGNMENT = 512  # DeepSpeed's callers round sizes to a multiple of this for each thread


@cache
def _pool() -> PinnedPool:
    return PinnedPool()


class _LockedTensors:
    """Page-locked tensors by address. All handles of a process share them, as in DeepSpeed. The
    memory of one that is freed must not be used any more."""

    _tensors: ClassVar[dict[int, Tensor]] = {}
    _guard = forks.lock()

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A tensor of one dimension with the dtype of another."""
        with self._guard:
            made = _pool().take(int(num_elem), example_tensor.dtype)
            self._tensors[made.data_ptr()] = made
        return made

    def free_cpu_locked_tensor(self, locked_tensor: Tensor) -> bool:
        """Whether it was one of these."""
        return self._free(locked_tensor.data_ptr())

    def _free(self, address: int) -> bool:
        """Whether one of these begins there."""
        with self._guard:
            found = self._tensors.pop(int(address), None)
            if found is None:
                return False
            _pool().give(found)
            _pool().trim()
        return True

    def is_pinned(self, buffer: Tensor) -> bool:
        """Whether all of it is in one of these tensors, or pinned by torch."""
        if buffer.device.type != "cpu":
            return False
        begin, size = buffer.data_ptr(), buffer.nbytes
        with self._guard:
            if any(at <= begin and begin + size <= at + tensor.nbytes
                   for at, tensor in self._tensors.items()):  # fmt: skip
                return True
        return torch.cuda.is_available() and bool(buffer.is_pinned())


class pin_handle(_LockedTensors):  # noqa: N801 (DeepSpeed's name)
    """Page-locked tensors."""

    free_cpu_locked_tensor_by_ptr = _LockedTensors._free


class aio_handle(_LockedTensors):  # noqa: N801 (DeepSpeed's name)
    """Reads and writes of tensors. ``wait`` waits for all that were begun and counts them.

    Errors are raised, with the system's reason. Sizes need not be multiples of anything. Tensors
    may be on GPUs.
    """

    def __init__(
        self,
        block_size: int = 1024 * 1024,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._given = {
            "block_size": int(block_size),
            "queue_depth": int(queue_depth),
            "single_submit": bool(single_submit),
            "overlap_events": bool(overlap_events),
            "intra_op_parallelism": int(intra_op_parallelism),
        }
        self._files = Files(
            self._engine(),
            block_size=max(4096, int(block_size)),
            depth=int(queue_depth),
            threads=max(int(intra_op_parallelism), 8),
        )
        self._pending: list[Callable[[], None]] = []

    def _engine(self) -> str:
        return "auto"

    def _get(self, name: str) -> int:
        return self._given[name]

    get_block_size = partialmethod(_get, "block_size")
    get_queue_depth = partialmethod(_get, "queue_depth")
    get_single_submit = partialmethod(_get, "single_submit")
    get_overlap_events = partialmethod(_get, "overlap_events")
    get_intra_op_parallelism = partialmethod(_get, "intra_op_parallelism")

    def get_alignment(self) -> int:
        return self._given["intra_op_parallelism"] * _ALIGNMENT

    def _transfer(
        self, method: str, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0
    ) -> int:
        """Fill a tensor from a file, or write it to one; 0."""
        self._begin(method, buffer, filename, validate, file_offset)()
        return 0

    read = partialmethod(_transfer, "read")
    write = partialmethod(_transfer, "write")

    def _enqueue(
        self,
        method: str,
        buffer: Tensor,
        filename: str | int,
        validate: bool,
        later: bool | None = None,
        file_offset: int = 0,
        **named: bool,
    ) -> int:
        """``later`` is named ``async`` by callers, a word of Python's; 0, or the count of
        ``wait``. ``filename`` may be a descriptor, which stays open."""
        later = named.pop("async", later)
        if named or later is None:
            raise TypeError(f"p{method}(buffer, filename, validate, async, file_offset=0)")
        self._pending.append(self._begin(method, buffer, filename, validate, file_offset))
        return 0 if later else self.wait()

    pread = partialmethod(_enqueue, "read")
    pwrite = partialmethod(_enqueue, "write")

    def _enqueue_unchecked(
        self, method: str, later: bool, buffer: Tensor, filename: str | int, file_offset: int = 0
    ) -> int:
        return self._enqueue(method, buffer, filename, False, later, file_offset)

    sync_pread = partialmethod(_enqueue_unchecked, "read", False)
    sync_pwrite = partialmethod(_enqueue_unchecked, "write", False)
    async_pread = partialmethod(_enqueue_unchecked, "read", True)
    async_pwrite = partialmethod(_enqueue_unchecked, "write", True)

    def wait(self) -> int:
        """Wait for what was begun; how many reads and writes that were. Raises the first error."""
        pending, self._pending = self._pending, []
        failed: Exception | None = None
        for finish in pending:
            try:
                finish()
            except Exception as error:  # the others are finished, too
                failed = failed or error
        if failed is not None:
            raise failed
        return len(pending)

    def _begin(
        self, method: str, buffer: Tensor, filename: str | int, validate: bool, offset: int
    ) -> Callable[[], None]:
        """Begin a read or a write. Returns the function that waits for it."""
        offset = int(offset)
        copied = method == "read" and not buffer.is_contiguous()
        if copied:
            staged = torch.empty_like(buffer, memory_format=torch.contiguous_format)
        else:
            staged = buffer if method == "read" else buffer.detach().contiguous()
        request = getattr(self._files, method)(staged, filename, offset)

        def finish() -> None:
            request.wait()
            if copied:
                with torch.no_grad():
                    buffer.copy_(staged)
            if validate:
                stored = torch.empty_like(staged)
                self._files.read(stored, filename, offset).wait()
                left, right = (each.reshape(-1).view(torch.uint8) for each in (stored, staged))
                if not torch.equal(left, right):
                    raise UsageError(f"{filename} and the tensor differ")

        return finish


_pinned: dict[int, Tensor] = {}  # tensors that cuFile knows, by address, of all handles


class gds_handle(aio_handle):  # noqa: N801 (DeepSpeed's name)
    """As ``aio_handle``, by cuFile where there is one, also in its compatibility mode.

    Tensors need not be pinned. cuFile's configuration is its own: DeepSpeed writes a file
    ``local_cufile.json``, and has cuFile read it.
    """

    def _engine(self) -> str:
        cufile = devices.device_engines()[0]
        if cufile.usable:
            return devices.CUFILE
        warnings.warn(
            f"gds copies tensors of GPUs through the host: {cufile.why}",
            FallbackWarning,
            stacklevel=4,
        )
        return devices.COPIES

    def get_alignment(self) -> int:
        return _ALIGNMENT  # cuFile divides among its threads itself

    def new_pinned_device_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A tensor of one dimension on the GPU, with the dtype of another, that cuFile knows."""
        made = torch.empty(int(num_elem), dtype=example_tensor.dtype, device="cuda")
        self.pin_device_tensor(made)
        return made

    def pin_device_tensor(self, tensor: Tensor) -> bool:
        """Make a tensor known to cuFile, if there is one; True."""
        if devices.device_engines()[0].usable and tensor.data_ptr() not in _pinned:
            devices.register(tensor)
            _pinned[tensor.data_ptr()] = tensor
        return True

    def unpin_device_tensor(self, tensor: Tensor) -> bool:
        """Undo that; True."""
        if _pinned.pop(tensor.data_ptr(), None) is not None:
            devices.unregister(tensor)
        return True

    free_pinned_device_tensor = unpin_device_tensor


def _transfer_once(method: str, buffer: Tensor, filename: str, *given: Any) -> int:
    """``given``: the sizes and flags of a handle, and whether to validate; 0."""
    *handle, validate = given
    done: int = getattr(aio_handle(*handle), method)(buffer, filename, validate)
    return done


aio_read = partial(_transfer_once, "read")
aio_write = partial(_transfer_once, "write")
