"""Where torch's and the toolkits' headers and libraries are, for setup scripts that ask.

The toolkit is the one that a build would use, which need not be the first on PATH.
"""

from __future__ import annotations

import os
import sys

from opkiln.compat.torch_errors import ToolkitMissing
from opkiln.errors import OpkilnError
from opkiln.model import CUDA, XPU
from opkiln.settings import settings, whole_environment
from opkiln.toolchain import torch_sdk
from opkiln.toolchain.rocm import is_rocm_pytorch


def include_paths(device_type: str = "cpu", torch_include_dirs: bool = True) -> list[str]:
    """Directories for ``#include``: torch's, and those of a device's toolkit.

    Raises ToolkitMissing, an OSError, where there is no such toolkit.
    """
    paths = []
    own = os.path.join(_torch(), "include")
    if torch_include_dirs:
        paths += [own, os.path.join(own, "torch", "csrc", "api", "include")]
    if device_type == "cuda" and is_rocm_pytorch():
        paths += [os.path.join(own, "THH"), os.path.join(rocm_home(), "include")]
    elif device_type == "cuda":
        named = [os.path.join(cuda_home(), "include"), whole_environment().get("CUDA_INC_PATH")]
        # The host compiler has this one at its own place in the order, where it must stay.
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

    Raises ToolkitMissing, an OSError, where there is no such toolkit.
    """
    paths = [os.path.join(_torch(), "lib")] if torch_include_dirs else []
    if device_type == "cuda" and is_rocm_pytorch():
        home = rocm_home()
        paths += [os.path.join(home, "lib"), os.path.join(home, "hip", "lib")]
    elif device_type == "cuda" and cross_target_platform == "windows":
        home = whole_environment().get("WINDOWS_CUDA_HOME", "")
        if not home:
            raise RuntimeError("WINDOWS_CUDA_HOME is not set, and names CUDA's Windows libraries")
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
            "torch's headers and libraries are nowhere",
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
    """The CUDA toolkit that a build here would use, for a torch that was built with CUDA.

    Where torch's own module is imported and names one, that: a script may have set it there.
    Raises ToolkitMissing for any other torch, too, as torch itself does: that is how packages find
    out that they are to be built without CUDA.
    """
    if set_there := getattr(sys.modules.get("torch.utils.cpp_extension"), "CUDA_HOME", None):
        return str(set_there)
    torch = torch_sdk.find()
    if torch is None or torch.cuda is None:
        version = "" if torch is None else f" {torch.version}"
        raise ToolkitMissing(
            "there is no CUDA toolkit for this torch",
            why=f"torch{version} was built without CUDA",
            hint="pip install torch    # a build with CUDA",
        )
    return cuda_toolkit()


def cuda_toolkit() -> str:
    """The CUDA toolkit that a build here would use, whatever torch is. Raises ToolkitMissing."""
    named = settings.cuda_home or settings.system_cuda_home or settings.cuda_path
    return str(named) if named else _home_of(CUDA, "CUDA", "CUDA_HOME")


def sycl_home() -> str:
    """The SYCL compiler's directory. Raises ToolkitMissing."""
    return _home_of(XPU, "SYCL", "OPKILN_SYCL_CXX")


def rocm_home() -> str:
    """The ROCm that a build here would use. Raises ToolkitMissing."""
    from opkiln.toolchain import rocm

    for home in rocm.homes():
        return home
    raise ToolkitMissing(
        "no ROCm is to be found", hint="export ROCM_HOME=/opt/rocm    # where it is installed"
    )


def _home_of(backend: str, name: str, variable: str) -> str:
    from opkiln.store.layers import Store
    from opkiln.toolchain import choice

    memory = Store().memory
    try:
        toolchain = choice.recall(memory, backend) or choice.choose(memory, backend)
    except OpkilnError as error:
        raise ToolkitMissing(
            f"no {name} toolkit can be used: {error.what}",
            why=error.why,
            hint=error.hint or f"set {variable}",
        ) from error
    assert toolchain.device is not None  # a toolchain for a backend has its compiler
    return toolchain.device.home
