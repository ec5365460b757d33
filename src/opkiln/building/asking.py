"""Asks the compilers what they are, where a decision depends on it and nobody has asked before."""

from __future__ import annotations

import time
from itertools import islice

from opkiln.base.trust import usable_by_owner
from opkiln.building.observing import observer
from opkiln.decision import archs
from opkiln.decision.search import plan_for
from opkiln.errors import OpkilnError, ToolchainError
from opkiln.machine.toolchain import choice, find
from opkiln.run import events, progress
from opkiln.run.process import once_per_thread
from opkiln.settings import settings
from opkiln.store import layers, lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.base.build_model import Plan, Toolchain
    from opkiln.decision.terms import Request


def ask(request: Request) -> None:
    """Ask the compilers. What they say, or why they cannot be asked, is noted in the request."""
    try:
        with usable_by_owner(), progress.show_builds(traced=False):
            request.compilers = _ask_in_turn(request)
    except ToolchainError as error:
        request.compilers = error
    except OpkilnError as error:
        request.build_error = error
    request.since = time.monotonic()


def _ask_in_turn(request: Request) -> Toolchain:
    """Of many processes that know none, one asks and the others wait.

    Raises ToolchainError, BuildTimeout, and StoreError for a store that has become somebody else's.
    """
    store, spec = request.store, request.op.spec
    backend, machine = request.target.backend, request.target.machine
    layers.claim(store.root)
    if store.root is None:
        return choice.choose(store.memory, backend, machine, spec)
    waited = False

    def waiting(state: lock.Waiting) -> None:
        nonlocal waited
        waited = True
        events.emit(events.WAITING, op=spec.name, **state.event_data(events.COMPILERS))

    def recall() -> Toolchain | None:
        return choice.recall(store.memory, backend, machine, spec)

    name = f"compilers-{backend}-{machine}"
    what, limit = f"the list of compilers for {backend}", settings.build_timeout
    with (
        once_per_thread("asks the compilers"),
        lock.turn(
            store.root, name, recall, waiting, what=what, limit=limit, since=request.since
        ) as got,
    ):
        if not isinstance(got, lock.Turn):
            return got
        if not waited:
            if request.fetches:  # the observer is for a build
                found = (each.path for each in find.cxx_candidates() if not each.refused)
                for cxx in islice(found, 1):
                    observer.begin(store.memory, cxx)
            try:
                return choice.choose(store.memory, backend, machine, spec)
            except ToolchainError as error:
                got.fail(error)
                raise
    # The other process asked a compiler that was installed so recently that its answer is not
    # believed. Asking one after the other would only take longer.
    return choice.choose(store.memory, backend, machine, spec)


def plan_here(request: Request) -> Plan:
    """The plan that a build here would run, whether or not one is needed. Raises OpkilnError."""
    spec, target = request.op.spec, request.target
    tools = choice.choose(request.store.memory, spec.backend, target.machine, spec)
    return plan_for(spec, archs.fit_target(request.op, request.wanted, target, tools), tools)
