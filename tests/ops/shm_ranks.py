"""Ranks for test_shm_comm.py: this process imports torch once and forks them.

    python shm_ranks.py FOLDER CASE...

Each case runs on its number of ranks. Prints a line of JSON for each: its name, and what went wrong
or nothing. A case is a function ``(rank, size, store)``; what it raises on a rank is a failure.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # DDP imports it: once here, and not in each rank
import torch.distributed as dist
from torch import Tensor

from opkiln.comm import ShmGroup, register_backend
from opkiln.errors import ClusterError, FallbackWarning
from opkiln.ops.shm_comm import functions
from opkiln.ops.shm_comm import group as making

if TYPE_CHECKING:
    from collections.abc import Callable

SECOND = timedelta(seconds=1)
SHORT, LONG = 2 * SECOND, 60 * SECOND
LIMIT = 300  # seconds of a case
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES: dict[str, tuple[int, Any]] = {}


def case(*sizes: int) -> Callable[[Any], Any]:
    """Add a case, once for each number of ranks."""

    def add(function: Any) -> Any:
        for size in sizes:
            name = function.__name__ if len(sizes) == 1 else f"{function.__name__}_{size}"
            CASES[name] = (size, function)
        return function

    return add


def drawn(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype)


def raised(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


@case(1, 2, 3, 4)
def results_have_the_bits_of_the_reference(rank: int, size: int, store: dist.Store) -> None:
    group = ShmGroup(store, rank, size, LONG)
    assert not group.fallback
    number = group.number
    for dtype in DTYPES:
        for count in (0, 1, 255, 30_011, *((700_001,) if dtype == torch.float32 else ())):
            x = drawn(rank, count, dtype=dtype)
            for op in functions.OPS if count < 1000 else ("sum", "mean"):
                expected = functions.shm_all_reduce.reference(x, number, op)
                assert torch.equal(group.all_reduce(x, op), expected), (dtype, count, op)
                written = x.clone()
                assert group.all_reduce_(written, op) is written
                assert torch.equal(written, expected), (dtype, count, op)
            rows = drawn(rank, size * (count // 7), 7, dtype=dtype)
            part = functions.shm_reduce_scatter.reference(rows, number, "max")
            assert torch.equal(group.reduce_scatter(rows, "max"), part), (dtype, count)
            every = functions.shm_all_gather.reference(rows, number)
            assert torch.equal(group.all_gather(rows), every), (dtype, count)


@case(3)
def large_tensors_take_many_turns(rank: int, size: int, store: dist.Store) -> None:
    group = ShmGroup(store, rank, size, LONG)
    x = torch.full((5_000_003,), float(rank + 1))
    assert torch.equal(group.all_reduce(x), torch.full_like(x, 6))
    assert torch.equal(group.all_gather(x).view(3, -1)[:, -1], torch.tensor([1.0, 2, 3]))
    assert torch.equal(group.reduce_scatter(x[:-2].contiguous()), torch.full((1_666_667,), 6.0))


@case(3)
def sums_are_made_in_fp32_and_rounded_once(rank: int, size: int, store: dist.Store) -> None:
    group = ShmGroup(store, rank, size, LONG)
    for dtype, small in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        x = torch.full((100,), 1.0 if rank == 0 else small, dtype=dtype)
        assert group.all_reduce(x)[99].item() == 1 + 2 * small  # 1 + small rounds to 1


@case(2)
def nan_and_infinity_reach_every_rank(rank: int, size: int, store: dist.Store) -> None:
    group = ShmGroup(store, rank, size, LONG)
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan, 1.0, inf, inf, 1.0] if rank == 0 else [1.0, nan, -inf, 1.0, 2.0])
    for dtype in DTYPES:
        for op in functions.OPS:
            found = group.all_reduce(x.to(dtype), op)
            expected = functions.shm_all_reduce.reference(x.to(dtype), group.number, op)
            assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7)), op
            assert found[:2].isnan().all(), op
            assert torch.equal(found.isnan(), expected.isnan()), op


@case(2)
def any_strides_are_taken(rank: int, size: int, store: dist.Store) -> None:
    group = ShmGroup(store, rank, size, LONG)
    x = drawn(rank, 64, 30)
    expected = group.all_reduce(x)
    # The other rank's is contiguous.
    other = x.t().contiguous().t() if rank == 0 else x.clone()
    assert torch.equal(group.all_reduce(other), expected)
    assert torch.equal(group.all_reduce_(other), expected)
    assert torch.equal(group.all_gather(x[:, ::2]), group.all_gather(x[:, ::2].contiguous()))


@case(3)
def different_calls_raise_everywhere_and_the_group_goes_on(
    rank: int, size: int, store: dist.Store
) -> None:
    group = ShmGroup(store, rank, size, LONG)
    for count in (10, 1_000_000):
        x = torch.ones(count + (rank == 2))
        text = raised(RuntimeError, lambda x=x: group.all_reduce(x))
        assert f"rank 0 calls all_reduce (sum) of {count} elements of float32" in text, text
        assert f"rank 2 calls all_reduce (sum) of {count + 1} elements" in text, text
    op = "max" if rank == 1 else "sum"
    assert "(max)" in raised(RuntimeError, lambda: group.all_reduce(torch.ones(3), op))
    call = group.all_gather if rank == 1 else group.all_reduce
    assert "rank 1 calls all_gather" in raised(RuntimeError, lambda: call(torch.ones(3)))
    assert torch.equal(group.all_reduce(torch.ones(100_000)), torch.full((100_000,), 3.0))


@case(2)
def wrong_arguments_are_refused(rank: int, size: int, store: dist.Store) -> None:
    group = ShmGroup(store, rank, size, LONG)
    x = torch.ones(3, 2)
    assert "op is xor" in raised(RuntimeError, lambda: group.all_reduce(x, "xor"))
    assert "multiple of 2 rows" in raised(RuntimeError, lambda: group.reduce_scatter(x))
    group.close()
    group.close()
    assert "closed" in raised(RuntimeError, lambda: group.all_reduce(x))


@case(2)
def gradients_come_from_all_ranks(rank: int, size: int, store: dist.Store) -> None:
    group = ShmGroup(store, rank, size, LONG)
    x = drawn(rank, 4, 3).requires_grad_()
    weight = [drawn(10 + r, 4, 3) for r in range(size)]
    (group.all_reduce(x, "mean") * weight[rank]).sum().backward()
    assert torch.allclose(x.grad, (weight[0] + weight[1]) / 2)
    x.grad = None
    wide = [drawn(20 + r, 8, 3) for r in range(size)]
    (group.all_gather(x) * wide[rank]).sum().backward()
    assert torch.allclose(x.grad, (wide[0] + wide[1])[4 * rank : 4 * rank + 4])
    x.grad = None
    (group.reduce_scatter(x) * weight[rank][:2]).sum().backward()
    assert torch.allclose(x.grad, torch.cat([weight[0][:2], weight[1][:2]]))
    assert "has no gradient" in raised(
        RuntimeError, lambda: group.all_reduce(x, "max").sum().backward()
    )


@case(2)
def other_dtypes_go_by_gloo(rank: int, size: int, store: dist.Store) -> None:
    group = ShmGroup(store, rank, size, LONG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.tensor([2**40 + rank])
        assert group.all_reduce(x).item() == 2**41 + 1
        assert group.all_reduce(x.double(), "max").item() == 2**40 + 1
    assert any("int64" in str(each.message) for each in caught), [str(c.message) for c in caught]
    assert torch.equal(group.all_gather(x), torch.tensor([2**40, 2**40 + 1]))  # native: bytes


@case(2)
def groups_work_side_by_side_in_threads(rank: int, size: int, store: dist.Store) -> None:
    groups = [ShmGroup(store, rank, size, LONG) for _ in range(6)]
    wrong: list[object] = []

    def use(at: int) -> None:
        try:
            for i in range(30):
                x = torch.full((1 + 5000 * at,), float(rank + at + i))
                if not torch.equal(groups[at].all_reduce(x), torch.full_like(x, 2 * (at + i) + 1)):
                    wrong.append((at, i))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(at,)) for at in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


@case(2)
def threads_take_turns_on_one_group(rank: int, size: int, store: dist.Store) -> None:
    group = ShmGroup(store, rank, size, LONG)
    sums: list[float] = []

    def use() -> None:
        sums.extend(group.all_reduce(torch.ones(1000)).sum().item() for _ in range(50))

    threads = [threading.Thread(target=use) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [2000.0] * 300


@case(2)
def a_forked_child_is_refused_and_its_parent_goes_on(
    rank: int, size: int, store: dist.Store
) -> None:
    group = ShmGroup(store, rank, size, LONG)
    group.all_reduce(torch.ones(3))
    child = os.fork()
    if child == 0:
        text = raised(RuntimeError, lambda: group.all_reduce(torch.ones(3)))
        group.close()
        # A group of its own works in it.
        alone = ShmGroup(dist.HashStore(), 0, 1)
        fine = alone.all_reduce(torch.ones(3)).sum() == 3
        os._exit(0 if "forked child" in text and fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(0.2)  # longer than a look at who is alive
    assert group.all_reduce(torch.ones(100_000))[0] == 2


@case(3)
def a_rank_that_leaves_is_named(rank: int, size: int, store: dist.Store) -> None:
    group = ShmGroup(store, rank, size, LONG)
    group.all_reduce(torch.ones(3))
    if rank == 1:
        group.close()
        return
    for _ in range(2):
        text = raised(RuntimeError, lambda: group.all_reduce(torch.ones(3)))
        assert "rank 1 (process" in text, text
        assert "left the group" in text, text


@case(2)
def a_killed_rank_is_noticed_while_signals_arrive(rank: int, size: int, store: dist.Store) -> None:
    group = ShmGroup(store, rank, size, LONG)
    group.all_reduce(torch.ones(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    begin = time.monotonic()
    text = raised(RuntimeError, lambda: group.all_reduce(torch.ones(3)))
    assert "rank 1 (process" in text, text
    assert "died" in text, text
    assert time.monotonic() - begin < 10


@case(3)
def a_rank_that_stops_is_named_after_the_timeout(rank: int, size: int, store: dist.Store) -> None:
    group = ShmGroup(store, rank, size, SECOND)
    group.all_reduce(torch.ones(3))
    if rank == 1:
        store.wait(["0 has given up", "2 has given up"])
    text = raised(RuntimeError, lambda: group.all_reduce(torch.ones(3)))
    store.set(f"{rank} has given up", "")
    assert "rank 1 (process" in text, text
    assert "did not arrive at all_reduce within 1 s" in text, text


@case(2)
def a_rank_that_does_not_come_is_named(rank: int, size: int, store: dist.Store) -> None:
    if rank == 0:
        text = raised(ClusterError, lambda: ShmGroup(store, rank, size, SECOND))
        assert "rank 1 did not come to the group within 1 s" in text, text


@case(2)
def a_rank_killed_before_it_hands_out_the_memory_is_named(
    rank: int, size: int, store: dist.Store
) -> None:
    if rank == 0:

        def dies(*_: object) -> None:
            time.sleep(0.5)  # the other rank is connected, and this one has said that it is ready
            os.kill(os.getpid(), signal.SIGKILL)

        making._hand_out = dies
    text = raised(ClusterError, lambda: ShmGroup(store, rank, size, SHORT))
    assert "rank 0 has ended" in text, text


def on_another_host(rank: int) -> None:
    """Make this rank say that it runs elsewhere."""
    if rank == 1:
        real = making._here
        making._here = lambda: real()._replace(host="elsewhere", boot="another")


@case(2)
def ranks_of_different_hosts_are_refused(rank: int, size: int, store: dist.Store) -> None:
    on_another_host(rank)
    text = raised(ClusterError, lambda: ShmGroup(store, rank, size, LONG))
    assert "they are on different hosts: rank 0 is process" in text, text
    assert "on elsewhere" in text, text
    assert 'hint: use the backend "gloo"' in text, text


@case(2)
def a_rank_without_the_library_makes_all_use_gloo(rank: int, size: int, store: dist.Store) -> None:
    if rank == 1:
        real = making._here
        making._here = lambda: real()._replace(lacks="no compiler")
    group = ShmGroup(store, rank, size, LONG)
    assert "rank 1" in group.fallback
    assert "no compiler" in group.fallback
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert torch.equal(group.all_reduce(torch.ones(5)), torch.full((5,), 2.0))
        assert group.all_gather(torch.ones(2, 3)).shape == (4, 3)


# The process group


def begin(rank: int, size: int, store: dist.Store, name: str = "") -> Any:
    timeout = {"timeout": LONG}
    dist.init_process_group(
        name or register_backend(), store=store, rank=rank, world_size=size, **timeout
    )
    return dist.distributed_c10d._get_default_group()


@case(3)
def collectives_of_the_process_group_are_gloos(rank: int, size: int, store: dist.Store) -> None:
    made = begin(rank, size, store)
    assert made.shm is not None, made.fallback
    assert dist.get_backend() == "opkiln_shm"
    gloo = dist.new_group(backend="gloo")
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        whole = drawn(rank, 6, 4).mul(8).round().to(dtype)  # small whole numbers: sums are exact
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            a, b = whole.clone(), whole.clone()
            dist.all_reduce(a, op)
            dist.all_reduce(b, op, group=gloo)
            assert torch.equal(a, b), (dtype, op)
        for group in (None, gloo):
            parts = [torch.empty_like(whole) for _ in range(size)]
            dist.all_gather(parts, whole, group=group)
            every = torch.empty(18, 4, dtype=dtype)
            dist.all_gather_into_tensor(every, whole, group=group)
            assert torch.equal(torch.cat(parts), every)
            mine = torch.empty(2, 4, dtype=dtype)
            dist.reduce_scatter_tensor(mine, whole, group=group)
            total = whole.clone()
            dist.all_reduce(total, group=group)
            assert torch.equal(mine, total[2 * rank : 2 * rank + 2]), (dtype, group)
            listed = torch.empty(2, 4, dtype=dtype)
            dist.reduce_scatter(listed, list(whole.chunk(3)), group=group)
            assert torch.equal(mine, listed)
    average = drawn(rank, 100)
    expected = made.shm.all_reduce(average, "mean")
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert torch.equal(average, expected)
    strided = torch.zeros(5, 4).t()
    dist.all_gather_into_tensor(strided[: 4 // 4 * 3], torch.full((1, 5), float(rank)))
    assert strided[:3, 0].tolist() == [0.0, 1.0, 2.0]
    # Those that gloo serves.
    x = torch.full((3,), float(rank))
    dist.broadcast(x, 2)
    assert x[0] == 2
    dist.barrier()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    if rank == 0:
        dist.send(torch.ones(2), 1)
    elif rank == 1:
        got = torch.zeros(2)
        dist.recv(got, 0)
        assert got.sum() == 2
    part = dist.new_group([0, 2])
    if rank != 1:
        x = torch.ones(10)
        dist.all_reduce(x, group=part)
        assert x[0] == 2
        assert part.shm is not None
    dist.destroy_process_group()


@case(2)
def work_that_is_not_waited_for_is_done_in_order(rank: int, size: int, store: dist.Store) -> None:
    begin(rank, size, store)
    tensors = [torch.full((20_000,), float(i + rank)) for i in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors[:10]]
    for x in tensors[10:]:
        dist.all_reduce(x)
    assert works[9].is_completed()
    for i, x in enumerate(tensors):
        assert x[19_999] == 2 * i + 1
    # A rank that asks and goes on does not wait for the other.
    if rank == 0:
        x = torch.ones(5)
        work = dist.all_reduce(x, async_op=True)
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        dist.recv(torch.ones(1), 0)
        x = torch.ones(5)
        dist.all_reduce(x)
    assert x[0] == 2
    assert dist.all_reduce(x, async_op=True).get_future().wait()[0] is x
    dist.barrier()
    dist.destroy_process_group()


@case(2)
def a_killed_rank_ends_async_work_with_its_name(rank: int, size: int, store: dist.Store) -> None:
    begin(rank, size, store)
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for asynchronous in (True, False):
        text = raised(
            RuntimeError,
            lambda a=asynchronous: (dist.all_reduce(torch.ones(9), async_op=a) or 0).wait(),
        )
        assert "rank 1 (process" in text, text
        assert "died" in text, text


@case(2)
def ranks_of_different_hosts_use_gloo(rank: int, size: int, store: dist.Store) -> None:
    on_another_host(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = begin(rank, size, store)
    assert any("different hosts" in str(each.message) for each in caught)
    assert made.shm is None
    x = torch.ones(5)
    dist.all_reduce(x)
    assert x[0] == 2
    dist.barrier()
    dist.destroy_process_group()


@case(2)
def deepspeeds_all_reduce_sums_over_all_ranks(rank: int, size: int, store: dist.Store) -> None:
    from opkiln.compat.deepspeed.modules import OpModule

    begin(rank, size, store, "gloo")
    module = OpModule("deepspeed_shm_comm")
    module.initialize(size, rank)
    module.initialize(size, rank)
    assert module.vector_kernel_level() == 2
    ops = torch.ops.deepspeed
    for dtype in (*DTYPES, torch.float64):
        x = torch.full((300,), rank + 1.0, dtype=dtype)
        assert torch.equal(ops.inference_all_reduce(x), torch.full_like(x, 3))
        assert x[0] == rank + 1
        assert ops.inference_all_reduce_(x) is x
        assert torch.equal(x, torch.full_like(x, 3))
        strided = torch.full((4, 6), rank + 1.0, dtype=dtype).t()
        ops.inference_all_reduce_(strided)
        assert torch.equal(strided, torch.full_like(strided, 3))
    x = torch.ones(4, requires_grad=True)
    (ops.inference_all_reduce(x) * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 3.0))
    assert ops.inference_all_reduce(torch.ones(4, device="meta")).shape == (4,)
    dist.barrier()


KEPT: list[torch.nn.Module] = []  # until the process ends


def trained(rank: int, size: int, store: dist.Store, backend: str) -> list[Tensor]:
    begin(rank, size, store, backend)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5)]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=0.01
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        x = drawn(100 * step + rank, 16, 40)
        loss = (model(x) - x[:, :5].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = [each.detach().clone() for each in model.parameters()]
    # The last owner of gloo's group waits for gloo's threads, and has the GIL, which they may need.
    KEPT.append(model)
    dist.barrier()
    dist.destroy_process_group()
    return weights


@case(2, 4)
def ddp_trains_to_the_weights_of_gloo(rank: int, size: int, store: dist.Store) -> None:
    ours = trained(rank, size, dist.PrefixStore("ours", store), register_backend())
    theirs = trained(rank, size, dist.PrefixStore("gloo", store), "gloo")
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    moved = ours[0] - torch.nn.Linear(40, 300).weight
    assert moved.abs().max() > 0.01  # it was trained


def run(name: str, folder: Path) -> str:
    """What went wrong on the ranks of a case, or nothing."""
    size, function = CASES[name]
    path = folder / name
    ranks = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                function(rank, size, dist.FileStore(str(path), size))
                code = 0
            except BaseException:
                path.with_suffix(f".{rank}").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        ranks.append(pid)
    wrong = []
    deadline = time.monotonic() + LIMIT
    for rank, pid in enumerate(ranks):
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.02)
        if not ended[0]:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
            wrong.append(f"rank {rank} has not ended after {LIMIT} s")
        status = ended[1]
        told = path.with_suffix(f".{rank}")
        if told.exists():
            wrong.append(f"rank {rank}: {told.read_text()}")
        elif status and not ("killed" in name and os.WTERMSIG(status) == signal.SIGKILL):
            wrong.append(f"rank {rank} ended with status {status}")
    return "\n".join(wrong)


def main() -> None:
    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a rank would write to all of torch's objects
    assert functions.shm_join.load("cpu"), str(functions.shm_join.explain("cpu"))
    for name in names or CASES:
        begun = time.monotonic()
        wrong = run(name, Path(folder))
        seconds = round(time.monotonic() - begun, 2)
        print(json.dumps({"case": name, "wrong": wrong, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
