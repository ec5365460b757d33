"""ROCm: hipcc where torch wants it, and the AMD GPUs it is to compile for."""

from __future__ import annotations

from opkiln.arch import hip as grammar
from opkiln.devices import amd
from opkiln.errors import ArchError, ToolchainError
from opkiln.model import ROCM
from opkiln.report.doctor.finding import Outcome, copyable, failed, joined, passed, skipped, warned
from opkiln.report.doctor.here import Here
from opkiln.report.doctor.packages import as_root
from opkiln.settings import origin_of, settings
from opkiln.toolchain import hipcc


def toolkit(here: Here) -> Outcome:
    """A hipcc is there, works, and is of torch's major version."""
    wanted = here.torch is not None and bool(here.torch.hip)
    found = bool(amd.devices().gpus) or hipcc.available() or bool(settings.rocm_home)
    if not wanted and not found:
        return skipped("torch has no HIP, and there is neither an AMD GPU nor a hipcc")
    if here.compiler is None:
        return skipped("there is no host compiler: see compiler")
    device = here.device_compiler(ROCM)
    if isinstance(device, ToolchainError):
        evidence, command = joined(device.what, *device.why.splitlines()), copyable(device.hint)
        command = as_root(command) if command.startswith("apt-get ") else command
        return failed(evidence, command) if wanted else warned(evidence, command)
    has = f"torch has HIP {here.torch.hip}" if wanted and here.torch else "torch has no HIP"
    return passed(f"HIP {device.version} in {device.home}; {has}")


def gpus(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """The list of architectures can be read, and covers each AMD GPU."""
    devices = amd.devices()
    asked, origin = origin_of("rocm_arch_list")
    native = (
        tuple(grammar.parse(";".join(gpu.arch for gpu in devices.gpus))) if devices.gpus else ()
    )
    if not asked:
        if not devices.gpus:
            return skipped(devices.why)
        return passed(f"{grammar.show(native)}; ops are built for them")
    try:
        parsed = grammar.parse(asked, native=native)
    except ArchError as error:
        return failed(
            joined(f"{origin}={asked}: {error.what}", *error.why.splitlines()), f"unset {origin}"
        )
    without = [str(gpu) for gpu in native if not grammar.covers(parsed, gpu)]
    if without:
        return failed(
            f"{origin}={asked} has nothing that runs on {', '.join(without)}", f"unset {origin}"
        )
    covered = f", which covers {grammar.show(native)}" if native else ""
    return passed(f"{origin}={asked} is {grammar.show(parsed)}{covered}")
