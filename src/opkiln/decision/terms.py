"""The terms of a decision: the request, the candidates it looks at, and what it can come to.

A request is made at the beginning of a load, a build or a look. Everything that it needs is worked
out once. What came of acting on an outcome is noted in it, and then it is decided on again.
"""

from __future__ import annotations

import time
from functools import cached_property

from opkiln import machine
from opkiln.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.build_model import Plan, Target, Toolchain, TorchSDK
    from opkiln.decision.archs import Wanted
    from opkiln.errors import LoadError, OpkilnError, ToolchainError
    from opkiln.facts import Evidence
    from opkiln.model import Artifact, Op
    from opkiln.store.layers import Store

# What the op is wanted for.
LOAD = "load"  # to run here, now
BUILD = "build"  # to be there for a later load: it need not run here
SHIP = "ship"  # to be in the user's own store, for other machines


class Request:
    """An op, what it is wanted for, and what was tried so far."""

    def __init__(
        self, op: Op, use: str = LOAD, *, must_be_native: bool = False, agreed: bool = True
    ) -> None:
        """``agreed=False``: whatever the ranks of the job have agreed on (``decision.pins``)."""
        self.op = op
        self.use = use
        self.agreed = agreed
        self.must_be_native = must_be_native or use != LOAD
        self.cannot_open: dict[str, LoadError] = {}  # what this process failed to open, by path
        self.build_error: OpkilnError | None = None  # why the build that was decided on failed
        # When it began, or last got on: OPKILN_BUILD_TIMEOUT counts from here.
        self.since = time.monotonic()
        # What the compilers said when they were asked for this request.
        self.compilers: Toolchain | ToolchainError | None = None
        self.fetches = False  # whether the remote tiers may be asked: not for those who only look
        self.tiers: Trace | None = None  # what they said

    @cached_property
    def wanted(self) -> Wanted:
        """The device architectures. Raises ArchError, LoadError."""
        from opkiln.decision import archs

        return archs.wanted(self.op)

    @cached_property
    def sdk(self) -> TorchSDK | None:
        """The torch that it would run on; None where it needs none. Raises LoadError where no
        native op can run here at all."""
        from opkiln.decision.target import runnable

        return runnable(self.op.spec)

    @cached_property
    def target(self) -> Target:
        """What it would be built for. Raises ArchError, BuildError, LoadError."""
        from opkiln.decision.target import target_of

        return target_of(self.op.spec, self.sdk, self.wanted.archs)

    @cached_property
    def store(self) -> Store:
        """The store's layers."""
        from opkiln.store.layers import Store

        return Store()

    @property
    def runs_here(self) -> bool:
        """Whether what serves must run on this machine."""
        return self.use == LOAD

    @property
    def for_elsewhere(self) -> bool:
        """Whether it is for another machine, so that only the user's own store counts."""
        return self.use == SHIP or self.target.machine != machine.architecture()


class Candidate(Record):
    """One thing that could have served, and why it does or does not."""

    resort: str  # prebuilt, store, layer, remote, build, fallback
    verdict: str  # taken, refused, fetched, none
    reason: str  # why it is taken or refused
    subject: str = ""  # the path or key it is about

    def __str__(self) -> str:
        where = f"  [{self.subject}]" if self.subject else ""
        return f"{self.resort:9} {self.verdict:8} {self.reason}{where}"


class Trace:
    """The candidates of one decision, in the order they were looked at: ``candidates``.

    ``str()`` of it has a line for each.
    """

    def __init__(self) -> None:
        self.candidates: list[Candidate] = []

    def add(self, resort: str, verdict: str, reason: str, subject: str = "") -> None:
        """Add a candidate."""
        self.candidates.append(Candidate(resort, verdict, reason, subject))

    def refusals(self) -> list[str]:
        """Why nothing native serves, in the order it was tried."""
        return [each.reason for each in self.candidates if each.verdict == "refused"]

    def __str__(self) -> str:
        return "\n".join(map(str, self.candidates))


class Serve(Record):
    """Open this artifact. ``read`` is what a full search read to find it; None for an answer that
    was remembered, or that came with a package."""

    artifact: Artifact
    trace: Trace
    read: Evidence | None = None


class Build(Record):
    """Nothing has it: run this plan. ``read`` is what later searches read to find what it makes."""

    plan: Plan
    trace: Trace
    read: Evidence


class Reference(Record):
    """Run the pure-PyTorch reference, because of this error."""

    error: OpkilnError
    trace: Trace


class Refuse(Record):
    """Nothing can serve, because of this error."""

    error: OpkilnError
    trace: Trace


class Ask(Record):
    """It depends on compilers that are not known here: ask them, and decide again."""

    trace: Trace


class Fetch(Record):
    """The store does not have it: ask the remote tiers for this target, and decide again."""

    target: Target
    trace: Trace


Outcome = Serve | Build | Reference | Refuse

# An outcome in a word, for people.
CACHED = "cached"
WOULD_COMPILE = "would compile"
WOULD_FALL_BACK = "would fall back"
WOULD_FAIL = "would fail"


class Summary(Record):
    """``reason`` says why it is not cached; ``path`` is the entry if it is."""

    status: str
    reason: str = ""
    path: str = ""


def summary(outcome: Outcome) -> Summary:
    """What a load comes to that is decided like this."""
    candidates = outcome.trace.candidates
    if isinstance(outcome, Serve):
        taken = (each.subject for each in candidates if each.verdict == "taken")
        return Summary(CACHED, path=next(taken, outcome.artifact.path))
    refused = [each for each in candidates if each.verdict == "refused"]
    reason = "; ".join(each.reason for each in refused if each.resort != "fallback")
    if isinstance(outcome, Build):
        return Summary(WOULD_COMPILE, reason or (candidates[-1].reason if candidates else ""))
    status = WOULD_FALL_BACK if isinstance(outcome, Reference) else WOULD_FAIL
    return Summary(status, reason or outcome.error.what)
