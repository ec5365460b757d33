"""Apple GPUs."""

from __future__ import annotations

from opkiln import machine
from opkiln.accelerator.cpu import Chosen, HostStream, OneDevice
from opkiln.accelerator.interface import Answer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Any, ClassVar

    import torch


class MpsStream(HostStream):
    """The one stream of the device, which works while the host continues."""

    chosen = Chosen()

    def synchronize(self) -> None:
        import torch

        torch.mps.synchronize()

    def _event(self) -> Any:
        import torch

        return torch.mps.Event(enable_timing=True)


class MpsAccelerator(OneDevice):
    """``torch.mps``: one stream, and an allocator that records no peaks. In place of a peak, it
    says what it holds now."""

    name = "mps"
    device_type = "mps"
    _INSTEAD: ClassVar = {
        "memory_allocated": "current_allocated_memory",
        "max_memory_allocated": "driver_allocated_memory",
        "memory_reserved": "driver_allocated_memory",
        "max_memory_reserved": "driver_allocated_memory",
    }
    DEFAULT = MpsStream()

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:  # noqa: ARG003
        """Asks torch, which is imported on macOS only."""
        if machine.system() != "darwin":
            return Answer(cls.name, False, f"Metal is macOS's, and this is {machine.system()}")
        try:
            import torch
        except ImportError as error:
            return Answer(cls.name, False, f"torch cannot be imported: {error}")
        if not torch.backends.mps.is_available():
            return Answer(cls.name, False, f"torch {torch.__version__} finds no Metal device")
        return Answer(cls.name, True, "torch finds a Metal device")

    # The device

    def get_device_properties(self, device_index: int | None = None) -> SimpleNamespace:  # noqa: ARG002
        from types import SimpleNamespace

        memory = int(self.module().recommended_max_memory())  # shared with the host
        return SimpleNamespace(name="Apple GPU", total_memory=memory)

    # Random numbers

    def default_generator(self, device_index: int) -> torch.Generator:  # noqa: ARG002
        generator: torch.Generator = self.module()._get_default_mps_generator()
        return generator

    # Memory

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {
            "allocated_bytes.all.current": self.memory_allocated(device_index),
            "reserved_bytes.all.current": self.memory_reserved(device_index),
        }

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Does nothing: there are no peaks."""
