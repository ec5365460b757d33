"""A report as sections, rows and cells: the basis of every form that people read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from opkiln.base.model import display_name
from opkiln.report.collect import Environment, Report, SettingValue, StoreStatus
from opkiln.report.compilers import BACKENDS, NO_HOST, PROBE, Tool, describe_torch
from opkiln.report.layout import age, count, duration, size
from opkiln.report.machine import FoundDevices, Limit, Machine
from opkiln.report.operators import BackendStatus, OpStatus
from opkiln.run.budget import Description


class Cell(NamedTuple):
    """A short text, and its look: good, bad, weak, or plain."""

    text: str
    look: str = ""


Row = tuple[Cell, ...]


class ReportSection(NamedTuple):
    """A table with a title. ``head`` is empty if the first column names the rows."""

    title: str
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""
    footnotes: tuple[tuple[str, str], ...] = ()  # ("(1)", a text that several rows share)


def sections(report: Report, *, errors_only: bool = False) -> list[ReportSection]:
    """Everything that was collected, or only the problems."""
    if errors_only:
        return [problems(report)]
    found = []
    if report.ops is not None:
        found.append(ops(report.ops))
    if seen := report.environment:
        found += [
            environment(report.opkiln, seen),
            compilers(seen.tools),
            accelerators(seen.devices),
            store(seen.store, report.made),
            settings(seen.settings),
        ]
    if report.problems:
        found.append(problems(report))
    return found


def problems(report: Report) -> ReportSection:
    """Everything that does not work."""
    rows = []
    for each in report.problems:
        rows.append((Cell(each.subject, "bad"), Cell(_line(each.text))))
        if each.hint:
            rows.append((Cell(""), Cell(f"hint: {each.hint}", "weak")))
    return ReportSection("problems", (), tuple(rows), "" if rows else "none")


# The ops

_YES = {True: "yes", False: "no"}


def ops(found: tuple[OpStatus, ...]) -> ReportSection:
    """A row for each op and backend. The first row of an op is the backend that serves here.
    Variants of an op that are in the same state share their rows."""
    same: dict[tuple[str, tuple[Row, ...]], list[str]] = {}
    for each in found:
        serving = _backend_row(each.here, serves=not each.no_device)
        others = (_backend_row(other, serves=False) for other in each.backends[1:])
        same.setdefault((each.variant_of or each.op, (serving, *others)), []).append(each.op)
    rows = []
    for (op, (first, *more)), names in same.items():
        name = display_name(names[0]) if len(names) == 1 else f"{op} ({len(names)} variants)"
        rows += [(Cell(name), *first[1:]), *more]
    # Reasons that several rows share have a number there, and are shown once, below.
    counted = Counter(row[-1].text for row in rows if row[-1].text)
    common = [reason for reason, times in counted.items() if times > 1]
    numbers = {reason: f"({number})" for number, reason in enumerate(common, start=1)}
    shown = [
        (*cells, reason._replace(text=numbers.get(reason.text, reason.text)))
        for *cells, reason in rows
    ]
    head = ("op", "backend", "installed", "cached", "compatible", "")
    footnotes = tuple((number, reason) for reason, number in numbers.items())
    return ReportSection("ops", head, tuple(shown), "" if rows else "none", footnotes)


def _backend_row(found: BackendStatus, *, serves: bool) -> Row:
    # A backend that does not serve here need not work here.
    look = "" if serves else "weak"
    return (
        Cell(""),
        Cell(found.backend or "-", look),
        Cell(_YES[found.installed], look or "weak"),
        Cell(_YES[found.cached], look or ("good" if found.cached else "weak")),
        Cell(_YES[found.compatible], look or ("good" if found.compatible else "bad")),
        Cell(_line(found.reason), look),
    )


# The environment


def environment(version: str, seen: Environment) -> ReportSection:
    """opkiln, Python, the system, torch and the limits."""
    machine, torch = seen.machine, seen.torch
    rows = [
        _row("opkiln", version),
        _row("python", f"{machine.python}, {machine.executable}"),
        _row("system", machine.system),
        _row("cpu", machine.cpu),
        _row("", f"{machine.level} ({machine.simd})"),
        _row("torch", describe_torch(torch, seen.torch_error), "bad" if torch is None else ""),
    ]
    if torch is not None:
        rows.append(_row("", torch.path))
    rows += _budget_rows(seen.budget)
    rows += _limit_rows(machine)
    if dropped := ", ".join(seen.dropped_variables):
        rows.append(_row("dropped", f"{dropped} (not passed to compilers)"))
    rows += [_row("unknown", text, "bad") for text in seen.unknown_variables]
    return ReportSection("environment", (), tuple(rows))


def _budget_rows(budget: Description) -> list[Row]:
    limits = budget.limits
    jobs = f", at most {count(budget.max_jobs, 'job')}" if budget.max_jobs else ""
    rows = [
        _row("budget", f"{count(len(limits.slots), 'CPU')} ({limits.cpus_from}){jobs}"),
        _row("", f"{size(limits.memory)} of memory ({limits.memory_from})"),
        _row("", f"shared through {budget.where}" if budget.where else "not shared"),
    ]
    return rows + [_row("", f"not shared through {each}", "bad") for each in budget.refused]


def _limit_rows(machine: Machine) -> list[Row]:
    group = machine.cgroup
    granted = [f"a quota of {group.cpu_quota:g} CPUs"] if group.cpu_quota else []
    granted += [f"{group.cpus} CPUs"] if group.cpus else []
    granted += [f"{size(group.memory_limit)} of memory"] if group.memory_limit else []
    shared = machine.shared_memory
    return [
        _row("cgroup", f"{group.path or 'none'}: {', '.join(granted) or 'no limits'}"),
        _row("/dev/shm", "none" if shared is None else str(shared)),
        _row("limits", ", ".join(map(_limit, machine.limits))),
    ]


def _limit(limit: Limit) -> str:
    shown = size if limit.name == "memlock" else str
    both = (limit.soft, limit.hard)
    soft, hard = ("unlimited" if each is None else shown(each) for each in both)
    return f"{limit.name} {soft}" + ("" if soft == hard else f" (at most {hard})")


# Compilers and devices


def compilers(tools: Iterable[Tool]) -> ReportSection:
    """Every compiler and toolkit: taken, or the reason why not."""
    found = list(tools)
    rows = []
    for backend, name in BACKENDS.items():
        own = [tool for tool in found if tool.backend == backend]
        if not own:
            rows.append(_row(name, "none was found", "weak"))
        said: set[str] = set()
        for number, tool in enumerate(own):
            rows.append(_tool_row(name if number == 0 else "", tool, said))
            said.add(tool.refused)
    skipped = any(not tool.asked and tool.refused != NO_HOST for tool in found)
    return ReportSection(
        "compilers", (), tuple(rows), f"`{PROBE}` asks every toolkit" if skipped else ""
    )


def _tool_row(label: str, tool: Tool, said: set[str]) -> Row:
    word = "refused: " if tool.asked else ""
    state = "taken" if tool.taken else f"{word}{_line(tool.refused)}"
    if not tool.asked and tool.refused in said:
        state = "not asked, for the same reason"
    facts = ", ".join(part for part in (tool.path, tool.version, state) if part)
    return _row(label, f"{facts} ({tool.origin})", "" if tool.taken else "weak")


def accelerators(found: FoundDevices) -> ReportSection:
    """The kinds of device, the GPUs, their drivers, and the libraries for communication."""
    chosen = found.accelerator
    asked = f" ({chosen.origin})" if chosen.origin else ""
    rows = [_row("in force", f"{chosen.name}{asked}")]
    if chosen.error:
        rows = [_row("in force", f"none: {_line(chosen.error)}", "bad")]
    for kind in found.accelerators:
        why = f": {kind.why}" if kind.why else ""
        rows.append(_row(kind.name, _YES[kind.present] + why, "good" if kind.present else "weak"))
    for each in found.drivers:
        if each.version:
            takes = f", supports CUDA up to {each.cuda}" if each.cuda else ""
            rows.append(_row(f"{each.vendor} driver", f"{each.version}{takes}"))
    for gpu in found.gpus:
        hidden = "" if gpu.visible else ", not visible to this process"
        memory = f", {size(gpu.memory)}" if gpu.memory else ""
        text = f"{gpu.name}, {gpu.arch}{memory}{hidden}"
        rows.append(_row(f"{gpu.vendor} GPU {gpu.index}", text, "weak" if hidden else ""))
    for library in found.collectives:
        rows.append(_row(library.name, f"{library.version or 'unknown version'}, {library.path}"))
    if not found.collectives:
        rows.append(_row("NCCL", "none was found", "weak"))
    return ReportSection("accelerators", (), tuple(rows))


# The store and the settings


_FETCHES = 3  # entries of remote tiers that are shown
_HOSTS = 8  # modules of other programs


def store(found: StoreStatus, now: float) -> ReportSection:
    """The store's places, its size, and the last build."""
    nowhere = found.root is None
    rows = [_row("path", found.root or "none: nothing can be written", "bad" if nowhere else "")]
    if found.sizes is not None:
        kinds = f"{count(found.sizes.ops, 'op')} and {count(found.sizes.objects, 'object')}"
        rows.append(_row("size", f"{size(found.sizes.total)} of {size(found.limit)}: {kinds}"))
    if found.space is not None:
        rows.append(_row("space", str(found.space)))
    for build in found.builds[:1]:
        when = f"{age(now - build.ended)} ago, in {duration(build.seconds)}"
        rows.append(_row("last build", f"{build.op} for {build.made_for}, {when}"))
    for module in found.hosts[:_HOSTS]:
        made = f"{count(module.entries, 'object')} of {module.group}, {size(module.size)}"
        last = f"{module.newest} {age(now - module.published)} ago"
        why = f", because {module.rebuilt}" if module.rebuilt else ""
        rows.append(_row(module.host, f"{made}; last {last}{why}"))
    if len(found.hosts) > _HOSTS:
        rows.append(_row("others", f"and {len(found.hosts) - _HOSTS} more (`opkiln cache list`)"))
    rows += [_row("layer", layer) for layer in found.layers if layer != found.root]
    rows += [_row("remote", url) for url in found.remotes]
    for each in found.fetches[:_FETCHES]:
        rows.append(_row("fetched", f"{each.op} for {each.made_for}, {each.origin}"))
    if len(found.fetches) > _FETCHES:
        rows.append(_row("fetched", f"and {len(found.fetches) - _FETCHES} more"))
    rows += [_row("note", note, "bad") for note in found.notes]
    return ReportSection("cache", (), tuple(rows))


def settings(found: tuple[SettingValue, ...]) -> ReportSection:
    """The settings that are not at their defaults, and where they come from."""
    rows = []
    for each in found:
        if each.origin != "default":
            origin = "" if each.origin == each.variable else f"from {each.origin}"
            rows.append((Cell(each.variable), Cell(value_of(each)), Cell(origin, "weak")))
    note = f"{len(found) - len(rows)} more at their defaults (`opkiln report --json` has all)"
    return ReportSection("settings", (), tuple(rows), note)


def value_of(each: SettingValue) -> str:
    """A setting's value as a user would write it."""
    if isinstance(each.value, tuple):
        separator = ":" if each.variable.endswith(("PATH", "LAYERS")) else " "
        if each.variable == "HSA_OVERRIDE_GFX_VERSION":
            separator = "."
        return separator.join(map(str, each.value))
    if isinstance(each.value, bool):
        return "on" if each.value else "off"
    return str(each.value)


def _row(label: str, text: str, look: str = "") -> Row:
    return Cell(label), Cell(text, look)


def _line(text: str) -> str:
    return " ".join(text.split())
