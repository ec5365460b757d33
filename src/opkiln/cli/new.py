"""``opkiln new NAME``: a package with an op, ready to be edited."""

from __future__ import annotations

import click

from opkiln.cli import output
from opkiln.ship import scaffold


@click.command("new", short_help="Write a package with an op, ready to be edited.")
@click.argument("name")
@click.option(
    "--backend", type=click.Choice(scaffold.BACKENDS), default=scaffold.SETUPTOOLS,
    show_default=True, help="What builds its wheels.",
)  # fmt: skip
def command(name: str, backend: str) -> None:
    """Write a package called NAME into a new directory of that name.

    It has one op for the CPU and for GPUs with its reference and its gradient, tests that pass,
    pyproject.toml, and a CI file. Its ops compile at their first use, or when it is installed with
    OPKILN_BUILD_OPS=1.
    """
    written = scaffold.write(name, ".", backend)
    output.data("\n".join(f"{name}/{path}" for path in written))
    # `--group` came with pip 25.1, and an isolated build sees nothing that is installed here.
    output.say(
        f"next: cd {name} && pip install -U pip {backend} && "
        "pip install --no-build-isolation --group test . && pytest"
    )
    output.say("Without isolation it takes the opkiln you have.")
