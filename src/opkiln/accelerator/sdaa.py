"""Tecorigin SDAA."""

from __future__ import annotations

from opkiln.accelerator.vendor import VendorAccelerator


class SdaaAccelerator(VendorAccelerator):
    """``torch.sdaa``, from torch_sdaa."""

    name = "sdaa"
    device_type = "sdaa"
    PACKAGES = ("torch_sdaa",)
    NODES = ("dev/tcaicard",)
    COMMUNICATION = "tccl"
    EXPORTED = ("TCCL", "SDAA", "LD_LIBRARY", "PATH")
    VISIBLE = ("SDAA_VISIBLE_DEVICES",)
