"""Libraries that were built elsewhere: what packages were installed with, and listed layers.

Both are layers like the user's own (``store.layers``). But their entries were not built for this
very machine, so no key finds them: every entry of the op is judged (``decision.fit``), and the best
of those that fit serves. Nothing is written, no process is started, and the search of the user's
own store is not imported.

<package>/prebuilt/v1/ops/…                 what a package carries for its own ops
<on sys.path>/opkiln_prebuilt/<name>/v1/…   what a wheel of prebuilt ops installs
"""

from __future__ import annotations

import os

from opkiln.decision import fit
from opkiln.errors import LoadError, StoreError
from opkiln.facts import Hasher
from opkiln.model import OUTSIDE, PACKAGE, Artifact, place_of
from opkiln.record import Record
from opkiln.store import entry
from opkiln.trust import open_to_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from opkiln.decision.terms import Request, Trace
    from opkiln.model import OpSpec

# The resorts: installed with a package; a layer that is listed; imported into the user's own.
PREBUILT, LAYER, STORE = "prebuilt", "layer", "store"

_NO_MANIFEST = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, StoreError,
)  # fmt: skip


class Directory:
    """A layer of directories: ``<intent>/<build>/<deps>`` below an op's own."""

    def __init__(self, root: str, *, own: bool = False) -> None:
        self.root = root
        self.own = own  # the user's, where what was built has been looked up by its key

    def leaves(self, spec: OpSpec) -> Iterable[str]:
        """An op's entries."""
        return _below(os.path.join(self.root, "ops", place_of(spec.distribution, spec.name)), 3)

    def manifest(self, leaf: str) -> dict[str, Any]:
        """What an entry says of itself. Raises OSError, ValueError, and StoreError where everybody
        may put entries there."""
        if reason := open_to_all(self.root, os.path.dirname(leaf)):
            raise StoreError(reason)
        return entry.read_manifest(leaf)

    def examine(
        self, leaf: str, places: Mapping[str, str], *, own: bool
    ) -> entry.Leaf | entry.Refused | None:
        """``store.entry.examine``."""
        return entry.examine(leaf, places, Hasher(), listed=not self.own, whole=False, own=own)

    def subject(self, found: entry.Leaf) -> str:
        """What the trace calls an entry."""
        return found.payload


class Bundle:
    """A layer in one file (``store.archive``), with the methods of ``Directory``."""

    own = False

    def __init__(self, file: str) -> None:
        self.root = file

    def leaves(self, spec: OpSpec) -> Iterable[str]:
        """An op's entries. Raises StoreError, OSError, ValueError for a file that is not a
        bundle."""
        from opkiln.store import archive

        return archive.leaves(self.root, spec.distribution, spec.name)

    def manifest(self, leaf: str) -> dict[str, Any]:
        """What an entry says of itself. Raises StoreError, KeyError, ValueError, OSError."""
        from opkiln.store import archive

        return archive.manifest(leaf)

    def examine(
        self, leaf: str, places: Mapping[str, str], *, own: bool
    ) -> entry.Leaf | entry.Refused:
        """``store.archive.examine``: a good one's library is in memory."""
        from opkiln.store import archive

        return archive.examine(leaf, places, Hasher(), own=own)

    def subject(self, found: entry.Leaf) -> str:
        """What the trace calls an entry: the path of its file in memory means nothing."""
        return found.directory


class Fitting(Record):
    """An entry that fits by its manifest, with the place it is in."""

    rank: tuple[int, ...]
    leaf: str
    needs: Mapping[str, Any]
    place: Directory | Bundle


def find(
    request: Request,
    layers: Iterable[str],
    trace: Trace,
    resort: str,
    own: Iterable[str] = (),
    only: str = "",
) -> Artifact | None:
    """The best library for this machine in some layers, with what was refused in the trace.

    In the user's ``own`` layers only what `opkiln cache import` put there is looked at: what was
    built there has a key. ``only`` is the SHA-256 of the one library that is wanted, however it
    came there. Raises ArchError for an architecture list, or a CPU, that was asked for
    and cannot be understood.
    """
    spec = request.op.spec
    places: list[Directory | Bundle] = [Directory(layer, own=True) for layer in own]
    places += [Bundle(layer) if os.path.isfile(layer) else Directory(layer) for layer in layers]
    told = {place: STORE if place.own else resort for place in places}
    fitting = [
        each for place in places for each in _fitting(request, place, trace, told[place], only)
    ]
    for each in sorted(fitting, key=lambda each: each.rank):  # of equals, the first layer's
        try:
            reason = fit.lacking(each.needs, spec.abi)
            found = None if reason else _examined(spec, each)
            fits = _fits(found.manifest) if isinstance(found, entry.Leaf) else ""
        except (*_NO_MANIFEST, LoadError) as error:
            trace.add(told[each.place], "refused", f"damaged: {entry.in_words(error)}", each.leaf)
            continue
        if reason:
            trace.add(told[each.place], "refused", reason, each.leaf)
        if isinstance(found, entry.Leaf):
            if failed := request.cannot_open.get(found.payload):
                trace.add(told[each.place], "refused", failed.why, each.place.subject(found))
                continue
            trace.add(told[each.place], "taken", fits, each.place.subject(found))
            return Artifact(found.payload, found.manifest["sha256"], told[each.place])
        if found is not None:
            trace.add(told[each.place], "refused", found.reason, found.directory)
    return None


def _fitting(
    request: Request, place: Directory | Bundle, trace: Trace, resort: str, only: str
) -> Iterator[Fitting]:
    """A layer's entries that fit by what their manifests say."""
    try:
        leaves = place.leaves(request.op.spec)
    except _NO_MANIFEST as error:
        reason = error.what if isinstance(error, StoreError) else entry.in_words(error)
        trace.add(resort, "refused", reason, place.root)
        return
    asked = fit.measure(request, listed=resort != PREBUILT)
    for leaf in leaves:
        try:
            manifest = place.manifest(leaf)
            if manifest["target"]["backend"] != request.op.spec.backend:
                continue
            if manifest["sha256"] != only if only else place.own and "created" in manifest:
                continue
            verdict = fit.judge(request, manifest, asked)
            needs = manifest["needs"]
        except FileNotFoundError:
            continue  # removed meanwhile
        except StoreError as error:
            trace.add(resort, "refused", error.what, leaf)
            continue
        except _NO_MANIFEST as error:
            if not place.own:  # where the look-up by key has said so
                trace.add(resort, "refused", f"damaged: {entry.in_words(error)}", leaf)
            continue
        if verdict.misfit:
            trace.add(resort, "refused", verdict.misfit, leaf)
        else:
            yield Fitting(verdict.rank, leaf, needs, place)


def _fits(manifest: dict[str, Any]) -> str:
    target = manifest["target"]
    made = ";".join(target["archs"]) or "+".join((target["cpu"], *target["cpu_features"]))
    fits = f"its sources are today's, and its code for {made} runs here"
    origin = fetched_from(manifest)
    return f"{fits}; {origin}" if origin else fits


def fetched_from(manifest: Mapping[str, Any]) -> str:
    """Which remote tier an entry came from, and why it is trusted; empty for any other."""
    if (origin := manifest.get(entry.FETCHED)) is None:
        return ""
    by = origin.get("key") or origin.get("lock", "")
    return f"fetched from {origin.get('url')}, trusted by {by}"


def _below(directory: str, levels: int) -> Iterator[str]:
    """The directories so many levels down."""
    if not levels:
        yield directory
        return
    for name in _names(directory):
        yield from _below(os.path.join(directory, name), levels - 1)


def _names(directory: str) -> list[str]:
    """The newest first, where there is more than one: of equals, it is the one that serves."""
    try:
        names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
        if len(names) > 1:
            names.sort(key=lambda name: -os.stat(os.path.join(directory, name)).st_mtime)
        return names
    except OSError:
        return []  # not there, no directory, or not ours to read


def _examined(spec: OpSpec, each: Fitting) -> entry.Leaf | entry.Refused | None:
    """Check owner and mode, the sources and the digests. A package that ships no sources is not
    checked for them."""
    places = {"src": spec.root, "opkiln": PACKAGE, "abs": "", OUTSIDE: ""}
    found = each.place.examine(each.leaf, places, own=True)
    if isinstance(found, entry.Refused) and not found.damaged:
        files = (os.path.join(spec.root, source) for source in spec.sources)
        if not spec.inline and not any(map(os.path.lexists, files)):
            return each.place.examine(each.leaf, places, own=False)
    return found
