"""``opkiln report``: what works here, what does not, and why."""

from __future__ import annotations

import click

from opkiln.cli import output


@click.command("report", short_help="Show ops, environment, store and settings.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every setting.")
def command(as_json: bool) -> None:
    """Show the ops, the environment, the store and the settings in force.

    An op is cached when loading it compiles nothing, and compatible when its native version can be
    had here at all. Nothing is built, and torch is not imported.
    """
    from opkiln.report import collect, text

    found = collect.collect()
    if as_json:
        output.data_json(collect.as_json(found))
    else:
        output.data(text.render(found, colour=output.colour()))
