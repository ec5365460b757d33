"""Intel GPUs."""

from __future__ import annotations

from opkiln.accelerator.answer import Answer
from opkiln.accelerator.base import Accelerator
from opkiln.accelerator.profiling import itt
from opkiln.accelerator.torch_build import why_without
from opkiln.toolchain.libsycl import closed_gpus, intel_gpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class XpuAccelerator(Accelerator):
    """``torch.xpu``."""

    name = "xpu"
    device_type = "xpu"
    COMMUNICATION = "xccl"
    EXPORTED = ("CCL", "ZE_", "SYCL")
    VISIBLE = ("ZE_AFFINITY_MASK",)
    TRITON = True

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:  # noqa: ARG003
        """The kernel's files tell: SYCL could only be asked by starting its drivers."""
        nodes = intel_gpus(root)
        if not nodes and (shut := closed_gpus(root)):
            paths = ", ".join(f"/dev/dri/{name}" for name in shut)
            return Answer(cls.name, False, f"not open to this user: {paths}")
        if not nodes:
            return Answer(cls.name, False, "there is no Intel GPU here")
        if why := why_without("XPU"):
            return Answer(cls.name, False, f"{why}; the GPU is there: {nodes[0]}")
        return Answer(cls.name, True, f"{len(nodes)} x Intel GPU ({', '.join(nodes)})")

    def default_stream(self, device_index: int | None = None) -> Any:
        # torch.xpu has no default stream; where none was chosen, the current one is it.
        return self.current_stream(device_index)

    def _marks(self) -> Any:
        return itt()
