"""Read-through: what the store lacks is looked for in the remote tiers before it is compiled.

What is found is checked, put into the store, and judged there like anything that was imported. One
process of a host asks; the others wait for it. A tier that is down, and an artifact that is
refused, do not end the search.
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
from opkiln.model import CUDA, ROCM, place_of
from opkiln.remote import lockfile, names, tiers
from opkiln.remote.patience import LOAD, Patience
from opkiln.remote.tier import Absent, Forbidden, Unusable
from opkiln.settings import settings
from opkiln.store import lock, signatures
from opkiln.store.entry import FETCHED, read_manifest
from opkiln.store.inventory import directories

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
        asking = _Asking(request.op.spec, root, keys, trace)
        return any(asking.by_digest(url, pinned) for url in settings.remotes) or any(
            asking.by_name(url, wanted) for url in settings.remotes
        )


class _Asking:
    """The questions of one search to the tiers, and what came of them in its trace."""

    def __init__(self, spec: OpSpec, root: str, keys: tuple[str, ...], trace: Trace) -> None:
        self._spec, self._root, self._keys, self._trace = spec, root, keys, trace

    def by_digest(self, url: str, pinned: list[Locked]) -> bool:
        """Whether a tier has given one of these artifacts."""
        return any(self._attempt(url, partial(self._pinned, url, each)) for each in pinned)

    def by_name(self, url: str, wanted: list[str]) -> bool:
        """Whether a tier has given what is published under one of these names."""
        before = len(self._trace.candidates)
        if any(self._attempt(url, partial(self._named, url, each)) for each in wanted):
            return True
        if wanted and len(self._trace.candidates) == before:
            what = "it has nothing for these sources and this machine"
            self._trace.add(REMOTE, "none", what, url)
        return False

    def _pinned(self, url: str, row: Locked) -> str:
        if self._refused_before(url, row.sha256):
            return ""
        take(Fetched(url, row.sha256, lock=settings.lock or ""), row.size, self._root)
        return f"SHA-256 {row.sha256}, which the lock file has"

    def _named(self, url: str, name: str) -> str:
        found = tiers.reach(url, self._root, lambda tier, pulse: tier.published(name, pulse))
        if found is None or self._refused_before(url, found.sha256):
            return ""
        take(_signed(url, name, found, self._keys), found.size, self._root)
        return f"SHA-256 {found.sha256}, as {name}"

    def _refused_before(self, url: str, sha256: str) -> bool:
        """Whether the store has it already, where it did not serve: there is nothing to fetch."""
        spec = self._spec
        there = fetched_already(self._root, spec.distribution, spec.name, sha256)
        if there:
            self._trace.add(REMOTE, "none", f"SHA-256 {sha256} is in the store already", url)
        return bool(there)

    def _attempt(self, url: str, taken: Callable[[], str]) -> bool:
        """Whether something was taken, which ``taken()`` then names. A failure is an entry of the
        trace; a refusal is told to the user, too."""
        try:
            if what := taken():
                self._trace.add(REMOTE, "fetched", what, url)
            return bool(what)
        except tiers.Down as error:
            self._note_once(url, f"down: {error}")
        except Forbidden as error:
            self._note_once(url, f"forbidden: {error}")
            tiers.tell_forbidden(url, error)
        except Absent as error:
            self._trace.add(REMOTE, "none", f"it does not have {error}", url)
        except (Unusable, OpkilnError) as error:
            reason = str(getattr(error, "what", error))
            self._trace.add(REMOTE, "refused", reason, url)
            warn_caller(f"an artifact of {url} is refused: {reason}", RemoteWarning)
        return False

    def _note_once(self, url: str, reason: str) -> None:
        """What holds for the whole tier is said once, not for each name."""
        known = self._trace.candidates
        if not any(each.subject == url and each.reason == reason for each in known):
            self._trace.add(REMOTE, "none", reason, url)


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


def fetched_already(root: str, package: str, op: str, sha256: str) -> str:
    """The tier that an entry of the store with this digest was fetched from; empty if there is
    none."""
    for leaf in directories(os.path.join(root, "ops", place_of(package, op)), 3):
        try:
            origin = read_manifest(leaf).get(FETCHED, {})
        except (OSError, ValueError):
            continue  # it is damaged, so it is fetched
        if origin.get("sha256") == sha256:
            return str(origin.get("url"))
    return ""


def take(
    origin: Fetched,
    size: int,
    root: str,
    told: tiers.Told = None,
    given: Patience = LOAD,
) -> None:
    """Download an artifact and put it into the store. Raises Down, Absent, Forbidden, Unusable,
    StoreError."""
    file = tiers.download(origin.url, origin.sha256, size, root, told, given)
    try:
        unpack_fetched(file, root, origin)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(file)
