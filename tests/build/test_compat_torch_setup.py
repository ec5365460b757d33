"""Unmodified setup.py scripts: built by torch, and under ``opkiln run``; the results compared."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sample import child, forks, known, pool
from sample.compat import module

from opkiln.binary import fatbin
from opkiln.toolchain import host, toolkits

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


class Built(NamedTuple):
    """What a setup.py left, and what its modules answer."""

    files: list[str]
    answers: dict[str, Any]
    said: str


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
    return Built(files, json.loads(asked.stdout), done.stdout + done.stderr)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Built]:
    """One project of many shapes, as (torch, opkiln) build it."""
    project = tmp_path_factory.mktemp("shapes") / "project"
    dotted = """
#include "value.h"
#if defined(GONE) || !defined(BARE) || !defined(GONE_BEFORE) || __cplusplus != 201703L
#error flags
#endif
int other();
#define ANSWER VALUE + MACRO + FROM_CFLAGS + FROM_COMPILER + other()
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
    return built_by("torch", project, names), built_by("opkiln", project, names)


def test_several_extensions_of_one_setup_py_have_the_same_files(
    shapes: tuple[Built, Built],
) -> None:
    expected, found = shapes
    assert found.files == expected.files
    assert "shapes/limited.abi3.so" in found.files
    assert "shapes/inner/dotted" in found.files[0]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("shapes.inner.dotted", 1118),  # two files of one name, macros, flags from everywhere
        ("shapes.limited", 42),
        ("shapes.objects", 55),
        ("toplevel", 77),  # of a source that setup.py writes, with a list of flags
    ],
)
def test_each_module_answers_the_same(shapes: tuple[Built, Built], name: str, answer: int) -> None:
    expected, found = shapes
    assert found.answers[name] == expected.answers[name]
    assert found.answers[name]["calls"]["answer"][0] == answer


def test_an_extension_of_setuptools_beside_them_is_left_to_it(shapes: tuple[Built, Built]) -> None:
    expected, found = shapes
    assert found.answers["shapes.plain"] == expected.answers["shapes.plain"]
    assert "building 'shapes.plain' extension" in found.said
    assert "building 'toplevel' extension" not in found.said


@pytest.fixture(scope="module")
def suffixes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Built, Path]:
    """A subclass that looks at one extension at a time; an editable install builds in place."""
    project = tmp_path_factory.mktemp("suffixes") / "project"
    write(project, {"setup.py": SUFFIXES, "src/first.cpp": module("first"),
                    "src/second.cpp": '#include "here.h"\n' + module("second"),
                    "include/here.h": "", "suffixes/__init__.py": ""})  # fmt: skip
    names = ["suffixes.first", "suffixes.second"]
    command = ("editable_wheel", "--dist-dir", "wheels")
    torchs, opkilns = (built_by(who, project, names, *command) for who in ("torch", "opkiln"))
    return torchs, opkilns, project


def test_options_and_overridden_methods_mean_the_same_in_an_editable_build(
    suffixes: tuple[Built, Built, Path],
) -> None:
    expected, found, project = suffixes
    assert found.files == expected.files == ["suffixes/first.so", "suffixes/second.so"]
    assert found.answers == expected.answers
    assert found.answers["suffixes.second"]["calls"]["answer"][0] == 12
    told = [[line for line in each.said.splitlines() if line.startswith("one:")]
            for each in (expected, found)]  # fmt: skip
    assert told[0] == told[1] != []
    left = [sorted(path.name for name in ("wheels", "suffixes")
                   for path in (project.with_name(f"project-{who}") / name).iterdir())
            for who in ("torch", "opkiln")]  # fmt: skip
    assert left[0] == left[1]


def test_a_clean_directory_compiles_nothing_again(
    tmp_path: Path, suffixes: tuple[Built, Built, Path]
) -> None:
    _, first, project = suffixes
    assert "built first" in first.said  # setuptools shows the logger's lines
    shutil.copytree(project, tmp_path / "clean")
    done = run("opkiln", tmp_path / "clean", "setup.py", "build_ext", "--inplace",
               OPKILN_CACHE_DIR=str(project.with_name("project-opkiln.store")))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "clean" / "suffixes" / "first.so").exists()
    assert "built" not in done.stdout + done.stderr


def test_an_extension_that_does_not_compile_fails_both_with_the_compilers_words(
    tmp_path: Path,
) -> None:
    write(tmp_path, {"setup.py": BROKEN, "broken.cpp": "int f() { return undeclared; }\n"})
    for who in ("torch", "opkiln"):
        done = run(who, tmp_path, "setup.py", "build_ext")
        assert done.returncode == 1
        assert "undeclared" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


KERNELS = {
    "include/shared.cuh": "#pragma once\n#include <cuda_runtime.h>\n",
    "src/mixed.cpp": "int launched();\n#define ANSWER launched() * 10 + OF_CXX\n" + module("mixed"),
    "src/called.cu": "__device__ float scaled(float x) { return x * 2; }\n",
    "src/caller.cu": '#include "shared.cuh"\nextern __device__ float scaled(float);\n'
    "__global__ void run(float* x) { *x = scaled(*x); }\n"
    "int launched() { run<<<1, 1>>>(nullptr); return OF_NVCC + "
    "(cudaGetLastError() != cudaSuccess); }\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Built, Path]:
    """CUDA extensions. torch's CPU build is told of a toolkit, and the libraries that it lacks are
    empty ones: what is compared is what is built, and what the runtime says without a GPU."""
    found = toolkits.survey((), "", ask=True)
    homes = [each.record["home"] for each in found or () if not each.record["refused"]]
    if not homes:
        pytest.skip("no CUDA toolkit on this machine")
    project = tmp_path_factory.mktemp("gpu") / "project"
    write(project, {"setup.py": GPU, **KERNELS})
    (project / "stubs").mkdir()
    for name in ("c10_cuda", "torch_cuda"):
        subprocess.run(["g++", "-shared", "-nostdlib", "-x", "c++", os.devnull, "-o",
                        str(project / "stubs" / f"lib{name}.so"), f"-Wl,-soname,lib{name}.so"],
                       check=True)  # fmt: skip
    variables = {"TOOLKIT": homes[0], "TORCH_CUDA_ARCH_LIST": "9.0"}
    both = [built_by(who, project, ["mixed"], **variables) for who in ("torch", "opkiln")]
    return both[0], both[1], project.parent


def images(path: Path) -> set[str]:
    """The architectures whose code is in a library."""
    return set(fatbin.images(str(path)))


def test_cpp_and_linked_cuda_with_flags_of_their_own_are_one_module(
    gpu: tuple[Built, Built, Path],
) -> None:
    expected, found, _ = gpu
    assert found.files == expected.files
    assert found.answers["mixed"] == expected.answers["mixed"]
    assert found.answers["mixed"]["calls"]["answer"][0] in (21, 31)


def test_the_same_architectures_are_in_both(gpu: tuple[Built, Built, Path]) -> None:
    _, found, where = gpu
    assert found.files
    for name in found.files:
        torchs, ours = (images(where / f"project-{who}" / "out" / name)
                        for who in ("torch", "opkiln"))  # fmt: skip
        assert ours
        assert ours == torchs


@pytest.mark.parametrize("who", ["opkiln", pytest.param("torch", marks=pytest.mark.full)])
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
