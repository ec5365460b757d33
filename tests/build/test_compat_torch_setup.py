"""Unmodified setup.py scripts: by opkiln, and in full by torch, which gives the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from sample import child, forks, known, pool
from sample.compat import module

from opkiln.machine.binary import fatbin
from opkiln.machine.toolchain import host, toolkits

if TYPE_CHECKING:
    from collections.abc import Iterator

theirs = pytest.importorskip("torch.utils.cpp_extension")
pytestmark = pytest.mark.skipif(
    not host.available() or not theirs.is_ninja_available(),
    reason="torch builds with a C++ compiler and ninja",
)

SHAPES = """
import os, subprocess
os.environ["CFLAGS"] = "-DFROM_CFLAGS=3"     # set by the script, read by the build
os.environ["MAX_JOBS"] = "2"
from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

os.makedirs("build/generated", exist_ok=True)
with open("build/generated/made.cc", "w") as file:
    file.write('#define ANSWER 70 + MORE\\n' + open("src/template.txt").read())
subprocess.run(["g++", "-fPIC", "-c", "src/helper.cpp", "-o", "build/helper.o"], check=True)

class Build(BuildExtension):
    def build_extensions(self):
        self.compiler.compiler_so.append("-DFROM_COMPILER=5")
        self.compiler.define_macro("NOTHING", "")
        if "-Wall" in self.compiler.compiler_so:
            self.compiler.compiler_so.remove("-Wall")
        super().build_extensions()

setup(
    name="shapes", version="1", packages=["shapes", "shapes.inner"],
    ext_modules=[
        CppExtension(
            "shapes.inner.dotted", ["src/one/x.cpp", "src/two/x.cpp"],
            include_dirs=[os.path.abspath("include")],
            define_macros=[("MACRO", "10"), ("BARE", None)], undef_macros=["GONE"],
            extra_compile_args={"cxx": ["-g", "-O1", "-std=c++17", "-DGONE_BEFORE"]},
        ),
        CppExtension("shapes.limited", ["src/limited.cpp"], py_limited_api=True),
        CppExtension("shapes.objects", ["src/objects.cpp"], extra_objects=["build/helper.o"],
                     libraries=["m"], library_dirs=["."], runtime_library_dirs=["/opt/somewhere"],
                     extra_link_args=["-Wl,--no-as-needed", "-s"]),
        CppExtension("toplevel", ["build/generated/made.cc"], extra_compile_args=["-DMORE=7"]),
        Extension("shapes.plain", ["src/plain.c"]),
    ],
    cmdclass={"build_ext": Build},
)
"""
SUFFIXES = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

class Build(BuildExtension.with_options(no_python_abi_suffix=True, use_ninja=False)):
    def build_extension(self, ext):
        print("one:", ext.name, self.no_python_abi_suffix, self.use_ninja)
        ext.define_macros.append(("ANSWER", "12"))
        super().build_extension(ext)

setup(name="suffixes", version="1", packages=["suffixes"],
      ext_modules=[CppExtension("suffixes.first", ["src/first.cpp"]),
                   CppExtension("suffixes.second", ["src/second.cpp"], include_dirs=["include"])],
      cmdclass={"build_ext": Build})
"""
BROKEN = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension
setup(name="broken", version="1", ext_modules=[CppExtension("broken", ["broken.cpp"])],
      cmdclass={"build_ext": BuildExtension})
"""
GPU = """
import os
from setuptools import setup
from torch.utils import cpp_extension
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

home = cpp_extension.CUDA_HOME = os.environ["TOOLKIT"]    # for a torch that was built without CUDA
search = [os.path.abspath("stubs"), os.path.join(home, "lib64")]

def extension(name, sources, nvcc, **more):
    return CUDAExtension(
        name, sources, library_dirs=list(search), runtime_library_dirs=list(search),
        include_dirs=[os.path.abspath("include")],
        extra_compile_args={"cxx": ["-DOF_CXX=1", "-O2"], "nvcc": ["-DOF_NVCC=2", *nvcc]}, **more)

setup(
    name="gpu", version="1",
    ext_modules=[
        extension("mixed", ["src/mixed.cpp", "src/caller.cu", "src/called.cu"],
                  ["--threads", "2", "-lineinfo", "--ptxas-options=-v", "-Xcompiler", "-fopenmp",
                   "-gencode=arch=compute_90,code=sm_90", "--use_fast_math", "-std=c++17",
                   "-rdc=true", "-O2"], dlink=True),
    ],
    cmdclass={"build_ext": BuildExtension},
)
"""
PROBE = """
import importlib, json, sys, torch
found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    calls = [each for each in dir(module) if not each.startswith("__")]
    found[name] = {"doc": module.__doc__, "name": module.__name__,
                   "calls": {each: [getattr(module, each)(), getattr(module, each).__doc__]
                             for each in calls}}
print(json.dumps(found))
"""


SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
WHO = ["opkiln", pytest.param("torch", marks=pytest.mark.full)]


class Built(NamedTuple):
    """What a setup.py left, and what its modules answer."""

    who: str
    where: Path
    files: list[str]
    answers: dict[str, Any]
    said: str


def answering(name: str, answer: int) -> dict[str, Any]:
    """What PROBE says of a ``module``."""
    return {
        "doc": "By hand.", "name": name, "calls": {"answer": [answer, "What the answer is."]}
    }  # fmt: skip


def execute(arguments: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python program, forked."""
    program = forks.Fork(arguments, cwd=cwd, env={**os.environ, **variables}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    return child.finish(program, timeout=600)


def write(project: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)


def run(who: str, cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script, with the variables that ``opkiln run`` gives it if it is to be opkiln's."""
    given = {"OPKILN_PATCH_TORCH": "1", "OPKILN_PROGRESS": "auto"} if who == "opkiln" else {}
    return execute([*arguments], cwd, **given, **variables)


def built_by(
    who: str, project: Path, names: list[str],
    *command: str, **variables: str,
) -> Built:  # fmt: skip
    """The project's modules, built in a copy of it."""
    copy = project.parent / f"{project.name}-{who}"
    shutil.copytree(project, copy)
    out = copy / "out"
    store = known.make_store(copy.with_suffix(".store"))
    done = run(who, copy, "setup.py", *(command or ("build_ext", "--build-lib", "out")),
               OPKILN_CACHE_DIR=str(store), OPKILN_STORE_LAYERS=str(pool.LAYER),
               **variables)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pool.add(store)
    where = out if out.exists() else copy
    files = sorted(str(path.relative_to(where)) for path in where.rglob("*.so")
                   if path.relative_to(where).parts[0] not in ("build", "stubs"))  # fmt: skip
    asked = execute(["-c", PROBE, *names], where)
    assert asked.returncode == 0, asked.stderr
    return Built(who, where, files, json.loads(asked.stdout), done.stdout + done.stderr)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Their include directories are absolute, and so part of what they are compiled with."""
    with pool.directory("torch_setup") as made:
        yield made


@pytest.fixture(scope="module", params=WHO)
def shapes(request: pytest.FixtureRequest, place: Path) -> Built:
    """One project of many shapes."""
    project = place / f"shapes-{request.param}" / "project"
    dotted = """
#include "value.h"
#if defined(GONE) || !defined(BARE) || !defined(GONE_BEFORE) || __cplusplus != 201703L
#error flags
#endif
int other();
#define ANSWER VALUE + MACRO + FROM_CFLAGS + FROM_COMPILER NOTHING + other()
"""
    limited = "#if Py_LIMITED_API + 0 < 0x030A0000\n#error not limited\n#endif\n"
    write(project, {
        "setup.py": SHAPES,
        "include/value.h": "#define VALUE 100\n",
        "src/one/x.cpp": dotted + module("dotted"),
        "src/two/x.cpp": "int other() { return 1000; }\n",
        "src/limited.cpp": limited + module("limited"),
        "src/objects.cpp": "int helper();\n#define ANSWER helper()\n" + module("objects"),
        "src/helper.cpp": "int helper() { return 55; }\n",
        "src/template.txt": module("toplevel"),
        "src/plain.c": "#include <Python.h>\nstatic struct PyModuleDef d = "
        '{PyModuleDef_HEAD_INIT, "plain", "C.", -1, NULL};\n'
        "PyMODINIT_FUNC PyInit_plain(void) { return PyModule_Create(&d); }\n",
        **{f"shapes/{name}__init__.py": "" for name in ("", "inner/")},
    })  # fmt: skip
    names = ["shapes.inner.dotted", "shapes.limited", "shapes.objects", "toplevel", "shapes.plain"]
    # Built where there are no packages around them: as namespace packages.
    return built_by(request.param, project, names)


def test_several_extensions_of_one_setup_py_have_their_files(shapes: Built) -> None:
    assert shapes.files == [
        f"shapes/inner/dotted{SUFFIX}", "shapes/limited.abi3.so", f"shapes/objects{SUFFIX}",
        f"shapes/plain{SUFFIX}", f"toplevel{SUFFIX}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("shapes.inner.dotted", 1118),  # two files of one name, macros, flags from everywhere
        ("shapes.limited", 42),
        ("shapes.objects", 55),
        ("toplevel", 77),  # of a source that setup.py writes, with a list of flags
    ],
)
def test_each_module_answers(shapes: Built, name: str, answer: int) -> None:
    assert shapes.answers[name] == answering(name, answer)


def test_an_extension_of_setuptools_beside_them_is_left_to_it(shapes: Built) -> None:
    assert shapes.answers["shapes.plain"] == {"doc": "C.", "name": "shapes.plain", "calls": {}}
    assert "building 'shapes.plain' extension" in shapes.said
    assert ("building 'toplevel' extension" in shapes.said) == (shapes.who == "torch")


@pytest.fixture(scope="module", params=WHO)
def suffixes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A subclass that looks at one extension at a time; an editable install builds in place."""
    project = tmp_path_factory.mktemp("suffixes") / "project"
    write(project, {"setup.py": SUFFIXES, "src/first.cpp": module("first"),
                    "src/second.cpp": '#include "here.h"\n' + module("second"),
                    "include/here.h": "", "suffixes/__init__.py": ""})  # fmt: skip
    names = ["suffixes.first", "suffixes.second"]
    command = ("editable_wheel", "--dist-dir", "wheels")
    return built_by(request.param, project, names, *command)


def test_options_and_overridden_methods_keep_their_meaning_in_an_editable_build(
    suffixes: Built,
) -> None:
    assert suffixes.files == ["suffixes/first.so", "suffixes/second.so"]
    names = ("suffixes.first", "suffixes.second")
    assert suffixes.answers == {name: answering(name, 12) for name in names}
    told = [line for line in suffixes.said.splitlines() if line.startswith("one:")]
    assert told == [f"one: {name} True False" for name in names]
    wheels = (suffixes.where / "wheels").iterdir()
    assert sorted(path.suffix for path in wheels) == [".dist-info", ".whl"]
    there = {path.name for path in (suffixes.where / "suffixes").iterdir() if path.is_file()}
    assert there == {"__init__.py", "first.so", "second.so"}


@pytest.mark.parametrize("suffixes", ["opkiln"], indirect=True)
def test_a_clean_directory_compiles_nothing_again(tmp_path: Path, suffixes: Built) -> None:
    assert "built first" in suffixes.said  # setuptools shows the logger's lines
    project = suffixes.where.with_name("project")
    shutil.copytree(project, tmp_path / "clean")
    done = run("opkiln", tmp_path / "clean", "setup.py", "build_ext", "--inplace",
               OPKILN_CACHE_DIR=str(project.with_name("project-opkiln.store")))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "clean" / "suffixes" / "first.so").exists()
    assert "built" not in done.stdout + done.stderr


@pytest.mark.parametrize("who", WHO)
def test_an_extension_that_does_not_compile_fails_with_the_compilers_words(
    who: str, tmp_path: Path
) -> None:
    write(tmp_path, {"setup.py": BROKEN, "broken.cpp": "int f() { return undeclared; }\n"})
    done = run(who, tmp_path, "setup.py", "build_ext")
    assert done.returncode == 1
    assert "undeclared" in done.stdout + done.stderr
    assert who == "torch" or "Traceback" not in done.stderr


KERNELS = {
    "include/shared.cuh": "#pragma once\n#include <cuda_runtime.h>\n",
    "src/mixed.cpp": "int launched();\n#define ANSWER launched() * 10 + OF_CXX\n" + module("mixed"),
    "src/called.cu": "__device__ float scaled(float x) { return x * 2; }\n",
    "src/caller.cu": '#include "shared.cuh"\nextern __device__ float scaled(float);\n'
    "__global__ void run(float* x) { *x = scaled(*x); }\n"
    "int launched() { run<<<1, 1>>>(nullptr); return OF_NVCC + "
    "(cudaGetLastError() != cudaSuccess); }\n",
}  # fmt: skip


@pytest.fixture(scope="module", params=WHO)
def gpu(request: pytest.FixtureRequest, place: Path) -> Built:
    """A CUDA extension. torch's CPU build is told of a toolkit, and the libraries that it lacks are
    empty ones: what is compared is what is built, and what the runtime says without a GPU."""
    found = toolkits.list_toolkits((), "", ask=True)
    homes = [each.record["home"] for each in found or () if not each.record["refused"]]
    if not homes:
        pytest.skip("no CUDA toolkit on this machine")
    project = place / f"gpu-{request.param}" / "project"
    write(project, {"setup.py": GPU, **KERNELS})
    (project / "stubs").mkdir()
    for name in ("c10_cuda", "torch_cuda"):
        subprocess.run(["g++", "-shared", "-nostdlib", "-x", "c++", os.devnull, "-o",
                        str(project / "stubs" / f"lib{name}.so"), f"-Wl,-soname,lib{name}.so"],
                       check=True)  # fmt: skip
    variables = {"TOOLKIT": homes[0], "TORCH_CUDA_ARCH_LIST": "9.0"}
    return built_by(request.param, project, ["mixed"], **variables)


def test_cpp_and_linked_cuda_with_flags_of_their_own_are_one_module(gpu: Built) -> None:
    assert gpu.files == [f"mixed{SUFFIX}"]
    assert gpu.answers["mixed"] in (answering("mixed", 21), answering("mixed", 31))
    assert set(fatbin.images(str(gpu.where / gpu.files[0]))) == {"sm_90"}


@pytest.mark.parametrize("who", WHO)
def test_the_example_of_the_page_gives_the_same_on_both(who: str, tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "drop_in" / "use.py"
    variables = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "torchs")}
    for built in (who == "opkiln", False):
        done = run(who, tmp_path, str(example), **variables)
        assert done.stdout.splitlines()[-1] == "[0.0, 2.0, 4.0]", done.stderr
        assert ("built twice" in done.stderr) is built


OPTIONAL = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension
setup(name="optional", version="1",
      ext_modules=[CppExtension("broken", ["broken.cpp"], optional=True),
                   CppExtension("whole", ["whole.cpp"])],
      cmdclass={"build_ext": BuildExtension})
"""


def test_an_optional_extension_that_does_not_compile_is_left_out(tmp_path: Path) -> None:
    """By setuptools' rule, which torch's command breaks where it builds with ninja."""
    write(tmp_path, {"setup.py": OPTIONAL, "broken.cpp": "no C++\n", "whole.cpp": module("whole")})
    done = run("opkiln", tmp_path, "setup.py", "build_ext", "--inplace")
    assert done.returncode == 0, done.stderr
    assert [path.name.split(".")[0] for path in tmp_path.glob("*.so")] == ["whole"]
    assert 'building extension "broken" failed' in done.stdout + done.stderr
