"""Intel GPUs."""

from __future__ import annotations

from opkiln.accelerator.interface import Accelerator, Answer, itt
from opkiln.devices.installed import why_torch_lacks
from opkiln.toolchain.libsycl import intel_gpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar


class XpuAccelerator(Accelerator):
    """``torch.xpu``."""

    name = "xpu"
    device_type = "xpu"
    COMMUNICATION = "xccl"
    EXPORTED = ("CCL", "ZE_", "SYCL")
    VISIBLE = ("ZE_AFFINITY_MASK",)
    TRITON = True
    # torch.xpu has no default stream. Until another one is chosen, it is the current one.
    _RENAMED: ClassVar[Mapping[str, str]] = {"default_stream": "current_stream"}

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:  # noqa: ARG003
        """Reads the kernel's files: asking SYCL would start its drivers."""
        nodes, shut = intel_gpus(root)
        if not nodes and shut:
            paths = ", ".join(f"/dev/dri/{name}" for name in shut)
            return Answer(cls.name, False, f"not open to this user: {paths}")
        if not nodes:
            return Answer(cls.name, False, "there is no Intel GPU here")
        if why := why_torch_lacks("XPU"):
            return Answer(cls.name, False, f"{why}; the GPU is there: {nodes[0]}")
        return Answer(cls.name, True, f"{len(nodes)} x Intel GPU ({', '.join(nodes)})")

    def _marks(self) -> Any:
        return itt()
