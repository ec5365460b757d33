"""Biren SUPA."""

from __future__ import annotations

from opkiln.accelerator.vendor import VendorAccelerator


class SupaAccelerator(VendorAccelerator):
    """``torch.supa``, from torch_supa; from torch_br before that."""

    name = "supa"
    device_type = "supa"
    PACKAGES = ("torch_supa", "torch_br")
    NODES = ("dev/biren/card_",)
    COMMUNICATION = "bccl"
    EXPORTED = ("BCCL", "BIREN", "SUPA", "LD_LIBRARY", "PATH")
    VISIBLE = ("SUPA_VISIBLE_DEVICES",)
    TRITON = True
