"""The ops: each that is bundled or that another package declares can be imported."""

from __future__ import annotations

import shlex

from opkiln.errors import SpecError
from opkiln.registry import ALL_OPS, GROUP, bundled, distribution
from opkiln.report.doctor import child
from opkiln.report.doctor.finding import Outcome, joined, passed, warned
from opkiln.report.doctor.here import Here, interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# An op's module is its author's code: it may import torch, end the process or crash it.
_ASK = """
import json
from opkiln.errors import OpkilnError
from opkiln.registry import ALL_OPS
reason = ''
try:
    ALL_OPS[sys.argv[1]]
except OpkilnError as error:
    reason = '; '.join([error.what, *error.why.splitlines()])
print()
print(json.dumps({'reason': reason}))
"""


def importable(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """Every op can be imported; one that cannot is in nobody's way but its own."""
    own = bundled()
    broken: dict[str, str] = {}
    for name in own:
        try:
            ALL_OPS[name]
        except (ImportError, SpecError) as error:
            broken[name] = str(error)
    declared = _declared()
    modules: dict[str, str] = {}
    for entry in declared:
        if entry.name not in own:
            modules.setdefault(entry.name, entry.module)
    for name in modules:
        found, died = child.answer(_ASK, name)
        if reason := died or found["reason"]:
            broken[name] = reason if f"op {name}" in reason else f"op {name}: {reason}"
    if broken:
        imports = dict.fromkeys(modules[name] for name in broken if name in modules)
        commands = [f"{interpreter()} -c {shlex.quote(f'import {each}')}" for each in imports]
        return warned(joined(*broken.values()), "; ".join(commands))
    if hidden := _hidden(own, declared):
        told = [
            f"op {op} of {package} is hidden by that of {first}" for op, package, first in hidden
        ]
        return warned(joined(*told), "; ".join(f"opkiln explain {p}:{op}" for op, p, _ in hidden))
    others = f"{len(modules)} of other packages" if modules else ""
    return passed(joined(f"{len(own)} bundled: {', '.join(own)}", others))


def _declared() -> list[EntryPoint]:
    """The ops of other packages."""
    from importlib.metadata import entry_points

    return list(entry_points(group=GROUP))


def _hidden(own: list[str], declared: list[EntryPoint]) -> list[tuple[str, str, str]]:
    """(op, its package, the package whose op is found by that name) of each that is not found."""
    first = dict.fromkeys(own, "opkiln")
    found = []
    for entry in declared:
        package = distribution(entry)
        owner = first.setdefault(entry.name, package)
        if owner != package:
            found.append((entry.name, package, owner))
    return found
