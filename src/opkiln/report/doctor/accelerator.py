"""The accelerator that programs get, and whether it is the one that was asked for."""

from __future__ import annotations

from opkiln.report.doctor import child
from opkiln.report.doctor.finding import Outcome, copyable, failed, joined, passed
from opkiln.report.doctor.here import Here
from opkiln.settings import origin_of

# Those of other packages are their code, and asking for a vendor's by name imports torch.
_ASK = """
import json
from opkiln.accelerator import detect
from opkiln.errors import AcceleratorError
try:
    found = detect.trace()[-1]
    answer = {'name': found.name, 'why': found.why}
except AcceleratorError as error:
    answer = {'what': error.what, 'because': error.why, 'hint': error.hint}
print()
print(json.dumps(answer))
"""


def chosen(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """An accelerator serves: the one that was asked for, or the first with a device."""
    asked, origin = origin_of("accelerator")
    found, reason = child.answer(_ASK)
    if reason:
        command = f"unset {origin}" if asked and origin.isupper() else ""
        return failed(joined(f"{origin}={asked}" if asked else "", reason), command)
    if "what" in found:
        evidence = joined(found["what"], *found["because"].splitlines())
        return failed(evidence, copyable(found["hint"]))
    by = f"as {origin} asks" if asked else "the first with a device"
    return passed(joined(f"{found['name']}, {by}", found["why"]))
