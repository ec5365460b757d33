"""Cambricon MLU."""

from __future__ import annotations

from opkiln.accelerator.vendor import VendorAccelerator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class MluAccelerator(VendorAccelerator):
    """``torch.mlu``, from torch_mlu."""

    name = "mlu"
    device_type = "mlu"
    PACKAGES = ("torch_mlu",)
    NODES = ("dev/cambricon_dev",)
    COMMUNICATION = "cncl"
    EXPORTED = ("NEUWARE_HOME", "CNCL", "LD_LIBRARY", "PATH")
    VISIBLE = ("MLU_VISIBLE_DEVICES",)
    TRITON = True

    def _marks(self) -> Any:
        return getattr(self.module(), "cnpx", None)
