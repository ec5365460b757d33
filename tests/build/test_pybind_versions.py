"""Several versions of one pybind11 extension in a process: each call gives the code it asked for.

pybind11 3 keeps finished modules by name for the whole process, so each test has a process of its
own. They share one store, and one source with the bindings, which takes ten seconds to compile;
the versions differ in the other source.
"""

from __future__ import annotations

import os
import sys
from subprocess import PIPE
from typing import TYPE_CHECKING

import pytest
from sample import child, forks, known, pool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

BOUND = """
#include <pybind11/pybind11.h>
double factor();
double scale(double x) { return x * factor(); }
struct Counter { double count = factor(); };
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("scale", &scale);
  m.def_submodule("inner").def("scale", &scale);
#ifdef GLOBAL
  pybind11::class_<Counter>(m, "Counter")
#else
  pybind11::class_<Counter>(m, "Counter", pybind11::module_local())
#endif
      .def(pybind11::init<>()).def_readwrite("count", &Counter::count);
}
"""
HELPERS = f"""
import sys
from pathlib import Path
import opkiln
BOUND = {BOUND!r}
def sources(directory, factor):
    bound, fused = Path(directory) / "bound.cpp", Path(directory) / "fused.cpp"
    bound.parent.mkdir(exist_ok=True)
    bound.write_text(BOUND)
    fused.write_text(f"double factor() {{{{ return {{factor}}.0; }}}}\\n")
    return [str(bound), str(fused)]
def load(directory, factor, *flags):
    return opkiln.load("fused", sources(directory, factor), ["-O0", *flags])
def values(*modules):
    return [(module.scale(1.0), module.inner.scale(1.0)) for module in modules]
"""
TWO, THREE = (2.0, 2.0), (3.0, 3.0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = known.make_store(tmp_path_factory.mktemp("versions") / "store")
    yield made
    pool.add(made)


def printed(code: str, store: Path, where: Path, **variables: str) -> list[str]:
    """The lines that a fresh process prints, which works in ``where``."""
    env = {"OPKILN_CACHE_DIR": str(store), **variables}
    lines = f"import os\nos.chdir({str(where)!r})\n{HELPERS}{code}"
    done = child.finish(child.start(lines, env=env, bare=False), timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# load() calls the same loader; tests/build/test_extension.py edits inline text.
@pytest.mark.full
def test_load_inline_gives_each_edit_its_own_code_and_an_undone_edit_the_first(
    store: Path, tmp_path: Path
) -> None:
    code = """
def load(factor):
    text = [f"double factor() {{ return {factor}.0; }}", BOUND]
    return opkiln.load_inline("fused", text, no_implicit_headers=True, extra_cflags=["-O0"])
first, edited, undone = load(2), load(3), load(2)
print(values(first, edited, undone))
print(undone is first)
"""
    assert printed(code, store, tmp_path) == [str([TWO, THREE, TWO]), "True"]


def test_load_after_an_edit_and_in_two_projects_gives_what_lies_there(
    store: Path, tmp_path: Path
) -> None:
    code = """
mine, yours = load("mine", 2), load("yours", 3)
print(values(mine, yours))
print(values(load("mine", 3), mine, yours))
print(load("yours", 3) is yours, load("mine", 2) is mine)
print(mine.__name__, yours.__name__)
print([name for name in sys.modules if name.startswith("fused")])
"""
    out = printed(code, store, tmp_path)
    assert out[0] == str([TWO, THREE])
    assert out[1] == str([THREE, TWO, THREE])
    assert out[2] == "True True"
    # As torch names them: the second version must not share the first one's submodules.
    assert out[3] == "fused fused_v1"
    # As with torch: a module is not in sys.modules, its submodules are.
    assert out[4] == "['fused.inner', 'fused_v1.inner']"
    code = 'print(values(load("mine", 3)))'
    no_compiler = os.path.dirname(sys.executable)
    assert printed(code, store, tmp_path, PATH=no_compiler) == [str([THREE])]


def test_a_python_builder_reloads_what_was_edited(store: Path, tmp_path: Path) -> None:
    code = """
class Fused(opkiln.OpBuilder):
    NAME, KIND, ABI = "fused", "python", "torch"
    def sources(self):
        return ["bound.cpp", "fused.cpp"]
    def cxx_args(self):
        return ["-O0"]
sources(".", 2)
first = Fused().load()
sources(".", 3)
print(values(Fused().load(), Fused().load(reload=True), Fused().load(), first))
"""
    assert printed(code, store, tmp_path) == [str([TWO, THREE, THREE, TWO])]


@pytest.mark.full  # test_run.py: torch's functions are opkiln's, which the tests above call
def test_an_unmodified_program_gets_its_edit_under_opkiln_run(store: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        HELPERS.replace("import opkiln\n", "from torch.utils import cpp_extension as opkiln\n")
        + """
first, edited, undone = (load(".", each) for each in (2, 3, 2))
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
os.makedirs("torchs")
ours = load("ours", 2)
theirs = cpp_extension.load("fused", sources("theirs", 3), build_directory="torchs")
again = load("ours", 3)
print([module.scale(1.0) for module in (ours, theirs, again)])
"""
    assert printed(code, store, tmp_path) == ["[2.0, 3.0, 3.0]"]


def test_a_class_that_both_versions_bind_is_refused_with_what_to_write(
    store: Path, tmp_path: Path
) -> None:
    code = """
first = load(".", 2, "-DGLOBAL")
try:
    load(".", 3, "-DGLOBAL")
except opkiln.errors.ReloadError as error:
    print(error.what)
    print("Counter" in error.why, error.hint)
print(first.Counter().count, first.Counter.__module__)
edited = load(".", 3)
print(first.Counter().count, edited.Counter().count)
"""
    out = printed(code, store, tmp_path)
    assert "another library of this process binds one of its C++ classes" in out[0]
    assert out[1].startswith("True restart the process")
    assert "py::module_local()" in out[1]
    assert out[2:] == ["2.0 fused", "2.0 3.0"]
