"""Accelerators with one device that does all work in order, and the streams and events of one whose
work is finished when a call returns."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

from opkiln.accelerator.interface import Accelerator

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

    def synchronize(self) -> None:
        """Does nothing: all earlier work is finished."""

    def wait(self, stream: Any = None) -> None:
        """Does nothing: all earlier work is finished."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to another."""
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("both events must be recorded before their distance is known")
        return (end_event._recorded - self._recorded) * 1e3


class Chosen(threading.local):
    """The streams that this thread has made current, the latest last."""

    def __init__(self) -> None:
        self.streams: list[Any] = []


class HostStream:
    """A stream on a device whose work is finished when a call returns.

    It has the methods of ``torch.cuda.Stream``, and takes its arguments.
    """

    chosen: ClassVar[Chosen] = Chosen()  # a subclass for another device has its own

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
        """Does nothing: the device does all work in order."""

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
    """Its functions in torch take no index. Streams can be created and made current, also torch's
    own for the CPU (``torch.cpu.Stream``)."""

    DEFAULT: ClassVar[HostStream] = HostStream()

    def _ask(
        self,
        function: str,
        device_index: int | None = None,  # noqa: ARG002
        *given: Any,
        of: Any = None,
    ) -> Any:
        return super()._ask(function, None, *given, of=of)

    def set_device(self, device_index: int) -> None:
        """Does nothing: there is only one."""

    def current_device(self) -> int:
        return 0

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

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def initial_seed(self) -> int:
        return self.default_generator(0).initial_seed()

    def pin_memory(
        self,
        tensor: torch.Tensor,
        align_bytes: int = 1,  # noqa: ARG002 (nothing is allocated)
        make_copy: bool = True,  # noqa: ARG002
        match_shape: bool = True,  # noqa: ARG002
    ) -> torch.Tensor:
        """The tensor unchanged: the device reads the host's memory."""
        return tensor
