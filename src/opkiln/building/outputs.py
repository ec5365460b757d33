"""Runs the steps of a plan. Each object comes from the store, or is compiled and stored.

If a file is edited or exchanged while it is compiled, the object must not be stored under the key
of the new text. Which files the compiler read is known only afterwards. So:
- The file behind each path must still be the one that was open, by device, inode, size and change
  time. Under a launcher, and where the compile could not be observed, a pass of the preprocessor
  before the compile is observed instead (``observing.limits``).
- If a file's change time is before the start of the compile, the compiler saw the present text.
- If it is later, the present text is compared with a snapshot from before the compile. Without a
  snapshot, one is taken and the compile is repeated.
- The dynamic linker's list, and libraries that it did not load, were not seen open. So the
  directories above them must have been as they are before the compile, too.
The same holds for links. In the end all steps must have had one state of the files.

If neither was observed, nobody knows what the object was made from: it is not stored, and what is
linked from it serves this process alone.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from functools import partial
from typing import NamedTuple

from opkiln.base.build_model import Plan, Step
from opkiln.base.model import ROCM
from opkiln.building import gather, kept, observed
from opkiln.building.kept import Anchors, Written
from opkiln.building.observing import limits, observer
from opkiln.building.observing.observer import digest
from opkiln.errors import BuildError, SourcesChanging
from opkiln.machine.facts import FILE, Hasher
from opkiln.plan import plan as plans
from opkiln.plan.flags import PLAIN
from opkiln.run import events, schedule
from opkiln.settings import settings
from opkiln.store import key, publish
from opkiln.store.key import Fact
from opkiln.store.layers import Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opkiln.machine.toolchain.staged_copy import Staged
    from opkiln.run.child import Completed

_ROUNDS = 8


class StepOutput(NamedTuple):
    """The output of one step, in the staging directory."""

    step: Step
    facts: tuple[Fact, ...]  # what went into it
    log: str
    wall: float = 0.0
    max_rss: int = 0
    cached: bool = False
    unobserved: str = ""  # why it is not known what went into it


class Stage:
    """The staging directory of a build, and the outputs that are in it."""

    def __init__(
        self, plan: Plan, store: Store, path: str, since: float, on_link: Callable[[], None]
    ) -> None:
        """The time of the first steps counts from ``since``. ``on_link`` is called after each link,
        before it is known whether the artifact was made from the present files."""
        self.plan, self.store, self.path = plan, store, path
        self.since: float | None = since
        self.on_link = on_link
        self.observer = observer.library(store.memory, plan.toolchain, path)
        self.launched = limits.named(plan.toolchain)  # the host compiler, as far as is known
        self.made: dict[str, StepOutput] = {}  # by the output's name
        self.links = 0  # how many artifacts there were
        self.snapshots: dict[str, dict[str, str]] = {}  # of what a step reads; by output
        self.places = plans.anchors_of(plan.spec, plan.toolchain)
        self.known = gather.places_of(plan)

    def run(self) -> tuple[Fact, ...]:
        """Run all steps, until they were made from the same state of the files. Returns what went
        into the artifact, which is nothing if a step was ``unobserved``.

        Raises schedule.StepFailed, SourcesChanging, and the engine's errors.
        """
        for turn in range(_ROUNDS):
            if not self._make(turn):
                continue
            if self.unobserved:
                return ()
            # If a header was edited between two compiles, their objects have different versions of
            # it.
            with contextlib.suppress(gather.Disagree, FileNotFoundError):
                found = gather.union_of_facts(each.facts for each in self.made.values())
                if not key.find_broken(found, self.places, self.hasher()):
                    return found
            self.made.clear()
        sources = [step.source for step in self.plan.steps if step.output not in self.made]
        what = f"op {self.plan.spec.title}: its files were edited during each of {_ROUNDS} builds"
        if sources and sources[0]:
            what = f"{sources[0]} or one of its includes was edited during all {_ROUNDS} compiles"
        raise SourcesChanging(
            what, why="nothing was published", hint="save the files and try again"
        )

    @property
    def unobserved(self) -> str:
        """Why it is not known what went into the artifact; empty if it is."""
        found = (self.made[step.output].unobserved for step in self.plan.steps)
        return next(filter(None, found), "")

    @property
    def compiled(self) -> list[StepOutput]:
        """The objects that did not come from the store."""
        compiles = (self.made[step.output] for step in self.plan.steps if step.kind == "compile")
        return [each for each in compiles if not each.cached]

    @property
    def log(self) -> str:
        """The commands, and what they printed."""
        places = plans.anchors(self.plan, self.path)
        found = ((step, self.made[step.output]) for step in self.plan.steps)
        return "\n".join(
            f"$ {shlex.join(plans.command(step, places).argv)}\n"
            f"{'(from the store)' if each.cached else each.log}"
            for step, each in found
        )

    def named(self, step: Step) -> tuple[str, ...]:
        """The source of a step, unless its text is in the key."""
        if step.source in dict(self.plan.spec.inline):
            return ()
        return (plans.render(step.file, plans.anchors(self.plan, self.path)),)

    def hasher(self) -> Hasher:
        return Hasher(partial(digest, memory=self.store.memory))

    def _make(self, turn: int) -> bool:
        """Make the missing outputs. False if one may be from files that have changed since."""
        hasher = Hasher()
        missing = []
        for step in self.plan.steps:
            if step.output not in self.made:
                found = _take_from_store(self, step, hasher) if step.kind == "compile" else None
                if found is None:
                    missing.append(step)
                    continue
                self.made[step.output] = found
                events.emit("step-end", op=self.plan.spec.name, label=step.source,
                            step=step.output, wall=0.0, max_rss=0, cached=True)  # fmt: skip
        if missing:
            _StepRound(self, missing, turn).run()
        for step in self.plan.steps:
            if any(output not in self.made for output in _list_needed(step, self.plan.steps)):
                self.made.pop(step.output, None)
        return all(step.output in self.made for step in self.plan.steps)


def _list_needed(step: Step, steps: Iterable[Step]) -> tuple[str, ...]:
    """The outputs of the steps that must come before one."""
    return tuple(
        each.output
        for each in steps
        if each.output in step.inputs or (each.kind == "stub" and step.kind == "link")
    )


def _take_from_store(stage: Stage, step: Step, hasher: Hasher) -> StepOutput | None:
    name = key.step_key(stage.plan, step)
    leaf, _ = kept.find(stage.store, name, stage.places, hasher)
    if leaf is None and kept.fetch(stage.store, name, stage.named(step), stage.places):
        leaf, _ = kept.find(stage.store, name, stage.places, Hasher())
    if leaf is None:
        return None
    try:
        known = kept.read_facts(leaf)
        kept.put_in_place(leaf, Anchors({"stage": stage.path}))
    except (OSError, ValueError, KeyError):
        return None  # garbage collection removed it meanwhile, so it is compiled again
    return StepOutput(step, known, "", cached=True)


def _translate(plan: Plan, directory: str) -> Staged | None:
    """The translated copy of the sources that is compiled for ROCm, or by the emulator; None if the
    sources themselves are compiled."""
    spec, torch = plan.spec, plan.toolchain.torch
    if not spec.emulated and plan.target.backend != ROCM:
        return None
    if not spec.emulated and torch is None:
        raise BuildError(
            f"op {spec.title} needs torch to be built for ROCm",
            why="torch's hipify translates its sources, but torch is not installed",
            hint="pip install torch",
        )
    from opkiln.machine.toolchain import staged_copy

    # If an edit makes the whole build run again, the copy from before the edit is there.
    publish.remove(directory)
    os.mkdir(directory, 0o700)
    if spec.emulated:
        return staged_copy.stage_emulated(spec, directory)
    assert torch is not None
    return staged_copy.stage_hip(spec, torch, directory)


class _StepRound:
    """One run of the steps that are missing."""

    def __init__(self, stage: Stage, steps: list[Step], turn: int) -> None:
        plan = stage.plan
        self._stage, self._plan, self._steps = stage, plan, steps
        self._places = plans.anchors(plan, stage.path)
        for step in steps:
            if step.output not in stage.snapshots:
                source = [plans.render(step.file, self._places)] if step.file else []
                stage.snapshots[step.output] = kept.snapshot_of(source)
        self._copy = None
        if any(step.file for step in steps):
            self._copy = _translate(plan, os.path.join(stage.path, f"hip{turn}"))
        if self._copy is not None:
            self._places["src"] = self._copy.root
        self._began = kept.kernel_time(stage.path)
        self._verbose = "debug_cuda" in dict(plan.target.flags)  # ptxas reports each kernel
        self._passes = observed.Passes(
            plan, stage.path, stage.observer, stage.store.memory, launched=stage.launched
        )

    def run(self) -> None:
        passes = (
            self._passes.task(each, self._command(each, self._places)) for each in self._steps
        )
        self._execute([task for task in passes if task is not None])
        self._execute([self._task(step) for step in self._steps])

    def _execute(self, tasks: list[schedule.Task]) -> None:
        if tasks:
            since, self._stage.since = self._stage.since, None
            schedule.execute(tasks, timeout=settings.build_timeout, since=since)

    def _task(self, step: Step) -> schedule.Task:
        places, stage = self._places, self._stage.path
        if step.plain_paths:
            places = _link_odd_paths(self._plan, step, stage, places)

        def widen(threads: int) -> tuple[str, ...]:
            return self._command(step, {**places, "threads": str(threads)}).argv

        # ptxas prints several lines for each kernel, and two at once would mix them up.
        most = 1 if self._verbose else settings.nvcc_threads or step.threads
        environment = observed.environment(self._plan, self._stage.observer, stage, step.output)
        return schedule.Task(
            name=step.output,
            op=self._plan.spec.name,
            label=step.source or (events.STUB if step.kind == "stub" else events.LINK),
            argv=self._passes.argv(step, self._command(step, places)),
            cwd=stage,
            env={**environment, **self._passes.environment(step)},
            tmpdir=stage,
            after=_list_needed(step, self._steps),
            memory=step.memory,
            finish=lambda completed: self._finish(step, completed),
            threads=min(step.threads, most),
            widened=widen if step.threads > 1 else None,
        )

    def _command(self, step: Step, places: dict[str, str]) -> plans.Command:
        command = plans.command(step, places)
        if self._copy is None:
            return command
        # Relative directories are below the root, which the copy replaces.
        declared = [path for path in self._plan.spec.include_dirs if os.path.isabs(path)]
        copied = {f"-I{path}": self._copy.include_dirs.get(path) for path in declared}
        renamed = (f"-I{copied[each]}" if copied.get(each) else each for each in command.words)
        kept = (each for each in renamed if copied.get(each, "") is not None)
        return command._replace(words=tuple(kept))

    def _finish(self, step: Step, completed: Completed) -> Callable[[], None] | None:
        """Check what the step did. The result finds out what it read: meanwhile the steps after it
        may run, and are repeated if this one was not made from the present files."""
        stage = self._stage
        if step.output == self._plan.output:
            stage.links += 1
            stage.on_link()
        first, memory = completed.argv[0], stage.store.memory
        look = observed.read_step(self._plan, step, stage.path, first, memory)
        if self._passes.is_missing(step, look):
            stage.launched = True
            return None
        return partial(self._keep, step, completed, look)

    def _keep(self, step: Step, completed: Completed, look: observed.StepRecord | None) -> None:
        stage = self._stage
        seen, same, why = self._passes.evidence(step, look)
        told = (completed.output, completed.wall, completed.max_rss)
        if seen is None:
            stage.made[step.output] = StepOutput(step, (), *told, unobserved=why)
            return
        looks = [seen] if look is None or look.launched else [seen, look]
        found = self._inputs(looks)
        known = None
        if same and self._saw(step, found):
            with contextlib.suppress(gather.Appeared, FileNotFoundError):
                known = gather.facts_of(stage.known, found, stage.hasher())
        # Once more, after the files were hashed: they must be those that the step had.
        if known is None or not seen.is_unchanged():
            stage.snapshots[step.output] = kept.snapshot_of((*found.files, *found.unseen))
            return
        made = stage.made[step.output] = StepOutput(step, known, *told)
        if not step.file:
            return
        if self._verbose:
            from opkiln.building import kernels

            for kernel in kernels.read(completed.output):
                events.emit("note", text=f"{self._plan.spec.name}: {kernel}")
        if stage.store.root is not None:
            manifest = {"source": step.source, "wall": made.wall, "max_rss": made.max_rss}
            name, path = key.step_key(self._plan, step), os.path.join(stage.path, step.output)
            files = (Written("stage", step.output, path),)
            kept.keep(stage.store, name, files, made.facts, manifest, stage.path, stage.named(step))

    def _inputs(self, looks: list[observed.StepRecord]) -> gather.Inputs:
        """What a step depends on, by the paths outside of the staging directory: of a pass of the
        preprocessor, and of the step itself as far as it was observed."""
        real = _link_resolver(self._stage.path, self._places)
        # Of a translated copy, any file may have been read.
        origins = () if self._copy is None else self._copy.origin.values()
        copied = gather.Inputs(tuple((FILE, path, "") for path in origins))
        return gather.union([*(look.inputs(real) for look in looks), copied])

    def _saw(self, step: Step, found: gather.Inputs) -> bool:
        """Whether the step certainly read the files as they are now."""
        copied = {} if self._copy is None else self._copy.digests
        hasher = Hasher()
        try:
            same = all(hasher(path)[0] == copied[path] for path in found.files if path in copied)
        except FileNotFoundError:
            return False
        others = [path for path in found.files if path not in copied]
        snapshot = self._stage.snapshots[step.output]
        return same and kept.surely_read(others, found.unseen, self._began, snapshot)


def _link_resolver(stage: str, places: dict[str, str]) -> Callable[[str], str]:
    """Gives the real path of a file that a program saw through a symbolic link in the stage."""
    links = [(os.path.join(stage, anchor, ""), places.get(anchor, "")) for anchor in _LINKED]

    def real(path: str) -> str:
        for link, place in links:
            if path.startswith(link):
                return os.path.join(place, path[len(link) :])
        return path

    return real


# The anchors that may be linked into the staging directory, for a compiler that uses a shell.
_LINKED = ("src", "opkiln", "torch", "python", "wheels")


def _link_odd_paths(plan: Plan, step: Step, stage: str, places: dict[str, str]) -> dict[str, str]:
    """The places for a compiler that passes its arguments to a shell. A path with characters that
    a shell would interpret is replaced by a symbolic link. Raises BuildError if that is not enough.
    """
    places = dict(places)
    for anchor in _LINKED:
        place = places.get(anchor, "")
        if not PLAIN.match(place):
            link = os.path.join(stage, anchor)
            with contextlib.suppress(FileExistsError):  # made for another source of the same build
                os.symlink(place, link)
            places[anchor] = link
    command = plans.command(step, places)
    # nvcc follows links: it puts the source's real path between double quotes for the shell.
    real = os.path.realpath(command.file) if command.file else ""
    if any(mark in real for mark in _QUOTED):
        raise _not_passed(plan, step, real)
    # The first program itself is started without a shell.
    for declared, argument in list(zip(step.argv, command.argv, strict=True))[1:]:
        # A comma separates the parts of a flag. In a path, nvcc would split the path there.
        parts = argument.split(",") if isinstance(declared, str) else [argument]
        if not all(PLAIN.match(part) for part in parts):
            raise _not_passed(plan, step, argument)
    return places


_QUOTED = '"$`\\'  # what a shell interprets also between double quotes


def _not_passed(plan: Plan, step: Step, argument: str) -> BuildError:
    return BuildError(
        f"op {plan.spec.title}: {argument!r} cannot be passed to the compiler",
        why=f"{step.words[0]} passes its arguments to a shell, which would interpret a "
        "character of it",
        hint="move it to a path of plain letters, digits, '.', '_' and '-'; "
        "OPKILN_TMPDIR sets the directory for builds",
    )
