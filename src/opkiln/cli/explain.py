"""``opkiln explain OP``: why an op is served as it is."""

from __future__ import annotations

import click

from opkiln.cli import output, targets
from opkiln.cli.op_name import complete


@click.command("explain", short_help="Say why an op is served as it is.")
@click.argument("op", shell_complete=complete)
@targets.option()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(op: str, target: str | None, as_json: bool) -> None:
    """Say why OP would be served as it is: each candidate, and why it is taken or refused.

    When the newest entry does not serve any more, also say what changed since it was built.
    """
    from opkiln.loading.explain import explain

    with targets.builder_for(op, target) as builder:
        found = explain(builder.op())
    if not as_json:
        output.data(str(found))
        return
    candidates = [each._asdict() for each in found.candidates]
    output.data_json({"schema": 1, **found._asdict(), "candidates": candidates})
