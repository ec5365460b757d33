"""Streams and events."""

from __future__ import annotations

import time

from opkiln.accelerator.identity import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any


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


class OneStream(Streams):
    """A device that has one stream: torch's stand-ins for the CPU, which do nothing."""

    @property
    def Stream(self) -> Any:  # noqa: N802
        import torch

        return torch.cpu.Stream

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        import torch

        return torch.cpu.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:  # noqa: ARG002 (there is one)
        import torch

        return torch.cpu.current_stream()

    def default_stream(self, device_index: int | None = None) -> Any:
        return self.current_stream(device_index)


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
