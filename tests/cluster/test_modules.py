"""Modules of other JITs in a job: one rank compiles, the stores of the others get what it made."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from sample import child, command, known

import opkiln
from opkiln.errors import StoreError, UnknownOp
from opkiln.loading import recording
from opkiln.settings import override

if TYPE_CHECKING:
    from pathlib import Path

BUILD_FILE = """
rule compile
  command = g++ -MD -MF $out.d -fPIC -c $in -o $out
rule link
  command = g++ -shared $in -o $out
build main.o: compile {directory}/main.cpp
build other.o: compile {directory}/other.cpp
build hello.so: link main.o other.o
"""
# What a host does: it writes sources and a build file, and has it built.
HOST = """
import json, os, sys, time
from opkiln.building import kept
from opkiln.compat import jits
from opkiln.run import events

def build(directory):
    os.makedirs(directory)
    texts = {"main.cpp": '#include "value.h"\\nint value() { return VALUE; }\\n',
             "other.cpp": "int other() { return 2; }\\n", "value.h": "#define VALUE 1\\n",
             "build.ninja": FILE.replace("{directory}", directory)}
    for name, text in texts.items():
        with open(os.path.join(directory, name), "w") as out:
            out.write(text)
    time.sleep(2 * kept.TICK_NS / 1e9)  # or the header might be older or newer than what was read
    compiled = []
    def watch(event):
        if event.kind == events.STEP_END and not event.data["cached"]:
            compiled.append(event.data["label"])
    with events.listen(watch):
        assert jits.serve("tvm-ffi", f"{directory}/build.ninja", directory) is not None
    assert os.path.exists(f"{directory}/hello.so")
    return compiled
"""
RANK = """
import opkiln
rank, shared, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
before = []
with events.listen(lambda each: before.append(each.data.get("cached"))):
    (choice,) = opkiln.ensure(["tvm-ffi:hello"], store=shared, rank=rank, world_size=3, lease=20.0)
print(json.dumps({"op": choice.op, "digest": choice.digest, "how": choice.how,
                  "ran": before.count(False), "compiled": build(directory)}))
"""


class Machine:
    """A process with a store of its own."""

    def __init__(self, base: Path, name: str, record: Path) -> None:
        self.directory = base / name
        self.environment = {
            "OPKILN_CACHE_DIR": str(known.make_store(base / f"store-{name}")),
            "OPKILN_RECORD": str(record),
        }

    def start(self, code: str, *arguments: object) -> Any:
        told = f"FILE = {BUILD_FILE!r}\n{HOST}\nsys.argv[1:] = {[*map(str, arguments)]!r}\n{code}"
        return child.start(told, env=self.environment)


def said(started: Any) -> Any:
    done = child.finish(started)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """What a run noted."""
    file = tmp_path / "used.jsonl"
    first = Machine(tmp_path, "first", file)
    # The build's name is that of its directory, as tvm-ffi names it.
    code = "print(json.dumps(build(sys.argv[1])))"
    assert len(said(first.start(code, tmp_path / "one" / "hello"))) == 3
    return file


def test_a_record_has_the_commands_and_the_sources_that_the_host_wrote(record: Path) -> None:
    (module,) = recording.read_modules(str(record)).values()
    assert module.name == "tvm-ffi:hello"
    assert [len(level) for level in module.levels] == [2, 1]
    assert sorted(path.rpartition("/")[2] for path in module.files) == [
        "main.cpp", "other.cpp", "value.h",
    ]  # fmt: skip
    assert "one/hello" not in record.read_text()
    assert recording.read(str(record)) == []


@pytest.mark.timed
def test_one_rank_of_three_compiles_and_the_stores_of_all_have_it(
    tmp_path: Path, record: Path
) -> None:
    machines = [Machine(tmp_path, f"rank{rank}", record) for rank in range(3)]
    started = [
        each.start(RANK, rank, tmp_path / "shared", tmp_path / f"work{rank}" / "hello")
        for rank, each in enumerate(machines)
    ]
    ended = [said(each) for each in started]
    assert Counter(each["how"] for each in ended) == {"built": 1, "fetched": 2}, ended
    assert sorted(each["ran"] for each in ended) == [0, 0, 3]
    assert len({each["digest"] for each in ended}) == 1
    assert [each["compiled"] for each in ended] == [[], [], []]  # the hosts found all of it


def test_a_module_that_does_not_compile_is_an_error_on_all_ranks(
    tmp_path: Path, record: Path
) -> None:
    record.write_text(record.read_text().replace("VALUE; }", "wrong; }"))
    machines = [Machine(tmp_path, f"rank{rank}", record) for rank in range(2)]
    code = RANK.replace("world_size=3", "world_size=2")
    started = [
        each.start(code, rank, tmp_path / "shared", tmp_path / "unused")
        for rank, each in enumerate(machines)
    ]
    for done in map(child.finish, started):
        assert done.returncode == 1
        assert "tvm-ffi:hello cannot be built in this job" in done.stderr
        assert "wrong" in done.stderr


def test_opkiln_build_takes_the_record(record: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path, "other", record)
    for status in ("built", "cached"):
        done = command.run("build", "--recorded", str(record), **machine.environment)
        assert done.returncode == 0, done.stderr
        assert status in next(line for line in done.stdout.splitlines() if "tvm-ffi:hello" in line)
    code = "print(json.dumps(build(sys.argv[1])))"
    assert said(machine.start(code, tmp_path / "again" / "hello")) == []


def test_a_module_that_is_not_recorded_is_an_error_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(UnknownOp, match="flashinfer:norm is not recorded") as raised:
        opkiln.ensure(["flashinfer:norm"], store=str(tmp_path / "job"), rank=0, world_size=1)
    assert "opkiln run --record FILE" in raised.value.hint
    with override(record=str(tmp_path / "none")), pytest.raises(StoreError):
        opkiln.ensure(["flashinfer:norm"], store=str(tmp_path / "job"), rank=0, world_size=1)


@pytest.mark.parametrize("path", ["\0dir\0/../../out.c", "/etc/out.c"])
def test_a_record_that_would_write_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
    module = recording.RecordedModule("tvm-ffi", "x", 0, [[["a", "true", []]]], {path: "text"})
    with pytest.raises(StoreError, match="it names /"):
        module.restore(str(tmp_path / "stage"))
