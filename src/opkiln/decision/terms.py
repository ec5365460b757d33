"""The terms of a decision: the request, what is allowed here, and the possible outcomes.

A request is made at the beginning of a load, a build or a look. It computes each thing that it
needs once. If acting on an outcome fails, that is noted in the request, and it is decided again.

``OPKILN_MODE`` says for a process whether an op may be compiled, and whether its reference may
serve instead. ``opkiln.seal()`` forbids compiling from then on.
"""

from __future__ import annotations

import os
import time
import warnings
from itertools import chain

from opkiln.base import trust
from opkiln.base.digest import current_signatures, forget_mounts, open_regular, sha256_file
from opkiln.base.forks import cached_property
from opkiln.base.lazy import Record
from opkiln.errors import CompilingOff, FallbackWarning, SealedError, UsageError
from opkiln.machine import uname
from opkiln.settings import settings

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.base.build_model import Plan, Target, Toolchain, TorchSDK
    from opkiln.base.model import Artifact, Op, OpSpec
    from opkiln.decision.archs import Wanted
    from opkiln.errors import LoadError, OpkilnError, ToolchainError
    from opkiln.machine.facts import Evidence
    from opkiln.store.layers import Store


# The values of OPKILN_MODE.
AUTO = "auto"  # find it, else compile it, else run the reference and warn
NATIVE = "native"  # as auto, but what would fall back is an error
CACHED = "cached"  # never compile: find it, else run the reference
SEALED = "sealed"  # never compile: find it, else fail
NEEDED = "needed"  # compile only what has no reference
SOURCE = "source"  # as auto, but ignore the libraries that packages were installed with
REFERENCE = "reference"  # run references wherever there are any
CHECK = "check"  # as auto, but run both versions of an op and compare them

_seal = "off"


def seal(mode: str = "error") -> None:
    """Make every later compile an error, or with ``"warn"`` a warning; ``"off"`` undoes that.

    It is an error also for an op that has a reference: a server that was warmed up should not learn
    from its latency that an op fell back.
    """
    global _seal
    if mode not in ("warn", "error", "off"):
        raise UsageError(f"seal({mode!r}): expected 'warn', 'error' or 'off'")
    _seal = mode


def is_sealed() -> bool:
    """Whether a compile is an error even if something else could serve."""
    return _seal == "error" or settings.mode == SEALED


def uses_installed() -> bool:
    """Whether libraries that packages were installed with may serve."""
    return bool(settings.mode != SOURCE)


def never_compiles() -> str:
    """Why no op may be compiled here; empty if some may."""
    if _seal == "error":
        return "opkiln is sealed: nothing may be compiled any more"
    if settings.mode in (SEALED, CACHED):
        return f"OPKILN_MODE={settings.mode}: nothing is compiled here"
    return ""


def why_not_compile(request: Request) -> str:
    """Why this op may not be compiled here; empty if it may."""
    if settings.mode == NEEDED and not why_no_reference(request):
        return "OPKILN_MODE=needed: an op that has a reference is not compiled here"
    return never_compiles()


def why_no_reference(request: Request) -> str:
    """Why the reference must not serve this request; empty if it may."""
    if not request.op.has_reference:
        return "the op has no reference"
    if request.must_be_native:
        return "a native version was asked for"
    if settings.mode == NATIVE:
        return "OPKILN_MODE=native: a native version is required"
    return "opkiln is sealed" if is_sealed() else ""


NOTHING_TRUSTED = (
    "nothing says what is trusted, as neither OPKILN_TRUSTED_KEYS nor OPKILN_LOCK is set"
)
TRUST_HINT = "export OPKILN_TRUSTED_KEYS=FILE.pub, or OPKILN_LOCK=ops.lock; see docs/remotes.md"


def why_no_tier_is_asked() -> str:
    """Why the remote tiers that are set are never asked; empty if they are, or if none is set."""
    trusts = settings.trusted_keys is not None or settings.lock
    return NOTHING_TRUSTED if settings.remotes and not trusts else ""


def prefers_reference(request: Request) -> bool:
    """Whether the reference is to serve even if there is a native version."""
    return bool(settings.mode == REFERENCE) and not why_no_reference(request)


def refusal(spec: OpSpec, reason: str) -> CompilingOff:
    """The error for an op that would have to be compiled."""
    kind = SealedError if is_sealed() else CompilingOff
    if unasked := why_no_tier_is_asked():
        reason += f"\nno tier of OPKILN_REMOTES was asked: {unasked}"
    return kind(f"op {spec.title} would have to be compiled", why=reason, hint=_hint(spec))


def about_to_compile(spec: OpSpec) -> None:
    """Raise SealedError or warn, if opkiln is sealed. Called before the first compile of an op."""
    if is_sealed():
        raise refusal(spec, never_compiles())
    if _seal == "warn":
        warnings.warn(
            f"op {spec.title} is compiled after opkiln was sealed\nhint: {_hint(spec)}",
            FallbackWarning,
            stacklevel=2,
        )


def _hint(spec: OpSpec) -> str:
    """The command that compiles an op, without the mode that forbids it here."""
    allowed = "" if settings.mode in (AUTO, NATIVE, SOURCE, CHECK) else "OPKILN_MODE=auto"
    if not spec.is_known_by_name:
        how = f" with {allowed}" if allowed else ""
        return f"run it once{how} before; later runs find it in the cache"
    return f"{allowed} opkiln build {spec.name}".lstrip()


class Pin(Record):
    """What all ranks of a job have agreed on: a library, or the reference and why. This process
    serves exactly that. With a newer library it would compute other numbers than the others."""

    spec: OpSpec
    artifact: Artifact | None
    reason: str = ""
    passing: bool = False  # the job still prepares a library, as the program asked it to
    # Names the part of an op's Python code that differs from what was agreed on; None if that was
    # not compared.
    find_change: Callable[[Op], str] | None = None


_pins: dict[tuple[str, str, str], Pin] = {}


def pin(
    op: Op,
    artifact: Artifact | None,
    reason: str = "",
    *,
    passing: bool = False,
    find_change: Callable[[Op], str] | None = None,
) -> Pin:
    """Serve this library from now on; None means the reference."""
    made = _pins[op.name] = Pin(op.spec, artifact, reason, passing, find_change)
    return made


def find_pin(op: Op) -> Pin | None:
    """The pin of an op; None if the ranks agreed on nothing."""
    return _pins.get(op.name)


def release(op: Op) -> None:
    """Forget what was agreed on."""
    _pins.pop(op.name, None)


def pin_fault(artifact: Artifact) -> str:
    """Why a pinned library must not be opened; empty if it is the one that was agreed on."""
    path = artifact.path
    in_memory = path.startswith("/proc/")  # of a bundle, and sealed
    try:
        if not in_memory and (reason := trust.fault(
            path, os.lstat(path), listed=artifact.origin not in ("store", "built")
        )):  # fmt: skip
            return reason
        with open_regular(path) as (fd, _):
            found = sha256_file(fd)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return "" if found == artifact.sha256 else f"{path} has the SHA-256 {found}"


# The uses of an op.
LOAD = "load"  # to run here, now
BUILD = "build"  # to be there for a later load: it need not run here
SHIP = "ship"  # to be in the user's own store, for other machines


class Survey:
    """What the requests of one look at many ops share: the store, the compilers and the files are
    looked up once. What they read is not noted, so no receipt can be written."""

    def __init__(self) -> None:
        from opkiln.machine.facts import Hasher
        from opkiln.store.layers import Store

        forget_mounts()
        self.store = Store()
        self.hasher = Hasher()
        self._tools: dict[tuple[object, ...], Toolchain | None] = {}
        self._signed: dict[str, list[int]] = {}
        self._torch: dict[str, TorchSDK | None] = {}

    def require_torch(self, spec: OpSpec) -> TorchSDK | None:
        """As ``archs.require_torch``. Raises LoadError."""
        from opkiln.decision.archs import require_torch

        if spec.abi not in self._torch:
            self._torch[spec.abi] = require_torch(spec)
        return self._torch[spec.abi]

    def current_signatures(self, paths: list[str]) -> list[int]:
        """As ``digest.current_signatures``. Raises OSError."""
        for path in {*paths} - self._signed.keys():
            self._signed[path] = current_signatures([path])
        return list(chain.from_iterable(map(self._signed.__getitem__, paths)))

    def recall(self, backend: str, machine: str, spec: OpSpec) -> Toolchain | None:
        """The compilers, as ``toolchain.choice`` recalls them."""
        from opkiln.machine.toolchain import choice

        asked = backend, machine, choice.device_family(backend, spec)
        if self._tools.get(asked) is None:  # they may have been asked meanwhile
            self._tools[asked] = choice.recall(self.store.memory, backend, machine, spec)
        return self._tools[asked]


class Request:
    """An op, what it is wanted for, and what was tried so far."""

    def __init__(
        self,
        op: Op,
        use: str = LOAD,
        *,
        must_be_native: bool = False,
        agreed: bool = True,
        survey: Survey | None = None,
    ) -> None:
        """With ``agreed=False``, what the ranks of the job agreed on does not count. With a
        ``survey``, it is only looked at."""
        self.op = op
        self.use = use
        self.agreed = agreed
        self.survey = survey
        self.must_be_native = must_be_native or use != LOAD
        self.cannot_open: dict[str, LoadError] = {}  # what this process failed to open, by path
        self.build_error: OpkilnError | None = None  # why the build that was decided on failed
        # When it began, or last got on: OPKILN_BUILD_TIMEOUT counts from here.
        self.since = time.monotonic()
        # The answer of the compilers when they were asked for this request.
        self.compilers: Toolchain | ToolchainError | None = None
        self.fetches = False  # whether the remote tiers may be asked: not for those who only look
        self.tiers: Trace | None = None  # what they said

    @cached_property
    def wanted(self) -> Wanted:
        """The device architectures. Raises ArchError, LoadError."""
        from opkiln.decision import archs

        return archs.find_wanted(self.op)

    @cached_property
    def sdk(self) -> TorchSDK | None:
        """The torch that it would run on; None if it needs none. Raises LoadError if no native op
        can run here."""
        from opkiln.decision.archs import require_torch

        find = require_torch if self.survey is None else self.survey.require_torch
        return find(self.op.spec)

    @cached_property
    def target(self) -> Target:
        """The target of a build for it. Raises ArchError, BuildError, LoadError."""
        from opkiln.decision.archs import target_of

        return target_of(self.op.spec, self.sdk, self.wanted.archs)

    @cached_property
    def store(self) -> Store:
        """The store's layers."""
        from opkiln.store.layers import Store

        return Store() if self.survey is None else self.survey.store

    def recall_compilers(self) -> Toolchain | None:
        """The compilers, as ``toolchain.choice`` recalls them."""
        from opkiln.machine.toolchain import choice

        asked = self.target.backend, self.target.machine, self.op.spec
        if self.survey is None:
            return choice.recall(self.store.memory, *asked)
        return self.survey.recall(*asked)

    @property
    def runs_here(self) -> bool:
        """Whether what serves must run on this machine."""
        return self.use == LOAD

    @property
    def for_elsewhere(self) -> bool:
        """Whether it is for another machine, so that only the user's own store counts."""
        return self.use == SHIP or self.target.machine != uname.architecture()


class Candidate(Record):
    """One thing that could have served, and why it was taken or refused."""

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

# An outcome in a word, for people; ``CACHED`` is one of them.
WOULD_COMPILE = "would compile"
WOULD_FALL_BACK = "would fall back"
WOULD_FAIL = "would fail"


class Summary(Record):
    """An outcome in short. ``reason`` says why it is not cached; ``path`` is the entry if it is."""

    status: str
    reason: str = ""
    path: str = ""


def summary(outcome: Outcome) -> Summary:
    """What a load with this outcome does."""
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
