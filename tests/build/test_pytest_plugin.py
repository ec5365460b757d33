"""``pytest --opkiln=MODE``: an author's tests, natively and as references, in one process."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample import child, forks, known, package, pool

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).resolve().parents[2] / "docs" / "continuous-integration.md"

# A decorated op (op.h) and an op of a builder class (torch's stable headers, whose library
# registers itself). Each tells who computed it.
OPS = """
from stable.op import StableBuilder
from torch import Tensor

import opkiln


@opkiln.op("doubled.cpp", namespace="plugged")
def doubled(x: Tensor) -> Tensor:
    return x * 2  # the native one adds a thousandth


@opkiln.op("broken.cpp", namespace="plugged")
def broken(x: Tensor) -> Tensor:
    return x * 2
"""
KERNEL = """
#include <opkiln/op.h>
using opk::Tensor;

Tensor doubled(const Tensor& x) {
  OPK_SERVED(x.dim() < 2, "x has ", x.dim(), " dimensions");
  Tensor out = opk::empty_like(x);
  const float* a = x.data<const float>();
  float* o = out.data<float>();
  for (int64_t i = 0; i < x.numel(); ++i) o[i] = a[i] * 2 + 0.001f;
  return out;
}
OPKILN_OP(doubled, cpu);
"""
TESTS = """
import subprocess
import sys
import unittest

import pytest
import torch
from ops import StableBuilder, doubled

X = torch.ones(3)
AS = {"native": 2.001, "reference": 2.0}


def test_decorated(opkiln_mode):
    assert doubled(X)[0].item() == pytest.approx(AS[opkiln_mode], abs=1e-5)
    assert doubled.load("cpu") == (opkiln_mode == "native")


def test_builder(opkiln_mode):
    loaded = StableBuilder().loaded()
    assert (loaded.artifact is not None) == (opkiln_mode == "native")
    who = {StableBuilder().load().who(X), torch.ops.stable.who(X)}
    assert who == {int(opkiln_mode == "native")}


def test_a_child_process(opkiln_mode):
    code = "from opkiln.settings import settings; print(settings.mode)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == opkiln_mode


@pytest.fixture(scope="module")
def made(opkiln_mode):
    return opkiln_mode, doubled(X)[0].item()


def test_a_fixture_of_the_module(made, opkiln_mode):
    assert made[0] == opkiln_mode
    assert made[1] == pytest.approx(AS[opkiln_mode], abs=1e-5)


@pytest.mark.opkiln("native")
def test_only_native():
    assert doubled(X)[0].item() != 2


@pytest.mark.opkiln("reference")
def test_only_reference():
    assert doubled(X)[0].item() == 2


class TestCase(unittest.TestCase):
    def test_once(self):
        self.assertNotEqual(doubled(X)[0].item(), 2)
"""
GRAPH = """
import torch
from ops import doubled
from test_author import AS, X

compiled = torch.compile(doubled, fullgraph=True, backend="eager")

def test_compiled_in_another_test(opkiln_mode):
    assert abs(compiled(X)[0].item() - AS[opkiln_mode]) < 1e-5
"""
FALLING_BACK = """
import torch
from ops import broken, doubled

def test_served():
    doubled(torch.ones(3))

def test_not_served():
    doubled(torch.ones(3, 3))

def test_does_not_compile():
    broken(torch.ones(3))
"""
# Tests one after the other in alternating modes, which no order of pytest's own gives.
ALTERNATING = """
import itertools
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    modes = {"native": [], "reference": []}
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        modes[params.get("opkiln_mode", "native")].append(item)
    pairs = itertools.zip_longest(modes["native"], modes["reference"])
    items[:] = [item for pair in pairs for item in pair if item is not None] * 2
"""


class Project:
    """An author's package and its tests."""

    def __init__(self, where: Path) -> None:
        self.where = where
        shutil.copytree(package.HERE / "stable", where / "stable")
        (where / "ops.py").write_text(OPS)
        (where / "doubled.cpp").write_text(KERNEL)
        (where / "broken.cpp").write_text(KERNEL.replace("doubled", "broken").replace("{", "", 1))
        (where / "test_author.py").write_text(TESTS)
        (where / "test_graph.py").write_text(GRAPH)
        (where / "test_falls.py").write_text(FALLING_BACK)
        (where / "alternating.py").write_text(ALTERNATING)
        self.store = known.make_store(where / "store")

    def pytest(
        self, *arguments: str, forked: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        # The plugin by its module: an editable install may know no entry point of it yet.
        given = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OPKILN_CACHE_DIR": str(self.store),
                 "OPKILN_STORE_LAYERS": str(pool.LAYER)}  # fmt: skip
        argv = ["-m", "pytest", "-p", "opkiln.testing.plugin", "-p", "no:cacheprovider", "-rpfsE",
                *arguments]  # fmt: skip
        start = forks.Fork if forked else subprocess.Popen
        started = start(
            argv if forked else [sys.executable, *argv], cwd=self.where, text=True,
            env=child.environment([self.where]) | given | variables,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        return child.finish(started, timeout=300)


def passed(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The names of the tests that passed; none failed."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("PASSED ")]
    return sorted(line.rpartition("::")[2] for line in lines)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    made = Project(tmp_path_factory.mktemp("author"))
    yield made
    pool.add(made.store)


@pytest.fixture
def warm() -> None:
    """The store is that of the project."""


BOTH = ["test_a_child_process", "test_a_fixture_of_the_module", "test_builder", "test_decorated"]


def test_both_runs_each_test_twice_and_nothing_of_one_serves_the_next(project: Project) -> None:
    """All tests twice, in the order native, reference, native, ..."""
    done = project.pytest("--opkiln=both", "-p", "alternating", "test_author.py", "test_graph.py")
    assert "opkiln: native and reference" in done.stdout
    twice = [*BOTH, "test_compiled_in_another_test"]
    expected = [f"{each}[{mode}]" for each in twice for mode in ("native", "reference")]
    expected += ["test_once", "test_only_native[native]", "test_only_reference[reference]"]
    assert passed(done) == sorted(2 * expected)
    assert "Overriding a previously registered kernel" not in done.stdout + done.stderr


def test_workers_run_the_modes_too(project: Project) -> None:
    pytest.importorskip("xdist")
    done = project.pytest("--opkiln=both", "-p", "xdist", "-n", "1", "test_author.py")
    assert "11 passed" in done.stdout, done.stdout + done.stderr


def test_native_alone_leaves_names_as_they_are_and_fails_tests_that_fall_back(
    project: Project,
) -> None:
    done = project.pytest("--opkiln=native", "test_author.py", "test_falls.py")
    lines = [line for line in done.stdout.splitlines() if line.startswith("PASSED ")]
    names = sorted(line.rpartition("::")[2] for line in lines)
    assert names == sorted([*BOTH, "test_once", "test_only_native", "test_served"]), done.stdout
    assert "it is marked opkiln('reference'), and this run is not" in done.stdout
    assert "2 failed, 7 passed, 1 skipped" in done.stdout
    assert "CompileError: op broken: broken.cpp does not compile" in done.stdout
    assert "hint: opkiln build broken" in done.stdout
    (shown,) = re.findall(r"```text\n(E   .*?)```", PAGE.read_text(), re.DOTALL)
    for line in shown.replace("scaled_add", "doubled").splitlines():
        assert line.removeprefix("E ").strip() in done.stdout


def test_reference_alone_needs_no_compiler_and_makes_no_store(
    project: Project, tmp_path: Path
) -> None:
    done = project.pytest(
        "--opkiln=reference", "test_author.py", "test_falls.py", "-k", "not once",
        OPKILN_CACHE_DIR=str(tmp_path / "none"), CXX="/nowhere/g++",
    )  # fmt: skip
    falling = ["test_served", "test_not_served", "test_does_not_compile"]
    assert passed(done) == sorted([*BOTH, "test_only_reference", *falling])
    assert not (tmp_path / "none").exists()


def test_without_the_option_a_fallback_is_a_warning(project: Project) -> None:
    done = project.pytest("test_falls.py")
    assert "3 passed" in done.stdout, done.stdout
    assert "FallbackWarning: op broken runs as its pure-PyTorch reference" in done.stdout
    assert "FallbackWarning: op doubled runs as its pure-PyTorch reference" in done.stdout


def test_without_the_option_the_fixture_tells_the_mode_of_the_environment(
    project: Project,
) -> None:
    (project.where / "test_mode.py").write_text("def test_it(opkiln_mode): print(opkiln_mode)\n")
    for variables, mode in (({}, "auto"), ({"OPKILN_MODE": "cached"}, "cached")):
        done = project.pytest("-rpP", "test_mode.py", **variables)
        assert passed(done) == ["test_it"]
        assert f"\n{mode}\n" in done.stdout


def test_a_marker_with_an_unknown_mode_is_an_error(project: Project) -> None:
    (project.where / "test_marked.py").write_text(
        "import pytest\n@pytest.mark.opkiln('fast')\ndef test_it(): pass\n"
    )
    for mode in ("both", "native"):
        done = project.pytest(f"--opkiln={mode}", "--strict-markers", "test_marked.py")
        assert done.returncode != 0
        assert "takes one of native, reference" in done.stdout + done.stderr
    assert passed(project.pytest("--strict-markers", "test_marked.py")) == ["test_it"]


def test_the_plugin_imports_next_to_nothing() -> None:
    code = (
        "import sys, pytest\n"
        "before = set(sys.modules)\n"
        "import opkiln.testing.plugin\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = child.run(code, bare=False, forked=False)
    own = ["opkiln", "opkiln.base", "opkiln.base.lazy", "opkiln.testing"]
    assert done.split() == [*own, "opkiln.testing.plugin"]


def test_a_run_without_ops_imports_neither_torch_nor_the_loader(project: Project) -> None:
    (project.where / "test_other.py").write_text(
        "import sys\n"
        "def test_it(): assert not {'torch', 'opkiln.loading.loader'} & set(sys.modules)\n"
    )
    for options in ([], ["--opkiln=both"]):
        assert project.pytest(*options, "test_other.py", forked=False).returncode == 0
