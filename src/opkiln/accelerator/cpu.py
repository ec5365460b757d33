"""The CPU: the accelerator if no other device is here, or if it is requested."""

from __future__ import annotations

from opkiln import machine
from opkiln.accelerator.interface import Answer, itt
from opkiln.accelerator.one_device import HostEvent, OneDevice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Any

    import torch


class CpuAccelerator(OneDevice):
    """It uses the process's memory, and work is finished when a call returns."""

    name = "cpu"
    device_type = "cpu"

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:  # noqa: ARG003
        """A CPU is always here."""
        return Answer(cls.name, True, machine.cpu_name())

    def is_synchronized_device(self) -> bool:
        return True

    # The device

    def device_name(self, device_index: int | None = None) -> str:  # noqa: ARG002
        return "cpu"

    def get_device_properties(self, device_index: int | None = None) -> SimpleNamespace:
        import os
        from types import SimpleNamespace

        return SimpleNamespace(
            name=machine.cpu_name(),
            total_memory=self.total_memory(device_index),
            multi_processor_count=os.cpu_count() or 1,
        )

    # Random numbers: torch's own generator

    def _generators(self) -> Any:
        return self.random()

    def manual_seed(self, seed: int) -> None:
        # torch.manual_seed would also seed every other device.
        self.default_generator(0).manual_seed(seed)

    def default_generator(self, device_index: int) -> torch.Generator:  # noqa: ARG002
        import torch

        return torch.default_generator

    @property
    def Event(self) -> Any:  # noqa: N802
        return HostEvent

    # Memory: the process's, in bytes. 0 if the system does not say; only Linux has these files.

    def empty_cache(self) -> None:
        """Does nothing: torch does not cache host memory."""

    def memory_allocated(self, device_index: int | None = None) -> int:  # noqa: ARG002
        """What this process holds."""
        return _bytes("/proc/self/status", "VmRSS")

    def max_memory_allocated(self, device_index: int | None = None) -> int:  # noqa: ARG002
        return _bytes("/proc/self/status", "VmHWM")

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self.memory_allocated(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        now, most = self.memory_allocated(device_index), self.max_memory_allocated(device_index)
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": most}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:  # noqa: ARG002
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")  # proc(5): resets VmHWM, and changes nothing else
        except OSError:
            pass  # some sandboxes have no such file: the peak of the whole process stays

    def total_memory(self, device_index: int | None = None) -> int:  # noqa: ARG002
        return _bytes("/proc/meminfo", "MemTotal")

    def available_memory(self, device_index: int | None = None) -> int:  # noqa: ARG002
        return _bytes("/proc/meminfo", "MemAvailable")

    # What torch says about this CPU

    def is_bf16_supported(self) -> bool:
        return True  # converted to float32 if the CPU has no such arithmetic

    def is_fp16_supported(self) -> bool:
        import torch

        mkldnn: Any = torch.backends.mkldnn
        return bool(mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported())

    def _marks(self) -> Any:
        return itt()


def _bytes(path: str, name: str) -> int:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                label, _, value = line.partition(":")
                if label == name:
                    return int(value.split()[0]) << 10  # from kibibytes
    except OSError:
        pass
    return 0
