"""``opkiln report`` and ``opkiln doctor``: what works here, what does not, and how to fix it."""

from __future__ import annotations

import os

import click

from opkiln.base.digest import replace
from opkiln.cli import output
from opkiln.cli.options import json_option
from opkiln.errors import UsageError

WARNED = 8  # the doctor's exit code if nothing failed, but there are warnings
_SERVING = ("ops", "engine", "deepspeed", "missing")  # fields of deepspeed.Functions


@click.command("report", short_help="Show ops, environment, store and settings.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every setting.")
@click.option(
    "--markdown", is_flag=True,
    help="Print Markdown for an issue, without your home directory and user name.",
)  # fmt: skip
@click.option(
    "--html", "page", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True),
    help="Write an HTML page: one file that loads nothing else. -: standard output.",
)  # fmt: skip
@click.option("--hide-ops", is_flag=True, help="Leave out the ops.")
@click.option("--hide-env", is_flag=True, help="Leave out everything but the ops.")
@click.option("--errors-only", is_flag=True, help="Show only what does not work.")
@click.option(
    "--deepspeed", is_flag=True,
    help="Show instead who serves each function of DeepSpeed's ops. Imports DeepSpeed.",
)  # fmt: skip
@click.option("--probe", is_flag=True, help="Also run the toolkits that torch is not built for.")
def report_command(
    as_json: bool, markdown: bool, page: str | None, hide_ops: bool, hide_env: bool,
    errors_only: bool, deepspeed: bool, probe: bool,
) -> None:  # fmt: skip
    """Show the ops, the environment, the store and the current settings.

    An op is installed if it is shipped as a binary, cached if it loads without compiling, and
    compatible if its native version can be loaded or built here. Nothing is built, and torch is not
    imported. Compilers are run once to identify them; the answer is remembered.
    """
    if as_json + markdown + (page is not None) > 1:
        raise click.UsageError("--json, --markdown and --html exclude each other")
    if page is not None and errors_only:
        raise click.UsageError("--html shows everything; --errors-only is for the other forms")
    if deepspeed:
        if markdown or page is not None or hide_ops or hide_env or errors_only or probe:
            raise click.UsageError("--deepspeed goes with --json alone")
        _show_functions(as_json)
        return
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
        output.data(forms.as_text(found, width=output.width(), errors_only=errors_only))


def _show_functions(as_json: bool) -> None:
    from opkiln.compat.deepspeed import functions
    from opkiln.report.layout import columns

    found = functions()
    if as_json:
        output.data_json(found)
        return
    rows = [("op", "served by", "functions")]
    for each in found:
        serving = {who: ", ".join(getattr(each, who)) for who in _SERVING}
        serving["error"] = " ".join(each.error.split())
        served = [(who, names) for who, names in serving.items() if names] or [("nobody", "")]
        rows += [(each.op if number == 0 else "", *row) for number, row in enumerate(served)]
    output.data(columns(rows, width=output.width()))


def _write(path: str, text: str) -> None:
    content = text.encode("utf-8", "backslashreplace")  # a path may not be valid text
    if path == "-":
        output.data_file(content)
        return
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "wb") as file:  # a pipe or a device is not replaced
                file.write(content)
        else:
            replace(path, content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    output.say(f"wrote {path}")


@click.command("doctor", short_help="Check this machine; show what is wrong and how to fix it.")
@json_option
@click.option("--errors-only", is_flag=True, help="Show only warnings and failures.")
@click.option("--no-build", is_flag=True, help="Leave out the self-check, which compiles.")
def doctor_command(as_json: bool, errors_only: bool, no_build: bool) -> int:
    """Check compilers, torch, GPUs, the store and the settings; then compile, load and call a tiny
    op on each backend of this machine.

    Each check is PASS, WARN, FAIL or SKIP, with its evidence and, if one helps, a command to copy.
    Exits with 0 if nothing is wrong, 1 if something failed, 8 if there are only warnings. Nothing
    is changed: the self-check builds into a temporary directory.
    """
    from opkiln.report.doctor import checks
    from opkiln.report.doctor.terms import FAIL, WARN

    names = checks.CHECKS | ({} if no_build else checks.BUILDS)
    verdicts, rows = [], []
    for name, found in checks.examine(build=not no_build):
        verdicts.append(found.verdict)
        if errors_only and found.verdict not in (WARN, FAIL):
            continue
        if as_json:
            rows.append({"check": name, **found._asdict()})
        else:
            output.data(checks.line(name, found, names, width=output.width()))
    verdict = checks.worst(verdicts)
    if as_json:
        output.data_json({"worst": verdict, "findings": rows})
    else:
        output.data(checks.summary(verdicts))
    return {FAIL: output.FOUND, WARN: WARNED}.get(verdict, 0)
