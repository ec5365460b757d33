"""GPUs that torch itself drives: of NVIDIA, of AMD (through ``torch.cuda``), of Intel, Apple's. And
devices that torch knows through a package of their vendor: one row of a table each.

opkiln's tests run the vendors' devices against stand-ins of the packages.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

from opkiln.accelerator.cpu import ChosenStreams, HostStream, OneDevice
from opkiln.accelerator.interface import Accelerator, Answer, itt
from opkiln.machine import uname
from opkiln.machine.devices import amd, nvidia
from opkiln.machine.devices.choice import has_package, why_torch_lacks
from opkiln.machine.toolchain.libsycl import intel_gpus
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
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
    _SUBSTITUTES: ClassVar = {"default_stream": "current_stream"}

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

    chosen = ChosenStreams()

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
    _SUBSTITUTES: ClassVar = {
        **OneDevice._SUBSTITUTES,
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

    def get_device_properties(self, device_index: int | None = None) -> SimpleNamespace:  # noqa: ARG002
        memory = int(self.module().recommended_max_memory())  # shared with the host
        return SimpleNamespace(name="Apple GPU", total_memory=memory)

    def default_generator(self, device_index: int) -> torch.Generator:  # noqa: ARG002
        generator: torch.Generator = self.module()._get_default_mps_generator()
        return generator

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {
            "allocated_bytes.all.current": self.memory_allocated(device_index),
            "reserved_bytes.all.current": self.memory_reserved(device_index),
        }


# Devices that torch knows through a package of their vendor


class VendorAccelerator(Accelerator):
    """``torch.<name>``, which exists once one of ``PACKAGES`` is imported."""

    PACKAGES: ClassVar[tuple[str, ...]] = ()
    NODES: ClassVar[tuple[str, ...]] = ()  # the devices' files, without their number

    @classmethod
    def look(cls, root: str = "/", *, asked: bool = False) -> Answer:
        """A device is here if a package is installed, the driver has made a device file, and the
        package counts at least one device. The package is only imported to count, or if the user
        requested the accelerator by name."""
        package = cls._package()
        if package is None:
            return Answer(cls.name, False, f"{' or '.join(cls.PACKAGES)} is not installed")
        if not asked and not any(_has_numbered_file(root, node) for node in cls.NODES):
            files = " or ".join(f"/{node}*" for node in cls.NODES)
            return Answer(cls.name, False, f"{package} is installed, but there is no {files} here")
        try:
            count = cls().device_count()
        # Vendors' packages raise all kinds of errors. Some exit the interpreter if their driver is
        # missing.
        except (Exception, SystemExit) as error:
            told = f"{type(error).__name__}: {error}"
            return Answer(cls.name, False, f"{package} is installed, but fails: {told}")
        if not count:
            return Answer(cls.name, False, f"{package} is installed, but counts no device")
        return Answer(cls.name, True, f"{package} counts {count}")

    @classmethod
    def _package(cls) -> str | None:
        return next((name for name in cls.PACKAGES if has_package(name)), None)

    def _find_module(self) -> Any:
        import_module(self._package() or self.PACKAGES[0])  # registers the device with torch
        return super()._find_module()


def _has_numbered_file(root: str, node: str) -> bool:
    """Whether there is a file with this name followed by a number."""
    directory, stem = os.path.split(os.path.join(root, node))
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    return any(name.startswith(stem) and name.removeprefix(stem).isdigit() for name in names)


class _Gaudi(VendorAccelerator):
    """``habana_frameworks.torch.hpu``, which differs from torch's own modules."""

    COMPILE_BACKEND = "hpu_backend"
    _SUBSTITUTES: ClassVar = {"empty_cache": lambda: None}  # the graph compiler owns the memory

    def _find_module(self) -> Any:
        return import_module("habana_frameworks.torch.hpu")

    def _generators(self) -> Any:
        return self.module().random

    def device_name(self, device_index: int | None = None) -> str:  # noqa: ARG002
        return "hpu"  # a process has only one

    def get_device_name(self, device_index: int | None = None) -> str:
        return str(self._ask("get_device_name", device_index))

    def resolves_data_dependency(self) -> bool:
        return True

    def handles_memory_backpressure(self) -> bool:
        return True

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self.memory_stats(device_index)["Limit"])

    # The first Gaudi has neither.

    def is_fp16_supported(self) -> bool:
        return self.get_device_name() != "GAUDI"

    def is_fp8_supported(self) -> bool:
        return self.get_device_name() != "GAUDI"


_PATHS = ("LD_LIBRARY", "PATH")


def _kind(
    name: str, base: type[VendorAccelerator] = VendorAccelerator, **attributes: Any
) -> type[VendorAccelerator]:
    doc = f"``torch.{name}``, from {' or '.join(attributes['PACKAGES'])}."
    named = {"__module__": __name__, "__doc__": doc, "name": name, "device_type": name}
    return type(f"{name.capitalize()}Accelerator", (base,), {**named, **attributes})


# Intel Gaudi, Huawei Ascend, Cambricon, Tecorigin, Biren (whose package used to be torch_br).
_VENDORS = (
    _kind("hpu", _Gaudi, PACKAGES=("habana_frameworks",), NODES=("dev/accel/accel", "dev/hl"),
          COMMUNICATION="hccl", VISIBLE=("HABANA_VISIBLE_MODULES",),
          EXPORTED=("HCCL", "HABANA", "PT_HPU")),
    _kind("npu", PACKAGES=("torch_npu",), NODES=("dev/davinci",), COMMUNICATION="hccl",
          VISIBLE=("ASCEND_RT_VISIBLE_DEVICES",), EXPORTED=("ASCEND", "HCCL", *_PATHS)),
    _kind("mlu", PACKAGES=("torch_mlu",), NODES=("dev/cambricon_dev",), COMMUNICATION="cncl",
          VISIBLE=("MLU_VISIBLE_DEVICES",), EXPORTED=("NEUWARE_HOME", "CNCL", *_PATHS),
          TRITON=True, _RANGES="cnpx"),
    _kind("sdaa", PACKAGES=("torch_sdaa",), NODES=("dev/tcaicard",), COMMUNICATION="tccl",
          VISIBLE=("SDAA_VISIBLE_DEVICES",), EXPORTED=("TCCL", "SDAA", *_PATHS)),
    _kind("supa", PACKAGES=("torch_supa", "torch_br"), NODES=("dev/biren/card_",),
          COMMUNICATION="bccl", VISIBLE=("SUPA_VISIBLE_DEVICES",),
          EXPORTED=("BCCL", "BIREN", "SUPA", *_PATHS), TRITON=True),
)  # fmt: skip

VENDORS = {kind.name: kind for kind in _VENDORS}
