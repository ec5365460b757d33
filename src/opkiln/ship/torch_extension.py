"""Extensions as ``torch.utils.cpp_extension`` makes them, built by opkiln's engine.

``CppExtension`` and ``CUDAExtension`` are plain setuptools extensions with torch's directories and
libraries in them; torch's ``BuildExtension`` knows the rest. Here the rest is a plan like any
other: parallel, cached, one owner for each flag. The module is for one torch and one Python, and
for every CPU of its family: nothing looks at a CPU before Python imports it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from opkiln.arch import cuda
from opkiln.builder.base import OpBuilder
from opkiln.errors import SpecError
from opkiln.loading.archs import nothing_asked
from opkiln.loading.loader import Op
from opkiln.model import ABI_TORCH, CPU, CUDA, PYTHON, ROCM, OpSpec
from opkiln.toolchain import torch_sdk
from opkiln.toolchain.rocm_version import is_rocm_pytorch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from setuptools import Extension

# The plan links what an op needs of these.
_LIBRARIES = frozenset((
    "c10", "torch", "torch_cpu", "torch_python", "cudart", "c10_cuda", "torch_cuda", "amdhip64",
    "c10_hip", "torch_hip",
))  # fmt: skip
_DEVICE = (".cu", ".hip")


class ExtensionBuilder(OpBuilder):
    """What is known of an extension, as a builder."""

    KIND = PYTHON
    ABI = ABI_TORCH

    def __init__(self, extension: Extension) -> None:
        spec, self._archs = _spec(extension)
        super().__init__(spec.name)
        self._spec = spec
        self.backend = spec.backend

    def spec(self) -> OpSpec:
        """The extension as a declaration."""
        return self._spec

    def op(self) -> Op:
        asked = self._archs
        if not asked and nothing_asked(self.backend):
            asked = "all"
        return Op(self._spec, asked=asked)


def is_torchs(extension: Extension) -> bool:
    """Whether setuptools alone could not build an extension as torch means it."""
    return (
        not _LIBRARIES.isdisjoint(extension.libraries)
        or isinstance(extension.extra_compile_args, dict)
        or any(str(source).endswith(_DEVICE) for source in extension.sources)
    )


def _spec(extension: Extension) -> tuple[OpSpec, str]:
    """The declaration, and the architectures that its flags ask for. Raises SpecError."""
    name = extension.name.rpartition(".")[2]
    if not extension.sources:
        raise SpecError(f"extension {extension.name} has no sources")
    if extension.extra_objects:
        raise SpecError(
            f"extension {extension.name}: extra_objects are no part of a build that is cached",
            why=", ".join(map(str, extension.extra_objects)),
        )
    files = [os.path.abspath(os.fspath(source)) for source in extension.sources]
    root = os.path.dirname(files[0]) if len(files) == 1 else os.path.commonpath(files)
    of_device = any(file.endswith(_DEVICE) for file in files)
    flags: Any = extension.extra_compile_args or []
    both = flags if isinstance(flags, dict) else {"cxx": flags, "nvcc": flags}
    macros = [
        f"-D{macro}" if value is None else f"-D{macro}={value}"
        for macro, value in extension.define_macros
    ]
    macros += [f"-U{macro}" for macro in extension.undef_macros]
    device_args, archs = cuda.from_flags((*macros, *both.get("nvcc", ())))
    backend = CPU
    if of_device:
        backend = ROCM if is_rocm_pytorch() else CUDA
    spec = OpSpec(
        name=name,
        distribution=extension.name.partition(".")[0],
        root=root,
        sources=tuple(os.path.relpath(file, root) for file in files),
        include_dirs=tuple(_foreign(extension.include_dirs, "cuda_runtime_api.h")),
        cxx_args=(*macros, *both.get("cxx", ())),
        ldflags=(
            *(f"-L{path}" for path in _foreign(extension.library_dirs, "libcudart.so")),
            *(f"-Wl,-rpath,{path}" for path in extension.runtime_library_dirs),
            *extension.extra_link_args,
        ),
        libraries=tuple(each for each in extension.libraries if each not in _LIBRARIES),
        kind=PYTHON,
        abi=ABI_TORCH,
        backend=backend,
        vectorize=False,
        device_args=device_args if of_device else (),
    )
    return spec, cuda.show(archs) if of_device else ""


def _foreign(directories: Iterable[str], mark: str) -> list[str]:
    """Those that are neither torch's nor a CUDA toolkit's: which of these it is, a plan says."""
    torch = torch_sdk.locate()
    own = "" if torch is None else os.path.join(torch, "")
    found = [os.path.abspath(os.fspath(path)) for path in directories]
    return [
        path
        for path in found
        if not (own and path.startswith(own)) and not os.path.exists(os.path.join(path, mark))
    ]
