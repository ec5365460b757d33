"""Publishing entries of the store to a tier, and the rows of a lock file that name them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opkiln import __version__
from opkiln.base.model import Artifact
from opkiln.errors import OpkilnError, RemoteWarning, StoreError, warn_caller
from opkiln.remote import lockfile, patience, tiers
from opkiln.remote.lockfile import LockRow
from opkiln.remote.tier import Failure, Forbidden, Publication
from opkiln.settings import settings
from opkiln.store import layer
from opkiln.store.bundle import temporary_bundle
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
        signed = sign_artifact(row.name, row.sha256, row.size, key_file) if key_file else b""
        labels = {
            "op": row.op, "package": row.package, "target": row.target, "abi": row.abi,
            "version": __version__,
        }  # fmt: skip
        what = Publication(row.sha256, row.size, signed.decode(), labels)
        try:
            tiers.reach(
                url, Store().root,
                lambda tier, deadline: tier.write(row.name, file, what, deadline),
                patience.COMMAND,
            )  # fmt: skip
        except Failure as error:
            raise StoreError(f"{row.op} was not published to {url}", why=str(error)) from error
    return row


def publish_build(built: Artifact) -> None:
    """``OPKILN_PUSH``: publish what was just built. A failure is a warning."""
    url = settings.remotes[0]
    if tiers.is_down(url) or url in _read_only:
        return  # the user was warned
    try:
        push(built.path, url, settings.push)
    except OpkilnError as error:
        if isinstance(error.__cause__, Forbidden):
            _read_only.add(url)
        if not tiers.is_down(url):
            warn_caller(str(error), RemoteWarning)
