"""Building ops ahead of their first use: some ops, for some targets, in one parallel graph."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from contextlib import ExitStack
from typing import NamedTuple

from opkiln.decision import receipt
from opkiln.decision import terms as decision
from opkiln.decision.target import target_machine
from opkiln.decision.terms import Build, Serve
from opkiln.errors import (
    CompilingOff,
    LoadError,
    OpkilnError,
    SpecError,
    StoreError,
    ToolchainError,
    UnknownBackend,
)
from opkiln.loading import loader
from opkiln.model import CPU
from opkiln.settings import override
from opkiln.ship import targets
from opkiln.ship.targets import Wanted
from opkiln.toolchain.choice import available

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from opkiln.builder import OpBuilder
    from opkiln.model import Artifact

BUILT, CACHED, SKIPPED, FAILED = "built", "cached", "skipped", "failed"


class Request(NamedTuple):
    """One op for one target. ``named``: somebody asked for it, so that it must be had."""

    builder: OpBuilder
    wanted: Wanted | None = None
    named: bool = True
    asked_as: str = ""  # the op's name as it was asked for, such as my-package:op

    @property
    def op(self) -> str:
        """The op, by the name that tells it from others."""
        return self.asked_as or self.builder.name


class Outcome(NamedTuple):
    """What became of a request. ``path`` and ``sha256`` are the library's, where there is one."""

    op: str
    status: str
    backend: str = ""
    target: str = ""
    archs: tuple[str, ...] = ()
    seconds: float = 0.0
    path: str = ""
    sha256: str = ""
    reason: str = ""
    error: OpkilnError | None = None


class Asked(NamedTuple):
    """The requests that can be made, and what became of the others."""

    requests: tuple[Request, ...]
    refused: tuple[Outcome, ...]


def requests(
    builders: Mapping[str, type[OpBuilder]],
    names: Iterable[str],
    wanted: Sequence[Wanted],
    *,
    named: bool,
) -> Asked:
    """Every op for every target that it has a version for; without targets, for this machine.

    One that is named and has a version for none is an error: UnknownOp, UnknownBackend. Of several
    targets it must have one.
    """
    made: list[Request] = []
    refused: list[Outcome] = []
    for name in names:
        missing: list[Outcome] = []
        last: UnknownBackend | None = None
        for each in wanted or (None,):
            try:
                made.append(Request(targets.ask(builders[name](), each), each, named, name))
            except UnknownBackend as none:
                last = none
                reason = f"{none.what}: {none.why}"
                missing.append(Outcome(name, SKIPPED, target=str(each or ""), reason=reason))
            except SpecError as wrong:
                if named:
                    raise
                missing.append(Outcome(name, FAILED, error=wrong))  # the rest need not suffer
                break
        if named and last is not None and len(missing) == len(wanted):
            raise last
        refused += missing
    return Asked(tuple(made), tuple(refused))


def prebuild(
    asked: Sequence[Request], *, jobs: int | None = None, trace: str | None = None
) -> list[Outcome]:
    """Have every request in the store, found or built, all of them at once.

    What cannot be had is an outcome, never an exception: failed where it was named, skipped with
    the reason where it was not and that is a trait of the op. What is there is found first: where
    nothing is missing, no thread and no display starts.
    """
    outcomes: dict[int, Outcome] = {}
    with ExitStack() as stack:
        if jobs is not None:
            stack.enter_context(override(max_jobs=jobs))
        for number, request in enumerate(asked):
            with targets.applied(request.wanted):
                found = _look(request)
            if found is not None:
                outcomes[number] = found
        missing = {n: request for n, request in enumerate(asked) if n not in outcomes}
        if missing or trace is not None:
            from opkiln.building import reporting

            with reporting.shown(trace):
                outcomes |= _in_parallel(missing)
    return [outcomes[number] for number in range(len(asked))]


def _look(request: Request) -> Outcome | None:
    """The outcome of what is there, or is not to be tried; None for what is to be built."""
    builder = request.builder
    try:
        asked = _decided(request)
        outcome = loader.decided(asked)
    except OpkilnError as wrong:  # the declaration itself
        return _outcome(request, FAILED, error=wrong)
    if isinstance(outcome, Serve):
        return _found(request, asked, outcome)
    if isinstance(outcome, Build):
        # An author may have overridden it.
        if request.named or builder.is_compatible():
            return None
        return _outcome(request, SKIPPED, reason=builder.error_log or "not compatible")
    error = outcome.error
    if not request.named and _is_trait(error, builder):
        return _outcome(request, SKIPPED, reason=f"{error.what}: {error.why}")
    return _outcome(request, FAILED, error=_with_hint(error, request))


def _decided(request: Request) -> decision.Request:
    use = decision.BUILD if request.wanted is None else decision.SHIP
    return decision.Request(request.builder.op(), use)


def _is_trait(error: OpkilnError, builder: OpBuilder) -> bool:
    """Whether an op cannot be had here because of what it is: it has no device here, or no compiler
    can make what it needs. That there is no compiler at all is an error."""
    if isinstance(error, ToolchainError):
        machine = target_machine() if builder.backend == CPU else ""
        return available(builder.backend, machine)
    return isinstance(error, LoadError) and not isinstance(error, CompilingOff)


def _in_parallel(missing: Mapping[int, Request]) -> dict[int, Outcome]:
    """Build each in a thread: the engine's budget decides how many steps run at once."""
    from opkiln.engine import events

    outcomes: dict[int, Outcome] = {}
    raised: list[BaseException] = []  # what is no failure of an op: this process has no files left

    def work(number: int, request: Request) -> None:
        try:
            target = f" {request.wanted}" if request.wanted and len(missing) > 1 else ""
            with targets.applied(request.wanted), events.told_as(f"{request.op}{target}"):
                outcomes[number] = _make(request)
        except OpkilnError as error:
            outcomes[number] = _outcome(request, FAILED, error=_with_hint(error, request))
        except BaseException as error:
            if len(missing) == 1:
                raise
            raised.append(error)

    if len(missing) == 1:
        for number, request in missing.items():
            work(number, request)  # in this thread, where an interrupt reaches it
        return outcomes
    threads = []
    for number, request in missing.items():
        # Each sees this thread's settings and its display. Daemons: an interrupt waits for none.
        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(work, number, request), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        while thread.is_alive():
            # Not for ever: the kernel may hand an interrupt to another thread, and this one only
            # sees it when it wakes.
            thread.join(0.2)
    if raised:
        raise raised[0]
    return outcomes


def _make(request: Request) -> Outcome:
    """Find or build. Raises OpkilnError."""
    began = time.monotonic()
    asked = _decided(request)
    artifact, _ = loader.obtain(asked)
    _require_stored(request.op, artifact)
    return _outcome(
        request,
        BUILT if artifact.origin == "built" else CACHED,
        archs=asked.wanted.archs,
        seconds=time.monotonic() - began,
        path=artifact.path,
        sha256=artifact.sha256,
    )


def _found(request: Request, asked: decision.Request, outcome: Serve) -> Outcome:
    artifact = outcome.artifact
    if outcome.read is not None:
        receipt.write(asked, artifact, outcome.read)
    return _outcome(request, CACHED, archs=asked.wanted.archs, path=artifact.path,
                    sha256=artifact.sha256)  # fmt: skip


def _outcome(
    request: Request,
    status: str,
    *,
    archs: tuple[str, ...] = (),
    seconds: float = 0.0,
    path: str = "",
    sha256: str = "",
    reason: str = "",
    error: OpkilnError | None = None,
) -> Outcome:
    builder = request.builder
    target = str(request.wanted or "")
    return Outcome(
        request.op, status, builder.backend, target, archs, seconds, path, sha256, reason, error
    )


def _require_stored(op: str, artifact: Artifact) -> None:
    """A build that no store could take lasts only as long as this process. Raises StoreError."""
    from opkiln.store.layers import Store

    if artifact.origin != "built":
        return
    layers = [layer.root for layer in Store().location.layers]
    if not any(artifact.path.startswith(os.path.join(root, "")) for root in layers):
        raise StoreError(
            f"op {op} was built, but could not be stored",
            hint="set OPKILN_CACHE_DIR to a directory that can be written to",
        )


def _with_hint(error: OpkilnError, request: Request) -> OpkilnError:
    """The loader's hint for a forbidden compile is to build it now; ours is how to allow it."""
    if not isinstance(error, CompilingOff):
        return error
    hint = f"OPKILN_MODE=auto opkiln build {request.op}"
    return CompilingOff(error.what, why=error.why, hint=hint)
