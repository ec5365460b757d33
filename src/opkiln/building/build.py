"""Builds an op that is not in the store: plan, compile, link, load-test, publish.

One process builds an entry; the others wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from opkiln.base import forks
from opkiln.base.build_model import ICPX, SYCL_RUNTIME, DeviceCompiler, Plan, Target, Toolchain
from opkiln.base.digest import FULL, UnusableFile, sha256_file
from opkiln.base.model import Artifact, OpSpec, place_of
from opkiln.building import gather, loadtest, wording
from opkiln.building.outputs import Stage
from opkiln.decision import terms
from opkiln.errors import BuildError, InputError, StoreError, StoreWarning
from opkiln.machine.facts import Hasher
from opkiln.machine.toolchain import choice, probing
from opkiln.plan import plan as plans
from opkiln.run import budget, events
from opkiln.run.process import once_per_thread
from opkiln.run.schedule import StepFailed
from opkiln.settings import settings
from opkiln.store import key, lock, publish
from opkiln.store.entry import Leaf
from opkiln.store.key import Fact
from opkiln.store.layers import Store, claim

if TYPE_CHECKING:
    from collections.abc import Iterator

_FEW = 2  # compiles of a build that ends soon
_lock = forks.lock()
_told: set[str] = set()
_early = 0  # builds of this process whose load tests have begun before their libraries are there


def build(plan: Plan, store: Store, *, since: float) -> Artifact:
    """The artifact: built here, or found if another process was faster.

    The limit of a wait for another process, and that of the first step, count from ``since``
    (``time.monotonic()``).
    Raises BuildError if the build fails. Then nothing is published, and processes that wait for
    this build get the same error. Raises StoreError if something cannot be read or written.
    """
    note = choice.note(plan.target.backend, plan.toolchain)
    if note and note not in _told:
        _told.add(note)
        events.emit(events.NOTE, text=note)
    spec = plan.spec
    try:
        with once_per_thread("builds one"):
            if not spec.inline:
                return _take_turn(plan, store, since)
            with publish.scratch(f"{spec.name}-src") as root:
                with _report_full_disk(spec, root):
                    wording.write_sources(spec, root)
                plan = plans.make(spec._replace(root=root), plan.target, plan.toolchain)
                return _take_turn(plan, store, since)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise StoreError(
            f"op {spec.title} cannot be built: {error.strerror or error}{where}",
            hint="set OPKILN_TMPDIR and OPKILN_CACHE_DIR to directories with space",
        ) from error


@contextlib.contextmanager
def _report_full_disk(spec: OpSpec, directory: str) -> Iterator[None]:
    """Raise StoreError, with the sizes, if the block fails because the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        from opkiln.building import failure  # most builds do without

        raise failure.no_space(spec, directory) from error


def _take_turn(plan: Plan, store: Store, since: float) -> Artifact:
    spec = plan.spec
    intent, build_name = key.intent_key(spec, plan.target), key.build_key(plan)
    places = plans.anchors_of(spec, plan.toolchain)

    def find_built() -> Artifact | None:
        leaf, _ = store.find_op(spec.distribution, spec.name, intent, build_name, places, Hasher())
        if leaf is None or not _is_for(leaf, plan.target):
            return None
        return Artifact(leaf.payload, leaf.manifest["sha256"], "store")

    claim(store.root)
    if store.root is None:
        # Nothing can be written, so no probe of a compiler was remembered either. The build key is
        # known only now, so this is the first time that the store can be searched for it.
        return find_built() or _BuildRun(plan, store, intent, build_name, since).run()

    def waiting(state: lock.Waiting) -> None:
        events.emit(events.WAITING, op=spec.name, **state.event_data(events.BUILD))

    limit = settings.build_timeout
    with lock.turn(
        store.root, f"{intent}-{build_name}", find_built, waiting, what=f"op {spec.title}",
        limit=limit, since=since,
    ) as got:  # fmt: skip
        if isinstance(got, Artifact):
            return got

        def advance(event: events.Event) -> None:
            if event.kind == events.STEP_END:
                got.advance()

        try:
            with events.listen(advance):
                return _BuildRun(plan, store, intent, build_name, got.since).run()
        except BuildError as error:
            if error.concerns_all:
                got.fail(error, limit)
            raise


class _BuildRun:
    """One build of one plan."""

    def __init__(
        self, plan: Plan, store: Store, intent: str, build_name: str, since: float
    ) -> None:
        self._plan, self._store = plan, store
        self._intent, self._build = intent, build_name
        self._since = since  # when the time of the first step began to count

    def run(self) -> Artifact:
        spec = self._plan.spec
        terms.about_to_compile(spec)
        began = time.monotonic()
        events.emit("build-start", op=spec.name, steps=len(self._plan.steps))
        ok = False
        try:
            with publish.scratch(spec.name) as stage, _report_full_disk(spec, stage):
                artifact = self._stage(stage, began)
            ok = True
            return artifact
        except UnusableFile as error:
            raise InputError(
                f"op {spec.title} cannot be built: {error.filename} cannot be read",
                why=error.strerror or "",
                hint=shlex.join(["ls", "-lL", str(error.filename)]),
            ) from error
        finally:
            events.emit("build-end", op=spec.name, ok=ok, wall=time.monotonic() - began)

    def _stage(self, stage: str, began: float) -> Artifact:
        spec, toolchain = self._plan.spec, self._plan.toolchain
        wording.write_parts(spec, stage)
        library = os.path.join(stage, self._plan.output)
        with contextlib.ExitStack() as stack:
            start = partial(loadtest.start, spec, toolchain.torch, library,
                            after=_runtimes(toolchain), tmpdir=stage)  # fmt: skip
            early = not toolchain.cross and self._is_short() and stack.enter_context(_one_of_few())
            test = stack.enter_context(start()) if early else None
            linked = test.begin if test is not None else lambda: None
            steps = Stage(self._plan, self._store, stage, self._since, linked)
            found = self._run_steps(steps)
            if toolchain.cross:
                loadtest.inspect(spec, self._plan.target, toolchain.torch, library)
            else:
                if test is None or steps.links > 1:  # it has loaded the first one
                    test = stack.enter_context(start())
                test.check()
        return self._publish(steps, library, found, time.monotonic() - began)

    def _is_short(self) -> bool:
        """Whether the child of the load test may start with the steps: they are few, so it does not
        wait for long, and there is a CPU that they do not use."""
        compiles = sum(step.kind == "compile" for step in self._plan.steps)
        cpus = settings.max_jobs or len(os.sched_getaffinity(0))
        return compiles <= _FEW and compiles < cpus

    def _run_steps(self, steps: Stage) -> tuple[Fact, ...]:
        spec = self._plan.spec
        killed = budget.out_of_memory_kills()
        try:
            return steps.run()
        except StepFailed as failed:
            from opkiln.building import failure  # most builds do without

            if failure.ran_out_of_space(failed.completed.output):
                raise failure.no_space(spec, steps.path) from None  # the sources are not the cause
            inline = "".join(f"--- /opkiln/src/{name}\n{text}\n" for name, text in spec.inline)
            command = shlex.join(failed.completed.argv)
            text = f"{inline}$ {command}\n{failed.completed.output}"
            log = failure.write_log(self._store.root, f"{spec.name}-{self._build[:12]}", text)
            replaced = {steps.path: "./build"}  # the name that `opkiln plan` uses
            if spec.inline:
                replaced[spec.root + "/"] = ""
            raise failure.compile_error(failed, self._plan, log, replaced, killed) from None

    def _publish(
        self, steps: Stage, library: str, found: tuple[Fact, ...], seconds: float
    ) -> Artifact:
        spec, unobserved, compiled = self._plan.spec, steps.unobserved, steps.compiled
        leaf = os.path.join(steps.path, "leaf")
        manifest = {
            "kind": spec.kind,
            "op": spec.name,
            "distribution": spec.distribution,
            "spec": key.spec_key(spec),
            "target": self._plan.target._asdict(),
            "needs": gather.needs_of(library, self._plan),
            "toolchain": {each.family: each.version for each in _compilers(self._plan)},
            "seconds": round(seconds, 3),
            "max_rss": max((each.max_rss for each in compiled), default=0),
            "created": time.time(),
        }
        name = gather.write(
            leaf, library, manifest, found, {"inputs": inputs(self._plan)}, steps.log
        )
        root = None if unobserved else self._store.root
        relative = os.path.join(
            "ops", place_of(spec.distribution, spec.name), self._intent, self._build, name
        )
        probing.note_unobserved(self._store.memory, self._plan.toolchain.cxx, unobserved)
        if unobserved:
            self._say_unobserved(unobserved, steps.observer)
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
                                    len(compiled), seconds)  # fmt: skip
        path = publish.private_copy(library)
        return Artifact(path, sha256_file(path), "built", len(compiled), seconds, unobserved)

    def _say_unobserved(self, why: str, library: str) -> None:
        """Tell why every process compiles this op again, and what would mend that."""
        if not library:
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
    from opkiln.machine.toolchain import libsycl, sycl

    library = libsycl.locate(sycl.soname(device))
    return () if library is None else (library,)


def inputs(plan: Plan) -> dict[str, Any]:
    """The inputs of the keys, as text. `explain` shows how they differ from the present ones."""
    spec = plan.spec
    anchors = ("src", "opkiln", "torch", "python", "toolkit", "wheels", "threads")
    named = {**{each: f"{{{each}}}" for each in anchors}, "stage": "{build}", "abs": ""}
    # Only the names of the compilers: the result does not depend on their paths, and the paths are
    # private to this machine.
    programs = [
        (each.cxx if isinstance(each, Toolchain) else each.path) for each in _compilers(plan)
    ]
    tools = {path: os.path.basename(path) for path in programs}
    fields = [field for field in spec._fields if field not in key.UNKEYED]
    declared = dict(zip(fields, key.declaration_fields(spec), strict=True))
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
    """Whether the load test of this build may begin early. Each such test has a child with torch in
    its memory, so only a few run at once: `opkiln build --all` has a hundred builds, most of which
    wait for a CPU."""
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
