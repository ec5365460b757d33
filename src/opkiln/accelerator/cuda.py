"""NVIDIA GPUs."""

from __future__ import annotations

from opkiln.accelerator import nvidia
from opkiln.accelerator.answer import Answer
from opkiln.accelerator.base import Accelerator
from opkiln.accelerator.torch_build import why_without
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar


class CudaAccelerator(Accelerator):
    """``torch.cuda``."""

    name = "cuda"
    device_type = "cuda"
    COMMUNICATION = "nccl"
    EXPORTED: ClassVar[tuple[str, ...]] = ("NCCL",)
    VISIBLE: ClassVar[tuple[str, ...]] = ("CUDA_VISIBLE_DEVICES",)
    TRITON = True

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:  # noqa: ARG003
        """The driver's management library tells, and ``CUDA_VISIBLE_DEVICES``; never CUDA itself:
        after cuInit a forked child has no CUDA any more."""
        devices = nvidia.devices(root=root)
        if not devices.gpus:
            return Answer(cls.name, False, devices.why)
        gpus, _ = nvidia.visible(devices)
        if not gpus:
            hidden = f"CUDA_VISIBLE_DEVICES={settings.cuda_visible_devices!r} leaves none of"
            return Answer(cls.name, False, f"{hidden} {len(devices.gpus)} GPUs")
        if why := why_without("CUDA"):
            return Answer(cls.name, False, f"{why}; the GPU is there: {gpus[0].name}")
        return Answer(cls.name, True, f"{len(gpus)} x {gpus[0].name}, asked by {devices.how}")

    def communication_backend_version(self) -> tuple[int, ...] | None:
        return tuple(self.module().nccl.version())

    def _capability(self) -> tuple[int, int]:
        major, minor = self.module().get_device_capability()
        return major, minor

    def is_bf16_supported(self) -> bool:
        # torch's own answer counts emulation in, which no kernel does.
        return self._capability() >= (8, 0)

    def is_fp16_supported(self) -> bool:
        return self._capability() >= (7, 0)

    def is_fp8_supported(self) -> bool:
        return self._capability() >= (8, 9)

    def is_triton_supported(self) -> bool:
        return super().is_triton_supported() and self._capability() >= (8, 0)

    def prefer_triton_grouped_mm(self) -> bool:
        # torch's is one kernel from 9.0 on, and a loop over the groups before.
        return self.is_triton_supported() and self._capability() < (9, 0)

    def _marks(self) -> Any:
        return self.module().nvtx
