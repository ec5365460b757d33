"""The work of an accelerator: streams, events, recorded graphs, ranges for profilers, sensors."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

from opkiln.accelerator.device import Device
from opkiln.errors import AcceleratorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from typing import Any, ClassVar, Self


class Streams(Device):
    """The streams of a device, events that order and time their work, and what profilers read."""

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
        """The stream that operations go to unless another one is made current."""
        return self._ask("default_stream", device_index)

    @property
    def Event(self) -> Any:  # noqa: N802
        """The class of events: ``record``, ``synchronize``, ``query``, ``elapsed_time``."""
        return self.module().Event

    # Graphs: work that is recorded once and replayed

    def create_graph(self) -> Any:
        """An empty graph; None if the device, or its module of torch, has no graphs."""
        kind = getattr(self.module(), f"{self.device_type.upper()}Graph", None)
        return None if kind is None else kind()

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        """In the ``with`` block, work is recorded and not executed.

        Raises AcceleratorError if the device has no graphs. Otherwise the block would run, its
        replay would do nothing, and the results would be wrong without an error.
        """
        self._must_be_a_graph(graph)
        named = {"pool": pool, "stream": stream}
        given = {name: value for name, value in named.items() if value is not None}
        context: AbstractContextManager[Any] = self.module().graph(graph, **given)
        return context

    def replay_graph(self, graph: Any) -> None:
        """Execute the recorded work. Raises AcceleratorError if the device has no graphs."""
        self._must_be_a_graph(graph)
        graph.replay()

    def _must_be_a_graph(self, graph: Any) -> None:
        if graph is None:
            raise AcceleratorError(
                f"there are no graphs on {self.name}",
                why="create_graph() returned None: in that case, run the work directly",
            )

    # Profilers. Without a way to the vendor's profiler, ranges do nothing.

    supports_nvtx_domain = False  # whether ranges can be put under a name of their own

    def range_push(
        self,
        msg: str,
        domain: str | None = None,  # noqa: ARG002 (torch's ranges have none)
        category: str | None = None,  # noqa: ARG002
    ) -> None:
        """Begin a range with this name in the profiler's timeline."""
        marks = self._marks()
        if marks is not None:
            marks.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:  # noqa: ARG002
        """End the latest range."""
        marks = self._marks()
        if marks is not None:
            marks.range_pop()

    def _marks(self) -> Any:
        """What has ``range_push`` and ``range_pop``, or None."""
        return None

    # Sensors

    def temperature(self, device_index: int | None = None) -> int | None:
        """Degrees Celsius; None if torch cannot ask."""
        return self._sensor("temperature", device_index)

    def power_draw(self, device_index: int | None = None) -> int | None:
        """Milliwatts; None if torch cannot ask."""
        return self._sensor("power_draw", device_index)

    def utilization(self, device_index: int | None = None) -> int | None:
        """Percent of the time in which the device was busy; None if torch cannot ask."""
        return self._sensor("utilization", device_index)

    def clock_rate(self, device_index: int | None = None) -> int | None:
        """Megahertz; None if torch cannot ask."""
        return self._sensor("clock_rate", device_index)

    def _sensor(self, name: str, device_index: int | None) -> int | None:
        """Raises AcceleratorError if torch needs a package that is not installed."""
        if not hasattr(self.module(), name):
            return None
        try:
            return int(self._ask(name, device_index))
        except ModuleNotFoundError as error:
            raise AcceleratorError(
                f"torch cannot ask {self.name} for its {name}", why=str(error)
            ) from error


def itt() -> Any:
    """The ranges of Intel's profilers, for a CPU or GPU; None if torch is built without them."""
    import torch.profiler

    ranges: Any = torch.profiler.itt
    return ranges if ranges.is_available() else None


# Devices that do all work in order


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

    def wait_stream(self, stream: Any) -> None:
        """Does nothing: the device does all work in order."""

    def _event(self) -> Any:
        return HostEvent(enable_timing=True)

    def __enter__(self) -> Self:
        """In the ``with`` block, this is the current stream of the thread."""
        self.chosen.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.chosen.streams.pop()


class OneStream(Streams):
    """A device that does all work in order. Streams can be created and made current, also torch's
    own for the CPU (``torch.cpu.Stream``)."""

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

    def current_stream(self, device_index: int | None = None) -> Any:  # noqa: ARG002
        chosen = self.DEFAULT.chosen.streams
        return chosen[-1] if chosen else self.DEFAULT

    def default_stream(self, device_index: int | None = None) -> Any:  # noqa: ARG002
        return self.DEFAULT
