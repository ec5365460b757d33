"""Asks NVIDIA's driver about its GPUs, through its library NVML or its program nvidia-smi.

NVML (``libnvidia-ml.so.1``) talks to the kernel module and creates no CUDA context. It is started
and shut down for each question. So a forked child inherits no state of it, and other users of NVML
in this process keep their own reference count.

It is called through ctypes, not nvidia-ml-py. That package takes ten times as long to import, is
rarely installed where the GPUs are, and shares its import name with another package.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from typing import Any

from opkiln.errors import ToolchainError

# The dynamic linker finds the first by its name. WSL and some container runtimes put the driver
# into the other places, not always with a line in ld.so.conf.
_LIBRARIES = (
    "libnvidia-ml.so.1",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
    "/run/opengl-driver/lib/libnvidia-ml.so.1",
)
_PROGRAMS = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi")
_NO_GPU = "the NVIDIA driver shows no GPU to this process"

# The fields of ``NvidiaDevices``, with each GPU as a list of the fields of ``NvidiaGPU``.
Facts = dict[str, Any]


def ask() -> Facts:
    """The GPUs by NVML; by nvidia-smi if NVML cannot be opened."""
    try:
        return ask_nvml()
    except NoLibrary as error:
        facts = ask_nvidia_smi()
        return facts if facts["gpus"] else {**facts, "why": f"{error}; {facts['why']}"}


def _facts(
    how: str, why: str, gpus: list[list[Any]] | None = None, driver: str = "", cuda: str = ""
) -> Facts:
    return {"gpus": gpus or [], "driver": driver, "cuda": cuda, "how": how, "why": why}


# NVML


class NoLibrary(Exception):
    """NVML is not installed, or cannot be opened."""


class _NVMLError(Exception):
    """NVML returned an error; the text is NVML's."""


def ask_nvml() -> Facts:
    """Every GPU that NVML shows to this process. Raises NoLibrary."""
    library = _NVML(_open())
    try:
        library.call("nvmlInit_v2")
        try:
            return _read_nvml(library)
        finally:
            library.call("nvmlShutdown")
    except _NVMLError as error:
        return _facts("nvml", f"the NVIDIA driver answers: {error}")


def _open() -> ctypes.CDLL:
    reasons = []
    for place in _LIBRARIES:
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            reasons.append(str(error))
    raise NoLibrary(f"libnvidia-ml cannot be opened ({reasons[0]})")


class _NVML:
    """NVML's functions. An error code is raised as ``_NVMLError``."""

    def __init__(self, native: ctypes.CDLL) -> None:
        self.native = native

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = self.native[name]
        except AttributeError:
            raise _NVMLError(f"this libnvidia-ml has no {name}") from None
        code = function(*arguments)
        if code:
            raise _NVMLError(f"{self._message(code)} ({name})")

    def _message(self, code: int) -> str:
        try:
            function = self.native["nvmlErrorString"]
        except AttributeError:
            return f"error {code}"
        function.restype = ctypes.c_char_p
        return str(function(code).decode("utf-8", "replace"))

    def text(self, name: str, *subject: Any) -> str:
        size = 96  # bytes; NVML's longest strings, names and UUIDs, fit
        buffer = ctypes.create_string_buffer(size)
        self.call(name, *subject, buffer, ctypes.c_uint(size))
        return buffer.value.decode("utf-8", "replace")

    def number(self, name: str, *subject: Any) -> int:
        value = ctypes.c_uint()
        self.call(name, *subject, ctypes.byref(value))
        return value.value

    def handle(self, name: str, *subject: Any) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self.call(name, *subject, ctypes.byref(found))
        return found


def _read_nvml(library: _NVML) -> Facts:
    driver = library.text("nvmlSystemGetDriverVersion")
    try:
        version = library.number("nvmlSystemGetCudaDriverVersion_v2")
        cuda = f"{version // 1000}.{version % 1000 // 10}"
    except _NVMLError:
        cuda = ""  # the driver has no CUDA library, as on a machine used for display only
    gpus, lost = [], []
    for index in range(library.number("nvmlDeviceGetCount_v2")):
        try:
            gpus.append(_gpu(library, index))
        except _NVMLError as error:  # one GPU has failed; CUDA also continues without it
            lost.append(f"GPU {index}: {error}")
    return _facts("nvml", "; ".join(lost) if gpus or lost else _NO_GPU, gpus, driver, cuda)


def _gpu(library: _NVML, index: int) -> list[Any]:
    device = library.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.call(
        "nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor)
    )
    uuid = library.text("nvmlDeviceGetUUID", device)
    name = library.text("nvmlDeviceGetName", device)
    memory, parts = _memory(library, device), list(_mig_instances(library, device))
    return [index, uuid, name, f"{major.value}.{minor.value}", memory, parts]


def _memory(library: _NVML, device: ctypes.c_void_p) -> int:
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
    try:
        library.call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
    except _NVMLError:
        return 0  # a GPU without memory of its own uses the machine's
    return int(memory[0])


def _mig_instances(library: _NVML, device: ctypes.c_void_p) -> Iterator[str]:
    """The UUIDs of a GPU's MIG instances."""
    try:
        most = library.number("nvmlDeviceGetMaxMigDeviceCount", device)
    except _NVMLError:
        return  # the GPU, or this NVML, has no MIG
    for index in range(most):
        try:
            instance = library.handle(
                "nvmlDeviceGetMigDeviceHandleByIndex", device, ctypes.c_uint(index)
            )
            yield library.text("nvmlDeviceGetUUID", instance)
        except _NVMLError:
            continue  # an unused slot: a GPU may have seven and use two


# nvidia-smi, for machines where NVML cannot be opened from this process

_FIELDS = "index,uuid,name,compute_cap,memory.total,driver_version,mig.mode.current"


def ask_nvidia_smi() -> Facts:
    """Every GPU that nvidia-smi lists. Without GPUs, ``why`` says why: it is absent, or failed."""
    from opkiln.machine.toolchain import find

    program = next(filter(None, map(find.find_program, _PROGRAMS)), None)
    if program is None:
        return _facts("", "there is no nvidia-smi on PATH")
    try:
        return _read_nvidia_smi(program)
    except ToolchainError as error:
        words = " ".join(f"{error.what} {error.why}".split())
        return _facts("nvidia-smi", f"nvidia-smi: {words}")


def _read_nvidia_smi(program: str) -> Facts:
    rows = [
        [cell.strip() for cell in line.split(",")]
        for line in _output(program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
        if line.count(",") == _FIELDS.count(",")
    ]
    if not rows:
        return _facts("nvidia-smi", _NO_GPU)
    parts = _list_instances(program) if any(row[-1] == "Enabled" for row in rows) else {}
    gpus, lost = [], []
    for index, uuid, name, capability, mebibytes, _, _ in rows:
        if not re.fullmatch(r"\d+\.\d+", capability):
            lost.append(f"GPU {index}: {capability}")
            continue
        memory = int(mebibytes) << 20 if mebibytes.isdigit() else 0
        gpus.append([int(index), uuid, name, capability, memory, parts.get(index, [])])
    return _facts("nvidia-smi", "; ".join(lost), gpus, rows[0][5], _highest_cuda(program))


def _highest_cuda(program: str) -> str:
    """The highest CUDA that the driver supports. No query has it, only the full report."""
    report = "\n".join(_output(program, "-q", "-d", "COMPUTE"))
    match = re.search(r"^CUDA Version\s*:\s*(\d+\.\d+)", report, re.MULTILINE)
    return match[1] if match else ""


def _list_instances(program: str) -> dict[str, list[str]]:
    """The UUIDs of the MIG instances, by the index of their GPU."""
    found: dict[str, list[str]] = {}
    index = ""
    listed = "\n".join(_output(program, "-L"))
    line = r"^(?:GPU (\d+):.*| +MIG .*)\(UUID: ([^)]+)\)"
    for match in re.finditer(line, listed, re.MULTILINE):
        if match[1]:
            index = match[1]
        else:
            found.setdefault(index, []).append(match[2])
    return found


def _output(program: str, *arguments: str) -> list[str]:
    from opkiln.run import process  # not needed where NVML answers

    ended = process.capture([program, *arguments])
    if ended.returncode:
        # Errors come on either stream: a mismatch of versions on stdout.
        raise ToolchainError(
            f"exits with {ended.returncode}", why=(ended.output or ended.stderr).strip()[:300]
        )
    return ended.output.splitlines()
