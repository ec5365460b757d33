"""What a step of a build did, by the observer's log; and the refusal of what no step may do."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from opkiln.build_model import Plan, Step
from opkiln.errors import StepRefused
from opkiln.model import OpSpec
from opkiln.observing import inputs, limits, log, observer
from opkiln.toolchain import nvrtc

_WHOLE = "an op's flags may only make the toolchain work in the build's own directory"


class Look(NamedTuple):
    """What one step did. The log may have gaps."""

    seen: log.Observation
    conduct: limits.Conduct
    stage: str
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
        return self.conduct.complete and self.made(output)

    def unchanged(self) -> bool:
        """Whether each path that the step read still leads to the file that was open."""
        return inputs.identical(self.seen, self.stage)

    def inputs(self) -> inputs.Inputs:
        found = inputs.of(self.seen, self.stage, self.conduct.chosen())
        return inputs.without(found, self.covered) if self.covered else found


def environment(plan: Plan, library: str, stage: str, output: str) -> dict[str, str]:
    """A step's environment variables. With them, the observer (``library``, empty if there is none)
    logs what the step with this output does."""
    return {**dict(plan.environment), **observer.environment(library, _log(stage, output))}


def _log(stage: str, output: str) -> str:
    return os.path.join(stage, output + ".observed")


def look(plan: Plan, step: Step, stage: str, first: str, output: str = "") -> Look | None:
    """What the step did that started with the program ``first``; None if nothing was logged.

    ``output`` is that of the command, if it is not the step's own. Raises StepRefused if the step
    started a program outside the toolchain, or wrote outside its directory.
    """
    path = _log(stage, output or step.output)
    seen = log.read(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # the next attempt starts a log of its own
    if seen is None:
        return None
    conduct = limits.Conduct(seen, first, limits.Compilers.of(plan.toolchain), stage)
    stray = conduct.stray()
    if stray is not None:
        raise _refusal(plan.spec, step, stray)
    device = plan.toolchain.device
    if device is None or device.family != nvrtc.FAMILY or first != device.path:
        return Look(seen, conduct, stage)
    return Look(seen, conduct, stage, nvrtc.covered(device))


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
