"""The work of an accelerator: streams, events, recorded graphs, ranges for profilers, sensors."""

from __future__ import annotations

from opkiln.accelerator.device import Device
from opkiln.errors import AcceleratorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any


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
