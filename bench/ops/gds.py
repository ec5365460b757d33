"""Files and the memory of a GPU: ``AsyncIO`` by cuFile and by copies, beside a read to host memory
and a copy after it, and ``io.load`` beside torch.load.

    python bench/ops/gds.py [--directory DIR] [--mebibytes 1024] [--turns 3] [--only WORD]
                            [--out FILE]

All take turns in one process, and nothing of the file is in the page cache when a turn begins. A
bar that is missed makes the exit code 1.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import harness
import torch
from harness import Bar, Row

from opkiln import io

if TYPE_CHECKING:
    from collections.abc import Callable

AFTER = "async_io, then a copy"


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--directory", help="where the files are made; the fewest others use it")
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU that torch can use", file=sys.stderr)
        return 1
    for each in io.device_engines():
        print(f"{each.name}: {'can be used' if each.usable else each.why}")
    engines = [each.name for each in io.device_engines() if each.usable]
    size, rows = options.mebibytes << 20, []
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        for work in (reads, writes, loads):
            if options.only in work.__name__:
                rows += work(Path(name), size, engines, options.turns)
    bars = [Bar(f"read {size >> 20} MiB", "copies", AFTER, 1.0)] + [
        Bar(row.work, "io.load", row.who, 1.0) for row in rows if row.who == "torch.load"
    ]
    harness.report(rows, harness.copy_bandwidth("cuda"), options.out)
    found = harness.missed([b for b in bars if b.work in {r.work for r in rows}], rows, 1.0)
    print("\n".join(found) or "all bars are met")
    return 1 if found else 0


def reads(folder: Path, size: int, engines: list[str], turns: int) -> list[Row]:
    path = folder / "file"
    data, staged = _random(size), io.PinnedPool("cuda").take(size)
    room = torch.zeros_like(data)
    opened = {name: io.AsyncIO(name) for name in engines}
    opened["copies"].write(data, path).wait()

    def after() -> None:
        opened["copies"].read(staged, path).wait()
        room.copy_(staged)

    ways: dict[str, Callable[[], Any]] = {
        name: lambda each=each: each.read(room, path).wait()  # type: ignore[misc]
        for name, each in opened.items()
    }
    if "cufile" in opened:
        known = torch.zeros_like(data)
        opened["cufile"].register(known)
        ways["cufile, registered"] = lambda: opened["cufile"].read(known, path).wait()
    rows = _rows(f"read {size >> 20} MiB", size, {**ways, AFTER: after}, path, turns)
    assert torch.equal(room, data)
    _tell(opened)
    return rows


def writes(folder: Path, size: int, engines: list[str], turns: int) -> list[Row]:
    path = folder / "written"
    data, staged = _random(size), io.PinnedPool("cuda").take(size)
    opened = {name: io.AsyncIO(name) for name in engines}

    def after() -> None:
        staged.copy_(data)
        opened["copies"].write(staged, path).wait()

    ways: dict[str, Callable[[], Any]] = {
        name: lambda each=each: each.write(data, path).wait()  # type: ignore[misc]
        for name, each in opened.items()
    }
    opened["copies"].write(data, path).wait()
    rows = _rows(f"write {size >> 20} MiB", size, {**ways, AFTER: after}, path, turns)
    room = torch.zeros_like(data)
    opened["copies"].read(room, path).wait()
    assert torch.equal(room, data)
    _tell(opened)
    return rows


def loads(folder: Path, size: int, _: list[str], turns: int) -> list[Row]:
    tensors = {f"layer.{i}": torch.randn(size // 16 // 4, device="cuda") for i in range(16)}
    ours, torchs = folder / "a.safetensors", folder / "a.pt"
    io.save(tensors, ours)
    torch.save(tensors, torchs)
    rows = _rows(
        f"load {size >> 20} MiB",
        size,
        {"io.load": lambda: io.load(ours, device="cuda")},
        ours,
        turns,
    )
    rows += _rows(
        f"load {size >> 20} MiB", size,
        {"torch.load": lambda: torch.load(torchs, map_location="cuda")}, torchs, turns,
    )  # fmt: skip
    back = io.load(ours, device="cuda")
    assert all(torch.equal(back[name], each) for name, each in tensors.items())
    return rows


def _random(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")


def _rows(
    work: str, size: int, ways: dict[str, Callable[[], Any]], path: Path, turns: int
) -> list[Row]:
    seconds: dict[str, list[float]] = {who: [] for who in ways}
    for turn in range(turns + 1):
        for who in random.sample(list(ways), len(ways)):
            _forget(path)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            ways[who]()
            torch.cuda.synchronize()
            if turn > 0:
                seconds[who].append(time.perf_counter() - begin)
    return [Row(work, who, size, 1000 * median(found)) for who, found in seconds.items()]


def _forget(path: Path) -> None:
    """Nothing of the file is in the page cache any more."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _tell(opened: dict[str, io.AsyncIO]) -> None:
    for name, each in opened.items():
        print(f"{name}: {each.how()}")
        each.close()


if __name__ == "__main__":
    sys.exit(main())
