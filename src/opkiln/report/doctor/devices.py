"""Accelerators: the one that programs get; the toolkits and devices of CUDA, ROCm and SYCL."""

from __future__ import annotations

from opkiln.base.build_model import DeviceCompiler, Toolchain
from opkiln.base.model import CUDA, ROCM, XPU
from opkiln.decision import archs
from opkiln.errors import AcceleratorError, ArchError, ToolchainError
from opkiln.machine.arch import cuda, hip
from opkiln.machine.devices import amd
from opkiln.machine.toolchain import (
    choice,
    cuda_version,
    find,
    hipcc,
    libsycl,
    nvcc,
    sycl,
    toolkits,
)
from opkiln.machine.toolchain.torch_sdk import release
from opkiln.report import commands, compilers
from opkiln.report.doctor.terms import (
    Diagnosis,
    Facts,
    Missing,
    ask_child,
    copyable_command,
    failed,
    join,
    passed,
    skipped,
    warned,
)
from opkiln.settings import origin_of, settings

# Runs in a child: accelerators of other packages are their code, and a vendor's imports torch.
_ASK = """
from opkiln.accelerator import detect
from opkiln.errors import AcceleratorError
try:
    answer = detect.trace()[-1]._asdict()
except AcceleratorError as error:
    answer = {'what': error.what, 'why': error.why, 'hint': error.hint}
"""
_NO_HOST = "there is no host compiler: see compiler"


def accelerator(_: Facts) -> Diagnosis:
    """There is an accelerator: the named one, or the first that has a device."""
    asked, origin = origin_of("accelerator")
    found, reason = ask_child(_ASK)
    if reason:
        return failed(
            join(f"{origin}={asked}" if asked else "", reason), commands.unset_command(origin)
        )
    if "what" in found:
        raise AcceleratorError(**found)
    by = f"set by {origin}" if asked else "the first with a device"
    return passed(join(f"{found['name']}, {by}", found["why"]))


# CUDA


def cuda_toolkit(here: Facts) -> Diagnosis:
    """There is a CUDA toolkit that works and has torch's major version."""
    absent = toolkits.list_unfound()
    nothing = [f"{place.origin}: there is no {place.nvcc}" for place in absent]
    command = f"unset {' '.join(dict.fromkeys(place.origin for place in absent))}"
    try:
        host = _need_cuda(here)
    except Missing as reason:
        if not absent:
            raise
        return warned(join(*nothing, str(reason)), command)
    found, torch_cuda = here.cuda, choice.runtime_version(CUDA, here.torch)
    if isinstance(found, ToolchainError):
        if _blames_host_compiler(found):
            return skipped("its host compiler is refused: see nvcc host compiler")
        return _no_toolkit(found, wanted=bool(torch_cuda))
    named = {place.nvcc for place in absent}
    with here.probing():
        others = find.candidates(nvcc, here.store.memory, torch_cuda, host)
    refused = [
        f"{each.path} not taken: {each.refused}"
        for each in others
        if each.refused and each.path not in named
    ]
    note = nvcc.mismatch_note(found, torch_cuda)
    if torch_cuda and release(found.version)[0] != release(torch_cuda)[0]:
        return warned(join(note, *refused), f"unset {origin_of('skip_cuda_check')[1]}")
    fits = f"torch has {torch_cuda}" if torch_cuda else "torch has no CUDA"
    facts = join(f"CUDA {found.version} in {found.home}", note or fits, *nothing, *refused)
    return warned(facts, command) if absent else passed(facts)


def nvcc_host_compiler(here: Facts) -> Diagnosis:
    """nvcc accepts the host compiler."""
    host, found = _need_cuda(here), here.cuda
    if isinstance(found, DeviceCompiler):
        return passed(f"nvcc {found.version} accepts {found.host or host.cxx}")
    if not _blames_host_compiler(found):
        return skipped("there is no usable nvcc: see cuda toolkit")
    command = copyable_command(found.hint)
    if command.startswith("apt-get "):
        package, _, then = command.removeprefix("apt-get install ").partition(" && ")
        command = f"{commands.install_command(package)} && {then}"
    return failed(join(found), command)


def cuda_driver(here: Facts) -> Diagnosis:
    """The driver supports the CUDA versions of torch and of the toolkit."""
    devices, torch_cuda = here.nvidia, choice.runtime_version(CUDA, here.torch)
    if not devices.gpus:
        if "no NVIDIA driver" in devices.why:
            return skipped(devices.why)
        return warned(devices.why, "nvidia-smi")
    takes = devices.cuda
    facts = f"driver {devices.driver} supports CUDA up to {takes or 'an unknown version'}"
    if not takes:
        return passed(facts)
    if torch_cuda and release(torch_cuda)[0] > release(takes)[0]:
        return failed(
            f"{facts}; torch needs {torch_cuda}", commands.install_command("cuda-drivers")
        )
    toolkit = here.cuda.version if isinstance(here.cuda, DeviceCompiler) else ""
    if toolkit and release(toolkit) > release(takes):
        facts = f"{facts}; the toolkit is CUDA {toolkit}"
        command = commands.use_this_python(cuda_version.install_command(takes))
        if release(toolkit)[0] > release(takes)[0]:
            return failed(facts, command)
        return warned(f"{facts}: its binaries run, but its PTX does not", command)
    if devices.why:
        return warned(join(facts, f"left out: {devices.why}"), "nvidia-smi")
    return passed(facts)


def cuda_arch_list(here: Facts) -> Diagnosis:
    """The list of architectures is valid, and the toolkit compiles for all of them."""
    asked, origin = origin_of("cuda_arch_list")
    if not asked:
        return passed("not set: ops are built for this machine's GPUs")
    given = f"{origin}={asked}"
    try:
        parsed = _parse_list(here, asked)
    except ArchError as error:
        return failed(join(f"{given}: {join(error)}"), f"unset {origin}")
    if parsed is None:
        return skipped(f"{given} depends on the toolkit, and there is no usable one")
    facts = f"{given} is {cuda.show(parsed)}"
    if not isinstance(here.cuda, DeviceCompiler):
        return passed(f"{facts}; there is no toolkit to check it with")
    listed = archs.parse_names(CUDA, here.cuda.archs)
    kept, refused = cuda.usable(parsed, listed, here.cuda.accepts)
    if refused:
        reasons = (f"{arch}: {reason}" for arch, reason in refused)
        rest = f"export {origin}='{cuda.show(kept)}'" if kept else f"unset {origin}"
        return failed(join(given, *reasons), rest)
    return passed(f"{facts}; CUDA {here.cuda.version} compiles for all of it")


def cuda_gpus(here: Facts) -> Diagnosis:
    """Ops that are built here run on each GPU of this machine."""
    gpus = here.nvidia.gpus
    if not gpus:
        return skipped(here.nvidia.why)
    capabilities = tuple(dict.fromkeys(gpu.capability for gpu in gpus))
    named = ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in gpus)
    asked, origin = origin_of("cuda_arch_list")
    if not asked or asked.strip().lower() == "native":
        return _check_native(here, capabilities, named)
    try:
        parsed = _parse_list(here, asked)
    except ArchError:
        return skipped(f"{origin} is not valid: see cuda arch list")
    if parsed is None:
        return skipped("the list depends on the toolkit: see cuda toolkit")
    ways = {each: cuda.covers(parsed, cuda.parse(each)[0]) for each in capabilities}
    without = [each for each, way in ways.items() if not way]
    if without:
        lacks = f"nothing in {origin}={asked} runs on {', '.join(without)}"
        return failed(f"{named}; {lacks}", f"unset {origin}")
    translated = [each for each, way in ways.items() if way == "ptx"]
    how = f"{', '.join(translated)} through PTX, which the driver compiles" if translated else ""
    return passed(join(named, f"{origin}={asked} covers them", how))


def _check_native(here: Facts, capabilities: tuple[str, ...], named: str) -> Diagnosis:
    if not isinstance(here.cuda, DeviceCompiler):
        return skipped(f"{named}; there is no usable toolkit: see cuda toolkit")
    upgrade = commands.pip_command("install", "--upgrade", "opkiln[cuda]")
    try:
        _, notes = archs.archs_for_devices(cuda.parse(";".join(capabilities)), here.cuda)
    except ArchError as error:
        return failed(join(named, error), upgrade)
    if notes:
        return warned(join(named, *notes), upgrade)
    return passed(f"{named}; CUDA {here.cuda.version} compiles for them")


def _need_cuda(here: Facts) -> Toolchain:
    """The host compiler for CUDA. Raises Missing if there is none, or nothing here wants CUDA."""
    host = here.need_compiler(_NO_HOST)
    of_torch = choice.runtime_version(CUDA, here.torch)
    if not (of_torch or here.nvidia.gpus or nvcc.available() or settings.cuda_home):
        raise Missing("torch has no CUDA, and there is no NVIDIA GPU and no nvcc")
    return host


def _blames_host_compiler(error: ToolchainError) -> bool:
    """Whether the error is about nvcc's host compiler."""
    return error.what.startswith("nvcc ") and "host compiler" in error.what


def _no_toolkit(error: ToolchainError, *, wanted: bool) -> Diagnosis:
    """A failure if torch is built for the backend; else a warning, because no kernel is called."""
    command = commands.use_this_python(copyable_command(error.hint))
    command = commands.root_command(command) if command.startswith("apt-get ") else command
    return (failed if wanted else warned)(join(error), command)


def _parse_list(here: Facts, asked: str) -> tuple[cuda.CudaArch, ...] | None:
    """The list as a build reads it; None if that needs a toolkit. Raises ArchError."""
    listed: tuple[cuda.CudaArch, ...] = ()
    if "all" in asked.lower():
        if not isinstance(here.cuda, DeviceCompiler):
            return None
        listed = archs.parse_names(CUDA, here.cuda.archs)
    return cuda.parse(asked, native=archs.devices(CUDA), listed=listed)


# ROCm


def rocm_toolkit(here: Facts) -> Diagnosis:
    """There is a hipcc that works and has torch's major version."""
    wanted = choice.runtime_version(ROCM, here.torch)
    if not (wanted or amd.devices().gpus or hipcc.available() or settings.rocm_home):
        return skipped("torch has no HIP, and there is no AMD GPU and no hipcc")
    here.need_compiler(_NO_HOST)
    device = here.device_compiler(ROCM)
    if isinstance(device, ToolchainError):
        return _no_toolkit(device, wanted=bool(wanted))
    has = f"torch has HIP {wanted}" if wanted else "torch has no HIP"
    return passed(f"HIP {device.version} in {device.home}; {has}")


def rocm_gpus(_: Facts) -> Diagnosis:
    """The list of architectures is valid, and covers each AMD GPU."""
    devices = amd.devices()
    asked, origin = origin_of("rocm_arch_list")
    native = archs.devices(ROCM)
    if not asked:
        if not devices.gpus:
            return skipped(devices.why)
        return passed(f"{hip.show(native)}; ops are built for them")
    given = f"{origin}={asked}"
    try:
        parsed = hip.parse(asked, native=native)
    except ArchError as error:
        return failed(join(f"{given}: {join(error)}"), f"unset {origin}")
    without = [str(gpu) for gpu in native if not hip.covers(parsed, gpu)]
    if without:
        return failed(f"nothing in {given} runs on {', '.join(without)}", f"unset {origin}")
    covered = f", which covers {hip.show(native)}" if native else ""
    return passed(f"{given} is {hip.show(parsed)}{covered}")


# SYCL


def sycl_toolkit(here: Facts) -> Diagnosis:
    """There is a SYCL compiler that works: icpx, or the runtime compiler."""
    wanted = compilers.supports(XPU, here.torch)
    if not (wanted or sycl.available() or settings.sycl_cxx):
        return skipped("torch has no XPU, and there is no SYCL compiler")
    here.need_compiler(_NO_HOST)
    device = here.device_compiler(XPU)
    if isinstance(device, ToolchainError):
        return _no_toolkit(device, wanted=wanted)
    return passed(f"{device.family} {device.version}, {device.path}")


def sycl_device(here: Facts) -> Diagnosis:
    """There is a device for SYCL."""
    if not compilers.supports(XPU, here.torch) and not sycl.available():
        return skipped("torch has no XPU, and there is no SYCL compiler")
    missing = libsycl.why_no_device(settings.ocl_icd_filenames)
    if missing is None:
        return passed("there is an Intel GPU, or OpenCL's driver for the CPU")
    why, command = missing
    return warned(why, commands.use_this_python(command))
