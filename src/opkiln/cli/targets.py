"""``--target``: what to build for, where it is not this machine: ``cuda:8.0,9.0a``, ``cpu``."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import click

from opkiln.model import CPU, CUDA, ROCM, XPU

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from opkiln.builder import OpBuilder


class Wanted(NamedTuple):
    """A target by name: a backend and its architectures, empty for this machine's."""

    backend: str
    archs: str


def option(*, multiple: bool = False) -> Callable[[Any], Any]:
    """The option itself; with ``multiple`` it may be given several times."""
    many = " May be given several times." if multiple else ""
    return click.option(
        "--target", multiple=multiple, metavar="BACKEND[:ARCHS]",
        help="Build for this instead of this machine: cuda:8.0,9.0a+PTX, rocm:gfx90a, cpu, "
        f"cpu:x86-64-v3. Needs no GPU and no driver.{many}",
    )  # fmt: skip


def parse(text: str) -> Wanted:
    """A target as it was written. Raises click.UsageError for a backend that is none."""
    backend, _, archs = text.partition(":")
    if backend not in (CPU, CUDA, ROCM, XPU):
        raise click.UsageError(
            f"--target {text!r}: {backend!r} is no backend; there are cpu, cuda, rocm and xpu"
        )
    return Wanted(backend, archs)


@contextlib.contextmanager
def applied(wanted: Wanted | None) -> Iterator[None]:
    """Settings for the length of a block, where the target asks for another CPU."""
    from opkiln.settings import override

    if wanted is not None and wanted.backend == CPU and wanted.archs:
        with override(cpu=wanted.archs):
            yield
    else:
        yield


def builder(op: str, wanted: Wanted | None) -> OpBuilder:
    """The builder of an op for a target, or for this machine. Raises UnknownOp, UsageError."""
    from opkiln.loading.archs import nothing_asked
    from opkiln.registry import get_builder

    if wanted is None:
        return get_builder(op)
    archs = "" if wanted.backend == CPU else wanted.archs
    if not archs and nothing_asked(wanted.backend):
        archs = "all"
    return get_builder(op, backend=wanted.backend, archs=archs)
