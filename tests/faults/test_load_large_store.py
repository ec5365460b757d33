"""A store of a hundred thousand entries: a look-up costs what it costs in an empty one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import large_store
import pytest
from loaders import leaves, let_rest, returning, write
from sample import child, known
from sample.child import SOURCE
from sample.tracing import calls, strace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fault_rows import Cases

# Bytes of memory that a command may take; and how many more one that names entries: a few, and so
# many for each.
MOST = 64 << 20
MORE, EACH = 2 << 20, 900

SEARCH = """
import os, sys
import opkiln
from opkiln.base import digest
digest._SETTLED_NS = 20_000_000
def mark(name):
    try:
        os.rmdir(name)
    except OSError:
        pass
mark("/begin-of-load")
opkiln.load("op", [sys.argv[1]], is_python_module=False, abi="none")
mark("/end-of-load")
"""

COMMAND = """
import json, re, sys
from opkiln.cli.main import main
sys.argv = ["opkiln", "cache", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
# Not getrusage's: that counts what the process was before it became this program, the test run.
status = open("/proc/self/status").read()
print(json.dumps(int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])), file=sys.stderr)
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="opkiln-faults-", dir=large_store.roomy(tmp_path)))
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(made / "cache"))
    yield known.make_store(made / "cache")
    shutil.rmtree(made)


def looked(source: Path, store: Path, how: str, log: Path) -> Counter[str]:
    """The system calls of a load: by a ``receipt``, or by a ``search`` where there is none."""
    receipts, aside = store / "v1" / "receipts", store.parent / "receipts"
    if how == "search":
        receipts.rename(aside)
    child.run(SEARCH, str(source), prefix=strace(log, "all"))
    if how == "search":
        shutil.rmtree(receipts, ignore_errors=True)  # those that full searches have left
        aside.rename(receipts)
    names = [(call.name, call.path) for call in calls(log)]
    first, last = [at for at, (_, path) in enumerate(names) if path.endswith("-of-load")]
    counted = Counter(name for name, _ in names[first:last])
    for name in ("brk", "mmap", "munmap", "mremap", "madvise", "futex"):
        del counted[name]  # of the allocator, which goes by addresses
    return counted


def command(*words: str) -> tuple[str, list[int], int]:
    """(what it said, the numbers of its lines of progress, its peak memory in bytes)."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *lines, memory = done.stderr.splitlines()
    numbers = [int(line.split()[0]) for line in lines if re.fullmatch(r"\d+ entries .*", line)]
    return done.stdout, numbers, json.loads(memory) * 1024


def test_look_ups_stay_as_they_are_and_commands_show_progress_in_little_memory(
    tmp_path: Path, store: Path, cases: Cases, note: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = write(tmp_path / "src" / "op.cpp", returning(5))
    let_rest()
    child.run(SEARCH, str(source))
    looked(source, store, "search", tmp_path / "log")  # so that all bytecode is there
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    before = {how: looked(source, store, how, tmp_path / "log") for how in ("search", "receipt")}
    assert before["receipt"].total() < before["search"].total()
    (op,), (built,) = leaves(store), leaves(store, "objects")
    count = cases.count(100_000, one_in=20)
    large_store.fill(store / "v1", op, built, count)
    for how, counted in before.items():
        after = looked(source, store, how, tmp_path / "log")
        assert after == counted, f"{how}: {after - counted} more, {counted - after} fewer"
        note(
            f"{count} entries: a hit by {how} makes {counted.total()} system calls, as with one "
            "entry (imports of a new process included)"
        )

    said, progress, memory = command("verify")
    assert f"{count + 2} entries checked, 0 damaged" in said
    assert progress == list(range(5000, count + 1, 5000))
    assert memory < MOST
    note(f"{count} entries: verify takes {memory >> 20} MiB")

    said, progress, memory = command("gc")
    assert "0 entries removed" in said
    assert progress[: count // 5000] == list(range(5000, count + 1, 5000))
    assert memory < MOST
    note(f"{count} entries: gc takes {memory >> 20} MiB where it removes nothing")

    idle = memory
    said, progress, memory = command("gc", "--max-size", "1M", "--now")
    (removed,) = re.findall(r"(\d+) entries removed", said)
    assert int(removed) > 0.9 * count
    assert len(progress) >= 2 * (int(removed) // 5000)
    assert memory < idle + MORE + EACH * count
    note(f"{count} entries: gc takes {memory >> 20} MiB where it removes {removed}")
    assert "0 damaged" in command("verify")[0]
