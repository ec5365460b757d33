"""The toolkit that builds use, and the headers and libraries of that toolkit and of torch.

Setup scripts call these functions, and read or assign ``CUDA_HOME``. The answer is always the
toolkit that the plan of a build uses. It need not be the first on PATH. A program that assigns
``CUDA_HOME`` chooses the toolkit for both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from opkiln.base.model import CUDA, XPU
from opkiln.errors import OpkilnError, ToolchainError
from opkiln.machine.toolchain import find, torch_sdk
from opkiln.machine.toolchain.torch_sdk import is_rocm_pytorch
from opkiln.settings import override, settings, whole_environment

_TORCHS = "torch.utils.cpp_extension"


class ToolkitMissing(OpkilnError, OSError):
    """No toolkit was found. An OSError, as torch raises one.

    Install one, or name it with ``OPKILN_CUDA_HOME``; `opkiln doctor` lists where it looked.
    """

    exit_code = 3


def include_paths(device_type: str = "cpu", torch_include_dirs: bool = True) -> list[str]:
    """Directories for ``#include``: torch's, and those of a device's toolkit.

    Raises ToolkitMissing, an OSError, if there is no such toolkit.
    """
    paths = []
    own = os.path.join(_torch(), "include")
    if torch_include_dirs:
        paths += [own, os.path.join(own, "torch", "csrc", "api", "include")]
    if device_type == "cuda" and is_rocm_pytorch():
        paths += [os.path.join(own, "THH"), os.path.join(rocm_home(), "include")]
    elif device_type == "cuda":
        named = [os.path.join(cuda_home(), "include"), whole_environment().get("CUDA_INC_PATH")]
        # The host compiler searches this one by itself, and the order must stay as it is.
        paths += [path for path in named if path and path != "/usr/include"]
        paths += [os.path.join(home, "include") for home in _cudnn()]
    elif device_type == "xpu":
        home = sycl_home()
        paths += [os.path.join(home, "include"), os.path.join(home, "include", "sycl")]
    return paths


def library_paths(
    device_type: str = "cpu",
    torch_include_dirs: bool = True,
    cross_target_platform: str | None = None,
) -> list[str]:
    """Directories for the linker: torch's, and those of a device's toolkit.

    Raises ToolkitMissing, an OSError, if there is no such toolkit.
    """
    paths = [os.path.join(_torch(), "lib")] if torch_include_dirs else []
    if device_type == "cuda" and is_rocm_pytorch():
        home = rocm_home()
        paths += [os.path.join(home, "lib"), os.path.join(home, "hip", "lib")]
    elif device_type == "cuda" and cross_target_platform == "windows":
        home = whole_environment().get("WINDOWS_CUDA_HOME", "")
        if not home:
            raise RuntimeError("WINDOWS_CUDA_HOME, CUDA's libraries for Windows, is not set")
        paths.append(os.path.join(home, "lib", "x64"))
    elif device_type == "cuda":
        name = _library_directory(cuda_home())
        paths += [os.path.join(home, name) for home in (cuda_home(), *_cudnn())]
    elif device_type == "xpu":
        home = sycl_home()
        paths.append(os.path.join(home, _library_directory(home)))
    return paths


def _torch() -> str:
    found = torch_sdk.locate()
    if found is None:
        raise ToolkitMissing(
            "there are no torch headers and libraries",
            why="torch is not installed",
            hint="pip install torch",
        )
    return found


def _library_directory(home: str) -> str:
    """``lib64``, or ``lib`` in a toolkit that has only that."""
    only = os.path.exists(os.path.join(home, "lib"))
    return "lib" if only and not os.path.exists(os.path.join(home, "lib64")) else "lib64"


def _cudnn() -> list[str]:
    given = whole_environment()
    home = given.get("CUDNN_HOME") or given.get("CUDNN_PATH")
    return [home] if home else []


def cuda_home() -> str:
    """The CUDA toolkit that a build here uses.

    Raises ToolkitMissing if there is none. As in torch, it also raises it for a torch that was
    built without CUDA, unless the program has assigned ``CUDA_HOME``. Packages use this to find out
    that they should be built without CUDA.
    """
    torch = torch_sdk.find()
    if assigned_home() is None and (torch is None or torch.cuda is None):
        version = "" if torch is None else f" {torch.version}"
        raise ToolkitMissing(
            "there is no CUDA toolkit for this torch",
            why=f"torch{version} was built without CUDA",
            hint="pip install torch    # a build with CUDA",
        )
    return cuda_toolkit()


def cuda_home_or(otherwise: str | None) -> str | None:
    """``cuda_home()``, or ``otherwise`` if there is no toolkit."""
    try:
        return cuda_home()
    except ToolkitMissing:
        return otherwise


def cuda_toolkit() -> str:
    """The CUDA toolkit that a build here uses, for any torch.

    If none can be used, it is the one that a variable names; the build then reports what is wrong
    with it. Raises ToolkitMissing if no variable names one.
    """
    # A toolkit from either of these is used or refused, but never replaced by another one.
    chosen = assigned_home() or settings.cuda_home
    if chosen:
        return str(chosen)
    try:
        return _home_of(CUDA, "CUDA", "CUDA_HOME")
    except ToolkitMissing:
        named = settings.system_cuda_home or settings.cuda_path
        if named:
            return str(named)
        raise


def assigned_home() -> str | None:
    """The toolkit that the program has assigned to ``CUDA_HOME``, here or in torch's module."""
    # Read from their dictionaries: reading an attribute of torch's module would execute it.
    here = vars(sys.modules["opkiln.compat.torch"]).get("CUDA_HOME")
    if here:
        return str(here)
    theirs = sys.modules.get(_TORCHS)
    if theirs is None:
        return None
    there = object.__getattribute__(theirs, "__dict__").get("CUDA_HOME")
    return str(there) if there and there != _torchs_default() else None


def _torchs_default() -> str | None:
    """The value that torch's module gives ``CUDA_HOME`` at its import."""
    torch = torch_sdk.find()
    if torch is None or torch.cuda is None:
        return None
    named = settings.system_cuda_home or settings.cuda_path
    if named:
        return str(named)
    nvcc = find.find_program("nvcc")
    return os.path.dirname(os.path.dirname(nvcc)) if nvcc else "/usr/local/cuda"


@contextmanager
def assigned_toolkit() -> Iterator[None]:
    """Build with the toolkit that the program assigned to ``CUDA_HOME``, if it did.

    It is used or refused, but never replaced by another toolkit.
    """
    home = assigned_home()
    if home is None:
        yield
        return
    try:
        with override(cuda_home=home):
            yield
    except ToolchainError as error:
        name_the_assignment(error)
        raise


def name_the_assignment(error: OpkilnError) -> None:
    """Replace ``call`` with ``CUDA_HOME`` in an error about an assigned toolkit."""
    error.what = error.what.replace("call=", "CUDA_HOME=", 1)
    error.why = error.why.replace("call:", "CUDA_HOME:").replace("(call)", "(CUDA_HOME)")
    if error.hint.startswith("unset call"):
        rest = error.hint.removeprefix("unset call")
        error.hint = f"do not assign {_TORCHS}.CUDA_HOME{rest}"


def sycl_home() -> str:
    """The SYCL compiler's directory. Raises ToolkitMissing."""
    return _home_of(XPU, "SYCL", "OPKILN_SYCL_CXX")


def rocm_home() -> str:
    """The ROCm that a build here would use. Raises ToolkitMissing."""
    from opkiln.machine.toolchain import hipcc

    for home in hipcc.rocm_homes():
        return home
    raise ToolkitMissing(
        "no ROCm was found", hint="export ROCM_HOME=/opt/rocm    # where it is installed"
    )


def _home_of(backend: str, name: str, variable: str) -> str:
    from opkiln.machine.toolchain import choice
    from opkiln.store.layers import Store

    memory = Store().memory
    try:
        with override(cuda="nvcc"):  # a toolkit has one
            toolchain = choice.recall(memory, backend) or choice.choose(memory, backend)
    except OpkilnError as error:
        raise ToolkitMissing(
            f"no {name} toolkit can be used: {error.what}",
            why=error.why,
            hint=error.hint or f"set {variable}",
        ) from error
    assert toolchain.device is not None  # the toolchain of a device backend has a device compiler
    return toolchain.device.home
