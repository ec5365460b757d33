"""DeepSpeed's own sources, built by opkiln: a builder's declaration as an op of opkiln's.

What a builder says of its sources and flags is taken as it is, less what a plan sets itself: the
architectures of GPUs and CPU, threads of nvcc, a second OpenMP runtime in the link.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from opkiln.errors import LoadError, ToolchainError
from opkiln.loading import loader
from opkiln.model import ABI_TORCH, CPU, CUDA, PYTHON, ROCM, Op, OpSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# `-fopenmp` stays in compiles: DeepSpeed's kernels are parallel by it, and torch has an OpenMP
# runtime loaded that serves them. In a link it would bring the system's as a second one.
_PLANS_CXX = ("-march=", "-mcpu=", "-mtune=", "-shared", "-fPIC")
_PLANS_LINK = ("-fopenmp",)
_PLANS_NVCC = ("--threads", "-gencode", "--offload-arch")
_BFLOAT16 = ("-DBF16_AVAILABLE",)
_BFLOAT16_ON_DEVICE = (
    *_BFLOAT16, "-U__CUDA_NO_BFLOAT16_OPERATORS__", "-U__CUDA_NO_BFLOAT162_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
)  # fmt: skip
_NO_GLOG = "-UC10_USE_GLOG"


class Architectures(NamedTuple):
    """What a builder's kernels are compiled for."""

    archs: tuple[str, ...]
    bf16: bool  # all of them have bfloat16 arithmetic


def load(builder: Any) -> Any:
    """The extension module of a builder of DeepSpeed's, found or built.

    Raises LoadError where the builder says that it is not compatible, and the other OpkilnErrors.
    """
    if not builder.is_compatible(False):
        builder.is_compatible(True)  # says why
        raise LoadError(
            f"op {builder.name} of DeepSpeed is not compatible with this machine",
            why=str(builder.error_log or ""),
            hint="ds_report",
        )
    return loader.load(op_of(builder), must_be_native=True).value


def op_of(builder: Any) -> Op:
    """A builder's declaration. Its flags for a JIT build are those of a build here."""
    backend = _backend(builder)
    builder.build_for_cpu = backend == CPU
    was, builder.jit_mode = builder.jit_mode, True
    try:
        with _toolkit_in_torchs_module(backend):
            spec = _spec(builder, backend)
    finally:
        builder.jit_mode = was
    return Op(spec, rule=builder.filter_ccs if backend == CUDA else None)


def architectures(builder: Any, asked: str = "") -> tuple[Architectures, list[str]]:
    """Those that the user or the machine asks for, less what the builder's filter removes; and
    nvcc's flags for them. Without a list or a device: every one that this nvcc has.

    None where there is nothing to build for, or with. Raises UsageError for a list that is none.
    """
    from opkiln.decision import archs

    backend = ROCM if builder.is_rocm_pytorch() else CUDA
    spec = OpSpec(builder.name, _owner(builder), _root(builder), (), backend=backend)
    rule = builder.filter_ccs if backend == CUDA else None
    if not asked and archs.nothing_asked(backend):
        asked = "all"
    try:
        wanted = archs.wanted(Op(spec, rule=rule, asked=asked)).archs
    except (LoadError, ToolchainError):
        return Architectures((), False), []
    language = archs.grammar(backend)
    parsed = language.parse(";".join(wanted))
    bf16 = backend == ROCM or bool(language.has_bf16(parsed))
    return Architectures(wanted, bf16), list(language.flags(parsed))


def _backend(builder: Any) -> str:
    """The device that it is for: as DeepSpeed has it, one that torch can use, else the CPU."""
    import torch

    of_cuda = hasattr(builder, "filter_ccs")  # CUDAOpBuilder has it, and OpBuilder has not
    if any(source.endswith(".cu") for source in builder.sources()) or (
        of_cuda and torch.cuda.is_available()
    ):
        return ROCM if builder.is_rocm_pytorch() else CUDA
    return CPU


@contextmanager
def _toolkit_in_torchs_module(backend: str) -> Iterator[None]:
    """What builders read as ``torch.utils.cpp_extension.CUDA_HOME``.

    DeepSpeed's own ``load`` imports that module first, so some of its builders do not. Where torch
    knows no toolkit, say because it came from PyPI, it is the one that the build uses.
    """
    theirs: Any = import_module("torch.utils.cpp_extension")
    was = theirs.CUDA_HOME
    if backend == CUDA and was is None:
        from opkiln.compat.torch_paths import cuda_toolkit

        theirs.CUDA_HOME = cuda_toolkit()
    try:
        yield
    finally:
        theirs.CUDA_HOME = was


def _spec(builder: Any, backend: str) -> OpSpec:
    sources = [_absolute(builder, path) for path in _said(builder, builder.sources())]
    root = _root(builder)
    if not all(source.startswith(root + os.sep) for source in sources):
        root = os.path.dirname(sources[0]) if len(sources) == 1 else os.path.commonpath(sources)
    includes = [_absolute(builder, path) for path in _said(builder, builder.include_paths())]
    # First: it says whether the architectures have bfloat16.
    device = _said(builder, builder.nvcc_args()) if backend != CPU else []
    cxx = _less(_said(builder, builder.cxx_args()), _PLANS_CXX)
    bf16 = backend != CPU and builder.enable_bf16
    if backend == ROCM:
        cxx.append(f"-DROCM_WAVEFRONT_SIZE={builder.get_rocm_wavefront_size()}")
    spec = OpSpec(
        name=builder.name,
        distribution=_owner(builder),
        root=root,
        sources=tuple(os.path.relpath(source, root) for source in sources),
        # Below the root they are named from there: so the key is the same wherever it lies.
        include_dirs=tuple(
            os.path.relpath(path, root) if path.startswith(root + os.sep) else path
            for path in includes
        ),
        cxx_args=(*cxx, _NO_GLOG, *(_BFLOAT16 if bf16 else ())),
        ldflags=tuple(_less(_said(builder, builder.extra_ldflags()), _PLANS_LINK)),
        kind=PYTHON,
        abi=ABI_TORCH,
    )
    if backend == CPU:
        return spec
    more = _BFLOAT16_ON_DEVICE if bf16 else ()
    return spec._replace(
        backend=backend,
        device_args=(*_less(device, _PLANS_NVCC), _NO_GLOG, *more),
        vectorize=False,
    )


def _said(builder: Any, entries: Iterable[str]) -> list[str]:
    return [os.fspath(each) for each in builder.strip_empty_entries(list(entries))]


def _less(flags: Iterable[str], owned: tuple[str, ...]) -> list[str]:
    return [flag for flag in flags if not flag.startswith(owned)]


def _absolute(builder: Any, path: str) -> str:
    return os.path.abspath(str(builder.deepspeed_src_path(path)))


def _root(builder: Any) -> str:
    return os.path.abspath(str(builder.deepspeed_src_path("")))


def _owner(builder: Any) -> str:
    return type(builder).__module__.partition(".")[0].replace("__main__", "main")
