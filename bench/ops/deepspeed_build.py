"""DeepSpeed's own kernels, compiled by opkiln: what each of its modules is made of, and its flags.

    PYTHONPATH=src python bench/ops/deepspeed_build.py [MODULE ...] [--sources DIR] [--keep FILE]

``DIR`` is what ``make deepspeed-sources`` made. Flags and lists of sources are those of DeepSpeed's
builders for CUDA 13, less debug information and the fp6 products of ``inference_core_ops``; what to
build for is ``TORCH_CUDA_ARCH_LIST``, else the GPU that is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opkiln.base.model import ABI_TORCH, CUDA, PYTHON
from opkiln.builder import CUDAOpBuilder
from opkiln.errors import OpkilnError
from opkiln.store import layer
from opkiln.store.bundle import write_bundle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SOURCES = Path(__file__).resolve().parents[2] / ".deepspeed" / "source"
CXX = ["-O3", "-Wno-reorder", "-DBF16_AVAILABLE"]
NVCC = [
    "-O3", "-std=c++20", "--use_fast_math", "-DBF16_AVAILABLE", "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_HALF2_OPERATORS__",
]  # fmt: skip
_CORE = "deepspeed/inference/v2/kernels"
BINDING = Path(__file__).with_name("deepspeed_core_ops.cpp")  # instead of its core_ops.cpp


class Module(NamedTuple):
    """``folder`` is that of the sources; include paths are below DeepSpeed's root."""

    folder: str
    sources: tuple[str, ...]
    includes: tuple[str, ...]


MODULES = {
    "transformer_inference": Module(
        "csrc/transformer/inference/csrc",
        (
            "pt_binding.cpp", "gelu.cu", "relu.cu", "layer_norm.cu", "rms_norm.cu", "softmax.cu",
            "dequantize.cu", "apply_rotary_pos_emb.cu", "transform.cu", "pointwise_ops.cu",
        ),
        ("csrc/transformer/inference/includes", "csrc/includes"),
    ),
    "transformer": Module(
        "csrc/transformer",
        (
            "ds_transformer_cuda.cpp", "cublas_wrappers.cu", "transform_kernels.cu",
            "gelu_kernels.cu", "dropout_kernels.cu", "normalize_kernels.cu", "softmax_kernels.cu",
            "general_kernels.cu",
        ),
        ("csrc/includes",),
    ),
    "random_ltd": Module(
        "csrc/random_ltd",
        ("pt_binding.cpp", "gather_scatter.cu", "slice_attn_masks.cu", "token_sort.cu"),
        ("csrc/includes",),
    ),
    "spatial_inference": Module(
        "csrc/spatial/csrc",
        ("pt_binding.cpp", "opt_bias_add.cu"),
        ("csrc/spatial/includes", "csrc/includes"),
    ),
    "inference_core_ops": Module(
        f"{_CORE}/core_ops",
        (
            BINDING.name, "bias_activations/bias_activation.cpp",
            "bias_activations/bias_activation_cuda.cu", "cuda_layer_norm/layer_norm.cpp",
            "cuda_layer_norm/layer_norm_cuda.cu", "cuda_rms_norm/rms_norm.cpp",
            "cuda_rms_norm/rms_norm_cuda.cu", "gated_activations/gated_activation_kernels.cpp",
            "gated_activations/gated_activation_kernels_cuda.cu",
        ),
        (
            f"{_CORE}/core_ops/bias_activations", f"{_CORE}/core_ops/cuda_layer_norm",
            f"{_CORE}/core_ops/cuda_rms_norm", f"{_CORE}/core_ops/gated_activations",
            f"{_CORE}/includes",
        ),
    ),
}  # fmt: skip


class Builder(CUDAOpBuilder):
    """One of the modules, declared as a package's author would. Paths are below ``root``, so that
    one build serves wherever the sources lie."""

    DISTRIBUTION = "deepspeed_kernels"
    KIND, ABI = PYTHON, ABI_TORCH
    BACKENDS = (CUDA,)

    def __init__(self, name: str, root: Path = SOURCES) -> None:
        super().__init__(f"deepspeed_{name}")
        self._module, self.root = MODULES[name], str(root)

    def sources(self) -> Sequence[str]:
        return [f"{self._module.folder}/{source}" for source in self._module.sources]

    def include_paths(self) -> Sequence[str]:
        return self._module.includes

    def cxx_args(self) -> Sequence[str]:
        # torch's headers need C++20 from 2.12 on; DeepSpeed's builders make the same choice.
        newer = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
        return [*CXX, "-std=c++20"] if newer else [*CXX, "-std=c++17"]

    def nvcc_args(self) -> Sequence[str]:
        return NVCC


@cache
def loaded(name: str, root: Path = SOURCES) -> Any:
    """DeepSpeed's extension module of this name, compiled where that is needed.

    Raises OpkilnError where it cannot be compiled or loaded.
    """
    if BINDING.name in MODULES[name].sources:
        place = root / MODULES[name].folder / BINDING.name
        if not place.exists() or place.read_bytes() != BINDING.read_bytes():
            shutil.copyfile(BINDING, place)
    return Builder(name, root).jit_load(verbose=False)


def build(names: Sequence[str], root: Path = SOURCES) -> Iterator[tuple[str, str]]:
    """Compile these beside each other: for each, when it is done, "" or why it is not there."""
    with ThreadPoolExecutor(len(MODULES)) as pool:
        begun = {pool.submit(loaded, name, root): name for name in names}
        for done in as_completed(begun):
            error = done.exception()
            if error is not None and not isinstance(error, OpkilnError):
                raise error
            yield begun[done], "" if error is None else str(error)


def bundle(names: Sequence[str], root: Path, file: Path) -> None:
    """Write these to one file: named in ``OPKILN_STORE_LAYERS``, it spares the next build."""
    with tempfile.TemporaryDirectory() as stage:
        layer.export([loaded(name, root).__file__ for name in names], stage)
        write_bundle(stage, str(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("modules", nargs="*", default=list(MODULES), metavar="MODULE")
    parser.add_argument("--sources", type=Path, default=SOURCES, metavar="DIR")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write what is built there")
    options = parser.parse_args()
    began, built = time.perf_counter(), []
    for name, why in build(options.modules, options.sources):
        seconds = round(time.perf_counter() - began, 1)
        print(json.dumps({"module": name, "seconds": seconds, "why": why}), flush=True)
        if not why:
            built.append(name)
            if options.keep:
                bundle(built, options.sources, options.keep)


if __name__ == "__main__":
    main()
