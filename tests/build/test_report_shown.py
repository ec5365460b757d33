"""What `opkiln report` shows of other packages' ops, and what it is told to leave out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample import child
from test_report_environments import World, link, row, section

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A machine with a compiler and a torch for the CPU."""
    made = World(tmp_path, tmp_path / "bin")
    link(made.bin, "g++", "as", "ld")
    made.torch("2.13.0+cpu")
    return made


# Ops of other packages

_OP = """
from opkiln.builder import CUDAOpBuilder, OpBuilder
from opkiln.base.model import ABI_NONE, PLAIN

class Base(OpBuilder):
    KIND, ABI = PLAIN, ABI_NONE
    def sources(self):
        return ["answer.cpp"]

for number in range({count}):
    globals()[f"Op{{number}}"] = type(f"Op{{number}}", (Base,), {{"NAME": f"op_{{number}}"}})

class Broken(Base):
    NAME = "broken"
    def sources(self):
        raise RuntimeError("its author was in a hurry")
"""


@pytest.fixture
def many(world: World) -> Callable[[int], None]:
    """Installs a distribution of so many ops, and of one that is broken."""

    def install(count: int) -> None:
        made = world.package("many_ops", _OP.format(count=count))
        (made / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
        info = world.site / "many_ops-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: many-ops\nVersion: 1.0\n")
        names = [f"op_{number} = many_ops:Op{number}" for number in range(count)]
        names += ["broken = many_ops:Broken", "no_builder = many_ops:ABI_NONE",
                  "not_there = many_ops_elsewhere:Op"]  # fmt: skip
        (info / "entry_points.txt").write_text("\n".join(["[opkiln.ops]", *names]) + "\n")

    return install


def test_thirty_ops_are_looked_at_without_a_process_and_without_torch(
    world: World, many: Callable[[int], None]
) -> None:
    many(30)
    first, words = world.run()
    assert "started" in words  # the compiler was asked who it is
    again, words = world.run()
    assert words == ""
    rows = [line for line in section(again, "ops").splitlines() if line.startswith("op_")]
    assert len(rows) == 30
    assert all("not built yet: its first use builds it" in line for line in rows)
    assert section(first, "ops") == section(again, "ops")


def test_an_op_that_is_broken_is_a_row_and_a_problem(
    world: World, many: Callable[[int], None]
) -> None:
    many(1)
    found = world.json()
    reasons = {each["op"]: each["error"] for each in found["ops"] if each["error"]}
    assert reasons["broken"] == "RuntimeError: its author was in a hurry"
    assert "many_ops_elsewhere" in reasons["not_there"]
    assert "is not an OpBuilder" in reasons["no_builder"]
    assert row(found, "op_0")["compatible"]
    only = world.text("--errors-only")
    assert "its author was in a hurry" in only
    assert "op_0" not in only
    assert set(reasons) == {each["op"] for each in world.json("--errors-only")["ops"]}


@pytest.mark.counts_compiles
def test_a_built_op_is_cached_with_its_build_and_the_reason_it_was_taken(
    world: World, many: Callable[[int], None]
) -> None:
    many(2)
    built = child.start(
        "import sys\nfrom opkiln.cli.main import _run\nsys.exit(_run(['build', 'op_1']))",
        path=[world.site], env={"PATH": str(world.bin), "HOME": str(world.home)},
    )  # fmt: skip
    done = child.finish(built)
    assert done.returncode == 0, done.stderr
    assert "op_1 cpu no yes yes" in section(world.text(), "ops").splitlines()
    found = world.json()
    here = row(found, "op_1")
    assert (here["status"], here["cached"]) == ("cached", True)
    (decision,) = here["backends"][0]["candidates"]
    assert (decision["resort"], decision["verdict"]) == ("store", "taken")
    assert decision["subject"] == here["path"]
    (build,) = found["store"]["builds"]
    assert (build["op"], build["distribution"], build["made_for"]) == ("op_1", "many_ops", "cpu")
    assert build["seconds"] > 0
    assert build["max_rss"] > 1 << 20
    assert f"last build op_1 for {build['made_for']}" in section(world.text(), "cache")
    source = world.site / "many_ops" / "answer.cpp"
    source.write_text('extern "C" int answer() { return 43; }\n')
    assert "answer.cpp changed" in row(world.json(), "op_1")["reason"]
    world.run("--html", str(world.home / "page.html"))
    page = (world.home / "page.html").read_text()
    assert "changed since it was last built" in page


# What is shown


def test_the_commands_of_the_docs_run(world: World) -> None:
    page = Path(__file__).parents[2] / "docs" / "doctor.md"
    shown = re.findall(r"^\| `opkiln report ?([^`]*)` \|", page.read_text(), re.MULTILINE)
    assert len(shown) == 4
    for arguments in shown:
        words = arguments.replace("report.html", str(world.home / "report.html")).split()
        world.run(*words)
    assert (world.home / "report.html").exists()


def test_what_is_hidden_is_not_shown(world: World) -> None:
    without_ops, only_ops = world.text("--hide-ops"), world.text("--hide-env")
    assert "cpu_adam" not in without_ops
    assert "environment\n" in without_ops
    assert only_ops.startswith("ops\n")
    assert "\n\n" not in only_ops
    assert world.json("--hide-ops")["ops"] is None
    found = world.json("--hide-env")
    assert (found["environment"], found["store"], found["settings"]) == (None, None, None)


def test_markdown_tells_nobody_who_and_where_the_user_is(world: World, tmp_path: Path) -> None:
    home = tmp_path / "home" / "alice"
    home.mkdir(parents=True)
    scratch = tmp_path / "scratch-of-alice"
    scratch.mkdir()
    world.home = home
    world.variables["OPKILN_CACHE_DIR"] = str(home / "cache")
    world.variables["OPKILN_STORE_LAYERS"] = str(scratch)
    world.variables["CXXFLAGS"] = "-DHUB_TOKEN=hunter2"
    text = world.text("--markdown")
    assert text.startswith("### opkiln ")
    assert "| path | ~/cache/v1 |" in text
    assert "scratch-of-\\<user>" in text
    assert "alice" not in text
    assert "hunter2" not in text
    assert "HUB\\_TOKEN=\\*\\*\\*" in text
    assert "hunter2" not in world.text() + json.dumps(world.json())


def test_an_unknown_setting_is_named_with_what_may_have_been_meant(world: World) -> None:
    world.variables["OPKILN_MODEE"] = "my-secret-value"
    text, _ = world.run()
    assert "unknown setting OPKILN_MODEE; did you mean OPKILN_MODE?" in text
    assert "my-secret-value" not in text
    assert world.json()["environment"]["unknown_variables"] == [
        "unknown setting OPKILN_MODEE; did you mean OPKILN_MODE?"
    ]


def test_a_store_that_is_elsewhere_says_why(world: World, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    world.variables["OPKILN_CACHE_DIR"] = str(shared)
    text = world.text()
    assert f"path {shared}/opkiln-{os.getuid()}/v1" in section(text, "cache")
    assert "writable by others" in section(text, "cache")
    assert "writable by others" in section(text, "problems")


@pytest.mark.parametrize(
    "arguments",
    [("--json", "--markdown"), ("--html", "x", "--json"), ("--html", "x", "--errors-only")],
)
def test_forms_that_exclude_each_other_are_refused(
    world: World, arguments: tuple[str, ...]
) -> None:
    done = child.finish(child.start(world.code, "report", *arguments, path=[world.site]))
    assert done.returncode == 2
    assert "hint: opkiln report --help" in done.stderr


def test_a_page_that_cannot_be_written_is_an_error(world: World) -> None:
    where = str(world.home / "no" / "page.html")
    done = child.finish(
        child.start(world.code, "report", "--html", where, path=[world.site],
                    env={"PATH": str(world.bin)})
    )  # fmt: skip
    assert done.returncode == 2
    assert f"{where} cannot be written: No such file or directory" in done.stderr


def test_a_narrow_terminal_gets_lines_that_fit(world: World) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 64))
    world.run()  # asks the compiler, so that the next is quick
    environment = {"PATH": str(world.bin), "HOME": str(world.home), "NO_COLOR": "1"}
    running = subprocess.Popen(
        [sys.executable, "-S", "-c", world.code, "report", "--hide-ops"],
        env={**os.environ, **environment, "PYTHONPATH": f"{child.SOURCE}:{world.site}"},
        stdout=theirs, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 65536):
            text += chunk
    except OSError:
        pass  # how Linux says that the other side is closed
    os.close(ours)
    assert running.wait(timeout=30) == 0
    lines = text.decode().splitlines()
    assert any(len(line) > 40 for line in lines)
    # Only what has no blank to be broken at stands out: the paths of this test.
    assert not [line for line in lines if len(line) > 64 and max(map(len, line.split())) < 40]
