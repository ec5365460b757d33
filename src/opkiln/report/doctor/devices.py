"""Accelerators: the one that programs get; the toolkits and devices of CUDA, ROCm and SYCL."""

from __future__ import annotations

import os
from typing import Any

from opkiln.arch import cuda, hip
from opkiln.build_model import DeviceCompiler
from opkiln.decision import archs
from opkiln.devices import amd
from opkiln.errors import ArchError, ToolchainError
from opkiln.model import CUDA, ROCM, XPU
from opkiln.report.commands import as_root, install, of_this_python, pip
from opkiln.report.doctor.finding import Outcome, copyable, failed, joined, passed, skipped, warned
from opkiln.report.doctor.here import Here, child_answer
from opkiln.settings import origin_of, settings
from opkiln.toolchain import cuda_version, family, hipcc, libsycl, nvcc, sycl, toolkits
from opkiln.toolchain.find import Candidate
from opkiln.toolchain.torch_sdk import release

# Runs in a child: accelerators of other packages are their code, and a vendor's imports torch.
_ASK = """
import json
from opkiln.accelerator import detect
from opkiln.errors import AcceleratorError
try:
    found = detect.trace()[-1]
    answer = {'name': found.name, 'why': found.why}
except AcceleratorError as error:
    answer = {'what': error.what, 'because': error.why, 'hint': error.hint}
print()
print(json.dumps(answer))
"""


def accelerator(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """There is an accelerator: the one that was asked for, or the first with a device."""
    asked, origin = origin_of("accelerator")
    found, reason = child_answer(_ASK)
    if reason:
        command = f"unset {origin}" if asked and origin.isupper() else ""
        return failed(joined(f"{origin}={asked}" if asked else "", reason), command)
    if "what" in found:
        evidence = joined(found["what"], *found["because"].splitlines())
        return failed(evidence, copyable(found["hint"]))
    by = f"set by {origin}" if asked else "the first with a device"
    return passed(joined(f"{found['name']}, {by}", found["why"]))


# CUDA


def cuda_toolkit(here: Here) -> Outcome:
    """There is a CUDA toolkit that works and has torch's major version."""
    absent = toolkits.unfound()
    nothing = [f"{place.origin}: there is no {place.nvcc}" for place in absent]
    unset = f"unset {' '.join(dict.fromkeys(place.origin for place in absent))}"
    if reason := _unwanted(here):
        return warned(joined(*nothing, reason), unset) if absent else skipped(reason)
    found, torch_cuda = here.cuda, _torch_cuda(here)
    if isinstance(found, ToolchainError):
        if _of_host(found):
            return skipped("its host compiler is refused: see nvcc host compiler")
        evidence = joined(found.what, *found.why.splitlines())
        command = of_this_python(copyable(found.hint))
        # If torch has no CUDA, no kernel is called here: that none can be built is only a warning.
        return failed(evidence, command) if torch_cuda else warned(evidence, command)
    named = {place.nvcc for place in absent}
    others = [each for each in _candidates(here) if each.refused and each.path not in named]
    refused = [f"{each.path} not taken: {each.refused}" for each in others]
    note = nvcc.mismatch_note(found, torch_cuda)
    if torch_cuda and release(found.version)[0] != release(torch_cuda)[0]:
        return warned(joined(note, *refused), f"unset {origin_of('skip_cuda_check')[1]}")
    fits = f"torch has {torch_cuda}" if torch_cuda else "torch has no CUDA"
    facts = joined(f"CUDA {found.version} in {found.home}", note or fits, *nothing, *refused)
    return warned(facts, unset) if absent else passed(facts)


def nvcc_host_compiler(here: Here) -> Outcome:
    """nvcc accepts the host compiler."""
    if reason := _unwanted(here):
        return skipped(reason)
    found = here.cuda
    if isinstance(found, DeviceCompiler):
        host = found.host or (here.compiler.cxx if here.compiler else "")
        return passed(f"nvcc {found.version} accepts {host}")
    if not _of_host(found):
        return skipped("there is no usable nvcc: see cuda toolkit")
    command = copyable(found.hint)
    if command.startswith("apt-get "):
        package, _, then = command.removeprefix("apt-get install ").partition(" && ")
        command = f"{install(package)} && {then}"
    return failed(joined(found.what, *found.why.splitlines()), command)


def cuda_driver(here: Here) -> Outcome:
    """The driver supports the CUDA versions of torch and of the toolkit."""
    devices, torch_cuda = here.nvidia, _torch_cuda(here)
    if not devices.gpus:
        if "no NVIDIA driver" in devices.why:
            return skipped(devices.why)
        return warned(devices.why, "nvidia-smi")
    takes = devices.cuda
    facts = f"driver {devices.driver} supports CUDA up to {takes or 'an unknown version'}"
    toolkit = here.cuda.version if isinstance(here.cuda, DeviceCompiler) else ""
    if not takes:
        return passed(facts)
    if torch_cuda and release(torch_cuda)[0] > release(takes)[0]:
        return failed(f"{facts}; torch needs {torch_cuda}", install("cuda-drivers"))
    if toolkit and release(toolkit)[0] > release(takes)[0]:
        command = of_this_python(cuda_version.fitting(takes))
        return failed(f"{facts}; the toolkit is CUDA {toolkit}", command)
    if toolkit and release(toolkit) > release(takes):
        return warned(
            f"{facts}; the toolkit is CUDA {toolkit}: its binaries run, but its PTX does not",
            of_this_python(cuda_version.fitting(takes)),
        )
    left_out = f"left out: {devices.why}" if devices.why else ""
    return warned(joined(facts, left_out), "nvidia-smi") if left_out else passed(facts)


def cuda_arch_list(here: Here) -> Outcome:
    """The list of architectures is valid, and the toolkit compiles for all of them."""
    asked, origin = origin_of("cuda_arch_list")
    if not asked:
        return passed("not set: ops are built for this machine's GPUs")
    try:
        parsed = _parsed(here, asked)
    except ArchError as error:
        return failed(
            joined(f"{origin}={asked}: {error.what}", *error.why.splitlines()), f"unset {origin}"
        )
    if parsed is None:
        return skipped(f"{origin}={asked} depends on the toolkit, and there is no usable one")
    shown = cuda.show(parsed)
    if not isinstance(here.cuda, DeviceCompiler):
        return passed(f"{origin}={asked} is {shown}; there is no toolkit to check it with")
    kept, refused = cuda.usable(parsed, _listed(here.cuda), here.cuda.accepts)
    if refused:
        reasons = (f"{arch}: {reason}" for arch, reason in refused)
        rest = f"export {origin}='{cuda.show(kept)}'" if kept else f"unset {origin}"
        return failed(joined(f"{origin}={asked}", *reasons), rest)
    return passed(f"{origin}={asked} is {shown}; CUDA {here.cuda.version} compiles for all of it")


def cuda_gpus(here: Here) -> Outcome:
    """Ops that are built here run on each GPU of this machine."""
    devices = here.nvidia
    if not devices.gpus:
        return skipped(devices.why)
    capabilities = dict.fromkeys(gpu.capability for gpu in devices.gpus)
    named = ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in devices.gpus)
    asked, origin = origin_of("cuda_arch_list")
    if not asked or asked.strip().lower() == "native":
        return _served_natively(here, tuple(capabilities), named)
    try:
        parsed = _parsed(here, asked)
    except ArchError:
        return skipped(f"{origin} is not valid: see cuda arch list")
    if parsed is None:
        return skipped("the list depends on the toolkit: see cuda toolkit")
    ways = {each: cuda.covers(parsed, cuda.parse(each)[0]) for each in capabilities}
    without = [each for each, way in ways.items() if not way]
    if without:
        return failed(
            f"{named}; nothing in {origin}={asked} runs on {', '.join(without)}",
            f"unset {origin}",
        )
    translated = [each for each, way in ways.items() if way == "ptx"]
    how = f"{', '.join(translated)} through PTX, which the driver compiles" if translated else ""
    return passed(joined(named, f"{origin}={asked} covers them", how))


def _served_natively(here: Here, capabilities: tuple[str, ...], named: str) -> Outcome:
    if not isinstance(here.cuda, DeviceCompiler):
        return skipped(f"{named}; there is no usable toolkit: see cuda toolkit")
    try:
        _, notes = archs.for_devices(cuda.parse(";".join(capabilities)), here.cuda)
    except ArchError as error:
        why = joined(f"{named}; {error.what}", *error.why.splitlines())
        return failed(why, pip("install", "--upgrade", "opkiln[cuda]"))
    if notes:
        return warned(joined(named, *notes), pip("install", "--upgrade", "opkiln[cuda]"))
    return passed(f"{named}; CUDA {here.cuda.version} compiles for them")


def _unwanted(here: Here) -> str:
    """Why CUDA is not checked; empty if it is."""
    if here.compiler is None:
        return "there is no host compiler: see compiler"
    if _torch_cuda(here) or here.nvidia.gpus or nvcc.available() or settings.cuda_home:
        return ""
    return "torch has no CUDA, and there is no NVIDIA GPU and no nvcc"


def _torch_cuda(here: Here) -> str | None:
    return None if here.torch is None else here.torch.cuda


def _of_host(error: ToolchainError) -> bool:
    """Whether the error is about nvcc's host compiler."""
    return error.what.startswith("nvcc ") and "host compiler" in error.what


def _candidates(here: Here) -> list[Candidate]:
    host = here.compiler
    if host is None:
        return []
    with here.probing():
        return family.candidates(nvcc, here.store.memory, _torch_cuda(here), host)


def _listed(device: DeviceCompiler) -> tuple[cuda.Arch, ...]:
    return cuda.parse(";".join(device.archs)) if device.archs else ()


def _parsed(here: Here, asked: str) -> tuple[cuda.Arch, ...] | None:
    """The list as a build reads it; None if only a toolkit could tell. Raises ArchError."""
    lowered = asked.lower()
    known: dict[str, Any] = {}
    if "all" in lowered:
        if not isinstance(here.cuda, DeviceCompiler):
            return None
        known["listed"] = _listed(here.cuda)
    if "native" in lowered:
        found = dict.fromkeys(gpu.capability for gpu in here.nvidia.gpus)
        known["native"] = cuda.parse(";".join(found)) if found else ()
    parsed: tuple[cuda.Arch, ...] = archs.grammar(CUDA).parse(asked, **known)
    return parsed


# ROCm


def rocm_toolkit(here: Here) -> Outcome:
    """There is a hipcc that works and has torch's major version."""
    wanted = here.torch is not None and bool(here.torch.hip)
    found = bool(amd.devices().gpus) or hipcc.available() or bool(settings.rocm_home)
    if not wanted and not found:
        return skipped("torch has no HIP, and there is no AMD GPU and no hipcc")
    if here.compiler is None:
        return skipped("there is no host compiler: see compiler")
    device = here.device_compiler(ROCM)
    if isinstance(device, ToolchainError):
        evidence, command = joined(device.what, *device.why.splitlines()), copyable(device.hint)
        command = as_root(command) if command.startswith("apt-get ") else command
        return failed(evidence, command) if wanted else warned(evidence, command)
    has = f"torch has HIP {here.torch.hip}" if wanted and here.torch else "torch has no HIP"
    return passed(f"HIP {device.version} in {device.home}; {has}")


def rocm_gpus(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """The list of architectures is valid, and covers each AMD GPU."""
    devices = amd.devices()
    asked, origin = origin_of("rocm_arch_list")
    native = tuple(hip.parse(";".join(gpu.arch for gpu in devices.gpus))) if devices.gpus else ()
    if not asked:
        if not devices.gpus:
            return skipped(devices.why)
        return passed(f"{hip.show(native)}; ops are built for them")
    try:
        parsed = hip.parse(asked, native=native)
    except ArchError as error:
        return failed(
            joined(f"{origin}={asked}: {error.what}", *error.why.splitlines()), f"unset {origin}"
        )
    without = [str(gpu) for gpu in native if not hip.covers(parsed, gpu)]
    if without:
        return failed(
            f"nothing in {origin}={asked} runs on {', '.join(without)}", f"unset {origin}"
        )
    covered = f", which covers {hip.show(native)}" if native else ""
    return passed(f"{origin}={asked} is {hip.show(parsed)}{covered}")


# SYCL


def sycl_toolkit(here: Here) -> Outcome:
    """There is a SYCL compiler that works: icpx, or the runtime compiler."""
    wanted = torch_has_xpu(here)
    if not wanted and not sycl.available() and not settings.sycl_cxx:
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


def sycl_device(here: Here) -> Outcome:
    """There is a device for SYCL."""
    if not torch_has_xpu(here) and not sycl.available():
        return skipped("torch has no XPU, and there is no SYCL compiler")
    missing = libsycl.no_device(settings.ocl_icd_filenames)
    if missing is None:
        return passed("there is an Intel GPU, or OpenCL's driver for the CPU")
    why, command = missing
    return warned(why, of_this_python(command))


def torch_has_xpu(here: Here) -> bool:
    """Whether torch was built for Intel GPUs."""
    torch = here.torch
    return torch is not None and os.path.exists(os.path.join(torch.path, "lib", "libtorch_xpu.so"))
