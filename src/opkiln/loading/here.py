"""What this process has loaded, and what it told torch: one object, and one hook for forks."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from opkiln.base import forks
from opkiln.base.lazy import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.base.model import Artifact, Op
    from opkiln.decision.terms import Trace
    from opkiln.errors import OpkilnError

    Name = tuple[str, str, str]  # distribution, op, backend


class Loaded(Record):
    """What this process has of an op. ``artifact`` is None when the reference serves."""

    value: Any  # what `load()` returns
    artifact: Artifact | None  # the file that serves
    trace: Trace  # every candidate, and why it was taken or refused
    op: Op  # what was asked for


class OpHere:
    """What this process has of one op."""

    def __init__(self) -> None:
        self.loaded: Loaded | None = None
        self.since = 0.0  # when it was loaded
        self.opened: dict[str, Any] = {}  # what opening each of its libraries gave, by sha256
        self.libraries: list[Artifact] = []  # those that were opened, oldest first
        self.lasts = False  # one of them cannot be unregistered
        self.is_told = False  # that the reference serves
        self.lock = forks.lock()  # of the thread that loads it: two ops may build at once
        self.failures = 0  # of such threads
        self.failed: tuple[Op, OpkilnError] | None = None  # the last one

    def raise_failure(self, op: Op, failures: int) -> None:
        """Raise the error of a thread that failed since ``failures`` were counted, if it is about
        the same op. Otherwise each thread would wait for the same compiler, one after the other."""
        if self.failures > failures and self.failed is not None:
            other, error = self.failed
            if (other.spec, other.asked) == (op.spec, op.asked):
                raise type(error)(error.what, why=error.why, hint=error.hint)


class Here:
    """All that this process has. What torch was told stays with torch, so it stays here, too."""

    def __init__(self) -> None:
        self.lock = forks.lock()  # of telling torch
        self.listing = forks.lock()  # of ``listed`` and ``chains``
        self.functions: dict[str, Any] = {}  # register's, by qualified name
        # What keeps an operator in torch for good, although it may be declared anew.
        self.kept: dict[str, Any] = {}
        self.listed: dict[Name, list[Any]] = {}  # light's, the functions of a library
        self.chains: dict[tuple[str, str], list[Any]] = {}  # by place; torch knows the first
        self.module_names: dict[str, object] = {}  # of the extension modules that are open here
        self.files: dict[tuple[int, int], object] = {}  # the op that opened each, by its inode
        self.ops: dict[Name, OpHere] = {}
        self.told: set[str] = set()  # warnings that are given once
        # What serves the tensors of a device, by the builder's class; None: it has no library for
        # them. Another dict takes its place when ops may be served otherwise.
        self.served: dict[tuple[type, str], Loaded | None] = {}

    def op(self, name: Name) -> OpHere:
        """What there is of an op, which may be nothing yet."""
        return self.ops.get(name) or self.ops.setdefault(name, OpHere())

    def reset(self) -> None:
        """Forget what is loaded: each op is decided on again. For tests."""
        self.served = {}
        self.ops.clear()


def _abandon_imports() -> None:
    """In a forked child: give up the imports of threads that exist only in the parent.

    A build imports modules as it needs them. Python leaves their locks held in the child, which
    would wait forever for whoever holds them; and the modules are half made.
    """
    bootstrap = sys.modules["_frozen_importlib"]
    locks: dict[str, Any] = getattr(bootstrap, "_module_locks", {})
    for name, reference in list(locks.items()):
        lock = reference()
        if lock is not None and getattr(lock, "owner", None) not in (None, threading.get_ident()):
            del locks[name]
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if getattr(spec, "_initializing", False):
                del sys.modules[name]


here = Here()
os.register_at_fork(after_in_child=_abandon_imports)
