"""The tiers of ``OPKILN_REMOTES``: each is asked with patience, and left alone once it is down.

A tier that gives no usable answer is not asked again by this process. The store remembers it for a
minute, so that the other processes of a job do not each wait for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from contextlib import suppress
from math import inf
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from opkiln.digest import key, read_file, sha256_file
from opkiln.errors import RemoteWarning, StoreError, warn_caller
from opkiln.remote import patience, plain, registry
from opkiln.remote.patience import LOAD, Patience
from opkiln.remote.tier import Forbidden, Guarded, Tier, Unreachable, Unusable
from opkiln.store.zip_format import LARGEST
from opkiln.trust import make_private
from opkiln.writing import write_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from opkiln.remote.patience import Deadline, Told

    T = TypeVar("T")

_DOWN_FOR = 60.0  # seconds for which other processes leave a tier alone that was down

_tiers: dict[str, Tier] = {}
_down: dict[str, str] = {}  # why, by URL
_forbidden: set[str] = set()  # the tiers of which the user was told that they forbid something


class Down(Exception):
    """A tier that is not asked any more. The text says why; the user has been told."""


def open_tier(url: str) -> Tier:
    """The tier of a URL. Connects to nobody, but a bucket's library may look for a login on the
    network. Raises Unreachable."""
    return Guarded(_of_its_kind(url))


def _of_its_kind(url: str) -> Tier:
    scheme, _, rest = url.partition("://")
    path = unquote(urlsplit(url).path).rstrip("/")
    if scheme in ("oci", "oci+http") and not rest.startswith("/"):
        return registry.Registry(url)
    if scheme == "oci" or (scheme == "file" and os.path.exists(f"{path}/oci-layout")):
        return registry.Layout(url, path)
    if scheme == "file":
        return plain.Plain(url, plain.Directory(path))
    return plain.Plain(url, plain.Web(url) if scheme in ("http", "https") else plain.Bucket(url))


def reach(
    url: str,
    root: str | None,
    task: Callable[[Tier, Deadline], T],
    given: Patience = LOAD,
    *,
    until: float = inf,
    told: Told = None,
) -> T:
    """The result of ``task(tier, deadline)``. ``root`` is the store, which remembers what is down.
    ``until`` and ``told`` are the deadline's.

    Raises Down, Absent, Forbidden, Unusable, and errors of the local store.
    """
    if reason := _down.get(url) or _remembered(url, root):
        _give_up(url, reason)
    try:
        if (tier := _tiers.get(url)) is None:
            made = patience.patiently(lambda _: open_tier(url), patience.OPEN, until)
            tier = _tiers.setdefault(url, made)
        return patience.patiently(lambda deadline: task(tier, deadline), given, until, told)
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


def tell_forbidden(url: str, error: Forbidden) -> None:
    """Tell the user, once per tier, that it forbids something. It is still used: others of its
    artifacts may be allowed, and this one may just not be there."""
    if url not in _forbidden:
        _forbidden.add(url)
        hint = error.hint or "see docs/remotes.md, Logins"
        warn_caller(f"{url} forbids it, so it counts as missing: {error} (hint: {hint})",
                    RemoteWarning)  # fmt: skip


def is_down(url: str) -> bool:
    """Whether this process has given up on a tier."""
    return url in _down


def forget() -> None:
    """Ask every tier anew, as a command does that was started for that."""
    _down.clear()
    _forbidden.clear()
    _tiers.clear()


def _note(url: str, root: str) -> str:
    return os.path.join(root, "failures", f"tier-{key('tier', url)}.json")


def _remember(url: str, root: str | None, reason: str) -> None:
    if root is not None:
        with suppress(OSError):  # then every process finds out for itself
            record = {"url": url, "reason": reason, "at": time.time()}
            write_private(_note(url, root), json.dumps(record).encode())


def _remembered(url: str, root: str | None) -> str:
    if root is None:
        return ""
    try:
        record = json.loads(read_file(_note(url, root)))
        age = time.time() - float(record["at"])
        if record["url"] == url and 0 <= age < _DOWN_FOR:
            return f"{record['reason']} ({age:.0f} s ago)"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""  # nobody has found it to be down, or the clock was changed
    return ""


def forget_notes(root: str | None) -> None:
    """Also forget what other processes have found: `pull` and `push` were asked for just now."""
    forget()
    if root is not None:
        directory = os.path.join(root, "failures")
        with suppress(OSError):
            for name in os.listdir(directory):
                if name.startswith("tier-"):
                    os.unlink(os.path.join(directory, name))


# Downloads


def download(
    url: str,
    sha256: str,
    size: int,
    root: str,
    told: Told = None,
    given: Patience = LOAD,
    *,
    until: float = inf,
) -> str:
    """A blob as a file of the store's staging directory, whose digest was checked.

    A download that was interrupted is resumed. ``told`` is called with the number of bytes of each
    piece. Raises Down, Absent, Forbidden, Unusable, StoreError.
    """
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef") or not 0 < size <= LARGEST:
        raise Unusable(f"{sha256[:80]!r} and {size} are not a digest and a size")
    path, fd = _part(root, sha256)
    try:
        resumed = os.fstat(fd).st_size
        _transfer(url, sha256, size, root, fd, told, given, until)
        found = _hashed(fd)
        if found != sha256 and resumed:  # what was there may have been damaged
            os.ftruncate(fd, 0)
            _transfer(url, sha256, size, root, fd, told, given, until)
            found = _hashed(fd)
        if found != sha256:
            os.unlink(path)
            raise Unusable(f"its blob is refused: it has the SHA-256 {found}, not {sha256}")
    finally:
        os.close(fd)
    return path


def _hashed(fd: int) -> str:
    os.lseek(fd, 0, os.SEEK_SET)  # by its name, closing it would release the lock
    return sha256_file(fd)


def _part(root: str, sha256: str) -> tuple[str, int]:
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
        raise _not_written(path, error) from error
    return path, fd


def _transfer(
    url: str,
    sha256: str,
    size: int,
    root: str,
    fd: int,
    told: Told,
    given: Patience,
    until: float,
) -> None:
    have = os.fstat(fd).st_size
    if have >= size:
        os.ftruncate(fd, 0 if have > size else have)
        have = os.fstat(fd).st_size

    def task(tier: Tier, deadline: Deadline) -> None:
        end = have
        # A descriptor of its own: if nobody waits any more, the caller's may be another file's.
        with os.fdopen(os.dup(fd), "r+b", buffering=0) as out:
            for at, piece in tier.read(sha256, have, deadline):
                if (end := at + len(piece)) > size:
                    raise Unusable(f"its blob is refused: it is longer than {size} bytes")
                try:
                    os.pwrite(out.fileno(), piece, at)
                except OSError as error:
                    raise _not_written(os.path.join(root, "staging"), error) from error
        if end < size:
            raise Unreachable(f"the transfer ended after {end} of {size} bytes")

    if have < size:
        reach(url, root, task, given, until=until, told=told)


def _not_written(path: str, error: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be written: {error.strerror or error}",
        hint="free space with `opkiln cache gc`, or set OPKILN_CACHE_DIR",
    )
