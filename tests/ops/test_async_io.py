"""AsyncIO: every engine transfers exactly what was asked for, also where the system does not."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fault_rows import whole
from sample import child, sanitizers
from sample.references import references

import opkiln
from opkiln.errors import ArgumentError, ToolchainError, UsageError
from opkiln.io import AsyncIO, Transfer, handle
from opkiln.ops.async_io import engines

if TYPE_CHECKING:
    from collections.abc import Iterator

reference = references("async_io")

HERE = Path(__file__).parent
NATIVE = ("io_uring", "libaio", "threads")
# test_gds.py runs these tests again, in a process where all memory counts as a GPU's.
FOR_DEVICES = ("cufile", "copies") if "GDS_STAND_INS" in os.environ else ()


@pytest.fixture(scope="module")
def native() -> Any:
    try:
        return opkiln.get_builder("async_io").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"no native async_io here: {error.what}")


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """What other tests have made is not looked at by each ``gc.collect``."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=FOR_DEVICES or [*NATIVE, "reference"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The engine's name. The reference has threads alone."""
    if request.param in FOR_DEVICES:
        monkeypatch.setattr(handle, "_is_on_host", lambda _: False)
        yield request.param
        gc.collect()
        return
    if request.param == "reference":
        found: Any = reference
    else:
        found = request.getfixturevalue("native")
    for module in (engines, handle):
        monkeypatch.setattr(module, "functions", found)
    engines.engines.cache_clear()
    name = "threads" if request.param == "reference" else request.param
    state = next(each for each in engines.engines() if each.name == name)
    if not state.usable:
        pytest.skip(f"{name}: {state.why}")
    yield name
    gc.collect()  # what is dropped is closed by the functions that opened it
    engines.engines.cache_clear()


def contents(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def noise(size: int, seed: int = 0, lead: int = 0) -> torch.Tensor:
    """Random bytes, ``lead`` bytes after the begin of their memory."""
    made = bytearray(random.Random(seed).randbytes(lead + size + 1))  # torch takes no empty buffer
    return torch.frombuffer(made, dtype=torch.uint8)[lead:-1]


def save(path: Path, tensor: torch.Tensor) -> None:
    path.write_bytes(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


def aligned(size: int) -> torch.Tensor:
    whole_pages = torch.empty(size + 4096, dtype=torch.uint8)
    start = -whole_pages.data_ptr() % 4096
    return whole_pages[start : start + size]


def test_any_offset_size_and_alignment_is_exact(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = random.randrange(1 << 30) if whole(request.config) else 1
    draw, path = random.Random(seed), tmp_path / "file"
    edges = (0, 1, 511, 512, 513, 4095, 4096, 4097, 65536, 100_000)
    with AsyncIO(engine, block_size=16384, depth=4) as files:
        for _ in range(1000 if whole(request.config) else 50):
            before = noise(draw.choice(edges) + draw.randrange(9000), draw.randrange(1 << 30))
            save(path, before)
            offset = draw.choice(edges) + draw.choice((0, 0, 7))
            size, lead = draw.choice(edges) + draw.choice((0, 0, 5)), draw.choice((0, 1, 64, 513))
            case = f"seed {seed}: {before.numel()} bytes, {size} at {offset} from {lead}"
            wrote = (
                noise(size, draw.randrange(1 << 30), lead) if draw.random() < 0.7 else aligned(size)
            )
            assert files.write(wrote, path, offset).wait() == size, case
            length = max(before.numel(), offset + size) if size else before.numel()
            after = torch.zeros(length, dtype=torch.uint8)
            after[: before.numel()] = before
            after[offset : offset + size] = wrote
            assert torch.equal(contents(path), after), case
            start = draw.randrange(length + 1)
            room = torch.full((lead + length - start + 50,), 9, dtype=torch.uint8)[lead:]
            got = files.read(room, path, start, partial=True)
            assert got.wait() == length - start, case
            assert torch.equal(room[: length - start], after[start:]), case
            assert room[length - start :].eq(9).all(), case


def test_what_a_tensor_has_beyond_the_end_of_a_file_stays(engine: str, tmp_path: Path) -> None:
    save(tmp_path / "file", noise(8191))
    room = aligned(8192).fill_(9)
    with AsyncIO(engine) as files:
        assert files.read(room, tmp_path / "file", partial=True).wait() == 8191
    assert (room[-1], torch.equal(room[:-1], noise(8191))) == (9, True)


def test_several_files_and_dtypes_in_one_request(engine: str, tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(300, 70),
        "b": torch.randn(5000).bfloat16(),
        "c": torch.tensor(3, dtype=torch.int64),
        "d": torch.rand(11, 13).t() > 0.5,
    }
    with AsyncIO(engine, block_size=4096, depth=3) as files:
        assert files.write_all(
            [Transfer(each, tmp_path / name) for name, each in tensors.items()]
        ).wait() == sum(each.nbytes for each in tensors.values())
        back = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in tensors.items()}
        versions = [each._version for each in back.values()]
        request = files.read_all([Transfer(each, tmp_path / name) for name, each in back.items()])
        request.wait()
        assert request.sizes == [each.nbytes for each in back.values()]
    assert all(torch.equal(back[name], each) for name, each in tensors.items())
    if engines.functions is not reference:  # torch counts for an op, not for its bare reference
        assert all(each._version > was for each, was in zip(back.values(), versions, strict=True))


def test_an_open_file_is_used_by_its_descriptor(engine: str, tmp_path: Path) -> None:
    path, data = tmp_path / "file", noise(20_000)
    with path.open("w+b") as file, AsyncIO(engine) as files:
        files.write(data, file.fileno(), 100).wait()
        got = torch.empty_like(data)
        files.read(got, file.fileno(), 100).wait()
        os.fstat(file.fileno())  # it is still open
    assert torch.equal(got, data)


@pytest.mark.parametrize("flag", [os.O_APPEND, os.O_DIRECT], ids=["append", "direct"])
def test_the_flags_of_a_given_descriptor_do_not_matter(
    engine: str, tmp_path: Path, flag: int
) -> None:
    path, data = tmp_path / "file", torch.arange(3000, dtype=torch.int32)
    path.write_bytes(bytes(20_000))
    try:
        descriptor = os.open(path, os.O_RDWR | flag)
    except OSError:
        pytest.skip("the file system has no direct I/O")
    try:
        with AsyncIO(engine) as files:
            files.write(data, descriptor, 5).wait()
    finally:
        os.close(descriptor)
    assert path.read_bytes() == bytes(5) + data.numpy().tobytes() + bytes(20_000 - 12_005)


def test_the_default_device_does_not_matter(engine: str, tmp_path: Path) -> None:
    path, data = tmp_path / "file", torch.arange(3000)
    engines.engines.cache_clear()
    with torch.device("meta"), AsyncIO(engine) as files:
        files.write(data, path).wait()
        room = torch.zeros(3000, dtype=torch.int64, device="cpu")
        files.read(room, path).wait()
    assert torch.equal(room, data)


def test_requests_can_be_waited_for_after_an_error_in_the_block(
    engine: str, tmp_path: Path
) -> None:
    made = []

    def fails() -> None:
        with AsyncIO(engine) as files:
            made.append(files.write(torch.ones(1000), tmp_path / "file"))
            made.append(files.read(torch.ones(2000), tmp_path / "file"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert made[0].wait() == 4000
    with pytest.raises(EOFError):
        made[1].wait()


def test_no_descriptor_is_left_open(engine: str, tmp_path: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with AsyncIO(engine):
        pass
    before = open_files()
    files = AsyncIO(engine)
    files.write(noise(10_000), tmp_path / "a").wait()
    with pytest.raises(EOFError):
        files.read(torch.empty(20_000), tmp_path / "a").wait()
    with pytest.raises(FileNotFoundError):
        files.read_all([Transfer(torch.empty(1), tmp_path / each) for each in "ab"])
    files.close()
    assert open_files() == before


def test_a_file_that_ends_too_early_is_an_error_unless_parts_will_do(
    engine: str, tmp_path: Path
) -> None:
    path, data = tmp_path / "file", noise(10_001)
    save(path, data)
    with AsyncIO(engine) as files:
        room = torch.zeros(20_000, dtype=torch.uint8)
        with pytest.raises(
            EOFError, match=r"20000 bytes are asked for from offset 1 on, and .* 10000"
        ):
            files.read(room, path, 1).wait()
        assert files.read(room, path, 1, partial=True).wait() == 10_000
        assert torch.equal(room[:10_000], data[1:])
        assert files.read(room, path, 50_000, partial=True).wait() == 0


def test_a_file_that_shrinks_meanwhile_gives_what_was_there(engine: str, tmp_path: Path) -> None:
    path, data = tmp_path / "file", noise(8 << 20)
    save(path, data)
    with AsyncIO(engine, block_size=4096, depth=2) as files:
        room = torch.zeros_like(data)
        request = files.read(room, path, partial=True)
        os.truncate(path, 5001)
        count = request.wait()
    assert count >= 5001
    assert torch.equal(room[:count], data[:count])


def test_a_cancelled_request_ends_and_says_how_far_it_came(engine: str, tmp_path: Path) -> None:
    path, data = tmp_path / "file", noise(8 << 20)
    save(path, data)
    with AsyncIO(engine, block_size=4096, depth=1) as files:
        room, told = torch.zeros_like(data), ""
        while not told:  # one may have read all before it is cancelled
            request = files.read(room.zero_(), path)
            request.cancel()
            try:
                request.wait()
            except CancelledError as error:
                told = str(error)
        assert "cancelled after" in told
        done = sum(request.sizes)
        assert done < data.numel()
        assert torch.equal(room[:done], data[:done])
        request.cancel()  # no effect
        files.read(room, path).wait()
    assert torch.equal(room, data)


def test_a_dropped_request_goes_on_and_keeps_its_tensor(engine: str, tmp_path: Path) -> None:
    data = noise(16 << 20)
    held = data.clone()
    gone = weakref.ref(held)
    files = AsyncIO(engine, block_size=1 << 16, depth=2)
    files.write(held, tmp_path / "file")
    del held
    for _ in range(8):  # memory that was let go would be taken again, and overwritten
        torch.full((16 << 20,), 1, dtype=torch.uint8)
    files.close()
    assert torch.equal(contents(tmp_path / "file"), data)
    assert gone() is None


def test_dropping_the_object_waits_and_tells_of_failures(engine: str, tmp_path: Path) -> None:
    data = noise(8 << 20)
    files = AsyncIO(engine, block_size=1 << 16, depth=2)
    files.write(data, tmp_path / "file")
    del files
    gc.collect()
    assert torch.equal(contents(tmp_path / "file"), data)
    files = AsyncIO(engine)
    files.read(torch.empty(9 << 20, dtype=torch.uint8), tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="was dropped has failed: .* the file ends after"):
        del files  # and with it the last reference


def test_closing_raises_what_nobody_waited_for(engine: str, tmp_path: Path) -> None:
    save(tmp_path / "file", noise(10))
    files = AsyncIO(engine)
    files.read(torch.empty(100), tmp_path / "file")
    with pytest.raises(EOFError):
        files.close()
    files.close()
    with pytest.raises(UsageError, match="closed"):
        files.read(torch.empty(1), tmp_path / "file")


def test_python_goes_on_while_a_request_is_waited_for(engine: str, tmp_path: Path) -> None:
    save(tmp_path / "file", noise(16 << 20))
    into = torch.empty(16 << 20, dtype=torch.uint8)
    kept = sys.getswitchinterval()
    sys.setswitchinterval(60)  # another thread runs only where this one lets it
    try:
        with AsyncIO(engine, block_size=4096, depth=1, direct=False) as files:
            # A request may end before the other thread has begun.
            assert any(_another_runs(files.read(into, tmp_path / "file")) for _ in range(100))
    finally:
        sys.setswitchinterval(kept)


def _another_runs(request: Transfer) -> bool:
    """Whether another thread runs while this one waits for a request."""
    go, ended, runs = threading.Event(), threading.Event(), []
    other = threading.Thread(target=lambda: (go.wait(), runs.append(not ended.is_set())))
    other.start()
    go.set()
    request.wait()
    ended.set()
    other.join()
    return runs[0]


def test_many_threads_share_one_object(engine: str, tmp_path: Path) -> None:
    data = [noise(30_000 + each, each) for each in range(8)]
    wrong: list[int] = []
    with AsyncIO(engine, block_size=4096, depth=4) as files:

        def work(number: int) -> None:
            for turn in range(5):
                path = tmp_path / f"{number}-{turn}"
                files.write(data[number], path).wait()
                got = torch.empty_like(data[number])
                files.read(got, path).wait()
                if not torch.equal(got, data[number]):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(each,)) for each in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert wrong == []


def test_several_threads_wait_for_one_request(engine: str, tmp_path: Path) -> None:
    data, found = noise(200_000), []
    with AsyncIO(engine, block_size=4096, depth=2) as files:
        for turn in range(20):
            request = files.write(data, tmp_path / f"{turn}")
            threads = [
                threading.Thread(target=lambda of=request: found.append(of.wait()))
                for _ in range(3)
            ]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
    assert found == 60 * [data.numel()]


def interrupt_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An interrupt comes when a function of the op has done its work, the first time."""
    call, left = handle._RequestQueue.call, [name]

    def interrupted(queue: handle._RequestQueue, function: str, *arguments: Any) -> Any:
        found = call(queue, function, *arguments)
        if function in left:
            left.remove(function)
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(handle._RequestQueue, "call", interrupted)


def test_an_interrupt_does_not_close_the_files_of_a_request_that_began(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise(4 << 20)
    files = AsyncIO(engine, block_size=4096, depth=1)
    interrupt_once(monkeypatch, "write")
    with pytest.raises(KeyboardInterrupt):
        files.write(data, tmp_path / "file")
    # These would get the numbers of descriptors that were closed too early.
    others = [(tmp_path / f"other{each}").open("wb") for each in range(4)]
    files.close()
    assert torch.equal(contents(tmp_path / "file"), data)
    for other in others:
        other.close()
        assert Path(other.name).stat().st_size == 0


@pytest.mark.parametrize("name", ["wait", "forget"])
def test_an_interrupted_wait_can_be_repeated(
    engine: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AsyncIO(engine) as files:
        request = files.write(noise(1000), tmp_path / "file")
        interrupt_once(monkeypatch, name)
        with pytest.raises(KeyboardInterrupt):
            request.wait()
        assert request.wait() == 1000


def test_an_interrupted_close_closes(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = AsyncIO(engine)
    files.write(noise(1000), tmp_path / "file")
    interrupt_once(monkeypatch, "wait")
    with pytest.raises(KeyboardInterrupt):
        files._closer()
    for queue in files._queues:
        with pytest.raises(RuntimeError, match="it was closed"):
            queue.call("wait", 1, 0)
    assert contents(tmp_path / "file").numel() == 1000


def test_a_request_that_another_thread_waited_for_is_forgotten_once(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = handle.FileRequest.done

    def done_and_waited_for(request: handle.FileRequest) -> bool:
        request.wait()
        return done(request)

    monkeypatch.setattr(handle, "_MANY", 0)
    monkeypatch.setattr(handle.FileRequest, "done", done_and_waited_for)
    with AsyncIO(engine) as files:
        assert files.write(noise(100), tmp_path / "file").wait() == 100


def test_a_refused_request_closes_its_files(engine: str, tmp_path: Path) -> None:
    save(tmp_path / "file", noise(10))
    with AsyncIO(engine) as files:
        queue = files._queue_for([torch.empty(0)])
        for memory, offset, words in (
            (torch.empty(4), 0, "has dtype float32"),
            (torch.empty(4, dtype=torch.uint8), (1 << 63) - 3, "expected 0 to 9223372036854775803"),
        ):
            descriptor = os.open(tmp_path / "file", os.O_RDONLY)
            with pytest.raises(RuntimeError, match=words):
                queue.call("read_", [memory], [offset], [0], [descriptor, -1])
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)


def test_a_time_limit_ends_the_wait_and_not_the_request(engine: str, tmp_path: Path) -> None:
    path, data = tmp_path / "file", noise(8 << 20)
    with AsyncIO(engine, block_size=4096, depth=1) as files:
        request = files.write(data, path)
        with pytest.raises(TimeoutError):
            request.wait(timeout=0)
        with pytest.raises(UsageError, match="has not ended"):
            _ = request.sizes
        assert request.wait(timeout=300) == data.numel()
    assert torch.equal(contents(path), data)


def test_what_cannot_be_is_named(engine: str, tmp_path: Path) -> None:
    for words, keywords in {
        "depth is 0": {"depth": 0},
        "block_size is 1": {"block_size": 1},
        "threads is 0": {"threads": 0},
    }.items():
        with pytest.raises(ArgumentError, match=words):
            AsyncIO(engine, **keywords)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="expected auto, io_uring, libaio, threads"):
        AsyncIO("fast")
    with AsyncIO(engine) as files:
        save(tmp_path / "file", noise(100))
        os.mkfifo(tmp_path / "fifo")
        for tensor, path, offset, words in (
            (torch.empty(4, 4).t(), "file", 0, "only a contiguous one"),
            (torch.empty(4, device="meta"), "file", 0, "on meta, expected host memory"),
            (torch.empty(4), "file", -1, "offset is -1"),
            (torch.empty(4), "file", 1 << 63, "offset is 9223372036854775808, expected 0 to"),
            (torch.empty(4), "file", (1 << 63) - 16, "expected 0 to 9223372036854775791"),
        ):
            with pytest.raises(ArgumentError, match=words):
                files.read(tensor, tmp_path / path, offset)
        with pytest.raises(ArgumentError, match="neither a file nor a block device"):
            files.write(torch.empty(1), tmp_path / "fifo")
        with pytest.raises(IsADirectoryError):
            files.write(torch.empty(1), tmp_path)


def test_a_fork_is_refused_and_ends_without_waiting(engine: str, tmp_path: Path) -> None:
    files = AsyncIO(engine)
    path = tmp_path / "file"
    save(path, noise(100))
    files.read(torch.empty(1), path)  # nobody waits for it
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            files.read(torch.empty(1), path)
            code = 2
        except RuntimeError as error:
            gone = "of which this one is a fork" in str(error)
            files._closer()
            code = 0 if gone else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    files.read(torch.empty(1), path).wait()
    files.close()


def test_an_engine_that_cannot_be_had_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "functions", reference)
    engines.engines.cache_clear()
    try:
        assert [each.usable for each in engines.engines()] == [False, False, True]
        assert engines.choose("auto") == "threads"
        with pytest.raises(UsageError, match="io_uring cannot be used here\n  Function not impl"):
            AsyncIO("io_uring")
    finally:
        engines.engines.cache_clear()


@pytest.mark.parametrize(
    ("name", "code", "why", "hint"),
    [
        ("io_uring", 1, "Operation not permitted", "seccomp|io_uring_disabled=0"),
        ("io_uring", 12, "locked memory", "ulimit -l unlimited"),
        ("libaio", 11, "requests of all processes are reserved", "sysctl fs.aio-max-nr"),
        ("io_uring", -1, "when the op was compiled", "apt-get install linux-libc-dev"),
        ("libaio", 38, "does not have it", "^$"),
    ],
)
def test_each_refusal_has_its_reason_and_hint(name: str, code: int, why: str, hint: str) -> None:
    state = engines._state(name, code)
    assert not state.usable
    assert why in state.why
    assert re.search(hint, state.hint)


# In processes of their own

_TRANSFER = """
    import sys, torch
    from opkiln.io import AsyncIO
    engine, path, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    with AsyncIO(engine, block_size=65536, depth=4, threads=2) as files:
        try:
            print("wrote", files.write(data, path, 3).wait())
            got = torch.empty_like(data)
            print("read", files.read(got, path, 3).wait())
            print("equal", torch.equal(got, data))
        except OSError as error:
            print(type(error).__name__, error.errno, error.filename)
"""


def _child(*arguments: str, before: str = "") -> list[str]:
    return child.run(before + _TRANSFER, *arguments, bare=False).splitlines()


_FAULTY = """
    import ctypes, json, sys, torch
    from opkiln.io import AsyncIO
    io_faults = ctypes.CDLL(None).io_faults
    path, cases, said = sys.argv[1], json.loads(sys.argv[2]), []
    with AsyncIO("threads", block_size=65536, depth=4, threads=2) as files:
        for words, size in cases:
            data = torch.randint(0, 256, (size,), dtype=torch.uint8)
            got = torch.empty_like(data)
            io_faults(words.encode())
            try:
                wrote = files.write(data, path, 3).wait()
                said.append([wrote, files.read(got, path, 3).wait(), torch.equal(got, data)])
            except OSError as error:
                said.append([type(error).__name__, error.errno, error.filename])
            said[-1].append(io_faults(b"all"))
    print(json.dumps(said))
"""


@pytest.mark.skipif(bool(sanitizers.flags()), reason="the sanitizer is preloaded already")
@pytest.mark.usefixtures("native")
def test_short_and_interrupted_calls_are_gone_on_with_and_a_full_disk_is_an_error(
    tmp_path: Path,
) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library, path = str(tmp_path / "io_faults.so"), str(tmp_path / "file")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, str(HERE / "io_faults.c")]
    subprocess.run(command, check=True)
    rows = (
        "part",
        "intr,part,all,again,part,intr,intr,all",
        "all,part,part,part,intr,part,again,all",
    )
    cases = [(",".join([row] * 20), size) for row in rows for size in (5, 70_000, 1 << 20)]
    said = json.loads(
        child.run(
            _FAULTY, path, json.dumps([*cases, ("all,part,full", 1 << 20)]), bare=False,
            env={"LD_PRELOAD": library},
        )
    )  # fmt: skip
    for (_, size), (*found, calls) in zip(cases, said, strict=False):
        assert found == [size, size, True]
        assert size == 5 or calls > 2, "no call was short or interrupted"
    assert said[-1][:3] == ["OSError", 28, path]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("size", [100_000, 3 << 20], ids=["while writing", "before writing"])
def test_a_file_over_the_limit_is_an_error_of_every_engine(
    name: str, size: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "file")
    limit = "\n    import resource\n    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))"
    assert _child(name, path, str(size), before=limit)[-1] == f"OSError 27 {path}"


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", NATIVE)
def test_a_full_disk_is_an_error_of_every_engine(name: str, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        path = str(small / "file")
        assert _child(name, path, str(3 << 20)) == [f"OSError 28 {path}"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.usefixtures("native")
def test_a_process_that_ends_finishes_what_it_began(tmp_path: Path) -> None:
    code = """
        import sys, torch
        from opkiln.io import AsyncIO
        files = AsyncIO(block_size=4096, depth=2)
        files.write(torch.full((8 << 20,), 7, dtype=torch.uint8), sys.argv[1])
    """
    found = child.start(code, str(tmp_path / "file"), bare=False)
    _, err = found.communicate(timeout=120)
    assert (found.returncode, err) == (0, "")
    assert torch.equal(contents(tmp_path / "file"), torch.full((8 << 20,), 7, dtype=torch.uint8))


def test_the_probe_passes_opcheck(native: Any) -> None:
    torch.library.opcheck(native.aio_probe, (torch.empty(0), "threads"))
    began = time.monotonic()
    queue = native.aio_open(torch.empty(0), "threads", 2, 4096, 1)
    for function, arguments in (
        (native.aio_wait, (queue, 5, 0)),
        (native.aio_read_, (queue, [torch.empty(4)], [0], [0], [-1, -1])),
    ):
        with pytest.raises(
            RuntimeError, match=r"there is no request 5|has dtype float32, expected"
        ):
            function(*arguments)
    native.aio_close(queue)
    with pytest.raises(RuntimeError, match="it was closed"):
        native.aio_wait(queue, 1, 0)
    assert time.monotonic() - began < 30
