"""The readers of libraries: what real compilers write, beside what their own tools read in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from typing import TYPE_CHECKING

import pytest
from sample import pool
from sample.toolkit import compile_once

from opkiln.errors import LoadError
from opkiln.machine.binary import elf
from opkiln.machine.binary.fatbin import hip_images, images

if TYPE_CHECKING:
    from pathlib import Path

KERNEL = """\
__global__ void add_NAME(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += 1.0f;
}
extern "C" void launch_NAME(float* x, int n) { add_NAME<<<(n + 255) / 256, 256>>>(x, n); }
"""
CALLER = """\
extern __device__ float twice(float);
__global__ void apply(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]); }
extern "C" void launch(float* x) { apply<<<1, 32>>>(x); }
"""
CALLED = "__device__ float twice(float x) { return 2.0f * x; }\n"
MIXED = ("sm_80", "sm_90", "sm_90a", "sm_100f", "sm_121a", "compute_90a", "compute_100f")


def run(*argv: str, **variables: str) -> str:
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}{done.stderr}"
    return done.stdout


@cache
def tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip(f"no {name}")
    return found


@cache
def nvcc() -> str:
    found = tool("nvcc")
    if "compute_121" not in run(found, "--list-gpu-arch"):
        pytest.skip("this nvcc knows no sm_121a and no sm_100f")
    return found


def gencodes(names: tuple[str, ...]) -> list[str]:
    return [f"-gencode=arch=compute_{name.partition('_')[2]},code={name}" for name in names]


def compiled(
    directory: Path, name: str, code: tuple[str, ...], *flags: str, text: str = ""
) -> Path:
    source = directory / f"{name}.cu"
    source.write_text(text or KERNEL.replace("NAME", name))
    output = directory / f"{name}.o"
    words = [*gencodes(code), *flags, "-Xcompiler=-fPIC", "-c", str(source), "-o", str(output)]
    assert compile_once(pool.ROOT / "nvcc", nvcc(), words) == 0
    return output


def linked(directory: Path, *objects: Path, flag: str = "-nodlink") -> str:
    output = str(directory / "op.so")
    run(nvcc(), "-shared", "-cudart=static", flag, *map(str, objects), "-o", output)
    return output


@pytest.mark.parametrize(
    "mode",
    [
        "none",
        "size",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("speed", "balance")),
    ],
)
def test_exactly_the_images_that_were_asked_for_are_found(mode: str, tmp_path: Path) -> None:
    made = compiled(tmp_path, "one", MIXED, f"--compress-mode={mode}")
    assert images(made) == MIXED


def test_a_library_of_several_units_has_all_their_images_and_none_of_cudarts(
    tmp_path: Path,
) -> None:
    first = compiled(tmp_path, "first", ("sm_120f", "compute_75"), "-lineinfo")
    second = compiled(tmp_path, "second", ("sm_80", "sm_120f"), "-G")
    file = linked(tmp_path, first, second)
    assert images(file) == ("sm_80", "sm_120f", "compute_75")
    found = elf.read(file)
    assert found.kind == "shared"
    assert not [name for name in found.needed if name.startswith("libcudart")]


def test_a_link_by_nvcc_adds_an_image_of_the_architecture_that_it_was_told(tmp_path: Path) -> None:
    # Told nothing it takes its default: an image without code that is an image all the same.
    made = compiled(tmp_path, "one", ("sm_90a",))
    assert images(linked(tmp_path, made, flag="-arch=sm_80")) == ("sm_80", "sm_90a")
    assert images(linked(tmp_path, made, flag="-arch=sm_90a")) == ("sm_90a",)
    assert images(linked(tmp_path, made)) == ("sm_90a",)


def test_of_separately_compiled_code_the_device_links_images_count(tmp_path: Path) -> None:
    code = ("sm_90a", "compute_90a")
    caller = compiled(tmp_path, "caller", code, "-rdc=true", text=CALLER)
    called = compiled(tmp_path, "called", code, "-rdc=true", text=CALLED)
    assert images(caller) == ()
    output = str(tmp_path / "op.so")
    objects = (str(caller), str(called))
    run(nvcc(), "-shared", "-rdc=true", *gencodes(code[:1]), *objects, "-o", output)
    assert images(output) == ("sm_90a",)


def test_nvidias_own_reader_agrees(tmp_path: Path) -> None:
    reader = tool("cuobjdump")
    file = linked(tmp_path, compiled(tmp_path, "one", MIXED), compiled(tmp_path, "two", ("sm_75",)))
    listed = run(reader, "--list-elf", "--list-ptx", file)
    code = set(re.findall(r"\.(sm_\w+)\.cubin", listed))
    code |= {f"compute_{arch}" for arch in re.findall(r"\.sm_(\w+)\.ptx", listed)}
    # Its listing leaves out the mark of a family.
    assert {name.removesuffix("f") for name in images(file)} == {
        name.removesuffix("f") for name in code
    }


def test_a_real_fat_binary_that_is_cut_or_changed_gives_a_result_or_a_load_error(
    tmp_path: Path,
) -> None:
    whole = compiled(tmp_path, "one", ("sm_90a", "compute_90a")).read_bytes()
    start = whole.index(b"\x50\xed\x55\xba")
    outcomes = set()
    for at in range(start, start + 16 + 64):
        for value in (0, 1, 0x7F, 0xFF):
            changed = whole[:at] + bytes([value]) + whole[at + 1 :]
            try:
                outcomes.add(images(changed))
            except LoadError:
                outcomes.add(())
    for end in range(0, len(whole), 97):
        with pytest.raises(LoadError):
            images(whole[:end])
    assert {("sm_90a", "compute_90a"), ("sm_90a", "compute_90"), ()} <= outcomes


# What a kernel needs of HIP's headers, which take seconds to compile.
HIP = """
struct dim3 { unsigned x, y, z; };
extern "C" int hipLaunchKernel(const void*, dim3, dim3, void**, unsigned long, void*);
extern "C" int __hipPopCallConfiguration(dim3*, dim3*, unsigned long*, void**);
__attribute__((global)) void one(float* x) { *x = 1; }
"""


def test_hip_libraries_list_their_targets(tmp_path: Path) -> None:
    hipcc = tool("hipcc")
    source = tmp_path / "op.hip.cpp"
    source.write_text(HIP)
    output = str(tmp_path / "op.so")
    targets = ("gfx90a:sramecc+:xnack-", "gfx1030")
    flags = [f"--offload-arch={target}" for target in targets]
    run(
        hipcc,
        "-nogpuinc",
        "-nogpulib",
        *flags,
        "-fPIC",
        "-shared",
        str(source),
        "-o",
        output,
        HIP_PLATFORM="amd",
    )
    assert hip_images(output) == targets
    assert images(output) == ()


def test_what_a_library_needs_is_what_binutils_says(tmp_path: Path) -> None:
    compiler, readelf, nm = tool("g++"), tool("readelf"), tool("nm")
    source = tmp_path / "op.cpp"
    source.write_text(
        "#include <cmath>\n#include <iostream>\n#include <string>\n"
        'extern "C" int elsewhere(); extern "C" __attribute__((weak)) int maybe();\n'
        'extern "C" double op(double x, const char* s) {\n'
        "  std::cout << std::string(s); return std::exp(x) + elsewhere() + (maybe ? maybe() : 0);\n"
        "}\n"
    )
    output = str(tmp_path / "op.so")
    run(compiler, "-fPIC", "-shared", str(source), "-lm", "-o", output)
    found = elf.read(output)
    assert found.needed == tuple(
        re.findall(r"\(NEEDED\).*\[(.*)\]", run(readelf, "-dW", output, LC_ALL="C"))
    )
    listed = re.findall(
        r"Name: (\S+)\s+Flags: none\s+Version", run(readelf, "-VW", output, LC_ALL="C")
    )
    assert found.versions == tuple(sorted(set(listed)))
    undefined = re.findall(r"^\s+U ([^@\s]+)", run(nm, "-D", output), re.MULTILINE)
    needed = {name for _, name, _ in found.symbols}
    assert needed == set(undefined)
    assert "elsewhere" in needed
    assert "maybe" not in needed
