"""Huawei Ascend."""

from __future__ import annotations

from opkiln.accelerator.vendor import VendorAccelerator


class NpuAccelerator(VendorAccelerator):
    """``torch.npu``, from torch_npu."""

    name = "npu"
    device_type = "npu"
    PACKAGES = ("torch_npu",)
    NODES = ("dev/davinci",)
    COMMUNICATION = "hccl"
    EXPORTED = ("ASCEND", "HCCL", "LD_LIBRARY", "PATH")
    VISIBLE = ("ASCEND_RT_VISIBLE_DEVICES",)
