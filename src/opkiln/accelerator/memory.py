"""Memory: how much there is, is taken, was taken at most; and pinning."""

from __future__ import annotations

from opkiln.accelerator.device import Device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import torch


class Memory(Device):
    """The allocator of a device, in bytes."""

    def empty_cache(self) -> None:
        """Give back to the device what the allocator keeps and nobody uses."""
        self.module().empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """What tensors take."""
        return int(self._ask("memory_allocated", device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """What tensors took at most since the start, or the last reset."""
        return int(self._ask("max_memory_allocated", device_index))

    def memory_reserved(self, device_index: int | None = None) -> int:
        """What the allocator holds, used or not."""
        return int(self._ask("memory_reserved", device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """What the allocator held at most since the start, or the last reset."""
        return int(self._ask("max_memory_reserved", device_index))

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Everything the allocator counts, by torch's names."""
        return dict(self._ask("memory_stats", device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Count every "at most" from now on."""
        self._ask("reset_peak_memory_stats", device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """What the device has."""
        return int(self.get_device_properties(device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """What is free on the device, other processes considered; where its driver does not say,
        the total less what this process has allocated."""
        index = self._index(device_index)
        info = getattr(self.module(), "mem_get_info", None)
        if info is not None:
            return int(info(index)[0])
        return self.total_memory(index) - self.memory_allocated(index)

    # The older names: torch once said "cached", and had a reset for each peak.

    def memory_cached(self, device_index: int | None = None) -> int:
        """``memory_reserved`` by its older name."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """``max_memory_reserved`` by its older name."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """``reset_peak_memory_stats``: torch resets all of them at once."""
        self.reset_peak_memory_stats(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """``reset_peak_memory_stats``: torch resets all of them at once."""
        self.reset_peak_memory_stats(device_index)

    # The host's memory, as far as the device copies from it

    def pin_memory(
        self,
        tensor: torch.Tensor,
        align_bytes: int = 1,  # noqa: ARG002 (torch's allocator aligns to pages)
        make_copy: bool = True,  # noqa: ARG002 (it always copies, and keeps the shape)
        match_shape: bool = True,  # noqa: ARG002
    ) -> torch.Tensor:
        """A copy of a CPU tensor in page-locked memory, from which the device copies faster."""
        return tensor.pin_memory()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Nothing: torch gives the pages back when the last tensor on them is gone."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in page-locked memory."""
        return tensor.is_pinned()
