"""Devices that torch knows through a package of their vendor: one row of a table each.

opkiln's tests run these against stand-ins of the packages, not on the devices.
"""

from __future__ import annotations

import os
from importlib import import_module

from opkiln.accelerator.interface import Accelerator, Answer
from opkiln.machine.devices.choice import has_package

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar


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
    _INSTEAD: ClassVar = {"empty_cache": lambda: None}  # the graph compiler owns the memory

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

KINDS = {kind.name: kind for kind in _VENDORS}
