"""The compilers and toolkits of this machine: which one is used, and why the others are not.

Host compilers are run once to identify them, which is quick; the answer is remembered. Running a
toolkit can take seconds, so that is done only if torch is built for its backend, if the answer is
remembered, or if the caller wants it (``probe``). Otherwise the toolkit is only listed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from opkiln.base.build_model import TorchSDK
from opkiln.base.model import CPU, CUDA, ROCM, XPU
from opkiln.errors import ToolchainError
from opkiln.machine.toolchain import (
    choice,
    find,
    hipcc,
    host,
    libsycl,
    probing,
    toolkits,
    torch_sdk,
)
from opkiln.machine.toolchain.find import Compiler
from opkiln.settings import origin_of

BACKENDS = {CPU: "C++", CUDA: "CUDA", ROCM: "ROCm", XPU: "SYCL"}
_WITH_TOOLKIT = (CUDA, ROCM, XPU)
NO_HOST = "not asked: it needs a C++ compiler"
PROBE = "opkiln report --probe"


class Tool(NamedTuple):
    """A compiler or toolkit. At most one of each backend is taken."""

    backend: str
    path: str
    origin: str  # how it was found: CXX, PATH, a directory
    version: str  # "" if it was not run, or did not say
    taken: bool
    refused: str  # why it is not taken
    asked: bool = True  # False: it was found, but not run to identify it
    unobserved: str = ""  # why what it read was not known when it was last used


def survey(memory: tuple[str, ...], torch: TorchSDK | None, *, probe: bool) -> tuple[Tool, ...]:
    """Every compiler, by backend, in order of preference."""
    tools = [
        tool._replace(unobserved=probing.why_unobserved(memory, tool.path)) if tool.taken else tool
        for tool in _rank(CPU, host.candidates(memory))
    ]
    usable = any(tool.taken for tool in tools)
    for backend in _WITH_TOOLKIT:
        tools += _toolkits(memory, backend, torch, probe=probe, has_host=usable)
    return tuple(tools)


def list_missing_toolkits() -> tuple[Tool, ...]:
    """The toolkits that variables name (``origin``) but that do not exist."""
    return tuple(
        tool for backend in _WITH_TOOLKIT for tool in _list_all(backend, "") if tool.refused
    )


def supports(backend: str, torch: TorchSDK | None) -> bool:
    """Whether torch is built for a backend."""
    if torch is None:
        return False
    if backend == XPU:
        return os.path.exists(os.path.join(torch.path, "lib", "libtorch_xpu.so"))
    return bool(torch.cuda if backend == CUDA else torch.hip)


def _rank(backend: str, candidates: Iterable[Compiler]) -> list[Tool]:
    """Candidates as tools: the first that is not refused is taken."""
    tools: list[Tool] = []
    best = ""
    for each in candidates:
        refused = each.refused or (f"found after {best}" if best else "")
        tools.append(Tool(backend, each.path, each.origin, each.version, not refused, refused))
        best = best or ("" if each.refused else each.path)
    return tools


def _toolkits(
    memory: tuple[str, ...], backend: str, torch: TorchSDK | None, *, probe: bool, has_host: bool
) -> list[Tool]:
    from opkiln.machine.toolchain import find, hipcc, nvcc, sycl

    if not has_host:
        return _list_all(backend, NO_HOST)
    families: dict[str, find.Family] = {CUDA: nvcc, ROCM: hipcc, XPU: sycl}
    try:
        if not (probe or supports(backend, torch)) and choice.recall(memory, backend) is None:
            name = BACKENDS[backend]
            lacks = "there is no torch" if torch is None else f"torch is not built for {name}"
            return _list_all(backend, f"not asked: {lacks}")
        version, compiler = choice.runtime_version(backend, torch), host.choose(memory)
        found = find.candidates(families[backend], memory, version, compiler)
        return _rank(backend, found)
    # The named launcher or host compiler cannot be used, or torch cannot be read. Then no toolkit
    # can be used.
    except (ToolchainError, OSError) as error:
        return _list_all(backend, error.what if isinstance(error, ToolchainError) else str(error))


def _list_all(backend: str, why: str) -> list[Tool]:
    """The toolkits whose files exist, and those that a variable names but that do not exist."""
    return [
        Tool(backend, each.path, each.origin, "", False, each.refused or why, bool(each.refused))
        for each in _possible_toolkits(backend)
    ]


def _possible_toolkits(backend: str) -> list[Compiler]:
    """Each possible toolkit of a backend. One that is named but does not exist is refused."""
    missing = "no such program"
    if backend == CUDA:
        absent = [Compiler(place.nvcc, place.origin, missing) for place in toolkits.list_unfound()]
        return absent + [Compiler(_home(each.nvcc), each.origin) for each in toolkits.find_nvcc()]
    if backend == ROCM:
        named = origin_of("rocm_home")[1]
        found = hipcc.hipcc_candidates()
        return [each for each in found if not each.refused or each.origin == named]
    path, origin = origin_of("sycl_cxx")
    if path:
        return [
            Compiler(
                find.find_program(path) or path, origin, "" if find.find_program(path) else missing
            )
        ]
    programs = [Compiler(*each) for each in libsycl.programs() if find.find_program(each[0])]
    library = libsycl.find_installed()
    return [*programs, *([Compiler(library, libsycl.PACKAGE)] if library else [])]


def _home(program: str) -> str:
    """The toolkit that an nvcc belongs to; the nvcc itself if it is only a script."""
    directory = os.path.dirname(program)
    is_toolkit = os.path.exists(os.path.join(directory, "nvcc.profile"))
    return os.path.dirname(directory) if is_toolkit else program


def describe_torch(torch: TorchSDK | None, error: str = "") -> str:
    """torch's version and what it was built with, in one line."""
    if torch is None:
        return f"cannot be read: {error}" if error else "not installed"
    backends = [f"CUDA {torch.cuda}"] if torch.cuda else []
    backends += [f"HIP {torch.hip}"] if torch.hip else []
    abi = "C++11 ABI" if torch.cxx11_abi else "pre-C++11 ABI"
    stable = "" if torch_sdk.has_stable_abi(torch) else ", no stable ABI"
    return f"{torch.version}, {' and '.join(backends) or 'no CUDA, no HIP'}, {abi}{stable}"
