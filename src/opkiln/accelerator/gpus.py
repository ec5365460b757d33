"""GPUs of NVIDIA; of AMD, which torch also drives through ``torch.cuda``; of Intel; and Apple's."""

from __future__ import annotations

from types import SimpleNamespace

from opkiln.accelerator.cpu import Chosen, HostStream, OneDevice
from opkiln.accelerator.interface import Accelerator, Answer, itt
from opkiln.machine import uname
from opkiln.machine.devices import amd, nvidia
from opkiln.machine.devices.choice import why_torch_lacks
from opkiln.machine.toolchain.libsycl import intel_gpus
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

    import torch

# AMD GPUs whose matrix units take 8-bit floats: MI300, MI350, RDNA 4.
_FP8 = ("gfx94", "gfx95", "gfx12")


class _TorchCuda(Accelerator):
    """``torch.cuda``, which drives NVIDIA's GPUs, and those of AMD in a ROCm torch."""

    device_type = "cuda"
    COMMUNICATION = "nccl"
    TRITON = True
    _RANGES = "nvtx"

    def communication_backend_version(self) -> tuple[int, ...] | None:
        return tuple(self.module().nccl.version())


class CudaAccelerator(_TorchCuda):
    """NVIDIA's GPUs."""

    name = "cuda"
    EXPORTED = ("NCCL",)
    VISIBLE = ("CUDA_VISIBLE_DEVICES",)

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:  # noqa: ARG003
        """Asks the driver's management library, never CUDA: after cuInit, CUDA fails in a forked
        child."""
        devices = nvidia.devices(root=root)
        if not devices.gpus:
            return Answer(cls.name, False, devices.why)
        gpus, _ = nvidia.visible(devices)
        if not gpus:
            hidden = f"CUDA_VISIBLE_DEVICES={settings.cuda_visible_devices!r} leaves none of"
            return Answer(cls.name, False, f"{hidden} {len(devices.gpus)} GPUs")
        if why := why_torch_lacks("CUDA"):
            return Answer(cls.name, False, f"{why}; the GPU is there: {gpus[0].name}")
        return Answer(cls.name, True, f"{len(gpus)} x {gpus[0].name}, asked by {devices.how}")

    def _capability(self) -> tuple[int, int]:
        major, minor = self.module().get_device_capability()
        return major, minor

    def is_bf16_supported(self) -> bool:
        # torch's own answer includes emulation, which kernels do not have.
        return self._capability() >= (8, 0)

    def is_fp16_supported(self) -> bool:
        return self._capability() >= (7, 0)

    def is_fp8_supported(self) -> bool:
        return self._capability() >= (8, 9)

    def is_triton_supported(self) -> bool:
        return super().is_triton_supported() and self._capability() >= (8, 0)

    def prefer_triton_grouped_mm(self) -> bool:
        # torch has one kernel for it from 9.0 on; before, it loops over the groups.
        return self.is_triton_supported() and self._capability() < (9, 0)


class RocmAccelerator(_TorchCuda):
    """AMD's GPUs. torch's capability of (9, 0) means a gfx90a here."""

    name = "rocm"
    EXPORTED = ("NCCL", "RCCL", "HSA", "HIP")
    # HIP reads its own variable first. torch raises an error if the two differ.
    VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:  # noqa: ARG003
        """Reads the kernel's files, and the variables that hide GPUs."""
        devices = amd.devices(root)
        if not devices.gpus:
            return Answer(cls.name, False, devices.why)
        gpus = amd.visible(devices)
        if not gpus:
            hidden = "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES leave none of"
            return Answer(cls.name, False, f"{hidden} {len(devices.gpus)} GPUs")
        if why := why_torch_lacks("ROCm"):
            return Answer(cls.name, False, f"{why}; the GPU is there: {gpus[0].arch}")
        return Answer(cls.name, True, f"{len(gpus)} x {gpus[0].name or 'GPU'} ({gpus[0].arch})")

    def is_fp8_supported(self) -> bool:
        return str(self.get_device_properties().gcnArchName).startswith(_FP8)


class XpuAccelerator(Accelerator):
    """``torch.xpu``."""

    name = "xpu"
    device_type = "xpu"
    COMMUNICATION = "xccl"
    EXPORTED = ("CCL", "ZE_", "SYCL")
    VISIBLE = ("ZE_AFFINITY_MASK",)
    TRITON = True
    # torch.xpu has no default stream. Until another one is chosen, it is the current one.
    _INSTEAD: ClassVar = {"default_stream": "current_stream"}

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

    def _ranges(self) -> Any:
        return itt()


class MpsStream(HostStream):
    """The one stream of the device, which works while the host continues."""

    chosen = Chosen()

    def synchronize(self) -> None:
        import torch

        torch.mps.synchronize()

    def _event(self) -> Any:
        import torch

        return torch.mps.Event(enable_timing=True)


class MpsAccelerator(OneDevice):
    """``torch.mps``: one stream, and an allocator that records no peaks. In place of a peak, it
    says what it holds now."""

    name = "mps"
    device_type = "mps"
    _INSTEAD: ClassVar = {
        **OneDevice._INSTEAD,
        "memory_allocated": "current_allocated_memory",
        "max_memory_allocated": "driver_allocated_memory",
        "memory_reserved": "driver_allocated_memory",
        "max_memory_reserved": "driver_allocated_memory",
        "reset_peak_memory_stats": lambda: None,
    }
    DEFAULT = MpsStream()

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:  # noqa: ARG003
        """Asks torch, which is imported on macOS only."""
        if uname.system() != "darwin":
            return Answer(cls.name, False, f"Metal is macOS's, and this is {uname.system()}")
        try:
            import torch
        except ImportError as error:
            return Answer(cls.name, False, f"torch cannot be imported: {error}")
        if not torch.backends.mps.is_available():
            return Answer(cls.name, False, f"torch {torch.__version__} finds no Metal device")
        return Answer(cls.name, True, "torch finds a Metal device")

    # The device

    def get_device_properties(self, device_index: int | None = None) -> SimpleNamespace:  # noqa: ARG002
        memory = int(self.module().recommended_max_memory())  # shared with the host
        return SimpleNamespace(name="Apple GPU", total_memory=memory)

    # Random numbers

    def default_generator(self, device_index: int) -> torch.Generator:  # noqa: ARG002
        generator: torch.Generator = self.module()._get_default_mps_generator()
        return generator

    # Memory

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {
            "allocated_bytes.all.current": self.memory_allocated(device_index),
            "reserved_bytes.all.current": self.memory_reserved(device_index),
        }
