"""``ShmGroup``: ranks of one host that share memory.

The first rank makes the memory, a memfd, and hands it to the others over a socket that has no name
in the file system. So whenever a rank is killed, nothing is left behind.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from opkiln.base import forks
from opkiln.errors import ArgumentError, ClusterError
from opkiln.ops.shm_comm import functions
from opkiln.ops.shm_comm.functions import GROUPS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_RANKS = 256  # as in group.h
_PAGE = 4096
# Bytes of a slot: two sets of slots of two ranks stay in a second cache of 1 MiB. (On a busy Xeon,
# slots of 1 MiB took 10% more CPU time on two ranks, and 28% more on four.) Each rank's part of a
# slot has a size worth a turn.
_SLOT, _PART = 256 << 10, 32 << 10
_MEMORY = 64 << 20  # of all slots, at most
_HEADER = 128  # bytes of each rank, and once more
_TIMEOUT = timedelta(minutes=5)
_NO_MEMORY = "none"  # in place of a socket's name
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_without_memory = itertools.count(-1, -1)
_joining = forks.lock()


class _Rank(NamedTuple):
    """What the ranks tell each other before they share anything."""

    host: str
    boot: str  # of the running system: two hosts may have one name
    network: str  # the namespace in which the socket is
    user: int
    pid: int
    lacks: str  # why it has no native library, or ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class ShmGroup:
    """The ranks of one host. All of them make the group at the same time, and call the same
    collectives in the same order.

        group = ShmGroup(store, rank, size)     # a store of torch.distributed; or ShmGroup.of()
        group.all_reduce_(gradients, "mean")

    If a rank dies, leaves or does not come within ``timeout``, the others raise RuntimeError, which
    names it, and so does every later call. If the native library cannot be had on all ranks, gloo
    does the work, and ``fallback`` says why.

    Raises ClusterError, on all ranks, if they are on different hosts, belong to different users, or
    one of them does not come.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta = _TIMEOUT,
        *,
        gloo: Any = None,
    ) -> None:
        if not 1 <= size <= MOST_RANKS:
            raise ArgumentError(f"size is {size}, expected 1 to {MOST_RANKS}")
        if not 0 <= rank < size:
            raise ArgumentError(f"rank is {rank}, expected 0 to {size - 1}")
        self.rank, self.size, self.timeout = rank, size, timeout
        self._meeting = _Meeting(store, rank, size, timeout)
        self._gloo = gloo
        self.fallback = ""
        every = self._meeting.introduce(_here())
        refusal = _refusal(every)
        if refusal:
            raise ClusterError(
                f"these ranks cannot share memory: {refusal}",
                hint='use the backend "gloo" for this group',
            )
        for number, each in enumerate(every):
            if each.lacks:
                self.fallback = f"rank {number} ({each}) has no native library: {each.lacks}"
                self.number = next(_without_memory)
                break
        else:
            self.number = self._meeting.share()
        GROUPS[self.number] = self
        self._finalizer = weakref.finalize(self, _leave, self.number, os.getpid())

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None, timeout: timedelta = _TIMEOUT) -> ShmGroup:
        """The ranks of a group of torch.distributed, or of all. Raises ClusterError."""
        from torch.distributed import distributed_c10d as c10d

        found = c10d._get_default_group() if group is None else group
        store = PrefixStore("opkiln_shm", c10d._get_process_group_store(found))
        return cls(store, found.rank(), found.size(), timeout)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """``shm_all_reduce``: the elements of all ranks, combined."""
        return functions.shm_all_reduce(x, self.number, op)

    def all_reduce_(self, x: Tensor, op: str = "sum") -> Tensor:
        """``shm_all_reduce_``: in place; ``x``."""
        functions.shm_all_reduce_(x, self.number, op)
        return x

    def reduce_scatter(self, x: Tensor, op: str = "sum") -> Tensor:
        """``shm_reduce_scatter``: this rank's rows of ``all_reduce``."""
        return functions.shm_reduce_scatter(x, self.number, op)

    def all_gather(self, x: Tensor) -> Tensor:
        """``shm_all_gather``: the rows of all ranks."""
        return functions.shm_all_gather(x, self.number)

    def close(self) -> None:
        """Leave the group. The others raise when they next need this rank. Calling it again has no
        effect."""
        self._finalizer()

    def __enter__(self) -> ShmGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ShmGroup: rank {self.rank} of {self.size}>"

    def gather_by_gloo(self, x: Tensor) -> list[Tensor]:
        """A contiguous tensor of each rank. The connections are made when all ranks first ask for
        this."""
        if self._gloo is None:
            store = PrefixStore("gloo", self._meeting.store)
            self._gloo = dist.ProcessGroupGloo(store, self.rank, self.size, self.timeout)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._gloo.allgather([parts], [x.detach()]).wait()
        return parts


class _Meeting:
    """How the ranks find each other through a store, and come to share memory."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # A store may have served for other groups of the same ranks.
        turn = store.add(f"turn/{rank}", 1)
        self.store = PrefixStore(f"{turn}", store)
        self.rank, self.size = rank, size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()

    def introduce(self, this: _Rank) -> list[_Rank]:
        """What all ranks say of themselves. Raises ClusterError if one of them does not come."""
        return [_Rank(*json.loads(text)) for text in self._exchange("rank", json.dumps(this))]

    def share(self) -> int:
        """Map one memory on all ranks; the number of the group. Raises ClusterError on all of them
        if one of them cannot."""
        number, why = -1, ""
        wanted = min(max(_SLOT, _PART * self.size), _MEMORY // (2 * self.size))
        slot = max(self.size, wanted // _PAGE) * _PAGE
        with ExitStack() as until_all_have_it:
            try:
                fd = until_all_have_it.enter_context(self._memory(slot))
                number = _join(fd, self.rank, self.size, slot, self._timeout)
            except (OSError, RuntimeError, ClusterError) as error:
                why = f"{type(error).__name__}: {error}"
            try:
                outcomes = self._exchange("joined", why)
            except ClusterError:
                _leave(number, os.getpid())
                raise
        for rank, outcome in enumerate(outcomes):
            if outcome:
                _leave(number, os.getpid())
                raise ClusterError(f"rank {rank} cannot share memory with the others", why=outcome)
        return number

    @contextmanager
    def _memory(self, slot: int) -> Iterator[int]:
        """The descriptor of the memory. The first rank hands it to the others while the block
        runs."""
        if self.rank != 0:
            yield self._received()
            return
        try:
            fd = _make(_PAGE * -(-_HEADER * (self.size + 2) // _PAGE) + 2 * self.size * slot)
        except OSError:
            self.store.set("socket", _NO_MEMORY)  # the others need not wait for it
            raise
        name = f"opkiln-shm-{secrets.token_hex(16)}"
        stop = threading.Event()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(f"\0{name}")
            server.listen(self.size)
            server.settimeout(0.05)
            thread = threading.Thread(target=_hand_out, args=(server, fd, stop), daemon=True)
            thread.start()
            self.store.set("socket", name)
            try:
                yield fd
            finally:
                stop.set()
                thread.join()

    def _received(self) -> int:
        name = self._get("socket", 0)
        if name == _NO_MEMORY:
            raise ClusterError("rank 0 cannot make the memory")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(self._left())
            try:
                client.connect(f"\0{name}")
                _, fds, _, _ = socket.recv_fds(client, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except (ConnectionError, TimeoutError) as error:
                raise ClusterError(
                    "rank 0 has ended, or does not answer", why=f"{type(error).__name__}: {error}"
                ) from error
        if not fds:
            raise ClusterError("rank 0 sent no memory")
        return fds[0]

    def _exchange(self, name: str, said: str) -> list[str]:
        self.store.set(f"{name}/{self.rank}", said)
        return [self._get(f"{name}/{rank}", rank) for rank in range(self.size)]

    def _get(self, key: str, rank: int) -> str:
        try:
            self.store.wait([key], timedelta(seconds=self._left()))
            return bytes(self.store.get(key)).decode()
        except RuntimeError as error:
            seconds = f"{self._timeout.total_seconds():g}"
            raise ClusterError(
                f"rank {rank} did not come to the group within {seconds} s",
                why=str(error).partition("\n")[0],
            ) from error

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())


def _make(size: int) -> int:
    """The descriptor of new memory without a name. Raises OSError."""
    fd = os.memfd_create("opkiln-shm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Reserved now: a lack of memory is an error here, and not a signal later. Sealed: no rank
        # can cut it off under the others.
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def _here() -> _Rank:
    lacks = ""
    if not functions.shm_join.load("cpu"):
        lacks = str(functions.shm_join.explain("cpu")).partition("\n")[0]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        boot, network = socket.gethostname(), ""
    return _Rank(socket.gethostname(), boot, network, os.getuid(), os.getpid(), lacks)


def _refusal(every: list[_Rank]) -> str:
    """Why these ranks cannot share memory, or nothing. All ranks get the same answer."""
    first = every[0]
    seen: dict[int, int] = {}
    for rank, each in enumerate(every):
        pair = f"rank 0 is {first}, rank {rank} is {each}"
        if each.boot != first.boot:
            return f"they are on different hosts: {pair}"
        if each.network != first.network:
            return f"they are in different network namespaces: {pair}"
        if each.user != first.user:
            return f"they belong to users {first.user} and {each.user}: {pair}"
        if each.pid in seen:
            return f"ranks {seen[each.pid]} and {rank} are one process, {each.pid}"
        seen[each.pid] = rank
    return ""


def _hand_out(server: socket.socket, fd: int, stop: threading.Event) -> None:
    """Give the memory to every process of this user that asks for it, until told to stop."""
    while not stop.is_set():
        try:
            client, _ = server.accept()
        except OSError:  # nobody came in time, or this process has no descriptor left at the moment
            continue
        with client:
            asked = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            _, user, _ = struct.unpack("3i", asked)
            if user == os.getuid():
                try:
                    socket.send_fds(client, [b"m"], [fd])
                except OSError:
                    pass  # it was killed meanwhile; the others notice that it does not join


def _join(fd: int, rank: int, size: int, slot: int, timeout: timedelta) -> int:
    milliseconds = max(1, round(timeout.total_seconds() * 1000))
    try:
        with _joining:
            return functions.shm_join(
                torch.empty(0, device="cpu"), fd, rank, size, slot, milliseconds
            )
    except BaseException:
        os.close(fd)
        raise


def _leave(number: int, pid: int) -> None:
    # A forked child drops its copy of the group, and its parent stays in it.
    if os.getpid() == pid:
        GROUPS.pop(number, None)
        if number >= 0:
            functions.shm_leave(torch.empty(0, device="cpu"), number)
