"""``opkiln tuned``: the choices that ops with ``tune=`` made by measuring."""

from __future__ import annotations

import os

import click

from opkiln.cli import output
from opkiln.cli.arguments import json_option, writable_root
from opkiln.errors import StoreError, UsageError
from opkiln.report.layout import columns
from opkiln.writing import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.store.tuned import Choice


@click.group("tuned", short_help="Show, move and forget what ops measured for themselves.")
def command() -> None:
    """Show what ops with tune= measured, move it to other machines, and forget it.

    A choice is for one op, one device model and one class of shapes. It is measured at the first
    such call and kept in the store.
    """


@command.command("list")
@click.argument("ops", nargs=-1)
@json_option
def list_(ops: tuple[str, ...], as_json: bool) -> None:
    """List the choices of OPS, or all: op, device, shapes, choice, and what was measured."""
    found = _choices(ops)
    if as_json:
        rows = [{**each.question._asdict(), "choice": each.candidate,
                 "microseconds": each.microseconds} for each in found]  # fmt: skip
        output.data_json({"schema": 1, "tuned": rows})
    elif found:
        output.data(columns([("op", "device", "for", "choice", "measured"), *map(_row, found)]))
    else:
        output.say("nothing was measured yet")


@command.command("export")
@click.argument("file", type=click.Path(dir_okay=False))
@click.argument("ops", nargs=-1)
def export(file: str, ops: tuple[str, ...]) -> None:
    """Write the choices of OPS, or all, to FILE, for `opkiln tuned import` on other machines.

    A choice serves on devices of the model that it was measured on, and as long as the op's sources
    and candidates are the same.
    """
    from opkiln.store import tuned

    found = _choices(ops)
    try:
        replace(file, tuned.exported(found))
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    output.say(f"wrote {len(found)} choice{'' if len(found) == 1 else 's'} to {file}")


@command.command("import")
@click.argument("file", type=click.Path(dir_okay=False, exists=True))
def import_(file: str) -> None:
    """Take the choices of FILE into the store. They replace those that are there."""
    from opkiln.store import location, tuned

    found = tuned.imported(file)
    root = writable_root()
    location.claim(root)
    try:
        for each in found:
            tuned.keep(root, each)
    except OSError as error:
        raise StoreError(f"{root} cannot be written", why=str(error)) from error
    output.say(f"took {len(found)} choice{'' if len(found) == 1 else 's'} from {file}")


@command.command("clear")
@click.argument("ops", nargs=-1)
def clear(ops: tuple[str, ...]) -> None:
    """Forget the choices of OPS, or all: the next call measures again."""
    from opkiln.store import tuned

    found = _choices(ops)
    root = writable_root()
    for each in found:
        try:
            tuned.remove(root, each)
        except FileNotFoundError:
            pass  # another process was faster
        except OSError as error:
            raise StoreError(f"{root} cannot be written", why=str(error)) from error
    output.say(f"forgot {len(found)} choice{'' if len(found) == 1 else 's'}")


def _choices(ops: tuple[str, ...]) -> list[Choice]:
    """Those of the ops, or all, in order. An op is OP, or DISTRIBUTION:OP."""
    from opkiln.store import tuned

    root = writable_root()
    found = list(tuned.kept(root)) if os.path.isdir(root) else []
    if ops:
        found = [each for each in found if _is_of(each, ops)]
    return sorted(found)


def _is_of(choice: Choice, ops: tuple[str, ...]) -> bool:
    asked = choice.question
    return asked.op in ops or f"{asked.distribution}:{asked.op}" in ops


def _row(choice: Choice) -> tuple[str, ...]:
    asked = choice.question
    times = ", ".join(f"{name}: {value:g} us" for name, value in choice.microseconds.items())
    for_ = f"{asked.values} {asked.shape}".strip()
    return f"{asked.distribution}:{asked.op}", asked.device, for_, choice.candidate, times
