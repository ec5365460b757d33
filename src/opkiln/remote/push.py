"""Publishing entries of the store to a tier, and the rows of a lock file that name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opkiln import __version__
from opkiln.base.model import Artifact
from opkiln.errors import OpkilnError, RemoteWarning, StoreError, warn_caller
from opkiln.remote import lockfile, patience, tiers
from opkiln.remote.lockfile import LockRow
from opkiln.remote.tier import Failure, Forbidden, Publication
from opkiln.settings import settings
from opkiln.store import layer
from opkiln.store.bundle import BundleFile, temporary_bundle
from opkiln.store.layers import Store
from opkiln.store.signing import sign_artifact

_read_only: set[str] = set()  # tiers that do not let this process publish


@contextmanager
def open_publication(payload: str) -> Iterator[tuple[str, LockRow]]:
    """(the bundle of one entry, its row), within the block. Raises StoreError."""
    leaf = layer.leaf_of(payload)
    with temporary_bundle([payload]) as made:
        try:
            row = lockfile.row_of(leaf, made.sha256, made.size)
        except (OSError, ValueError, KeyError) as error:
            raise StoreError(f"{leaf} cannot be published: {error}") from error
        yield made.path, row


def push(payload: str, url: str, key_file: str | None) -> LockRow:
    """Publish an entry to a tier, signed if there is a key. Raises StoreError."""
    with open_publication(payload) as (file, row):
        labels = {"op": row.op, "package": row.package, "target": row.target, "abi": row.abi}
        _write(row.name, BundleFile(file, row.sha256, 1, row.size), labels, url, key_file)
    return row


def _write(
    name: str, made: BundleFile, labels: dict[str, str], url: str, key_file: str | None
) -> None:
    signed = sign_artifact(name, made.sha256, made.size, key_file) if key_file else b""
    labels |= {"version": __version__}
    what = Publication(made.sha256, made.size, signed.decode(), labels)
    try:
        tiers.reach(
            url, Store().root,
            lambda tier, deadline: tier.write(name, made.path, what, deadline),
            patience.COMMAND,
        )  # fmt: skip
    except Failure as error:
        raise StoreError(f"{labels['op']} was not published to {url}", why=str(error)) from error


def publish_build(built: Artifact) -> None:
    """``OPKILN_PUSH``: publish what was just built. A failure is a warning."""
    _publish_new(lambda url: push(built.path, url, settings.push))


def publish_object(payload: str, name: str, label: str) -> None:
    """``publish_build`` for what a command has just made."""

    def send(url: str) -> None:
        with temporary_bundle([payload]) as made:
            _write(name, made, {"op": label}, url, settings.push)

    _publish_new(send)


def _publish_new(send: Callable[[str], object]) -> None:
    url = settings.remotes[0]
    if tiers.is_down(url) or url in _read_only:
        return  # the user was warned
    try:
        send(url)
    except OpkilnError as error:
        if isinstance(error.__cause__, Forbidden):
            _read_only.add(url)
        if not tiers.is_down(url):
            warn_caller(str(error), RemoteWarning)
