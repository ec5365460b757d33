"""``opkiln.ensure``: all ranks of a job, one build per op, one library that all agree on."""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

from opkiln.base.model import Op
from opkiln.builder.base import OpBuilder
from opkiln.builder.registry import ALL_OPS, libraries
from opkiln.building.recorded import HOSTS, RecordedModule
from opkiln.cluster import facts, job, protocol, sharing, work
from opkiln.cluster.channel import Channel
from opkiln.cluster.messages import OUTCOME, JobOutcome
from opkiln.decision import terms
from opkiln.errors import (
    ClusterError,
    FallbackWarning,
    UnknownOp,
    UsageError,
    told_briefly,
    warn_caller,
)
from opkiln.loading import loader, recording
from opkiln.settings import settings


class _Options(TypedDict, total=False):
    """The options of both forms of ``ensure``."""

    rank: int | None
    world_size: int | None
    lease: float | None
    signing_key: str | None


# The calls so far, by store, job and number of ranks. All ranks of a job call ensure equally often.
_calls: dict[tuple[str, str, int], itertools.count[int]] = {}


class Choice(NamedTuple):
    """The library or reference that all ranks use for one op."""

    op: str  # the op's name, or that of the variant
    digest: str  # SHA-256 of the library; empty: the reference
    reason: str  # why it is the reference
    how: str  # where this rank has the library from: cached, built, fetched, found on this node


class Agreement(tuple[Choice, ...]):
    """The choices, one for each library, in the order of the ops."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(
            f"{each.op}: library {each.digest[:16]} ({each.how})"
            if each.digest
            else f"{each.op}: reference ({each.reason})"
            for each in self
        )


@overload
def ensure(
    ops: Any,
    group: Any = ...,
    store: Any = ...,
    timeout: float = ...,
    *,
    wait: Literal[True] = ...,
    **options: Unpack[_Options],
) -> Agreement: ...
@overload
def ensure(
    ops: Any,
    group: Any = ...,
    store: Any = ...,
    timeout: float = ...,
    *,
    wait: Literal[False],
    **options: Unpack[_Options],
) -> Handle: ...
@told_briefly
def ensure(
    ops: str | Any | Iterable[str | Any],
    group: Any = None,
    store: Any = None,
    timeout: float = 1800.0,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    lease: float | None = None,
    signing_key: str | None = None,
    wait: bool = True,
) -> Agreement | Handle:
    """Build each op once in the whole job, and agree with all other ranks on one library for each.

    Every rank calls it with the same ops, before they are used. ``ops`` are names, builders or
    decorated functions. Afterwards this process serves each op by the agreed library, or by the
    reference if one rank cannot use it. The measurements of rank 0 for the ops (``tune=``) are
    copied into the stores of all ranks.

    Names such as ``flashinfer:norm`` are modules of other JITs, which the file of ``OPKILN_RECORD``
    has (`opkiln run --record FILE COMMAND`). One rank compiles each. The stores of all nodes get
    what it made, and there the program finds it.

    ``group`` is a process group, ``store`` a store of torch.distributed or a directory that all
    ranks share. If both are left out, the default group is used if there is one, and otherwise the
    launcher's variables (torchrun, srun, mpirun, ``MASTER_ADDR``). ``rank`` and ``world_size`` are
    only needed with a store, and only if no launcher sets them. If a rank is silent for ``lease``
    seconds (6, and more in jobs of more than 6,000 ranks), another one takes over its work.
    ``signing_key`` is the file of a private key (`opkiln cache keygen`); this rank signs with it
    what it sends.

    ``wait=False`` returns at once. The ops run as their references until ``Handle.switch``.

    Raises ClusterError on every rank if one of them is missing, dies, differs or cannot be reached,
    after ``timeout`` seconds at the latest.
    """
    for name, value in (("timeout", timeout), ("lease", lease)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name}={value!r}: expected a positive number of seconds")
    place = job.find(group, store, rank, world_size, timeout)
    lease = job.default_lease(place.world) if lease is None else lease
    job_of = place.store.where, place.name, place.world
    number = next(_calls.setdefault(job_of, itertools.count()))
    agreeing = _Agreeing(place, number, timeout, lease, signing_key)
    try:
        agreeing.modules, others = _take_modules(ops)
        listed = [] if wait else list(libraries_of(others))
    except Exception as error:
        agreeing.tell_all(error)
        raise
    if wait:
        agreeing.run(others)
        return agreeing.pin()
    return Handle(agreeing, listed)


class _Agreeing:
    """One call of ``ensure``."""

    def __init__(
        self,
        place: job.JobPlace,
        number: int,
        timeout: float,
        lease: float,
        signing_key: str | None,
    ) -> None:
        self.place, self.number, self.timeout, self.lease = place, number, timeout, lease
        self.signing_key = signing_key
        self.modules: list[RecordedModule] = []
        self.shared: list[Choice] = []
        self.began = time.monotonic()
        self.channel = self._channel(moved=False)
        self.worker = work.Worker(())
        self.outcome: JobOutcome | None = None

    def _channel(self, *, moved: bool) -> Channel:
        return job.channel(self.place, str(self.number), max(2 * self.lease, 10.0), moved=moved)

    def run(self, ops: Any, moved: Callable[[], None] = lambda: None) -> None:
        """Agree. ``moved`` is called in a new round before this rank speaks there.

        Raises ClusterError, and OpkilnError for ops that are not declared properly.
        """
        try:
            for module, made, how in sharing.share_modules(
                self.modules, self.place, self.lease, self.signing_key
            ):
                self.shared.append(Choice(module, made, "", how))
        except Exception as error:
            self.tell_all(error)
            raise
        while (outcome := self._agree(ops)) == job.MOVED:
            self.channel = self._channel(moved=True)
            moved()
        self.outcome = outcome

    def _agree(self, ops: Any) -> JobOutcome:
        try:
            self.worker = work.Worker(list(libraries_of(ops)), self.channel, self.signing_key)
            hello = self.worker.hello()
            if self.place.rank == 0:
                hello = hello._replace(tuned=self.worker.list_tuned())
        except Exception as error:
            self.tell_all(error)
            raise
        state = protocol.start(
            self.place.rank, self.place.world, hello, lease=self.lease,
            deadline=self.began + self.timeout, timeout=self.timeout, serves=self.place.serves,
        )  # fmt: skip
        try:
            return work.agree(state, self.channel, self.worker)
        except ClusterError as error:
            whom = f"rank {self.place.rank} of {self.place.world} (host {hello.host})"
            raise ClusterError(f"{whom}: {error.what}", why=error.why, hint=error.hint) from error

    def tell_all(self, error: Exception) -> None:
        """Tell all ranks why this one cannot take part, so that they do not wait for it."""
        what, _, why = work.shorten_error(error).partition("\n")
        failure = JobOutcome(error=f"rank {self.place.rank}: {what}", why=why)
        try:
            while self.channel.swap(OUTCOME, None, failure) == job.MOVED:
                self.channel = self._channel(moved=True)
        except ClusterError:
            return  # the store cannot be reached: the others find that this rank is missing

    def require_outcome(self) -> JobOutcome:
        """The outcome. Raises ClusterError if it is a failure."""
        assert self.outcome is not None
        if not self.outcome.error:
            return self.outcome
        op, fact = self.outcome.differ_in
        if not fact:
            raise ClusterError(self.outcome.error, why=self.outcome.why)
        own = facts.list_parts(self.worker.facts[op], fact)
        raise ClusterError(
            self.outcome.error,
            why=f"{self.outcome.why}\nparts on this rank: {own}" if own else self.outcome.why,
            hint="pip freeze | sha256sum    # on each host. If it is the same, compare the parts: "
            "each rank lists its own",
        )

    def pin(self) -> Agreement:
        """Serve what was agreed on from now on. Raises ClusterError."""
        choices = list(self.shared)
        agreed = self.require_outcome()
        self.worker.keep_tuned(agreed.tuned)
        for number, (op, vote) in enumerate(zip(self.worker.ops, agreed.choices, strict=True)):
            found = vote.digest and self.worker.library(number, vote.digest)
            terms.pin(op, found or None, vote.reason, find_change=self.worker.change_finder(number))
            how = self.worker.how[number] if vote.digest else ""
            choices.append(Choice(op.spec.name, vote.digest, vote.reason, how))
            known = loader.loaded_here().get(op.name)
            if known is not None and known[0].artifact is None:  # it ran as its reference
                if vote.digest:
                    loader.load(op, must_be_native=True)
                else:
                    what = f"op {op.spec.title} runs as its pure-PyTorch reference on all ranks"
                    warn_caller(f"{what}: {vote.reason}", FallbackWarning)
        return Agreement(choices)


class Handle:
    """An agreement that is reached in the background. Until then the ops run as references."""

    def __init__(self, agreeing: _Agreeing, ops: list[Op]) -> None:
        self._agreeing = agreeing
        self._done: Future[None] = Future()
        self._agreement: Agreement | None = None
        self._asked = 0  # how often switch() has asked the store
        for op in ops:
            if loader.loaded_here().get(op.name) is None:
                why = "the job still prepares its library (opkiln.ensure)"
                terms.pin(op, None, why, passing=True)
        run = contextvars.copy_context().run
        threading.Thread(
            target=run, args=(self._run, ops), name="opkiln-ensure", daemon=True
        ).start()

    def _run(self, ops: list[Op]) -> None:
        try:
            self._agreeing.run(ops, self._repeat_refusals)
            self._done.set_result(None)
        except BaseException as error:  # raised by switch(), in the caller's thread
            self._done.set_exception(error)

    def _repeat_refusals(self) -> None:
        """In a new round, answer "no" to the steps at which this rank has not switched. Others may
        not have asked yet, and there is no agreement without this rank's answer."""
        for step in range(self._asked):
            self._agreeing.channel.swap(f"switch/{step}", None, "no")

    @property
    def ready(self) -> bool:
        """Whether this rank has the outcome. Other ranks may not: ``switch`` asks for all."""
        return self._done.done()

    @told_briefly
    def switch(self) -> Agreement | None:
        """Switch to the agreed libraries if they are ready. Returns None if they are not.

        Every rank calls it equally often, at the same steps of the program. The n-th call returns
        the same on all ranks: the first rank that asks decides it for all, in the job's store. So
        no rank switches alone. Raises ClusterError, on all ranks.
        """
        if self._agreement is not None:
            return self._agreement
        if not self._done.done() or self._done.exception() is None:
            # Counted before the channel is looked at: if the round ends now, the other thread
            # answers this step in the next one.
            step, self._asked = self._asked, self._asked + 1
            channel = self._agreeing.channel
            (outcome,) = channel.look([OUTCOME])
            if outcome == job.MOVED:
                return None
            now = "yes" if outcome is not None else "no"
            if channel.swap(f"switch/{step}", None, now) == "no":
                return None
        self._done.result()
        self._agreement = self._agreeing.pin()
        return self._agreement

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until this rank has the outcome. False after ``timeout`` seconds."""
        return bool(wait([self._done], timeout).done)


def agree_on_first(what: str, value: Sequence[str]) -> tuple[str, ...]:
    """The value of the first rank that calls this, on every rank of the default group. All must
    have called ``ensure`` before: until then, one may be in a round that is over."""
    place = job.find(None, None, None, None, settings.build_timeout)
    return tuple(job.channel(place, what, 60.0).swap(what, None, tuple(value)))


def _take_modules(ops: Any) -> tuple[list[RecordedModule], list[Any]]:
    """(the modules of other programs among these, the other ops). Raises UnknownOp, StoreError."""
    is_one = isinstance(ops, str) or callable(ops) or not isinstance(ops, Iterable)
    listed = [ops] if is_one else list(ops)
    names = [each for each in listed if isinstance(each, str) and each.partition(":")[0] in HOSTS]
    known = recording.read_modules(settings.record) if names and settings.record else {}
    for name in names:
        if name not in known:
            raise UnknownOp(
                f"{name} is not recorded",
                why=f"the file {settings.record} has {', '.join(known) or 'no such module'}"
                if settings.record
                else "OPKILN_RECORD names no file",
                hint="opkiln run --record FILE COMMAND    # and then OPKILN_RECORD=FILE",
            )
    return [known[name] for name in names], [each for each in listed if each not in names]


def libraries_of(ops: Iterable[Any]) -> Iterable[Op]:
    """The ops of names, builders and decorated functions. Each variant is an op. Raises UnknownOp,
    UsageError."""
    for each in ops:
        if isinstance(each, str):
            yield from (kind().op() for _, kind in libraries(each, ALL_OPS[each]))
            continue
        if isinstance(each, Op):
            yield each
            continue
        kind = each if isinstance(each, type) else getattr(each, "builder", type(each))
        if not hasattr(kind, "variants"):
            raise UsageError(
                f"{each!r} is not an op", why="an op is a name, a builder or a decorated function"
            )
        builders: Sequence[type[OpBuilder]] = kind.variants()
        if builders:
            yield from (variant().op() for variant in builders)
        else:
            yield (kind() if each is kind or hasattr(each, "builder") else each).op()
