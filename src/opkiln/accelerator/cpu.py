"""The CPU, where nothing else answers or where it is asked for."""

from __future__ import annotations

from opkiln import machine
from opkiln.accelerator import host_memory
from opkiln.accelerator.answer import Answer
from opkiln.accelerator.base import Accelerator
from opkiln.accelerator.profiling import itt
from opkiln.accelerator.streams import HostEvent, OneStream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Any

    import torch


class CpuAccelerator(OneStream, Accelerator):
    """One device; its memory is the process's, and what it does is done when the call returns."""

    name = "cpu"
    device_type = "cpu"

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:  # noqa: ARG003
        """It is always there."""
        return Answer(cls.name, True, machine.cpu_name())

    def is_synchronized_device(self) -> bool:
        return True

    # The device

    def device_name(self, device_index: int | None = None) -> str:  # noqa: ARG002
        return "cpu"

    def current_device(self) -> int:
        return 0

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing: all is done."""

    def get_device_properties(self, device_index: int | None = None) -> SimpleNamespace:
        import os
        from types import SimpleNamespace

        return SimpleNamespace(
            name=machine.cpu_name(),
            total_memory=self.total_memory(device_index),
            multi_processor_count=os.cpu_count() or 1,
        )

    # Random numbers: torch's own generator

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:  # noqa: ARG002
        import torch

        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:  # noqa: ARG002
        import torch

        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        # torch.manual_seed would seed every other device, too.
        self.default_generator(0).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def initial_seed(self) -> int:
        return self.default_generator(0).initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:  # noqa: ARG002
        import torch

        return torch.default_generator

    @property
    def Event(self) -> Any:  # noqa: N802
        return HostEvent

    # Memory: the process's

    def empty_cache(self) -> None:
        """Nothing: torch keeps no cache of the host's memory."""

    def memory_allocated(self, device_index: int | None = None) -> int:  # noqa: ARG002
        """What the process holds; 0 where the system does not say."""
        return host_memory.resident()

    def max_memory_allocated(self, device_index: int | None = None) -> int:  # noqa: ARG002
        return host_memory.peak()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self.memory_allocated(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        now, most = self.memory_allocated(device_index), self.max_memory_allocated(device_index)
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": most}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:  # noqa: ARG002
        host_memory.reset_peak()

    def total_memory(self, device_index: int | None = None) -> int:  # noqa: ARG002
        return host_memory.total()

    def available_memory(self, device_index: int | None = None) -> int:  # noqa: ARG002
        return host_memory.available()

    def pin_memory(
        self,
        tensor: torch.Tensor,
        align_bytes: int = 1,  # noqa: ARG002 (nothing is allocated)
        make_copy: bool = True,  # noqa: ARG002
        match_shape: bool = True,  # noqa: ARG002
    ) -> torch.Tensor:
        """The tensor as it is: no device copies from it."""
        return tensor

    # What torch says of this CPU

    def is_bf16_supported(self) -> bool:
        return True  # by conversion to float32, where the CPU has no such arithmetic

    def is_fp16_supported(self) -> bool:
        import torch

        mkldnn: Any = torch.backends.mkldnn
        return bool(mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported())

    def _marks(self) -> Any:
        return itt()
