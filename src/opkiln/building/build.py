"""Builds an op that is not in the store: plan, compile, link, load-test, publish.

One process builds an entry; the others wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import threading
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from opkiln import plan as plans
from opkiln.build_model import ICPX, SYCL_RUNTIME, DeviceCompiler, Plan, Step, Target, Toolchain
from opkiln.building import gather, inline, leaves, loadtest, observed
from opkiln.building import objects as compiling
from opkiln.building.loadtest import LoadTest
from opkiln.decision import policy
from opkiln.digest import UnusableFile, sha256_file
from opkiln.engine import cgroup, events, schedule
from opkiln.engine.schedule import StepFailed
from opkiln.errors import (
    BuildError,
    InputError,
    SourcesChanging,
    StoreError,
    StoreWarning,
)
from opkiln.facts import Hasher
from opkiln.model import Artifact, OpSpec, place_of
from opkiln.observing import launchers, observer
from opkiln.observing.programs import digest
from opkiln.process import once_per_thread
from opkiln.settings import settings
from opkiln.store import deps, key, lock, publish
from opkiln.store.deps import Fact
from opkiln.store.entry import Leaf
from opkiln.store.layers import Store
from opkiln.store.location import claim
from opkiln.toolchain import choice
from opkiln.writing import FULL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_ATTEMPTS = 4
_FEW = 2  # compiles of a build that ends soon
_lock = threading.Lock()
_told: set[str] = set()
_early = 0  # builds of this process whose load tests have begun before their libraries are there


def build(plan: Plan, store: Store, *, since: float) -> Artifact:
    """The artifact: built here, or found if another process was faster.

    The limit of a wait for another process, and that of the first step, count from ``since``
    (``time.monotonic()``).
    Raises BuildError if the build fails. Then nothing is published, and processes that wait for
    this build get the same error. Raises StoreError if something cannot be read or written.
    """
    _tell_of_compilers(plan)
    with once_per_thread("builds one"):
        return _build(plan, store, since)


def _tell_of_compilers(plan: Plan) -> None:
    """Report once what a user should know about the chosen compilers."""
    note = choice.note(plan.target.backend, plan.toolchain)
    if note and note not in _told:
        _told.add(note)
        events.emit(events.NOTE, text=note)


def _build(plan: Plan, store: Store, since: float) -> Artifact:
    spec = plan.spec
    try:
        if not spec.inline:
            return _take_turn(plan, store, since)
        with publish.scratch(f"{spec.name}-src") as root:
            _write_inline(spec, root)
            there = plans.make(spec._replace(root=root), plan.target, plan.toolchain)
            return _take_turn(there, store, since)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise StoreError(
            f"op {spec.name} cannot be built: {error.strerror or error}{where}",
            hint="set OPKILN_TMPDIR and OPKILN_CACHE_DIR to directories with space",
        ) from error


def _write_inline(spec: OpSpec, root: str) -> None:
    try:
        inline.write_sources(spec, root)
    except OSError as error:
        if error.errno in FULL:
            raise _failure().no_space(spec, root) from error
        raise


def _take_turn(plan: Plan, store: Store, since: float) -> Artifact:
    spec = plan.spec
    intent, build_name = key.intent_key(spec, plan.target), key.build_key(plan)
    places = plans.anchors_of(spec, plan.toolchain)

    def arrived() -> Artifact | None:
        leaf = store.find_op(
            spec.distribution, spec.name, intent, build_name, places, Hasher()
        ).leaf
        if leaf is None or not _is_for(leaf, plan.target):
            return None
        return Artifact(leaf.payload, leaf.manifest["sha256"], "store")

    claim(store.root)
    if store.root is None:
        # Nothing can be written, so no probe of a compiler was remembered either. The build key is
        # known only now, so this is the first time that the store can be searched for it.
        return arrived() or _Build(plan, store, intent, build_name, since).run()

    def waiting(state: lock.Waiting) -> None:
        holder = state.holder or lock.Holder(0, "", "")
        what = "build, but it is stopped" if state.stopped else events.BUILD
        events.emit(events.WAITING, op=spec.name, pid=holder.pid, host=holder.host,
                    seconds=state.seconds, what=what)  # fmt: skip

    limit = settings.build_timeout
    with lock.turn(
        store.root, f"{intent}-{build_name}", arrived, waiting, what=f"op {spec.name}",
        limit=limit, since=since,
    ) as got:  # fmt: skip
        if isinstance(got, Artifact):
            return got

        def advance(event: events.Event) -> None:
            if event.kind == events.STEP_END:
                got.advance()

        try:
            with events.listening(advance):
                return _Build(plan, store, intent, build_name, got.since).run()
        except BuildError as error:
            if error.concerns_all:
                got.fail(error, limit)
            raise


class _Linked(NamedTuple):
    """A finished artifact in the staging directory, and everything that went into it."""

    path: str
    facts: tuple[Fact, ...]
    unobserved: str  # why it is not known what went into it; empty if it is
    log: str
    compiled: int
    max_rss: int
    attempt: int  # from 0


class _Build:
    """One build of one plan."""

    def __init__(
        self, plan: Plan, store: Store, intent: str, build_name: str, since: float
    ) -> None:
        self._plan = plan
        self._since: float | None = since  # when the time of the first step began to count
        self._store = store
        self._intent = intent
        self._build = build_name
        self._observer = ""  # known once there is a place for it
        self._snapshot: dict[str, str] = {}  # of what a link read, from before it began

    def run(self) -> Artifact:
        spec = self._plan.spec
        policy.about_to_compile(spec)
        began = time.monotonic()
        events.emit("build-start", op=spec.name, steps=len(self._plan.steps))
        ok = False
        try:
            with publish.scratch(spec.name) as stage:
                try:
                    artifact = self._stage(stage, began)
                except UnusableFile as error:
                    raise InputError(
                        f"op {spec.name} cannot be built: {error.filename} cannot be read",
                        why=error.strerror or "",
                        hint=shlex.join(["ls", "-lL", str(error.filename)]),
                    ) from error
                except OSError as error:
                    if error.errno in FULL:
                        raise _failure().no_space(spec, stage) from error
                    raise
            ok = True
            return artifact
        finally:
            events.emit("build-end", op=spec.name, ok=ok, wall=time.monotonic() - began)

    def _stage(self, stage: str, began: float) -> Artifact:
        spec, toolchain = self._plan.spec, self._plan.toolchain
        inline.write_parts(spec, stage)
        self._observer = observer.library(self._store.memory, toolchain, stage)
        if toolchain.cross:
            linked = self._linked(stage)
            loadtest.inspect(spec, self._plan.target, toolchain.torch, linked.path)
            return self._publish(linked, stage, time.monotonic() - began)
        with contextlib.ExitStack() as stack:
            start = partial(
                loadtest.started, spec, toolchain.torch, os.path.join(stage, self._plan.output),
                after=_runtimes(toolchain), tmpdir=stage,
            )  # fmt: skip
            may_wait = self._is_short() and stack.enter_context(_one_of_few())
            test = stack.enter_context(start()) if may_wait else None
            linked = self._linked(stage, test)
            if test is None or linked.attempt > 0:  # it has loaded what the first attempt gave
                test = stack.enter_context(start())
            test.check()
        return self._publish(linked, stage, time.monotonic() - began)

    def _is_short(self) -> bool:
        """Whether the child of the load test may start with the steps: they are few, so it does not
        wait for long, and there is a CPU that they do not use."""
        compiles = sum(step.kind == "compile" for step in self._plan.steps)
        cpus = settings.max_jobs or len(os.sched_getaffinity(0))
        return compiles <= _FEW and compiles < cpus

    def _linked(self, stage: str, test: LoadTest | None = None) -> _Linked:
        spec = self._plan.spec
        killed = cgroup.out_of_memory_kills()
        try:
            return self._settle(stage, test)
        except StepFailed as failed:
            failure = _failure()
            if failure.ran_out_of_space(failed.completed.output):
                raise failure.no_space(spec, stage) from None  # the sources are not the cause
            log = failure.write_log(
                self._store.root, f"{spec.name}-{self._build[:12]}", self._failed_log(failed)
            )
            replaced = {stage: "./build"}  # the name that `opkiln plan` uses
            if spec.inline:
                replaced[spec.root + "/"] = ""
            raise failure.compile_error(failed, self._plan, log, replaced, killed) from None

    def _settle(self, stage: str, test: LoadTest | None) -> _Linked:
        """Compile and link until everything was built from the same state of the sources. ``test``
        begins with what the first attempt gives."""
        for attempt in range(_ATTEMPTS):
            beside = [self._link_task(each, stage, ()) for each in self._steps(stage, "stub")]
            objects = compiling.objects(self._plan, self._store, stage, self._since, beside)
            self._since = None
            began = compiling.kernel_time(stage)
            log = self._link(stage, objects)
            if test is not None and attempt == 0:
                test.begin()
            looks, unobserved = self._looks(stage, objects)
            try:
                known = () if unobserved else self._known(stage, objects, looks, began)
            except (gather.Appeared, gather.Disagree, FileNotFoundError):
                continue
            fresh = [each for each in objects if not each.cached]
            return _Linked(
                path=os.path.join(stage, self._plan.output),
                facts=known,
                unobserved=unobserved,
                log=log,
                compiled=len(fresh),
                max_rss=max((each.max_rss for each in fresh), default=0),
                attempt=attempt,
            )
        raise SourcesChanging(
            f"op {self._plan.spec.name}: its files were edited during each of {_ATTEMPTS} builds",
            why="nothing was published",
            hint="save the files and try again",
        )

    def _looks(
        self, stage: str, objects: list[compiling.Compiled]
    ) -> tuple[list[observed.Look], str]:
        """What the links did, and why the inputs of all steps are not known; empty if they are."""
        places = plans.anchors(self._plan, stage)
        unobserved = next((each.unobserved for each in objects if each.unobserved), "")
        looks = []
        for step in self._plan.steps:
            if step.kind == "compile":
                continue
            first = plans.render(step.words[0], places)
            look = observed.look(self._plan, step, stage, first, self._store.memory)
            if look is None:
                unobserved = unobserved or observed.UNSEEN
            elif not look.tells_all_of(step.output):
                unobserved = unobserved or look.gap or f"nothing was seen to write {step.output}"
            else:
                looks.append(look)
        return looks, unobserved

    def _known(
        self,
        stage: str,
        objects: list[compiling.Compiled],
        looks: list[observed.Look],
        began: int,
    ) -> tuple[Fact, ...]:
        """The facts of all steps, which hold now and held for each of them. Raises Appeared,
        Disagree, FileNotFoundError."""
        places = plans.anchors(self._plan, stage)
        hasher = Hasher(partial(digest, memory=self._store.memory))
        unlinked = compiling.unlinked(stage, places)
        inputs = [look.inputs(unlinked) for look in looks]
        read = [path for each in inputs for path in each.files]
        unseen = [path for each in inputs for path in each.unseen]
        if not compiling.saw(read, unseen, began, self._snapshot):
            self._snapshot = compiling.snapshot_of((*read, *unseen))
            raise gather.Disagree
        made = [gather.gather(self._plan, each, hasher) for each in inputs]
        # A header that was edited between two compiles is in one object as it was, in the other as
        # it is.
        found = gather.union([*(each.facts for each in objects), *made])
        fixed = plans.anchors_of(self._plan.spec, self._plan.toolchain)
        changed = deps.broken(found, fixed, hasher)
        # After the files were hashed: they must be those that were linked.
        if changed or not all(look.unchanged() for look in looks):
            raise gather.Disagree(changed)
        return found

    def _link(self, stage: str, objects: list[compiling.Compiled]) -> str:
        steps = self._steps(stage, "stub", "device-link")
        before = tuple(step.output for step in steps)
        tasks = [self._link_task(step, stage, ()) for step in steps]
        tasks += [self._link_task(step, stage, before) for step in self._steps(stage, "link")]
        done = schedule.execute(tasks, timeout=settings.build_timeout)
        places = plans.anchors(self._plan, stage)
        parts = []
        for each in objects:
            command = shlex.join(plans.argv(each.step, places))
            parts.append(f"$ {command}\n{each.log if not each.cached else '(from the store)'}")
        parts += [f"$ {shlex.join(task.argv)}\n{done[task.name].output}" for task in tasks]
        return "\n".join(parts)

    def _steps(self, stage: str, *kinds: str) -> list[Step]:
        """The steps of these kinds. A stub is made once for all attempts."""
        there = (step for step in self._plan.steps if step.kind in kinds)
        return [
            step
            for step in there
            if step.kind != "stub" or not os.path.exists(os.path.join(stage, step.output))
        ]

    def _link_task(self, step: Step, stage: str, after: tuple[str, ...]) -> schedule.Task:
        places = plans.anchors(self._plan, stage)
        return schedule.Task(
            name=step.output,
            op=self._plan.spec.name,
            label=events.STUB if step.kind == "stub" else events.LINK,
            argv=plans.argv(step, self._shown(step, stage, places)),
            cwd=stage,
            env={
                **observed.environment(self._plan, self._observer, stage, step.output),
                **launchers.DIRECT,  # they have nothing to do with a link
            },
            tmpdir=stage,
            after=after,
            memory=step.memory,
            finish=None,
        )

    def _shown(self, step: Step, stage: str, places: dict[str, str]) -> dict[str, str]:
        if not step.plain_paths:
            return places
        return compiling.with_plain_paths(self._plan, step, stage, places)

    def _failed_log(self, failed: StepFailed) -> str:
        inline = "".join(
            f"--- /opkiln/src/{source}\n{text}\n" for source, text in self._plan.spec.inline
        )
        command = shlex.join(failed.completed.argv)
        return f"{inline}$ {command}\n{failed.completed.output}"

    def _publish(self, linked: _Linked, stage: str, seconds: float) -> Artifact:
        spec = self._plan.spec
        leaf = os.path.join(stage, "leaf")
        manifest = {
            "kind": spec.kind,
            "op": spec.name,
            "distribution": spec.distribution,
            "spec": key.spec_key(spec),
            "target": self._plan.target._asdict(),
            "needs": leaves.needs_of(linked.path, self._plan),
            "toolchain": {each.family: each.version for each in _compilers(self._plan)},
            "seconds": round(seconds, 3),
            "max_rss": linked.max_rss,
            "created": time.time(),
        }
        name = leaves.write(
            leaf, linked.path, manifest, linked.facts, {"inputs": inputs(self._plan)}, linked.log
        )
        root = None if linked.unobserved else self._store.root
        relative = os.path.join(
            "ops", place_of(spec.distribution, spec.name), self._intent, self._build, name
        )
        observer.note(self._store.memory, self._plan.toolchain.cxx, linked.unobserved)
        if linked.unobserved:
            self._say_unobserved(linked.unobserved)
        if root is not None:
            try:
                final = self._publish_leaf(leaf, root, relative)
            except StoreError as error:
                warnings.warn(
                    f"{error}\nthis process uses its own copy", StoreWarning, stacklevel=2
                )
            else:
                if final is not None:
                    return Artifact(final.payload, final.manifest["sha256"], "built",
                                    linked.compiled, seconds)  # fmt: skip
        path = publish.private_copy(linked.path)
        return Artifact(
            path, sha256_file(path), "built", linked.compiled, seconds, linked.unobserved
        )

    def _say_unobserved(self, why: str) -> None:
        """Tell why every process compiles this op again, and what would mend that."""
        if not self._observer:
            hint = "set OPKILN_TMPDIR to a directory whose path has no blank and no colon"
        else:
            hint = "set CXX to the compiler itself, or to one that is linked dynamically"
        name = self._plan.spec.name
        warnings.warn(
            f"op {name} was compiled for this process alone, and the next one compiles it again\n"
            f"why: it is not known what it was made from: {why}\nhint: {hint}",
            StoreWarning,
            stacklevel=2,
        )

    def _publish_leaf(self, leaf: str, root: str, relative: str) -> Leaf | None:
        """Publish, and read back the entry: ours, or that of the process that won the race.

        None if it cannot be seen (a network file system may hide it for a while) or is damaged.
        Then this process continues with its own, verified copy.
        """
        from opkiln.store.entry import Refused, examine

        places = plans.anchors_of(self._plan.spec, self._plan.toolchain)
        for _ in range(2):
            final = publish.publish(leaf, root, relative)
            found = examine(final, places, Hasher(), listed=False, whole=True)
            if isinstance(found, Leaf) and _is_for(found, self._plan.target):
                return found
            if isinstance(found, Leaf) or (isinstance(found, Refused) and found.damaged):
                # We hold the lock, so another builder cannot have just made this entry.
                with contextlib.suppress(OSError):  # it stays, and every reader refuses it
                    publish.discard(root, final)
        return None


def _is_for(leaf: Leaf, target: Target) -> bool:
    """Whether an entry was built for this target, as its name says. In a store that was assembled
    wrongly it may be for another CPU."""
    return bool(leaf.manifest["target"] == json.loads(json.dumps(target._asdict())))


def _compilers(plan: Plan) -> list[Toolchain | DeviceCompiler]:
    device = plan.toolchain.device
    return [plan.toolchain] if device is None else [plan.toolchain, device]


def _runtimes(toolchain: Toolchain) -> tuple[str, ...]:
    """The libraries that must be loaded before an op of this toolchain: the SYCL runtime."""
    device = toolchain.device
    if device is None or device.family not in (ICPX, SYCL_RUNTIME):
        return ()
    from opkiln.toolchain import libsycl, sycl

    library = libsycl.locate(sycl.soname(device))
    return () if library is None else (library,)


def inputs(plan: Plan) -> dict[str, Any]:
    """The inputs of the keys, as text. `explain` shows how they differ from the present ones."""
    spec = plan.spec
    named = {
        "src": "{src}",
        "opkiln": "{opkiln}",
        "stage": "{build}",
        "torch": "{torch}",
        "python": "{python}",
        "toolkit": "{toolkit}",
        "wheels": "{wheels}",
        "threads": "{threads}",
        "abs": "",
    }
    # Only the names of the compilers: the result does not depend on their paths, and the paths are
    # private to this machine.
    programs = [
        (each.cxx if isinstance(each, Toolchain) else each.path) for each in _compilers(plan)
    ]
    tools = {path: os.path.basename(path) for path in programs}
    fields = [field for field in spec._fields if field not in key.UNKEYED]
    declared = dict(zip(fields, key.declared(spec), strict=True))
    del declared["inline"]
    return {
        "spec": declared,
        "target": plan.target._asdict(),
        "toolchain": {
            each.family: {"version": each.version, "identity": each.identity}
            for each in _compilers(plan)
        },
        "torch": {} if plan.toolchain.torch is None else {"version": plan.toolchain.torch.version},
        "steps": [
            [tools.get(told, told) for arg in step.argv if (told := plans.render(arg, named))]
            for step in plan.steps
        ],
    }


@contextlib.contextmanager
def _one_of_few() -> Iterator[bool]:
    """Whether this build is one of the few of this process whose load tests begin early. Each has a
    child with torch in its memory, and `opkiln build --all` runs a hundred builds at once, most
    of which wait for a CPU."""
    global _early
    most = max(1, (settings.max_jobs or len(os.sched_getaffinity(0))) // 2)
    with _lock:
        is_one = _early < most
        _early += is_one
    try:
        yield is_one
    finally:
        with _lock:
            _early -= is_one


def _failure() -> ModuleType:
    """What puts a failure into words. Most builds do without."""
    from opkiln.building import failure

    return failure
