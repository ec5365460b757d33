"""Devices: which there are, which is the current one, what they are."""

from __future__ import annotations

from opkiln.accelerator.identity import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import torch


class Device(Identity):
    """Names, indices, properties, and waiting for a device."""

    def device_name(self, device_index: int | None = None) -> str:
        """``cuda``, or ``cuda:1`` of an index; as ``torch.device`` takes it."""
        return self.device_type if device_index is None else f"{self.device_type}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """The ``torch.device``."""
        import torch

        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        """Make a device the current one of this thread."""
        self.module().set_device(device_index)

    def current_device(self) -> int:
        """The index of the current device."""
        return int(self.module().current_device())

    def current_device_name(self) -> str:
        """The current device, as ``device_name`` has it."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """How many devices this process may use."""
        return int(self.module().device_count())

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until a device has done all it was given."""
        self._ask("synchronize", device_index)

    def get_device_properties(self, device_index: int | None = None) -> Any:
        """What torch tells of a device: ``name``, ``total_memory`` and the vendor's own."""
        return self.module().get_device_properties(self._index(device_index))

    def get_device_name(self, device_index: int | None = None) -> str:
        """The product's name."""
        return str(self.get_device_properties(device_index).name)

    def _index(self, device_index: int | None) -> int:
        return self.current_device() if device_index is None else device_index

    # How it behaves

    def is_synchronized_device(self) -> bool:
        """Whether an operation is done when its call returns."""
        return False

    def use_host_timers(self) -> bool:
        """Whether the host's clock times an operation rightly, without events."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Whether work on two streams is ordered by the data that they share."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Whether the device waits for memory where the host runs ahead of it."""
        return self.is_synchronized_device()
