"""Options and arguments of several commands, and the store that they write to."""

from __future__ import annotations

import contextlib

import click

from opkiln.base.setting_values import parse_size
from opkiln.errors import StoreError, UnknownOp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from opkiln.builder import OpBuilder
    from opkiln.store.inventory import StoreEntry

FILE = click.Path(dir_okay=False)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
file_argument = click.argument("file", type=FILE)


def complete_op(_context: click.Context, _argument: click.Parameter, incomplete: str) -> list[str]:
    """The ops whose names start with ``incomplete``, for the shell's completion."""
    from opkiln.builder.registry import ALL_OPS

    return [name for name in ALL_OPS if name.startswith(incomplete)]


op_argument = click.argument("op", shell_complete=complete_op)
ops_argument = click.argument("ops", nargs=-1, shell_complete=complete_op)
package_option = click.option(
    "--package", metavar="PACKAGE", help="All ops of an installed package, instead of OPS."
)


def match_entries(name: str) -> Callable[[StoreEntry], bool]:
    """A function that tells whether an entry is of an op: ``OP`` of every package, or
    ``DISTRIBUTION:OP`` of one."""
    from opkiln.builder.registry import ALL_OPS, normalize

    owner, _, op = name.rpartition(":")
    if owner:
        try:
            owner = ALL_OPS[name]().distribution  # the store knows it by its import name
        except UnknownOp:
            pass  # it is no longer installed: its entries have the name it had
    owner = normalize(owner)

    def is_of_op(found: StoreEntry) -> bool:
        return found.name == op and (not owner or normalize(found.distribution) == owner)

    return is_of_op


def file_option(*names: str, help: str, **more: Any) -> Callable[[Any], Any]:
    """An option that takes a file, unless ``more`` has another type."""
    return click.option(*names, help=help, **{"type": FILE, **more})


def target_option(*, multiple: bool = False) -> Callable[[Any], Any]:
    """The option ``--target``; with ``multiple`` it may be given several times."""
    many = " May be given several times, and may name several CPUs." if multiple else ""
    return click.option(
        "--target", multiple=multiple, metavar="BACKEND[:ARCHS]",
        help="Build for this instead of this machine: cuda:8.0,9.0a+PTX, rocm:gfx90a, cpu, "
        f"cpu:x86-64-v3. Needs no GPU and no driver.{many}",
    )  # fmt: skip


@contextlib.contextmanager
def builder_for(op: str, target: str | None) -> Iterator[OpBuilder]:
    """The builder of an op for one target, or for this machine, with the target's settings.

    Raises UnknownOp, UsageError.
    """
    from opkiln.builder.registry import get_builder
    from opkiln.ship import selection

    if target is None:
        yield get_builder(op)
        return
    wanted = selection.parse(target)
    if len(wanted) != 1:
        raise click.UsageError(f"--target {target}: name one CPU")
    with selection.use_cpu(wanted[0]):
        yield selection.ask(get_builder(op), wanted[0])


def parse_size_option(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> int | None:
    """The callback of an option that takes a size."""
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a size such as 512M or 4G") from None


def writable_root() -> str:
    """The layer of the store that is written to. Raises StoreError if there is none."""
    from opkiln.store.layers import Store

    store = Store()
    if store.root is None:
        raise StoreError(
            "there is no writable store",
            why="\n".join(store.location.notes),
            hint="set OPKILN_CACHE_DIR to a writable directory",
        )
    return store.root
