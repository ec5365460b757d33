"""DeepSpeed's own quantizer kernels, run on the CPU, beside the oracle that opkiln is tested with.

They are compiled from DeepSpeed's CUDA sources by a C++ compiler, against a stand-in for CUDA's
runtime (tests/with_deepspeed/on_cpu): copies whose launches are function
calls, with a header of our own for conversions. Division is exact here, and approximate on GPUs.
Skipped where there is no DeepSpeed; ``make test-deepspeed`` makes an environment with it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample import deepspeed_quantizer as oracle
from sample.levels import IS_X86

import opkiln

TESTS = Path(__file__).parents[1]
FORMATS = list(itertools.product((4, 8), (True, False)))
_LAUNCH = re.compile(
    r"(?P<kernel>\w+(?:<[^<>]*>)?)\s*(?:\\\s*)?"
    r"<<<\s*(?P<grid>\w+), (?P<block>\w+), 0, stream>>>\("
)


def _sources() -> Path:
    folders = [TESTS.parent / name for name in (".deepspeed-venv", ".bench-venv")]
    places = [Path(str(found.locate_file("deepspeed")))
              for found in importlib.metadata.distributions(name="deepspeed")]  # fmt: skip
    for folder in folders:
        places += folder.glob("lib/python*/site-packages/deepspeed")
    for place in places:
        if (place / "ops" / "csrc" / "quantization").is_dir():
            return place / "ops" / "csrc"
    pytest.skip("there is no DeepSpeed here: make test-deepspeed")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    sources, compiler = _sources(), shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    tree = tmp_path_factory.mktemp("deepspeed")
    stand_in = TESTS / "with_deepspeed" / "on_cpu"
    for name in ("includes", "quantization"):
        shutil.copytree(sources / name, tree / name)
    shutil.copy(stand_in / "conversion_utils.h", tree / "includes")
    for path in (tree / "quantization").glob("*.cu"):
        text, count = _LAUNCH.subn(
            r"launched(dim3(\g<grid>), dim3(\g<block>), \g<kernel>)(", path.read_text()
        )
        assert count, path
        path.write_text(text)
    library = tree / "kernels.so"
    subprocess.run(
        [
            compiler, "-std=c++20", "-O2", "-w", "-fPIC", "-shared", "-fno-gnu-unique",
            # As nvcc: a product and a sum are one operation.
            "-ffp-contract=fast", *(["-mfma"] if IS_X86 else []),
            "-fno-strict-aliasing", f"-I{stand_in}",
            f"-I{Path(opkiln.__file__).parent / 'csrc'}", f"-I{tree / 'includes'}", f"-I{tree}",
            stand_in / "quantizer.cpp", "-o", library,
        ],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


def _halves(*shape: int, seed: int = 0, mean: float = 0.3) -> oracle.Halves:
    return (np.random.default_rng(seed).standard_normal(shape) + mean).astype(np.float16)


def _with_room(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Its kernels read beyond the last group, and use nothing of that."""
    return np.concatenate([x.reshape(-1), np.zeros(1 << 16, dtype=x.dtype)])


def _at(*arrays: np.ndarray[Any, Any]) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(array.ctypes.data) for array in arrays]


def _room(x: oracle.Halves, groups: int, bits: int, symmetric: bool) -> tuple[Any, Any]:
    params = np.full((groups, 1 if symmetric else 2), 7, dtype=np.float32)
    return np.full(x.size * bits // 8, 7, dtype=np.int8), params


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_the_oracle_quantizes_as_deepspeeds_kernels(
    kernels: ctypes.CDLL, bits: int, symmetric: bool
) -> None:
    for size in (8, 24, 96, 128, 136, 256, 512, 1000, 2048, 4104):
        x = _halves(6, size, seed=size)
        x[0], x[1], x[2, 3], x[3, 3] = 0.0, 2.0, math.nan, math.inf
        found = _room(x, 6, bits, symmetric)
        padded = _with_room(x)
        kernels.run_quantize(*_at(*found, padded), 6, size, bits, int(not symmetric))
        for a, b in zip(found, oracle.quantize(x, 6, bits, symmetric), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(size))


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_the_oracle_swizzles_as_deepspeeds_kernels(
    kernels: ctypes.CDLL, bits: int, symmetric: bool
) -> None:
    for size, (pipeline, nodes, devices) in itertools.product(
        (16, 96, 512, 1000), ((1, 2, 4), (2, 3, 2))
    ):
        groups = pipeline * nodes * devices * 2
        x = _halves(groups, size, seed=size)
        found = _room(x, groups, bits, symmetric)
        padded = _with_room(x)
        order = (pipeline, nodes, devices)
        kernels.run_swizzle(*_at(*found, padded), groups, size, bits, int(not symmetric), *order)
        expected = oracle.swizzle_quant(x, groups, bits, symmetric, *order)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str((size, order)))


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_the_oracle_dequantizes_as_deepspeeds_kernels(
    kernels: ctypes.CDLL, bits: int, symmetric: bool
) -> None:
    for size in (16, 96, 2048):
        levels, params = oracle.quantize(_halves(6, size), 6, bits, symmetric)
        params *= np.float32(0.7)
        for wide, dtype in enumerate((np.float16, np.float32)):
            out = np.zeros(6 * size, dtype=dtype)
            padded = _with_room(levels)
            kernels.run_dequantize(
                *_at(out, padded, params), size, out.size, bits, int(not symmetric), wide
            )
            expected = oracle.dequantize(levels, params, 6, bits, symmetric).astype(dtype)
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_the_oracle_reduces_as_deepspeeds_kernels(
    kernels: ctypes.CDLL, bits: int, symmetric: bool
) -> None:
    # Of several asymmetric parts DeepSpeed reads another group's parameters.
    for size, parts, merged in itertools.product(
        (64, 1000, 2048), (1, 2, 8, 16) if symmetric else (1,), (1, 3)
    ):
        groups = parts * merged * 2
        levels, params = oracle.quantize(
            _halves(groups, size, seed=parts) * 10, groups, bits, symmetric
        )
        found = _room(_halves(merged * 2 * size), 2, bits, symmetric)
        part, padded = levels.size // parts, _with_room(levels)
        kernels.run_reduce(
            *_at(*found, padded, params), parts, bits, int(not symmetric), 2,
            part // 2, part, groups // parts, part // (groups // parts),
        )  # fmt: skip
        expected = oracle.quantized_reduction(levels, params, groups, 2, bits, symmetric, parts)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str((size, parts, merged)))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_oracle_has_the_experimental_numbers_of_deepspeeds_kernels(
    kernels: ctypes.CDLL, bits: int
) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (64, 24), dtype=np.uint8)
    scales, least = np.abs(_halves(64)) * np.float16(30) + np.float16(0.01), _halves(64, seed=1)
    out = np.zeros((64, 24 * 8 // bits), dtype=np.float16)
    kernels.run_experimental(*_at(out, levels, scales, least), 64, out.shape[1], bits)
    np.testing.assert_array_equal(out, oracle.experimental(levels, scales, least, 64, bits))
