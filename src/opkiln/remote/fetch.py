"""Read-through: what the store lacks is looked for in the remote tiers before it is compiled.

What is found is checked, put into the store, and judged there like anything that was imported. One
process of a host asks; the others wait for it. A tier that is down, and an artifact that is
refused, are no errors: the search goes on.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

from opkiln import machine
from opkiln.arch import cpu
from opkiln.bundles.bundle import Fetched, unpack_fetched
from opkiln.decision import archs, search
from opkiln.decision.target import features
from opkiln.decision.terms import Trace
from opkiln.errors import OpkilnError, RemoteWarning, StoreError, warn_caller
from opkiln.model import CUDA, ROCM
from opkiln.remote import lockfile, names, tiers
from opkiln.remote.patience import LOAD, Patience
from opkiln.remote.tier import Absent, Unusable
from opkiln.settings import settings
from opkiln.store import lock, signatures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.build_model import Target
    from opkiln.decision.terms import Request
    from opkiln.model import OpSpec
    from opkiln.remote.lockfile import Locked
    from opkiln.remote.tier import Published

REMOTE = "remote"
_MOST = 3  # artifacts of a lock file that are tried: the best one nearly always serves


def fetch(request: Request, target: Target, trace: Trace) -> bool:
    """Whether the store has something new for a request. ``target`` is what would be built.

    Connects to nobody if nothing could be trusted. Raises SettingError.
    """
    spec, root = request.op.spec, request.store.root
    if root is None:
        trace.add(REMOTE, "refused", "there is no writable store to keep it in")
        return False
    try:
        keys = signatures.trusted()
        locked = lockfile.read(settings.lock) if settings.lock else None
        if keys is None and locked is None:
            trace.add(
                REMOTE, "refused", "nothing says what is trusted: set OPKILN_TRUSTED_KEYS or "
                "OPKILN_LOCK, see docs/remotes.md",
            )  # fmt: skip
            return False
        wanted = names.of_op(spec, (target, request.target))
        pinned = _pinned(spec, locked or (), wanted)
        search_names = wanted if keys is not None else []
        if not pinned and not search_names:
            trace.add(REMOTE, "none", "the lock file has nothing for this op and this machine",
                      settings.lock or "")  # fmt: skip
            return False
        return _in_turn(request, root, wanted[0], pinned, search_names, keys or (), trace)
    except (StoreError, OSError) as error:
        trace.add(REMOTE, "refused", error.what if isinstance(error, StoreError) else str(error))
        return False


def _pinned(spec: OpSpec, locked: tuple[Locked, ...], wanted: list[str]) -> list[Locked]:
    """The artifacts of a lock file that should run here, best first."""
    mine = [
        each
        for each in locked
        if (each.package, each.op, each.backend) == (spec.distribution, spec.name, spec.backend)
        and runs_here(each)
    ]
    named = {name: place for place, name in enumerate(wanted)}
    mine.sort(key=lambda each: (named.get(each.name, len(named)), -len(each.cpu_features)))
    return mine[:_MOST]


def runs_here(each: Locked) -> bool:
    """Whether this machine can run an artifact, as far as a lock file tells."""
    if each.machine != machine.architecture():
        return False
    if cpu.lacking(each.cpu, each.cpu_features, features()):
        return False
    return each.backend not in (CUDA, ROCM) or bool(archs.coverage(each.backend, each.archs))


def _in_turn(
    request: Request,
    root: str,
    name: str,
    pinned: list[Locked],
    wanted: list[str],
    keys: tuple[str, ...],
    trace: Trace,
) -> bool:
    def arrived() -> bool | None:
        return search.elsewhere(request, Trace()) is not None or None

    with lock.turn(
        root, f"fetch-{name}", arrived, lambda _: None, what=f"op {request.op.spec.name}",
        limit=settings.build_timeout,
    ) as got:  # fmt: skip
        if not isinstance(got, lock.Turn):
            trace.add(REMOTE, "fetched", "another process of this host did it")
            return True
        # What is pinned comes first, from whichever tier has it.
        return any(_by_digest(url, pinned, root, trace) for url in settings.remotes) or any(
            _by_name(url, wanted, root, keys, trace) for url in settings.remotes
        )


def _by_digest(url: str, pinned: list[Locked], root: str, trace: Trace) -> bool:
    def taken(row: Locked) -> str:
        take(Fetched(url, row.sha256, lock=settings.lock or ""), row.size, root)
        return f"SHA-256 {row.sha256}, which the lock file has"

    return any(_attempt(url, trace, partial(taken, each)) for each in pinned)


def _by_name(url: str, wanted: list[str], root: str, keys: tuple[str, ...], trace: Trace) -> bool:
    def taken(name: str) -> str:
        found = tiers.reach(url, root, lambda tier, pulse: tier.published(name, pulse))
        if found is None:
            return ""
        take(_signed(url, name, found, keys), found.size, root)
        return f"SHA-256 {found.sha256}, as {name}"

    before = len(trace.candidates)
    if any(_attempt(url, trace, partial(taken, each)) for each in wanted):
        return True
    if wanted and len(trace.candidates) == before:
        trace.add(REMOTE, "none", "it has nothing for these sources and this machine", url)
    return False


def _attempt(url: str, trace: Trace, taken: Callable[[], str]) -> bool:
    """Whether something was taken, which ``taken()`` then names. A failure is an entry of the
    trace; a refusal is told to the user, too."""
    try:
        if what := taken():
            trace.add(REMOTE, "fetched", what, url)
        return bool(what)
    except tiers.Down as error:
        down = f"down: {error}"
        if not any(each.subject == url and each.reason == down for each in trace.candidates):
            trace.add(REMOTE, "none", down, url)
    except Absent as error:
        trace.add(REMOTE, "none", f"it does not have {error}", url)
    except (Unusable, OpkilnError) as error:
        reason = str(getattr(error, "what", error))
        trace.add(REMOTE, "refused", reason, url)
        warn_caller(f"an artifact of {url} is refused: {reason}", RemoteWarning)
    return False


def _signed(url: str, name: str, found: Published, keys: tuple[str, ...]) -> Fetched:
    """What a tier has under a name. Raises Unusable if no trusted key has signed it, before any
    of it is downloaded."""
    data = found.signatures.encode()
    try:
        signers = signatures.read(data) if data else {}
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{name}: {error}") from error
    if not set(signers) & set(keys):
        told = f"it is signed by {', '.join(signers)}" if signers else "it is not signed"
        raise Unusable(f"{name}: {told}, and OPKILN_TRUSTED_KEYS names {', '.join(keys)}")
    return Fetched(url, found.sha256, signatures=data)


def take(
    origin: Fetched,
    size: int,
    root: str,
    told: tiers.Told = None,
    given: Patience = LOAD,
) -> None:
    """Download an artifact and put it into the store. Raises Down, Absent, Unusable, StoreError."""
    file = tiers.download(origin.url, origin.sha256, size, root, told, given)
    try:
        unpack_fetched(file, root, origin)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(file)
