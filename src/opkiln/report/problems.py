"""What of a report somebody should look at: what does not work here, and what would help."""

from __future__ import annotations

from typing import NamedTuple

from opkiln.model import CPU
from opkiln.report.compilers import BACKENDS, taken, wanted
from opkiln.report.doctor.here import pip
from opkiln.report.doctor.packages import install

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.report.collect import Environment
    from opkiln.report.compilers import Tool
    from opkiln.report.operators import OpStatus


class Problem(NamedTuple):
    """One thing that is not as it was meant to be."""

    subject: str  # an op, "torch", "cache", …
    text: str
    hint: str = ""  # a command


def of(ops: tuple[OpStatus, ...] | None, environment: Environment | None) -> tuple[Problem, ...]:
    """Every problem of what was looked at: the environment's first, as they explain the ops'."""
    found = [] if environment is None else list(_around(environment))
    affected: dict[str, list[str]] = {}  # reason -> ops
    for each in ops or ():
        if not each.here.compatible:
            affected.setdefault(each.here.reason, []).append(each.op)
    for reason, names in affected.items():
        hint = f"opkiln explain {names[0]}"
        if len(names) == 1:
            found.append(Problem(names[0], reason, hint))
        else:
            found.append(Problem(f"{len(names)} ops", f"{reason}: {', '.join(names)}", hint))
    return tuple(found)


def _around(environment: Environment) -> Iterator[Problem]:
    torch = environment.torch
    if environment.torch_error:
        reinstall = pip("install", "--force-reinstall", "torch")
        yield Problem("torch", f"it cannot be read: {environment.torch_error}", reinstall)
    elif torch is None:
        yield Problem("torch", "it is not installed", pip("install", "torch"))
    for backend, name in BACKENDS.items():
        own = [tool for tool in environment.tools if tool.backend == backend]
        needed = backend == CPU or wanted(backend, torch)
        if not needed or taken(own, backend):
            continue
        what = "compiler" if backend == CPU else "toolkit"
        reasons = "; ".join(f"{tool.path}: {tool.refused}" for tool in own) or "none was found"
        hint = _another_compiler(own) if backend == CPU else "opkiln doctor"
        yield Problem(f"{name} {what}", f"none can be used: {reasons}", hint)
    for each in environment.unfound:
        yield Problem(each.origin, f"there is no {each.path}", _unset(each.origin))
    accelerator = environment.devices.in_force
    if accelerator.error:
        yield Problem("accelerator", accelerator.error, accelerator.hint)
    store = environment.store
    for note in store.notes:
        yield Problem("cache", note)
    if store.root is None:
        yield Problem("cache", "nothing can be written", "export OPKILN_CACHE_DIR=DIRECTORY")
    for refused in environment.budget.refused:
        yield Problem("budget", f"not shared with other processes through {refused}")
    for text in environment.unknown:
        yield Problem("settings", text)


def _another_compiler(refused: list[Tool]) -> str:
    """The command that leaves the choice to opkiln, or brings a compiler."""
    return next((_unset(tool.origin) for tool in refused if _unset(tool.origin)), install("g++"))


def _unset(origin: str) -> str:
    """``unset CXX``; nothing where no variable but PATH led there."""
    return f"unset {origin}" if origin.isupper() and origin != "PATH" else ""
