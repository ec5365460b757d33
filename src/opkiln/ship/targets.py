"""What to build for, by name, where it is not this machine: ``cuda:8.0,9.0a``, ``cpu``."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from opkiln.errors import ArchError, UsageError
from opkiln.model import CPU, CUDA, ROCM, XPU

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.builder import OpBuilder

BACKENDS = (CPU, CUDA, ROCM, XPU)
_EXAMPLES = {CPU: "cpu:x86-64-v3", CUDA: "cuda:8.0,9.0a+PTX", ROCM: "rocm:gfx90a"}
_LISTS = ("native", "all", "all-major")  # what this machine's GPUs or toolkit have


class Wanted(NamedTuple):
    """A backend and what of it: architectures, or one CPU; empty for this machine's."""

    backend: str
    archs: str = ""

    def __str__(self) -> str:
        return f"{self.backend}:{self.archs}" if self.archs else self.backend


def parse(text: str) -> tuple[Wanted, ...]:
    """The targets that a text names. Raises UsageError for what is no backend, CPU or arch list.

    One library holds code for many GPU architectures, and for one CPU: a list of CPUs is a target
    for each.
    """
    backend, colon, archs = text.strip().partition(":")
    if backend not in BACKENDS:
        raise UsageError(
            f"{text!r} is no target: {backend!r} is no backend",
            why="backends are " + ", ".join(BACKENDS),
            hint="--target cuda:8.0,9.0a+PTX --target cpu:x86-64-v3",
        )
    names = [name.strip() for name in archs.replace(";", ",").split(",")] if colon else []
    if not all(names) or (":" in archs and backend != ROCM):
        raise UsageError(
            f"{text!r} is no target: it names nothing, or two backends",
            why="a target is a backend, and after a colon its CPUs or architectures",
            hint="--target cpu:x86-64-v2,x86-64-v3 --target cuda:8.0,9.0a+PTX",
        )
    _check(text, backend, names)
    if backend == CPU and names:
        return tuple(Wanted(backend, name) for name in dict.fromkeys(names))
    return (Wanted(backend, archs.strip()),)


def _check(text: str, backend: str, names: list[str]) -> None:
    """Refuse names that mean nothing before hours are spent on those that do. Raises UsageError."""
    from opkiln import machine
    from opkiln.arch import cpu

    here = machine.architecture()
    try:
        for name in names if backend == CPU else ():
            cpu.parse(name, cpu.machine_of(name, here), cpu.features_of(machine.cpu_flags()))
        named = [name for name in names if name.lower().partition("+")[0] not in _LISTS]
        if backend in (CUDA, ROCM) and named:
            from opkiln.decision.archs import grammar

            grammar(backend).parse(";".join(named))
    except ArchError as error:
        raise UsageError(
            f"{text!r} is no target: {error.what}",
            why=error.why,
            hint=f"--target {_EXAMPLES[backend]}",
        ) from None


@contextlib.contextmanager
def applied(wanted: Wanted | None) -> Iterator[None]:
    """Settings for the length of a block, where the target asks for another CPU."""
    from opkiln.settings import override

    if wanted is not None and wanted.backend == CPU and wanted.archs:
        with override(cpu=wanted.archs):
            yield
    else:
        yield


def ask(builder: OpBuilder, wanted: Wanted | None) -> OpBuilder:
    """Have a new builder serve a target. Raises UnknownBackend where its op has no such version.

    For GPUs without a word of which, and none here: every architecture that the toolkit has.
    """
    from opkiln.decision.archs import nothing_asked

    if wanted is None:
        return builder
    archs = "" if wanted.backend == CPU else wanted.archs
    if not archs and nothing_asked(wanted.backend):
        archs = "all"
    builder.ask_for(wanted.backend, archs)
    return builder
