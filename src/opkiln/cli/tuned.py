"""``opkiln tuned``: the choices that ops with ``tune=`` made by measuring."""

from __future__ import annotations

import os

import click

from opkiln.cli import output
from opkiln.cli.options import json_option, writable_root
from opkiln.errors import StoreError
from opkiln.report.layout import columns, count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.store.tuned import TunedChoice


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
    if not found and not as_json:
        output.say("nothing was measured yet")
        return
    document, rows = [], [("op", "device", "for", "choice", "measured")]
    for asked, choice, times in found:
        document.append({**asked._asdict(), "choice": choice, "microseconds": times})
        measured = ", ".join(f"{name}: {value:g} us" for name, value in times.items())
        for_ = f"{asked.values} {asked.shape}".strip()
        rows.append((f"{asked.distribution}:{asked.op}", asked.device, for_, choice, measured))
    output.answer(as_json, {"tuned": document}, columns(rows))


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
    output.say(f"forgot {count(len(found), 'choice')}")


def _choices(ops: tuple[str, ...]) -> list[TunedChoice]:
    """The choices of the ops, or all, sorted. An op is OP, or DISTRIBUTION:OP."""
    from opkiln.store import tuned

    root = writable_root()
    found = list(tuned.read_choices(root)) if os.path.isdir(root) else []
    if ops:
        names = ((each, each.question.op, each.question.distribution) for each in found)
        found = [each for each, op, owner in names if op in ops or f"{owner}:{op}" in ops]
    return sorted(found)
