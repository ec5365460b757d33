"""A report as a page: one HTML file that loads and runs nothing, for light and dark screens.

Folding uses the browser's own ``<details>``, so the page needs no script. The policy in its head
forbids everything else that a browser could fetch or run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape

from opkiln.decision.terms import WOULD_FALL_BACK, Candidate
from opkiln.report import facts
from opkiln.report.collect import PastBuild, Problem, Report, SettingValue
from opkiln.report.compilers import BACKENDS, Tool, describe_torch
from opkiln.report.facts import Cell, Row
from opkiln.report.layout import duration, size
from opkiln.report.operators import BackendStatus, OpStatus

CSS = """
:root { --paper:#fbfaf7; --card:#fff; --ink:#22201c; --weak:#6b665c; --line:#e0dbd0;
  --good:#1d6b35; --bad:#a3231b; --clay:#b4552d;
  --ready:#d9eedd; --builds:#f6e7c4; --reference:#ece8df; --fails:#f6d9d5; }
@media (prefers-color-scheme: dark) { :root { --paper:#171614; --card:#201e1b; --ink:#ece7dc;
  --weak:#a49c8c; --line:#38342d; --good:#7fcf95; --bad:#f08d83; --clay:#e08a5b;
  --ready:#1f3d28; --builds:#463716; --reference:#2e2b26; --fails:#4a211d; } }
* { box-sizing:border-box; }
body { margin:0; padding:1.5rem; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui, sans-serif; }
header, main { max-width:72rem; margin:0 auto; }
h1 { font-size:1.5rem; margin:0; } h2 { font-size:1.1rem; margin:0 0 .6rem; }
h3 { font-size:.95rem; margin:.8rem 0 .3rem; } h4 { font-size:.9rem; margin:.8rem 0 .2rem; }
h1::before { content:""; display:inline-block; width:.7em; height:.7em; margin-right:.4em;
  background:var(--clay); border-radius:50% 50% 15% 15%; }
header p { margin:.2rem 0 .8rem; }
section { background:var(--card); border:1px solid var(--line); border-radius:8px;
  padding:1rem 1.2rem; margin:1rem 0; overflow-x:auto; }
.summary { list-style:none; display:flex; flex-wrap:wrap; gap:.4rem; padding:0; margin:0; }
.summary li { background:var(--card); border:1px solid var(--line); border-radius:99px;
  padding:.1rem .8rem; }
.weak { color:var(--weak); font-weight:normal; } .good { color:var(--good); }
.bad { color:var(--bad); }
code { font:.87em ui-monospace, monospace; overflow-wrap:anywhere; }
table { border-collapse:collapse; width:100%; }
th, td { text-align:left; vertical-align:top; padding:.3rem .6rem;
  border-bottom:1px solid var(--line); overflow-wrap:anywhere; }
.facts th { width:13rem; font-weight:600; } tr:last-child > * { border-bottom:0; }
.grid thead th { color:var(--weak); font-weight:normal; } .grid th[scope=row] { width:15rem; }
.grid td:last-child { width:45%; }
.ready { background:var(--ready); } .builds { background:var(--builds); }
.reference { background:var(--reference); } .fails { background:var(--fails); }
.none { color:var(--weak); } .origin { white-space:nowrap; }
.legend span { padding:.1rem .5rem; border-radius:4px; margin-right:.3rem; }
.grid .ready, .grid .builds, .grid .reference, .grid .fails, .grid .none { white-space:nowrap; }
summary { cursor:pointer; } details p { margin:.2rem 0; }
.trace { margin:.2rem 0 .6rem; padding-left:1.4rem; }
.tree, .tree ul { list-style:none; padding-left:0; margin:0; }
.tree ul { padding-left:1.1rem; margin-left:.3rem; border-left:1px solid var(--line); }
.tree li { margin:.25rem 0; } .tree summary { font-weight:600; }
.problems { margin:0; padding-left:1.2rem; } .problems li { margin:.3rem 0; }
.build { display:grid; grid-template-columns:16rem 1fr 10rem; gap:.8rem; align-items:center;
  padding:.1rem 0; }
.lane { background:var(--reference); border-radius:3px; overflow:hidden; }
.bar { display:block; height:.9rem; background:var(--clay); border-radius:3px; }
@media (max-width: 45rem) { .build { grid-template-columns:1fr; gap:.1rem; }
  .facts th { width:auto; } }
"""

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
_PAUSE = 60.0  # seconds: builds that are further apart do not share a scale


def render(report: Report) -> str:
    """The whole page."""
    parts = []
    if report.problems:
        parts.append(_section("problems", "Problems", _problems(report.problems)))
    if report.ops is not None:
        parts.append(_section("ops", "Ops", _ops(report.ops)))
    if seen := report.environment:
        environment = facts.environment(report.opkiln, seen)
        parts += [
            _section("toolchain", "Compilers and toolkits", _tree(seen.tools)),
            _section("builds", "Builds", timeline(seen.store.builds)),
            _section("devices", "Accelerators", _table(facts.accelerators(seen.devices).rows)),
            _section("environment", "Environment", _table(environment.rows)),
            _section("cache", "Cache", _table(facts.store(seen.store, report.made).rows)),
            _section("settings", "Settings", _settings(seen.settings)),
        ]
    return _PAGE.format(
        style=CSS,
        version=escape(report.opkiln),
        made=time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(report.made)),
        summary="".join(f"<li>{item}</li>" for item in _summary(report)),
        body="\n".join(parts),
    )


def _section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>\n{content}\n</section>'


def _span(look: str, text: str) -> str:
    return f'<span class="{look}">{escape(text)}</span>'


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
    if seen := report.environment:
        torch = "no torch" if seen.torch is None else f"torch {describe_torch(seen.torch)}"
        gpus = ", ".join(gpu.name for gpu in seen.devices.gpus) or "no GPU"
        items += [f"Python {seen.machine.python}", escape(torch), escape(gpus)]
    number = len(report.problems)
    look = "bad" if number else "good"
    items.append(f'<span class="{look}"><b>{number}</b> problem{"" if number == 1 else "s"}</span>')
    return items


def _problems(problems: tuple[Problem, ...]) -> str:
    rows = []
    for each in problems:
        hint = f"<br><code>{escape(each.hint)}</code>" if each.hint else ""
        rows.append(f"<li><b>{escape(each.subject)}</b>: {escape(each.text)}{hint}</li>")
    return f'<ul class="problems">{"".join(rows)}</ul>'


# The op grid

_LEGEND = {
    "ready": "cached or installed",
    "builds": "would compile",
    "reference": "falls back",
    "fails": "not available",
    "none": "no such version",
}


def _ops(ops: tuple[OpStatus, ...]) -> str:
    there = {each.backend for op in ops for each in op.backends}
    backends = [name for name in BACKENDS if name in there]
    head = "".join(f"<th>{BACKENDS[name]}</th>" for name in backends)
    rows = "\n".join(_op(each, backends) for each in ops)
    legend = " ".join(_span(look, word) for look, word in _LEGEND.items())
    return (
        f'<p class="legend">{legend} ● serves here</p>\n'
        f'<table class="grid"><thead><tr><th>op</th>{head}<th>on this machine</th></tr></thead>\n'
        f"<tbody>{rows}</tbody></table>"
    )


def _op(op: OpStatus, backends: list[str]) -> str:
    known = {each.backend: each for each in op.backends}
    cells = "".join(_state(known.get(name), serves=name == op.serves) for name in backends)
    owner = _span("weak", op.distribution) if op.distribution else ""
    words = op.here.reason or op.here.status
    looks = "bad" if op.is_problem else ""
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
    elif found.status == WOULD_FALL_BACK:
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
    verdict = _span(look, candidate.verdict)
    return f"<li><b>{candidate.resort}</b> {verdict} {escape(candidate.reason)}{where}</li>"


# The build timeline: builds that were close in time share a scale


def runs(builds: Iterable[PastBuild]) -> list[list[PastBuild]]:
    """Groups of builds that overlap or follow each other within a minute, the newest first."""
    found: list[list[PastBuild]] = []
    for build in sorted(builds, key=lambda each: each.ended - each.seconds):
        began = build.ended - build.seconds
        if found and began - max(each.ended for each in found[-1]) < _PAUSE:
            found[-1].append(build)
        else:
            found.append([build])
    return found[::-1]


def timeline(builds: Iterable[PastBuild]) -> str:
    """A bar for each build, from its start to its end."""
    parts = [_builds(each) for each in runs(builds)]
    return "\n".join(parts) or '<p class="weak">nothing has been built yet</p>'


def _builds(builds: list[PastBuild]) -> str:
    began = min(each.ended - each.seconds for each in builds)
    length = max(each.ended for each in builds) - began
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
    rows = "\n".join(_bar(each, began, length or 1.0) for each in builds)
    return f'<h3>{when} {_span("weak", duration(length))}</h3>\n<div class="timeline">{rows}</div>'


def _bar(build: PastBuild, began: float, length: float) -> str:
    left = 100 * (build.ended - build.seconds - began) / length
    wide = 100 * build.seconds / length
    memory = f", {size(build.max_rss)}" if build.max_rss else ""
    said = f"{duration(build.seconds)}{memory}"
    title = f"{build.op} of {build.distribution} for {build.made_for}: {said}"
    return (
        f'<div class="build" title="{escape(title)}">'
        f"<span>{escape(build.op)} {_span('weak', build.made_for)}</span>"
        f'<span class="lane"><span class="bar" style="margin-left:{left:.2f}%;'
        f'width:max({wide:.2f}%,2px)"></span></span>{_span("weak", said)}</div>'
    )


# The toolchain tree


def _tree(tools: Iterable[Tool]) -> str:
    found = list(tools)
    branches = []
    for backend, name in BACKENDS.items():
        own = [tool for tool in found if tool.backend == backend]
        leaves = "".join(map(_leaf, own)) or '<li class="weak">none was found</li>'
        said = _span("weak", "not taken" if own else "none")
        for tool in own:
            if tool.taken:
                said = _span("good", tool.version or tool.path)
        branches.append(
            f"<li><details open><summary>{name} {said}</summary><ul>{leaves}</ul></details></li>"
        )
    return f'<ul class="tree">{"".join(branches)}</ul>'


def _leaf(tool: Tool) -> str:
    mark, look = ("✓", "good") if tool.taken else ("✗", "bad") if tool.asked else ("?", "weak")
    version = f" {escape(tool.version)}" if tool.version else ""
    why = f"<br>{_span('weak', tool.refused)}" if tool.refused else ""
    return (
        f"<li>{_span(look, mark)} <code>{escape(tool.path)}</code>{version} "
        f"{_span('weak', f'({tool.origin})')}{why}</li>"
    )


# The rest


def _table(rows: Iterable[Row]) -> str:
    shown = []
    for label, *cells in rows:
        values = "".join(f'<td class="{each.look}">{escape(each.text)}</td>' for each in cells)
        shown.append(f'<tr><th scope="row">{escape(label.text)}</th>{values}</tr>')
    return '<table class="facts">{}</table>'.format("\n".join(shown))


def _settings(found: tuple[SettingValue, ...]) -> str:
    given: list[Row] = []
    rest: list[Row] = []
    for each in found:
        row = Cell(each.variable), Cell(facts.value_of(each)), Cell(each.origin, "weak origin")
        (rest if each.origin == "default" else given).append(row)
    folded = f"<details><summary>{len(rest)} at their defaults</summary>{_table(rest)}</details>"
    return _table(given) + folded
