"""``opkiln check``: whether every op is there, ready to be loaded."""

from __future__ import annotations

import os
from typing import NamedTuple

import click

from opkiln.cli import output
from opkiln.cli.op_name import complete
from opkiln.errors import UnknownOp, UsageError
from opkiln.report.layout import columns


class Checked(NamedTuple):
    """One op."""

    op: str
    status: str
    reason: str
    path: str


@click.command("check", short_help="Exit with 1 unless every op is cached.")
@click.argument("ops", nargs=-1, required=True, shell_complete=complete, metavar="OPS|FILE…")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(ops: tuple[str, ...], as_json: bool) -> int:
    """Say what loading each of OPS here would come to; exit with 1 unless all are cached.

    One that is not cached would compile, fall back to its reference, or fail. An argument that is
    no op is a file with one op per line; # starts a comment. Nothing is built. For an image or a
    node that must be warm: run it last, or before the job.
    """
    from opkiln.decision.terms import CACHED, WOULD_COMPILE

    checked = [_check(name) for name in _named(ops)]
    missing = [each for each in checked if each.status != CACHED]
    cold = [each for each in missing if each.status == WOULD_COMPILE]
    if as_json:
        rows = [each._asdict() for each in checked]
        output.data_json({"schema": 1, "ops": rows, "would_compile": [each.op for each in cold]})
    else:
        output.data(columns((each.op, each.status, each.reason or each.path) for each in checked))
        if cold:
            output.say("hint: opkiln build " + " ".join(each.op for each in cold))
    return output.FOUND if missing else 0


def _named(arguments: tuple[str, ...]) -> list[str]:
    """The ops that the arguments mean, each once. Raises UsageError."""
    from opkiln.registry import ALL_OPS

    names: list[str] = []
    for argument in arguments:
        try:
            ALL_OPS[argument]
        except UnknownOp as error:
            if not os.path.exists(argument):
                raise UsageError(
                    f"{argument!r} is neither an op nor a file", why=error.why, hint=error.hint
                ) from None
            names += _listed(argument)
        else:
            names.append(argument)
    return list(dict.fromkeys(names))


def _listed(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a list of ops", why=str(error)) from None
    return [line for line in lines if line]


def _check(name: str) -> Checked:
    from opkiln.decision.decide import decide
    from opkiln.decision.terms import Request, summary
    from opkiln.registry import get_builder

    return Checked(name, *summary(decide(Request(get_builder(name).op()))))
