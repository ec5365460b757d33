"""The functions of the library; their bodies are the reference.

Both take a contiguous tensor of bytes in host memory, and a tensor of any contents on the device
that is to copy from it and to it, which chooses the version. For the CPU pages are locked so that
they are never swapped out; for a GPU they are made known to its driver, which locks them, too, and
then reaches them without a copy. The reference goes by ctypes and torch.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from opkiln.ops.checks import check, check_contiguous, check_on
from opkiln.ops.pin_memory.op import kit

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


@kit.op(mutates="memory")
def lock_pages_(memory: Tensor, device: Tensor) -> None:
    """Lock the pages of ``memory``. Raises RuntimeError with the system's reason."""
    _ask("lock", memory, device, "mlock", "cudaHostRegister", memory.numel(), _PORTABLE)


@kit.op(mutates="memory")
def unlock_pages_(memory: Tensor, device: Tensor) -> None:
    """Undo ``lock_pages_`` of the same memory. Raises RuntimeError with the system's reason."""
    _ask("unlock", memory, device, "munlock", "cudaHostUnregister")


def _ask(
    what: str, memory: Tensor, device: Tensor, of_system: str, of_cuda: str, *for_cuda: int
) -> None:
    """Call a function of the system, or for a GPU one of CUDA's runtime."""
    check_on("memory", memory, torch.device("cpu"))
    check("memory", memory, torch.uint8)
    check_contiguous("memory", memory)
    if memory.numel() == 0:
        return
    if device.is_cuda:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device.device):
            error = getattr(runtime, of_cuda)(memory.data_ptr(), *for_cuda)
        why = runtime.cudaGetErrorString(error) if int(error) != 0 else ""
    else:
        call = ctypes.CDLL(None, use_errno=True)[of_system]
        failed = call(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel())) != 0
        why = os.strerror(ctypes.get_errno()) if failed else ""
    if why:
        raise RuntimeError(f"the system did not {what} {memory.numel()} bytes of memory: {why}")
