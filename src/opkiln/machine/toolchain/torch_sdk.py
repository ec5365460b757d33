"""torch as a build sees it: paths, version and ABI, read from files without importing it."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import lru_cache

from opkiln.base.build_model import TorchSDK
from opkiln.base.digest import read_file
from opkiln.base.model import ABI_STABLE, ABI_TORCH, CUDA, ROCM, STABLE_TAG, OpSpec
from opkiln.errors import BuildError, SettingError
from opkiln.machine import facts
from opkiln.settings import settings

STABLE_DEFINE = "-DTORCH_TARGET_VERSION=0x020a000000000000"


def locate() -> str | None:
    """The directory of the torch package that this interpreter would import, or None. If it would
    import none, it is the directory in ``OPKILN_TORCH_DIR``: an isolated build can use such a torch
    without importing it."""
    loaded = sys.modules.get("torch")
    if loaded is not None and getattr(loaded, "__file__", None):
        return os.path.dirname(str(loaded.__file__))
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        return os.path.dirname(spec.origin)
    named: str | None = settings.torch_dir
    if named is not None and not os.path.isfile(os.path.join(named, "version.py")):
        raise SettingError(
            f"OPKILN_TORCH_DIR={named!r}: there is no torch",
            why="it must be the directory that contains torch's version.py",
            hint="unset OPKILN_TORCH_DIR",
        )
    return None if named is None else os.path.abspath(named)


def find() -> TorchSDK | None:
    """The torch that is installed now, or None. Raises OSError if it cannot be read."""
    path = locate()
    if path is None:
        return None
    for each in read_from(path):
        facts.note_file(each)
    state = os.stat(os.path.join(path, "version.py"))
    return _read(path, (state.st_mtime_ns, state.st_ctime_ns))


def is_rocm_pytorch() -> bool:
    """Whether the torch that is installed was built for ROCm. Imports nothing."""
    torch = find()
    return torch is not None and torch.hip is not None


def read_from(path: str) -> list[str]:
    """The files that describe the torch at ``path``."""
    config = os.path.join(path, "share", "cmake", "Torch", "TorchConfig.cmake")
    version = os.path.join(path, "version.py")
    return [version, config] if os.path.exists(config) else [version]


@lru_cache(maxsize=4)
def _read(path: str, stamp: tuple[int, int]) -> TorchSDK:  # noqa: ARG001 (keys the cache)
    text = read_file(os.path.join(path, "version.py"))
    assigned = _assignments(text.decode("utf-8", "replace"))
    # Wheels since 2.7 are all built with the C++11 ABI; a build from source may differ.
    cxx11 = True
    for config in read_from(path)[1:]:
        with open(config, encoding="utf-8", errors="replace") as file:
            cxx11 = "_GLIBCXX_USE_CXX11_ABI=0" not in file.read()
    return TorchSDK(
        path=path,
        version=assigned.get("__version__") or "unknown",
        identity=hashlib.sha256(text).hexdigest()[:16],
        cuda=assigned.get("cuda"),
        hip=assigned.get("hip"),
        cxx11_abi=cxx11,
    )


def _assignments(module: str) -> dict[str, str | None]:
    """``name = 'value'`` and ``name: Optional[str] = None`` lines of torch's version.py."""
    assigned: dict[str, str | None] = {}
    for line in module.splitlines():
        name, equals, value = line.partition(" = ")
        if equals and not line.startswith((" ", "#")):
            value = value.strip()
            text = value[1:-1] if value[:1] in ("'", '"') else None
            assigned[name.partition(":")[0].strip()] = text
    return assigned


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version of torch, CUDA or ROCm: (2, 13) of ``2.13.0+cpu``.

    (0, 0) if the text is not a version. This is the only parser of such versions. A cache hit uses
    it and must not import ``packaging``, and vendors' versions (``6.2.41133-dd7f95766``) are not
    valid for ``packaging``. Use ``packaging`` for versions of packages.
    """
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return 0, 0


def has_stable_abi(sdk: TorchSDK) -> bool:
    """Whether this torch has the stable ABI that opkiln builds for."""
    return release(sdk.version) >= (2, 10)


def full_abi_tag(sdk: TorchSDK) -> str:
    """The tag of a binary that uses torch's C++ and Python's C interfaces directly."""
    abi = "cxx11" if sdk.cxx11_abi else "precxx11"
    return f"torch-{sdk.version}-{sdk.identity}-{abi}-{python_tag()}"


def python_tag() -> str:
    """This interpreter's ABI with its patch level, because no depfile lists its headers."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    return f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}-{version}"


def abi_tag(spec: OpSpec, sdk: TorchSDK | None) -> str:
    """The ABI tag of this op's binary when built with this torch. Raises BuildError."""
    python = python_tag()
    if spec.abi == ABI_STABLE:
        tag = STABLE_TAG
        runtime = None if sdk is None else {CUDA: sdk.cuda, ROCM: sdk.hip}.get(spec.backend)
        if runtime is not None:
            tag = f"{tag}-{spec.backend}{runtime.partition('.')[0]}"
        return f"{tag}-{python}" if spec.kind == "python" else tag
    if spec.abi == ABI_TORCH:
        if sdk is None:
            raise BuildError(
                f"op {spec.title} needs torch",
                why="torch is not installed",
                hint="pip install torch",
            )
        return full_abi_tag(sdk)
    return python if spec.kind == "python" else "none"


def python_include() -> str:
    """The directory of Python.h. sysconfig is slow to import, so the usual place is tried first."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}{getattr(sys, 'abiflags', '')}"
    usual = os.path.join(sys.base_prefix, "include", version)
    if os.path.exists(os.path.join(usual, "Python.h")):
        return usual
    import sysconfig

    return sysconfig.get_path("include")
