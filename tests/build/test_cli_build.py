"""The command line with real compilers and real stores; in processes where that is the point."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import command, signals
from sample.compiler import Compiler

from opkiln.report.doctor import checks

if TYPE_CHECKING:
    from collections.abc import Callable

    from sample.package import Package

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


class Opkiln:
    """Runs the command line with the packages that were offered."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.environment = {**os.environ, "PYTHONPATH": str(site), "OPKILN_PROGRESS": "lines"}

    def offer(self, package: Package, op: str, kind: str) -> None:
        """Let a package provide an op, as an installed distribution does."""
        metadata = self.site / f"{op}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {op}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(
            f"[opkiln.ops]\n{op} = {package.name}.op:{kind}\n"
        )

    def start(
        self, *arguments: str, prefix: tuple[str, ...] = (), **variables: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "opkiln", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, **variables},
        )

    def process(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """In a process of its own."""
        child = self.start(*arguments, **variables)
        out, err = child.communicate(timeout=300)
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """In this process."""
        return command.run(*arguments, OPKILN_PROGRESS="lines", **variables)

    def json(self, *arguments: str, **variables: str) -> Any:
        done = self(*arguments, "--json", **variables)
        assert done.returncode in (0, 1), done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def opkiln(tmp_path: Path) -> Opkiln:
    return Opkiln(tmp_path / "packages")


@pytest.fixture
def op(opkiln: Opkiln, plain: Package) -> Package:
    """A torch-free op named ``plain``, provided by a package."""
    opkiln.offer(plain, "plain", "PlainBuilder")
    return plain


@pytest.fixture
def second(opkiln: Opkiln, package: Callable[..., Package]) -> Package:
    """Another one, named ``other``."""
    made = package("plain")
    made.edit("op.py", 'NAME = "plain"', 'NAME = "other"')
    opkiln.offer(made, "other", "PlainBuilder")
    return made


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    empty = tmp_path / "empty"
    empty.mkdir()
    return {"PATH": str(empty)}


def entry(opkiln: Opkiln, name: str = "plain") -> Path:
    (found,) = [each for each in opkiln.json("cache", "list")["entries"] if each["name"] == name]
    return Path(found["payload"])


def test_an_op_is_built_once_and_then_found(opkiln: Opkiln, op: Package) -> None:
    first = opkiln.process("build", "plain")
    assert first.returncode == 0
    assert re.search(r"^plain +cpu +built +\d+\.\d\d +/.*/plain\.so$", first.stdout, re.MULTILINE)
    assert "built plain in" in first.stderr
    second = opkiln("build", "plain")
    assert re.search(r"^plain +cpu +cached ", second.stdout, re.MULTILINE)
    assert second.stderr == ""
    (row,) = opkiln.json("build", "plain")["ops"]
    assert row["status"] == "cached"
    assert hashlib.sha256(Path(row["path"]).read_bytes()).hexdigest() == row["sha256"]


def test_a_build_of_what_is_built_imports_neither_torch_nor_the_engine(
    opkiln: Opkiln, op: Package
) -> None:
    assert opkiln("build", "plain").returncode == 0
    command = [sys.executable, "-X", "importtime", "-m", "opkiln", "build", "plain"]
    done = subprocess.run(
        command, env=opkiln.environment, capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "opkiln.decision.decide" in imported
    assert not imported & {"torch", "opkiln.run.schedule", "opkiln.run.process"}


@pytest.mark.counts_compiles
def test_ops_build_together_and_leave_one_trace(
    opkiln: Opkiln, op: Package, second: Package, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    done = opkiln("build", "plain", "other", "-j", "1", "--trace", str(trace))
    assert done.returncode == 0
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [
        ["plain", "cpu", "built"], ["other", "cpu", "built"],
    ]  # fmt: skip
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [each for each in events if each["ph"] == "X" and each["tid"] < 1000]
    assert {each["cat"] for each in steps} == {"plain", "other"}
    assert len(steps) == 8
    # -j 1: no two processes at once, although the ops were built by two threads.
    steps.sort(key=lambda each: each["ts"])
    for one, following in itertools.pairwise(steps):
        assert one["ts"] + one["dur"] <= following["ts"] + 1


def test_an_op_that_does_not_compile_exits_with_4_and_the_others_are_built(
    opkiln: Opkiln, op: Package, second: Package
) -> None:
    source = next((op / "csrc").glob("add.cpp"))
    source.write_text(source.read_text() + "\nint broken() { return nothing; }\n")
    done = opkiln("build", "plain", "other")
    assert done.returncode == 4
    assert re.search(r"^other +cpu +built ", done.stdout, re.MULTILINE)
    assert len(done.stdout.splitlines()) == 2
    assert re.search(r"add\.cpp:\d+:\d+: error: .*nothing", done.stderr)
    assert "error: op plain: csrc/add.cpp does not compile" in done.stderr
    assert [each["name"] for each in opkiln.json("cache", "list")["entries"]] == ["other"]


def test_all_skips_what_its_author_says_cannot_run_and_names_the_reason(
    opkiln: Opkiln, op: Package, tmp_path: Path
) -> None:
    op.edit(
        "op.py",
        "    def sources",
        "    def is_compatible(self, verbose=False):\n"
        "        self.error_log = 'it needs a quantum computer'\n"
        "        return False\n\n"
        "    def sources",
    )
    # The bundled op must not cost this test a minute: it is skipped for want of a torch.
    (tmp_path / "packages" / "torch").mkdir()
    (tmp_path / "packages" / "torch" / "__init__.py").touch()
    (tmp_path / "packages" / "torch" / "version.py").write_text("__version__ = '2.9.1'\n")
    done = opkiln.process("build", "--all")
    assert done.returncode == 0
    assert done.stdout == ""
    assert "skipped plain: it needs a quantum computer" in done.stderr
    assert re.search(r"skipped cpu_adam: .*2\.9\.1 lacks the stable ABI", done.stderr)
    # By name it is an explicit request.
    assert opkiln.process("build", "plain").returncode == 0
    assert opkiln.process("build", "cpu_adam").returncode == 6


@pytest.mark.first_use
def test_a_build_that_no_store_can_take_exits_with_5(
    opkiln: Opkiln, op: Package, cache: Path
) -> None:
    (cache / "v1").mkdir(parents=True)
    cache.chmod(0o700)
    (cache / "v1" / "staging").touch()  # where a directory has to be
    done = opkiln.process("build", "plain")
    assert done.returncode == 5
    assert "error: op plain was built, but could not be stored" in done.stderr


def test_the_printed_plan_run_by_hand_gives_the_same_bytes(
    opkiln: Opkiln, op: Package, tmp_path: Path
) -> None:
    assert opkiln("build", "plain").returncode == 0
    script = opkiln("plan", "plain").stdout
    subprocess.run(["sh", "-e"], input=script, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / "build" / "plain.so").read_bytes() == entry(opkiln).read_bytes()


def test_the_plan_for_programs_is_the_plan_for_people(
    opkiln: Opkiln, op: Package, tmp_path: Path
) -> None:
    stage = str(tmp_path / "a stage")
    plan = opkiln.json("plan", "plain", "--stage", stage)
    assert (plan["schema"], plan["op"]) == (1, "plain")
    assert [step["kind"] for step in plan["steps"]] == ["compile"] * 3 + ["link"]
    script = opkiln("plan", "plain", "--stage", stage).stdout.splitlines()
    commands = [shlex.split(line) for line in script if " -o " in line]
    assignments = [f"{name}={value}" for name, value in plan["environment"].items()]
    assert commands == [[*assignments, *step["argv"]] for step in plan["steps"]]
    assert plan["steps"][-1]["output"] == f"{stage}/plain.so"
    assert plan["toolchain"]["cxx"] == commands[0][len(assignments)]


def test_compile_commands_name_existing_sources(opkiln: Opkiln, op: Package) -> None:
    done = opkiln("plan", "plain", "--compile-commands")
    listed = json.loads(done.stdout)
    assert len(listed) == 3
    for each in listed:
        assert Path(each["file"]).is_file()
        assert each["file"] in each["arguments"]
        assert Path(each["directory"]).is_dir()


def test_explain_names_the_header_that_was_edited(opkiln: Opkiln, op: Package) -> None:
    assert opkiln("build", "plain").returncode == 0
    assert "taken" in opkiln("explain", "plain").stdout
    header = op / "csrc/include/scale.h"
    header.write_text(header.read_text() + "// edited\n")
    found = opkiln.json("explain", "plain")
    assert any("scale.h changed" in change for change in found["changes"])
    assert "scale.h changed" in opkiln("explain", "plain").stdout
    assert opkiln("check", "plain").returncode == 1


def test_a_warm_store_needs_no_compiler(
    opkiln: Opkiln, op: Package, no_compiler: dict[str, str]
) -> None:
    assert opkiln("check", "plain").returncode == 1
    cold = opkiln("build", "plain", **no_compiler)
    assert cold.returncode == 3
    assert "hint: apt-get install g++" in cold.stderr
    assert opkiln("build", "plain").returncode == 0
    warm = opkiln("check", "plain", **no_compiler)
    assert (warm.returncode, warm.stdout.split()[:2]) == (0, ["plain", "cached"])
    assert opkiln("build", "plain", **no_compiler).returncode == 0
    rows = {each["op"]: each for each in opkiln.json("report", **no_compiler)["ops"]}
    here = rows["plain"]["backends"][0]
    assert (here["cached"], here["compatible"]) == (True, True)


@pytest.mark.counts_compiles  # without the pool as a layer, which `verify` would read
def test_a_damaged_entry_is_found_removed_and_rebuilt(opkiln: Opkiln, op: Package) -> None:
    assert opkiln("build", "plain").returncode == 0
    assert opkiln("cache", "verify").returncode == 0
    payload = entry(opkiln)
    data = bytearray(payload.read_bytes())
    data[len(data) // 2] ^= 1
    payload.write_bytes(data)
    damaged = opkiln("cache", "verify")
    assert damaged.returncode == 5
    assert f"damaged  {payload.parent}" in damaged.stdout
    assert payload.exists()
    assert f"removed  {payload.parent}" in opkiln("cache", "verify", "--remove").stdout
    assert not payload.parent.exists()
    assert opkiln("cache", "verify").returncode == 0
    (row,) = opkiln.json("build", "plain")["ops"]
    assert row["status"] == "built"


@pytest.mark.timed
def test_gc_spares_a_library_that_another_process_has_loaded(opkiln: Opkiln, op: Package) -> None:
    assert opkiln("build", "plain").returncode == 0
    code = (
        "import sys; from opkiln.builder.registry import get_builder; get_builder('plain').load();"
        "print('loaded', flush=True); sys.stdin.read()"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", code], env=opkiln.environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert user.stdout is not None
    assert user.stdout.readline() == "loaded\n"
    recent = opkiln("cache", "gc", "--max-size", "1")
    assert recent.stderr.endswith("used within a day\nhint: opkiln cache gc --now\n")
    done = opkiln("cache", "gc", "--max-size", "1", "--now")
    assert done.returncode == 0
    assert done.stderr.endswith("kept: 1 loaded by processes here, 0 used within a day\n")
    assert entry(opkiln).exists()
    user.communicate(timeout=30)
    freed = opkiln.json("cache", "gc", "--max-size", "1", "--now")
    assert [each["name"] for each in freed["removed"]] == ["plain"]
    assert opkiln.json("cache", "size")["ops"] == 0


@pytest.mark.counts_compiles
def test_clearing_an_op_leaves_the_other_one(opkiln: Opkiln, op: Package, second: Package) -> None:
    second.edit("op.py", '"csrc/add.cpp", "csrc/scale.cpp", "csrc/where.cpp"', '"csrc/other.cpp"')
    (second / "csrc/add.cpp").rename(second / "csrc/other.cpp")
    assert opkiln("build", "plain", "other").returncode == 0
    done = opkiln("cache", "clear", "--op", "plain", "--yes")
    assert "4 entries removed" in done.stdout
    assert opkiln("check", "other").returncode == 0
    assert opkiln("check", "plain").returncode == 1


SLOW = """
constexpr long spin() { long s = 0; for (long i = 0; i < 400000000; ++i) s += i * i % 7; return s; }
extern "C" long slow() { constexpr long value = spin(); return value; }
"""


def _compilers_of(path: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        # By the whole path: other test runs have packages of the same name.
        if b"cc1plus" in command[0] and any(bytes(path) in part for part in command):
            found.append(process.name)
    return found


@pytest.mark.timed
@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupted_build_exits_with_130_and_leaves_nothing(
    opkiln: Opkiln, op: Package, second: Package, tmp_path: Path, cache: Path, count: int
) -> None:
    for package in (op, second):
        (package / "csrc/add.cpp").write_text(SLOW)
        limits = ["-fconstexpr-ops-limit=9999999999", "-fconstexpr-loop-limit=2000000000"]
        package.edit("op.py", "return list(self.FLAGS)", f"return {limits}")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    names = ["plain", "other"][:count]
    child = opkiln.start("build", *names, prefix=signals.FOREGROUND, OPKILN_TMPDIR=str(scratch))
    deadline = time.monotonic() + 60
    while not _compilers_of(op / "csrc/add.cpp") and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    try:
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
    assert (child.returncode, out) == (130, "")
    assert err.rstrip().endswith("interrupted")
    assert "Traceback" not in err
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (_compilers_of(op.path) or list(scratch.iterdir())):
        time.sleep(0.02)
    assert _compilers_of(op.path) == []
    assert list(scratch.iterdir()) == []
    # Nobody is told that the interrupted build had failed.
    assert not list((cache / "v1").glob("failures/*"))


@pytest.mark.timed
def test_a_build_under_nohup_survives_a_hang_up(
    opkiln: Opkiln, op: Package, tmp_path: Path
) -> None:
    compiler = Compiler(tmp_path)
    started, go = tmp_path / "started", tmp_path / "go"
    compiler.write(
        before=f"""
case " $* " in *" -c "*csrc/add.cpp*)
  touch '{started}'; until [ -e '{go}' ]; do sleep 0.05; done ;;
esac"""
    )
    child = opkiln.start("build", "plain", prefix=signals.NOHUP, CXX=str(compiler.path))
    deadline = time.monotonic() + 120
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert started.exists()
    # All that descends from it: the terminal tells its session, and a job's end may tell everybody.
    family = [child.pid]
    for pid in family:
        for task in Path(f"/proc/{pid}/task").iterdir():
            family += map(int, (task / "children").read_text().split())
    for pid in family:
        os.kill(pid, signal.SIGHUP)
    assert len(family) >= 3, "the builder, its watchdog and its compiler"
    go.touch()
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert re.search(r"^plain +cpu +built ", out, re.MULTILINE)


# What needs torch


_SETUP = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension
setup(
    name="some-extension", version="1.0",
    ext_modules=[CppExtension("some_extension", ["some_extension.cpp"])],
    cmdclass={"build_ext": BuildExtension},
)
"""
# Without the hooks that only ask, pip imports torch once for this project.
_BACKEND = "from setuptools.build_meta import build_sdist, build_wheel\n"
_PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
_MODULE = """
#include <Python.h>
static PyMethodDef methods[] = {{nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "some_extension", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_some_extension() { return PyModule_Create(&module); }
"""


def _documented() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines()]


def _typed(
    opkiln: Opkiln, line: str, tmp_path: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A command as a shell starts it, with pip installing into a directory of the test's."""
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    # The registry of the examples is nobody's: a directory takes its place.
    line = line.replace("oci://registry.example.com/", f"file://{tmp_path}/registry/")
    words = [found for word in shlex.split(line)[1:] for found in glob.glob(word) or [word]]
    call = opkiln.process if words[0] == "run" or "record" in words else opkiln
    done = call(*words, PATH=path, PIP_TARGET=str(tmp_path / "site"), **variables)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done


def test_a_documented_install_of_an_extension_installs_it(
    opkiln: Opkiln, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-extension").mkdir()
    for name, text in (("setup.py", _SETUP), ("some_extension.cpp", _MODULE),
                       ("backend.py", _BACKEND), ("pyproject.toml", _PYPROJECT)):  # fmt: skip
        (tmp_path / "some-extension" / name).write_text(text)
    (line,) = (each for each in _documented() if each.startswith("opkiln run pip install "))
    done = _typed(opkiln, line, tmp_path)
    assert done.stderr.startswith("opkiln builds the PyTorch extensions and DeepSpeed ops of: pip ")
    (installed,) = (tmp_path / "site").glob("some_extension*.so")
    listed = opkiln.json("cache", "list")["entries"]
    assert [each["name"] for each in listed] == ["some_extension"], "opkiln has built it"
    assert installed.stat().st_size > 0


@pytest.mark.slow
@pytest.mark.usefixtures("op")
def test_every_documented_command_works_and_the_demo_passes(
    opkiln: Opkiln, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, catalogue: Path
) -> None:
    # What it finds is of its own tests.
    monkeypatch.setattr(checks, "CHECKS", {"python": checks.CHECKS["python"]})
    monkeypatch.setattr(checks, "BUILDS", {"system": checks.CHECKS["python"]})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import opkiln; opkiln.get_builder('plain').load()\n")
    # All ops take a minute to build; most of the other tests need them, too.
    variables = {" --all ": {"OPKILN_CACHE_DIR": str(catalogue)},
                 "train.py": {"PYTHONPATH": str(opkiln.site)},
                 "cache verify": {"OPKILN_STORE_LAYERS": ""},
                 "opkiln demo": {"CXXFLAGS": "-O0"}}  # fmt: skip
    commands = _documented()
    assert all(each.startswith("opkiln ") for each in commands)
    assert len(commands) > 15
    for each in commands:
        if each.startswith(("opkiln run pip install ", "opkiln ninja ")):
            continue  # by the test above, and by tests/compat/test_ninja.py
        given = next((found for word, found in variables.items() if word in each), {})
        done = _typed(opkiln, each, tmp_path, **given)
        if each == "opkiln demo":
            assert re.search(r"result +PASS", done.stdout)
            cold, warm = done.stdout.split("\nwarm: ")
            assert re.search(r"build +taken: compiled 1 file", cold)
            assert re.search(r"store +taken: ", warm)
            assert "compiled" not in warm
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] is not None


@pytest.mark.full
def test_the_demo_passes_where_numpy_is_not_installed(opkiln: Opkiln, tmp_path: Path) -> None:
    without = tmp_path / "without"
    without.mkdir()
    (without / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy')\n")
    path = f"{without}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = opkiln.process("demo", PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"result +PASS", done.stdout)


def test_the_demo_without_a_compiler_exits_with_3(
    opkiln: Opkiln, no_compiler: dict[str, str]
) -> None:
    done = opkiln("demo", **no_compiler)
    assert done.returncode == 3
    assert "hint: apt-get install g++" in done.stderr
