"""A report as a page: one file of HTML that loads nothing, runs nothing, and is light or dark.

Folding is the browser's own (``<details>``), so there is no script; the policy in the page's head
forbids everything else that a browser could fetch or run.
"""

from __future__ import annotations

import time
from html import escape

from opkiln.report import facts, page_style, timeline
from opkiln.report.compilers import BACKENDS, torch_built_with

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from opkiln.decision.terms import Candidate
    from opkiln.report.collect import Environment, InForce, Report
    from opkiln.report.compilers import Tool
    from opkiln.report.facts import Section
    from opkiln.report.operators import BackendStatus, OpStatus

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>opkiln report</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>opkiln {version}</h1>
<p class="weak">{made}</p>
<ul class="summary">{summary}</ul>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def render(report: Report) -> str:
    """The whole page."""
    parts = []
    if report.problems:
        parts.append(_problems(report))
    if report.ops is not None:
        parts.append(_ops(report.ops))
    around = report.environment
    if around is not None:
        parts += [
            _section("toolchain", "Compilers and toolkits", _tree(around.tools)),
            _section("builds", "Builds", timeline.render(around.store.builds)),
            _table("devices", "Accelerators", facts.accelerators(around.devices)),
            _table("environment", "Environment", facts.environment(report.opkiln, around)),
            _table("cache", "Cache", facts.store(around.store, report.made)),
            _section("settings", "Settings", _settings(around.settings)),
        ]
    return _PAGE.format(
        style=page_style.CSS,
        version=escape(report.opkiln),
        made=time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(report.made)),
        summary="".join(f"<li>{item}</li>" for item in _summary(report)),
        body="\n".join(parts),
    )


def _section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>\n{content}\n</section>'


def _summary(report: Report) -> list[str]:
    items = []
    if report.ops is not None:
        here = [each.here for each in report.ops]
        ready = sum(each.cached or each.installed for each in here)
        native = sum(each.compatible for each in here)
        items += [
            f"<b>{len(here)}</b> ops",
            f"<b>{ready}</b> ready",
            f"<b>{native}</b> native here",
        ]
    if report.environment is not None:
        items += [escape(text) for text in _context(report.environment)]
    number = len(report.problems)
    look = "bad" if number else "good"
    items.append(f'<span class="{look}"><b>{number}</b> problem{"" if number == 1 else "s"}</span>')
    return items


def _context(around: Environment) -> list[str]:
    torch = "no torch" if around.torch is None else f"torch {torch_built_with(around.torch)}"
    gpus = [gpu.name for gpu in around.devices.gpus] or ["no GPU"]
    return [f"Python {around.machine.python}", torch, ", ".join(gpus)]


def _problems(report: Report) -> str:
    rows = []
    for each in report.problems:
        hint = f"<br><code>{escape(each.hint)}</code>" if each.hint else ""
        rows.append(f"<li><b>{escape(each.subject)}</b>: {escape(each.text)}{hint}</li>")
    return _section("problems", "Problems", f'<ul class="problems">{"".join(rows)}</ul>')


# The op grid


def _ops(ops: tuple[OpStatus, ...]) -> str:
    backends = [
        name for name in BACKENDS if any(each.backend == name for op in ops for each in op.backends)
    ]
    head = "".join(f"<th>{escape(BACKENDS[name])}</th>" for name in backends)
    rows = "\n".join(_op(each, backends) for each in ops)
    legend = " ".join(
        f'<span class="{look}">{word}</span>'
        for look, word in (
            ("ready", "cached or installed"), ("builds", "would compile"),
            ("reference", "falls back"), ("fails", "cannot be had"), ("none", "no such version"),
        )
    )  # fmt: skip
    table = (
        f'<table class="grid"><thead><tr><th>op</th>{head}<th>on this machine</th></tr></thead>\n'
        f"<tbody>{rows}</tbody></table>"
    )
    return _section("ops", "Ops", f'<p class="legend">{legend} ● serves here</p>\n{table}')


def _op(op: OpStatus, backends: list[str]) -> str:
    known = {each.backend: each for each in op.backends}
    cells = "".join(_state(known.get(name), serves=name == op.serves) for name in backends)
    owner = f'<span class="weak">{escape(op.distribution)}</span>' if op.distribution else ""
    here = op.here
    words = here.reason or here.status
    looks = "bad" if not here.compatible else ""
    changes = "".join(f"<li>{escape(each)}</li>" for each in op.changes)
    changed = f"<p>changed since it was last built:</p><ul>{changes}</ul>" if changes else ""
    traces = "".join(_trace(each) for each in op.backends)
    return (
        f'<tr class="op"><th scope="row">{escape(op.op)} {owner}</th>{cells}'
        f'<td><details><summary class="{looks}">{escape(words)}</summary>{changed}{traces}'
        f"</details></td></tr>"
    )


def _state(found: BackendStatus | None, *, serves: bool) -> str:
    if found is None:
        return '<td class="none">-</td>'
    look, word = "fails", "no"
    if found.installed or found.cached:
        look, word = "ready", "installed" if found.installed else "cached"
    elif found.compatible:
        look, word = "builds", "builds"
    elif found.status == "would fall back":
        look, word = "reference", "reference"
    mark = ' <span title="serves here">●</span>' if serves else ""
    return f'<td class="{look}" title="{escape(found.reason)}">{word}{mark}</td>'


def _trace(found: BackendStatus) -> str:
    rows = "".join(_candidate(each) for each in found.candidates)
    reason = f"<p>{escape(found.reason)}</p>" if found.reason else ""
    head = f"<h4>{escape(BACKENDS.get(found.backend, found.backend))}: {escape(found.status)}</h4>"
    return f'{head}{reason}<ol class="trace">{rows}</ol>'


def _candidate(candidate: Candidate) -> str:
    look = {"taken": "good", "refused": "bad"}.get(candidate.verdict, "weak")
    where = f"<br><code>{escape(candidate.subject)}</code>" if candidate.subject else ""
    verdict = f'<span class="{look}">{escape(candidate.verdict)}</span>'
    said = f"<b>{escape(candidate.resort)}</b> {verdict} {escape(candidate.reason)}"
    return f"<li>{said}{where}</li>"


# The toolchain tree


def _tree(tools: Iterable[Tool]) -> str:
    found = list(tools)
    branches = []
    for backend, name in BACKENDS.items():
        own = [tool for tool in found if tool.backend == backend]
        leaves = "".join(map(_leaf, own)) or '<li class="weak">none was found</li>'
        taken = next((tool for tool in own if tool.taken), None)
        said = f"{taken.version or taken.path}" if taken else ("not taken" if own else "none")
        look = "good" if taken else "weak"
        branches.append(
            f'<li><details open><summary>{escape(name)} <span class="{look}">{escape(said)}</span>'
            f"</summary><ul>{leaves}</ul></details></li>"
        )
    return f'<ul class="tree">{"".join(branches)}</ul>'


def _leaf(tool: Tool) -> str:
    mark, look = ("✓", "good") if tool.taken else ("✗", "bad") if tool.asked else ("?", "weak")
    version = f" {escape(tool.version)}" if tool.version else ""
    why = f'<br><span class="weak">{escape(tool.refused)}</span>' if tool.refused else ""
    return (
        f'<li><span class="{look}">{mark}</span> <code>{escape(tool.path)}</code>{version} '
        f'<span class="weak">({escape(tool.origin)})</span>{why}</li>'
    )


# The rest


def _table(name: str, title: str, section: Section) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row[0].text)}</th>'
        f'<td class="{row[1].look}">{escape(row[1].text)}</td></tr>'
        for row in section.rows
    )
    return _section(name, title, f'<table class="facts">{rows}</table>')


def _settings(found: tuple[InForce, ...]) -> str:
    given = [each for each in found if each.origin != "default"]
    rest = [each for each in found if each.origin == "default"]
    folded = f"<details><summary>{len(rest)} at their defaults</summary>{_values(rest)}</details>"
    return _values(given) + folded


def _values(found: list[InForce]) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(each.variable)}</th><td>{escape(facts.value_of(each))}</td>'
        f'<td class="weak origin">{escape(each.origin)}</td></tr>'
        for each in found
    )
    return f'<table class="facts">{rows}</table>'
