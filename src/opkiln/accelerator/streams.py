"""Streams and events."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

from opkiln.accelerator.identity import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from typing import Any, ClassVar, Self


class Streams(Identity):
    """The streams of a device, and events to order and time what they do."""

    @property
    def Stream(self) -> Any:  # noqa: N802 (the class itself, as torch names it)
        """The class of streams."""
        return self.module().Stream

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """In the ``with`` block, this is the current stream."""
        context: AbstractContextManager[Any] = self.module().stream(stream)
        return context

    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream that operations go to."""
        return self._ask("current_stream", device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """The stream that operations go to unless another is made the current one."""
        return self._ask("default_stream", device_index)

    @property
    def Event(self) -> Any:  # noqa: N802
        """The class of events: ``record``, ``synchronize``, ``query``, ``elapsed_time``."""
        return self.module().Event


class HostEvent:
    """An event on a device that is done when its call returns: the time at which it was recorded.

    It has the methods of ``torch.cuda.Event``. ``elapsed_time`` raises RuntimeError where one of
    the two was not recorded.
    """

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,  # noqa: ARG002 (nothing is waited for)
        interprocess: bool = False,  # noqa: ARG002
    ) -> None:
        self.enable_timing = enable_timing
        self._recorded: float | None = None

    def record(self, stream: Any = None) -> None:  # noqa: ARG002 (there is one)
        """Take the time."""
        self._recorded = time.perf_counter()

    def query(self) -> bool:
        """Whether all before it is done: it is."""
        return True

    def synchronize(self) -> None:
        """Wait for all before it: there is nothing to wait for."""

    def wait(self, stream: Any = None) -> None:
        """Have a stream wait: there is nothing to wait for."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this one to another."""
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("both events must be recorded before their distance is known")
        return (end_event._recorded - self._recorded) * 1e3


class Chosen(threading.local):
    """The streams that this thread has made the current one, the latest last."""

    def __init__(self) -> None:
        self.streams: list[Any] = []


class HostStream:
    """A stream on a device that is done when its call returns: there is nothing to wait for.

    It has the methods of ``torch.cuda.Stream``, and takes its arguments.
    """

    chosen: ClassVar[Chosen] = Chosen()  # a subclass for another device has its own

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.priority = priority

    def synchronize(self) -> None:
        """Wait for all that went to it."""

    def query(self) -> bool:
        """Whether all that went to it is done."""
        self.synchronize()
        return True

    def record_event(self, event: Any = None) -> Any:
        """Record an event, a new one unless it is given, and give it back."""
        recorded = self._event() if event is None else event
        recorded.record()
        return recorded

    def wait_event(self, event: Any) -> None:
        """Have what follows wait: the device does all in order."""

    def wait_stream(self, stream: Any) -> None:
        """Have what follows wait: the device does all in order."""

    def _event(self) -> Any:
        return HostEvent(enable_timing=True)

    def __enter__(self) -> Self:
        """In the ``with`` block, this is the current stream of the thread."""
        self.chosen.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.chosen.streams.pop()


class OneStream(Streams):
    """A device that does all in order. Streams can be made and chosen; torch's stand-ins for the
    CPU's (``torch.cpu.Stream``) can be chosen, too."""

    DEFAULT: ClassVar[HostStream] = HostStream()

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

    def current_stream(self, device_index: int | None = None) -> Any:  # noqa: ARG002 (there is one)
        chosen = self.DEFAULT.chosen.streams
        return chosen[-1] if chosen else self.DEFAULT

    def default_stream(self, device_index: int | None = None) -> Any:  # noqa: ARG002
        return self.DEFAULT
