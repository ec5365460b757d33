"""The result of a check, and how it is shown."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from opkiln.report.layout import columns, count, paint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


PASS, SKIP, WARN, FAIL = "PASS", "SKIP", "WARN", "FAIL"  # from good to bad
_LOOKS = {PASS: "good", SKIP: "weak", WARN: "strong", FAIL: "bad"}


# What a hint begins with if it is a command. Any other hint is prose.
PROGRAMS = {
    "apt-get", "c++filt", "chmod", "command", "conda", "df", "ds_report", "echo", "export", "head",
    "ls", "mkdir", "mv", "nm", "opkiln", "pip", "python", "python3", "readelf", "sha256sum",
    "ulimit", "unset",
}  # fmt: skip


class Outcome(NamedTuple):
    """A verdict, the facts behind it, and a command that can be copied into a shell."""

    verdict: str
    evidence: str
    command: str = ""  # empty if nothing is to be done, or no command does it


class Finding(NamedTuple):
    """An outcome with the name of its check."""

    check: str
    verdict: str
    evidence: str
    command: str


def passed(evidence: str) -> Outcome:
    """All is well."""
    return Outcome(PASS, evidence)


def skipped(evidence: str) -> Outcome:
    """The check does not apply here, or is not possible; ``evidence`` says why."""
    return Outcome(SKIP, evidence)


def warned(evidence: str, command: str = "") -> Outcome:
    """It works, but not as well as it could, or not as the user asked."""
    return Outcome(WARN, evidence, command)


def failed(evidence: str, command: str = "") -> Outcome:
    """Something that builds or loads of ops need does not work."""
    return Outcome(FAIL, evidence, command)


def worst(findings: Iterable[Finding]) -> str:
    """The worst verdict. A skipped check is not a fault: it counts as PASS."""
    verdicts = {each.verdict for each in findings}
    return next((verdict for verdict in (FAIL, WARN) if verdict in verdicts), PASS)


def copyable(hint: str) -> str:
    """The command in an error's hint, in a form that a shell takes.

    A remark after the command is removed, and a variable alone gets its ``export``. The result is
    empty for any other hint: prose, or a line of Python.
    """
    command = hint.partition("    ")[0].strip()
    try:
        words = shlex.split(command)
    except ValueError:
        return ""  # an apostrophe of prose
    program = next((word for word in words if not _is_assignment(word)), "")
    if not program:
        return f"export {command}" if words else ""
    return command if program in PROGRAMS or program.startswith("/") else ""


def _is_assignment(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and name.isidentifier()


def joined(*parts: str) -> str:
    """The facts that are not empty, on one line."""
    return "; ".join(" ".join(part.split()) for part in parts if part.strip())


# As text: one line for each finding, and the command that fixes it below


def line(found: Finding, names: Iterable[str], *, colour: bool, width: int | None = None) -> str:
    """One finding. ``names`` are those of all checks: they give the width of the column.

    With a ``width``, the evidence is wrapped. The command is not, so that it can be copied.
    """
    longest = max(map(len, names))
    verdict = paint(found.verdict, _LOOKS[found.verdict], colour=colour)
    shown = columns([(verdict, found.check.ljust(longest), found.evidence)], width=width)
    if not found.command:
        return shown
    label = paint("fix:", "strong", colour=colour)
    return f"{shown}\n{'':<{longest + 8}}{label} {found.command}"


def summary(findings: Sequence[Finding]) -> str:
    """The number of checks with each verdict."""
    number = {verdict: sum(each.verdict == verdict for each in findings) for verdict in _LOOKS}
    return ", ".join([
        count(number[FAIL], "failure"), count(number[WARN], "warning"),
        f"{number[PASS]} passed", f"{number[SKIP]} skipped",
    ])  # fmt: skip
