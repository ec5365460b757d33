"""A CUDA toolkit without cuBLAS's headers, beside a torch whose wheels have them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from sample import child
from sample.package import rest

from opkiln.machine.toolchain import nvcc, torch_sdk

_DEVICE = """\
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
__global__ void nothing() {}
extern "C" int of_device() { return STAND_IN; }
"""
_HOST = '#include <cublas_v2.h>\nextern "C" int of_host() { return STAND_IN; }\n'

_CHILD = """
    import ctypes, json, sys
    import torch
    import opkiln
    from opkiln.errors import BuildError
    try:
        path = opkiln.load("uses_cublas", [sys.argv[1] + "/a.cu", sys.argv[1] + "/b.cpp"],
                           extra_cflags=["-g"], abi="torch-stable", is_python_module=False)
    except BuildError as error:
        print(json.dumps({"why": error.why, "hint": error.hint}))
    else:
        library = ctypes.CDLL(path)
        print(json.dumps({"path": path, "torch": torch.__file__, "argv": opkiln.__file__,
                          "values": [library.of_device(), library.of_host()]}))
"""


def toolkit_release() -> tuple[int, int]:
    """(major, minor) of the toolkit that serves here; skips where it has all headers."""
    if not nvcc.available():
        pytest.skip("no nvcc on this machine")
    from opkiln.base.model import CUDA
    from opkiln.machine.toolchain import choice
    from opkiln.store.layers import Store

    device = choice.choose(Store().memory, CUDA).device
    assert device is not None
    if any(os.path.exists(os.path.join(path, "cublas_v2.h")) for path in device.include_dirs):
        pytest.skip(f"the toolkit in {device.home} has cuBLAS's headers itself")
    return torch_sdk.release(device.version)


class Site:
    """A site directory with this torch and stand-ins for the headers of CUDA's wheels."""

    def __init__(self, where: Path, release: tuple[int, int]) -> None:
        self.where = where
        self.include = where / f"nvidia/cu{release[0]}/include"
        self.include.mkdir(parents=True)
        (where / "torch").symlink_to(Path(torch.__file__).parent)
        # The toolkit has this one: taking the wheel's would be an error.
        version = release[0] * 1000 + release[1] * 10
        (self.include / "cuda_runtime_api.h").write_text(
            f"#define CUDART_VERSION  {version}\n#error taken from the wheel\n"
        )
        self.put(1)

    def put(self, value: int) -> None:
        """Install cuBLAS's header, as pip does: a new file in the place of the old one."""
        fresh = self.include / "new"
        fresh.write_text(f"#define STAND_IN {value}\n")
        fresh.replace(self.include / "cublas_v2.h")
        rest()

    def load(self, sources: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            child.run(_CHILD, str(sources), path=[self.where], bare=False, forked=False,
                      env={"TORCH_CUDA_ARCH_LIST": "9.0"})
        )  # fmt: skip
        return found


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    where = tmp_path / "sources"
    where.mkdir()
    (where / "a.cu").write_text(_DEVICE)
    (where / "b.cpp").write_text(_HOST)
    rest()
    return where


@pytest.mark.full
def test_partial_toolkit_takes_library_headers_from_the_wheels_beside_torch(
    sources: Path, tmp_path: Path
) -> None:
    release = toolkit_release()
    first, second = Site(tmp_path / "one", release), Site(tmp_path / "elsewhere/two", release)
    before = first.load(sources)
    assert before["values"] == [1, 1]
    # Another environment: the same plan, and the same bytes.
    other = second.load(sources)
    assert Path(other["path"]).parts[-3] == Path(before["path"]).parts[-3]
    assert Path(other["path"]).read_bytes() == Path(before["path"]).read_bytes()
    # A wheel that is upgraded, and one that is removed, are noticed.
    first.put(2)
    assert first.load(sources)["values"] == [2, 2]
    (first.include / "cublas_v2.h").unlink()
    gone = first.load(sources)
    assert "cublas_v2.h: No such file" in gone["why"]
    assert gone["hint"].startswith("pip install 'opkiln[cuda]'")
    assert "cublas_v2.h" in gone["hint"]


@pytest.mark.slow
def test_library_headers_of_another_cuda_release_are_not_taken(
    sources: Path, tmp_path: Path
) -> None:
    major, minor = toolkit_release()
    refused = Site(tmp_path / "one", (major, minor + 1)).load(sources)
    assert "cublas_v2.h: No such file" in refused["why"]
    assert refused["hint"].startswith("pip install 'opkiln[cuda]'")
    assert f"CUDA {major}.{minor + 1}" in refused["hint"]
    assert f"CUDA {major}.{minor}" in refused["hint"]
