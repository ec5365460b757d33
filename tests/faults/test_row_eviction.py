"""Row 27: a collector takes nothing that is in use, and sweeps what the dead left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from loaders import Loader, leaves, returning, write
from sample import child

from opkiln.store import gc
from opkiln.store.inventory import verify

if TYPE_CHECKING:
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(27), pytest.mark.timed]

WRITERS = {True: 8, False: 3}  # by whether all cases are tried

# Builds ops, one after the other, and keeps the last few in use: each must stay in the store for
# as long as it is loaded here. (What is not loaded any more may go.)
WRITER = """
import _ctypes, json, os, sys, time, warnings
import opkiln
from opkiln.loading import loader
directory, number, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
warnings.simplefilter("error")
lost, wrong, loads, held = [], 0, 0, []
def look():
    for path, _ in held:
        # Out of its place for a moment, while a collector makes sure of it, is not lost.
        deadline = time.monotonic() + 10
        while not (there := os.path.exists(path)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not there:
            lost.append(path)
for turn in range(rounds):
    value = number * 1000 + turn % 5
    source = os.path.join(directory, f"op{value}.cpp")
    if not os.path.exists(source):
        with open(source, "w") as file:
            file.write(f'extern "C" int value() {{ return {value}; }}')
    name = f"op{value}"
    # Dropped from this process's memory, so that it is looked for in the store again.
    loader.here.reset()
    library = opkiln.load(name, [source], is_python_module=False, abi="none")
    loads += 1
    wrong += library.value() != value
    path = loader.here.ops["jit", name, "cpu"].loaded.artifact.path
    held.append((path, library))
    look()
    while len(held) > 2:
        _, old = held.pop(0)
        _ctypes.dlclose(old._handle)
    time.sleep(0.002 * (number % 3))
    look()
print(json.dumps({"lost": lost, "wrong": wrong, "loads": loads}), flush=True)
"""

COLLECTOR = """
import os, sys
from opkiln.store import gc
removed = runs = 0
print("ready", flush=True)
while True:
    done = gc.collect(sys.argv[1], int(sys.argv[2]), now=True)
    removed, runs = removed + len(done.removed), runs + 1
    with open(sys.argv[3] + ".new", "w") as file:
        file.write(f"{removed} {runs} {done.in_use}")
    os.replace(sys.argv[3] + ".new", sys.argv[3])  # it may be killed at any moment
"""


def test_writers_with_a_small_cap_lose_nothing_that_they_have_loaded(
    tmp_path: Path, cache: Path, scratch: Path, cases: Cases
) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    with Loader() as process:  # the store is there
        assert process.load("warm", write(sources / "warm.cpp", returning(1))).value == 1
    root, note = cache / "v1", tmp_path / "collected"
    collector = child.start(COLLECTOR, str(root), "60000", str(note))
    try:
        assert collector.stdout is not None
        assert collector.stdout.readline() == "ready\n"
        rounds, count = cases.count(100), WRITERS[cases.whole]
        answers = []
        for _ in range(5):  # on a busy machine the collector may come too late for the first ones
            writers = [
                child.start(WRITER, str(sources), str(number), str(rounds))
                for number in range(count)
            ]
            for writer in writers:
                done = child.finish(writer, timeout=900)
                assert done.returncode == 0, done.stderr
                answers.append(json.loads(done.stdout))
            if note.exists() and int(note.read_text().split()[0]) > count:
                break
        assert collector.poll() is None
    finally:
        collector.kill()
        collector.communicate()
    cases.tried(sum(answer["loads"] for answer in answers))
    assert [answer["lost"] for answer in answers] == [[]] * len(answers)
    assert sum(answer["wrong"] for answer in answers) == 0
    removed, runs, _ = map(int, note.read_text().split())
    assert removed > count, f"{removed} removed in {runs} runs: the cap was never felt"
    assert [fault for _, fault in verify(str(root)) if fault] == []
    final = gc.collect(str(root), 60_000, now=True)
    assert final.after <= 60_000
    assert list(scratch.iterdir()) == []


READER = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
print(library.value(), flush=True)
sys.stdin.read()
"""


def test_an_entry_that_is_opened_while_it_is_collected_stays(tmp_path: Path, cache: Path) -> None:
    """The moment between the look at who uses what and the removal: somebody opens it just then."""
    source = write(tmp_path / "op.cpp", returning(27))
    with Loader() as process:
        assert process.load("op", source).value == 27
    (leaf,) = leaves(cache)
    look, opened = gc.processes, []

    def look_then_open() -> gc.Processes:
        found = look()
        if leaf.exists() and not opened:
            command = [sys.executable, "-S", "-c", READER, str(leaf / "op.so")]
            opened.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert opened[0].stdout is not None
            assert opened[0].stdout.readline() == b"27\n"
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "processes", look_then_open)
        try:
            done = gc.collect(str(cache / "v1"), 0, now=True)
            assert leaf / "op.so" in set(leaf.iterdir())
            assert done.in_use == 1
        finally:
            for each in opened:
                each.communicate()
    assert gc.collect(str(cache / "v1"), 0, now=True).after == 0


def test_what_dead_publishers_left_is_swept_after_an_hour(tmp_path: Path, cache: Path) -> None:
    source = write(tmp_path / "op.cpp", returning(27))
    with Loader() as process:
        assert process.load("op", source).value == 27
    staging = cache / "v1" / "staging"
    ages = {"old": 3700, "older": 86400 * 3, "young": 3500}
    for name, age in ages.items():
        write(staging / name / "op.so", "half an entry")
        for path in (staging / name / "op.so", staging / name):
            os.utime(path, (time.time() - age, time.time() - age))
    done = gc.collect(str(cache / "v1"), 1 << 30)
    assert {os.path.basename(path) for path in done.swept} == {"old", "older"}
    assert [path.name for path in staging.iterdir()] == ["young"]
    assert len(leaves(cache)) == 1


def test_a_publisher_killed_at_work_leaves_only_what_is_swept(
    tmp_path: Path, cache: Path, scratch: Path, cases: Cases
) -> None:
    """Killed in the middle of a publish: a copy on a disk that writes slowly."""
    slow = (
        "import os, sys, time\n"
        "from opkiln.store import publish\n"
        "copy = publish._copy\n"
        "def slowly(a, b):\n    copy(a, b); print(b, flush=True); time.sleep(30)\n"
        "publish._copy = slowly\n"
        "publish.publish(sys.argv[1], sys.argv[2], 'ops/d/o/i/b/k')\n"
    )
    root = cache / "v1"
    for number in cases(20):
        leaf = tmp_path / f"leaf{number}"
        for name in ("manifest.json", "op.so"):
            write(leaf / name, "x" * 100)
        publisher = child.start(slow, str(leaf), str(root))
        assert publisher.stdout is not None
        publisher.stdout.readline()
        publisher.kill()
        publisher.communicate()
    assert not (root / "ops").exists()
    left = list((root / "staging").iterdir())
    assert len(left) == cases.number
    for path in left:
        for each in (*path.iterdir(), path):
            os.utime(each, (time.time() - 4000, time.time() - 4000))
    gc.collect(str(root), 1 << 30)
    assert list((root / "staging").iterdir()) == []
