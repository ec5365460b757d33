"""The stores that ranks talk through: torch's, a shared directory, or this process's memory.

Each has five operations, all of which return at once if the store answers: ``put``, ``settle``,
``swap`` (compare and set), ``look`` and ``clone`` (for another thread: a call on one of torch's
stores keeps the other threads of that client waiting).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from opkiln.base import forks
from opkiln.base.digest import write_private
from opkiln.base.trust import fault, make_private
from opkiln.errors import StoreError

_LIST = "list"  # the last part of the key of a list of numbers
_FEW = 8  # absent keys that are checked one by one: a list is not read for so few
# Keys of one request. Its time grows faster than its keys, and the server does nothing else
# meanwhile: 256 keys took 0.2 ms to check, 4,096 keys 54 ms.
_AT_ONCE = 64


class KeyValues(Protocol):
    """A store of short values that all ranks of a job can reach."""

    where: str  # for messages, and to distinguish the stores of this process

    def put(self, key: str, value: bytes) -> None:
        """Write a value. Others see the writes of a clone in order, but maybe later: torch's client
        does not wait for the server."""

    def settle(self) -> None:
        """Return when everything that was put by this clone can be seen by all others."""
        return

    def swap(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        """Write a value if the key has the expected one (None: if it is not there). Returns the
        value that it has afterwards."""

    def look(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values that are there, None for those that are not. Never waits for one. A key that
        was written at this moment may be left out, and is in the next answer."""

    def clone(self) -> KeyValues:
        """The same store, for another thread."""
        return self


class Memory(KeyValues):
    """A job of one process, or of several threads."""

    where = "this process"

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = forks.lock()

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def swap(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        with self._lock:
            if self._values.get(key) == expected:
                self._values[key] = value
            return self._values[key]

    def look(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._values.get(key) for key in keys]


class Torch(KeyValues):
    """A store of torch.distributed. Its time-out stays as it is: the program uses it, too.

    Such a store says of several keys only whether all of them are there, so each absent one would
    be a request. Ranks write keys that end with their number. So a rank that writes such a key for
    the first time also appends its number to a list, and one read of the list says who has written.
    The list is only a hint: the keys that it names are checked before they are read.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._there: set[str] = set()  # keys that were seen, and need no check: none is removed
        self._written: set[str] = set()  # keys that are in their lists
        inner = store
        while hasattr(inner, "underlying_store"):  # prefixes: a group's store has several
            inner = inner.underlying_store
        host, port = getattr(inner, "host", None), getattr(inner, "port", None)
        self.where = f"{host}:{port}" if host else getattr(inner, "path", type(inner).__name__)
        self._address = (host, port) if host and port else None

    def put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
        number = _number_of(key)
        if number and key not in self._written and self._store.has_extended_api():
            self._store.append(f"{key.removesuffix(number)}{_LIST}", f"{number} ")
            self._written.add(key)

    def settle(self) -> None:
        self._store.check([_LIST])  # the server answers the calls of one client in their order

    def swap(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        # An empty text stands for a key that is not there.
        before = "" if expected is None else expected.decode()
        found: bytes = self._store.compare_set(key, before, value.decode())
        return found

    def look(self, keys: Sequence[str]) -> list[bytes | None]:
        unknown = [key for key in keys if key not in self._there]
        numbered = [key for key in unknown if _number_of(key)]
        # Keys without a number come apart: `outcome` is usually absent, and would cause a search.
        self._check([key for key in unknown if not _number_of(key)])
        self._check(self._keep_listed(numbered) if len(numbered) > _FEW else numbered)
        there = [key for key in keys if key in self._there]
        values = dict(zip(there, self._get(there), strict=True))
        return [bytes(values[key]) if key in values else None for key in keys]

    def _get(self, keys: list[str]) -> list[bytes]:
        if len(keys) > 1 and self._store.has_extended_api():
            return [each for part in _parts(keys) for each in self._store.multi_get(part)]
        return [self._store.get(key) for key in keys]

    def _check(self, keys: list[str]) -> None:
        """Find out which keys are there."""
        for part in _parts(keys):
            if self._store.check(part):
                self._there.update(part)
            elif len(part) > 1:
                half = len(part) // 2 if len(part) > _FEW else 1
                for start in range(0, len(part), half):
                    self._check(part[start : start + half])

    def _keep_listed(self, keys: list[str]) -> list[str]:
        """The keys that are in their lists; all keys if the store has no lists."""
        if not self._store.has_extended_api():
            return keys
        lists = {key.rpartition("/")[0]: f"{key.rpartition('/')[0]}/{_LIST}" for key in keys}
        found = dict(zip(lists, self.look(list(lists.values())), strict=True))
        written = {
            f"{family}/{number}"
            for family, listed in found.items()
            for number in (listed or b"").decode().split()
        }
        return [key for key in keys if key in written]

    def clone(self) -> Torch:
        if self._address is not None:
            # A port that is closed now was open before: its server is gone. torch would try to
            # connect until its time-out.
            require_open(*self._address)
        return Torch(self._store.clone())


def require_open(host: str, port: int) -> None:
    """Raises ConnectionRefusedError if nobody listens there. torch reports all other errors."""
    import socket

    try:
        socket.create_connection((host, port), timeout=0.2).close()
    except ConnectionRefusedError:
        raise
    except OSError:
        return


def _parts(keys: list[str]) -> list[list[str]]:
    return [keys[start : start + _AT_ONCE] for start in range(0, len(keys), _AT_ONCE)]


def _number_of(key: str) -> str:
    """The number that a key ends with; empty if it has none."""
    last = key.rpartition("/")[2]
    return last if last.isdigit() else ""


class SharedDirectory(KeyValues):
    """A directory that all ranks share, for jobs without a network among them.

    A key is a directory of numbered values; the highest number counts. A value appears by ``link``,
    which fails if another rank was first. That is atomic on network file systems, too, where locks
    may not work. Only this user can write there, so nobody else can influence what is loaded.
    """

    def __init__(self, path: str) -> None:
        self.where = os.path.abspath(path)
        try:
            make_private(self.where)
            reason = fault(self.where, os.lstat(self.where))
        except OSError as error:
            reason = f"{self.where}: {error.strerror}"
        if reason:
            raise StoreError(
                "the ranks cannot talk through this directory", why=reason,
                hint="mkdir -m 700 DIRECTORY    # on a file system that all nodes share",
            )  # fmt: skip

    def _place(self, key: str) -> str:
        return os.path.join(self.where, key.replace("/", "+"))

    def _newest(self, place: str) -> tuple[int, bytes | None]:
        try:
            number = max((int(name) for name in os.listdir(place) if name.isdigit()), default=0)
        except FileNotFoundError:
            number = 0
        if not number:
            return 0, None
        with open(os.path.join(place, str(number)), "rb") as file:
            return number, file.read()

    def put(self, key: str, value: bytes) -> None:
        make_private(self._place(key))
        write_private(os.path.join(self._place(key), "1"), value)

    def swap(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        place = self._place(key)
        make_private(place)
        number, now = self._newest(place)
        if now is not None and now != expected:
            return now
        mine = os.path.join(place, f".{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}")
        write_private(mine, value)
        try:
            os.link(mine, os.path.join(place, str(number + 1)))
        except FileExistsError:
            now = self._newest(place)[1]
            assert now is not None  # values are never removed
            return now
        finally:
            os.unlink(mine)
        return value

    def look(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._newest(self._place(key))[1] for key in keys]
