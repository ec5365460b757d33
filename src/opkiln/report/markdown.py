"""A report as Markdown, to be pasted into an issue: without the user's home directory and name."""

from __future__ import annotations

from opkiln.report import facts
from opkiln.report.redact import without_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.report.collect import Report
    from opkiln.report.facts import Section


def render(report: Report, *, errors_only: bool = False) -> str:
    """The whole report, or only its problems; what is long is folded."""
    found = [facts.problems(report)] if errors_only else facts.sections(report)
    parts = [f"### opkiln {report.opkiln}"]
    # An issue is read from the top, and the problems are what it is about.
    found.sort(key=lambda section: section.title != "problems")
    for section in found:
        if section.title in ("problems", "ops"):
            parts.append(f"**{section.title}**\n\n{_table(section)}")
        else:
            summary = f"<details><summary>{section.title}</summary>"
            parts.append(f"{summary}\n\n{_table(section)}\n\n</details>")
    return "\n\n".join(parts)


def _table(section: Section) -> str:
    lines = []
    if section.rows:
        head = section.head or ("",) * max(len(row) for row in section.rows)
        rows = [head, ("---",) * len(head), *([cell.text for cell in row] for row in section.rows)]
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    for number, text in section.footnotes:
        lines += ["", f"{number} {_cell(text)}"]
    if section.note:
        lines += ["", section.note] if lines else [section.note]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Without the user; a pipe would end the cell, a `<` or `*` or `_` begin something else."""
    text = without_user(text)
    for mark in "\\|<*_`":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")
