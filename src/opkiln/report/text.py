"""A report as text: aligned, useful without colour, readable on a narrow terminal."""

from __future__ import annotations

from opkiln.report import facts
from opkiln.report.layout import columns, paint, visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.report.collect import Report
    from opkiln.report.facts import Row, Section


def render(
    report: Report, *, colour: bool, width: int | None = None, errors_only: bool = False
) -> str:
    """The whole report, or only its problems. ``width``: the terminal's; None: lines are whole."""
    found = [facts.problems(report)] if errors_only else facts.sections(report)
    return "\n\n".join(_section(each, colour, width) for each in found)


def _section(section: Section, colour: bool, width: int | None) -> str:
    rows = [section.head] if section.head and section.rows else []
    table = [*rows, *(_painted(row, colour) for row in section.rows)]
    parts = [paint(section.title, "strong", colour=colour)]
    if table:
        parts.append(columns(table, indent=2, width=width))
    if section.footnotes:
        painted = [(number, visible(text)) for number, text in section.footnotes]
        parts.append(columns(painted, indent=2, width=width))
    if section.note:
        parts.append(f"  {section.note}")
    return "\n".join(parts)


def _painted(row: Row, colour: bool) -> tuple[str, ...]:
    return tuple(paint(visible(cell.text), cell.look, colour=colour) for cell in row)
