"""The ops: each that is bundled or that another package declares can be imported, and what those of
other packages declare in Python goes with their schemas."""

from __future__ import annotations

import shlex

from opkiln.errors import SpecError
from opkiln.registry import ALL_OPS, bundled, declared, distribution
from opkiln.report.doctor import child
from opkiln.report.doctor.finding import Outcome, joined, passed, warned
from opkiln.report.doctor.here import Here, interpreter

# An op's module is its author's code: it may import torch, end the process or crash it.
_ASK = """
import json
from opkiln.errors import OpkilnError
from opkiln.loading import declaration
from opkiln.registry import ALL_OPS
reason = ''
try:
    builder = ALL_OPS[sys.argv[1]]()
    if registration := builder.registration():
        declaration.check_registration(builder.name, builder.distribution, registration)
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
    others = declared()
    for name in others:
        found, died = child.answer(_ASK, name)
        if reason := died or found["reason"]:
            broken[name] = reason if f"op {name}" in reason else f"op {name}: {reason}"
    if broken:
        imports = dict.fromkeys(others[name].module for name in broken if name in others)
        commands = [f"{interpreter()} -c {shlex.quote(f'import {each}')}" for each in imports]
        return warned(joined(*broken.values()), "; ".join(commands))
    owners = {**dict.fromkeys(own, "opkiln"), **{n: distribution(e) for n, e in others.items()}}
    shared = [
        f"{entry.name} is the op of {owners[entry.name]}, that of {distribution(entry)} is {name}"
        for name, entry in others.items()
        if name != entry.name
    ]
    counted = f"{len(others)} of other packages" if others else ""
    bundled_here = f"{len(own)} bundled: {', '.join(own)}" if own else "none is bundled"
    return passed(joined(bundled_here, counted, *shared))
