"""The toolchain of a backend: the host compiler and, if it has one, the device compiler."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from opkiln.model import CPU, CUDA, ROCM, XPU, Toolchain
from opkiln.toolchain import host

# A compiler family's module has recall, choose, available and evidence, as ``host`` does.
_FAMILIES = {CUDA: "nvcc", ROCM: "hipcc", XPU: "sycl"}


def _family(backend: str) -> Any:
    return import_module(f"opkiln.toolchain.{_FAMILIES[backend]}")


def _wanted(backend: str, toolchain: Toolchain) -> str | None:
    """The version of the backend's runtime that torch was built with."""
    torch = toolchain.torch
    return None if torch is None else {CUDA: torch.cuda, ROCM: torch.hip}.get(backend)


def recall(memory: tuple[str, ...], backend: str, machine: str = "") -> Toolchain | None:
    """The compilers that ``choose`` would take, if their probes are remembered.

    Starts no process, writes nothing. ``machine``: the one to compile for, if it is another.
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


def evidence(
    memory: tuple[str, ...], backend: str, toolchain: Toolchain
) -> dict[str, list[Any]] | None:
    """The facts behind the choice of these compilers, for ``stat`` to check; None if it changed."""
    facts = host.evidence(memory, toolchain)
    if facts is None or backend == CPU:
        return facts
    device = toolchain.device
    more = None if device is None else _family(backend).evidence(memory, device)
    return None if more is None else {name: [*facts[name], *more[name]] for name in facts}
