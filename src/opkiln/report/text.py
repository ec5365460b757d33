"""A report as text: aligned, useful without colour."""

from __future__ import annotations

from opkiln.report.layout import columns, count, paint, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.report.collect import InForce, OpStatus, Report


def render(report: Report, *, colour: bool) -> str:
    """The whole report."""
    sections = [
        ("ops", _ops(report.ops, colour)),
        ("environment", _environment(report, colour)),
        ("store", _store(report)),
        ("settings", _settings(report.settings)),
    ]
    parts = [paint(title, "strong", colour=colour) + "\n" + body for title, body in sections]
    return "\n\n".join(parts)


def _ops(ops: tuple[OpStatus, ...], colour: bool) -> str:
    if not ops:
        return "  none"
    rows = [("op", "cached", "compatible", "")]
    for each in ops:
        cached, compatible = _yes(each.cached, colour), _yes(each.compatible, colour)
        rows.append((each.op, cached, compatible, " ".join(each.reason.split())))
    return columns(rows, indent=2)


def _yes(value: bool, colour: bool) -> str:
    return paint("yes" if value else "no", "good" if value else "bad", colour=colour)


def _environment(report: Report, colour: bool) -> str:
    machine, limits = report.machine, report.budget.limits
    rows = [
        ("opkiln", report.opkiln),
        ("python", f"{machine.python}, {machine.executable}"),
        ("system", machine.system),
        ("cpu", machine.cpu),
        ("", f"{machine.level} ({machine.simd})"),
    ]
    for number, each in enumerate(report.compilers):
        refused = paint(f"refused: {each.refused}", "bad", colour=colour) if each.refused else ""
        facts = ", ".join(part for part in (each.path, each.version, refused) if part)
        rows.append(("compilers" if number == 0 else "", f"{facts} ({each.origin})"))
    rows.append(("torch", _torch(report)))
    jobs = f", at most {report.budget.max_jobs} jobs" if report.budget.max_jobs else ""
    rows += [
        ("budget", f"{len(limits.slots)} CPUs ({limits.cpus_from}){jobs}"),
        ("", f"{size(limits.memory)} of memory ({limits.memory_from})"),
        ("", f"shared through {report.budget.where}" if report.budget.where else "not shared"),
    ]
    rows += [("", f"not shared through {reason}") for reason in report.budget.refused]
    if report.dropped:
        rows.append(("dropped", ", ".join(report.dropped) + " (no compiler sees them)"))
    return columns(rows, indent=2)


def _torch(report: Report) -> str:
    torch = report.torch
    if torch is None:
        return "not installed"
    backends = [f"CUDA {torch.cuda}"] if torch.cuda else []
    backends += [f"HIP {torch.hip}"] if torch.hip else []
    return f"{torch.version}, {' and '.join(backends) or 'no CUDA, no HIP'}, {torch.path}"


def _store(report: Report) -> str:
    store = report.store
    rows = [("path", store.root or "none: nothing can be written")]
    if store.sizes is not None:
        found = store.sizes
        kinds = f"{count(found.ops, 'op')} and {count(found.objects, 'object')}"
        rows.append(("size", f"{size(found.total)}: {kinds}"))
    rows += [("layer", layer) for layer in store.layers if layer != store.root]
    rows += [("note", note) for note in store.notes]
    return columns(rows, indent=2)


def _settings(found: tuple[InForce, ...]) -> str:
    given = [each for each in found if each.origin != "default"]
    rows = [(each.variable, _value(each), _origin(each)) for each in given]
    rest = f"  {len(found) - len(given)} more at their defaults (`opkiln report --json` has all)"
    return "\n".join([*([columns(rows, indent=2)] if rows else []), rest])


def _value(each: InForce) -> str:
    if isinstance(each.value, tuple):
        return (":" if each.variable.endswith("PATH") else " ").join(each.value)
    if isinstance(each.value, bool):
        return "on" if each.value else "off"
    return str(each.value)


def _origin(each: InForce) -> str:
    return "" if each.origin == each.variable else f"from {each.origin}"
