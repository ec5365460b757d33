"""The state of every op here, for each of its backends. Builds and loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from opkiln.base.model import CUDA, ROCM, display_name
from opkiln.builder.base import OpBuilder
from opkiln.builder.registry import ALL_OPS, builder_of, bundled_ops, declared_ops, libraries
from opkiln.decision import archs, terms
from opkiln.decision.prebuilt import PREBUILT
from opkiln.decision.terms import Candidate
from opkiln.errors import OpkilnError
from opkiln.loading import loader
from opkiln.report import redact


class BackendStatus(NamedTuple):
    """One op on one backend. ``compatible``: its native version can be loaded or built."""

    backend: str
    status: str  # of decision.terms: cached, would compile, would fall back, would fail
    installed: bool = False  # shipped as a binary
    cached: bool = False  # it loads without compiling
    compatible: bool = False
    reason: str = ""  # why it is not cached, or not compatible
    path: str = ""  # of the entry that would be loaded
    candidates: tuple[Candidate, ...] = ()  # each, and why it was taken or refused


class OpStatus(NamedTuple):
    """One op. ``serves`` is the backend that loading it here would use."""

    op: str
    distribution: str
    serves: str
    backends: tuple[BackendStatus, ...]  # the one that serves first
    error: str = ""  # why it is not known: it cannot be imported, or its declaration is invalid
    changes: tuple[str, ...] = ()  # since it was last built, if that was asked for
    variant_of: str = ""  # the op that this is a variant of
    no_device: bool = False  # it is for devices that are not here, and its reference serves

    @property
    def here(self) -> BackendStatus:
        """Its state on the backend that serves."""
        if self.backends:
            return self.backends[0]
        return BackendStatus(self.serves, terms.WOULD_FAIL, reason=self.error)

    @property
    def is_problem(self) -> bool:
        """Whether something is wrong with it on this machine."""
        return not self.here.compatible and not self.no_device


def statuses(*, changes: bool = False) -> tuple[OpStatus, ...]:
    """Every op, bundled or not. One that cannot be imported has an error.

    ``changes`` also finds out what changed since each was last built, which takes longer.
    """
    # ALL_OPS reads all entry points again for each op. With thirty ops that would take half of a
    # report's time, so other packages' ops are not looked up there.
    find: dict[str, Callable[[], type[OpBuilder]]]
    find = {name: partial(ALL_OPS.__getitem__, name) for name in bundled_ops()}
    find |= {name: partial(builder_of, name, entry) for name, entry in declared_ops().items()}
    survey = terms.Survey()
    return tuple(
        each for name in find for each in _statuses(name, find[name], survey, changes=changes)
    )


def _statuses(
    name: str, find: Callable[[], type[OpBuilder]], survey: terms.Survey, *, changes: bool
) -> Iterator[OpStatus]:
    """The op, or each of its variants."""
    try:
        found = libraries(name, find())
    except OpkilnError as error:
        # If a module cannot be imported, the error that it raised says more.
        yield OpStatus(name, "", "", (), error.what if error.__cause__ is None else error.why)
    else:
        for each, kind in found:
            variant_of = "" if each == name else name
            yield _status(each, kind, survey, changes=changes)._replace(variant_of=variant_of)


def _status(name: str, kind: type[OpBuilder], survey: terms.Survey, *, changes: bool) -> OpStatus:
    distribution = ""
    try:
        builder = kind()
        distribution, serves = builder.distribution, builder.backend
        ordered = dict.fromkeys((serves, *kind.BACKENDS))
        backends = tuple(backend_status(kind, each, survey) for each in ordered)
        changed: tuple[str, ...] = ()
        if changes and backends[0].status == terms.WOULD_COMPILE:  # changed flags may be secret
            from opkiln.loading.explain import explain

            changed = tuple(map(redact.hide_secrets, explain(builder.op()).changes))
    except OpkilnError as error:
        return OpStatus(name, distribution, "", (), error.what)
    except (Exception, SystemExit) as error:  # an author's methods may raise anything
        return OpStatus(name, distribution, "", (), f"{type(error).__name__}: {error}")
    no_device = (
        backends[0].status == terms.WOULD_FALL_BACK
        and serves in (CUDA, ROCM)
        and not archs.may_use_device(serves)
    )
    return OpStatus(name, distribution, serves, backends, changes=changed, no_device=no_device)


def backend_status(
    kind: type[OpBuilder], backend: str, survey: terms.Survey | None = None
) -> BackendStatus:
    """The state of an op on one of its backends."""
    try:
        builder = kind(backend=backend)
        outcome = loader.look(terms.Request(builder.op(), survey=survey))
    except OpkilnError as error:
        return BackendStatus(backend, terms.WOULD_FAIL, reason=error.what)
    status, reason, path = terms.summary(outcome)
    reason = " ".join(reason.split()).removeprefix(f"op {display_name(builder.name)} ")
    if status == terms.WOULD_COMPILE:
        why = "; ".join(outcome.trace.refusals()) or "not built yet"
        reason = f"{why}: its first use builds it"
    candidates = tuple(outcome.trace.candidates)
    return BackendStatus(
        backend=backend,
        status=status,
        installed=any(each[:2] == (PREBUILT, "taken") for each in candidates),
        cached=status == terms.CACHED,
        compatible=status in (terms.CACHED, terms.WOULD_COMPILE),
        reason=reason,
        path=path,
        candidates=candidates,
    )
