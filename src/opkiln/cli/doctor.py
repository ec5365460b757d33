"""``opkiln doctor``: what is wrong here, the evidence, and the command that mends it."""

from __future__ import annotations

import click

from opkiln.cli import output

WARNED = 8  # nothing failed, but something is not as it should be


@click.command("doctor", short_help="Check this machine; say what is wrong and what mends it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--errors-only", is_flag=True, help="Show warnings and failures alone.")
@click.option("--no-build", is_flag=True, help="Leave out the self-check, which compiles.")
def command(as_json: bool, errors_only: bool, no_build: bool) -> int:
    """Check compilers, torch, GPUs, the store and the settings, and then compile, load and call a
    tiny op on each backend that is here.

    Each check is PASS, WARN, FAIL or SKIP, with the values it rests on and, where one helps, a
    command to copy. Exits with 0 when nothing is wrong, 1 when something failed, 8 when there are
    warnings only. Nothing is changed: the self-check builds into a directory that is removed.
    """
    from opkiln.report.doctor import checks, finding
    from opkiln.report.doctor.finding import FAIL, PASS, SKIP, WARN, worst

    # Of the terminal; what is written elsewhere is one line each, whatever its length.
    width = output.width()
    findings = []
    names = [*checks.CHECKS, *(() if no_build else checks.BUILDS)]
    shown = (WARN, FAIL) if errors_only else (PASS, SKIP, WARN, FAIL)
    for found in checks.examine(build=not no_build):
        findings.append(found)
        if not as_json and found.verdict in shown:
            output.data(finding.line(found, names, colour=output.colour(), width=width))
    verdict = worst(findings)
    if as_json:
        rows = [each._asdict() for each in findings if each.verdict in shown]
        output.data_json({"schema": 1, "worst": verdict, "findings": rows})
    else:
        output.data(finding.summary(findings))
    return {FAIL: output.FOUND, WARN: WARNED}.get(verdict, 0)
