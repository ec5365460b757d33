"""How bytes get from files to the memory of GPUs and back: by cuFile, or by copies; and why."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkiln.errors import UsageError
from opkiln.machine.toolchain import toolkits
from opkiln.ops.async_io.engines import EngineState
from opkiln.ops.gds import functions as gds

CUFILE, COPIES = "cufile", "copies"
ORDER = (CUFILE, COPIES)

_DIRECT, _COMPATIBLE, _NO_CUFILE, _NO_DRIVER = range(4)  # what gds_probe answers
_NVIDIA_FS = "/proc/driver/nvidia-fs"
_HINT = "pip install nvidia-cufile"


class How(NamedTuple):
    """Which way the bytes of device tensors went."""

    engine: str  # cufile, copies
    why: str  # the reason for the engine
    by_cufile: int  # bytes
    copied: int  # bytes that went through page-locked memory
    refused: str  # why cuFile did not take a part of what it was given, the last time


class DeviceQueue(NamedTuple):
    """A queue of the op, and the functions to use it with."""

    functions: Any
    handle: Tensor
    engine: str
    why: str


@cache
def libraries() -> str:
    """Where libcufile is: in the wheels that torch depends on, and in toolkits."""
    homes = []
    for wheels in toolkits.wheel_directories():
        found = (*toolkits.shared_wheels(wheels), os.path.join(wheels, "cufile"))
        homes += [os.path.join(each, "lib") for each in found]
    for place in toolkits.find_nvcc():
        homes.append(os.path.join(os.path.dirname(os.path.dirname(place.nvcc)), "lib64"))
    paths = [os.path.join(home, "libcufile.so.0") for home in homes]
    return ":".join(each for each in paths if ":" not in each and os.path.isfile(each))


@cache
def probe() -> tuple[int, str]:
    """What CUDA's driver and cuFile say. cuFile is opened for that, and may write its log file."""
    state, words = gds.gds_probe(_like(), True, libraries())
    return int(state), str(words)


@cache
def device_engines() -> tuple[EngineState, ...]:
    """How memory of GPUs can be read and written here. cuFile is opened, to see."""
    state, words = probe()
    usable = state in (_DIRECT, _COMPATIBLE)
    hint = _HINT if state == _NO_CUFILE and not libraries() else ""
    return (
        EngineState(CUFILE, usable, "" if usable else words, hint),
        EngineState(COPIES, True, "", ""),
    )


def open_queue(
    asked: str, like: Tensor, depth: int, block_size: int, threads: int, *, host_too: bool = False
) -> DeviceQueue:
    """A queue for tensors on the device of ``like``. ``asked`` is "cufile", "copies" or another.

    Another word takes cuFile where nvidia-fs is loaded, and copies elsewhere: then cuFile would
    copy as well, and write a log file. Raises UsageError if cuFile is asked for and cannot be used.
    """
    engine, why = _choose(asked)
    functions: Any = gds
    # The native version speaks to CUDA's driver. torch copies to all other devices.
    cudas = host_too or (like.device.type == "cuda" and torch.version.hip is None)
    if engine == COPIES and (not cudas or _no_driver()):
        functions = gds.REFERENCES
    handle = functions.gds_open(
        _like(), engine == CUFILE, libraries(), depth, block_size, threads, host_too
    )
    return DeviceQueue(functions, handle, engine, why)


def how(queue: DeviceQueue) -> How:
    """Which way the bytes of a queue went."""
    by_cufile, copied, refused, _ = queue.functions.gds_ways(queue.handle)
    return How(queue.engine, queue.why, by_cufile, copied, refused)


def failure(queue: DeviceQueue) -> str:
    """What CUDA's driver said of the last copy that failed; empty if none did."""
    return str(queue.functions.gds_ways(queue.handle)[3])


def register(memory: Tensor) -> None:
    """Make memory known to cuFile. Raises UsageError."""
    _require_cufile()
    if words := gds.gds_register(memory, libraries()):
        raise UsageError("cuFile cannot register this memory", why=words)


def unregister(memory: Tensor) -> None:
    """Undo ``register``. Raises UsageError."""
    if words := gds.gds_unregister(memory, libraries()):
        raise UsageError("cuFile cannot unregister this memory", why=words)


def _require_cufile() -> None:
    cufile = device_engines()[0]
    if not cufile.usable:
        raise UsageError("cuFile cannot be used here", why=cufile.why, hint=cufile.hint)


def _choose(asked: str) -> tuple[str, str]:
    """The engine, and why."""
    if asked == CUFILE:
        _require_cufile()
        return CUFILE, probe()[1]
    if asked == COPIES:
        return COPIES, "asked for"
    if not os.path.isdir(_NVIDIA_FS):
        return COPIES, f"there is no GPUDirect Storage: nvidia-fs is not loaded (no {_NVIDIA_FS})"
    state, words = probe()
    return (CUFILE if state == _DIRECT else COPIES), words


def _like() -> Tensor:
    """Where the op runs: on the host, whatever torch's default device is."""
    return torch.empty(0, device="cpu")


def _no_driver() -> bool:
    return bool(gds.gds_probe(_like(), False, "")[0] == _NO_DRIVER)
