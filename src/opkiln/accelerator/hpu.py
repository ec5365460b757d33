"""Intel Gaudi."""

from __future__ import annotations

from importlib import import_module

from opkiln.accelerator.vendor import VendorAccelerator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class HpuAccelerator(VendorAccelerator):
    """``habana_frameworks.torch.hpu``."""

    name = "hpu"
    device_type = "hpu"
    PACKAGES = ("habana_frameworks",)
    NODES = ("dev/accel/accel", "dev/hl")
    COMMUNICATION = "hccl"
    EXPORTED = ("HCCL", "HABANA", "PT_HPU")
    VISIBLE = ("HABANA_VISIBLE_MODULES",)
    COMPILE_BACKEND = "hpu_backend"

    def _find_module(self) -> Any:
        return import_module("habana_frameworks.torch.hpu")

    def _generators(self) -> Any:
        return self.module().random

    def device_name(self, device_index: int | None = None) -> str:  # noqa: ARG002
        return "hpu"  # a process has one

    def get_device_name(self, device_index: int | None = None) -> str:
        return str(self._ask("get_device_name", device_index))

    def resolves_data_dependency(self) -> bool:
        return True

    def handles_memory_backpressure(self) -> bool:
        return True

    def empty_cache(self) -> None:
        """Nothing: the graph compiler owns the memory."""

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self.memory_stats(device_index)["Limit"])

    # The first Gaudi has neither.

    def is_fp16_supported(self) -> bool:
        return self.get_device_name() != "GAUDI"

    def is_fp8_supported(self) -> bool:
        return self.get_device_name() != "GAUDI"
