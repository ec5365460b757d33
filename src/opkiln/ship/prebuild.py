"""Building ops ahead of their first use: some ops, for some targets, in one parallel graph.

The ops are named, or taken from a record of what a workload loads.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from opkiln import __version__, errors
from opkiln.base.build_model import Plan
from opkiln.base.digest import UnusableFile, key, sha256_file
from opkiln.base.model import CARRIED, CPU, ONE_CALL, Artifact, OpSpec
from opkiln.builder import OpBuilder
from opkiln.builder.registry import ALL_OPS, libraries, listed_as
from opkiln.building import recorded
from opkiln.decision import receipt
from opkiln.decision import terms as decision
from opkiln.decision.archs import target_machine
from opkiln.decision.terms import Build, Serve
from opkiln.loading import loader, recording
from opkiln.machine.toolchain.choice import available
from opkiln.settings import LAYOUT, override, whole_environment
from opkiln.ship import selection
from opkiln.ship.selection import NamedTarget
from opkiln.store import publish
from opkiln.store.key import build_key, intent_key
from opkiln.store.layers import Store

BUILT, CACHED, SKIPPED, FAILED = "built", "cached", "skipped", "failed"


class BuildRequest(NamedTuple):
    """One op for one target. ``named``: the user asked for it, so a failure is an error."""

    builder: OpBuilder
    wanted: NamedTarget | None = None
    named: bool = True
    asked_as: str = ""  # the op's name as it was asked for, such as my-package:op

    @property
    def op(self) -> str:
        """The op's full name."""
        return self.asked_as or self.builder.name


class BuildOutcome(NamedTuple):
    """The result of a request. ``path`` and ``sha256`` are the library's, if there is one."""

    op: str
    status: str
    backend: str = ""
    target: str = ""
    archs: tuple[str, ...] = ()
    seconds: float = 0.0
    path: str = ""
    sha256: str = ""
    reason: str = ""
    error: errors.OpkilnError | None = None


class Requests(NamedTuple):
    """The requests that can be made, and the outcomes of those that cannot."""

    requests: tuple[BuildRequest, ...]
    refused: tuple[BuildOutcome, ...]


def requests(names: Iterable[str], wanted: Sequence[NamedTarget], *, named: bool) -> Requests:
    """Every op for every target that it has a version for; without targets, for this machine.

    An op with variants is all that are built ahead. A named op must have a version for at least one
    target. Raises UnknownOp, UnknownBackend.
    """
    made: list[BuildRequest] = []
    refused: list[BuildOutcome] = []
    for name in names:
        try:
            for library, kind in libraries(name, ALL_OPS[name], ahead=True):
                found, missing = _request_targets(library, kind, wanted, named)
                made += found
                refused += missing
        except errors.SpecError as wrong:  # of an op that cannot be imported, too
            if named:
                raise
            refused.append(BuildOutcome(name, FAILED, error=wrong))  # the other ops are still built
    return Requests(tuple(made), tuple(refused))


def _request_targets(
    name: str, kind: type[OpBuilder], wanted: Sequence[NamedTarget], named: bool
) -> tuple[list[BuildRequest], list[BuildOutcome]]:
    made: list[BuildRequest] = []
    missing: list[BuildOutcome] = []
    for each in wanted or (None,):
        try:
            made.append(BuildRequest(selection.ask(kind(), each), each, named, name))
        except errors.UnknownBackend as none:
            reason = f"{none.what}: {none.why}"
            missing.append(BuildOutcome(name, SKIPPED, target=str(each or ""), reason=reason))
            if named and len(missing) == len(wanted):
                raise
    return made, missing


def prebuild(
    asked: Sequence[BuildRequest],
    *,
    jobs: int | None = None,
    trace: str | None = None,
    names_targets: bool = False,
) -> list[BuildOutcome]:
    """Find or build every request, all of them in parallel.

    ``names_targets``: events have the target in the op's name, also if there is one request. A
    failure is an outcome, never an exception: "failed" if the op was named; "skipped", with the
    reason, if it was not named and the op itself is the reason. The store is searched first; if
    nothing is missing, no thread and no display is started.
    """
    outcomes: dict[int, BuildOutcome] = {}
    with ExitStack() as stack:
        if jobs is not None:
            stack.enter_context(override(max_jobs=jobs))
        for number, request in enumerate(asked):
            with selection.use_cpu(request.wanted):
                found = look(request)
            if isinstance(found, BuildOutcome):
                outcomes[number] = found
        missing = {n: request for n, request in enumerate(asked) if n not in outcomes}
        if missing or trace is not None:
            from opkiln.run import progress

            with progress.show_builds(trace):
                outcomes |= _build_all(missing, names_targets or len(missing) > 1)
    return [outcomes[number] for number in range(len(asked))]


def look(request: BuildRequest) -> BuildOutcome | Plan:
    """The outcome, if the library exists or must not be built; else the plan of its build."""
    builder = request.builder
    try:
        asked = decision_of(request)
        outcome = loader.resolve(asked)
    except errors.OpkilnError as wrong:  # the declaration itself
        return _outcome(request, FAILED, error=wrong)
    if isinstance(outcome, Serve):
        if outcome.read is not None:
            receipt.write(asked, outcome.artifact, outcome.read)
        return _success(request, asked, outcome.artifact)
    if isinstance(outcome, Build):
        # An author may have overridden it.
        if request.named or builder.is_compatible():
            return outcome.plan
        return _outcome(request, SKIPPED, reason=builder.error_log or "not compatible")
    error = outcome.error
    if not request.named and is_unsupported_here(error, builder):
        return _outcome(request, SKIPPED, reason=f"{error.what}: {error.why}")
    return _outcome(request, FAILED, error=_add_hint(error, request))


def decision_of(request: BuildRequest) -> decision.Request:
    """The request as the one decision takes it."""
    use = decision.BUILD if request.wanted is None else decision.SHIP
    return decision.Request(request.builder.op(), use)


def is_unsupported_here(error: errors.OpkilnError, builder: OpBuilder) -> bool:
    """Whether this machine does not support the op: its device is missing, or no installed compiler
    can build what it needs. If there is no compiler at all, that is an error."""
    if isinstance(error, errors.ToolchainError):
        machine = target_machine() if builder.backend == CPU else ""
        return available(builder.backend, machine)
    return isinstance(error, errors.LoadError) and not isinstance(error, errors.CompilingOff)


def _build_all(missing: Mapping[int, BuildRequest], names_targets: bool) -> dict[int, BuildOutcome]:
    """Build each in a thread. The engine's budget decides how many steps run at once."""
    from opkiln.run import events, schedule

    outcomes: dict[int, BuildOutcome] = {}
    raised: list[BaseException] = []  # errors of the machine, such as too many open files

    def work(number: int, request: BuildRequest) -> None:
        began = time.monotonic()
        target = f" {request.wanted}" if request.wanted and names_targets else ""
        try:
            with selection.use_cpu(request.wanted), events.report_as(f"{request.op}{target}"):
                asked = decision_of(request)
                artifact, _ = loader.obtain(asked)
                _require_stored(request.op, artifact)
                outcomes[number] = _success(request, asked, artifact, time.monotonic() - began)
        except errors.OpkilnError as error:
            outcomes[number] = _outcome(request, FAILED, error=_add_hint(error, request))
        except BaseException as error:
            raised.append(error)

    schedule.call_in_threads(work, missing.items())
    if raised:
        raise raised[0]
    return outcomes


def _success(
    request: BuildRequest, asked: decision.Request, artifact: Artifact, seconds: float = 0.0
) -> BuildOutcome:
    status = BUILT if artifact.origin == "built" else CACHED
    return _outcome(request, status, archs=asked.wanted.archs, seconds=seconds, path=artifact.path,
                    sha256=artifact.sha256)  # fmt: skip


def _outcome(request: BuildRequest, status: str, **more: Any) -> BuildOutcome:
    backend, target = request.builder.backend, str(request.wanted or "")
    return BuildOutcome(request.op, status, backend, target, **more)


def _require_stored(op: str, artifact: Artifact) -> None:
    """Raise StoreError if a library could not be stored: it would disappear with this process."""
    from opkiln.store.layers import Store

    if artifact.origin != "built":
        return
    layers = [layer.root for layer in Store().location.layers]
    if artifact.unobserved:
        raise errors.StoreError(
            f"op {op} was built, but not stored",
            why=f"it is not known what it was made from: {artifact.unobserved}",
            hint="use a compiler that is linked dynamically",
        )
    if not any(artifact.path.startswith(os.path.join(root, "")) for root in layers):
        raise errors.StoreError(
            f"op {op} was built, but could not be stored",
            hint="set OPKILN_CACHE_DIR to a writable directory",
        )


def _add_hint(error: errors.OpkilnError, request: BuildRequest) -> errors.OpkilnError:
    """The error. If compiling is forbidden, its hint says how to allow it."""
    if not isinstance(error, errors.CompilingOff):
        return error
    hint = f"OPKILN_MODE=auto opkiln build {request.op}"
    return errors.CompilingOff(error.what, why=error.why, hint=hint)


# The ops that a workload uses


def recorded_requests(
    file: str, wanted: Sequence[NamedTarget] = (), *, ran_here: bool = False
) -> Requests:
    """The requests for a record: each op for the target it was used for, or for ``wanted``.

    Code that `opkiln.load` compiles belongs to no package and cannot be built by name, so it is
    skipped. It is not listed if the program ``ran_here``, which has compiled it. Raises StoreError
    for the file, UnknownOp for an op that is not installed.
    """
    asked: dict[tuple[object, ...], BuildRequest] = {}
    refused: list[BuildOutcome] = []
    for use in recording.read(file):
        if use.distribution == ONE_CALL:
            reason = "opkiln.load() compiles it in the program that calls it"
            if not ran_here:
                refused.append(BuildOutcome(use.op, SKIPPED, use.backend, reason=reason))
            continue
        for_ = list(wanted) or [NamedTarget(use.backend, use.archs)]
        found = requests([_registered_name(use)], for_, named=True)
        for each in found.requests:
            asked.setdefault((each.op, each.builder.backend, each.wanted), each)
        refused += found.refused
    return Requests(tuple(asked.values()), tuple(dict.fromkeys(refused)))


def _registered_name(use: recording.Use) -> str:
    """The op's full name. Raises UnknownOp if only other packages have an op of this name."""
    owners = {name: ALL_OPS[name]().distribution for name in listed_as(use.op) or (use.op,)}
    for name, owner in owners.items():
        if owner == use.distribution:
            return name
    raise errors.UnknownOp(
        f"op {use.op} of {use.distribution} is not installed here",
        why=f"the installed op of this name belongs to {', '.join(owners.values())}",
        hint=f"pip install {shlex.quote(use.distribution)}",
    )


def build_modules(file: str | None) -> list[BuildOutcome]:
    """Build the modules of other programs that a record has. Raises StoreError for the file."""
    outcomes = []
    for module in recording.read_modules(file).values() if file is not None else ():
        began, ran, failed = time.monotonic(), False, None
        try:
            with publish.scratch("recorded") as stage:
                ran = recorded.build(module, module.restore(stage), Store())
        except errors.OpkilnError as error:
            failed = error
        status = FAILED if failed else BUILT if ran else CACHED
        seconds = time.monotonic() - began
        outcomes.append(BuildOutcome(module.name, status, seconds=seconds, error=failed))
    return outcomes


def run_script(script: str, arguments: Sequence[str], file: str, **changes: str) -> None:
    """Run a Python script to its end, and record the ops that it loads in a file.

    ``changes`` are environment variables to add to this process's own. The script compiles only
    the ops that have no reference. Raises BuildError if the script fails.
    """
    argv = (sys.executable, script, *arguments)
    status = run_recorded(argv, file, OPKILN_MODE="needed", **changes)
    if status != 0:
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        raise errors.BuildError(
            f"{script} ended with {how}, and nothing was built",
            why="the ops that it would have loaded after that are not known",
            hint=f"python {shlex.quote(script)}    # when it succeeds, build again",
        )


def run_recorded(argv: Sequence[str], file: str, **changes: str) -> int:
    """Run a command in the foreground and record the ops it loads; returns its exit status.

    Raises ToolchainError if it cannot be started.
    """
    from opkiln.run import process  # here, because a build that finds everything does not need it

    environment = {**whole_environment(), "OPKILN_RECORD": os.path.abspath(file), **changes}
    return process.run_foreground(argv, env=environment)


# `opkiln cache key`: the key under which CI keeps the store from one run to the next
#
# The key covers what a build depends on, as far as that is known before a build: the intent and
# build keys of each op (flags, target, compilers), and the files beside its sources and in its
# include directories. Only a build finds out which files a compiler reads, so all of them count.
# The key never decides what is used: the entries of a restored store are checked as usual.

# The beginning of all keys of stores that this opkiln can read: an older store is a good start.
KEY_PREFIX = f"opkiln-{LAYOUT}-"

_KEY_LENGTH = 24  # in hex digits
_LARGEST = 16 << 20  # bytes: no source or header is larger
_OTHER_FILES = (".py", ".pyc", ".pyi", ".so")
_OTHER_DIRECTORIES = ("__pycache__", CARRIED)


def cache_key(asked: Iterable[BuildRequest]) -> str:
    """The key for a store with these ops. Nothing is built, and no op is loaded.

    The order of the ops makes no difference. One that this machine does not support and that was
    not named adds nothing. Raises OpkilnError, as a build would before it starts.
    """
    from opkiln.building.asking import plan_here  # a build that finds everything asks nobody

    parts = set()
    for each in asked:
        try:
            with selection.use_cpu(each.wanted):
                plan = plan_here(decision_of(each))
        except errors.OpkilnError as error:
            if each.named or not is_unsupported_here(error, each.builder):
                raise
            continue
        intent, files = intent_key(plan.spec, plan.target), tuple(_list_files(plan.spec))
        parts.add((intent, build_key(plan), files))
    return KEY_PREFIX + key("ci", (__version__, parts))[:_KEY_LENGTH]


def _list_files(spec: OpSpec) -> Iterator[tuple[str, str]]:
    """(path, digest) of the files in the directories of the sources and of the op's own headers."""
    places = [os.path.dirname(source) for source in spec.sources] + list(spec.include_dirs)
    top = os.path.realpath(spec.root)
    for place in sorted({os.path.realpath(os.path.join(top, each)) for each in places}):
        if os.path.commonpath((top, place)) != top:
            continue  # another package's, or the system's
        for directory, inside, names in os.walk(place):
            inside[:] = sorted(each for each in inside if each not in _OTHER_DIRECTORIES)
            for name in sorted(each for each in names if not each.endswith(_OTHER_FILES)):
                path = os.path.join(directory, name)
                try:
                    yield os.path.relpath(path, top), sha256_file(path, _LARGEST)
                except (UnusableFile, FileNotFoundError):
                    continue  # data, a FIFO, a link to nowhere: nothing that is compiled
