"""CUDA: the toolkit, its host compiler, the driver, the GPUs and the list they are built for."""

from __future__ import annotations

from typing import Any

from opkiln.arch import cuda as grammar
from opkiln.decision import archs
from opkiln.errors import ArchError, ToolchainError
from opkiln.model import CUDA, DeviceCompiler
from opkiln.report.doctor.finding import Outcome, copyable, failed, joined, passed, skipped, warned
from opkiln.report.doctor.here import Here, of_this_python, pip
from opkiln.report.doctor.packages import install
from opkiln.settings import origin_of, settings
from opkiln.toolchain import cuda_version, nvcc, toolkits
from opkiln.toolchain.torch_sdk import release


def toolkit(here: Here) -> Outcome:
    """A CUDA toolkit is there, works, and is of torch's major version."""
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
        # Without CUDA in torch no kernel is called here: then it is only that none can be built.
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


def host_compiler(here: Here) -> Outcome:
    """nvcc takes the host compiler that it is given."""
    if reason := _unwanted(here):
        return skipped(reason)
    found = here.cuda
    if isinstance(found, DeviceCompiler):
        host = found.host or (here.compiler.cxx if here.compiler else "")
        return passed(f"nvcc {found.version} takes {host}")
    if not _of_host(found):
        return skipped("no nvcc can be asked: see cuda toolkit")
    command = copyable(found.hint)
    if command.startswith("apt-get "):
        package, _, then = command.removeprefix("apt-get install ").partition(" && ")
        command = f"{install(package)} && {then}"
    return failed(joined(found.what, *found.why.splitlines()), command)


def driver(here: Here) -> Outcome:
    """The driver takes what torch and the toolkit make."""
    devices, torch_cuda = here.nvidia, _torch_cuda(here)
    if not devices.gpus:
        if "no NVIDIA driver" in devices.why:
            return skipped(devices.why)
        return warned(devices.why, "nvidia-smi")
    takes = devices.cuda
    facts = f"driver {devices.driver} takes CUDA up to {takes or 'a version that it does not say'}"
    toolkit = here.cuda.version if isinstance(here.cuda, DeviceCompiler) else ""
    if not takes:
        return passed(facts)
    if torch_cuda and release(torch_cuda)[0] > release(takes)[0]:
        return failed(f"{facts}; torch needs {torch_cuda}", install("cuda-drivers"))
    if toolkit and release(toolkit)[0] > release(takes)[0]:
        command = of_this_python(cuda_version.fitting(takes))
        return failed(f"{facts}; the toolkit makes CUDA {toolkit}", command)
    if toolkit and release(toolkit) > release(takes):
        return warned(
            f"{facts}; the toolkit is CUDA {toolkit}: its binaries run, but not its PTX",
            of_this_python(cuda_version.fitting(takes)),
        )
    left_out = f"left out: {devices.why}" if devices.why else ""
    return warned(joined(facts, left_out), "nvidia-smi") if left_out else passed(facts)


def arch_list(here: Here) -> Outcome:
    """The list of architectures can be read, and the toolkit compiles for all of it."""
    asked, origin = origin_of("cuda_arch_list")
    if not asked:
        return passed("none is set: ops are built for this machine's GPUs")
    try:
        parsed = _parsed(here, asked)
    except ArchError as error:
        return failed(
            joined(f"{origin}={asked}: {error.what}", *error.why.splitlines()), f"unset {origin}"
        )
    if parsed is None:
        return skipped(f"{origin}={asked} is for a toolkit to say, and none can be used")
    shown = grammar.show(parsed)
    if not isinstance(here.cuda, DeviceCompiler):
        return passed(f"{origin}={asked} is {shown}; no toolkit was asked about it")
    kept, refused = grammar.usable(parsed, _listed(here.cuda), here.cuda.accepts)
    if refused:
        reasons = (f"{arch}: {reason}" for arch, reason in refused)
        rest = f"export {origin}='{grammar.show(kept)}'" if kept else f"unset {origin}"
        return failed(joined(f"{origin}={asked}", *reasons), rest)
    return passed(f"{origin}={asked} is {shown}, for which CUDA {here.cuda.version} compiles")


def gpus(here: Here) -> Outcome:
    """What is built runs on each GPU of this machine."""
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
        return skipped(f"{origin} cannot be read: see cuda arch list")
    if parsed is None:
        return skipped("no toolkit says what the list comes to: see cuda toolkit")
    ways = {each: grammar.covers(parsed, grammar.parse(each)[0]) for each in capabilities}
    without = [each for each, way in ways.items() if not way]
    if without:
        return failed(
            f"{named}; {origin}={asked} has nothing that runs on {', '.join(without)}",
            f"unset {origin}",
        )
    translated = [each for each, way in ways.items() if way == "ptx"]
    how = f"{', '.join(translated)} by PTX that the driver translates" if translated else ""
    return passed(joined(named, f"{origin}={asked} covers them", how))


def _served_natively(here: Here, capabilities: tuple[str, ...], named: str) -> Outcome:
    if not isinstance(here.cuda, DeviceCompiler):
        return skipped(f"{named}; no toolkit compiles for them: see cuda toolkit")
    try:
        _, notes = archs.for_devices(grammar.parse(";".join(capabilities)), here.cuda)
    except ArchError as error:
        why = joined(f"{named}; {error.what}", *error.why.splitlines())
        return failed(why, pip("install", "--upgrade", "opkiln[cuda]"))
    if notes:
        return warned(joined(named, *notes), pip("install", "--upgrade", "opkiln[cuda]"))
    return passed(f"{named}; CUDA {here.cuda.version} compiles for them")


def _unwanted(here: Here) -> str:
    """Why nothing of CUDA is to be checked; empty where it is."""
    if here.compiler is None:
        return "there is no host compiler: see compiler"
    if _torch_cuda(here) or here.nvidia.gpus or nvcc.available() or settings.cuda_home:
        return ""
    return "torch has no CUDA, and there is neither a GPU of NVIDIA's nor an nvcc"


def _torch_cuda(here: Here) -> str | None:
    return None if here.torch is None else here.torch.cuda


def _of_host(error: ToolchainError) -> bool:
    """Whether it is the host compiler that nvcc objects to."""
    return error.what.startswith("nvcc ") and "host compiler" in error.what


def _candidates(here: Here) -> list[Any]:
    host = here.compiler
    if host is None:
        return []
    with here.probing():
        return list(nvcc.candidates(here.store.memory, _torch_cuda(here), host))


def _listed(device: DeviceCompiler) -> tuple[grammar.Arch, ...]:
    return grammar.parse(";".join(device.archs)) if device.archs else ()


def _parsed(here: Here, asked: str) -> tuple[grammar.Arch, ...] | None:
    """The list as a build reads it; None where only a toolkit could tell. Raises ArchError."""
    lowered = asked.lower()
    known: dict[str, Any] = {}
    if "all" in lowered:
        if not isinstance(here.cuda, DeviceCompiler):
            return None
        known["listed"] = _listed(here.cuda)
    if "native" in lowered:
        found = dict.fromkeys(gpu.capability for gpu in here.nvidia.gpus)
        known["native"] = grammar.parse(";".join(found)) if found else ()
    parsed: tuple[grammar.Arch, ...] = archs.grammar(CUDA).parse(asked, **known)
    return parsed
