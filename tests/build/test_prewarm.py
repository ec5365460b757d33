"""A workload's ops are noted when it runs, and just these are built."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from sample import child, forks
from sample.levels import HIGH, LEVELS, LOW

from opkiln.base.digest import sha256_file
from opkiln.errors import CompilingOff, StoreError, StoreWarning, UnknownOp
from opkiln.loading import loader, recording
from opkiln.settings import override
from opkiln.ship import prebuild
from opkiln.ship.selection import NamedTarget

if TYPE_CHECKING:
    from collections.abc import Callable

    from sample.package import Package, Steps


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in another process: it starts more of them, which print."""
    started = forks.Fork(
        ["-m", "opkiln", *arguments], env={**child.environment(), **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return child.finish(started)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A program that uses one of the bundled ops, and says what serves it."""
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
            import sys, torch, opkiln
            from opkiln.loading import loader
            opkiln.get_builder("cpu_adam").load()
            loaded = [each for each, _ in loader.loaded_here().values()]
            print(*sys.argv[1:], *(bool(each.artifact) for each in loaded))
        """)
    )
    return path


def noted(file: Path) -> list[str]:
    return [use.op for use in recording.read(str(file))]


# Noting


def test_each_op_is_noted_once_with_what_it_is_used_for(plain: Package, tmp_path: Path) -> None:
    file = tmp_path / "ops.jsonl"
    with override(record=str(file)):
        plain.load()
        plain.load()
    (line,) = file.read_text().splitlines()
    found = json.loads(line)
    assert found["op"] == "plain"
    assert found["distribution"] == plain.name
    assert found["backend"] == "cpu"
    assert found["archs"]


def test_a_load_that_is_served_from_the_store_is_noted(plain: Package, tmp_path: Path) -> None:
    plain.load()
    loader.here.reset()
    with override(record=str(tmp_path / "ops.jsonl")):
        plain.load()
    assert noted(tmp_path / "ops.jsonl") == ["plain"]


def test_a_load_that_fails_is_noted(plain: Package, tmp_path: Path) -> None:
    with override(record=str(tmp_path / "ops.jsonl"), mode="cached"), pytest.raises(CompilingOff):
        plain.load()
    assert noted(tmp_path / "ops.jsonl") == ["plain"]


def test_a_record_that_cannot_be_written_is_a_warning(plain: Package, tmp_path: Path) -> None:
    with (
        override(record=str(tmp_path)),
        pytest.warns(StoreWarning, match="op plain is not noted"),
    ):
        assert plain.load().add(1, 2) == 103


def _note_many(file: str, first: int) -> None:
    from opkiln.base.model import Op, OpSpec

    for number in range(first, first + 40):
        spec = OpSpec(f"op{number}", "somebody", "/", ("op.cpp",), vectorize=False)
        recording.note(file, Op(spec))


def test_many_processes_share_a_record(tmp_path: Path) -> None:
    file = tmp_path / "ops.jsonl"
    context = multiprocessing.get_context("fork")
    noting = [context.Process(target=_note_many, args=(str(file), n % 4)) for n in range(8)]
    for each in noting:
        each.start()
    for each in noting:
        each.join()
        assert each.exitcode == 0
    assert sorted(noted(file)) == sorted(f"op{number}" for number in range(43))
    assert len(file.read_text().splitlines()) == 43


def test_a_line_that_was_cut_off_costs_no_other(plain: Package, tmp_path: Path) -> None:
    file = tmp_path / "ops.jsonl"
    file.write_text('{"distribution": "x", "op"')
    with override(record=str(file)):
        plain.load()
    assert noted(file) == ["plain"]


def test_a_file_that_is_no_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(StoreError, match="no record of ops"):
        recording.read(str(tmp_path / "text"))
    with pytest.raises(StoreError, match="No such file"):
        recording.read(str(tmp_path / "absent"))


# OPKILN_MODE=needed


def test_with_jit_needed_only_what_has_no_reference_is_compiled(
    package: Callable[..., Package], steps: Steps
) -> None:
    stable, plain = package("stable", "light"), package("plain")
    with override(mode="needed"):
        assert stable.load().who(torch.ones(1)) == 0
        assert steps.compiled == []
        assert plain.load().add(1, 2) == 103
    assert "csrc/add.cpp" in steps.compiled
    assert "OPKILN_MODE=needed" in str(stable.loaded().trace)


def test_with_jit_needed_what_must_be_native_is_compiled_and_what_is_cached_is_served(
    package: Callable[..., Package],
) -> None:
    stable = package("stable", "light")
    with override(mode="needed"):
        assert stable.builder().jit_load().who(torch.ones(1)) == 1
        loader.here.reset()
        assert stable.builder().load().who(torch.ones(1)) == 1


# Building


def record(file: Path, *uses: tuple[str, str, str, str]) -> Path:
    names = ("distribution", "op", "backend", "archs")
    file.write_text("".join(json.dumps(dict(zip(names, use, strict=True))) + "\n" for use in uses))
    return file


def test_what_was_noted_is_asked_for_as_it_was_used(tmp_path: Path) -> None:
    file = record(
        tmp_path / "ops.jsonl",
        ("opkiln", "cpu_adam", "cpu", HIGH),
        ("opkiln", "fused_adam", "cuda", "8.0;9.0a"),
        ("opkiln", "cpu_adam", "cpu", LOW),
        ("jit", "mine", "cpu", ""),
    )
    asked = prebuild.recorded_requests(str(file))
    assert [(each.builder.name, str(each.wanted), each.named) for each in asked.requests] == [
        ("cpu_adam", f"cpu:{HIGH}", True),
        ("fused_adam", "cuda:8.0;9.0a", True),
        ("cpu_adam", f"cpu:{LOW}", True),
    ]
    (skipped,) = asked.refused
    assert (skipped.op, skipped.status) == ("mine", "skipped")
    assert prebuild.recorded_requests(str(file), ran_here=True).refused == ()


def test_a_target_that_is_asked_for_replaces_the_recorded_ones(tmp_path: Path) -> None:
    file = record(
        tmp_path / "ops.jsonl",
        ("opkiln", "cpu_adam", "cpu", HIGH),
        ("opkiln", "cpu_adam", "cpu", LOW),
    )
    asked = prebuild.recorded_requests(str(file), [NamedTarget("cpu", LEVELS[1])])
    assert [str(each.wanted) for each in asked.requests] == [f"cpu:{LEVELS[1]}"]


def test_an_op_of_a_package_that_is_not_installed_is_an_error(tmp_path: Path) -> None:
    file = record(tmp_path / "ops.jsonl", ("opkiln", "no_such_op", "cpu", ""))
    with pytest.raises(UnknownOp, match="no_such_op"):
        prebuild.recorded_requests(str(file))
    file = record(tmp_path / "ops.jsonl", ("somebody", "cpu_adam", "cpu", ""))
    with pytest.raises(UnknownOp, match="cpu_adam of somebody"):
        prebuild.recorded_requests(str(file))


# The commands


def test_record_runs_a_command_and_exits_as_it_does(script: Path, tmp_path: Path) -> None:
    file = tmp_path / "ops.jsonl"
    done = run(
        "cache", "record", str(file), "--", sys.executable, str(script), "--epochs", "1",
        OPKILN_MODE="cached",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "--epochs 1 False\n"), done.stderr
    assert "1 op recorded" in done.stderr
    assert noted(file) == ["cpu_adam"]
    failed = run(
        "cache", "record", str(file), "--", sys.executable, "-c", "print(1); raise SystemExit(7)"
    )
    assert (failed.returncode, failed.stdout) == (7, "1\n")
    killed = run("cache", "record", str(file), "--", "sh", "-c", "echo 2; kill -9 $$")
    assert (killed.returncode, killed.stdout) == (128 + 9, "2\n")
    absent = run("cache", "record", str(file), "--", "no-such-program")
    assert absent.returncode == 3
    assert "no-such-program could not be started" in absent.stderr
    nothing = run("cache", "record", str(file), "--")
    assert nothing.returncode == 2
    assert "no command" in nothing.stderr
    assert noted(file) == ["cpu_adam"], "what these loaded, which is nothing, was added"


def test_building_for_a_script_compiles_what_it_loads_after_it_ran(
    script: Path, cache: Path, tmp_path: Path
) -> None:
    done = run("build", "--for-script", str(script), "--", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--epochs 1 False\n")  # the reference served in it
    assert "run as references" in done.stderr
    warm = run("check", "cpu_adam")
    assert warm.returncode == 0, warm.stdout
    again = run("build", "--for-script", str(script), OPKILN_MODE="cached")
    assert "True" in again.stdout.splitlines()[0]
    assert {path.parts[-1] for path in (cache / "v1" / "ops" / "opkiln").iterdir()} == {"cpu_adam"}
    # A record of the same gives the same, from elsewhere and into one file.
    file = record(tmp_path / "ops.jsonl", ("opkiln", "cpu_adam", "cpu", "native"))
    bundled = run("build", "--recorded", str(file), "--bundle", str(tmp_path / "ops.bundle"))
    assert bundled.returncode == 0, bundled.stderr
    assert "cached" in bundled.stdout
    digest = sha256_file(str(tmp_path / "ops.bundle"))
    assert f"wrote {tmp_path}/ops.bundle (SHA-256 {digest})" in bundled.stdout


def test_a_script_that_fails_builds_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit(3)\n")
    done = run("build", "--for-script", str(tmp_path / "broken.py"))
    assert done.returncode == 4
    assert "broken.py ended with exit status 3" in done.stderr
    assert not (cache / "v1" / "ops").exists()


def test_a_script_that_loads_no_op_builds_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "idle.py").write_text("import opkiln\nprint('ran')\n")
    done = run("build", "--for-script", str(tmp_path / "idle.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ran\n")
    assert "loaded no op" in done.stderr
    assert not (cache / "v1" / "ops").exists()


@pytest.mark.parametrize(
    "asked",
    [("--for-script", "SCRIPT", "--all"), ("cpu_adam", "--recorded", "file"), ()],
    ids=["a script and all", "an op and a record", "nothing"],
)
def test_ops_a_record_and_a_script_are_asked_for_one_at_a_time(
    asked: tuple[str, ...], tmp_path: Path, cache: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')\n")
    done = run("build", *(str(script) if word == "SCRIPT" else word for word in asked))
    assert (done.returncode, done.stdout) == (2, "")
    assert "give one of: names of ops, --all, --package, --recorded, --for-script" in done.stderr
    assert not (cache / "v1" / "ops").exists()
