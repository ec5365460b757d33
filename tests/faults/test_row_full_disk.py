"""Row 7: a disk that is full leaves no part of an entry, and the message says which and how full.

Where the store cannot take an entry, the process uses a copy of its own; where nothing can be
staged, nothing is built.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import mounts
import pytest
from loaders import Answer, Compiler, Loader, leaves, returning, write
from sample.quiet import within

from opkiln.store.inventory import verify

if TYPE_CHECKING:
    from pathlib import Path

    from fault_rows import Cases

pytestmark = pytest.mark.row(7)

SIZES = range(4, 65, 4)  # kilobytes
ENOUGH = 8 << 10


@pytest.fixture
def places(tmp_path: Path, cache: Path, scratch: Path) -> dict[str, Path]:
    return {"store": cache, "scratch": scratch}


def sizes(cases: Cases, least: int) -> range:
    return SIZES[:: len(SIZES) // cases.count(len(SIZES), least)]


def whole(root: Path) -> int:
    """How many entries there are in a store, each with all its parts; nothing else is left."""
    found = list(verify(str(root / "v1")))
    assert [fault for _, fault in found if fault] == []
    staging = root / "v1" / "staging"
    assert not staging.exists() or list(staging.iterdir()) == []
    for top in ("logs", "failures", "receipts", "toolchains"):
        # What is written under another name first and then renamed ends so.
        assert all(path.suffix in (".json", ".log") for path in (root / "v1" / top).rglob("*.*"))
    return len(found)


# Full: what a text costs beyond a file is staged, and the next test is about that.
@pytest.mark.parametrize(
    "text", [False, pytest.param(True, marks=pytest.mark.full)], ids=["file", "inline"]
)
def test_a_store_that_is_full_costs_the_entry_and_not_the_load(
    text: bool, tmp_path: Path, places: dict[str, Path], cases: Cases
) -> None:
    source = write(tmp_path / "op.cpp", returning(7))
    refused = 0
    for kilobytes in sizes(cases, 1 if text else 2):
        cases.tried()
        prefix = mounts.small(places["store"], kilobytes)
        with Loader(prefix=prefix) as process:
            answer = load(process, source, text=text)
            assert answer.value == 7, answer
            store = mounts.inside(process.process.pid, places["store"])
            count = whole(store)
            if not answer.path.is_relative_to(places["store"]):
                refused += 1
                assert answer.path.is_relative_to(places["scratch"])
                assert leaves(store) == []
                assert_named(" ".join(answer.warnings), places["store"])
                mounts.grow(process.process.pid, places["store"], ENOUGH)
                assert load(process, source, text=text).value == 7
                assert whole(store) > count
                assert len(leaves(store)) == 1
        assert list(places["scratch"].iterdir()) == []
    assert refused


@pytest.mark.parametrize("text", [False, True], ids=["file", "inline"])
def test_a_scratch_directory_that_is_full_is_one_error_and_nothing_is_published(
    text: bool, tmp_path: Path, places: dict[str, Path], cases: Cases
) -> None:
    refused = 0
    for kilobytes in sizes(cases, 1 if text else 2):
        cases.tried()
        # Another text each time: what a larger directory had room for is in the store by now.
        source = write(tmp_path / "op.cpp", returning(kilobytes))
        prefix = mounts.small(places["scratch"], kilobytes)
        before = len(leaves(places["store"]))
        with Loader(prefix=prefix) as process:
            answer = load(process, source, text=text)
            staged = mounts.inside(process.process.pid, places["scratch"])
            if answer.error:
                refused += 1
                assert answer.error == "StoreError", answer
                assert_named(answer.text, places["scratch"])
                assert len(leaves(places["store"])) == before
                assert list(staged.iterdir()) == []
                mounts.grow(process.process.pid, places["scratch"], ENOUGH)
                answer = load(process, source, text=text)
            assert answer.value == kilobytes, answer
        whole(places["store"])
    assert refused


@pytest.mark.timed
def test_who_waits_for_a_builder_with_a_full_disk_builds_for_itself(
    tmp_path: Path, places: dict[str, Path], compiler: Compiler
) -> None:
    """It is the builder's own trouble, not something that follows from the sources."""
    source = write(tmp_path / "op.cpp", returning(7))
    warm = write(tmp_path / "warm.cpp", returning(1))
    with Loader(prefix=mounts.small(places["scratch"], 256)) as poor, Loader() as rich:
        assert [each.load("warm", warm).value for each in (poor, rich)] == [1, 1]
        full = mounts.inside(poor.process.pid, places["scratch"]) / "filler"
        full.write_bytes(bytes(248 << 10))
        compiler.take(0.5)
        begun = compiler.compiles
        poor.ask("op", source)
        assert within(30, lambda: compiler.compiles > begun)
        rich.ask("op", source)
        assert poor.answer().error == "StoreError"
        assert rich.answer().value == 7


def test_a_text_that_does_not_even_fit_as_a_file_is_the_same_error(places: dict[str, Path]) -> None:
    with Loader(prefix=mounts.small(places["scratch"], 4)) as process:
        answer = process.load("op", text=returning(7, "//" + "x" * 9000))
        assert answer.error == "StoreError"
        assert_named(answer.text, places["scratch"])


@pytest.mark.timed
def test_a_trace_that_does_not_fit_is_a_warning_and_the_op_is_loaded(
    tmp_path: Path, places: dict[str, Path]
) -> None:
    source, traces = write(tmp_path / "op.cpp", returning(7)), tmp_path / "traces"
    traces.mkdir()
    env = {"OPKILN_TRACE": str(traces / "trace.json")}
    with Loader(env, prefix=mounts.small(traces, 4)) as process:
        full = mounts.inside(process.process.pid, traces)
        assert within(30, full.is_mount)
        (full / "filler").write_bytes(bytes(4096))
        answer = process.load("op", source)
        assert answer.value == 7, answer
        said = f"the trace '{traces}/trace.json' was not written: No space left on device"
        assert answer.warnings == [said]
        assert [path.name for path in full.iterdir()] == ["filler"]


def load(process: Loader, source: Path, *, text: bool) -> Answer:
    return process.load("op", None if text else source, source.read_text() if text else "")


def assert_named(said: str, directory: Path) -> None:
    """The message names a path in this directory, and bytes."""
    assert str(directory) in said
    assert re.search(r"\d+ bytes", said), said
