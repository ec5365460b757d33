"""The toolchain of a backend: the host compiler and, if it has one, the device compiler."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from opkiln import evidence
from opkiln.build_model import Toolchain
from opkiln.model import CPU, CUDA, ROCM, XPU
from opkiln.toolchain import host

# A family's module has recall, choose and available, as ``host`` does, and evidence.
_FAMILIES = {CUDA: "nvcc", ROCM: "hipcc", XPU: "sycl"}


def _family(backend: str) -> Any:
    return import_module(f"opkiln.toolchain.{_FAMILIES[backend]}")


def _wanted(backend: str, toolchain: Toolchain) -> str | None:
    """The version of the backend's runtime that torch was built with."""
    torch = toolchain.torch
    return None if torch is None else {CUDA: torch.cuda, ROCM: torch.hip}.get(backend)


def recall(memory: tuple[str, ...], backend: str, machine: str = "") -> Toolchain | None:
    """The compilers that ``choose`` would take, if their probes are remembered.

    Starts no process, writes nothing. ``machine`` is the machine to compile for, if not this one.
    """
    toolchain = host.recall(memory, machine)
    if toolchain is None or backend == CPU:
        return toolchain
    device = _family(backend).recall(memory, _wanted(backend, toolchain), toolchain)
    return None if device is None else toolchain._replace(device=device)


def choose(memory: tuple[str, ...], backend: str, machine: str = "") -> Toolchain:
    """The compilers for a backend. Those that are not remembered are probed.

    Raises ToolchainError with each candidate and why it was refused.
    """
    toolchain = host.choose(memory, machine)
    if backend == CPU:
        return toolchain
    device = _family(backend).choose(memory, _wanted(backend, toolchain), toolchain)
    return toolchain._replace(device=device)


def note(backend: str, toolchain: Toolchain) -> str:
    """A note for a choice that works but does not fit exactly; empty for one that fits."""
    if backend != CUDA or toolchain.device is None:
        return ""
    nvcc, device = _family(CUDA), toolchain.device
    said = (nvcc.unfound_note(device), nvcc.mismatch_note(device, _wanted(CUDA, toolchain)))
    return "; ".join(filter(None, said))


def available(backend: str, machine: str = "") -> bool:
    """Whether compilers for a backend are found. Starts no process."""
    return host.available(machine) and (backend == CPU or bool(_family(backend).available()))


def add_evidence(memory: tuple[str, ...], backend: str, toolchain: Toolchain) -> None:
    """Record the evidence for the chosen device compiler. ``recall`` does it for the host's."""
    if toolchain.device is None:
        return
    facts = _family(backend).evidence(memory, toolchain.device)
    if facts is None:
        evidence.incomplete()
    else:
        evidence.add(facts["unchanged"], facts["absent"])
