"""What a step of a build did, by the observer's log; and the refusal of what no step may do."""

from __future__ import annotations

import os
from typing import NamedTuple

from opkiln.build_model import NVRTC, Plan, Step
from opkiln.errors import StepRefused
from opkiln.model import OpSpec
from opkiln.observing import inputs, launchers, limits, log, observer, programs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

UNSEEN = "nothing that it started could be observed"
_WHOLE = "an op's flags may only make the toolchain work in the build's own directory"


class Look(NamedTuple):
    """What one step did. The log may have gaps."""

    seen: log.Observation
    conduct: limits.Conduct
    stage: str
    first: str  # the program that it started with
    gap: str  # why the log does not count; empty if it does
    searched: tuple[str, ...]  # the directories where shared libraries were looked for
    # Beginnings of paths that the toolchain's identity represents: of a driver that is written in
    # Python.
    covered: tuple[str, ...] = ()

    @property
    def launched(self) -> bool:
        """Whether a launcher took part: it may have compiled nothing, or elsewhere."""
        return self.conduct.launched

    def made(self, output: str) -> bool:
        """Whether an observed compiler or linker wrote this file of the staging directory."""
        return self.conduct.made(os.path.join(self.stage, output))

    def tells_all_of(self, output: str) -> bool:
        """Whether the log says all that went into this file. (A launcher may have handed out a file
        that other programs made earlier.)"""
        return not self.gap and self.made(output)

    def unchanged(self) -> bool:
        """Whether each path that the step read still leads to the file that was open."""
        return inputs.identical(self.seen, self.stage)

    def inputs(self, unlinked: Callable[[str], str] = str) -> inputs.Inputs:
        """What the step depends on. ``unlinked`` gives the real path of one that leads out of the
        staging directory."""
        called = (self.first, *self.seen.called)
        chosen = self.conduct.chosen()
        found = inputs.of(self.seen, self.stage, called, chosen, self.searched, unlinked)
        return inputs.without(found, self.covered) if self.covered else found


def environment(plan: Plan, library: str, stage: str, output: str) -> dict[str, str]:
    """A step's environment variables. With them, the observer (``library``, empty if there is none)
    logs what the step with this output does."""
    return {
        **launchers.variables(plan.toolchain),
        **dict(plan.environment),
        **observer.environment(library, _log(stage, output)),
    }


def _log(stage: str, output: str) -> str:
    return os.path.join(stage, output + ".observed")


def look(
    plan: Plan, step: Step, stage: str, first: str, memory: tuple[str, ...], output: str = ""
) -> Look | None:
    """What the step did that started with the program ``first``; None if nothing was logged.

    ``memory`` is where the store keeps what it knows of programs. ``output`` is that of the
    command, if it is not the step's own. Raises StepRefused if the step started a program outside
    the toolchain, or wrote outside its directory, and the log has no gap.
    """
    seen = log.finish(_log(stage, output or step.output))
    if seen is None:
        return None
    conduct = limits.Conduct(seen, first, plan.toolchain, stage)
    loaded = _loaded(seen, memory)
    gap = _gap(conduct, seen, stage, loaded)
    stray = None if gap else conduct.stray()
    if stray is not None:
        raise _refusal(plan.spec, step, stray)
    device = plan.toolchain.device
    if device is None or device.family != NVRTC or first != device.path:
        return Look(seen, conduct, stage, first, gap, _searched(seen, loaded))
    from opkiln.toolchain import nvrtc

    return Look(seen, conduct, stage, first, gap, _searched(seen, loaded), nvrtc.covered(device))


def _loaded(seen: log.Observation, memory: tuple[str, ...]) -> dict[str, programs.Program | None]:
    """The programs and shared libraries of a step. None: it cannot be read."""
    found: dict[str, programs.Program | None] = {}
    for path in seen.loaded:
        try:
            found[path] = programs.known(path, memory)
        except FileNotFoundError:
            continue  # one that the step made for itself, or is gone, which is noticed elsewhere
        except PermissionError:
            found[path] = None
    return found


def _searched(
    seen: log.Observation, loaded: Mapping[str, programs.Program | None]
) -> tuple[str, ...]:
    named = {path for each in loaded.values() if each is not None for path in each.searches}
    return tuple(sorted(named | {path for path in seen.searched if os.path.isabs(path)}))


def _gap(
    conduct: limits.Conduct,
    seen: log.Observation,
    stage: str,
    loaded: Mapping[str, programs.Program | None],
) -> str:
    """Why a log does not count; empty if it does."""
    if not conduct.complete:
        silent = (each.asked_for for each in seen.started if not each.program)
        what = f"{next(silent, '') or 'a program'} could not be observed"
        return f"{what} ({seen.lost})" if seen.lost else what
    own = os.path.join(stage, "")
    for path in seen.rewritten:
        if not path.startswith(own):
            return f"{path} was read and then changed by the same step"
    for path, program in loaded.items():
        if program is None:
            return f"{path} cannot be read"
        if program.opaque:
            return f"{path} has system calls of its own"
    return ""


def _refusal(spec: OpSpec, step: Step, stray: limits.Stray) -> StepRefused:
    task = f"the compile of {step.source}" if step.source else "the link"
    name = os.path.basename(stray.program)
    if stray.written:
        did = f"{name} wrote {stray.path}"
        why = f"{stray.path} is outside the build's directory"
    else:
        did = f"{name} started {stray.path}"
        why = f"{stray.path} is not a program of the toolchain"
    return StepRefused(
        f"op {spec.name}: {task} is refused: {did}",
        why=f"{why}: {_WHOLE}\nnothing was published",
        hint=f"opkiln plan {spec.name}    # shows the flags",
    )
