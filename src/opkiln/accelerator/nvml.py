"""The driver's management library, ``libnvidia-ml.so.1``, called through ctypes.

It talks to the kernel module and makes no CUDA context. It is started and ended within each
question, so a process that forks afterwards has nothing of it that a child could trip over, and
another user of it in this process keeps its own count.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opkiln.accelerator.gpu import GPU, Devices

if TYPE_CHECKING:
    from collections.abc import Iterator

# By its name the loader finds it where it is installed as usual; the others are where WSL and
# some container runtimes put the driver, not always with a line in ld.so.conf.
_PLACES = (
    "libnvidia-ml.so.1",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
    "/run/opengl-driver/lib/libnvidia-ml.so.1",
)
_TEXT = 96  # bytes; NVML's longest strings, names and UUIDs, fit


class NoLibrary(Exception):
    """There is no NVML here that can be opened."""


class _Refused(Exception):
    """NVML answered with an error; in its words."""


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def ask() -> Devices:
    """What NVML tells of every GPU that it shows to this process. Raises NoLibrary."""
    library = _Library(_open())
    try:
        with library.started():
            return _devices(library)
    except _Refused as error:
        return Devices(how="nvml", why=f"the NVIDIA driver answers: {error}")


def _open() -> ctypes.CDLL:
    reasons = []
    for place in _PLACES:
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            reasons.append(str(error))
    raise NoLibrary(f"libnvidia-ml cannot be opened ({reasons[0]})")


class _Library:
    """NVML's functions, with their errors raised."""

    def __init__(self, native: ctypes.CDLL) -> None:
        self.native = native

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = self.native[name]
        except AttributeError:
            raise _Refused(f"this libnvidia-ml has no {name}") from None
        code = function(*arguments)
        if code:
            raise _Refused(f"{self._words(code)} ({name})")

    def _words(self, code: int) -> str:
        try:
            function = self.native["nvmlErrorString"]
        except AttributeError:
            return f"error {code}"
        function.restype = ctypes.c_char_p
        return str(function(code).decode("utf-8", "replace"))

    @contextmanager
    def started(self) -> Iterator[None]:
        self.call("nvmlInit_v2")
        try:
            yield
        finally:
            self.call("nvmlShutdown")

    def text(self, name: str, *subject: Any) -> str:
        buffer = ctypes.create_string_buffer(_TEXT)
        self.call(name, *subject, buffer, ctypes.c_uint(_TEXT))
        return buffer.value.decode("utf-8", "replace")

    def number(self, name: str, *subject: Any) -> int:
        value = ctypes.c_uint()
        self.call(name, *subject, ctypes.byref(value))
        return value.value

    def handle(self, name: str, *subject: Any) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self.call(name, *subject, ctypes.byref(found))
        return found


def _devices(library: _Library) -> Devices:
    driver = library.text("nvmlSystemGetDriverVersion")
    try:
        version = library.number("nvmlSystemGetCudaDriverVersion_v2")
        cuda = f"{version // 1000}.{version % 1000 // 10}"
    except _Refused:
        cuda = ""  # the driver without its CUDA library, as on a machine for display alone
    gpus, lost = [], []
    for index in range(library.number("nvmlDeviceGetCount_v2")):
        try:
            gpus.append(_gpu(library, index))
        except _Refused as error:  # one GPU has failed; CUDA goes on without it, too
            lost.append(f"GPU {index}: {error}")
    why = "; ".join(lost) if gpus or lost else "the NVIDIA driver shows no GPU to this process"
    return Devices(tuple(gpus), driver, cuda, "nvml", why)


def _gpu(library: _Library, index: int) -> GPU:
    device = library.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.call(
        "nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor)
    )
    return GPU(
        index,
        library.text("nvmlDeviceGetUUID", device),
        library.text("nvmlDeviceGetName", device),
        f"{major.value}.{minor.value}",
        _memory(library, device),
        tuple(_parts(library, device)),
    )


def _memory(library: _Library, device: ctypes.c_void_p) -> int:
    memory = _Memory()
    try:
        library.call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
    except _Refused:
        return 0  # a GPU that has none of its own shares the machine's
    return int(memory.total)


def _parts(library: _Library, device: ctypes.c_void_p) -> Iterator[str]:
    try:
        most = library.number("nvmlDeviceGetMaxMigDeviceCount", device)
    except _Refused:
        return  # a GPU that cannot be divided, or an NVML from before there were such
    for index in range(most):
        try:
            part = library.handle(
                "nvmlDeviceGetMigDeviceHandleByIndex", device, ctypes.c_uint(index)
            )
            yield library.text("nvmlDeviceGetUUID", part)
        except _Refused:
            continue  # an empty place: the GPU may have seven and have two
