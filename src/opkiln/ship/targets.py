"""What to build for, by name, where it is not this machine: ``cuda:8.0,9.0a``, ``cpu``."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from opkiln.errors import UsageError
from opkiln.model import CPU, CUDA, ROCM, XPU

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.builder import OpBuilder

BACKENDS = (CPU, CUDA, ROCM, XPU)


class Wanted(NamedTuple):
    """A backend and what of it: architectures, or one CPU; empty for this machine's."""

    backend: str
    archs: str = ""

    def __str__(self) -> str:
        return f"{self.backend}:{self.archs}" if self.archs else self.backend


def parse(text: str) -> tuple[Wanted, ...]:
    """The targets that a text names. Raises UsageError for a backend that is none.

    One library holds code for many GPU architectures, and for one CPU: a list of CPUs is a target
    for each.
    """
    backend, _, archs = text.strip().partition(":")
    if backend not in BACKENDS:
        raise UsageError(
            f"{text!r} is no target: {backend!r} is no backend",
            why="backends are " + ", ".join(BACKENDS),
            hint="--target cuda:8.0,9.0a+PTX --target cpu:x86-64-v3",
        )
    if backend == CPU and archs:
        levels = dict.fromkeys(level.strip() for level in archs.replace(";", ",").split(","))
        return tuple(Wanted(backend, level) for level in levels if level)
    return (Wanted(backend, archs.strip()),)


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
    from opkiln.loading.archs import nothing_asked

    if wanted is None:
        return builder
    archs = "" if wanted.backend == CPU else wanted.archs
    if not archs and nothing_asked(wanted.backend):
        archs = "all"
    builder.ask_for(wanted.backend, archs)
    return builder
