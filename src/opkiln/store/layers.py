"""Finds the store, and looks up leaves in its layers: the first good one is used.

    OPKILN_CACHE_DIR             if it is set
      <dir>/opkiln-<uid>         instead, if the directory belongs to or is writable by others
    $XDG_CACHE_HOME or ~/.cache  the default
    <tmp>/opkiln-<uid>           no home, a read-only or noexec home, no passwd entry

The first usable place is the writable root. A read-only root still serves hits.

    <layer>/ops/<distribution>/<op>/<intent_key>/<build_key>/<deps_key>/
    <layer>/objects/<aa>/<step_key>/<deps_key>/

There is no ``exists``, because a leaf may be gone or replaced by the time it is opened. A look-up
opens, checks and returns the leaf in one step, and takes no lock.
"""

from __future__ import annotations

import os
from contextlib import suppress

from opkiln.base import trust
from opkiln.base.lazy import Record
from opkiln.base.model import place_of
from opkiln.base.trust import fault, open_to_all
from opkiln.errors import StoreError
from opkiln.settings import LAYOUT, settings, store_candidates
from opkiln.store.entry import Leaf, Refused, examine, list_newest, read_manifest

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from opkiln.machine.facts import Hasher


class Layer(Record):
    """A directory of entries, or a bundle of them: one file (``store.archive``). ``listed`` means
    that the user named it in ``OPKILN_STORE_LAYERS``, which makes it trusted. ``unseen`` means that
    it did not exist when it was checked. If it exists later, its owner has to be checked then."""

    root: str
    listed: bool = False
    bundle: bool = False
    unseen: bool = False


class Location(Record):
    """The layers to read, in order; the directory to write to, if any; notes for the user."""

    layers: tuple[Layer, ...]
    writable: str | None
    notes: tuple[str, ...]


def choose() -> Location:
    """Check the candidates as they are now. Creates nothing, and lists no directory."""
    layers: list[Layer] = []
    notes: list[str] = []
    writable: str | None = None
    for candidate, asked in store_candidates():
        usable, readable, reason = _examine(candidate)
        inner = os.path.join(candidate, LAYOUT)
        known = (usable or readable) and os.path.lexists(inner)
        if known and (foreign := fault(inner, os.lstat(inner))):
            usable, readable, reason = False, False, foreign
        if readable or usable:
            # Includes a layer that does not exist yet: another process may create and fill it.
            layers.append(Layer(inner, unseen=not known))
        if usable:
            writable = inner
            if notes:
                notes.append(f"the store is {candidate}")
            break
        if asked or notes:
            notes.append(f"{candidate} cannot be the store: {reason}")
    for path in settings.store_layers:
        bundle = os.path.isfile(path)
        root = os.path.abspath(path) if bundle else os.path.join(path, LAYOUT)
        layers.append(Layer(root, listed=True, bundle=bundle))
    return Location(tuple(layers), writable, tuple(notes))


def claim(root: str | None) -> None:
    """Create the writable root, and make sure that it is ours before the first write. Another user
    may have created it since it was found missing. Raises StoreError."""
    if root is None:
        return
    try:
        reason = trust.claim(root)
    except OSError:
        return  # it is not writable; publishing will report that
    if reason:
        raise StoreError(f"the store cannot be written: {reason}", hint="set OPKILN_CACHE_DIR")


def _examine(path: str) -> tuple[bool, bool, str]:
    """(usable for writing, usable for reading, why not)."""
    where, subject, reason = path, "", ""
    try:
        reason = fault(path, os.lstat(path))
    except FileNotFoundError:
        # Whether it could be created depends on its nearest ancestor.
        while not os.path.lexists(where):
            where = os.path.dirname(where)
        subject = f"{where} is "
    except OSError as error:
        return False, False, error.strerror or str(error)
    if not os.path.isdir(where):
        return False, False, f"{subject}not a directory"
    if reason:
        return False, False, reason
    with suppress(OSError):  # the next access will report the problem
        if os.statvfs(where).f_flag & os.ST_NOEXEC:
            reason = "its file system is mounted noexec, so no library can be loaded from it"
            return False, False, reason
    if not os.access(where, os.W_OK | os.X_OK):
        return False, where == path, f"{subject}read-only"
    return True, where == path, ""


class Lookup(Record):
    """The leaf that a look-up found, and the leaves that it refused."""

    leaf: Leaf | None
    refused: tuple[Refused, ...]


class Store:
    """All layers together. It holds no open file and is cheap to create."""

    def __init__(self, location: Location | None = None) -> None:
        self.location = choose() if location is None else location

    @property
    def root(self) -> str | None:
        """The layer to write to; None if there is none."""
        return self.location.writable

    @property
    def own(self) -> list[Layer]:
        """The user's own layers: those that are not listed."""
        return [layer for layer in self.location.layers if not layer.listed]

    @property
    def memory(self) -> tuple[str, ...]:
        """The directories of the probe cache. The first one is written to, all are read. A warm
        store that is read-only must work without probing the compiler again."""
        roots = [self.root, *(layer.root for layer in self.own)]
        named = dict.fromkeys(root for root in roots if root is not None)
        return tuple(os.path.join(root, "toolchains") for root in named)

    def find_op(
        self,
        distribution: str,
        op: str,
        intent: str,
        build: str | None,
        places: Mapping[str, str],
        hasher: Hasher,
    ) -> Lookup:
        """An op's entry for this intent in the user's own layers. Listed layers are not searched:
        their entries are not chosen by key. With a ``build`` key (there is a compiler), only that
        build counts. Without a compiler, any build counts whose sources are the ones on disk."""
        place = place_of(distribution, op)
        bases = [(each, os.path.join(each.root, "ops", place, intent)) for each in self.own]
        builds = (
            (layer, os.path.join(base, each))
            for layer, base in bases
            for each in ([build] if build is not None else list_newest(base))
        )
        return _find(builds, places, hasher, whole=build is not None)

    def targets(self, distribution: str, op: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(intent key, target) of an op's entries in the user's own layers. Reads one manifest for
        each build key and verifies nothing. Use it only to choose what to look up."""
        for layer in self.own:
            base = os.path.join(layer.root, "ops", place_of(distribution, op))
            for intent in list_newest(base):
                for build in list_newest(os.path.join(base, intent)):
                    for leaf in list_newest(os.path.join(base, intent, build)):
                        try:
                            path = os.path.join(base, intent, build, leaf)
                            yield intent, read_manifest(path)["target"]
                        except (OSError, ValueError, KeyError):
                            continue  # damaged or just collected: try the next one
                        break

    def find_object(self, step: str, places: Mapping[str, str], hasher: Hasher) -> Lookup:
        """A compiled object."""
        # Bundles have no objects.
        bases = (
            (layer, os.path.join(layer.root, "objects", step[:2], step))
            for layer in self.location.layers
            if not layer.bundle
        )
        return _find(bases, places, hasher, whole=True)


def _find(
    bases: Iterable[tuple[Layer, str]], places: Mapping[str, str], hasher: Hasher, *, whole: bool
) -> Lookup:
    """The first good leaf in some directories, each with the layer that it is in."""
    refused: list[Refused] = []
    for layer, base in bases:
        if layer.listed and (reason := open_to_all(layer.root, base)):
            refused.append(Refused(base, reason))
            continue
        for name in list_newest(base):
            path = os.path.join(base, name)
            leaf = examine(path, places, hasher, listed=layer.listed, whole=whole)
            if isinstance(leaf, Leaf) and layer.unseen and (reason := _foreign(layer.root)):
                leaf = Refused(leaf.directory, reason)
            if isinstance(leaf, Leaf):
                return Lookup(leaf, tuple(refused))
            if leaf is not None:
                refused.append(leaf)
    return Lookup(None, tuple(refused))


def _foreign(root: str) -> str:
    """Why a layer that was created in the meantime is not trusted; empty if it is. Another user who
    created it could replace what was just checked."""
    for path in (os.path.dirname(root), root):
        try:
            if reason := fault(path, os.lstat(path)):
                return reason
        except OSError as error:
            return f"{path}: {error.strerror}"
    return ""
