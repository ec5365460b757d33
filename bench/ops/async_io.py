"""Reads and writes of files beside dd, and ``io.load`` beside torch.load and safetensors.

    python bench/ops/async_io.py [--directory DIR] [--gigabytes 2] [--only WORD] [--out FILE]

All take turns in one process. ``dd`` moves the same bytes with direct flags, and counts by the time
that it prints itself; of its block sizes the fastest counts. Loads begin with nothing of the file
in the page cache, and every byte is added up. safetensors is measured where it is installed. A bar
that is missed makes the exit code 1.
"""

from __future__ import annotations

import gc
import os
import random
import re
import subprocess
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

SIZES = (64 << 20, 256 << 20)
TURNS = 7
DD_BLOCKS = ("1M", "4M", "16M")
DD = "dd, direct"


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--directory", help="where the files are made; the fewest others use it")
    parser.add_argument("--gigabytes", type=float, default=2)
    options = parser.parse_args()
    engines = [each.name for each in io.engines() if each.usable]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        for size in SIZES:
            for name_of_work, work in (("read", reads), ("write", writes)):
                if options.only in f"{name_of_work} {size >> 20} MiB":
                    rows += work(folder, size, engines)
        if options.only in "load":
            rows += loads(folder, int(options.gigabytes * 1e9))
    if not rows:
        parser.error(f"no work has {options.only!r} in its name")
    bars = [
        Bar(row.work, row.who, DD, 0.9) for row in rows if row.who in engines
    ] + [
        Bar(row.work, "io.load, read", DD, 0.9) for row in rows if row.who == "io.load, read"
    ] + [
        Bar(row.work, "io.load", row.who, 1.0)
        for row in rows if row.work.startswith("load") and row.who in ("torch.load", "safetensors")
    ]  # fmt: skip
    harness.report(rows, harness.copy_bandwidth("cpu"), options.out)
    found = harness.missed(bars, rows, 1.0)
    print("\n".join(found) or "all bars are met")
    return 1 if found else 0


def reads(folder: Path, size: int, engines: list[str]) -> list[Row]:
    path = folder / "file"
    _fill(path, size)
    room = io.PinnedPool("cpu", lock=False).take(size).zero_()
    opened = {name: io.AsyncIO(name) for name in engines}
    turns: dict[str, Callable[[], float]] = {
        name: lambda each=each: _timed(lambda: each.read(room, path).wait())  # type: ignore[misc]
        for name, each in opened.items()
    }
    for block in DD_BLOCKS:
        command = [f"if={path}", "of=/dev/null", f"bs={block}", "iflag=direct"]
        turns[f"{DD} {block}"] = lambda command=command: _dd(command)  # type: ignore[misc]
    return _rows(f"read {size >> 20} MiB", size, turns)


def writes(folder: Path, size: int, engines: list[str]) -> list[Row]:
    path, source = folder / "written", Path("/dev/shm") / f"opkiln-{os.getpid()}"
    data = io.PinnedPool("cpu", lock=False).take(size).random_()
    _fill(source, size)
    opened = {name: io.AsyncIO(name) for name in engines}

    def new(write: Callable[[], float]) -> Callable[[], float]:
        def turn() -> float:
            path.unlink(missing_ok=True)
            return write()

        return turn

    turns = {
        name: new(lambda each=each: _timed(lambda: each.write(data, path).wait()))  # type: ignore[misc]
        for name, each in opened.items()
    }
    for block in DD_BLOCKS:
        command = [f"if={source}", f"of={path}", f"bs={block}", "oflag=direct"]
        turns[f"{DD} {block}"] = new(lambda command=command: _dd(command))  # type: ignore[misc]
    try:
        return _rows(f"write {size >> 20} MiB", size, turns)
    finally:
        source.unlink()


def loads(folder: Path, size: int) -> list[Row]:
    tensors = {f"layer.{i}": torch.randn(size // 64 // 4) for i in range(64)}
    ours, torchs = folder / "a.safetensors", folder / "a.pt"
    io.save(tensors, ours)
    torch.save(tensors, torchs)
    del tensors
    gc.collect()
    turns: dict[str, Callable[[], float]] = {
        "io.load": lambda: _cold(ours, lambda: _consumed(io.load(ours))),
        "io.load, read": lambda: _cold(ours, lambda: io.load(ours)),
        "torch.load": lambda: _cold(torchs, lambda: _consumed(torch.load(torchs))),
        "torch.load, mapped": lambda: _cold(
            torchs, lambda: _consumed(torch.load(torchs, mmap=True))
        ),
    }
    try:
        from safetensors.torch import load_file
    except ImportError:
        print("safetensors is not installed", file=sys.stderr)
    else:
        turns["safetensors"] = lambda: _cold(ours, lambda: _consumed(load_file(ours)))
    for block in DD_BLOCKS:
        command = [f"if={ours}", "of=/dev/null", f"bs={block}", "iflag=direct"]
        turns[f"{DD} {block}"] = lambda command=command: _dd(command)  # type: ignore[misc]
    return _rows(f"load {size / 1e9:g} GB", ours.stat().st_size, turns, turns_each=3)


def _rows(
    work: str, size: int, turns: dict[str, Callable[[], float]], turns_each: int = TURNS
) -> list[Row]:
    seconds: dict[str, list[float]] = {who: [] for who in turns}
    for _ in range(turns_each):
        for who in random.sample(list(turns), len(turns)):
            seconds[who].append(turns[who]())
    rows = [
        Row(work, who, size, 1000 * median(found))
        for who, found in seconds.items()
        if not who.startswith(DD)
    ]
    fastest = min(median(found) for who, found in seconds.items() if who.startswith(DD))
    return [*rows, Row(work, DD, size, 1000 * fastest)]


def _consumed(tensors: dict[str, Any]) -> float:
    return sum(float(each.sum()) for each in tensors.values())


def _cold(path: Path, use: Callable[[], Any]) -> float:
    """Seconds that it takes, with nothing of the file in the page cache."""
    gc.collect()
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return _timed(use)


def _timed(use: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    use()
    return time.perf_counter() - begin


def _dd(arguments: list[str]) -> float:
    """The seconds that dd counted itself: starting the program is not in them."""
    done = subprocess.run(
        ["dd", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    found = re.search(r"copied, ([\d.e+-]+) s", done.stderr)
    assert found, done.stderr
    return float(found[1])


def _fill(path: Path, size: int) -> None:
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for _ in range(0, size, 1 << 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    sys.exit(main())
