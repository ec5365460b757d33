"""Findings as text: one line each, and below it the command that mends it."""

from __future__ import annotations

from opkiln.report.doctor.finding import FAIL, PASS, SKIP, WARN, Finding
from opkiln.report.layout import columns, count, paint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LOOKS = {PASS: "good", SKIP: "weak", WARN: "strong", FAIL: "bad"}


def line(found: Finding, names: Iterable[str], *, colour: bool, width: int | None = None) -> str:
    """One finding; ``names`` are those of all checks, so that lines can be shown as they come.

    With a ``width``, evidence is folded to it; the command never is, so that it can be copied.
    """
    longest = max(map(len, names))
    verdict = paint(found.verdict, _LOOKS[found.verdict], colour=colour)
    shown = columns([(verdict, found.check.ljust(longest), found.evidence)], width=width)
    if not found.command:
        return shown
    label = paint("fix:", "strong", colour=colour)
    return f"{shown}\n{'':<{longest + 8}}{label} {found.command}"


def summary(findings: Sequence[Finding]) -> str:
    """How many of each verdict."""
    number = {verdict: sum(each.verdict == verdict for each in findings) for verdict in _LOOKS}
    return ", ".join([
        count(number[FAIL], "failure"), count(number[WARN], "warning"),
        f"{number[PASS]} passed", f"{number[SKIP]} skipped",
    ])  # fmt: skip
