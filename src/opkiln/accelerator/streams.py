"""The work of an accelerator: streams, events, recorded graphs, ranges for profilers, sensors."""

from __future__ import annotations

from opkiln.accelerator.device import Device, asking
from opkiln.errors import AcceleratorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Any


def _sensor(name: str) -> Callable[..., int | None]:
    """Raises AcceleratorError if torch needs a package that is not installed."""

    def method(self: Device, device_index: int | None = None) -> int | None:
        if not hasattr(self.module(), name):
            return None
        try:
            return int(self._ask(name, device_index))
        except ModuleNotFoundError as error:
            raise AcceleratorError(
                f"torch cannot ask {self.name} for its {name}", why=str(error)
            ) from error

    return method


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

    current_stream = asking("current_stream")  # the stream that operations go to
    # The stream that operations go to unless another one is made current.
    default_stream = asking("default_stream")

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

    temperature = _sensor("temperature")  # degrees Celsius; None if torch cannot ask
    power_draw = _sensor("power_draw")  # milliwatts; None if torch cannot ask
    # Percent of the time in which the device was busy; None if torch cannot ask.
    utilization = _sensor("utilization")
    clock_rate = _sensor("clock_rate")  # megahertz; None if torch cannot ask


def itt() -> Any:
    """The ranges of Intel's profilers, for a CPU or GPU; None if torch is built without them."""
    import torch.profiler

    ranges: Any = torch.profiler.itt
    return ranges if ranges.is_available() else None
