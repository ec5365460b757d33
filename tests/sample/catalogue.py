"""What tests/ops loads, built before the tests: ``python tests/sample/catalogue.py``.

Everything is built in one parallel run, into ``pool.CATALOGUE``, unless it is there already. A test
in tests/ops that compiles anything else fails in `make test`: what it needs is to be added here.
What runs of everything need beyond that, their tests build themselves.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
sys.path.append(str(Path(__file__).parents[1] / "ops"))

import opkiln
from opkiln import settings
from opkiln.base.model import CPU
from opkiln.builder.registry import ALL_OPS, bundled_ops
from opkiln.errors import ToolchainError
from opkiln.machine import uname
from opkiln.machine.toolchain import hipcc, nvcc
from opkiln.ship import prebuild
from opkiln.ship.prebuild import BUILT, BuildRequest
from opkiln.ship.selection import NamedTarget
from sample import pool

if TYPE_CHECKING:
    from collections.abc import Iterator

# In these dtypes an op that has a library for each differs by how elements are converted alone.
NOT_NATIVE = "float16"
# For each other instruction set that this machine can run. The vectors are the same for all ops.
LEVELS_OF = ("cpu_adam",)
# The CUDA kernels, for the emulator. Those of libraries are in ``_functions``.
EMULATED = (
    "deepspeed_quantizer", "fp_quantizer", "fused_adam", "fused_lamb", "fused_lion", "packbits",
    "quantizer", "utils",
)  # fmt: skip
KV_ATTENTION = ((64, "bfloat16", False), (80, "half", True), (256, "half", False))
MIXED_GEMM = (
    ("E3M2", "half"), ("E3M2", "bfloat16"), ("Int8", "half"), ("Int4", "half"), ("E4M3", "half"),
    ("Plain", "half"),
)  # fmt: skip
# For GPUs that need not be there: what each compiler takes the least time for.
CUDA = (("fused_lion", "9.0a"),)
ROCM = (("packbits", "gfx90a"),)

_STAMP = pool.CATALOGUE / "built"


def build() -> list[prebuild.BuildOutcome]:
    """Build what is not there. Raises the error of the first build that failed, unless there is no
    compiler for it: the tests that need it are skipped."""
    pool.make()
    with settings.override(cache_dir=str(pool.CATALOGUE)):
        first, *emulated = _for_the_emulator()
        # The emulator's runtime is compiled for the first one, and serves the others.
        outcomes = prebuild.prebuild([first])
        outcomes += prebuild.prebuild([*_for_cpus(), *_for_gpus(), *emulated])
    for each in outcomes:
        if each.error is not None and not isinstance(each.error, ToolchainError):
            raise each.error
    _STAMP.write_text(_built_with())
    return outcomes


def is_current() -> bool:
    """Whether everything was built since the product or this list was edited last, with what is
    installed now."""
    sources = Path(opkiln.__file__).parent.rglob("*.*")
    files = (Path(__file__), *(each for each in sources if each.suffix != ".pyc"))
    try:
        built, text = _STAMP.stat().st_mtime, _STAMP.read_text()
    except FileNotFoundError:
        return False
    return text == _built_with() and built > max(each.stat().st_mtime for each in files)


def _built_with() -> str:
    names = (*filter(None, map(shutil.which, ("g++", "clang++", "nvcc", "hipcc"))), sys.executable)
    seen = [(name, os.stat(name).st_mtime_ns) for name in names]
    return json.dumps([version("torch"), uname.cpu_name(), seen])


def _for_cpus() -> Iterator[BuildRequest]:
    from instruction_sets import others

    for each in prebuild.requests(bundled_ops(), [NamedTarget(CPU)], named=False).requests:
        if not each.builder.NAME.endswith(f"__{NOT_NATIVE}"):
            yield each
    levels = [NamedTarget(CPU, level) for level in others()]
    yield from prebuild.requests(LEVELS_OF, levels, named=True).requests


def _for_gpus() -> Iterator[BuildRequest]:
    for backend, compiler, ops in (("cuda", nvcc, CUDA), ("rocm", hipcc, ROCM)):
        for op, archs in ops if compiler.available() else ():
            yield BuildRequest(opkiln.get_builder(op, backend=backend, archs=archs), named=False)


def _for_the_emulator() -> Iterator[BuildRequest]:
    import stand_in

    from opkiln.ops.kv_attention.functions import kv_attention
    from opkiln.ops.mixed_gemm.functions import packed_gemm
    from opkiln.ops.transformer.op import kit

    for name in EMULATED:
        yield BuildRequest(stand_in.twin(ALL_OPS[name]), asked_as=f"emulated {name}")
    for each in kit.builder.variants():
        if not each.NAME.endswith(f"__{NOT_NATIVE}"):
            yield BuildRequest(stand_in.twin(each), asked_as=f"emulated {each.NAME}")
    for builder, _ in stand_in.twin_libraries(*_functions()):
        yield BuildRequest(builder)
    for function, variants in ((kv_attention, KV_ATTENTION), (packed_gemm, MIXED_GEMM)):
        for values in variants:
            yield BuildRequest(function.builder.variant(values)(backend="emulated"))


def _functions() -> Iterator[Any]:
    """Of the libraries whose kernels are emulated."""
    import ragged_fixtures

    from opkiln.ops.evoformer_attn import functions as evoformer_attn
    from opkiln.ops.random_ltd import functions as random_ltd
    from opkiln.ops.sparse_attn import functions as sparse_attn
    from opkiln.ops.spatial_inference import functions as spatial_inference
    from opkiln.ops.transformer_inference.functions import (
        activations,
        linear,
        norms,
        residuals,
        rotary,
        softmax,
    )

    yield from ragged_fixtures.FUNCTIONS
    for module in (
        evoformer_attn, random_ltd, sparse_attn, spatial_inference, activations, linear, norms,
        residuals, rotary, softmax,
    ):  # fmt: skip
        yield from (each for each in vars(module).values() if hasattr(each, "overload"))


if __name__ == "__main__":
    made = [] if is_current() else [each for each in build() if each.status == BUILT]
    print(f"{len(made)} libraries built in {pool.CATALOGUE}")
