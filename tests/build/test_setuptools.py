"""Packages that setuptools builds: into an environment of their own, some with pip itself."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path

import pytest
from sample import install
from sample.install import CALL, NATIVE_ONLY, Environment
from sample.levels import HIGH, LOW

from opkiln.builder import registry
from opkiln.machine.toolchain import host, torch_sdk
from opkiln.ship import hook

pytestmark = pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed")

CP = f"cp{sys.version_info[0]}{sys.version_info[1]}"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return install.with_opkiln(tmp_path_factory, "setuptools")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPKILN_BUILD_TARGETS", f"cpu:{LOW},{HIGH}")
    return install.quick_project(tmp_path / "project")


BOTH = [f"cpu {LOW}", f"cpu {HIGH}"]


def test_a_package_is_installed_pure_and_never_imported_unless_ops_are_asked_for(
    environment: Environment, project: Path
) -> None:
    init = project / "src" / "quick" / "__init__.py"
    init.write_text('raise SystemExit("imported")\n')
    environment.install(project)
    assert environment.wheel_file("quick") == "py3-none-any purelib"
    assert environment.prebuilt("quick") == {}


def test_the_same_project_installs_precompiled_and_pure_by_turns(
    environment: Environment, project: Path, tmp_path: Path
) -> None:
    said = environment.pip_install(project, DS_BUILD_OPS="1")
    assert environment.prebuilt("quick") == {"first": BOTH, "second": BOTH}
    tag, where = environment.wheel_file("quick").split()
    assert tag.startswith("py3-none-manylinux_2_")
    assert where == "platlib"
    assert f"quick: 2 ops precompiled, wheel tag {tag}" in said
    fresh = {"OPKILN_CACHE_DIR": str(tmp_path / "fresh")}
    assert environment.run("-c", CALL, cwd=tmp_path, **NATIVE_ONLY, **fresh) == "41\n"
    assert not (tmp_path / "fresh").exists(), "a prebuilt op writes nothing"
    # setuptools keeps its build directory, with what was precompiled into it.
    environment.install(project)
    assert environment.prebuilt("quick") == {}
    assert environment.wheel_file("quick") == "py3-none-any purelib"


@pytest.mark.parametrize(
    "variables", [{"QUICK_SECOND": "1"}, {"OPKILN_BUILD_OPS": "1", "OPKILN_BUILD_FIRST": "0"}]
)
def test_a_variable_selects_or_excludes_one_op(
    environment: Environment, project: Path, variables: dict[str, str]
) -> None:
    environment.install(project, **variables)
    assert environment.prebuilt("quick") == {"second": BOTH}


def test_an_op_that_does_not_compile_fails_the_install_whether_it_is_named_or_not(
    environment: Environment, project: Path
) -> None:
    environment.uninstall("quick")
    (project / "src" / "quick" / "csrc" / "first.cpp").write_text("no C++ at all\n")
    said = environment.refuses(project, OPKILN_BUILD_FIRST="1")
    assert "quick cannot be installed with first precompiled, as OPKILN_BUILD_FIRST asks" in said
    assert "op first: csrc/first.cpp does not compile" in said
    assert "Traceback" not in said
    assert not (environment.site / "quick").exists()
    said = environment.refuses(project, OPKILN_BUILD_OPS="1")
    assert "quick cannot be installed with first precompiled, as OPKILN_BUILD_OPS asks" in said
    assert "op first: csrc/first.cpp does not compile" in said
    said = environment.install(
        project, OPKILN_BUILD_OPS="1", OPKILN_BUILD_FIRST="0", OPKILN_BUILD_THIRD="1"
    )
    assert environment.prebuilt("quick") == {"second": BOTH}
    assert "note: OPKILN_BUILD_THIRD: quick has no such op" in said


@pytest.mark.first_use
def test_an_editable_install_builds_for_this_machine_and_writes_nothing_to_the_sources(
    environment: Environment, project: Path, cache: Path
) -> None:
    environment.install(project, DS_BUILD_OPS="1")  # leaves a build directory behind
    before = sorted(path for path in project.rglob("*") if "build" not in path.parts)
    said = environment.install(project, editable=True, OPKILN_BUILD_OPS="1")
    assert "quick: 2 ops built for this machine" in said
    after = sorted(path for path in project.rglob("*") if "build" not in path.parts)
    assert [path for path in after if path not in before] == []
    assert environment.wheel_file("quick") == "py3-none-any purelib"
    assert environment.run("-c", CALL, cwd=project.parent, **NATIVE_ONLY) == "41\n"
    # The sources are live: an edit is compiled at the next use, with nothing stale in its way.
    header = project / "src" / "quick" / "csrc" / "number.h"
    header.write_text(header.read_text().replace("41", "7"))
    assert environment.run("-c", CALL, cwd=project.parent) == "7\n"
    assert cache.exists()


@pytest.mark.first_use
def test_an_editable_install_with_nothing_asked_for_builds_nothing(
    environment: Environment, project: Path, cache: Path
) -> None:
    environment.install(project, editable=True)
    assert not cache.exists()
    assert environment.run("-c", CALL, cwd=project.parent) == "41\n"


def test_a_header_that_the_wheel_would_lack_is_an_error_and_no_sources_are_an_authors_right(
    environment: Environment, project: Path, tmp_path: Path
) -> None:
    pyproject = project / "pyproject.toml"
    text = pyproject.read_text()
    pyproject.write_text(text.replace('["csrc/*"]', '["csrc/*.cpp"]'))
    said = environment.refuses(project, OPKILN_BUILD_OPS="1")
    assert "quick would be installed without csrc/number.h" in said
    shutil.rmtree(project / "build")
    pyproject.write_text(text.replace('["csrc/*"]', "[]") + "\n[tool.setuptools]\n"
                         "include-package-data = false\n")  # fmt: skip
    environment.install(project, OPKILN_BUILD_OPS="1")
    assert not (environment.site / "quick" / "csrc").exists()
    assert environment.run("-c", CALL, cwd=tmp_path, **NATIVE_ONLY) == "41\n"


def test_a_pure_wheel_without_the_sources_of_its_ops_is_not_built(
    environment: Environment, project: Path
) -> None:
    environment.uninstall("quick")
    pyproject = project / "pyproject.toml"
    text = pyproject.read_text()
    pyproject.write_text(text.replace('["csrc/*"]', '["csrc/*.cpp"]'))
    assert "quick would be installed without quick/csrc/number.h" in environment.refuses(project)
    shutil.rmtree(project / "build")
    pyproject.write_text(text.replace('["csrc/*"]', "[]") + "\n[tool.setuptools]\n"
                         "include-package-data = false\n")  # fmt: skip
    said = environment.refuses(project)
    lost = "quick/csrc/first.cpp, quick/csrc/number.h, quick/csrc/second.cpp"
    assert f"quick would be installed without {lost}" in said
    assert "hint: [tool.setuptools.package-data]" in said
    assert "Traceback" not in said
    assert not (environment.site / "quick").exists()


def test_a_build_string_marks_the_version_and_a_bad_one_fails(
    environment: Environment, project: Path
) -> None:
    environment.install(project, DS_BUILD_STRING="cu130")
    assert environment.version("quick") == "1.0+cu130"
    said = environment.refuses(project, DS_BUILD_STRING="cu 130")
    assert "DS_BUILD_STRING='cu 130' cannot be part of a version" in said


def test_an_op_for_one_python_has_that_pythons_tag(environment: Environment, project: Path) -> None:
    package = project / "src" / "quick"
    (package / "csrc" / "first.cpp").write_text(
        textwrap.dedent("""\
        #include <Python.h>
        static PyModuleDef module = {PyModuleDef_HEAD_INIT, "first", nullptr, -1, nullptr};
        PyMODINIT_FUNC PyInit_first() { return PyModule_Create(&module); }
    """)
    )
    init = package / "__init__.py"
    init.write_text(init.read_text().replace('KIND = "plain"', 'KIND = "python"', 1))
    environment.install(project, OPKILN_BUILD_FIRST="1")
    assert environment.wheel_file("quick").startswith(f"{CP}-{CP}-manylinux_2_")


def test_a_source_distribution_holds_what_its_wheels_are_built_from(
    environment: Environment, project: Path, tmp_path: Path
) -> None:
    code = "import setuptools.build_meta as b, sys; print(b.build_sdist(sys.argv[1]))"
    name = environment.run("-c", code, tmp_path, cwd=project, OPKILN_BUILD_OPS="1").split()[-1]
    shutil.unpack_archive(tmp_path / name, tmp_path)
    environment.install(tmp_path / name.removesuffix(".tar.gz"), OPKILN_BUILD_SECOND="1")
    assert environment.prebuilt("quick") == {"second": BOTH}


def test_a_package_that_needs_torch_to_be_imported_says_so_where_a_build_has_none(
    environment: Environment, project: Path, tmp_path: Path
) -> None:
    bare = Environment(tmp_path / "without-torch", without=("torch",))
    for each in environment.site.glob("*opkiln*"):
        (bare.site / each.name).symlink_to(each)
    init = project / "src" / "quick" / "__init__.py"
    init.write_text("import torch\n" + init.read_text())
    said = bare.install(project, DS_BUILD_OPS="1")
    assert bare.wheel_file("quick") == "py3-none-any purelib"
    assert "skipped first: op first: quick:FirstBuilder cannot be imported" in said
    assert "No module named 'torch'" in said
    assert "hint: pip install --no-build-isolation" in said
    said = bare.refuses(project, DS_BUILD_FIRST="1")
    assert "No module named 'torch'" in said
    assert "hint: pip install --no-build-isolation" in said


def test_builders_among_ext_modules_are_precompiled_by_build_extension(
    environment: Environment, project: Path, tmp_path: Path
) -> None:
    (project / "pyproject.toml").write_text('[build-system]\nrequires = ["setuptools"]\n')
    (project / "setup.py").write_text(
        textwrap.dedent("""\
        import sys
        sys.path.insert(0, "src")
        from quick import FirstBuilder
        from setuptools import setup
        from opkiln.compat.torch import BuildExtension
        setup(
            name="quick", version="1.0", packages=["quick"], package_dir={"": "src"},
            package_data={"quick": ["csrc/*"]},
            ext_modules=[FirstBuilder().builder()],
            cmdclass={"build_ext": BuildExtension},
        )
    """)
    )
    environment.install(project)
    assert environment.prebuilt("quick") == {"first": BOTH}
    assert environment.wheel_file("quick").startswith("py3-none-manylinux_2_")
    assert not list(environment.site.glob("quick/**/*_op*.so")), "nothing compiled it twice"
    assert environment.run("-c", CALL, cwd=tmp_path, **NATIVE_ONLY) == "41\n"
    environment.run("setup.py", "-q", "build_ext", "--inplace", cwd=project)
    assert environment.run("-c", CALL, cwd=project / "src", **NATIVE_ONLY) == "41\n"


_COMMANDS = """
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class MyBuildPy(build_py):
    def run(self):
        super().run()
        print("MyBuildPy ran")


class MyWheel(bdist_wheel):
    def run(self):
        super().run()
        print("MyWheel ran")
"""


@pytest.mark.parametrize("file", ["setup.cfg", "pyproject.toml"])
def test_commands_that_a_project_names_in_its_files_run_and_its_ops_are_precompiled(
    environment: Environment, project: Path, file: str
) -> None:
    (project / "src" / "my_commands.py").write_text(_COMMANDS)
    named = {"build_py": "my_commands.MyBuildPy", "bdist_wheel": "my_commands.MyWheel"}
    if file == "setup.cfg":
        lines = "".join(f"    {name} = {value}\n" for name, value in named.items())
        text = f"[options]\npackage_dir =\n    = src\ncmdclass =\n{lines}"
    else:
        lines = "".join(f'{name} = "{value}"\n' for name, value in named.items())
        text = (project / file).read_text() + f"[tool.setuptools.cmdclass]\n{lines}"
    (project / file).write_text(text)
    said = environment.install(project, OPKILN_BUILD_FIRST="1")
    assert "MyBuildPy ran" in said
    assert "MyWheel ran" in said
    assert environment.prebuilt("quick") == {"first": BOTH}
    assert environment.wheel_file("quick").startswith("py3-none-manylinux_2_")


def test_a_setuptools_that_has_no_bdist_wheel_yet_can_be_asked_for_what_a_build_needs(
    environment: Environment, project: Path
) -> None:
    # As those before 70.1 are while `wheel`, which they ask for, is not installed.
    (project / "setup.py").write_text(
        textwrap.dedent("""\
        from setuptools import Distribution, setup
        from setuptools.errors import ModuleError

        class Earlier(Distribution):
            def get_command_class(self, command):
                if command == "bdist_wheel":
                    raise ModuleError("invalid command 'bdist_wheel'")
                return super().get_command_class(command)

        print("commands:", *setup(distclass=Earlier).cmdclass)
    """)
    )
    code = "import setuptools.build_meta as b; print(b.get_requires_for_build_wheel())"
    said = environment.run("-c", code, cwd=project).splitlines()
    (commands,) = (line.split() for line in said if line.startswith("commands: "))
    assert {"build", "build_opkiln", "egg_info"} <= {*commands}
    assert said[-1] == "[]"


def test_other_extensions_are_setuptools_own_and_so_is_the_tag(
    environment: Environment, project: Path
) -> None:
    (project / "src" / "quick" / "plain.c").write_text(
        textwrap.dedent("""\
        #include <Python.h>
        static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "plain", 0, -1, 0};
        PyMODINIT_FUNC PyInit_plain(void) { return PyModule_Create(&module); }
    """)
    )
    (project / "setup.py").write_text(
        textwrap.dedent("""\
        from setuptools import Extension, setup
        from opkiln.compat.torch import BuildExtension
        setup(
            ext_modules=[Extension("quick.plain", ["src/quick/plain.c"])],
            cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
        )
    """)
    )
    environment.install(project, OPKILN_BUILD_OPS="1")
    assert environment.prebuilt("quick") == {"first": BOTH, "second": BOTH}
    assert environment.wheel_file("quick").startswith(f"{CP}-{CP}-linux_")
    environment.run("-c", "import quick.plain", cwd=project.parent)


@pytest.mark.skipif(torch_sdk.locate() is None, reason="torch is not installed")
def test_extensions_as_torch_makes_them_are_built_as_torch_means_them(
    environment: Environment, project: Path, cache: Path
) -> None:
    # Without torch's headers, which take half a minute; with all that torch's command adds.
    (project / "src" / "quick" / "csrc" / "module.cpp").write_text(
        textwrap.dedent("""\
        #include <Python.h>
        #include "number.h"
        #define JOINED(a, b) a##b
        #define INIT(name) JOINED(PyInit_, name)
        #define TEXT_OF(name) #name
        #define TEXT(name) TEXT_OF(name)
        static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(number + MORE); }
        static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, nullptr}, {}};
        static PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), nullptr, -1,
                                     methods};
        PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
    """)
    )
    (project / "setup.py").write_text(
        textwrap.dedent("""\
        from setuptools import setup
        from torch.utils.cpp_extension import CppExtension
        from opkiln.compat.torch import BuildExtension
        setup(
            ext_modules=[
                CppExtension(
                    "quick._c", ["src/quick/csrc/module.cpp"], define_macros=[("MORE", "1")],
                    include_dirs=["src/quick/csrc"], extra_compile_args={"cxx": ["-Wall"]},
                ),
            ],
            cmdclass={"build_ext": BuildExtension},
        )
    """)
    )
    build = ("setup.py", "-q", "build_ext", "--inplace")
    done = environment.fork(*build, cwd=project)
    assert done.returncode == 0, done.stderr
    code = "import torch, quick._c; print(quick._c.answer())"
    assert environment.fork("-c", code, cwd=project / "src").stdout == "42\n"
    assert list(cache.glob("v1/ops/quick/_c/*/*/*/*.so")), "it is cached as every build is"
    module = project / "src" / "quick" / "csrc" / "module.cpp"
    module.write_text(module.read_text().replace("MORE);", "MORE;"))
    done = environment.fork(*build, cwd=project)
    assert done.returncode == 1
    assert "error: op _c: src/quick/csrc/module.cpp does not compile" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_project_without_ops_is_left_alone(environment: Environment, tmp_path: Path) -> None:
    project = tmp_path / "other"
    (project / "other").mkdir(parents=True)
    (project / "other" / "__init__.py").write_text("")
    (project / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "1.0"\n')
    (project / "setup.py").write_text(
        "import sys, setuptools\nsetuptools.setup()\n"
        "print('imported:', *sorted(name for name in sys.modules if name.startswith('opkiln')))\n"
    )
    said = environment.install(project, OPKILN_BUILD_OPS="1", DS_BUILD_STRING="cu130")
    assert "build_opkiln" not in said
    assert "imported: opkiln opkiln.ship opkiln.ship.hook\n" in said
    assert environment.version("other") == "1.0"


def test_an_op_goes_by_one_name(environment: Environment, project: Path) -> None:
    pyproject = project / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("second =", "other ="))
    said = environment.refuses(project, OPKILN_BUILD_OTHER="1")
    assert "the entry point other = quick:SecondBuilder is for an op called second" in said


def test_the_hook_looks_for_the_group_that_the_registry_reads() -> None:
    assert hook._MENTION == registry.GROUP
