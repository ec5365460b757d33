"""Several versions of one pybind11 extension in a process: each call gives the code it asked for.

pybind11 3 keeps finished modules by name for the whole process, so each test has a process of its
own. They share one store: what one has compiled, the others find.
"""

from __future__ import annotations

from subprocess import PIPE
from typing import TYPE_CHECKING

import pytest
from sample import child, forks, known, pool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

SCALE = """
#include <pybind11/pybind11.h>
double scale(double x) { return x * FACTOR; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("scale", &scale);
  m.def_submodule("inner").def("scale", &scale);
}
"""
HELPERS = f"""
import sys
from pathlib import Path
import opkiln
SCALE = {SCALE!r}
def source(directory, factor):
    path = Path(directory) / "fused.cpp"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#define FACTOR {{factor}}.0\\n{{SCALE}}")
    return str(path)
def values(*modules):
    return [(module.scale(1.0), module.inner.scale(1.0)) for module in modules]
"""
TWO, THREE = (2.0, 2.0), (3.0, 3.0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = known.make_store(tmp_path_factory.mktemp("versions") / "store")
    yield made
    pool.add(made)


def printed(code: str, store: Path, where: Path) -> list[str]:
    """The lines that a fresh process prints, which works in ``where``."""
    env = {"OPKILN_CACHE_DIR": str(store)}
    lines = f"import os\nos.chdir({str(where)!r})\n{HELPERS}{code}"
    done = child.finish(child.start(lines, env=env, bare=False), timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_load_inline_gives_each_edit_its_own_code_and_an_undone_edit_the_first(
    store: Path, tmp_path: Path
) -> None:
    code = """
def load(factor):
    text = f"#define FACTOR {factor}.0\\n{SCALE}"
    return opkiln.load_inline("fused", text, no_implicit_headers=True, extra_cflags=["-O0"])
first, edited, undone = load(2), load(3), load(2)
print(values(first, edited, undone))
print(undone is first, first.__name__, edited.__name__)
"""
    out = printed(code, store, tmp_path)
    assert out[0] == str([TWO, THREE, TWO])
    # As torch names them: the second version must not share the first one's submodules.
    assert out[1] == "True fused fused_v1"


def test_load_after_an_edit_and_in_two_projects_gives_what_lies_there(
    store: Path, tmp_path: Path
) -> None:
    code = """
def load(directory, factor):
    return opkiln.load("fused", [source(directory, factor)], ["-O0"])
mine, yours = load("mine", 2), load("yours", 3)
print(values(mine, yours))
print(values(load("mine", 3), mine, yours))
print(load("yours", 3) is yours, load("mine", 2) is mine)
print([name for name in sys.modules if name.startswith("fused")])
"""
    out = printed(code, store, tmp_path)
    assert out[0] == str([TWO, THREE])
    assert out[1] == str([THREE, TWO, THREE])
    assert out[2] == "True True"
    # As with torch: a module is not in sys.modules, its submodules are.
    assert out[3] == "['fused.inner', 'fused_v1.inner']"


def test_a_python_builder_reloads_what_was_edited(store: Path, tmp_path: Path) -> None:
    code = """
class Fused(opkiln.OpBuilder):
    NAME, KIND, ABI = "fused", "python", "torch"
    def sources(self):
        return ["fused.cpp"]
    def cxx_args(self):
        return ["-O0"]
source(".", 2)
first = Fused().load()
source(".", 3)
print(values(Fused().load(), Fused().load(reload=True), Fused().load(), first))
"""
    assert printed(code, store, tmp_path) == [str([TWO, THREE, THREE, TWO])]


@pytest.mark.full  # test_run.py: torch's functions are opkiln's, which the tests above call
def test_an_unmodified_program_gets_its_edit_under_opkiln_run(store: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        HELPERS.replace("import opkiln\n", "from torch.utils.cpp_extension import load\n")
        + """
first, edited, undone = (load("fused", [source(".", each)]) for each in (2, 3, 2))
print(values(first, edited, undone))
"""
    )
    started = forks.Fork(
        ["-m", "opkiln", "run", str(program)], stdout=PIPE, stderr=PIPE, text=True, cwd=tmp_path,
        env={**child.environment(), "OPKILN_CACHE_DIR": str(store)},
    )  # fmt: skip
    done = child.finish(started, timeout=600)
    assert done.stdout.splitlines() == [str([TWO, THREE, TWO])], done.stderr


@pytest.mark.full
def test_torchs_own_extension_of_the_same_name_stays_its_own(store: Path, tmp_path: Path) -> None:
    code = """
from torch.utils import cpp_extension
def by_torch(factor):
    os.makedirs(f"torchs{factor}", exist_ok=True)
    return cpp_extension.load("fused", [source(f"t{factor}", factor)],
                              build_directory=f"torchs{factor}")
ours = opkiln.load("fused", [source("ours", 2)], ["-O0"])
theirs = by_torch(3)
again = opkiln.load("fused", [source("ours", 3)], ["-O0"])
print([module.scale(1.0) for module in (ours, theirs, again)])
"""
    assert printed(code, store, tmp_path) == ["[2.0, 3.0, 3.0]"]


def test_a_class_that_both_versions_bind_is_refused_with_what_to_write(
    store: Path, tmp_path: Path
) -> None:
    code = """
CLASS = '''
#include <pybind11/pybind11.h>
struct Counter { int count = FACTOR; };
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::class_<Counter>(m, "Counter" LOCAL).def(pybind11::init<>())
      .def_readwrite("count", &Counter::count);
}
'''
def load(factor, local):
    flags = ["-O0", f"-DFACTOR={factor}", f"-DLOCAL={local}"]
    return opkiln.load_inline("counted", CLASS, no_implicit_headers=True, extra_cflags=flags)
first = load(2, "")
try:
    load(3, "")
except opkiln.errors.ReloadError as error:
    print(error.what)
    print("Counter" in error.why, error.hint)
print(first.Counter().count, first.Counter.__module__)
edited = load(3, ",pybind11::module_local()")
print(first.Counter().count, edited.Counter().count)
"""
    out = printed(code, store, tmp_path)
    assert "another library of this process binds one of its C++ classes" in out[0]
    assert out[1].startswith("True restart the process")
    assert "py::module_local()" in out[1]
    assert out[2:] == ["2 counted", "2 3"]
