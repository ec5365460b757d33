"""AMD GPUs, which torch drives through ``torch.cuda``."""

from __future__ import annotations

from opkiln.accelerator import amd
from opkiln.accelerator.answer import Answer
from opkiln.accelerator.base import Accelerator
from opkiln.accelerator.cuda import CudaAccelerator
from opkiln.accelerator.torch_build import why_without

# GPUs whose matrix units take 8-bit floats: MI300, MI350, RDNA 4.
_FP8 = ("gfx94", "gfx95", "gfx12")


class RocmAccelerator(CudaAccelerator):
    """``torch.cuda`` of a ROCm torch: the same functions, other devices."""

    name = "rocm"
    EXPORTED = ("NCCL", "RCCL", "HSA", "HIP")
    # HIP reads its own variable first. torch refuses the two where they differ.
    VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:  # noqa: ARG003
        """The kernel's files tell, and the variables that hide GPUs."""
        devices = amd.devices(root)
        if not devices.gpus:
            return Answer(cls.name, False, devices.why)
        gpus = amd.visible(devices)
        if not gpus:
            hidden = "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES leave none of"
            return Answer(cls.name, False, f"{hidden} {len(devices.gpus)} GPUs")
        if why := why_without("ROCm"):
            return Answer(cls.name, False, f"{why}; the GPU is there: {gpus[0].arch}")
        return Answer(cls.name, True, f"{len(gpus)} x {gpus[0].name or 'GPU'} ({gpus[0].arch})")

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def is_fp8_supported(self) -> bool:
        return str(self.get_device_properties().gcnArchName).startswith(_FP8)

    def is_triton_supported(self) -> bool:
        # A capability of (9, 0) is a gfx90a here: CUDA's numbers say nothing.
        return Accelerator.is_triton_supported(self)

    def prefer_triton_grouped_mm(self) -> bool:
        return False
