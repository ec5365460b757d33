"""``opkiln report``: what works here, what does not, and why."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

import click

from opkiln.cli import output
from opkiln.errors import UsageError


@click.command("report", short_help="Show ops, environment, store and settings.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every setting.")
@click.option(
    "--markdown", is_flag=True,
    help="Print Markdown for an issue, without your home directory and user name.",
)  # fmt: skip
@click.option(
    "--html", "page", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True),
    help="Write a page to look at: one file that loads nothing else. -: standard output.",
)  # fmt: skip
@click.option("--hide-ops", is_flag=True, help="Leave the ops out.")
@click.option("--hide-env", is_flag=True, help="Leave everything but the ops out.")
@click.option("--errors-only", is_flag=True, help="Show only what does not work.")
@click.option("--probe", is_flag=True, help="Ask also the toolkits that torch is not built for.")
def command(
    as_json: bool, markdown: bool, page: str | None, hide_ops: bool, hide_env: bool,
    errors_only: bool, probe: bool,
) -> None:  # fmt: skip
    """Show the ops, the environment, the store and the settings in force.

    An op is installed when it is shipped as a binary, cached when loading it compiles nothing, and
    compatible when its native version can be had here at all. Nothing is built, and torch is not
    imported. Compilers are asked who they are once; then it is remembered.
    """
    if as_json + markdown + (page is not None) > 1:
        raise click.UsageError("--json, --markdown and --html exclude each other")
    if page is not None and errors_only:
        raise click.UsageError("--html shows everything; --errors-only is for the other forms")
    from opkiln.report import forms
    from opkiln.report.collect import collect

    found = collect(
        ops=not hide_ops, environment=not hide_env, probe=probe, changes=page is not None
    )
    if as_json:
        output.data_json(forms.as_document(found, errors_only=errors_only))
    elif markdown:
        output.data(forms.as_markdown(found, errors_only=errors_only))
    elif page is not None:
        from opkiln.report import page as html

        _write(page, html.render(found))
    else:
        output.data(
            forms.as_text(
                found, colour=output.colour(), width=output.width(), errors_only=errors_only
            )
        )


def _write(path: str, text: str) -> None:
    content = text.encode("utf-8", "backslashreplace")  # a path need not be text
    if path == "-":
        output.data_file(content)
        return
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "wb") as file:  # a pipe or a device is written to, and stays
                file.write(content)
        else:
            _replace(os.path.realpath(path), content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    output.say(f"wrote {path}")


def _replace(path: str, content: bytes) -> None:
    """Beside the file, then renamed: a full disk or a kill never leaves half a page."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
        if os.path.exists(path):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
