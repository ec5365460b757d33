"""``CppExtension`` and its kin as torch.utils.cpp_extension has them, and as ops of opkiln.

They are plain setuptools extensions with torch's directories and libraries in them; torch's
``BuildExtension`` does the rest. Here opkiln does it, with a plan like that of any op: parallel and
cached. The module is for one torch and one Python. It runs on every CPU of its family, unless its
flags ask for this CPU, because no check of the CPU comes before Python's import.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from opkiln.base import model
from opkiln.builder.base import OpBuilder
from opkiln.compat.torch.flags import translate
from opkiln.compat.torch.paths import include_paths, library_paths
from opkiln.decision.archs import lacks_targets
from opkiln.errors import SpecError
from opkiln.machine.toolchain import torch_sdk
from opkiln.machine.toolchain.torch_sdk import is_rocm_pytorch
from opkiln.settings import settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from setuptools import Extension

_HOST_LIBRARIES = frozenset(("c10", "torch", "torch_cpu", "torch_python"))
_CUDA_RUNTIME = ("cudart", "c10_cuda", "torch_cuda")
_ROCM_RUNTIME = ("amdhip64", "c10_hip", "torch_hip")
_CUDA_LIBRARIES = frozenset((*_CUDA_RUNTIME, *_ROCM_RUNTIME))
_SYCL_LIBRARIES = frozenset(("sycl", "c10_xpu", "torch_xpu"))
# The plan links those of these that an op needs.
_OWNED = _HOST_LIBRARIES | _CUDA_LIBRARIES | {"sycl"}

# The oldest Python that a limited module supports, as in torch. A setup.py may set torch's value.
LIMITED_API = "0x030A0000"

# The flags Python was built with that change the meaning of C++. The others concern optimization,
# which the plan decides.
_MEANING = ("-fwrapv", "-fno-strict-aliasing", "-fno-strict-overflow")


def CppExtension(name: str, sources: list[str], *args: Any, **kwargs: Any) -> Extension:  # noqa: N802
    """A setuptools extension in C++ with torch's headers and libraries.

    The other arguments are setuptools'. With ``py_limited_api=True`` it is not linked to
    ``libtorch_python``, which is for one Python.
    """
    return _make_extension(name, sources, args, kwargs, "cpu", ())


def CUDAExtension(name: str, sources: list[str], *args: Any, **kwargs: Any) -> Extension:  # noqa: N802
    """Like ``CppExtension``, with a CUDA toolkit's headers and runtime; on a ROCm torch, ROCm's.

    ``-rdc=true`` among nvcc's flags causes a device link, with ``dlink_libraries``; ``dlink`` alone
    does not. Raises ToolkitMissing, an OSError, if there is no toolkit.
    """
    device_libraries = list(kwargs.pop("dlink_libraries", ()))
    linked = kwargs.pop("dlink", False) or device_libraries
    libraries = _ROCM_RUNTIME if is_rocm_pytorch() else _CUDA_RUNTIME
    extension = _make_extension(name, sources, args, kwargs, "cuda", libraries)
    if linked:
        torch = torch_sdk.find()
        flags = extension.extra_compile_args
        flags = dict(flags) if isinstance(flags, dict) else {"cxx": flags, "nvcc": list(flags)}
        flags["nvcc_dlink"] = [
            *flags.get("nvcc_dlink", ()),
            "-dlink",
            *(f"-L{path}" for path in extension.library_dirs),
            *(f"-l{library}" for library in device_libraries),
            *(["-dlto"] if torch is not None and torch.cuda is not None else []),
        ]
        extension.extra_compile_args = flags
    return extension


def SyclExtension(name: str, sources: list[str], *args: Any, **kwargs: Any) -> Extension:  # noqa: N802
    """Like ``CppExtension``, with a SYCL compiler's headers and runtime.

    Raises ToolkitMissing, an OSError, if there is no SYCL compiler.
    """
    return _make_extension(name, sources, args, kwargs, "xpu", ("c10_xpu", "sycl", "torch_xpu"))


def _make_extension(
    name: str,
    sources: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
    libraries: tuple[str, ...],
) -> Extension:
    from setuptools import Extension

    limited = kwargs.get("py_limited_api", False)
    # As in torch, SYCL's headers are looked up, but its libraries are left to the linker's path.
    searched = library_paths("cpu" if device == "xpu" else device)
    host = ("c10", "torch", "torch_cpu", *(() if limited else ("torch_python",)))
    given = {
        **kwargs,
        "include_dirs": [*kwargs.get("include_dirs", ()), *include_paths(device)],
        "library_dirs": [*kwargs.get("library_dirs", ()), *searched],
        "libraries": [*kwargs.get("libraries", ()), *host, *libraries],
        "language": "c++",
    }
    return Extension(name, sources, *args, **given)


class ExtensionBuilder(OpBuilder):
    """An extension as a builder of opkiln, with what a build_ext command, or its subclass, added to
    its compiler. Raises SpecError, ArchError."""

    def __init__(self, extension: Extension, compiler: Any, debug: bool | None) -> None:
        self._spec, self._archs, remarks = _spec(extension, compiler, debug)
        super().__init__(self._spec.name)
        self.remarks, self.backend = remarks, self._spec.backend

    def spec(self) -> model.OpSpec:
        """The extension as a declaration."""
        return self._spec

    def op(self) -> model.Op:
        asked = self._archs or ("all" if lacks_targets(self.backend) else "")
        return model.Op(self._spec, asked=asked)


def is_torchs(extension: Extension) -> bool:
    """Whether an extension needs torch's build: setuptools alone could not build it."""
    return (
        _backend(extension) != model.CPU
        or not _HOST_LIBRARIES.isdisjoint(extension.libraries)
        or isinstance(extension.extra_compile_args, dict)
        or len(_outside_torch(extension.include_dirs)) < len(extension.include_dirs)
    )


def _flags_of(compiler: Any, debug: bool | None) -> list[str]:
    """The flags that a command added to its compiler, without those that the plan adds itself."""
    import sysconfig

    usual = " ".join(
        str(sysconfig.get_config_var(name) or "")
        for name in ("CC", "CFLAGS", "OPT", "PY_CFLAGS", "CCSHARED", "BASECFLAGS")
    ).split()
    command = [str(word) for word in getattr(compiler, "compiler_so", ())[1:]]
    # The plan reads these variables itself.
    read = {*usual, *settings.cppflags, *settings.cxxflags}
    words = [word for word in command if word not in read or word in _MEANING]
    if "-DNDEBUG" not in command:
        words.insert(0, "-UNDEBUG")  # a Python, or a CFLAGS, with assertions
    macros = [_macro(*macro) for macro in getattr(compiler, "macros", ())]
    return [*words, *macros, *(["-g"] if debug else [])]


def _include_dirs_of(compiler: Any) -> list[str]:
    """The directories that a command added to its compiler, without Python's own."""
    import sysconfig

    python = [torch_sdk.python_include(), sysconfig.get_path("platinclude")]
    own = {os.path.realpath(path) for path in python}
    given = (path for path in compiler.include_dirs if os.path.realpath(path) not in own)
    return [path for path in given if _holds_anything(path)]


def _holds_anything(path: str) -> bool:
    """False for an empty directory, such as an environment's: its path would be in every key."""
    try:
        return bool(os.listdir(path))
    except OSError:
        return False  # it does not exist


def _macro(name: str, *value: str | None) -> str:
    """The flag for a macro as setuptools declares it. One without a value is undefined."""
    if not value:
        return f"-U{name}"
    return f"-D{name}" if value[0] is None else f"-D{name}={value[0]}"


def _spec(
    extension: Extension, compiler: Any, debug: bool | None
) -> tuple[model.OpSpec, str, list[str]]:
    """The declaration, the architectures that its flags ask for, and remarks on other flags."""
    name = extension.name.rpartition(".")[2]
    if not extension.sources:
        raise SpecError(f"extension {extension.name} has no sources")
    files = [os.path.abspath(os.fspath(source)) for source in extension.sources]
    backend = _backend(extension)
    given: Any = extension.extra_compile_args or []
    both = given if isinstance(given, dict) else {"cxx": given, "nvcc": given, "sycl": given}
    macros = [_macro(*macro) for macro in extension.define_macros]
    macros += [_macro(macro) for macro in extension.undef_macros]
    limited = bool(getattr(extension, "py_limited_api", False))
    if limited:
        torchs = sys.modules.get("torch.utils.cpp_extension")
        oldest = getattr(torchs, "min_supported_cpython", LIMITED_API)
        macros.append(f"-DPy_LIMITED_API={oldest}")
    device = both.get("sycl" if backend == model.XPU else "nvcc", ())
    libraries = [*compiler.libraries, *extension.libraries]
    objects = [os.path.abspath(path) for path in (*compiler.objects, *extension.extra_objects)]
    at_run_time = (*extension.runtime_library_dirs, *compiler.runtime_library_dirs)
    flags = translate(
        name,
        cxx=(*_flags_of(compiler, debug), *macros, *both.get("cxx", ())),
        # nvcc does not get the flags Python was built with: assertions in kernels stay on.
        device=("-UNDEBUG", *macros, *device) if backend != model.CPU else (),
        link=(
            *objects,
            *(f"-L{path}" for path in compiler.library_dirs),
            *(f"-L{path}" for path in _foreign(extension.library_dirs, "libcudart.so")),
            *(f"-Wl,-rpath,{path}" for path in at_run_time),
            *extension.extra_link_args,
        ),
        backend_is_cuda=backend == model.CUDA,
    )
    include_dirs = (*extension.include_dirs, *_include_dirs_of(compiler))
    spec = model.OpSpec(
        name=name,
        distribution=extension.name.partition(".")[0],
        **root_and_sources(files, os.getcwd()),
        include_dirs=tuple(_foreign(include_dirs, "cuda_runtime_api.h")),
        libraries=tuple(each for each in libraries if each not in _OWNED),
        # A limited module is for every Python, so it is not linked to a library for one Python.
        kind=model.LIBRARY if limited else model.PYTHON,
        abi=model.ABI_TORCH,
        backend=backend,
        # torch's CUDAExtension puts the libraries of a device link among its flags.
        device_libraries=tuple(
            flag[2:] for flag in both.get("nvcc_dlink", ()) if len(flag) > 2 and flag[:2] == "-l"
        ),
        declared_by=model.EXTENSION,
    )
    remarks = [f"{extension.name}: {remark}" for remark in flags.remarks]
    return flags.add_to(spec), flags.archs, remarks


def root_and_sources(files: Sequence[str], root: str) -> dict[str, Any]:
    """The root and the sources below it, for a declaration: this root if all files are below it."""
    if any(not file.startswith(os.path.join(root, "")) for file in files):
        root = os.path.dirname(files[0]) if len(files) == 1 else os.path.commonpath(files)
    return {"root": root, "sources": tuple(os.path.relpath(file, root) for file in files)}


def _backend(extension: Extension) -> str:
    endings = {os.path.splitext(source)[1] for source in extension.sources}
    if ".sycl" in endings or not _SYCL_LIBRARIES.isdisjoint(extension.libraries):
        return model.XPU
    # C++ that uses the CUDA runtime also needs its headers and libraries.
    if endings & {".cu", ".hip"} or not _CUDA_LIBRARIES.isdisjoint(extension.libraries):
        return model.ROCM if is_rocm_pytorch() else model.CUDA
    return model.CPU


def _outside_torch(directories: Iterable[str]) -> list[str]:
    torch = torch_sdk.locate()
    own = "" if torch is None else os.path.join(torch, "")
    found = [os.path.abspath(os.fspath(path)) for path in directories]
    return [path for path in found if not (own and path.startswith(own))]


def _foreign(directories: Iterable[str], mark: str) -> list[str]:
    """The directories that belong neither to torch nor to a CUDA toolkit. The plan adds those two
    itself."""
    return [
        path for path in _outside_torch(directories) if not os.path.exists(os.path.join(path, mark))
    ]
