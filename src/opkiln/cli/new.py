"""``opkiln new``: writes a package with an op, or adds an op to a package."""

from __future__ import annotations

import os
import sys

import click

from opkiln.cli import output
from opkiln.errors import UsageError
from opkiln.ship import scaffold


@click.command("new", short_help="Write a package with an op, or add an op to a package.")
@click.argument("name", required=False)
@click.option(
    "--op", metavar="OP",
    help="The op's name. If it is left out, you are asked; without a terminal, the op of my_ops is "
    "called my_add.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(scaffold.BACKENDS), default=scaffold.SETUPTOOLS,
    show_default=True, help="What builds the new package's wheels.",
)  # fmt: skip
@click.option(
    "--ci", type=click.Choice([*scaffold.CI, scaffold.NO_CI]), default=scaffold.GITHUB,
    show_default=True, help="The service that runs the new package's tests.",
)  # fmt: skip
def command(name: str | None, op: str | None, backend: str, ci: str) -> None:
    """Write a package called NAME into a new directory of that name, with an op called OP.

    The op is a function in PyTorch, a kernel for the CPU and one for GPUs. The function gives the
    gradient, and the tests compare the kernels with it. The package has tests that pass, natively
    and with the function in PyTorch (pytest --opkiln=both), a pyproject.toml, and a CI file that
    keeps compiled ops from run to run. Its ops compile at their first use, or when it is installed
    with OPKILN_BUILD_OPS=1.

    \b
        opkiln new my_ops --op rms_norm     a new package
        opkiln new --op layer_norm          one more op in the package of this directory
        opkiln new my_ops --op softmax      one more op in the package in ./my_ops

    An op is added as a folder of three files, a test, a line in __init__.py and lines in
    pyproject.toml. Nothing is overwritten.
    """
    if name is None and op is None:
        raise UsageError(
            "the package needs a name",
            why="--op without a name adds an op to the package of this directory",
            hint="opkiln new my_ops",
        )
    is_package = name is not None and os.path.isfile(os.path.join(name, "pyproject.toml"))
    if op is not None and (name is None or is_package):
        _add(scaffold.find("." if name is None else name), op)
        return
    assert name is not None
    package = scaffold.package_of(name)
    if op is None and not os.path.lexists(name):
        op = _ask_op_name(scaffold.default_op(package))
    written = scaffold.write(name, ".", backend, op or "", ci)
    output.data("\n".join(f"{name}/{path}" for path in written))
    # `--group` needs pip 25.1. An isolated build would not see what is installed here.
    output.say(
        f"next: cd {name} && pip install -U pip {backend} && "
        "pip install --no-build-isolation --group test . && pytest"
    )
    output.say("Without isolation, the build uses the installed opkiln.")


def _add(where: str, op: str) -> None:
    done = scaffold.add(where, op)
    shown = os.path.relpath(where)
    output.data("\n".join(os.path.normpath(os.path.join(shown, path)) for path in done.new))
    changed = (os.path.normpath(os.path.join(shown, path)) for path in done.changed)
    output.say(f"changed {' and '.join(changed)}")
    place = "" if shown == "." else f"cd {shown} && "
    output.say(
        f"next: {place}pip install --no-build-isolation --group test . && "
        f"pytest tests/test_{scaffold.op_of(op)}.py"
    )


def _ask_op_name(default: str) -> str:
    """The op's name, asked for at the terminal; the default if there is no terminal."""
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
        return default
    answer: str = click.prompt("Name of its op", default=default, value_proc=_parse_name, err=True)
    return answer


def _parse_name(text: str) -> str:
    try:
        return scaffold.op_of(text)
    except UsageError as error:
        raise click.BadParameter(f"{error.what}: {error.why}") from None
