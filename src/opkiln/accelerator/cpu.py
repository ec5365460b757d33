"""The CPU: the accelerator if no other device is here, or if it is requested.

``OneDevice`` is the base of accelerators with one device, which does all work in order.
``HostStream`` and ``HostEvent`` are for devices whose work is finished when a call returns.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

from opkiln.accelerator.interface import Accelerator, Answer, itt
from opkiln.machine import uname

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, ClassVar, Self

    import torch


class HostEvent:
    """An event on a device whose work is finished when a call returns: it keeps the time at which
    it was recorded.

    It has the methods of ``torch.cuda.Event``. ``elapsed_time`` raises RuntimeError if one of the
    two events was not recorded.
    """

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,  # noqa: ARG002 (nothing is waited for)
        interprocess: bool = False,  # noqa: ARG002
    ) -> None:
        self.enable_timing = enable_timing
        self._recorded: float | None = None

    def record(self, stream: Any = None) -> None:  # noqa: ARG002 (there is only one)
        """Store the current time."""
        self._recorded = time.perf_counter()

    def query(self) -> bool:
        """Whether all earlier work is finished: always true."""
        return True

    def synchronize(self, stream: Any = None) -> None:
        """Do nothing: all earlier work is finished."""

    wait = synchronize

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to another."""
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        return (end_event._recorded - self._recorded) * 1e3


class ChosenStreams(threading.local):
    """The streams that this thread has made current, the latest last."""

    def __init__(self) -> None:
        self.streams: list[Any] = []


class HostStream:
    """A stream on a device whose work is finished when a call returns.

    It has the methods of ``torch.cuda.Stream``, and takes its arguments.
    """

    chosen: ClassVar[ChosenStreams] = ChosenStreams()  # a subclass for another device has its own

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.priority = priority

    def synchronize(self) -> None:
        """Wait for all work of the stream."""

    def query(self) -> bool:
        """Whether all work of the stream is finished."""
        self.synchronize()
        return True

    def record_event(self, event: Any = None) -> Any:
        """Record an event, by default a new one, and return it."""
        recorded = self._event() if event is None else event
        recorded.record()
        return recorded

    def wait_event(self, event: Any) -> None:
        """Do nothing: the device does all work in order."""

    wait_stream = wait_event

    def _event(self) -> Any:
        return HostEvent(enable_timing=True)

    def __enter__(self) -> Self:
        """In the ``with`` block, this is the current stream of the thread."""
        self.chosen.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.chosen.streams.pop()


class OneDevice(Accelerator):
    """An accelerator with one device: its functions in torch take no index. Streams can be created
    and made current, also torch's own for the CPU (``torch.cpu.Stream``)."""

    DEFAULT: ClassVar[HostStream] = HostStream()
    _SUBSTITUTES: ClassVar = {
        "set_device": lambda: None,
        "current_device": lambda: 0,
        "manual_seed_all": "manual_seed",
    }
    _HAS_MEMORY = False

    def _ask(
        self,
        function: str,
        device_index: int | None = None,  # noqa: ARG002
        *given: Any,
        of: Any = None,
    ) -> Any:
        return super()._ask(function, None, *given, of=of)

    @property
    def Stream(self) -> Any:  # noqa: N802
        return type(self.DEFAULT)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        chosen = self.DEFAULT.chosen.streams
        chosen.append(self.current_stream() if stream is None else stream)
        try:
            yield
        finally:
            chosen.pop()

    def current_stream(self, device_index: int | None = None) -> Any:  # noqa: ARG002
        chosen = self.DEFAULT.chosen.streams
        return chosen[-1] if chosen else self.DEFAULT

    def default_stream(self, device_index: int | None = None) -> Any:  # noqa: ARG002
        return self.DEFAULT

    def initial_seed(self) -> int:
        return self.default_generator(0).initial_seed()


def _read_bytes(path: str, name: str) -> int:
    """A line of one of Linux's files about memory; 0 if the system has no such line."""
    found = re.search(rf"^{name}:\s*(\d+) kB", uname.read_text(path), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _reset_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # proc(5): resets VmHWM, and changes nothing else
    except OSError:
        pass  # some sandboxes have no such file: the peak of the whole process stays


class CpuAccelerator(OneDevice):
    """The CPU. Its memory is the process's, and work is finished when a call returns."""

    name = "cpu"
    device_type = "cpu"
    # The memory is the process's, in bytes. torch does not cache host memory.
    _SUBSTITUTES: ClassVar = {
        **OneDevice._SUBSTITUTES,
        "empty_cache": lambda: None,
        "memory_allocated": partial(_read_bytes, "/proc/self/status", "VmRSS"),
        "max_memory_allocated": partial(_read_bytes, "/proc/self/status", "VmHWM"),
        "memory_reserved": partial(_read_bytes, "/proc/self/status", "VmRSS"),
        "max_memory_reserved": partial(_read_bytes, "/proc/self/status", "VmHWM"),
        "get_rng_state": "get_state",
        "set_rng_state": "set_state",
        "reset_peak_memory_stats": _reset_peak,
    }

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:  # noqa: ARG003
        """A CPU is always here."""
        return Answer(cls.name, True, uname.cpu_name())

    def is_synchronized_device(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:  # noqa: ARG002
        return "cpu"

    def get_device_properties(self, device_index: int | None = None) -> SimpleNamespace:  # noqa: ARG002
        return SimpleNamespace(
            name=uname.cpu_name(),
            total_memory=_read_bytes("/proc/meminfo", "MemTotal"),
            multi_processor_count=os.cpu_count() or 1,
        )

    def _generators(self) -> Any:
        # torch.random.manual_seed() would also seed every other device.
        return self.default_generator(0)

    def default_generator(self, device_index: int) -> torch.Generator:  # noqa: ARG002
        import torch

        return torch.default_generator

    @property
    def Event(self) -> Any:  # noqa: N802
        return HostEvent

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        now, most = self.memory_allocated(device_index), self.max_memory_allocated(device_index)
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": most}

    def available_memory(self, device_index: int | None = None) -> int:  # noqa: ARG002
        return _read_bytes("/proc/meminfo", "MemAvailable")

    def is_bf16_supported(self) -> bool:
        return True  # converted to float32 if the CPU has no such arithmetic

    def is_fp16_supported(self) -> bool:
        import torch

        mkldnn: Any = torch.backends.mkldnn
        return bool(mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported())

    def _ranges(self) -> Any:
        return itt()
