"""PinnedPool on the CPU, and the op beneath: pages that stay in memory."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from sample import sanitizers
from sample.references import references

import opkiln
from opkiln.errors import FallbackWarning, ToolchainError, UsageError
from opkiln.io import PinnedPool
from opkiln.ops.pin_memory import pool as front_end

reference = references("pin_memory")

PAGE = 4096

really_locks = pytest.mark.skipif(
    bool(sanitizers.flags()), reason="AddressSanitizer has mlock do nothing"
)


def locked_bytes() -> int:
    """What the kernel says that this process has locked."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) * 1024
    pytest.skip("this kernel does not say what is locked")


@pytest.fixture(params=["native", "reference"])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = reference
    if request.param == "native":
        try:
            found = opkiln.get_builder("pin_memory", backend="cpu").jit_load(verbose=False)
        except ToolchainError as error:
            pytest.skip(f"no native pin_memory here: {error.what}")
    monkeypatch.setattr(front_end, "functions", found)
    return found


def pages(count: int) -> torch.Tensor:
    whole = torch.empty((count + 1) * PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    return whole[start : start + count * PAGE]


@really_locks
def test_pages_are_locked_and_unlocked(op: Any) -> None:
    before, memory, device = locked_bytes(), pages(4), torch.empty(0)
    op.lock_pages_(memory, device)
    assert locked_bytes() == before + 4 * PAGE
    op.unlock_pages_(memory, device)
    assert locked_bytes() == before
    op.lock_pages_(memory[:0], device)


@really_locks
def test_the_op_names_what_it_refuses(op: Any) -> None:
    for message, memory in {
        "memory has dtype": torch.empty(8),
        "memory is not contiguous": torch.empty(8, 8, dtype=torch.uint8).t(),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            op.lock_pages_(memory, torch.empty(0))
    # The system refuses what is not mapped: so a page that was, and is no more.
    hole = mmap.mmap(-1, PAGE)
    memory = torch.frombuffer(hole, dtype=torch.uint8)
    ctypes.CDLL(None).munmap(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(PAGE))
    try:
        refused = f"the system did not lock 4096 bytes of memory: {os.strerror(errno.ENOMEM)}"
        with pytest.raises(RuntimeError, match=refused):
            op.lock_pages_(memory, torch.empty(0))
    finally:
        ctypes.CDLL(None).mmap(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(PAGE), 3, 0x32, -1, 0
        )


@really_locks
@pytest.mark.usefixtures("op")
def test_a_buffer_is_aligned_locked_and_used_again() -> None:
    before = locked_bytes()
    with PinnedPool("cpu", alignment=8192, lock=True) as pool:
        one = pool.take((3, 100), torch.float32)
        assert (one.shape, one.dtype) == ((3, 100), torch.float32)
        assert one.data_ptr() % 8192 == 0
        assert locked_bytes() == before + PAGE
        place = one.data_ptr()
        one.fill_(7)
        pool.give(one)
        two = pool.take(PAGE)
        assert two.data_ptr() == place
        assert pool.counts() == (1, PAGE, 1, PAGE, PAGE, 1, 1)
        other = pool.take(PAGE)
        assert other.data_ptr() != place
        assert pool.counts()[:4] == (2, 2 * PAGE, 2, 2 * PAGE)
        pool.give(two)
        pool.give(other)
        assert pool.trim() == 2 * PAGE
        assert pool.counts()[:5] == (0, 0, 0, 0, 0)
    assert locked_bytes() == before


@pytest.mark.parametrize("size", [PAGE, 4 << 20])
def test_a_forked_process_does_not_write_to_its_parents_buffers(size: int) -> None:
    with PinnedPool("cpu", lock=False) as pool:
        kept = pool.take(size)
        kept.fill_(1)
        pid = os.fork()
        if pid == 0:
            kept[0] = 2  # one element: torch's threads are not in the fork
            os._exit(0)
        os.waitpid(pid, 0)
        assert kept.eq(1).all()
        pool.give(kept)


@pytest.mark.usefixtures("op")
def test_far_too_large_buffers_are_left_for_others() -> None:
    with PinnedPool("cpu") as pool:
        pool.give(pool.take(64 * PAGE))
        small = pool.take(10)
        assert pool.counts().buffers == 2
        large = pool.take(60 * PAGE)
        assert pool.counts()[:1] + pool.counts()[5:] == (2, 1, 2)
        pool.give(small)
        pool.give(large)


@pytest.mark.usefixtures("op")
def test_a_limit_is_kept_and_free_buffers_make_room() -> None:
    pool = PinnedPool("cpu", limit=4 * PAGE)
    held = pool.take(2 * PAGE)
    pool.give(pool.take(PAGE))
    again = pool.take(2 * PAGE)  # the free one has to go
    assert pool.counts()[:2] == (2, 4 * PAGE)
    with pytest.raises(UsageError, match="holds 16384 bytes of at most 16384, and 4096 more"):
        pool.take(1)
    pool.give(held)
    pool.give(again)
    pool.close()


@pytest.mark.usefixtures("op")
def test_a_block_gives_back_what_it_borrowed_also_when_it_fails() -> None:
    pool = PinnedPool("cpu")

    def fails() -> None:
        with pool.borrow(100) as tensor:
            assert tensor.numel() == 100
            assert pool.counts().taken == 1
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert pool.counts().taken == 0
    pool.close()


@pytest.mark.usefixtures("op")
def test_what_is_not_the_pools_is_refused() -> None:
    pool = PinnedPool("cpu")
    tensor = pool.take(100)
    for wrong in (torch.empty(3), tensor[1:]):
        with pytest.raises(UsageError, match="not one that was taken from this pool"):
            pool.give(wrong)
    with pytest.raises(UsageError, match="1 buffers of the pool are still taken"):
        pool.close()
    pool.give(tensor)
    with pytest.raises(UsageError, match="not one that was taken from this pool"):
        pool.give(tensor)
    pool.close()
    pool.close()
    with pytest.raises(UsageError, match="the pool is closed"):
        pool.take(1)
    for message, call in {
        "alignment is 3": lambda: PinnedPool("cpu", alignment=3),
        "limit is -1": lambda: PinnedPool("cpu", limit=-1),
        "device is meta": lambda: PinnedPool("meta"),
        "shape is": lambda: PinnedPool("cpu").take((2, -1)),
    }.items():
        with pytest.raises(UsageError, match=message):
            call()


@really_locks
@pytest.mark.usefixtures("op")
def test_a_pool_that_is_dropped_leaves_nothing_locked() -> None:
    before = locked_bytes()
    pool = PinnedPool("cpu", lock=True)
    tensor = pool.take(100)
    tensor.fill_(3)
    pool.give(pool.take(5 * PAGE))
    assert locked_bytes() == before + 6 * PAGE
    del pool
    gc.collect()
    assert locked_bytes() == before
    assert int(tensor.sum()) == 300  # its memory is still its own


def test_what_the_system_does_not_lock_is_used_as_it_is_unless_it_must_be_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing:
        @staticmethod
        def lock_pages_(memory: torch.Tensor, device: torch.Tensor) -> None:
            del device
            raise RuntimeError(f"the system did not lock {memory.numel()} bytes of memory: no")

    monkeypatch.setattr(front_end, "functions", Refusing)
    with PinnedPool("cpu") as pool:
        with pool.borrow(100):
            assert pool.counts()[:5] == (1, PAGE, 1, PAGE, 0)
        with pytest.raises(UsageError, match="did not lock 4096 bytes"):
            PinnedPool("cpu", lock=True).take(100)
    with PinnedPool("cpu", lock=False) as pool, pool.borrow(0, torch.float32) as empty:
        assert empty.shape == (0,)


@pytest.mark.usefixtures("op")
def test_threads_never_share_a_buffer() -> None:
    pool = PinnedPool("cpu", lock=False)
    wrong = []

    def work(number: int) -> None:
        for _ in range(200):
            with pool.borrow(256) as tensor:
                tensor.fill_(number)
                if not bool((tensor == number).all()):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.counts().taken == 0
    assert pool.counts().buffers <= 4
    pool.close()


# Without a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that torch can use")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 0)])
def test_a_pool_for_a_gpu_that_is_not_there_serves_from_locked_memory_and_says_so(
    op: Any, device: Any
) -> None:
    with pytest.warns(FallbackWarning, match="torch can use no GPU here") as said:
        pool = PinnedPool(device)
    assert len(said) == 1
    assert pool.device == torch.device("cpu")
    with pool, pool.borrow((3, 1000), torch.float16) as staged:
        staged.fill_(2.0)
        assert staged.data_ptr() % PAGE == 0
        assert pool.counts().locked_bytes == pool.counts().bytes


def test_a_pool_for_no_device_in_particular_says_nothing(
    op: Any, recwarn: pytest.WarningsRecorder
) -> None:
    with PinnedPool() as pool, pool.borrow(10):
        pass
    assert not recwarn.list
