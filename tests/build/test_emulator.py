"""CUDA kernels on the CPU: they give what a GPU gives, and their mistakes are found and told."""

from __future__ import annotations

import ctypes
import math
import re
import secrets
import shutil
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sample import known, pool
from sample.emulator.op import KernelsBuilder

import opkiln
from opkiln.base.model import CPU, CUDA, EMULATED, ROCM
from opkiln.errors import SpecError
from opkiln.machine.toolchain import staged_copy
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CSRC = Path(opkiln.__file__).parent / "csrc"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "emulator.md"

_FORMATS = {"f": 4, "i": 4, "I": 4, "d": 8, "B": 1, "H": 2}


class Outcome:
    """What a kernel wrote, and what was reported."""

    def __init__(self, memory: bytes, report: str | None) -> None:
        self._memory = memory
        self.report = report

    def values(self, kind: str = "f", count: int | None = None, start: int = 0) -> list[Any]:
        size = _FORMATS[kind]
        left = (len(self._memory) - start) // size if count is None else count
        return list(struct.unpack_from(f"{left}{kind}", self._memory, start))


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One store for this file: the emulator's own part is compiled once."""
    made = known.make_store(tmp_path_factory.mktemp("emulated") / "cache")
    yield made
    pool.add(made)


@pytest.fixture(scope="module")
def run(shared_cache: Path) -> Callable[..., Outcome]:
    """Runs a case of sample/emulator/kernels.cu on an input and an output of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPKILN_CACHE_DIR", str(shared_cache))
        patch.setenv("OPKILN_STORE_LAYERS", str(pool.LAYER))
        for name in ("OPKILN_CXXFLAGS", "OPKILN_LDFLAGS"):  # kernels have a sanitizer of their own
            patch.delenv(name, raising=False)
        library = KernelsBuilder().load(verbose=False)
    library.emulate.restype = ctypes.c_char_p

    def call(
        case: str, x: Sequence[Any] = (), kind: str = "f", *, out: int = 0, element: int = 4,
        n: int | None = None,
    ) -> Outcome:  # fmt: skip
        given = struct.pack(f"{len(x)}{kind}", *x)
        # One piece of memory, so that there is room beside each tensor, and it is aligned.
        whole = ctypes.create_string_buffer(len(given) + out + 3 * 4096)
        start = -ctypes.addressof(whole) % 4096 + 1024
        end = start + (len(given) + 4095) // 1024 * 1024
        whole[start : start + len(given)] = given
        size = ctypes.c_size_t
        told = library.emulate(
            case.encode(), ctypes.c_void_p(ctypes.addressof(whole) + start), size(len(given)),
            ctypes.c_void_p(ctypes.addressof(whole) + end), size(out), size(element),
            ctypes.c_int(len(x) if n is None else n),
        )  # fmt: skip
        return Outcome(whole[end : end + out], None if told is None else told.decode())

    return call


# What kernels compute


def test_blocks_and_threads_have_three_dimensions(run: Callable[..., Outcome]) -> None:
    done = run("index", out=4 * 12 * 24)
    expected = [
        bx + 10 * by + 100 * bz + 1000 * tx + 10000 * ty + 100000 * tz
        for bz in range(2) for by in range(3) for bx in range(2)
        for tz in range(3) for ty in range(2) for tx in range(4)
    ]  # fmt: skip
    assert (done.report, done.values("i")) == (None, expected)


def test_a_block_reduces_in_shared_memory(run: Callable[..., Outcome]) -> None:
    done = run("sum", range(1000), out=4)
    assert (done.report, done.values()) == (None, [499500.0])


def test_dynamic_shared_memory_is_what_the_launch_says(run: Callable[..., Outcome]) -> None:
    done = run("reverse", range(40), "d", out=160, element=8)
    reverse = [float(39 - (i + 1) % 40) for i in range(40)]
    assert (done.report, done.values()) == (None, reverse)


def test_the_threads_of_a_warp_exchange_values(run: Callable[..., Outcome]) -> None:
    done = run("warp", out=4 * 12 * 64)
    assert done.report is None
    for i in range(64):
        lane, first = i % 32, i // 32 * 32
        odd = 0xAAAAAAAA - 2**32 + 31 if lane % 2 else 0
        assert done.values("i", 12, 48 * i) == [
            sum(range(first, first + 32)),
            i ^ 5,
            i - 3 if i % 8 >= 3 else i,
            sum(1 << k for k in range(0, 32, 3)),
            2,
            (0xF << (lane // 4 * 4)) - (2**32 if lane >= 28 else 0),
            sum(range(32)),
            0,
            odd,
            sum(range(i // 8 * 8, i // 8 * 8 + 8)),
            15,
            7,
        ]


def test_threads_that_have_ended_are_not_waited_for_in_a_warp(run: Callable[..., Outcome]) -> None:
    done = run("leaving", out=128)
    assert (done.report, done.values("i", 20)) == (None, [0xFFFFF] * 20)


def test_a_barrier_counts_predicates(run: Callable[..., Outcome]) -> None:
    done = run("vote", out=4 * 3 * 96)
    assert (done.report, done.values("i")) == (None, [20, 1, 0] * 96)


def test_atomics_in_shared_memory_and_in_tensors(run: Callable[..., Outcome]) -> None:
    x = [i * i % 16 for i in range(500)]
    done = run("histogram", x, "B", out=64)
    assert (done.report, done.values("I")) == (None, [x.count(value) for value in range(16)])


@pytest.mark.parametrize(
    ("case", "x", "out", "at", "expected"),
    [
        ("lock", [], 4, 0, 2016),
        ("grid", [0] * 5, 4, 0, sum((i + 1) * ((i - 1) % 5 + 1) for i in range(5))),
        ("waiting together", [], 4, 0, 1),
    ],
)
def test_what_orders_threads_is_no_race(
    run: Callable[..., Outcome], case: str, x: list[int], out: int, at: int, expected: int
) -> None:
    done = run(case, x, "i", out=out)
    assert (done.report, done.values("i", 1, at)) == (None, [expected])


def test_the_last_block_may_read_what_all_have_written(run: Callable[..., Outcome]) -> None:
    done = run("last block", [0], "I", out=4 * 129)
    assert (done.report, done.values("f", 1, 4 * 128)) == (None, [32.0 * (1 + 2 + 3 + 4)])


def test_syncwarp_orders_the_threads_of_a_warp(run: Callable[..., Outcome]) -> None:
    done = run("neighbour", out=256)
    assert (done.report, done.values("i")) == (None, [i ^ 1 for i in range(64)])


def _numbers() -> list[float]:
    halves = [struct.unpack("e", struct.pack("H", bits))[0] for bits in range(0, 0x7C00, 37)]
    ties = [math.ldexp(1 + (2 * k + 1) / 2048, e) for k in range(20) for e in (-16, -14, 0, 9)]
    return [*halves, *(-value for value in halves), *ties, 65519.0, 65520.0, 1e30, 1e-30, math.inf]


def _half(value: float) -> int:
    try:
        return int(struct.unpack("H", struct.pack("e", value))[0])
    except OverflowError:
        return 0x7C00 if value > 0 else 0xFC00


def _bfloat16(value: float) -> int:
    bits = int(struct.unpack("I", struct.pack("f", value))[0])
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@pytest.mark.parametrize(("case", "narrow"), [("half", _half), ("bfloat16", _bfloat16)])
def test_sixteen_bit_floats_round_to_even(
    run: Callable[..., Outcome], case: str, narrow: Callable[[float], int]
) -> None:
    x = _numbers()
    done = run(case, x, out=8 * len(x), element=2)
    assert done.report is None
    assert done.values("H", len(x)) == [narrow(value) for value in x]


def test_vector_types_move_four_elements(run: Callable[..., Outcome]) -> None:
    done = run("vector", range(64), out=256)
    expected = [float(i // 4 * 4 + 3 - i % 4) for i in range(64)]
    assert (done.report, done.values()) == (None, expected)


def test_intrinsics_compute_what_cuda_says(run: Callable[..., Outcome]) -> None:
    done = run("number", out=24)
    assert done.report is None
    assert done.values() == [1, 8 + 3100 + 40000, 2 + 30 - 200, 1, 0.5 + 1 + 2 + 3, 3 + 1 + 10]


def test_shared_memory_begins_without_useful_values(run: Callable[..., Outcome]) -> None:
    assert all(math.isnan(value) for value in run("unwritten", out=16).values())


# What is found


def _line(text: str) -> str:
    """``kernels.cu:12`` of the line that contains a text."""
    lines = (Path(__file__).parents[1] / "sample" / "emulator" / "kernels.cu").read_text()
    found = [n for n, line in enumerate(lines.splitlines(), 1) if text in line]
    assert len(found) == 1, (text, found)
    return f"kernels.cu:{found[0]}"


def _told(report: str | None, *parts: str) -> None:
    assert report is not None
    for part in parts:
        assert part in report, f"{part!r} is not in:\n{report}"


def test_a_missing_barrier_is_a_race(run: Callable[..., Outcome]) -> None:
    report = run("race", range(64), out=256).report
    _told(
        report, "a race in shared memory", "race_kernel(float const*, float*)::tile",
        "byte 128 of 256",
        f"thread (31, 0, 0) reads, {_line('out[i] = tile[63 - i]')}",
        f"thread (32, 0, 0) writes 4 bytes, {_line('tile[i] = x[i];')}",
        "hint: __syncthreads()",
    )  # fmt: skip


def test_one_element_too_many_at_the_tail_is_found(run: Callable[..., Outcome]) -> None:
    report = run("tail", range(100), out=400).report
    _told(report, "reads 4 bytes outside of every tensor", "thread: (4, 0, 0)", "block: (3, 0, 0)")
    _told(report, "a tensor of 400 bytes; this is at byte 400", _line("must be i < n"))


def test_a_read_before_a_tensor_is_found(run: Callable[..., Outcome]) -> None:
    report = run("far", range(32), out=128).report
    _told(report, "reads 4 bytes outside of every tensor", "4 bytes before it")


def test_a_write_past_dynamic_shared_memory_is_found(run: Callable[..., Outcome]) -> None:
    report = run("dynamic", out=128).report
    _told(report, "writes 4 bytes outside of shared memory", "has 128 bytes; this is at byte 128")
    _told(report, "thread: (31, 0, 0)", _line("buffer[threadIdx.x + 1] = 1;"))


def test_a_write_past_a_shared_array_is_found(run: Callable[..., Outcome]) -> None:
    """Also by a pointer, in another function than the array's."""
    report = run("pointer", out=128).report
    _told(report, "writes 4 bytes outside of shared memory", "::small, which has 64 bytes")
    _told(run("index mistake", out=64).report, "index 16 is outside of an array", "float [16]")


def test_threads_that_never_reach_a_barrier_are_found(run: Callable[..., Outcome]) -> None:
    report = run("divergence", out=4 * 96).report
    _told(report, "32 of the 96 threads of a block never reach __syncthreads()")
    _told(report, "64 threads wait at __syncthreads(), kernels.cu:", "the first is (64, 0, 0)")
    _told(run("two barriers", out=256).report, "threads of a block wait at different barriers")


def test_two_blocks_that_write_one_element_race(run: Callable[..., Outcome]) -> None:
    report = run("block race", out=4).report
    _told(report, "a race in a tensor", "thread (0, 0, 0) of block (0, 0, 0) writes")


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("assertion", "the kernel's assertion failed: in[0] < 0"),
        ("null", "writes 4 bytes through a null pointer"),
        ("host memory", "no tensor of this call is near this address"),
        ("unaligned", "not aligned to 16 bytes"),
        ("mask", "a mask that leaves out the thread itself"),
        ("lonely", "the threads of a warp are at different operations"),
        ("lone grid", "a grid barrier in a launch that is not cooperative"),
        ("waiting", "a thread waits in a loop for something that never comes"),
        ("cluster", "thread block clusters are not emulated"),
        ("too early", "memory is touched before opk::wait_for_previous()"),
        ("too many threads", "invalid configuration argument"),
    ],
)
def test_other_mistakes_are_told(run: Callable[..., Outcome], case: str, told: str) -> None:
    _told(run(case, range(64), out=256).report, told)


def test_a_kernel_that_waits_for_the_one_before_it_is_right(run: Callable[..., Outcome]) -> None:
    assert run("early", out=4 * 32).values() == [1.0] * 32


def test_after_a_report_the_next_launch_is_sound(run: Callable[..., Outcome]) -> None:
    assert run("divergence", out=4 * 96).report is not None
    assert run("sum", range(100), out=4).values() == [4950.0]


def test_the_docs_show_the_reports_as_they_are(run: Callable[..., Outcome]) -> None:
    def without_lines(text: str) -> str:
        return re.sub(r"kernels\.cu:\d+", "kernels.cu", text)

    page = without_lines(DOCS.read_text())
    for case, x, out in (
        ("race", range(64), 256), ("tail", range(100), 400), ("dynamic", (), 128),
        ("divergence", (), 384), ("block race", (), 4), ("index mistake", (), 64),
    ):  # fmt: skip
        report = run(case, x, out=out).report
        assert report is not None
        assert without_lines(report) in page, report


# What is refused


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('__device__ void f() { asm volatile("bar.sync 1;"); }', "does_not_run_inline_PTX"),
        ("#include <mma.h>\n", "the emulator does not run tensor cores"),
        ("__global__ void __cluster_dims__(2, 1, 1) f() {}", "has_no_thread_block_clusters"),
    ],
)
def test_what_cannot_be_emulated_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    gcc = shutil.which("g++") or pytest.skip("there is no g++")
    source = tmp_path / "refused.cu"
    source.write_text(f"#include <cuda_runtime.h>\n{text}\n")
    emulator = CSRC / "opkiln" / "emulator" / "cuda"
    done = subprocess.run(
        [gcc, "-std=c++20", "-fsyntax-only", f"-I{CSRC}", f"-I{emulator}", "-x", "c++", source],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert told in done.stderr


def test_chevrons_are_refused_with_what_to_write_instead() -> None:
    with pytest.raises(SpecError, match="launches a kernel by <<< >>>"):
        staged_copy.translate_emulated(b"void f() { kernel<<<1, 2>>>(3); }", "op", "a.cu")
    assert (
        staged_copy.translate_emulated(b"// kernel<<<1, 2>>>(3)\n", "op", "a.cu")
        == b"// kernel<<<1, 2>>>(3)\n"
    )


@pytest.mark.parametrize(
    ("written", "made"),
    [
        ("extern __shared__ float x[];", "OPKILN_DYNAMIC_SHARED(x, float);"),
        ("extern __shared__ unsigned  char x [ ] ;", "OPKILN_DYNAMIC_SHARED(x, unsigned char);"),
        ("extern __shared__ __align__(16) char x[];", "OPKILN_DYNAMIC_SHARED(x, char);"),
        ("extern __shared__ char __align__(16) x[];", "OPKILN_DYNAMIC_SHARED(x, char);"),
        ("extern __shared__ Pair<int, T> x[];", "OPKILN_DYNAMIC_SHARED(x, Pair<int, T>);"),
        ("extern __shared__\nfloat x[]; int y;", "OPKILN_DYNAMIC_SHARED(x, float);\n int y;"),
        ("__shared__ float x[4]; extern int y[];", "__shared__ float x[4]; extern int y[];"),
    ],
)
def test_dynamic_shared_memory_is_translated_line_by_line(written: str, made: str) -> None:
    assert staged_copy.translate_emulated(written.encode(), "op", "a.cu").decode() == made


def test_other_external_shared_variables_are_refused() -> None:
    with pytest.raises(SpecError, match="does not understand 'extern __shared__ float x'"):
        staged_copy.translate_emulated(b"extern __shared__ float x;", "op", "a.cu")


# How it is asked for


class _Light(KernelsBuilder):
    BACKENDS = (CUDA, ROCM, CPU)
    EMULATE = False

    def sources(self) -> list[str]:
        return ["cpu.cpp"] if self.build_for_cpu else ["emulator/kernels.cu"]


class _Bound(_Light):
    def sources(self) -> list[str]:
        return ["cpu.cpp"] if self.build_for_cpu else ["cuda.cu", "binding.cpp"]


def test_the_setting_emulates_ops_whose_sources_are_cuda_files() -> None:
    with override(cuda="emulated"):
        assert _Light().backend == EMULATED
        assert _Light().spec().emulated
        assert _Light().spec().sources[0] == "emulator/kernels.cu"
        assert _Light(backend=CUDA).backend == CUDA
        assert _Bound().backend != EMULATED
    assert not _Light().spec().emulated


def test_an_emulated_op_is_for_the_cpu_and_apart_from_the_cpu_version() -> None:
    emulated, plain = _Light(backend=EMULATED).op(), _Light(backend=CPU).op()
    assert emulated.spec.backend == plain.spec.backend == CPU
    assert emulated.name != plain.name


# With op.h

DIFFERENCE = """
#include <opkiln/op.h>
using opk::Tensor;

template <class T>
__global__ void difference_kernel(const T* x, T* out, int64_t n, int64_t last) {
  extern __shared__ float neighbours[];
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  neighbours[threadIdx.x] = i < n ? float(x[i]) : 0;
  if (threadIdx.x == 0) neighbours[blockDim.x] = i + blockDim.x < n ? float(x[i + blockDim.x]) : 0;
  __syncthreads();
  if (i < last) out[i] = T(neighbours[threadIdx.x + 1] - neighbours[threadIdx.x]);
}

Tensor difference(const Tensor& x, bool mistaken) {
  Tensor out = opk::empty({x.numel() - 1}, x);
  const int64_t n = x.numel();
  OPK_DISPATCH(x.dtype(), T, (float, opk::half), {
    opk::launch(difference_kernel<T>, (n + 31) / 32, 32, 33 * sizeof(float), x.data<const T>(),
                out.template data<T>(), n, mistaken ? n : n - 1);
  });
  return out;
}
OPKILN_OP(difference, cuda);
"""


def test_an_op_of_op_h_runs_its_cuda_kernel_on_cpu_tensors(
    shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(shared_cache))
    monkeypatch.setenv("OPKILN_CUDA", "emulated")
    for name in ("OPKILN_CXXFLAGS", "OPKILN_LDFLAGS"):
        monkeypatch.delenv(name, raising=False)

    @opkiln.op(source={"cuda": DIFFERENCE})
    def difference(x: torch.Tensor, mistaken: bool) -> torch.Tensor:
        return x.diff()

    assert difference.load("cpu")
    for dtype in (torch.float32, torch.float16):
        x = torch.randint(0, 100, (100,)).to(dtype)
        assert torch.equal(difference(x, False), x.diff())
    with pytest.raises(RuntimeError) as raised:
        difference(torch.arange(100.0), True)
    _told(str(raised.value), "writes 4 bytes outside of every tensor", "a tensor of 396 bytes")
    _told(str(raised.value), "source.cu:", "difference_kernel<float>")


@pytest.mark.timed
def test_an_emulated_op_whose_header_is_edited_between_two_compiles_is_built_from_one_text(
    shared_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "number.h"
    header.write_text("#define NUMBER 1\n")
    (tmp_path / "a_first.cu").write_text(
        '#include "number.h"\nextern "C" int first() { return NUMBER; }\n'
    )
    (tmp_path / "b_second.cu").write_text(
        '#include "number.h"\nextern "C" int first();\n'
        'extern "C" int value() { return first() * 10 + NUMBER; }\n'
    )
    editing = tmp_path / "g++"
    editing.write_text(
        f"#!/bin/sh\n# {secrets.token_hex(8)}: another compiler in each run, for the pool\n"
        f'case "$*" in *" -c "*b_second*) if mkdir {tmp_path}/edited 2>/dev/null; then\n'
        f"sleep 0.1; echo '#define NUMBER 2' > {header}; sleep 0.1; fi;; esac\n"
        f'exec {shutil.which("g++")} "$@"\n'
    )
    editing.chmod(0o755)
    for name, value in (("OPKILN_CACHE_DIR", shared_cache), ("CXX", editing), ("MAX_JOBS", 1),
                        ("CXXFLAGS", "-O0")):  # fmt: skip
        monkeypatch.setenv(name, str(value))

    class Edited(KernelsBuilder):
        NAME = "edited_kernels"
        root = str(tmp_path)

        def sources(self) -> list[str]:
            return ["a_first.cu", "b_second.cu"]

    library = Edited().load(verbose=False)
    assert (tmp_path / "edited").is_dir()
    assert library.value() == 22
