"""The forms of a report: text for a terminal, Markdown for an issue, plain values for programs.

Also ``docs/settings.md``, which is generated from the table in ``settings.py``.
"""

from __future__ import annotations

from typing import Any

from opkiln import settings
from opkiln.errors import visible
from opkiln.report import facts
from opkiln.report.layout import columns, paint
from opkiln.report.redact import without_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.report.collect import Environment, Report, StoreStatus
    from opkiln.report.facts import Row, Section
    from opkiln.report.operators import BackendStatus, OpStatus


# Text: aligned, useful without colour, readable on a narrow terminal


def as_text(
    report: Report, *, colour: bool, width: int | None = None, errors_only: bool = False
) -> str:
    """The whole report, or only its problems. ``width``: of the terminal; None: do not wrap."""
    found = [facts.problems(report)] if errors_only else facts.sections(report)
    return "\n\n".join(_text_section(each, colour, width) for each in found)


def _text_section(section: Section, colour: bool, width: int | None) -> str:
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


# Markdown, for an issue: without the user's home directory and name


def as_markdown(report: Report, *, errors_only: bool = False) -> str:
    """The whole report, or only its problems. Long sections are folded."""
    found = [facts.problems(report)] if errors_only else facts.sections(report)
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
    """``text`` without the user's name, and with Markdown's own characters escaped."""
    text = without_user(text)
    for mark in "\\|<*_`":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")


# Plain values. ``docs/report.md`` describes every field.

# Incremented when a field is removed or changes its meaning, not when one is added.
SCHEMA = 1


def as_document(report: Report, *, errors_only: bool = False) -> dict[str, Any]:
    """The report, or only its problems and the ops with problems. A hidden part is null."""
    around = None if errors_only else report.environment
    ops = report.ops
    if errors_only and ops is not None:
        ops = tuple(each for each in ops if each.is_problem)
    return {
        "schema": SCHEMA,
        "opkiln": report.opkiln,
        "made": report.made,
        "ops": None if ops is None else [_op(each) for each in ops],
        "environment": None if around is None else _environment(around),
        "store": None if around is None else _store(around.store),
        "settings": None if around is None else [each._asdict() for each in around.settings],
        "problems": [each._asdict() for each in report.problems],
    }


def _op(found: OpStatus) -> dict[str, Any]:
    return {
        "op": found.op,
        "distribution": found.distribution,
        "serves": found.serves,
        "error": found.error,
        "backends": [_backend(each) for each in found.backends],
    }


def _backend(found: BackendStatus) -> dict[str, Any]:
    return {**found._asdict(), "candidates": [each._asdict() for each in found.candidates]}


def _environment(around: Environment) -> dict[str, Any]:
    machine, devices, budget = around.machine, around.devices, around.budget
    shared = machine.shared_memory
    tools = [each._asdict() for each in around.tools]
    return {
        **machine._asdict(),
        "shared_memory": None if shared is None else shared._asdict(),
        "limits": [each._asdict() for each in machine.limits],
        "cgroup": machine.cgroup._asdict(),
        "compilers": [each for each in tools if each["backend"] == "cpu"],
        "toolkits": [each for each in tools if each["backend"] != "cpu"],
        "unfound": [each._asdict() for each in around.unfound],
        "torch": None if around.torch is None else around.torch._asdict(),
        "torch_error": around.torch_error,
        "accelerator": devices.in_force._asdict(),
        "accelerators": [each._asdict() for each in devices.accelerators],
        "drivers": [each._asdict() for each in devices.drivers],
        "gpus": [each._asdict() for each in devices.gpus],
        "collectives": [each._asdict() for each in devices.collectives],
        "budget": {
            "slots": len(budget.limits.slots),
            "slots_from": budget.limits.cpus_from,
            "memory": budget.limits.memory,
            "memory_from": budget.limits.memory_from,
            "max_jobs": budget.max_jobs,
            "where": budget.where,
            "refused": list(budget.refused),
        },
        "unknown_variables": list(around.unknown),
        "dropped_variables": list(around.dropped),
    }


def _store(found: StoreStatus) -> dict[str, Any]:
    sizes = found.sizes
    return {
        "root": found.root,
        "layers": list(found.layers),
        "notes": list(found.notes),
        "sizes": None if sizes is None else {**sizes._asdict(), "total": sizes.total},
        "limit": found.limit,
        "space": None if found.space is None else found.space._asdict(),
        "builds": [each._asdict() for each in found.builds],
        "remotes": list(found.remotes),
        "fetches": [each._asdict() for each in found.fetches],
    }


# docs/settings.md

_GROUPS = {
    "opkiln": "opkiln's own",
    "compiler": "The compiler's, taken over into the command line",
    "terminal": "The terminal's",
    "job": "The job launcher's",
    "system": "The system's",
}


def settings_page() -> str:
    """``docs/settings.md``, whole."""
    lines = [
        "# Settings",
        "",
        "<!-- Generated by `make docs` from src/opkiln/settings.py; edit that. -->",
        "",
        "Every variable opkiln reads. An empty variable counts as unset. `opkiln report` shows",
        "which are in force and where each value comes from.",
    ]
    for group, title in _GROUPS.items():
        lines += ["", f"## {title}", "", "| Variable | Default | Meaning |", "|---|---|---|"]
        for setting in settings.table():
            if setting.group == group:
                names = "<br>".join(f"`{name}`" for name in (setting.variable, *setting.aliases))
                default = setting.shown or f"`{setting.default}`"
                lines.append(f"| {names} | {default} | {setting.doc} |")
    lines += [
        "",
        "## Passed on to compilers",
        "",
        "Of its environment, a compiler that opkiln starts only gets these:",
        ", ".join(f"`{name}`" for name in settings.PASSED) + ".",
        "A script that stands for a compiler, and a launcher, also get",
        ", ".join(
            f"`{name}`"
            for name in (
                *settings.PASSED_TO_SCRIPTS,
                *(f"{each}*" for each in settings.PASSED_FAMILIES),
            )
        )
        + ".",
        "All that reach a compiler are in the key of what it makes, but for `PATH`: there the",
        "programs count that it leads to.",
        "",
        "## Kept away from compilers",
        "",
        "These change a compiler's result behind its command line, so no compiler that opkiln",
        "starts ever sees them; `opkiln explain` names those that are set:",
        ", ".join(f"`{name}`" for name in settings.DROPPED) + ".",
        "",
    ]
    return "\n".join(lines)
