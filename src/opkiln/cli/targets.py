"""``--target``: what to build for, where it is not this machine: ``cuda:8.0,9.0a``, ``cpu``."""

from __future__ import annotations

import contextlib

import click

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from opkiln.builder import OpBuilder


def option(*, multiple: bool = False) -> Callable[[Any], Any]:
    """The option itself; with ``multiple`` it may be given several times."""
    many = " May be given several times, and name several CPUs." if multiple else ""
    return click.option(
        "--target", multiple=multiple, metavar="BACKEND[:ARCHS]",
        help="Build for this instead of this machine: cuda:8.0,9.0a+PTX, rocm:gfx90a, cpu, "
        f"cpu:x86-64-v3. Needs no GPU and no driver.{many}",
    )  # fmt: skip


@contextlib.contextmanager
def builder_for(op: str, target: str | None) -> Iterator[OpBuilder]:
    """The builder of an op for one target, or for this machine, and the settings it wants.

    Raises UnknownOp, UsageError.
    """
    from opkiln.registry import get_builder
    from opkiln.ship import selection

    if target is None:
        yield get_builder(op)
        return
    wanted = selection.parse(target)
    if len(wanted) != 1:
        raise click.UsageError(f"--target {target}: name one CPU")
    with selection.applied(wanted[0]):
        yield selection.ask(get_builder(op), wanted[0])
