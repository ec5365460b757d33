"""The toolchain of a backend: the host compiler and, if it has one, the device compiler.

CUDA has two of these: nvcc, and NVRTC for sources on ``opkiln/op.h``.
"""

from __future__ import annotations

import os
import re

from opkiln.base.build_model import NVCC, NVRTC, Toolchain, TorchSDK
from opkiln.base.model import ABI_TORCH, CPU, CUDA, ROCM, OpSpec
from opkiln.errors import ToolchainError
from opkiln.machine import facts
from opkiln.machine.toolchain import find, host
from opkiln.settings import origin_of, settings

_OP_HEADER = re.compile(rb"^[ \t]*#[ \t]*include[ \t]*[<\"]opkiln/op\.h[>\"]", re.MULTILINE)


def _family(backend: str, spec: OpSpec | None) -> find.Family:
    if backend == CUDA:
        from opkiln.machine.toolchain import nvcc, nvrtc

        return nvrtc if cuda_compiler(spec)[0] == NVRTC else nvcc
    if backend == ROCM:
        from opkiln.machine.toolchain import hipcc

        return hipcc
    from opkiln.machine.toolchain import sycl

    return sycl


def cuda_compiler(spec: OpSpec | None = None) -> tuple[str, str]:
    """(nvcc or nvrtc, why that one) for an op's CUDA sources; without a spec, for any. ``choose``
    raises where what was asked for cannot be had. Starts no process."""
    asked, origin = origin_of("cuda")
    if asked in (NVCC, NVRTC):
        return asked, f"{'the call' if origin == 'call' else origin} asks for it"
    from opkiln.machine.toolchain import nvcc, nvrtc

    if nvcc.available():
        return NVCC, "there is a CUDA toolkit"
    if settings.cuda_home:
        return NVCC, f"{origin_of('cuda_home')[1]} names a CUDA toolkit"
    if not nvrtc.available():
        return NVCC, "there is neither a CUDA toolkit nor NVRTC"
    unfit = "" if spec is None else needs_nvcc(spec)
    if unfit:
        return NVCC, unfit
    return NVRTC, "there is no CUDA toolkit"


def stands_in(backend: str, spec: OpSpec) -> bool:
    """Whether NVRTC compiles an op only because there is no toolkit. Then a build by nvcc also
    serves."""
    return backend == CUDA and settings.cuda == "auto" and cuda_compiler(spec)[0] == NVRTC


def needs_nvcc(spec: OpSpec) -> str:
    """Why NVRTC cannot compile an op's CUDA sources; empty if it can, as far as names tell."""
    if spec.abi == ABI_TORCH:
        return "the sources use torch's own headers"
    inline = dict(spec.inline)
    for source in spec.sources:
        if not source.endswith(".cu"):
            continue
        if source in inline:
            text = inline[source].encode("utf-8", "surrogateescape")
        else:
            path = os.path.join(spec.root, source)
            facts.note_file(path)
            try:
                with open(path, "rb") as file:
                    text = file.read()
            except OSError:
                continue  # planning the build reports it
        if not _OP_HEADER.search(text):
            return f"{source} does not include opkiln/op.h"
    return ""


def device_family(backend: str, spec: OpSpec) -> tuple[find.Family | None, str]:
    """(the family that ``recall`` looks in, why it cannot compile the op). For a backend and a
    machine, nothing else of an op matters to ``recall``."""
    return (None, "") if backend == CPU else (_family(backend, spec), _why_unfit(backend, spec))


def _why_unfit(backend: str, spec: OpSpec | None) -> str:
    """Why the compiler that is asked for cannot compile an op; empty if it can."""
    if spec is None or backend != CUDA or cuda_compiler(spec)[0] != NVRTC:
        return ""
    return needs_nvcc(spec)


def runtime_version(backend: str, torch: TorchSDK | None) -> str | None:
    """The version of the backend's runtime that torch was built with."""
    return None if torch is None else {CUDA: torch.cuda, ROCM: torch.hip}.get(backend)


def recall(
    memory: tuple[str, ...], backend: str, machine: str = "", spec: OpSpec | None = None
) -> Toolchain | None:
    """The compilers that ``choose`` would take; None if a probe is not remembered. Starts no
    process, writes nothing. ``machine`` is the machine to compile for, if not this one; ``spec`` is
    the op to compile."""
    toolchain = host.recall(memory, machine)
    if toolchain is None or backend == CPU:
        return toolchain
    if _why_unfit(backend, spec):
        return None
    version = runtime_version(backend, toolchain.torch)
    device = find.recall(_family(backend, spec), memory, version, toolchain)
    return None if device is None else toolchain._replace(device=device)


def choose(
    memory: tuple[str, ...], backend: str, machine: str = "", spec: OpSpec | None = None
) -> Toolchain:
    """The compilers for a backend. Those that are not remembered are probed. Raises ToolchainError
    with each candidate and why it was refused."""
    toolchain = host.choose(memory, machine)
    if backend == CPU:
        return toolchain
    if spec is not None and (why := _why_unfit(backend, spec)):
        raise ToolchainError(
            f"op {spec.title} cannot be compiled by NVRTC, which {origin_of('cuda')[1]} asks for",
            why=f"{why}; NVRTC compiles CUDA sources that do",
            hint="OPKILN_CUDA=nvcc",
        )
    version = runtime_version(backend, toolchain.torch)
    device = find.choose(_family(backend, spec), memory, version, toolchain)
    return toolchain._replace(device=device)


def note(backend: str, toolchain: Toolchain) -> str:
    """A note for a choice that works but does not fit exactly; empty for one that fits."""
    device = toolchain.device
    if backend != CUDA or device is None:
        return ""
    from opkiln.machine.toolchain import nvcc, toolkits

    notes = [f"{place.origin}: there is no {place.nvcc}" for place in toolkits.list_unfound()]
    if notes:
        notes.append(f"{device.home} is used")
    notes.append(nvcc.mismatch_note(device, runtime_version(CUDA, toolchain.torch)))
    return "; ".join(filter(None, notes))


def reason(toolchain: Toolchain, spec: OpSpec) -> str:
    """The compiler of a plan's CUDA sources and why it was chosen, in a line; empty for another
    backend."""
    device = toolchain.device
    if spec.backend != CUDA or device is None:
        return ""
    name, why = cuda_compiler(spec)
    return f"{device.family} {device.version}: {why}" if name == device.family else ""


def available(backend: str, machine: str = "", spec: OpSpec | None = None) -> bool:
    """Whether compilers for a backend are found. Starts no process."""
    if not host.available(machine):
        return False
    return backend == CPU or _family(backend, spec).available()
