"""Observes what is compiled through a launcher, by a pass of the preprocessor before the compile.

``observing.launchers`` says why, and what such a pass can tell. Here the passes are run, and their
results decide how the compiles are called and what counts as read.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from opkiln.build_model import Plan, Step
from opkiln.building import observed
from opkiln.engine import schedule
from opkiln.observing import inputs, launchers
from opkiln.store import key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.child import Completed
    from opkiln.plan import Command


class _Pass(NamedTuple):
    look: observed.Look
    direct: bool  # it does not see all that the compile reads, so that runs without the launcher
    bond: dict[str, str]  # what the launcher gets to know, as environment variables
    argv: tuple[str, ...]  # the compile's command


class Passes:
    """The passes of one round of compiles."""

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
        if not self._wanted or not launchers.can_preprocess(step, toolchain):
            return None
        text = step.output + ".ii"
        environment = observed.environment(self._plan, self._library, self._stage, text)
        return schedule.Task(
            name=text,
            op=self._plan.spec.name,
            label=f"{step.source} (preprocessor)",
            argv=launchers.preprocess(command, toolchain, os.path.join(self._stage, text)),
            cwd=self._stage,
            env={**environment, **launchers.DIRECT},
            tmpdir=self._stage,
            after=(),
            memory=step.memory,
            finish=lambda completed: self._finish(step, command, text, completed),
            may_fail=True,  # what is wrong with the source, the compile reports
        )

    def _finish(self, step: Step, command: Command, text: str, completed: Completed) -> None:
        look = observed.look(self._plan, step, self._stage, completed.argv[0], self._memory, text)
        if completed.returncode or look is None or not look.tells_all_of(text):
            return
        path = os.path.join(self._stage, text)
        with open(path, "rb") as file:
            made = file.read()
        os.unlink(path)
        direct = launchers.reads_more(made, command)
        files = look.inputs().files
        if direct:
            bond, command = launchers.DIRECT, launchers.without(command, self._plan.toolchain)
        else:
            bond = launchers.bound_to(key.step_key(self._plan, step), made, files)
            command = launchers.portable(command, self._stage, made)
        self._done[step.output] = _Pass(look, direct, bond, command.argv)

    def argv(self, step: Step, command: Command) -> tuple[str, ...]:
        """A compile's command: without the launcher if the pass did not see enough."""
        before = self._done.get(step.output)
        return command.argv if before is None else before.argv

    def environment(self, step: Step) -> dict[str, str]:
        """What binds a launcher to the text and the programs that the pass saw."""
        before = self._done.get(step.output)
        return {} if before is None else before.bond

    def is_missing(self, step: Step, look: observed.Look | None) -> bool:
        """Whether only the compile has shown that the compiler ran elsewhere, not at all, or
        unobserved."""
        if self._wanted or not self._library:
            return False
        if not launchers.can_preprocess(step, self._plan.toolchain):
            return False
        return look is None or look.launched or not look.tells_all_of(step.output)

    def evidence(
        self, step: Step, look: observed.Look | None
    ) -> tuple[observed.Look | None, bool, str]:
        """What tells what a step read, None if nothing does; whether all of it is unchanged; and
        why nothing does.

        ``look`` is what the compile itself did.
        """
        before = self._done.get(step.output)
        if before is not None and not before.direct:
            agreed = look is None or inputs.agree(before.look.seen, look.seen)
            return before.look, agreed and before.look.unchanged(), ""
        if look is None:
            return None, True, observed.UNSEEN
        if look.launched and before is None:
            return None, True, "a launcher may have had it compiled elsewhere"
        if not look.tells_all_of(step.output):
            return None, True, look.gap or f"no program was seen to write {step.output}"
        return look, look.unchanged(), ""
