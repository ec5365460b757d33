"""An observed command: what another program compiles or links, kept by what it really read.

The key of a command has its words, the directory that it works in and the variables that change
what compilers do. Paths below the directory, and below roots that its program names, are in the key
as paths below these. PATH is not in the key: the programs that it led to are among the facts.

A command is kept if nothing is missing in the observer's log, if all that it wrote is known, and if
no file was changed while it was read. Otherwise it runs as it would without opkiln.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from opkiln.building.prepared import MEMORY, CommandResult, ObservedCommand, Prepared
from opkiln.errors import StoreError
from opkiln.machine.facts import Hasher
from opkiln.run import events
from opkiln.settings import settings
from opkiln.store.layers import Store, claim

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.run.child import Completed
    from opkiln.store import lock

_NOT_RUN = 125  # the status of a command that was not started because another one failed


def run_command(command: ObservedCommand, store: Store | None = None) -> CommandResult:
    """What the command made at another time, put in place; or it is run, and kept.

    A failing command is returned, not raised. Raises BuildTimeout, BuildCancelled, and
    ToolchainError if it cannot be started.
    """
    store = Store() if store is None else store
    prepared = Prepared(command)
    rebuilt: list[str] = []

    def find() -> CommandResult | None:
        leaf, reasons = prepared.find(store, Hasher())
        rebuilt[:] = reasons
        if leaf is None:
            return None
        try:
            messages = prepared.put_in_place(leaf, again=False)
        except (OSError, ValueError, KeyError):
            return None  # it was collected just now, or the disk is full
        events.emit(events.STEP_END, op=command.group or command.host, label=command.label,
                    step=prepared.name, wall=0.0, max_rss=0, cached=True)  # fmt: skip
        return CommandResult(0, messages, cached=True)

    def waiting(state: lock.Waiting) -> None:
        events.emit(events.WAITING, op=command.label, **state.event_data(events.BUILD))

    if (done := find()) is not None:
        return done
    from opkiln.store import lock  # a hit does without

    with contextlib.suppress(StoreError):  # it is not ours: publishing says so
        claim(store.root)
    if store.root is None:
        return _run(prepared, store, rebuilt)
    limit = settings.build_timeout
    with lock.turn(
        store.root, prepared.name, find, waiting, what=command.label, limit=limit
    ) as got:
        if isinstance(got, CommandResult):
            return got
        fetched = find() if prepared.fetch(store, got) else None
        return fetched or _run(prepared, store, rebuilt)


def _run(prepared: Prepared, store: Store, rebuilt: Sequence[str]) -> CommandResult:
    from opkiln.building.attempt import Attempt
    from opkiln.building.observing import observer
    from opkiln.run import schedule
    from opkiln.store import publish

    command = prepared.command
    with publish.scratch("command") as stage:
        library = observer.library(store.memory, None, stage)
        attempt = Attempt(prepared, store, stage)
        observing = observer.environment(library, attempt.log)
        argv = (
            ("/bin/sh", "-c", command.command)
            if isinstance(command.command, str)
            else (prepared.words)
        )
        done: list[Completed] = []
        task = schedule.Task(
            name=prepared.name, op=command.group or command.host, label=command.label, argv=argv,
            cwd=command.directory, env={**_unset_locale(prepared), **observing}, tmpdir=stage,
            after=(), memory=MEMORY, finish=done.append, may_fail=True,
        )  # fmt: skip
        schedule.execute([task], timeout=settings.build_timeout)
        (completed,) = done
        unkept = f"it failed with {completed.returncode}"
        if completed.returncode == 0:
            wall, rss = completed.wall, completed.max_rss
            unkept = attempt.keep(completed.output, wall, rss, rebuilt)
    return CommandResult(completed.returncode, completed.output, unkept=unkept,
                         rebuilt="; ".join(rebuilt[:1]), seconds=completed.wall)  # fmt: skip


def _unset_locale(prepared: Prepared) -> dict[str, str]:
    """The child's environment. An empty LC_ALL is as none: the locale is the host program's."""
    return {"LC_ALL": "", **dict(prepared.environment)}


def run_commands(
    commands: Sequence[ObservedCommand], store: Store | None = None
) -> list[CommandResult]:
    """``run_command`` of each, in parallel. If one fails, those that were not started are not run.
    Raises as ``run_command``."""
    store = Store() if store is None else store
    found: dict[int, CommandResult] = {}
    errors: list[BaseException] = []

    def work(number: int, command: ObservedCommand) -> None:
        if errors or any(each.returncode for each in tuple(found.values())):
            return
        try:
            found[number] = run_command(command, store)
        except BaseException as error:
            errors.append(error)

    from opkiln.run import schedule

    schedule.call_in_threads(work, enumerate(commands))
    for error in errors:
        raise error
    return [found.get(number, _NEVER_RUN) for number in range(len(commands))]


_NEVER_RUN = CommandResult(_NOT_RUN, "", unkept="another command failed")
