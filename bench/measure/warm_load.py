"""``warm-load``: import and load of a finished op, in fresh processes that have torch.

The variants take turns, so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from children import Caches, Workspace, load
from measured import Bar, Failure, Row, Sample

from measure import Options

NAME = "warm-load"
OPKILN, FLOOR = "opkiln_cpu_adam", "load_library"
PEERS = {
    OPKILN: "opkiln",
    FLOOR: "floor: load_library",
    "tvm_ffi_inline": "tvm-ffi",
    "tvm_ffi_prebuilt": "tvm-ffi load_module",
    "cpp_extension": "torch cpp_extension",
    "deepspeed_cpu_adam": "DeepSpeed",
}
LOADED = {
    OPKILN: "cpu_adam",
    FLOOR: "the same file",
    "tvm_ffi_inline": "one line, load_inline",
    "tvm_ffi_prebuilt": "one line, by path",
    "cpp_extension": "one line, load",
    "deepspeed_cpu_adam": "cpu_adam",
}
BARS = {"cpp_extension": 1 / 10, "tvm_ffi_inline": 1.0}
OVERHEAD_MS = 2.0
# DeepSpeed takes seconds where the others take milliseconds.
SLOW = {"deepspeed_cpu_adam": 3}

Times = dict[str, list[dict[str, float]]]


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """Import, load and both together of every variant, and opkiln's ratios to each."""
    times, failures = _measure(options, workspace)
    table: list[Row] = []
    for peer, who in PEERS.items():
        if peer in failures:
            table.append(Row(NAME, who, LOADED[peer], None, failures[peer]))
            continue
        table += _variant(peer, who, times)
    if OPKILN in times and FLOOR in times:
        table += overhead(NAME, times, loaded_library(workspace.warm))
    return table


def _measure(options: Options, workspace: Workspace) -> tuple[Times, dict[str, str]]:
    """Every repeat of every variant that works, and why the others do not."""
    failures: dict[str, str] = {}
    for peer in PEERS:
        try:
            if peer not in (FLOOR, "tvm_ffi_prebuilt"):  # these two load what another one built
                workspace.first_load(peer)
            load(peer, workspace.warm)  # once more: bytecode written, pages cached
        except Failure as failure:
            failures[peer] = str(failure)
    repeats = options.times(11, 3)
    times: Times = {peer: [] for peer in PEERS if peer not in failures}
    for turn in range(repeats):
        for peer, taken in times.items():
            if peer in failures or turn >= SLOW.get(peer, repeats):
                continue
            try:
                taken.append(load(peer, workspace.warm))
            except Failure as failure:
                failures[peer] = str(failure)
    return {peer: taken for peer, taken in times.items() if peer not in failures}, failures


def sample_of(taken: list[dict[str, float]], *parts: str) -> Sample:
    return Sample(tuple(sum(one[part] for part in parts) * 1e3 for one in taken), "ms")


def _variant(peer: str, who: str, times: Times) -> list[Row]:
    together = sample_of(times[peer], "import", "load")
    ratio, bar = None, None
    if peer != OPKILN and OPKILN in times:
        ratio = sample_of(times[OPKILN], "import", "load").median / together.median
        if peer in BARS:
            text = "<= 1/10" if BARS[peer] < 1 else "<= 1"
            bar = Bar(BARS[peer], ratio, text)
    return [
        Row(NAME, who, "import", sample_of(times[peer], "import")),
        Row(NAME, who, f"load ({LOADED[peer]})", sample_of(times[peer], "load")),
        Row(NAME, who, "together", together, ratio=ratio, bar=bar),
    ]


def beyond(times: Times, *parts: str) -> Sample:
    """What opkiln takes beyond the bare load, turn by turn."""
    samples = [sample_of(times[peer], *parts) for peer in (OPKILN, FLOOR)]
    pairs = zip(*(sample.values for sample in samples), strict=True)
    return Sample(tuple(mine - bare for mine, bare in pairs), "ms")


def overhead(measure: str, times: Times, library: Path) -> list[Row]:
    """opkiln's load beyond the bare one, against what verifying the file may cost.

    The second row has opkiln's own modules in it too: what a program pays that says nothing but
    ``opkiln.get_builder("cpu_adam").load()``, whose first part imports them.
    """
    sample = beyond(times, "load")
    size = library.stat().st_size
    rate = sha256_rate()
    limit = OVERHEAD_MS + size / rate * 1e3
    return [
        Row(
            measure,
            "opkiln",
            "load beyond load_library",
            sample,
            f"{size / 1e3:.0f} kB at SHA-256's {rate / 1e9:.2f} GB/s",
            bar=Bar(limit, sample.median, f"<= {limit:.2f} ms"),
            details={"library_bytes": size, "sha256_bytes_per_second": rate},
        ),
        Row(measure, "opkiln", "the same with its imports", beyond(times, "import", "load")),
    ]


def loaded_library(caches: Caches) -> Path:
    """The file that opkiln loaded last with these caches."""
    return Path((caches.root / "build" / "cpu_adam.path").read_text())


def sha256_rate() -> float:
    """Bytes a second, the median of five."""
    block = bytes(16 << 20)
    rates = []
    for _ in range(5):
        begin = time.perf_counter()
        hashlib.sha256(block).digest()
        rates.append(len(block) / (time.perf_counter() - begin))
    return sorted(rates)[2]
