"""A rank's access to the job's store: authenticated records, bundles in parts, limited waiting.

torch's stores are not authenticated: anybody who reaches the port can write. If the job has a
secret (``OPKILN_JOB_SECRET``), every record carries an HMAC-SHA256 over its key and its value, and
one without it is refused. The key contains the job's name and the number of its start (``job``), so
records of other jobs and starts are not accepted. But that number is a record, too: an attacker who
can write may restore an earlier number, and with it the records of that start. An attacker cannot
make a record that no rank has written. A bundle needs no HMAC: its SHA-256 is in a record.

During a network partition, a call on torch's store may hang in spite of its time-out. So each call
runs in a thread, and the caller waits for that thread for a limited time.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from opkiln.cluster.messages import decode, encode
from opkiln.cluster.protocol import Look, Put, Swap
from opkiln.cluster.stores import KeyValues
from opkiln.errors import ClusterError
from opkiln.remote.patience import Patience, run_with_deadline

T = TypeVar("T")

PART = 1 << 20  # bytes; torch's TCPStore takes 8 MiB at most, and ends a client that sends more


class Channel:
    """The access of one thread of a rank to the job's store."""

    def __init__(self, store: KeyValues, name: str, secret: str | None, patience: float) -> None:
        """``name`` is the job's. A call that takes longer than ``patience`` seconds is an error."""
        self._store, self._name, self._patience = store, name, patience
        self._secret = None if secret is None else hashlib.sha256(secret.encode()).digest()
        self.where = store.where

    def another(self, patience: float | None = None) -> Channel:
        """A channel for another thread, whose calls do not wait for those of this one."""
        made = copy.copy(self)
        made._store = self._ask(self._store.clone, "connect again")
        made._patience = self._patience if patience is None else patience
        return made

    def do(self, action: Put | Swap | Look) -> Any:
        """The store's answer to an action. Raises ClusterError."""
        if isinstance(action, Put):
            return self.put(action.key, action.value)
        if isinstance(action, Swap):
            return self.swap(action.key, action.expected, action.value)
        return self.look(action.keys)

    def put(self, key: str, value: Any) -> None:
        data = self._seal(key, value)
        self._ask(partial(self._store.put, self._full_key(key), data), f"write {key}")

    def swap(self, key: str, expected: Any, value: Any) -> Any:
        before = None if expected is None else self._seal(key, expected)
        data = self._seal(key, value)
        swap = partial(self._store.swap, self._full_key(key), before, data)
        found = self._ask(swap, f"compare and set {key}")
        return self._open(key, found)

    def look(self, keys: Sequence[str]) -> list[Any]:
        full = [self._full_key(key) for key in keys]
        found = self._ask(partial(self._store.look, full), "read")
        return [
            None if data is None else self._open(key, data)
            for key, data in zip(keys, found, strict=True)
        ]

    def put_bundle(self, data: bytes) -> str:
        """Write a bundle in parts, and return its SHA-256. By then every rank can read it, because
        another channel, which may be faster, announces it."""
        digest = hashlib.sha256(data).hexdigest()
        for number, start in enumerate(range(0, len(data), PART)):
            key = self._full_key(f"bundle/{digest}/{number}")
            self._ask(partial(self._store.put, key, data[start : start + PART]), "write a bundle")
        self._ask(self._store.settle, "write a bundle")
        return digest

    def get_bundle(self, digest: str, size: int) -> bytes:
        """A bundle by its digest, which is announced after the bundle was written. Raises
        ClusterError if the digest differs."""
        parts = []
        for number in range(-(-size // PART)):
            key = self._full_key(f"bundle/{digest}/{number}")
            (part,) = self._ask(partial(self._store.look, [key]), "read a bundle")
            parts.append(part or b"")
        data = b"".join(parts)
        if hashlib.sha256(data).hexdigest() != digest:
            raise ClusterError(
                f"the bundle {digest[:16]} in the job's store is not the one that was written",
                why=f"it has {len(data)} of {size} bytes, and another SHA-256",
            )
        return data

    def _full_key(self, key: str) -> str:
        return f"opkiln/{self._name}/{key}"

    def _seal(self, key: str, value: Any) -> bytes:
        text = encode(value)
        return f"{self._code(key, text)} {text}".encode()

    def _open(self, key: str, data: bytes) -> Any:
        try:
            code, _, text = data.decode().partition(" ")
            if not hmac.compare_digest(code, self._code(key, text)):
                raise ValueError("its HMAC is wrong")
            return decode(text)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ClusterError(
                f"the record {key} in the job's store is refused: {error}",
                why="it was altered, or a rank has another OPKILN_JOB_SECRET",
                hint="set the same OPKILN_JOB_SECRET for all ranks",
            ) from None

    def _code(self, key: str, text: str) -> str:
        if self._secret is None:
            return "-"
        named = json.dumps([self._full_key(key), text]).encode()
        return hmac.new(self._secret, named, hashlib.sha256).hexdigest()

    def _ask(self, call: Callable[[], T], what: str) -> T:
        """The result of a call on the store. A call that hangs is left behind in its thread."""
        began = time.monotonic()
        try:
            return run_with_deadline(lambda _: call(), Patience(self._patience, self._patience))
        except TimeoutError:
            raise ClusterError(
                f"the job's store ({self.where}) does not answer",
                why=f"this process waited {time.monotonic() - began:.0f} s to {what}: the process "
                "that serves the store is stopped, or the network between is cut",
            ) from None
        except (ClusterError, KeyboardInterrupt):
            raise
        except BaseException as error:
            told = str(error).splitlines()[0] if str(error) else ""
            raise ClusterError(
                f"the job's store ({self.where}) is gone",
                why=f"{type(error).__name__}: {told}; the process that serves it (rank 0, or "
                "torchrun's agent) has ended or cannot be reached",
            ) from error
