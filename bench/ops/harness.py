"""What the benchmarks of the catalogue share: turns, medians, the copy's bandwidth, the table.

Needs torch and nothing else, so that it runs on a machine where nothing can be installed. Ratios of
one run mean something; figures of two runs side by side do not.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

WARM_UP = 3
BUSY_CYCLES = 8_000_000  # of a GPU's clock: about four milliseconds


class Row(NamedTuple):
    """One line of the table: ``bytes`` is what the work must read and write."""

    work: str
    who: str
    bytes: int
    ms: float
    host_ms: float | None = None  # until the call returned


class Bar(NamedTuple):
    """``ours`` in a work must be so many times as fast as ``beside``.

    With ``rates`` it is their bytes per second that are compared; ``beside`` nobody compares with
    the copy.
    """

    work: str
    ours: str
    beside: str | None
    least: float
    rates: bool = False


class Time(NamedTuple):
    """Medians, in milliseconds."""

    ms: float
    host_ms: float


def copy_bandwidth(device: torch.device | str) -> float:
    """Bytes per second of a copy within the device's memory, read and written bytes counted."""
    device = torch.device(device)
    size = (4 << 30) if device.type == "cuda" else (256 << 20)
    source = torch.ones(size // 4, device=device)  # written once, so that its pages are there
    target = torch.ones_like(source)
    ms = timed({"copy": lambda: target.copy_(source)}, device, 20)["copy"]
    return 2 * size / ms * 1e3


def timed(
    fns: Mapping[str, Callable[[], Any]], device: torch.device | str, repeats: int
) -> dict[str, float]:
    """The median time of each, in milliseconds; they take turns in a shuffled order.

    On the CPU it is the time of the call. On a GPU it is the time between two events around what
    the call enqueues, with the GPU kept busy until then: so the host's share is not in it, unless
    that is longer than a few milliseconds.
    """
    return {name: found.ms for name, found in measured(fns, device, repeats).items()}


def measured(
    fns: Mapping[str, Callable[[], Any]],
    device: torch.device | str,
    repeats: int,
    before: Callable[[str], Any] | None = None,
    *,
    idle: bool = False,
) -> dict[str, Time]:
    """As ``timed``, with the host's share. ``before(name)`` comes, untimed, before each turn.

    With ``idle`` a GPU has nothing to do when a call is made, so that its time is the whole, from
    the call until the GPU is done.
    """
    gpu = torch.device(device).type == "cuda"
    one_turn = (_whole_turn if idle else _gpu_turn) if gpu else _cpu_turn
    found: dict[str, list[Time]] = {name: [] for name in fns}
    order = random.Random(0)
    collecting = gc.isenabled()
    gc.disable()  # a collection among ten thousand tensors costs more than a step
    try:
        for turn in range(WARM_UP + repeats):
            for name in order.sample(list(fns), len(fns)):
                if before is not None:
                    before(name)
                taken = one_turn(fns[name])
                if turn >= WARM_UP:
                    found[name].append(taken)
    finally:
        if collecting:
            gc.enable()
    return {
        name: Time(median(t.ms for t in taken), median(t.host_ms for t in taken))
        for name, taken in found.items()
    }


def rotated(
    fns: Mapping[str, Sequence[Callable[[], Any]]],
    count: int,
    device: torch.device | str,
    repeats: int,
) -> dict[str, Time]:
    """As ``measured``, for one call. A turn is ``count`` calls, and goes on in the list where the
    last turn of the same name ended: with enough tensors in the list, no cache holds them."""
    turns = {name: _turn(itertools.cycle(calls), count) for name, calls in fns.items()}
    taken = measured(turns, device, repeats)
    return {name: Time(*(each / count for each in time)) for name, time in taken.items()}


def _turn(calls: Iterator[Callable[[], Any]], count: int) -> Callable[[], None]:
    def made() -> None:
        for _ in range(count):
            next(calls)()

    return made


def host_rows(fns: Mapping[str, Callable[[], Any]], device: torch.device | str) -> list[Row]:
    """The host's time for calls with little to do."""
    taken = rotated({name: [fn] for name, fn in fns.items()}, 100, device, 10)
    return [Row("host time of a call", name, 0, *time) for name, time in taken.items()]


def _gpu_turn(fn: Callable[[], Any]) -> Time:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    began = time.perf_counter()
    fn()
    host = time.perf_counter() - began
    end.record()
    end.synchronize()
    return Time(start.elapsed_time(end), host * 1e3)


def _whole_turn(fn: Callable[[], Any]) -> Time:
    torch.cuda.synchronize()
    began = time.perf_counter()
    fn()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    return Time((time.perf_counter() - began) * 1e3, host * 1e3)


def _cpu_turn(fn: Callable[[], Any]) -> Time:
    began = time.perf_counter()
    fn()
    taken = (time.perf_counter() - began) * 1e3
    return Time(taken, taken)


def report(
    rows: Sequence[Row],
    bandwidth: float,
    out: str | None = None,
    *,
    commit: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print the table; with ``out``, write ``{date, machine, commit, torch, bandwidth, rows}`` and
    ``more`` there."""
    head = machine.described()
    if commit:
        head["commit"] = commit
    print(f"\n{where()}; torch {torch.__version__}; copy {bandwidth / 1e9:.0f} GB/s")
    print(f"{'work':36} {'who':44} {'ms':>10} {'GB/s':>7} {'of copy':>8} {'host ms':>9}")
    for row in rows:
        host = "" if row.host_ms is None else f"{row.host_ms:9.4f}"
        print(
            f"{row.work:36} {row.who:44} {row.ms:10.4f} {_rate(row) / 1e9:7.0f} "
            f"{_rate(row) / bandwidth:8.1%} {host}",
            flush=True,
        )
    if out is not None:
        found = {
            "date": head["date"],
            "machine": where(),
            "commit": head["commit"],
            "torch": torch.__version__,
            "copy_gb_per_s": round(bandwidth / 1e9, 1),
            "rows": [
                {
                    **row._asdict(),
                    "gb_per_s": round(_rate(row) / 1e9, 1),
                    "of_copy": round(_rate(row) / bandwidth, 4),
                }
                for row in rows
            ],
            **(more or {}),
        }
        Path(out).write_text(json.dumps(found, indent=1) + "\n")


def missed(bars: Sequence[Bar], rows: Sequence[Row], bandwidth: float) -> list[str]:
    """Prints what came of the bars that were measured; gives those that were missed."""
    found = {(row.work, row.who): row for row in rows}
    out = []
    for bar in bars:
        ours = found.get((bar.work, bar.ours))
        other = None if bar.beside is None else found.get((bar.work, bar.beside))
        if ours is None or (bar.beside is not None and other is None):
            continue
        if other is None:
            ratio = _rate(ours) / bandwidth
        else:
            ratio = _rate(ours) / _rate(other) if bar.rates else other.ms / ours.ms
        text = f"{bar.work}: {bar.ours} {ratio:.3g} x {bar.beside or 'copy'}, bar {bar.least}"
        print(("ok      " if ratio >= bar.least else "MISSED  ") + text)
        if ratio < bar.least:
            out.append(text)
    return out


def _rate(row: Row) -> float:
    return row.bytes / row.ms * 1e3


def where() -> str:
    """The machine in words, nothing that identifies the host."""
    cpu = machine.described()["machine"]
    text = f"{cpu['cpu']}, {cpu['cores']} cores, {cpu['memory_gib']} GiB, {cpu['system']}"
    if torch.cuda.is_available():
        text = f"{torch.cuda.get_device_name()}, {text}"
    return f"{text}, Python {platform.python_version()}"


def options(description: str | None) -> argparse.Namespace:
    """``out`` and ``commit`` from the command line; ``only`` is a word that a work's name holds."""
    return parser(description).parse_args()


def parser(description: str | None) -> argparse.ArgumentParser:
    """What takes those, and a benchmark's own."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--out", metavar="FILE", help="write the figures there, as JSON")
    made.add_argument("--commit", metavar="SHA", help="of the sources; else git is asked")
    made.add_argument("--only", metavar="WORD", default="", help="works with this in their name")
    return made
