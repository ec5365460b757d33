"""The tiers of ``OPKILN_REMOTES``. Each has a time limit, and is not used any more once it is down.

A tier that gives no usable answer is not asked again by this process. The store remembers it for a
minute, so that the other processes of a job do not each wait for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from opkiln.base.digest import key, read_file, sha256_file, write_private
from opkiln.base.trust import make_private
from opkiln.errors import RemoteWarning, StoreError, warn_caller
from opkiln.remote import patience, plain, registry
from opkiln.remote.patience import LOAD, Deadline, Patience
from opkiln.remote.tier import Failure, Forbidden, Tier, Unreachable, Unusable, refuse_malformed
from opkiln.store.zip_format import LARGEST

T = TypeVar("T")

_DOWN_FOR = 60.0  # seconds for which other processes leave a tier alone that was down

_tiers: dict[str, Tier] = {}
_down: dict[str, str] = {}  # why, by URL
_told: set[str] = set()  # what the user was warned of


class Down(Failure):
    """A tier that is not asked any more. The text says why; the user has been told."""


def open_tier(url: str) -> Tier:
    """The tier of a URL. Connects to nobody, but a bucket's library may look for a login on the
    network. Raises Unreachable."""
    scheme, _, rest = url.partition("://")
    path = unquote(urlsplit(url).path).rstrip("/")
    if scheme in ("oci", "oci+http") and not rest.startswith("/"):
        return registry.Registry(url)
    if scheme == "oci" or (scheme == "file" and os.path.exists(f"{path}/oci-layout")):
        return registry.OciLayout(path)
    if scheme == "file":
        return plain.Plain(plain.Folder(path))
    return plain.Plain(plain.Web(url) if scheme in ("http", "https") else plain.Bucket(url))


def reach(
    url: str, root: str | None, task: Callable[[Tier, Deadline], T], given: Patience = LOAD
) -> T:
    """The result of ``task(tier, deadline)``. ``root`` is the store, which remembers what is down.

    Raises Down, Absent, Forbidden, Unusable, and errors of the local store.
    """
    if reason := _down.get(url) or _recall(url, root):
        _give_up(url, reason)

    def ask(deadline: Deadline) -> T:
        with refuse_malformed("its answer"):
            return task(_tiers[url], deadline)

    try:
        if url not in _tiers:
            opening = patience.OPEN._replace(until=given.until)
            _tiers.setdefault(url, patience.run_with_deadline(lambda _: open_tier(url), opening))
        return patience.run_with_deadline(ask, given)
    except (Unreachable, OSError) as error:
        if isinstance(error, OSError):
            error = Unreachable(str(error) or type(error).__name__)
        reason = f"{error} (hint: {error.hint})" if error.hint else str(error)
        _remember(url, root, reason)
        _give_up(url, reason)


def _give_up(url: str, reason: str) -> NoReturn:
    if url not in _down:
        _down[url] = reason
        warn_caller(f"{url} is not used from now on: {reason}", RemoteWarning)
    raise Down(reason)


def tell_once(text: str, about: str = "") -> None:
    """Warn, once in a process for each text, or for each ``about``."""
    if (about or text) not in _told:
        _told.add(about or text)
        warn_caller(text, RemoteWarning)


def tell_forbidden(url: str, error: Forbidden) -> None:
    """Warn, once per tier, that it forbids something. The tier is still used: it may allow other
    artifacts, and this one may only be missing."""
    hint = error.hint or "see docs/remotes.md, Logins"
    tell_once(f"{url} forbids it, so it counts as missing: {error} (hint: {hint})", about=url)


def is_down(url: str) -> bool:
    """Whether this process has given up on a tier."""
    return url in _down


def forget(root: str | None = None) -> None:
    """Forget which tiers are down, also what other processes have found out. For `pull` and `push`:
    a person has asked for just this."""
    _down.clear()
    _told.clear()
    _tiers.clear()
    if root is not None:
        with suppress(OSError):
            for name in os.listdir(os.path.join(root, "failures")):
                if name.startswith("tier-"):
                    os.unlink(os.path.join(root, "failures", name))


def _note_path(url: str, root: str) -> str:
    return os.path.join(root, "failures", f"tier-{key('tier', url)}.json")


def _remember(url: str, root: str | None, reason: str) -> None:
    if root is not None:
        with suppress(OSError):  # then every process finds out for itself
            record = {"url": url, "reason": reason, "at": time.time()}
            write_private(_note_path(url, root), json.dumps(record).encode())


def _recall(url: str, root: str | None) -> str:
    if root is None:
        return ""
    try:
        record = json.loads(read_file(_note_path(url, root)))
        age = time.time() - float(record["at"])
        if record["url"] == url and 0 <= age < _DOWN_FOR:
            return f"{record['reason']} ({age:.0f} s ago)"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""  # nobody has found it to be down, or the clock was changed
    return ""


# Downloads


def download(url: str, sha256: str, size: int, root: str, given: Patience = LOAD) -> str:
    """A blob as a file of the store's staging directory, whose digest was checked.

    A download that was interrupted is resumed. Raises Down, Absent, Forbidden, Unusable,
    StoreError.
    """
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef") or not 0 < size <= LARGEST:
        raise Unusable(f"{sha256[:80]!r} and {size} are not a digest and a size")
    path, fd = _open_part(root, sha256)

    def task(tier: Tier, deadline: Deadline) -> None:
        end = os.fstat(fd).st_size
        # The caller closes its descriptor when it gives up; the number may then be another file's.
        with os.fdopen(os.dup(fd), "r+b", buffering=0) as out:
            for at, piece in tier.read(sha256, end, deadline):
                if (end := at + len(piece)) > size:
                    raise Unusable(f"its blob is refused: it is longer than {size} bytes")
                try:
                    os.pwrite(out.fileno(), piece, at)
                except OSError as error:
                    raise _write_error(os.path.dirname(path), error) from error
        if end < size:
            raise Unreachable(f"the transfer ended after {end} of {size} bytes")

    try:
        while True:
            if (have := os.fstat(fd).st_size) > size:
                os.ftruncate(fd, have := 0)
            if have < size:
                reach(url, root, task, given)
            os.lseek(fd, 0, os.SEEK_SET)  # opened by name, closing it would release the lock
            if (found := sha256_file(fd)) == sha256:
                return path
            if not have:
                os.unlink(path)
                raise Unusable(f"its blob is refused: it has the SHA-256 {found}, not {sha256}")
            os.ftruncate(fd, 0)  # what was there may have been damaged
    finally:
        os.close(fd)


def _open_part(root: str, sha256: str) -> tuple[str, int]:
    """(path, descriptor) of a file that no other process writes to."""
    directory = os.path.join(root, "staging")
    path = os.path.join(directory, f"{sha256}.part")
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        make_private(directory)
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process downloads the same, or there are no locks here
            os.close(fd)
            path += f".{secrets.token_hex(6)}"
            fd = os.open(path, flags | os.O_EXCL, 0o600)
    except OSError as error:
        raise _write_error(path, error) from error
    return path, fd


def _write_error(path: str, error: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be written: {error.strerror or error}",
        hint="free space with `opkiln cache gc`, or set OPKILN_CACHE_DIR",
    )
