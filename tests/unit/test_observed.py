"""What counts of a step's log: all of it, or nothing, with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sample import at_rest
from sample.levels import X86_64, X86_V1

from opkiln.base.build_model import Plan, Step, Target, Toolchain
from opkiln.base.digest import sha256_file
from opkiln.base.model import ABI_NONE, PLAIN, OpSpec
from opkiln.building import observed
from opkiln.building.observing import log, observer
from opkiln.errors import StepRefused
from opkiln.machine.facts import FILE, PROGRAM
from opkiln.machine.toolchain import probing

STEP = Step("compile", "a.o", ("g++",), "a.cpp", source="a.cpp")


class Bench:
    """A compiler, a source and a staging directory."""

    def __init__(self, base: Path) -> None:
        self.base, self.stage = base, base / "stage"
        self.cxx, self.source = self.write("bin/g++", b"binary"), self.write("src/a.cpp", b"int a;")
        self.stage.mkdir()

    def write(self, name: str, data: bytes) -> Path:
        path = self.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755)
        return path

    def read(self, path: Path, kind: str = "R") -> str:
        found = path.stat()
        seconds, rest = divmod(found.st_ctime_ns, 1_000_000_000)
        identity = f"{found.st_dev} {found.st_ino} {found.st_size} {seconds}.{rest:09}"
        return f"{kind} 10 {identity} {path}"

    def made(self, path: Path, kind: str = "W") -> str:
        return f"{kind} 10 0 0 0 0.0 {path}"

    def look(self, *records: str, lost: bool = False) -> observed.StepRecord:
        """What is seen of a step that compiled the source, and did this besides."""
        path = str(self.stage / "a.o.observed")
        log.start(path)
        began = f"B 10 1 0 0 0.0 {self.cxx}"
        whole = (began, self.read(self.source), *records, self.made(self.stage / "a.o"))
        Path(path).write_bytes(b"".join(os.fsencode(each) + b"\0" for each in whole))
        if lost:
            os.unlink(path + log.WHOLE)
        spec = OpSpec("op", "dist", str(self.base / "src"), ("a.cpp",), kind=PLAIN, abi=ABI_NONE)
        gcc = Toolchain("gcc", str(self.cxx), "12", X86_64, "id", frozenset(), ())
        target = Target("cpu", "linux", X86_64, X86_V1, (), "none")
        plan = Plan(spec, target, gcc, (STEP,), (), "op.so")
        found = observed.read_step(plan, STEP, str(self.stage), str(self.cxx), ())
        assert found is not None
        assert observed.read_step(plan, STEP, str(self.stage), str(self.cxx), ()) is None
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_log_without_a_gap_tells_all_that_went_into_what_was_written(bench: Bench) -> None:
    seen = bench.look(bench.read(bench.cxx, "L"))
    assert seen.gap == ""
    assert seen.tells_all_of("a.o")
    assert not seen.tells_all_of("b.o")
    found = seen.inputs().facts
    assert found == ((FILE, str(bench.source), ""), (PROGRAM, str(bench.cxx), ""))
    assert seen.is_unchanged()
    bench.source.write_text("int b;")
    assert not seen.is_unchanged()


def test_log_with_a_gap_does_not_count_and_says_why(bench: Bench) -> None:
    opaque = bench.write("lib/opaque.so", b"\x7fELF\x02\x01" + bytes(58))
    cache, own = bench.write("cache", b""), bench.write("stage/own", b"")
    rewritten = (bench.read(cache), bench.made(cache, "A"))
    gaps = {
        "S 11 11 10 0 0.0 /static": "/static could not be observed",
        "C 10 10 1 0 0.0 /bin/sh": "a program could not be observed",
        "X 0 0 0 0 0.0 too long": "a program could not be observed (too long)",
        "\0".join(rewritten): f"{cache} was read and then changed by the same step",
        bench.read(opaque, "L"): f"{opaque} has system calls of its own",
    }
    for record, why in gaps.items():
        seen = bench.look(record)
        assert seen.gap == why
        assert not seen.tells_all_of("a.o")
    assert bench.look(lost=True).gap == "a program could not be observed"
    assert bench.look(bench.read(own), bench.made(own)).gap == ""
    gone = bench.read(opaque, "L")
    opaque.unlink()
    assert bench.look(gone).gap == "", "then the step is compiled again"


def test_program_that_can_be_run_and_not_read_is_a_gap(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, memory: tuple[str, ...]) -> observer.Program:
        raise PermissionError(path)

    monkeypatch.setattr(observer, "identify", refuse)
    assert bench.look(bench.read(bench.cxx, "L")).gap == f"{bench.cxx} cannot be read"


def test_step_is_refused_for_what_was_seen_without_a_gap_alone(bench: Bench) -> None:
    stray = bench.made(bench.base / "outside")
    with pytest.raises(StepRefused, match="outside"):
        bench.look(stray)
    assert bench.look(stray, lost=True).gap


# The observer


def test_stored_observer_is_known_by_its_digest(tmp_path: Path) -> None:
    assert observer.find_damaged(str(tmp_path / "nowhere")) == []
    data = tmp_path / "data"
    data.write_bytes(b"library")
    (tmp_path / "another.json").write_text("{}")
    name = f"observer-{'a' * 40}-"
    good, bad = tmp_path / f"{name}{sha256_file(str(data))}", tmp_path / f"{name}{'0' * 64}"
    for path in (good, bad):
        path.write_bytes(b"library")
    assert observer.find_damaged(str(tmp_path)) == [str(bad)]
    # One that another process is writing, and has finished by the time it would be read.
    good.with_name(f"{good.name}.7-0123456789ab").symlink_to("gone")
    assert {*observer._list_stored(str(tmp_path), name)} == {str(good), str(bad)}


@pytest.mark.timed
def test_why_a_compiler_is_not_observed_is_known_until_it_is_or_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_rest.shorten(monkeypatch)
    cxx, memory = tmp_path / "g++", (str(tmp_path / "memory"),)
    cxx.write_text("1")
    at_rest.wait(cxx)
    assert probing.why_unobserved(memory, str(cxx)) == ""
    for why in ("no /proc", "", "no /proc"):
        probing.note_unobserved(memory, str(cxx), why)
        assert probing.why_unobserved(memory, str(cxx)) == why
    cxx.write_text("2")
    assert probing.why_unobserved(memory, str(cxx)) == ""
