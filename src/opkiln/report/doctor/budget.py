"""The budget of all builds of this user: CPUs, memory for each job, and who it is shared with."""

from __future__ import annotations

from opkiln.engine import budget, cgroup
from opkiln.report.doctor.finding import Outcome, failed, joined, passed, warned
from opkiln.report.doctor.here import Here
from opkiln.report.layout import size
from opkiln.settings import origin_of, settings

# What one compile takes at most: a C++ source, and one with torch's own headers. Past the second
# nothing is to be said; below the first, a build may be killed for its memory.
_LEAST, _ENOUGH = 512 << 20, 2 << 30


def cpus(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """How many jobs run at once, and what limits them."""
    limits = budget.measure()
    quota = cgroup.cpu_quota()
    noun = "CPU" if len(limits.slots) == 1 else "CPUs"
    limited = "" if quota is None else f"a cgroup quota of {quota:g}"
    jobs = f"at most {settings.max_jobs} jobs, as {origin_of('max_jobs')[1]} says"
    return passed(joined(f"{len(limits.slots)} {noun} by {limits.cpus_from}", limited,
                         jobs if settings.max_jobs else ""))  # fmt: skip


def memory(here: Here) -> Outcome:  # noqa: ARG001
    """The memory of all builds is enough for one job."""
    limits = budget.measure()
    share = f"{size(limits.memory)} ({limits.memory_from}), {size(limits.share)} for each CPU"
    limit = cgroup.memory_limit()
    facts = joined(share, "" if limit is None else f"the cgroup's limit is {size(limit)}")
    command = "unset OPKILN_MEMORY" if limits.memory_from == "OPKILN_MEMORY" else ""
    if limits.memory < _LEAST:
        text = (
            f"{facts}: less than one job takes ({size(_LEAST)}), so one runs at a time and may be"
        )
        return failed(f"{text} killed", command)
    if limits.memory < _ENOUGH:
        return warned(f"{facts}: one compile with torch's headers takes {size(_ENOUGH)}", command)
    return passed(facts)


def sharing(here: Here) -> Outcome:  # noqa: ARG001
    """All processes of this user keep to one budget."""
    found = budget.shared().describe()
    refused = joined(*found.refused)
    if found.where is None:
        return warned(f"each process keeps to a budget of its own: {refused}",
                      "unset OPKILN_RUNTIME_DIR" if settings.runtime_dir else "")  # fmt: skip
    if found.refused and settings.runtime_dir:
        return warned(f"through {found.where}; not through {refused}", "unset OPKILN_RUNTIME_DIR")
    return passed(joined(f"through {found.where}", f"not through {refused}" if refused else ""))
