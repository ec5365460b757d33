"""Fetches artifacts from the remote tiers: for a load or a command that misses the store, or for a
lock file.

An artifact is checked, put into the store, and judged there like an imported one. One process of a
host asks the tiers. The others wait while it makes progress, and otherwise go on without it. A tier
that is down, or an artifact that is refused, does not end the search.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import NamedTuple

from opkiln.base.build_model import Target
from opkiln.base.model import CUDA, ROCM, OpSpec, place_of
from opkiln.decision import archs, search, terms
from opkiln.decision.archs import features
from opkiln.decision.terms import Request, Trace
from opkiln.errors import BuildTimeout, OpkilnError, StoreError
from opkiln.machine import uname
from opkiln.machine.arch import cpu
from opkiln.remote import lockfile, tiers
from opkiln.remote.lockfile import LockRow
from opkiln.remote.patience import COMMAND, LOAD, SLOWEST, Patience, Told
from opkiln.remote.tier import Absent, Failure, Forbidden, Publication, Unusable
from opkiln.settings import settings
from opkiln.store import lock, signatures
from opkiln.store.bundle import Origin, unpack
from opkiln.store.entry import FETCHED, read_manifest
from opkiln.store.inventory import directories
from opkiln.store.layers import Store

REMOTE = "remote"
# Another process of this host asks the tiers, and gets nothing from them.
_slow_until = 0.0
_MOST = 3  # artifacts of a lock file that are tried: the best one nearly always serves


def fetch(request: Request, target: Target, trace: Trace) -> bool:
    """Ask the tiers for a request. Returns whether the store has something new. ``target`` is the
    target of the build that this saves.

    Connects to no tier if no artifact could be trusted. Raises SettingError.
    """
    spec = request.op.spec
    try:
        root, keys = _require_trust(request.store)
        locked = lockfile.read(settings.lock) if settings.lock else ()
    except StoreError as error:
        trace.add(REMOTE, "refused", error.what, " ".join(settings.remotes))
        _tell_unasked(error)
        return False

    def look_again() -> bool | None:
        return search.find_fitting(request, Trace()) is not None or None

    # A process that can compile waits less for one that asks a slow tier.
    wait = LOAD.whole if terms.why_not_compile(request) else LOAD.first
    try:
        wanted = lockfile.candidate_names(spec, (target, request.target))
        pinned = _matching_rows(spec, locked, wanted)
        if not pinned and keys is None:
            trace.add(REMOTE, "none", "the lock file has nothing for this op and this machine",
                      settings.lock or "")  # fmt: skip
            return False
        with lock.turn(
            root, f"fetch-{wanted[0]}", look_again, lambda _: None, what=f"op {spec.title}",
            limit=min(wait, settings.build_timeout),
        ) as got:  # fmt: skip
            if not isinstance(got, lock.Turn):
                trace.add(REMOTE, "fetched", "another process of this host did it")
                return True
            finder = _TierSearch(root, _entries_of(root, spec.distribution, spec.name), got, trace)
            # Artifacts of the lock file come first, from whichever tier has them.
            if any(finder.take(url, row.name, row) for url in settings.remotes for row in pinned):
                return True
            by_name = settings.remotes if keys is not None else ()
            return any(finder.take_by_name(url, wanted) for url in by_name)
    except BuildTimeout:
        global _slow_until
        _slow_until = time.monotonic() + LOAD.whole
        what = "not asked: another process of this host asks, and has got nothing for a while"
        trace.add(REMOTE, "none", what)
    except (StoreError, OSError) as error:
        trace.add(REMOTE, "refused", error.what if isinstance(error, StoreError) else str(error))
    return False


def fetch_object(
    store: Store, step: str, name: str, places: Mapping[str, str], turn: lock.Turn | None
) -> bool:
    """Ask the tiers for what the command of this key made, by its name there. Returns whether the
    store has something new; whether it fits, a look-up says, as of any object."""
    try:
        root, keys = _require_trust(store)
    except StoreError as error:
        _tell_unasked(error)
        return False
    there = os.path.join(root, "objects", step[:2], step), 1
    finder = _TierSearch(root, there, turn, Trace(), places)
    if keys is None or time.monotonic() < _slow_until:
        return False
    return any(finder.take(url, name) for url in settings.remotes)


def _require_trust(store: Store) -> tuple[str, tuple[str, ...] | None]:
    """(where to keep what is fetched, the keys that are trusted). Raises StoreError."""
    if reason := terms.why_no_tier_is_asked():
        raise StoreError(reason, hint=terms.TRUST_HINT)
    if store.root is None:
        raise StoreError("there is no writable store to keep it in", hint="opkiln doctor")
    return store.root, signatures.keys_to_trust()


def _tell_unasked(error: StoreError) -> None:
    if settings.push is None:  # with it, the tier may be for publishing only
        hint = f"(hint: {error.hint})"
        tiers.tell_once(f"no tier of OPKILN_REMOTES is asked: {error.what} {hint}")


def _matching_rows(spec: OpSpec, locked: tuple[LockRow, ...], wanted: list[str]) -> list[LockRow]:
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


def runs_here(each: LockRow) -> bool:
    """Whether this machine can run an artifact, by what the lock file says of it."""
    if each.machine != uname.architecture():
        return False
    if cpu.missing_features(each.cpu, each.cpu_features, features()):
        return False
    return each.backend not in (CUDA, ROCM) or bool(archs.coverage(each.backend, each.archs))


class _TierSearch:
    """One search in the tiers, with its results in a trace.

    All its requests together may take as long as a step of a build.
    """

    def __init__(
        self,
        root: str,
        there: tuple[str, int],
        turn: lock.Turn | None,
        trace: Trace,
        places: Mapping[str, str] | None = None,
    ) -> None:
        """``there`` is where entries of the same lie in the store, as ``directories`` takes it."""
        self._there, self._root, self._turn, self._trace = there, root, turn, trace
        self._places = places
        until = time.monotonic() + settings.build_timeout
        self._given = LOAD._replace(until=until, told=self._count)
        self._bytes = 0  # since the waiting processes last heard of progress

    def take_by_name(self, url: str, wanted: list[str]) -> bool:
        """Fetch the first artifact that a tier has under these names. Returns whether it did."""
        before = len(self._trace.candidates)
        if any(self.take(url, name) for name in wanted):
            return True
        if len(self._trace.candidates) == before:
            what = "it has nothing for these sources and this machine"
            self._trace.add(REMOTE, "none", what, url)
        return False

    def take(self, url: str, name: str, row: LockRow | None = None) -> bool:
        """Fetch an artifact of the lock file, or the one published under a name, from a tier.
        Returns whether it succeeded. A failure is noted in the trace; a refusal is also a
        warning."""
        self._advance()
        try:
            found = row or tiers.reach(
                url, self._root, lambda tier, end: tier.look_up(name, end), self._given
            )
            if found is None:
                return False
            what = f"SHA-256 {found.sha256}"
            if find_fetched(self._there, found.sha256):
                # The search has refused it.
                self._trace.add(REMOTE, "none", f"{what} is in the store already", url)
                return False
            # Verified before any of it is downloaded.
            if isinstance(found, Publication):
                by, what = ("key", _signer(name, found)), f"{what}, as {name}"
            else:
                by, what = ("lock", settings.lock or ""), f"{what}, which the lock file has"
            take(Origin(url, found.sha256, by), found.size, self._root, self._given, self._places)
            self._trace.add(REMOTE, "fetched", what, url)
            return True
        except tiers.Down as error:
            self._note_once(url, f"down: {error}")
        except Forbidden as error:
            self._note_once(url, f"forbidden: {error}")
            tiers.tell_forbidden(url, error)
        except Absent as error:
            self._trace.add(REMOTE, "none", f"it does not have {error}", url)
        except (Unusable, OpkilnError) as error:
            self._trace.add(REMOTE, "refused", error.what, url)
            tiers.tell_once(f"{url}: {error.what}")
        return False

    def _count(self, size: int) -> None:
        """Count received bytes. The waiting processes hear of each 64 KiB."""
        self._bytes += size
        if self._bytes >= SLOWEST:
            self._bytes = 0
            self._advance()

    def _advance(self) -> None:
        if self._turn is not None:
            self._turn.advance()

    def _note_once(self, url: str, reason: str) -> None:
        """Note a fact about the whole tier once, not for each name."""
        known = self._trace.candidates
        if not any(each.subject == url and each.reason == reason for each in known):
            self._trace.add(REMOTE, "none", reason, url)


def _signer(name: str, found: Publication) -> str:
    """The trusted key that has signed this digest and size, which bound the download. Raises
    Unusable."""
    signed = signatures.artifact_message(name, found.sha256, found.size)
    try:
        return signatures.require(name, signed, found.signatures.encode())
    except signatures.Untrusted as error:
        raise Unusable(": ".join(filter(None, (error.what, error.why)))) from error


def _entries_of(root: str, package: str, op: str) -> tuple[str, int]:
    return os.path.join(root, "ops", place_of(package, op)), 3


def find_fetched(there: tuple[str, int], sha256: str) -> str:
    """The tier that an entry with this digest was fetched from, of those that lie there; empty if
    there is none."""
    for leaf in directories(*there):
        try:
            origin = read_manifest(leaf).get(FETCHED, {})
        except (OSError, ValueError):
            continue  # it is damaged, so it is fetched
        if origin.get("sha256") == sha256:
            return str(origin.get("url"))
    return ""


def take(
    origin: Origin,
    size: int,
    root: str,
    given: Patience,
    places: Mapping[str, str] | None = None,
) -> None:
    """Download an artifact and put it into the store; an object, with its ``places`` here. Raises
    Down, Absent, Forbidden, Unusable, StoreError."""
    file = tiers.download(origin.url, origin.sha256, size, root, given)
    try:
        unpack(file, root, origin=origin, places=places)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(file)


# All of a lock file

_AT_ONCE = 8
NEW, THERE, MISSING = "fetched", "already there", "missing"


class PullResult(NamedTuple):
    """The result for one artifact of a lock file."""

    row: LockRow
    status: str
    url: str = ""
    reason: str = ""


def pull(
    rows: Sequence[LockRow], lock: str, urls: Sequence[str], root: str, told: Told = None
) -> Iterator[PullResult]:
    """Fetch artifacts, several at once, and give each as it is done. ``told`` is called with the
    number of bytes of each piece, by several threads. Interrupted downloads are resumed."""
    unique = {row.sha256: row for row in rows}
    given = COMMAND._replace(told=told)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting = [pool.submit(_pull, row, lock, urls, root, given) for row in unique.values()]
        for each in as_completed(waiting):
            yield each.result()


def _pull(row: LockRow, lock: str, urls: Sequence[str], root: str, given: Patience) -> PullResult:
    if url := find_fetched(_entries_of(root, row.package, row.op), row.sha256):
        return PullResult(row, THERE, url)
    reasons = []
    for url in urls:
        try:
            take(Origin(url, row.sha256, ("lock", lock)), row.size, root, given)
        except Absent:
            reasons.append(f"{url} does not have it")
        except (Failure, OpkilnError) as error:
            reasons.append(f"{url}: {error.what}")
        else:
            return PullResult(row, NEW, url)
    return PullResult(row, MISSING, reason="; ".join(reasons))
