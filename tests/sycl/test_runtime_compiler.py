"""A SYCL op on the CPU, for real: opkiln, the host compiler, and libsycl's runtime compiler.

``make test-sycl`` runs this where it can: in an environment of its own, with Intel's packages.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample import child

from opkiln.machine.binary import elf
from opkiln.machine.toolchain import find, host, libsycl, sycl

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "sycl_op"
LIBRARY = libsycl.find_installed()

pytestmark = [
    pytest.mark.skipif(LIBRARY is None, reason="intel-sycl-rt is not installed: make test-sycl"),
    pytest.mark.skipif(
        not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
    ),
]

COMPARE = """
    import torch
    from opkiln.loading import loader
    from sycl_op import silu_mul
    from sycl_op.op import SiluMulBuilder

    op = SiluMulBuilder().jit_load()
    for shape in ((0,), (1,), (255,), (256,), (257,), (3, 5, 7), (1 << 20,)):
        x, y = torch.randn(shape), torch.randn(shape)
        torch.testing.assert_close(op.silu_mul(x, y), silu_mul.reference(x, y))
    ((loaded, _),) = loader.loaded_here().values()
    print(loaded.trace.candidates[-1].subject)
"""


def driver() -> str:
    """OpenCL's driver for the CPU, as a user would name it."""
    assert LIBRARY is not None
    return os.path.join(os.path.dirname(LIBRARY), "libintelocl.so")


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One store for these tests: the op is compiled by the first of them."""
    _STORE["OPKILN_CACHE_DIR"] = str(tmp_path_factory.mktemp("store"))
    yield
    _STORE.clear()


_STORE: dict[str, str] = {}


def run(code: str, **variables: str | None) -> str:
    """What the code prints, in a process that has the driver unless it is told otherwise."""
    environment = {"OCL_ICD_FILENAMES": driver(), **_STORE, **variables}
    return child.run(code, path=[EXAMPLE], env=environment, bare=False).strip()


def test_the_runtime_is_what_would_be_chosen(tmp_path: Path) -> None:
    memory = (str(tmp_path),)
    found = find.choose(sycl, memory, None, host.choose(memory))
    assert (found.family, found.path, found.home) == ("sycl-rt", LIBRARY, sys.prefix)
    assert libsycl.locate(sycl.soname(found)) == LIBRARY


def test_the_example_is_compiled_once_and_computes_what_its_reference_does() -> None:
    built = run(COMPARE)
    assert run(COMPARE, OPKILN_MODE="cached") == built


def test_the_examples_own_script_runs() -> None:
    code = f"import runpy; runpy.run_path({str(EXAMPLE / 'use.py')!r})"
    assert run(code) == "silu_mul is right"


def test_the_library_knows_its_runtime_by_name_and_not_by_place() -> None:
    assert LIBRARY is not None
    built = run(COMPARE)
    assert os.path.basename(LIBRARY) in elf.read(built).needed
    with open(built, "rb") as file:
        assert os.fsencode(os.path.dirname(LIBRARY)) + b"\0" not in file.read()


def test_the_example_works_under_torch_compile_and_passes_opcheck() -> None:
    code = """
        import torch
        from sycl_op.op import SiluMulBuilder

        op = SiluMulBuilder().jit_load()
        x, y = torch.randn(1000), torch.randn(1000)
        compiled = torch.compile(
            lambda x, y: op.silu_mul(x, y), fullgraph=True, backend="aot_eager"
        )
        torch.testing.assert_close(compiled(x, y), torch.nn.functional.silu(x) * y)
        torch.library.opcheck(torch.ops.sycl_op.silu_mul.default, (x, y))
        print("works")
    """
    assert run(code) == "works"


def test_what_the_kernel_cannot_take_is_refused_before_it_runs() -> None:
    code = """
        import torch
        import sycl_op

        x = torch.randn(4, 4)
        for pair in ((x.double(), x.double()), (x, x[1:]), (x.t(), x.t())):
            try:
                sycl_op.silu_mul(*pair)
            except RuntimeError as error:
                print(str(error).splitlines()[0].rpartition(", ")[2])
    """
    assert run(code).splitlines() == [
        "x must be float32",
        "x and y must have the same shape",
        "x and y must be contiguous",
    ]


def test_without_the_opencl_driver_the_reference_runs_and_the_warning_says_what_to_set() -> None:
    code = """
        import warnings
        import torch
        import sycl_op

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x, y = torch.randn(10), torch.randn(10)
            out = sycl_op.silu_mul(x, y)
        torch.testing.assert_close(out, torch.nn.functional.silu(x) * y)
        (warning,) = [each for each in caught if each.category.__name__ == "FallbackWarning"]
        print(warning.message)
    """
    if libsycl.why_no_device(None) is None:
        pytest.skip("the system has a driver of its own, or a GPU")
    assert f"export OCL_ICD_FILENAMES={driver()}" in run(code, OCL_ICD_FILENAMES=None)


def test_the_same_op_is_built_by_a_sycl_compiler_that_is_named(tmp_path: Path) -> None:
    """Through a stand-in for icpx: it drops what only icpx knows and hands the rest to g++."""
    assert LIBRARY is not None
    home = tmp_path / "oneapi"
    icpx = home / "bin" / "icpx"
    icpx.parent.mkdir(parents=True)
    (home / "lib").symlink_to(os.path.dirname(LIBRARY))
    name = os.path.basename(LIBRARY)
    icpx.write_text(
        STAND_IN.format(python=sys.executable, prefix=sys.prefix, home=home, library=name)
    )
    icpx.chmod(0o755)
    built = run(COMPARE, OPKILN_SYCL_CXX=str(icpx))
    assert name in elf.read(built).needed
    commands = (home / "commands").read_text().splitlines()
    compiles = [line for line in commands if " -c " in line and "silu_mul.cpp" in line]
    links = [line for line in commands if " -shared " in line]
    assert len(compiles) == len(links) == 1
    assert all(line.startswith("-fsycl ") for line in (*compiles, *links))
    run(COMPARE, OPKILN_SYCL_CXX=str(icpx), OPKILN_MODE="cached")
    assert len((home / "commands").read_text().splitlines()) == len(commands)


STAND_IN = """\
#!{python}
import os, sys
words = sys.argv[1:]
with open("{home}/commands", "a") as log:
    print(*words, file=log)
if "--version" in words:
    print("Intel(R) oneAPI DPC++/C++ Compiler 2026.1.0 (2026.1.0.20260724)")
    sys.exit()
known = [word for word in words if not word.startswith(("-fsycl", "-ffp-model"))]
if "-shared" in known:
    known += ["-L{home}/lib", "-l:{library}"]
elif "-c" in known:
    known.insert(0, "-isystem{prefix}/include")
os.execvp("g++", ["g++", *known])
"""
