"""Libraries that packages were installed with: each serves here, or is refused with its reason."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

from opkiln.decision import policy
from opkiln.decision.prebuilt import PREBUILT
from opkiln.decision.terms import CACHED
from opkiln.model import CARRIED, PACKAGE, SHARED
from opkiln.registry import bundled, declared, distribution
from opkiln.report.doctor import child
from opkiln.report.doctor.finding import Outcome, joined, passed, skipped, warned
from opkiln.report.doctor.here import Here, pip
from opkiln.settings import LAYOUT
from opkiln.store.inventory import names_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# What an op is declared as is its author's code, and judging a library opens those it needs.
_ASK = """
import json
from opkiln.errors import OpkilnError
from opkiln.decision.decide import decide
from opkiln.decision.terms import summary
from opkiln.decision.terms import Request
from opkiln.registry import ALL_OPS
status, decisions = '', []
try:
    outcome = decide(Request(ALL_OPS[sys.argv[1]]().op()))
    status = summary(outcome).status
    decisions = [[each.resort, each.verdict, each.reason] for each in outcome.trace.candidates]
except OpkilnError:
    pass
print()
print(json.dumps({'status': status, 'candidates': decisions}))
"""


def installed(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """What is installed is what serves: nothing of it is stale, damaged or for another machine."""
    found = dict(_found())
    if not found:
        return passed("no package was installed with libraries of ops")
    if not policy.uses_installed():
        return skipped(f"OPKILN_MODE=source: {', '.join(found)} is installed and not looked at")
    serving, instead, refused, commands = [], [], [], []
    for op, brought_by in found.items():
        answer, died = child.answer(_ASK, op)
        if died:
            continue  # which `ops` reports
        mine = [each[1:] for each in answer["candidates"] if each[0] == PREBUILT]
        reasons = "; ".join(dict.fromkeys(reason for verdict, reason in mine if verdict != "taken"))
        if any(verdict == "taken" for verdict, _ in mine):
            serving.append(op)
        elif reasons and answer["status"] == CACHED:
            instead.append(f"{op} is refused, and a build of it serves: {reasons}")
        elif reasons:
            refused.append(f"{op} is refused: {reasons}")
            damaged = "damaged: " in reasons
            again = pip("install", "--force-reinstall", "--no-deps", brought_by)
            commands.append(again if damaged else f"opkiln build {op}")
    facts = joined(f"they serve {', '.join(serving)}" if serving else "", *instead)
    if refused:
        return warned(joined(*refused, facts), " && ".join(dict.fromkeys(commands)))
    return passed(facts or f"{', '.join(found)}: none for what would be loaded here")


def _found() -> Iterator[tuple[str, str]]:
    """(op, the distribution that brought a library of it), of the ops that are declared.

    By the places of ``loading.installed``: nobody's package is imported to tell.
    """
    shared = [os.path.join(each, SHARED) for each in sys.path if os.path.isabs(each)]
    layers = [(name, os.path.join(each, name)) for each in shared for name in names_in(each)]
    for name, owner, package in _declared():
        op = name.rpartition(":")[2]
        for brought_by, layer in [(owner, os.path.join(package, CARRIED)), *layers]:
            ops = os.path.join(layer, LAYOUT, "ops")
            if any(op in names_in(os.path.join(ops, each)) for each in names_in(ops)):
                yield name, brought_by
                break


def _declared() -> Iterator[tuple[str, str, str]]:
    """(op as ALL_OPS lists it, its distribution, the directory of its package) of every op."""
    yield from ((op, "opkiln", PACKAGE) for op in bundled())
    for name, entry in declared().items():
        top = entry.module.partition(".")[0]
        found = PathFinder.find_spec(top)
        if found and found.submodule_search_locations:
            yield name, distribution(entry) or top, next(iter(found.submodule_search_locations))
