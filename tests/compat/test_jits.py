"""tvm-ffi and FlashInfer, unmodified, under ``opkiln run``. ``make test-jits`` installs them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from opkiln.compat import jits
from opkiln.compat.jits import build_file

SOURCE = Path(jits.__file__).parents[3]
needs_tvm_ffi = pytest.mark.skipif(
    find_spec("tvm_ffi") is None, reason="there is no tvm-ffi: make test-jits"
)
needs_flashinfer = pytest.mark.skipif(
    find_spec("flashinfer") is None or shutil.which("nvcc") is None,
    reason="there is no FlashInfer, or no nvcc: make test-jits",
)

# Prints what was started, once the module that is built has been loaded.
WATCH = """
import json, os, sys, time
STARTED = []
def watch(event, given):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.system"):
        STARTED.append(f"{event} {given[:2]}")
def tell(**more):
    print("TOLD " + json.dumps({"started": STARTED, **more}))
"""

INLINE = (
    WATCH
    + """
import tvm_ffi.cpp
source = '''
int three() { return THREE; }
int fails() { TVM_FFI_ICHECK(THREE == 0) << "it is three"; return 0; }
'''
sys.addaudithook(watch)
begin = time.perf_counter()
module = tvm_ffi.cpp.load_inline(
    "some", cpp_sources=source, functions=["three", "fails"], extra_cflags=["-DTHREE=3"])
seconds = time.perf_counter() - begin
assert module.three() == 3
try:
    module.fails()
except Exception as error:
    assert "it is three" in str(error)
path = tvm_ffi.cpp.build_inline(
    "some", cpp_sources=source, functions=["three", "fails"], extra_cflags=["-DTHREE=3"])
tell(path=path, seconds=seconds, inode=os.stat(path).st_ino)
"""
)


def run(text: str, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "opkiln", "run", sys.executable, "-c", text]
    return subprocess.run(
        [*command, *map(str, arguments)], env=environment(**more), capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    near = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": near, "PYTHONPATH": str(SOURCE), **more}


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("TOLD "))
    answer: dict[str, Any] = json.loads(line.removeprefix("TOLD "))
    return answer


def compiled(trace: Path) -> list[str]:
    """What was compiled or linked, by the trace of a process; a hit alone leaves none."""
    events = json.loads(trace.read_text())["traceEvents"] if trace.exists() else []
    return [each["name"] for each in events if each.get("args", {}).get("cached") is False]


# The build files


def test_a_build_file_as_the_hosts_write_it(tmp_path: Path) -> None:
    (tmp_path / "other.ninja").write_text("rule a\n  command = $cc $in\nbuild o/b.o: a b.c\n")
    file = tmp_path / "build.ninja"
    file.write_text(
        "ninja_required_version = 1.3\ncc = gcc\nflags = -O2 $\n    -g\n\n"
        "rule compile\n  command = $cc -MF $out.d $flags -c $in -o ${out}\n  deps = gcc\n"
        "rule link\n  command = $cc $in -o $out\n"
        "build x.o: compile x.c | made.h || later\n  flags = -O0\n"
        f"build x.so: link x.o y.o\nsubninja {tmp_path}/other.ninja\ndefault x.so\n"
    )
    edges = build_file.read(str(file))
    assert [each.command for each in edges] == [
        "gcc -MF x.o.d -O0 -c x.c -o x.o", "gcc x.o y.o -o x.so", "gcc b.c",
    ]  # fmt: skip
    assert edges[0].inputs == ("x.c", "made.h", "later")
    first, second = build_file.levels(edges)
    assert [each.outputs for each in first] == [("x.o",), ("o/b.o",)]
    assert second == [edges[1]]


@pytest.mark.parametrize(
    "text",
    [
        "rule a\n  command = cp $in $out\n  rspfile = x\nbuild b: a c\n",
        "include other.ninja\n",
        "build b: unknown c\n",
        "pool p\n  depth = 1\n",
        "rule a\n  command = cp $in $out\nbuild a$ b: a c\n",
    ],
)
def test_a_build_file_with_more_is_left_to_ninja(text: str, tmp_path: Path) -> None:
    (tmp_path / "build.ninja").write_text(text)
    with pytest.raises(build_file.NotKnown):
        build_file.read(str(tmp_path / "build.ninja"))
    assert jits.serve("some", str(tmp_path / "build.ninja"), str(tmp_path)) is None


def test_a_cycle_is_left_to_ninja(tmp_path: Path) -> None:
    file = tmp_path / "build.ninja"
    file.write_text("rule a\n  command = cp $in $out\nbuild b: a c\nbuild c: a b\n")
    assert jits.serve("some", str(file), str(tmp_path)) is None


def test_another_version_is_left_to_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jits, "version", lambda _: "99.0")
    module = type(sys)("tvm_ffi.cpp.extension")
    assert list(jits.replacements(module)) == []


# tvm-ffi


@needs_tvm_ffi
def test_a_hit_of_tvm_ffi_in_another_directory_starts_no_process(tmp_path: Path) -> None:
    first = told(run(INLINE, TVM_FFI_CACHE_DIR=str(tmp_path / "one")))
    assert first["started"]
    other = told(run(INLINE, TVM_FFI_CACHE_DIR=str(tmp_path / "other")))
    assert other["started"] == []
    assert other["path"].startswith(str(tmp_path / "other"))
    assert Path(other["path"]).read_bytes() == Path(first["path"]).read_bytes()
    again = told(run(INLINE, TVM_FFI_CACHE_DIR=str(tmp_path / "other")))
    assert (again["started"], again["inode"]) == ([], other["inode"])  # it stays, others use it


@needs_tvm_ffi
def test_tvm_ffi_promises_what_it_does_alone(tmp_path: Path) -> None:
    """A path, its exception, an object as output, C, the caller's directory, an edited header."""
    (tmp_path / "value.h").write_text("#define VALUE 1\n")
    (tmp_path / "c.c").write_text(
        '#include "value.h"\n#include <tvm/ffi/c_api.h>\nint value(void) { return VALUE; }\n'
    )
    text = (
        WATCH
        + """
import ctypes, tvm_ffi.cpp
from pathlib import Path
here = Path(sys.argv[1])
path = tvm_ffi.cpp.build("c", sources=[str(here / "c.c")], build_directory=str(here / "out"))
assert path == str((here / "out/c.so").resolve())
values = [ctypes.CDLL(path).value()]
(here / "value.h").write_text("#define VALUE 2\\n")
values.append(ctypes.CDLL(tvm_ffi.cpp.build("c", sources=[str(here / "c.c")],
                                            build_directory=str(here / "out2"))).value())
whole = tvm_ffi.cpp.build("c", sources=[str(here / "c.c")], output="c.o")
assert Path(whole).read_bytes()[:4] == b"\\x7fELF"
try:
    tvm_ffi.cpp.load_inline("broken", cpp_sources="int broken( {", functions="broken")
except RuntimeError as error:
    values.append(str(error).splitlines()[0])
tell(values=values)
"""
    )
    done = run(text, tmp_path, TVM_FFI_CACHE_DIR=str(tmp_path / "cache"))
    assert told(done)["values"] == [1, 2, "ninja exited with status 1"]


@needs_tvm_ffi
def test_where_ninja_has_worked_ninja_goes_on(tmp_path: Path) -> None:
    alone = subprocess.run(
        [sys.executable, "-c", INLINE], env=environment(TVM_FFI_CACHE_DIR=str(tmp_path)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    before = told(alone)
    after = told(run(INLINE, TVM_FFI_CACHE_DIR=str(tmp_path)))
    assert any("ninja" in each for each in after["started"])
    assert after["inode"] == before["inode"]


@needs_tvm_ffi
def test_a_module_that_a_run_noted_is_built_without_its_program(tmp_path: Path) -> None:
    noted, opkiln = str(tmp_path / "used.jsonl"), [sys.executable, "-m", "opkiln"]
    first = environment(TVM_FFI_CACHE_DIR=str(tmp_path / "one"))
    program = [sys.executable, "-c", INLINE]
    subprocess.run([*opkiln, "run", "--record", noted, *program], env=first, check=True)
    image = environment(OPKILN_CACHE_DIR=str(tmp_path / "image"))
    build = [*opkiln, "build", "--recorded", noted]
    built = subprocess.run(build, env=image, capture_output=True, text=True, check=True)
    (line,) = (line for line in built.stdout.splitlines() if line.startswith("tvm-ffi:some_"))
    more = {"OPKILN_CACHE_DIR": str(tmp_path / "image"), "TVM_FFI_CACHE_DIR": str(tmp_path / "b")}
    assert told(run(INLINE, **more))["started"] == []
    assert " built " in line


# FlashInfer: modules of its own kind, of small sources

SPEC = (
    WATCH
    + """
import ctypes
from pathlib import Path
from flashinfer.jit.core import build_jit_specs, gen_jit_spec, jit_env
sources = [Path(sys.argv[1]) / f"{name}.cu" for name in ("one", "two")]
sys.addaudithook(watch)
begin = time.perf_counter()
spec = gen_jit_spec("small", sources, extra_ldflags=["-L" + sys.argv[1]])
spec.build()
seconds = time.perf_counter() - begin
path = spec.get_library_path()
library = ctypes.CDLL(str(path))
own = [each for each in STARTED if "nvcc', '--version" not in each]  # FlashInfer asks that itself
tell(path=str(path), value=library.one() + library.two(), seconds=seconds, own=own)
"""
)


class Flash:
    """Two small sources, and workspaces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for number, name in enumerate(("one", "two"), 1):
            text = f"__global__ void k{name}(int* x) {{ *x = {number}; }}\n"
            text += f'extern "C" int {name}() {{ return {number}; }}\n'
            (path / f"{name}.cu").write_text(text)
        # The linker wants a driver's library, which no machine without a GPU has.
        stub = ["gcc", "-shared", "-x", "c", "/dev/null", "-o", str(path / "libcuda.so")]
        subprocess.run([*stub, "-Wl,-soname,libcuda.so.1"], check=True)

    def variables(self, workspace: str, **more: str) -> dict[str, str]:
        home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        return {
            "FLASHINFER_WORKSPACE_BASE": str(self.path / workspace), "CUDA_HOME": home,
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            "OPKILN_TRACE": str(self.path / f"{workspace}.json"), **more,
        }  # fmt: skip

    def start(self, workspace: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "opkiln", "run", sys.executable, "-c", SPEC, str(self.path)],
            env=environment(**self.variables(workspace, **more)), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def build(self, workspace: str, **more: str) -> tuple[dict[str, Any], list[str]]:
        """What the process told, and what was compiled."""
        process = self.start(workspace, **more)
        out, err = process.communicate()
        done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
        answer = told(done)
        assert answer["value"] == 3
        return answer, compiled(self.path / f"{workspace}.json")


@pytest.fixture
def flash(tmp_path: Path) -> Flash:
    return Flash(tmp_path)


@needs_flashinfer
def test_a_second_workspace_of_flashinfer_compiles_nothing(flash: Flash) -> None:
    _, first = flash.build("first")
    assert len(first) == 3
    answer, second = flash.build("second")
    assert (answer["own"], second) == ([], [])
    spelled = os.environ["PATH"].replace(":", "/:") + ":/nowhere"
    answer, third = flash.build("third", PATH=f"{Path(sys.executable).parent}:{spelled}")
    assert (answer["own"], third) == ([], [])


@needs_flashinfer
def test_another_cuda_toolkit_is_rebuilt_for(flash: Flash) -> None:
    flash.build("first")
    home = Path(flash.variables("")["CUDA_HOME"]).resolve()
    other = flash.path / "cuda"
    shutil.copytree(home / "include", other / "include", copy_function=os.symlink, symlinks=True)
    for each in home.iterdir():
        if each.name != "include":
            (other / each.name).symlink_to(each)
    runtime = other / "include" / "cuda_runtime_api.h"
    text = runtime.read_text()
    runtime.unlink()
    runtime.write_text(f"/* another release */\n{text}")
    _, made = flash.build("second", CUDA_HOME=str(other))
    assert len(made) == 3


@needs_flashinfer
def test_eight_processes_on_a_fresh_directory_compile_each_file_once(flash: Flash) -> None:
    traces = [flash.path / f"trace{number}.json" for number in range(8)]
    started = [flash.start("shared", OPKILN_TRACE=str(trace)) for trace in traces]
    for each in started:
        out, err = each.communicate()
        assert told(subprocess.CompletedProcess([], each.returncode, out, err))["value"] == 3
    made = [name for trace in traces for name in compiled(trace)]
    assert len(made) == len(set(made)) == 3


@needs_flashinfer
@pytest.mark.slow
def test_killed_builds_leave_the_others_a_library(flash: Flash) -> None:
    for number in range(5):
        workspace = f"killed{number}"
        (flash.path / "one.cu").write_text(f'extern "C" int one() {{ return 1 + 0 * {number}; }}\n')
        victim, other = flash.start(workspace), flash.start(workspace)
        time.sleep(4 + number)
        os.killpg(victim.pid, signal.SIGKILL)
        victim.communicate()
        out, err = other.communicate()
        answer = told(subprocess.CompletedProcess([], other.returncode, out, err))
        assert answer["value"] == 3
