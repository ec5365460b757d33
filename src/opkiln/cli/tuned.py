"""``opkiln tuned``: the choices that ops with ``tune=`` made by measuring."""

from __future__ import annotations

import os

import click

from opkiln.cli import output
from opkiln.cli.arguments import json_option, writable_root
from opkiln.errors import StoreError
from opkiln.report.layout import columns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.store.tuned import Choice


@click.group("tuned", short_help="Show and forget what ops measured for themselves.")
def command() -> None:
    """Show what ops with tune= measured, and forget it.

    A choice is for one op, one device model and one class of shapes. It is measured at the first
    such call and kept in the store. opkiln.ensure gives the choices of rank 0 to all ranks.
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
