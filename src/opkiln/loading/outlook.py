"""What loading an op here would come to, in a word, without doing it."""

from __future__ import annotations

from typing import NamedTuple

from opkiln.loading import resolve, seal
from opkiln.loading.loader import Op
from opkiln.loading.trace import Trace
from opkiln.model import CPU
from opkiln.settings import settings
from opkiln.toolchain import choice, host

CACHED = "cached"
WOULD_COMPILE = "would compile"
WOULD_FALL_BACK = "would fall back"
WOULD_FAIL = "would fail"


class Outlook(NamedTuple):
    """``reason`` says why it is not cached; ``path`` is the entry when it is."""

    status: str
    reason: str
    path: str
    trace: Trace


def no_compiler(backend: str) -> str:
    """What is missing to compile for a backend; empty when compilers are there."""
    if not host.available():
        return "there is no C++ compiler"
    if backend != CPU and not choice.available(backend):
        return f"there is no compiler for {backend}"
    return ""


def outlook(op: Op) -> Outlook:
    """Look at an op as a load would. Builds and writes nothing. Raises ArchError, SpecError."""
    compiles, trace = resolve.would_compile(op)
    for decision in trace.decisions:
        if decision.verdict == "taken":
            return Outlook(CACHED, "", decision.subject, trace)
    last = trace.decisions[-1].reason if trace.decisions else ""
    found = "; ".join(trace.refusals()) or last
    falls_back = op.has_reference and settings.fallback != "error" and not seal.sealed()
    barred = (seal.why_not_compile() or no_compiler(op.spec.backend)) if compiles else ""
    if compiles and not barred and falls_back and settings.jit == "needed":
        barred = seal.SPARED
    if compiles and not barred:
        return Outlook(WOULD_COMPILE, found, "", trace)
    reason = barred if compiles else found
    return Outlook(WOULD_FALL_BACK if falls_back else WOULD_FAIL, reason, "", trace)
