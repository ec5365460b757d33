"""DeepSpeed's own sources, built by opkiln: turns a builder's declaration into an op of opkiln.

A builder's sources and flags are used unchanged, without those that a plan sets itself: the
architectures of GPUs and CPU, nvcc's threads, and a second OpenMP runtime in the link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from opkiln.base.model import CPU, CUDA, ROCM, Op, OpSpec
from opkiln.compat.deepspeed.builders import CUDAOpBuilder, drop_prefixed
from opkiln.compat.torch import paths
from opkiln.compat.torch.extension import root_and_sources
from opkiln.errors import LoadError
from opkiln.loading import loader
from opkiln.machine import uname

# The prefixes of flags for nvcc that a plan sets itself.
_PLANS_NVCC = ("--threads", "-gencode", "--offload-arch")
_NO_GLOG = "-UC10_USE_GLOG"

# The names that pybind11 puts into a module: `m.def("name"`, `py::class_<…>(m, "name"`, and values
# of enums, which may be exported. A line of a macro ends with a backslash.
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
    found: set[str] = set()
    for path in _declare(builder).sources():
        for name, pasted, other in _DEFINES.findall(_COMMENTS.sub("", uname.read_text(path))):
            found.add(f"{name}*" if pasted else name or other)
    return tuple(sorted(found))


def op_of(builder: Any) -> Op:
    """A builder's declaration, with its flags for a JIT build."""
    return _declare(builder).op()


def architectures(builder: Any, asked: str = "") -> tuple[bool, list[str]]:
    """Whether all architectures to build for have bfloat16 arithmetic, and nvcc's flags for them.
    The user's list or this machine's GPUs decide; without either, all that this nvcc knows. The
    builder's filter removes some.

    No flags if there is nothing to build for, or no compiler. Raises UsageError for a malformed
    list.
    """
    from opkiln.machine.arch import cuda

    declared = _AdaptedBuilder(builder, asked=asked)
    flags = declared.compute_capability_args()
    bf16 = declared.backend == ROCM or cuda.has_bf16(cuda.split_flags(flags)[1])
    return bool(flags) and bf16, flags


class _AdaptedBuilder(CUDAOpBuilder):
    """A builder of DeepSpeed's as one of opkiln's."""

    def __init__(self, theirs: Any, for_device: bool = True, asked: str = "") -> None:
        self._theirs = theirs
        self.DISTRIBUTION = type(theirs).__module__.partition(".")[0]
        backend = CPU if not for_device else ROCM if theirs.is_rocm_pytorch() else CUDA
        super().__init__(theirs.name, backend=backend, archs=asked)
        self.root = self.deepspeed_src_path("")

    def deepspeed_src_path(self, code_path: str) -> str:
        return os.path.abspath(str(self._theirs.deepspeed_src_path(code_path)))

    def strip_empty_entries(self, args: Iterable[str | os.PathLike[str]]) -> list[str]:
        return [os.fspath(each) for each in self._theirs.strip_empty_entries(list(args))]

    def _paths(self, entries: Iterable[str]) -> list[str]:
        return [self.deepspeed_src_path(each) for each in self.strip_empty_entries(entries)]

    def sources(self) -> Sequence[str]:
        return self._paths(self._theirs.sources())

    def include_paths(self) -> Sequence[str]:
        return self._paths(self._theirs.include_paths())

    def cxx_args(self) -> Sequence[str]:
        flags = self.strip_empty_entries(self._theirs.cxx_args())
        if self.backend == ROCM:
            flags.append(f"-DROCM_WAVEFRONT_SIZE={self._theirs.get_rocm_wavefront_size()}")
        return [*flags, _NO_GLOG]

    def nvcc_args(self) -> Sequence[str]:
        return [*drop_prefixed(self._device, _PLANS_NVCC), _NO_GLOG]

    def extra_ldflags(self) -> Sequence[str]:
        return list(self._theirs.extra_ldflags())

    def _rule(self) -> Any:
        return self._theirs.filter_ccs if self.backend == CUDA else None

    @property
    def enable_bf16(self) -> bool:
        return bool(self._theirs.enable_bf16)

    def spec(self) -> OpSpec:
        was, self._theirs.jit_mode = self._theirs.jit_mode, True
        try:
            with _toolkit_in_torchs_module(self.backend):
                # First, as in DeepSpeed, because it sets enable_bf16.
                device = self._theirs.nvcc_args() if self.backend != CPU else []
                self._device = self.strip_empty_entries(device)
                spec = super().spec()
        finally:
            self._theirs.jit_mode = was
        spec = spec._replace(**root_and_sources(spec.sources, self.root))
        # Relative to the root, if they are below it. Then the key does not depend on the place.
        relative = (
            os.path.relpath(path, spec.root) if path.startswith(spec.root + os.sep) else path
            for path in spec.include_dirs
        )
        return spec._replace(include_dirs=tuple(relative))


def _declare(builder: Any) -> _AdaptedBuilder:
    """The builder, for a device that torch can use, as in DeepSpeed, else for the CPU."""
    import torch

    for_device = any(source.endswith(".cu") for source in builder.sources()) or (
        # CUDAOpBuilder has it, OpBuilder does not.
        hasattr(builder, "filter_ccs") and torch.cuda.is_available()
    )
    builder.build_for_cpu = not for_device
    return _AdaptedBuilder(builder, for_device)


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
