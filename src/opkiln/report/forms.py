"""The forms of a report: text for a terminal, Markdown for an issue, plain values for programs."""

from __future__ import annotations

from typing import Any

from opkiln.errors import visible
from opkiln.report import facts
from opkiln.report.collect import Environment, Report, StoreStatus
from opkiln.report.facts import ReportSection
from opkiln.report.layout import columns, fields, paint, plain
from opkiln.report.machine import Space
from opkiln.report.redact import hide_user

# Text: aligned, useful without colour, readable on a narrow terminal


def as_text(report: Report, *, width: int | None = None, errors_only: bool = False) -> str:
    """The whole report in colour, or only its problems. ``width``: of the terminal; None: do not
    wrap."""
    found = facts.sections(report, errors_only=errors_only)
    return "\n\n".join(_text_section(each, width) for each in found)


def _text_section(section: ReportSection, width: int | None) -> str:
    parts = [paint(section.title, "strong")]
    if section.rows:
        head = [section.head] if section.head else []
        painted = [[paint(visible(text), look) for text, look in row] for row in section.rows]
        parts.append(columns([*head, *painted], indent=2, width=width))
    if section.footnotes:
        notes = [(number, visible(text)) for number, text in section.footnotes]
        parts.append(columns(notes, indent=2, width=width))
    if section.note:
        parts.append(f"  {section.note}")
    return "\n".join(parts)


# Markdown, for an issue: without the user's home directory and name


def as_markdown(report: Report, *, errors_only: bool = False) -> str:
    """The whole report, or only its problems. Long sections are folded."""
    found = facts.sections(report, errors_only=errors_only)
    parts = [f"### opkiln {report.opkiln}"]
    # An issue is read from the top, and it is about the problems.
    found.sort(key=lambda section: section.title != "problems")
    for section in found:
        if section.title in ("problems", "ops"):
            parts.append(f"**{section.title}**\n\n{_table(section)}")
        else:
            summary = f"<details><summary>{section.title}</summary>"
            parts.append(f"{summary}\n\n{_table(section)}\n\n</details>")
    return "\n\n".join(parts)


def _table(section: ReportSection) -> str:
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
    """``text`` without the user's name, and with Markdown's own characters escaped."""
    text = hide_user(text)
    for mark in "\\|<*_`":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")


# Plain values. ``docs/reference/report-json.md`` describes every field.

# Incremented when a field is removed or changes its meaning, not when one is added.
SCHEMA = 1


def as_document(report: Report, *, errors_only: bool = False) -> dict[str, Any]:
    """The report, or only its problems and the ops with problems. A hidden part is null."""
    seen = None if errors_only else report.environment
    ops = report.ops
    if errors_only and ops is not None:
        ops = tuple(each for each in ops if each.is_problem)
    return {
        "schema": SCHEMA,
        "opkiln": report.opkiln,
        "made": report.made,
        "ops": None
        if ops is None
        else [fields(each, "op distribution serves error backends") for each in ops],
        "environment": None if seen is None else _environment(seen),
        "store": None if seen is None else _store(seen.store),
        "settings": None if seen is None else plain(seen.settings),
        "problems": plain(report.problems),
    }


def _environment(seen: Environment) -> dict[str, Any]:
    budget = seen.budget
    tools = plain(seen.tools)
    return {
        **plain(seen.machine),
        "shared_memory": _space(seen.machine.shared_memory),
        "compilers": [each for each in tools if each["backend"] == "cpu"],
        "toolkits": [each for each in tools if each["backend"] != "cpu"],
        "unfound": [fields(each, "backend path origin") for each in seen.unfound],
        **fields(seen, "torch torch_error"),
        **plain(seen.devices),
        "budget": {
            "slots": len(budget.limits.slots),
            "slots_from": budget.limits.cpus_from,
            **fields(budget.limits, "memory memory_from"),
            **fields(budget, "max_jobs where refused"),
        },
        **fields(seen, "unknown_variables dropped_variables"),
    }


def _store(found: StoreStatus) -> dict[str, Any]:
    built, fetched = "ended seconds max_rss directory", "origin directory"
    sizes = found.sizes
    return {
        **fields(found, "root layers notes"),
        "sizes": None if sizes is None else {**plain(sizes), "total": sizes.total},
        "limit": found.limit,
        "space": _space(found.space),
        "builds": [fields(each, f"op distribution made_for {built}") for each in found.builds],
        "remotes": list(found.remotes),
        "fetches": [fields(each, f"op distribution made_for {fetched}") for each in found.fetches],
        "hosts": [each._asdict() for each in found.hosts],
    }


def _space(found: Space | None) -> dict[str, Any] | None:
    return None if found is None else fields(found, "path total free")
