"""A day's churn in minutes: writers that never stop, a cap that is always felt, readers all along.

Entries are published as builds publish them, without the compiles; their sizes vary as those of
real ops do. The collector runs as `opkiln cache gc --now` would, again and again.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import large_store
import pytest
from sample import child

from opkiln.store import gc
from opkiln.store.inventory import entries, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fault_rows import Cases

pytestmark = pytest.mark.timed

WRITERS = 4
CAP = 1 << 20
# A day of a busy shared home: a new entry every four seconds.
A_DAY = 21_600

# Publishes leaves that verify, each under a name of its own, and reads some that others published.
WRITER = """
import hashlib, json, os, random, sys
from opkiln.base.digest import sha256_file
from opkiln.store import entry, inventory, publish
from opkiln.machine.facts import Hasher
from opkiln.store.key import deps_key
root, stage, number, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
chance = random.Random(number)
published = read = bad = 0
recent = []
for turn in range(count):
    name = hashlib.sha256(f"{number} {turn}".encode()).hexdigest()[:40]
    leaf = os.path.join(stage, name)
    os.mkdir(leaf)
    with open(os.path.join(leaf, "op.so"), "wb") as file:
        file.write(chance.randbytes(chance.randrange(1000, 40000)))
    deps = {"own": [["src", name, "0" * 64]], "others": ""}
    manifest = {"schema": entry.SCHEMA, "payload": "op.so", "deps": deps, "kind": "object",
                "source": name, "size": os.stat(os.path.join(leaf, "op.so")).st_size,
                "sha256": sha256_file(os.path.join(leaf, "op.so"))}
    files = {entry.MANIFEST: entry.write_manifest(manifest),
             entry.SIDECAR: entry.write_manifest({"schema": entry.SCHEMA}), entry.LOG: b""}
    for file, data in files.items():
        with open(os.path.join(leaf, file), "wb") as out:
            out.write(data)
    key = deps_key(deps)
    relative = f"objects/{name[:2]}/{name}/{key}"
    final = publish.publish(leaf, root, relative)
    publish.remove(leaf)
    published += 1
    recent.append(final)
    found = entry.examine(chance.choice(recent[-20:]), {}, Hasher(), listed=False, whole=False,
                          own=False)
    read += isinstance(found, entry.Leaf)
    bad += isinstance(found, entry.Refused) and "missing" not in found.reason
print(json.dumps([published, read, bad]))
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="opkiln-faults-", dir=large_store.roomy(tmp_path)))
    yield made
    shutil.rmtree(made)


def test_a_days_churn_stays_within_its_cap_and_serves_nothing_bad(
    store: Path, cases: Cases, note: Callable[[str], None]
) -> None:
    root, stage = store / "v1", store / "stage"
    root.mkdir(0o700)
    stage.mkdir()
    count = cases.count(A_DAY, one_in=20) // WRITERS
    writers = [
        child.start(WRITER, str(root), str(stage), str(number), str(count))
        for number in range(WRITERS)
    ]
    runs = removed = most = 0
    began = time.monotonic()
    while any(writer.poll() is None for writer in writers):
        done = gc.collect(str(root), CAP, now=True)
        runs, removed, most = runs + 1, removed + len(done.removed), max(most, done.after)
        assert done.after <= CAP
        assert time.monotonic() - began < 900, "the writers hang"
        time.sleep(0.02)
    answers = []
    for writer in writers:
        ended = child.finish(writer)
        assert ended.returncode == 0, ended.stderr
        answers.append(json.loads(ended.stdout))
    published, read, bad = (sum(column) for column in zip(*answers, strict=True))
    assert (published, bad) == (WRITERS * count, 0)
    assert read
    final = gc.collect(str(root), CAP, now=True)
    assert final.after <= CAP
    removed += len(final.removed)
    assert removed + len(list(entries(str(root)))) == published
    assert [fault for _, fault in verify(str(root)) if fault] == []
    assert list((root / "staging").iterdir()) == []
    assert len(os.listdir(root / "objects")) <= len(list(entries(str(root))))
    note(
        f"{published} entries published by {WRITERS} writers, {removed} collected in {runs} runs, "
        f"{read} read back good, 0 bad; never over {CAP >> 20} MiB after a run"
    )
