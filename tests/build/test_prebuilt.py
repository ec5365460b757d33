"""What packages are installed with is found, the best of it is taken, and nothing is compiled."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample import child
from sample.levels import HIGH, LEVELS, LOW, lacks
from sample.shipped import Shipped, announce, described, mask, without_sources

from opkiln.decision.archs import features
from opkiln.machine import uname
from opkiln.machine.arch import cpu

if TYPE_CHECKING:
    from collections.abc import Callable

    from sample.package import Package, Steps


@pytest.fixture
def shipped(plain: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shipped:
    return Shipped(plain, "csrc/add.cpp", tmp_path, monkeypatch)


def best() -> int:
    """The highest level that this CPU has."""
    return max(n for n, name in LEVELS.items() if not cpu.missing_features(name, (), features()))


@pytest.mark.first_use
def test_what_a_package_carries_is_loaded_and_nothing_is_compiled(
    shipped: Shipped, steps: Steps, cache: Path
) -> None:
    leaf = shipped.build()
    done = len(steps.seen)
    assert shipped.load().add(1, 2) == 103
    assert shipped.origin == "prebuilt"
    assert shipped.opened == [str(leaf / "plain.so")]
    assert len(steps.seen) == done
    assert not cache.exists()


@pytest.mark.first_use
def test_what_a_wheel_of_ops_installs_is_found_wherever_it_is_on_the_path(
    shipped: Shipped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: Steps, cache: Path
) -> None:
    site = tmp_path / "site"
    leaf = shipped.build(site / "opkiln_prebuilt" / "somebodys_ops")
    monkeypatch.syspath_prepend(str(site))
    done = len(steps.seen)
    assert shipped.load().add(1, 2) == 103
    assert shipped.opened == [str(leaf / "plain.so")]
    assert "taken    its sources are today's" in shipped.trace
    assert len(steps.seen) == done
    assert not cache.exists()


def test_the_working_directory_is_no_place_to_be_installed_in(
    shipped: Shipped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped.build(tmp_path / "here" / "opkiln_prebuilt" / "ops")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path])
    shipped.load()
    assert shipped.origin == "built"


def test_what_is_installed_comes_before_ones_own_store(shipped: Shipped) -> None:
    shipped.load()
    assert shipped.origin == "built"
    leaf = shipped.build()
    assert shipped.load().add(1, 2) == 103
    artifact = shipped.loaded.artifact
    assert artifact is not None
    assert (artifact.path, artifact.origin) == (str(leaf / "plain.so"), "prebuilt")


def test_explain_says_what_was_taken_and_report_that_it_is_ready(shipped: Shipped) -> None:
    leaf = shipped.build()
    said = shipped.explained()
    assert said.startswith("plain: cached\n")
    assert f"prebuilt  taken    its sources are today's, and its code for {native()} runs" in said
    assert str(leaf / "plain.so") in said
    assert shipped.opened == []


def native() -> str:
    return str(cpu.native(uname.architecture(), features()))


def test_a_package_that_ships_no_sources_is_served(shipped: Shipped) -> None:
    shipped.build()
    without_sources(shipped.package)
    assert shipped.load().add(1, 2) == 103
    assert shipped.origin == "prebuilt"


def test_an_op_of_another_package_of_the_same_name_is_not_taken(
    shipped: Shipped, package: Callable[..., Package], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    site = tmp_path / "site"
    shipped.build(site / "opkiln_prebuilt" / "ops")
    monkeypatch.syspath_prepend(str(site))
    other = package("plain")
    other.edit("csrc/add.cpp", "a + b", "a - b")
    assert other.load().add(1, 2) == 99


@pytest.mark.parametrize("form", ["wheel", "out"])
def test_what_opkiln_build_writes_is_found_by_another_process_without_a_compiler(
    shipped: Shipped, tmp_path: Path, form: str
) -> None:
    announce(shipped.package, "plain", "PlainBuilder")
    written = tmp_path / "written"
    words = ["build", "plain", "--target", f"cpu:{LEVELS[1]}", f"--{form}", str(written), "--json"]
    run = "import sys; from opkiln.cli.main import main; sys.argv[0] = 'opkiln'; main()"
    said = child.run(run, *words, path=[shipped.package.where], bare=False)
    site = tmp_path / "site"
    if form == "wheel":
        (wheel,) = json.loads(said)["written"]
        zipfile.ZipFile(wheel).extractall(site)
    else:
        shutil.move(written, site / "opkiln_prebuilt" / "mine")
    code = f"""
        from {shipped.package.name}.op import PlainBuilder
        from opkiln.loading import loader
        builder = PlainBuilder()
        assert builder.load().add(1, 2) == 103
        print(loader.here.ops[builder.op().name].loaded.artifact.path)
    """
    env = {"OPKILN_MODE": "cached", "PATH": str(tmp_path / "nothing"), "OPKILN_CACHE_DIR": None,
           "HOME": str(tmp_path / "nobody")}  # fmt: skip
    path = child.run(code, path=[shipped.package.where, site], env=env).strip()
    assert path.startswith(str(site / "opkiln_prebuilt"))
    assert shipped.opened == [path]
    assert not (tmp_path / "nobody").exists()


def test_of_several_cpu_levels_the_best_that_this_cpu_has_is_taken(
    shipped: Shipped, steps: Steps
) -> None:
    for name in LEVELS.values():
        shipped.build(cpu=name)
    done = len(steps.seen)
    assert shipped.load().level() == best()
    assert shipped.origin == "prebuilt"
    assert len(steps.seen) == done


def test_code_for_this_very_cpu_is_better_than_for_its_level(shipped: Shipped) -> None:
    shipped.build(cpu=LEVELS[best()])
    exact = shipped.build()
    if described(exact)["target"]["cpu_features"] == []:
        pytest.skip("this CPU has nothing beyond its level")
    shipped.load()
    assert shipped.opened == [str(exact / "plain.so")]


_MASKED = """
import sys
from opkiln.machine import uname
uname._CPUINFO = sys.argv[1]
from {name}.op import PlainBuilder
from opkiln.loading import loader
builder = PlainBuilder()
library = builder.load()
print(library.level(), loader.here.ops[builder.op().name].loaded.artifact.origin)
print(loader.here.ops[builder.op().name].loaded.trace)
"""


@pytest.mark.parametrize("has", LEVELS)
def test_a_lower_cpu_gets_the_lower_level_and_opens_no_other(
    shipped: Shipped, tmp_path: Path, has: int
) -> None:
    if has > best():
        pytest.skip(f"this CPU has no {LEVELS[has]}")
    leaves = {level: shipped.build(cpu=LEVELS[level]) for level in LEVELS}
    code = _MASKED.format(name=shipped.package.name)
    info = mask(tmp_path / "cpuinfo", has)
    said = child.run(code, str(info), path=[shipped.package.where], env={"OPKILN_MODE": "cached"})
    assert said.startswith(f"{has} prebuilt\n")
    assert shipped.opened == [str(leaves[has] / "plain.so")]
    for level in range(has + 1, len(LEVELS) + 1):
        lacked = lacks(LEVELS[has], than=LEVELS[level])
        assert f"it needs {lacked}, which this CPU lacks" in said


def test_a_cpu_below_every_level_that_was_shipped_gets_a_build_of_its_own(
    shipped: Shipped, tmp_path: Path
) -> None:
    shipped.build(cpu=HIGH)
    code = _MASKED.format(name=shipped.package.name)
    number = next(number for number, level in LEVELS.items() if level == LOW)
    info = mask(tmp_path / "cpuinfo", number)
    said = child.run(code, str(info), path=[shipped.package.where])
    assert said.startswith(f"{number} built\n")
    assert f"refused  it needs {lacks(LOW, than=HIGH)}, which" in said
    assert not [path for path in shipped.opened if "/prebuilt/" in path]


@pytest.fixture
def torch_op(
    package: Callable[..., Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Shipped:
    """The op on torch's stable ABI, built elsewhere and carried by its package."""
    made = Shipped(package("stable"), "csrc/stable.cpp", tmp_path, monkeypatch)
    pytest.importorskip("torch")
    made.build()
    return made


@pytest.mark.first_use
def test_an_op_of_torch_is_served_and_nothing_is_compiled(
    torch_op: Shipped, steps: Steps, cache: Path
) -> None:
    import torch

    functions = torch_op.load()
    assert functions.who(torch.ones(2)) == 1  # the native one, not the reference
    assert torch_op.origin == "prebuilt"
    assert not steps.seen
    assert not cache.exists()


def test_torch_is_not_imported_to_say_whether_an_op_of_torch_would_be_served(
    torch_op: Shipped,
) -> None:
    code = f"""
        import sys
        from {torch_op.package.name}.op import StableBuilder
        from opkiln.loading.explain import explain
        print(explain(StableBuilder().op()))
        assert "torch" not in sys.modules
    """
    said = child.run(code, path=[torch_op.package.where], bare=False, forked=False)
    assert said.startswith("stable: cached\n")
    assert "prebuilt  taken" in said
    assert torch_op.opened == []


def test_a_python_module_is_served_though_the_interpreter_has_the_symbols_that_it_needs(
    tmp_path: Path,
) -> None:
    """They are in no library that it was linked to."""
    site = tmp_path / "site"
    module = site / "module_ops"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text(
        "from opkiln.builder import OpBuilder\n"
        "class ModuleBuilder(OpBuilder):\n"
        "    NAME, KIND, ABI = 'module_op', 'python', 'none'\n"
        "    def sources(self):\n"
        "        return ['op.c' + 'pp']\n"
    )
    (module / "op.cpp").write_text(
        "#include <Python.h>\n"
        "static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }\n"
        'static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {}};\n'
        'static PyModuleDef module = {PyModuleDef_HEAD_INIT, "module_op", "", 0, methods};\n'
        "PyMODINIT_FUNC PyInit_module_op() { return PyModule_Create(&module); }\n"
    )
    build = """
        import sys
        from module_ops import ModuleBuilder
        from opkiln.decision.terms import BUILD, Request
        from opkiln.loading import loader
        from opkiln.store import layer
        made, _ = loader.obtain(Request(ModuleBuilder().op(), BUILD))
        layer.export([made.path], sys.argv[1])
    """
    child.run(build, str(module / "prebuilt"), path=[site], bare=False)
    load = """
        from module_ops import ModuleBuilder
        print(ModuleBuilder().load().answer())
    """
    env = {"OPKILN_MODE": "cached", "OPKILN_CACHE_DIR": str(tmp_path / "empty")}
    assert child.run(load, path=[site], env=env, bare=False).strip() == "42"
