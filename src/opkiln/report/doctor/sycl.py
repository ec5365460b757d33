"""SYCL: a compiler where torch wants one, and a device for what it makes."""

from __future__ import annotations

import os

from opkiln.errors import ToolchainError
from opkiln.model import XPU
from opkiln.report.doctor.finding import Outcome, copyable, failed, joined, passed, skipped, warned
from opkiln.report.doctor.here import Here, of_this_python
from opkiln.settings import settings
from opkiln.toolchain import libsycl
from opkiln.toolchain import sycl as compilers


def toolkit(here: Here) -> Outcome:
    """icpx, or the runtime compiler, is there and works."""
    wanted = torch_has_xpu(here)
    if not wanted and not compilers.available() and not settings.sycl_cxx:
        return skipped("torch has no XPU, and there is no SYCL compiler")
    if here.compiler is None:
        return skipped("there is no host compiler: see compiler")
    device = here.device_compiler(XPU)
    if isinstance(device, ToolchainError):
        evidence, command = (
            joined(device.what, *device.why.splitlines()),
            of_this_python(copyable(device.hint)),
        )
        return failed(evidence, command) if wanted else warned(evidence, command)
    return passed(f"{device.family} {device.version}, {device.path}")


def device(here: Here) -> Outcome:
    """There is a device that SYCL will find."""
    if not torch_has_xpu(here) and not compilers.available():
        return skipped("torch has no XPU, and there is no SYCL compiler")
    missing = libsycl.no_device(settings.ocl_icd_filenames)
    if missing is None:
        return passed("an Intel GPU, or OpenCL's driver for the CPU, is there")
    why, command = missing
    return warned(why, of_this_python(command))


def torch_has_xpu(here: Here) -> bool:
    """Whether torch was built for Intel GPUs."""
    torch = here.torch
    return torch is not None and os.path.exists(os.path.join(torch.path, "lib", "libtorch_xpu.so"))
