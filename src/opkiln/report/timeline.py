"""The build timeline of the page: builds that were close in time share a scale."""

from __future__ import annotations

import time
from html import escape

from opkiln.report.layout import duration, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from opkiln.report.cache import Build

_PAUSE = 60.0  # seconds without a build that end a run of builds


def runs(builds: Iterable[Build]) -> list[list[Build]]:
    """Builds that overlap, or begin within a minute of the last one's end; the newest first."""
    found: list[list[Build]] = []
    for build in sorted(builds, key=lambda each: each.ended - each.seconds):
        began = build.ended - build.seconds
        if found and began - max(each.ended for each in found[-1]) < _PAUSE:
            found[-1].append(build)
        else:
            found.append([build])
    return found[::-1]


def render(builds: Iterable[Build]) -> str:
    """A bar for each build, from its begin to its end."""
    parts = [_run(each) for each in runs(builds)]
    return "\n".join(parts) or '<p class="weak">nothing is built yet</p>'


def _run(builds: list[Build]) -> str:
    began = min(each.ended - each.seconds for each in builds)
    length = max(each.ended for each in builds) - began
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
    rows = "\n".join(_bar(each, began, length or 1.0) for each in builds)
    head = f'<h3>{when} <span class="weak">{duration(length)}</span></h3>'
    return f'{head}\n<div class="timeline">{rows}</div>'


def _bar(build: Build, began: float, length: float) -> str:
    left = 100 * (build.ended - build.seconds - began) / length
    wide = 100 * build.seconds / length
    memory = f", {size(build.max_rss)}" if build.max_rss else ""
    said = f"{duration(build.seconds)}{memory}"
    title = f"{build.op} of {build.distribution} for {build.made_for}: {said}"
    return (
        f'<div class="build" title="{escape(title)}"><span>{escape(build.op)} '
        f'<span class="weak">{escape(build.made_for)}</span></span>'
        f'<span class="lane"><span class="bar" style="margin-left:{left:.2f}%;'
        f'width:max({wide:.2f}%,2px)"></span></span><span class="weak">{escape(said)}</span></div>'
    )
