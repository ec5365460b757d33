"""DeepSpeed's own sources, built by opkiln: turns a builder's declaration into an op of opkiln.

A builder's sources and flags are used unchanged, without those that a plan sets itself: the
architectures of GPUs and CPU, nvcc's threads, and a second OpenMP runtime in the link.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from opkiln.compat.deepspeed.builders import BF16, BF16_ON_DEVICE, OF_THE_PLAN
from opkiln.compat.torch import paths
from opkiln.errors import LoadError, ToolchainError
from opkiln.loading import loader
from opkiln.model import ABI_TORCH, CPU, CUDA, PYTHON, ROCM, Op, OpSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# The prefixes of flags that a plan sets itself. `-fopenmp` stays in compiles: DeepSpeed's kernels
# use it for their threads, and torch has already loaded an OpenMP runtime for them. In a link it
# would load the system's runtime as a second one.
_PLANS_CXX = (*OF_THE_PLAN, "-shared", "-fPIC")
_PLANS_LINK = ("-fopenmp",)
_PLANS_NVCC = ("--threads", "-gencode", "--offload-arch")
_NO_GLOG = "-UC10_USE_GLOG"

# What pybind11 puts into a module: `m.def("name"`, `py::class_<…>(m, "name"`, and values of enums,
# which may be exported. A line of a macro ends with a backslash.
_DEFINES = re.compile(
    r'\w\.def\(\s*\\?\s*"(\w+)"\s*(#?)'
    r'|(?:\b(?:class_|enum_)<[^;]*?>\s*\(\s*\w+\s*,|\.value\()\s*"(\w+)"'
)
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def load(builder: Any) -> Any:
    """The extension module of a DeepSpeed builder, found or built.

    Raises LoadError if the builder says that it is not compatible, and the other OpkilnErrors.
    """
    if not builder.is_compatible(False):
        builder.is_compatible(True)  # prints the reason
        raise LoadError(
            f"op {builder.name} of DeepSpeed is not compatible with this machine",
            why=str(builder.error_log or ""),
            hint="ds_report",
        )
    with paths.assigned_toolkit():
        return loader.load(op_of(builder), must_be_native=True).value


def functions(builder: Any) -> tuple[str, ...]:
    """The names that a builder's sources define in its module. A macro's ``"softmax_" #name`` is
    ``softmax_*``. Builds nothing: the sources are read, and one that cannot be is left out."""
    builder.build_for_cpu = _backend(builder) == CPU
    found: set[str] = set()
    for path in _listed(builder, builder.sources()):
        with suppress(OSError), open(_absolute(builder, path), errors="replace") as file:
            for name, pasted, other in _DEFINES.findall(_COMMENTS.sub("", file.read())):
                found.add(f"{name}*" if pasted else name or other)
    return tuple(sorted(found))


def op_of(builder: Any) -> Op:
    """A builder's declaration, with its flags for a JIT build."""
    backend = _backend(builder)
    builder.build_for_cpu = backend == CPU
    was, builder.jit_mode = builder.jit_mode, True
    try:
        with _toolkit_in_torchs_module(backend):
            spec = _spec(builder, backend)
    finally:
        builder.jit_mode = was
    return Op(spec, rule=builder.filter_ccs if backend == CUDA else None)


def architectures(builder: Any, asked: str = "") -> tuple[bool, list[str]]:
    """Whether all architectures to build for have bfloat16 arithmetic, and nvcc's flags for them.
    The user's list or this machine's GPUs decide; without either, all that this nvcc knows. The
    builder's filter removes some.

    No flags if there is nothing to build for, or no compiler. Raises UsageError for a malformed
    list.
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
        return False, []
    language = archs.grammar(backend)
    parsed = language.parse(";".join(wanted))
    bf16 = backend == ROCM or bool(language.has_bf16(parsed))
    return bf16, list(language.flags(parsed))


def _backend(builder: Any) -> str:
    """The device to build for: as in DeepSpeed, one that torch can use, else the CPU."""
    import torch

    of_cuda = hasattr(builder, "filter_ccs")  # CUDAOpBuilder has it, OpBuilder does not
    if any(source.endswith(".cu") for source in builder.sources()) or (
        of_cuda and torch.cuda.is_available()
    ):
        return ROCM if builder.is_rocm_pytorch() else CUDA
    return CPU


@contextmanager
def _toolkit_in_torchs_module(backend: str) -> Iterator[None]:
    """Sets ``torch.utils.cpp_extension.CUDA_HOME``, which builders read, to the toolkit in use.

    DeepSpeed's own ``load`` imports that module first, so some of its builders do not import it.
    """
    theirs: Any = import_module("torch.utils.cpp_extension")
    was = vars(theirs)["CUDA_HOME"]
    if backend == CUDA:
        try:
            theirs.CUDA_HOME = paths.cuda_toolkit()
        except paths.ToolkitMissing:
            # The op may be in a cache. If it is not, the build reports what is missing.
            if was is None:
                raise
    try:
        yield
    finally:
        theirs.CUDA_HOME = was


def _spec(builder: Any, backend: str) -> OpSpec:
    sources = [_absolute(builder, path) for path in _listed(builder, builder.sources())]
    root = _root(builder)
    if not all(source.startswith(root + os.sep) for source in sources):
        root = os.path.dirname(sources[0]) if len(sources) == 1 else os.path.commonpath(sources)
    includes = [_absolute(builder, path) for path in _listed(builder, builder.include_paths())]
    # First, because it sets enable_bf16.
    device = _listed(builder, builder.nvcc_args()) if backend != CPU else []
    cxx = _without(_listed(builder, builder.cxx_args()), _PLANS_CXX)
    bf16 = backend != CPU and builder.enable_bf16
    if backend == ROCM:
        cxx.append(f"-DROCM_WAVEFRONT_SIZE={builder.get_rocm_wavefront_size()}")
    spec = OpSpec(
        name=builder.name,
        distribution=_owner(builder),
        root=root,
        sources=tuple(os.path.relpath(source, root) for source in sources),
        # Relative to the root, if they are below it. Then the key does not depend on the place.
        include_dirs=tuple(
            os.path.relpath(path, root) if path.startswith(root + os.sep) else path
            for path in includes
        ),
        cxx_args=(*cxx, _NO_GLOG, *([BF16] if bf16 else ())),
        ldflags=tuple(_without(_listed(builder, builder.extra_ldflags()), _PLANS_LINK)),
        kind=PYTHON,
        abi=ABI_TORCH,
    )
    if backend == CPU:
        return spec
    more = BF16_ON_DEVICE if bf16 else ()
    return spec._replace(
        backend=backend,
        device_args=(*_without(device, _PLANS_NVCC), _NO_GLOG, *more),
        vectorize=False,
    )


def _listed(builder: Any, entries: Iterable[str]) -> list[str]:
    return [os.fspath(each) for each in builder.strip_empty_entries(list(entries))]


def _without(flags: Iterable[str], owned: tuple[str, ...]) -> list[str]:
    return [flag for flag in flags if not flag.startswith(owned)]


def _absolute(builder: Any, path: str) -> str:
    return os.path.abspath(str(builder.deepspeed_src_path(path)))


def _root(builder: Any) -> str:
    return os.path.abspath(str(builder.deepspeed_src_path("")))


def _owner(builder: Any) -> str:
    return type(builder).__module__.partition(".")[0].replace("__main__", "main")
