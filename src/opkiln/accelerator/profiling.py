"""What profilers and monitors read: named ranges, and the device's sensors."""

from __future__ import annotations

from opkiln.accelerator.identity import Identity
from opkiln.errors import AcceleratorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def itt() -> Any:
    """The ranges of Intel's profilers, for a CPU or GPU; None where torch is built without."""
    import torch.profiler

    ranges: Any = torch.profiler.itt
    return ranges if ranges.is_available() else None


class Profiling(Identity):
    """Ranges go to the vendor's profiler, where torch has a way to it; else they do nothing."""

    supports_nvtx_domain = False

    def range_push(
        self,
        msg: str,
        domain: str | None = None,  # noqa: ARG002 (torch's ranges have none)
        category: str | None = None,  # noqa: ARG002
    ) -> None:
        """Begin a range of this name in the profiler's timeline."""
        marks = self._marks()
        if marks is not None:
            marks.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:  # noqa: ARG002
        """End the range that began last."""
        marks = self._marks()
        if marks is not None:
            marks.range_pop()

    def _marks(self) -> Any:
        """What has ``range_push`` and ``range_pop``, or None."""
        return None

    # Sensors

    def temperature(self, device_index: int | None = None) -> int | None:
        """Degrees Celsius; None where torch has no way to ask."""
        return self._sensor("temperature", device_index)

    def power_draw(self, device_index: int | None = None) -> int | None:
        """Milliwatts; None where torch has no way to ask."""
        return self._sensor("power_draw", device_index)

    def utilization(self, device_index: int | None = None) -> int | None:
        """Percent of the time in which the device worked; None where torch has no way to ask."""
        return self._sensor("utilization", device_index)

    def clock_rate(self, device_index: int | None = None) -> int | None:
        """Megahertz; None where torch has no way to ask."""
        return self._sensor("clock_rate", device_index)

    def _sensor(self, name: str, device_index: int | None) -> int | None:
        """Raises AcceleratorError where torch needs a package that is not installed."""
        if not hasattr(self.module(), name):
            return None
        try:
            return int(self._ask(name, device_index))
        except ModuleNotFoundError as error:
            raise AcceleratorError(
                f"torch cannot ask {self.name} for its {name}", why=str(error)
            ) from error
