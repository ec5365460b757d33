"""What a step of a build did, by the observer's log; and the refusal of what no step may do."""

from __future__ import annotations

import os
from typing import NamedTuple

from opkiln.base.build_model import NVRTC, Plan, Step
from opkiln.base.model import OpSpec
from opkiln.building import gather
from opkiln.building.observing import limits, log, observer
from opkiln.errors import StepRefused
from opkiln.run import schedule
from opkiln.store import key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opkiln.base.build_model import Toolchain
    from opkiln.plan.plan import Command
    from opkiln.run.child import Completed

UNSEEN = "nothing that it started could be observed"
_WHOLE = "an op's flags may only make the toolchain work in the build's own directory"


class StepRecord(NamedTuple):
    """What one step did. The log may have gaps."""

    seen: log.Observation
    conduct: limits.Conduct
    stage: str
    first: str  # the program that it started with
    gap: str  # why the log does not count; empty if it does
    searched: tuple[str, ...]  # the directories where shared libraries were looked for
    # Prefixes of paths that the toolchain's identity represents, for a driver written in Python.
    covered: tuple[str, ...] = ()

    @property
    def launched(self) -> bool:
        """Whether a launcher took part: it may have compiled nothing, or elsewhere."""
        return self.conduct.launched

    def wrote(self, output: str) -> bool:
        """Whether an observed compiler or linker wrote this file of the staging directory."""
        return self.conduct.made(os.path.join(self.stage, output))

    def tells_all_of(self, output: str) -> bool:
        """Whether the log says all that went into this file. (A launcher may have handed out a file
        that other programs made earlier.)"""
        return not self.gap and self.wrote(output)

    def is_unchanged(self) -> bool:
        """Whether each path that the step read still leads to the file that was open."""
        return gather.identical(self.seen, self.stage)

    def inputs(self, unlinked: Callable[[str], str] = str) -> gather.Inputs:
        """What the step depends on. ``unlinked`` gives the real path of one that leads out of the
        staging directory."""
        called = (self.first, *self.seen.called)
        chosen = self.conduct.chosen()
        return gather.list_inputs(
            self.seen, self.stage, called, chosen, self.searched, unlinked, self.covered
        )


def environment(plan: Plan, library: str, stage: str, output: str) -> dict[str, str]:
    """A step's environment variables. With them, the observer (``library``, empty if there is none)
    logs what the step with this output does."""
    return {
        **limits.variables(plan.toolchain),
        **dict(plan.environment),
        **observer.environment(library, _log(stage, output)),
    }


def _log(stage: str, output: str) -> str:
    return os.path.join(stage, output + ".observed")


def read_step(
    plan: Plan, step: Step, stage: str, first: str, memory: tuple[str, ...], output: str = ""
) -> StepRecord | None:
    """What the step did that started with the program ``first``; None if nothing was logged.

    ``memory`` is where the store keeps what it knows of programs. ``output`` is that of the
    command, if it is not the step's own. Raises StepRefused if the step started a program outside
    the toolchain, or wrote outside its directory, and the log has no gap.
    """
    found = read_log(_log(stage, output or step.output), plan.toolchain, stage, first, memory)
    if found is None:
        return None
    stray = None if found.gap else found.conduct.stray()
    if stray is not None:
        raise _refusal(plan.spec, step, stray)
    device = plan.toolchain.device
    if device is not None and device.family == NVRTC and first == device.path:
        from opkiln.machine.toolchain import nvrtc

        return found._replace(covered=nvrtc.covered_prefixes(device))
    return found


def read_log(
    path: str,
    toolchain: Toolchain | None,
    stage: str,
    first: str,
    memory: tuple[str, ...],
    covered: tuple[str, ...] = (),
) -> StepRecord | None:
    """What the programs did that wrote the log ``path``, judged by nobody; None if nothing was
    logged. What lies in the directory ``stage`` is their own."""
    seen = log.finish(path)
    if seen is None:
        return None
    conduct = limits.Conduct(seen, first, toolchain, stage)
    loaded = _read_loaded(seen, memory)
    gap = _gap(conduct, seen, stage, loaded)
    searched = _searched_directories(seen, loaded)
    return StepRecord(seen, conduct, stage, first, gap, searched, covered)


def _read_loaded(
    seen: log.Observation, memory: tuple[str, ...]
) -> dict[str, observer.Program | None]:
    """The programs and shared libraries of a step. None: it cannot be read."""
    found: dict[str, observer.Program | None] = {}
    for path in seen.loaded:
        try:
            found[path] = observer.identify(path, memory)
        except FileNotFoundError:
            continue  # one that the step made for itself, or is gone, which is noticed elsewhere
        except PermissionError:
            found[path] = None
    return found


def _searched_directories(
    seen: log.Observation, loaded: Mapping[str, observer.Program | None]
) -> tuple[str, ...]:
    named = {path for each in loaded.values() if each is not None for path in each.searches}
    return tuple(sorted(named | {path for path in seen.searched if os.path.isabs(path)}))


def _gap(
    conduct: limits.Conduct,
    seen: log.Observation,
    stage: str,
    loaded: Mapping[str, observer.Program | None],
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
        f"op {spec.title}: {task} is refused: {did}",
        why=f"{why}: {_WHOLE}\nnothing was published",
        hint=f"opkiln plan {spec.name}    # shows the flags",
    )


class _Pass(NamedTuple):
    look: StepRecord
    direct: bool  # it does not see all that the compile reads, so that runs without the launcher
    bond: dict[str, str]  # what the launcher gets to know, as environment variables
    argv: tuple[str, ...]  # the compile's command


class Passes:
    """What is compiled through a launcher is observed by a pass of the preprocessor before the
    compile. These are the passes of one round of compiles.

    ``observing.limits`` says what such a pass can tell. The passes decide how the compiles are
    called and what counts as read.
    """

    def __init__(
        self, plan: Plan, stage: str, library: str, memory: tuple[str, ...], *, launched: bool
    ) -> None:
        """``library`` is the observer; ``launched``: whether a launcher is known to take part, or
        the compile was not observed."""
        self._plan = plan
        self._memory = memory
        self._stage = stage
        self._library = library
        self._wanted = launched and bool(library)
        self._done: dict[str, _Pass] = {}  # by the step's output

    def task(self, step: Step, command: Command) -> schedule.Task | None:
        """The preprocessor on what this command compiles; None if no pass is needed, or none would
        tell what the compile reads."""
        toolchain = self._plan.toolchain
        if not self._wanted or not limits.can_preprocess(step, toolchain):
            return None
        text = step.output + ".ii"
        return schedule.Task(
            name=text,
            op=self._plan.spec.name,
            label=f"{step.source} (preprocessor)",
            argv=limits.preprocess(command, toolchain, os.path.join(self._stage, text)),
            cwd=self._stage,
            env={
                **environment(self._plan, self._library, self._stage, text),
                **limits.DIRECT,
            },
            tmpdir=self._stage,
            after=(),
            memory=step.memory,
            finish=lambda completed: self._finish(step, command, text, completed),
            may_fail=True,  # what is wrong with the source, the compile reports
        )

    def _finish(self, step: Step, command: Command, text: str, completed: Completed) -> None:
        seen = read_step(self._plan, step, self._stage, completed.argv[0], self._memory, text)
        if completed.returncode or seen is None or not seen.tells_all_of(text):
            return
        path = os.path.join(self._stage, text)
        with open(path, "rb") as file:
            made = file.read()
        os.unlink(path)
        direct = limits.reads_more(made, command)
        files = seen.inputs().files
        if direct:
            bond, command = limits.DIRECT, limits.without(command, self._plan.toolchain)
        else:
            bond = limits.bound_to(key.step_key(self._plan, step), made, files)
            command = limits.portable(command, self._stage, made)
        self._done[step.output] = _Pass(seen, direct, bond, command.argv)

    def argv(self, step: Step, command: Command) -> tuple[str, ...]:
        """A compile's command: without the launcher if the pass did not see enough."""
        before = self._done.get(step.output)
        return command.argv if before is None else before.argv

    def environment(self, step: Step) -> dict[str, str]:
        """What binds a launcher to the text and the programs that the pass saw. A launcher has
        nothing to do with a link."""
        if not step.file:
            return limits.DIRECT
        before = self._done.get(step.output)
        return {} if before is None else before.bond

    def is_missing(self, step: Step, look: StepRecord | None) -> bool:
        """Whether only the compile has shown that the compiler ran elsewhere, not at all, or
        unobserved."""
        if self._wanted or not self._library:
            return False
        if not limits.can_preprocess(step, self._plan.toolchain):
            return False
        return look is None or look.launched or not look.tells_all_of(step.output)

    def evidence(self, step: Step, look: StepRecord | None) -> tuple[StepRecord | None, bool, str]:
        """What tells what a step read, None if nothing does; whether all of it is unchanged; and
        why nothing does.

        ``look`` is what the compile itself did.
        """
        before = self._done.get(step.output)
        if before is not None and not before.direct:
            agreed = look is None or gather.agree(before.look.seen, look.seen)
            return before.look, agreed and before.look.is_unchanged(), ""
        if look is None:
            return None, True, UNSEEN
        if look.launched and before is None and step.file:
            return None, True, "a launcher may have had it compiled elsewhere"
        if not look.tells_all_of(step.output):
            return None, True, look.gap or f"no program was seen to write {step.output}"
        return look, look.is_unchanged(), ""
