"""A machine with no CUDA toolkit but the one from PyPI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from sample import child, pool
from sample.levels import ARCHITECTURES, HERE
from sample.toolkit import compile_once

import opkiln
from opkiln.machine.toolchain import probing, toolkits

pytestmark = pytest.mark.slow

_EXTRA = ("cuda-toolkit[cccl,cudart,nvcc]==13.0.*", "cuda-pathfinder")

# Runs in the environment that has the wheels, with every other toolkit hidden.
_CHILD = """\
import json, sys
from opkiln.errors import ToolchainError
from opkiln.machine.toolchain import host, nvcc, toolkits
from opkiln.machine.toolchain import find

toolkits.DIRECTORIES = ()
memory = (sys.argv[1],)
chain = host.choose(memory)
try:
    compiler = find.choose(nvcc, memory, "13.0", chain)
except ToolchainError as error:
    print(json.dumps({"error": str(error), "kind": type(error).__name__}))
else:
    fields = compiler._asdict() | {"accepts": sorted(compiler.accepts)}
    origins = [each.origin for each in find.candidates(nvcc, memory, "13.0", chain)]
    print(json.dumps(fields | {"cxx": chain.cxx, "origins": origins}))
"""

# The same, with this environment's torch behind that one's packages.
_FUSED_ADAM = """\
import json, sys
import opkiln
from opkiln.machine.binary import elf, fatbin
from opkiln.loading import loader
from opkiln.machine.toolchain import toolkits

toolkits.DIRECTORIES = ()
sys.path.append(sys.argv[2])
opkiln.get_builder("fused_adam", backend="cuda", archs="8.0;9.0a").jit_load(verbose=False)
((loaded, _),) = loader.loaded_here().values()
path = loaded.artifact.path
print(json.dumps({"images": fatbin.images(path), "needed": elf.read(path).needed}))
"""
_TORCH = str(Path(torch.__file__).parents[1])

_KERNEL = """\
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cub/warp/warp_reduce.cuh>
__global__ void twice(__half* data) { data[threadIdx.x] = __hadd(data[threadIdx.x], data[0]); }
extern "C" int launch(void* data) {
  twice<<<1, 32>>>(static_cast<__half*>(data));
  return cudaGetLastError();
}
"""


class Environment:
    """A virtual environment with the wheels of the extra ``cuda``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.python = root / "bin" / "python"

    def make(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", self.root], check=True)
        self.install(*_EXTRA)

    def install(self, *names: str) -> None:
        command = [self.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *names]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"pip install {' '.join(names)}: {done.stderr.strip()[-500:]}")

    def ask(self, where: Path, memory: Path, code: str = _CHILD) -> dict[str, object]:
        """What code prints there, where PATH holds no nvcc. It writes below ``where``, and what
        the compilers say is remembered in ``memory``."""
        path = [each for each in os.environ["PATH"].split(":") if not Path(each, "nvcc").exists()]
        if shutil.which("g++", path=":".join(path)) is None:
            pytest.skip("g++ is only where nvcc is, too")
        environment = {k: v for k, v in os.environ.items() if k not in child.VARIABLES}
        environment |= {"PATH": ":".join(path), "HOME": str(where),
                        "PYTHONPATH": str(Path(opkiln.__file__).parents[1]),
                        "OPKILN_CACHE_DIR": str(where / "cache")}  # fmt: skip
        done = subprocess.run(
            [self.python, "-c", code, memory, _TORCH],
            check=False, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        return answer


@pytest.fixture
def memory(wheels: Environment) -> Path:
    """Kept in the pool, too: this nvcc answers for ten seconds. What is remembered of it is checked
    again, as in every store."""
    kept = wheels.root.with_name(f"{wheels.root.name}-known{probing.SCHEMA}")
    kept.mkdir(mode=0o700, exist_ok=True)
    return kept


@pytest.fixture(scope="module")
def wheels() -> Environment:
    """Half a gigabyte that is kept in the pool, and nobody changes."""
    if HERE not in ARCHITECTURES:
        pytest.skip(f"no wheels for {HERE}")
    kept = Environment(pool.ROOT / "cuda-wheels" / _EXTRA[0].partition("==")[2].replace("*", "x"))
    if not kept.root.exists():
        kept.root.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.root.parent) as new:
            made = Environment(Path(new, "venv"))
            made.make()
            made.root.rename(kept.root)
    return kept


def test_the_nvcc_of_the_wheels_compiles_and_links_with_the_static_runtime(
    wheels: Environment, memory: Path, tmp_path: Path
) -> None:
    found = wheels.ask(tmp_path, memory)
    assert "error" not in found, found
    assert found["version"] == "13.0"
    assert found["origins"] == ["PyPI"]
    assert str(found["home"]).startswith(str(wheels.root))
    located = subprocess.run(
        [wheels.python, "-c", toolkits._PATHFINDER], check=True, capture_output=True, text=True
    )
    assert os.path.realpath(located.stdout.strip()) == found["path"]

    source, compiled, library = (tmp_path / f"kernel.{end}" for end in ("cu", "o", "so"))
    source.write_text(_KERNEL)
    words = ["-ccbin", str(found["cxx"]), "-std=c++20", "-arch=sm_90", "-Xcompiler", "-fPIC",
             "-c", str(source), "-o", str(compiled)]  # fmt: skip
    assert compile_once(pool.ROOT / "nvcc", str(found["path"]), words) == 0
    (directory,) = found["library_dirs"]  # type: ignore[misc]
    subprocess.run(
        [str(found["cxx"]), "-shared", compiled, "-o", library, f"-L{directory}",
         "-lcudart_static", "-ldl", "-lrt", "-lpthread"],
        check=True,
    )  # fmt: skip
    needed = subprocess.run(["ldd", library], check=True, capture_output=True, text=True).stdout
    assert "cudart" not in needed


@pytest.mark.full  # the toolkit's own compile and link are in every run, above
def test_fused_adam_compiles_links_and_loads_with_the_toolkit_of_the_wheels(
    wheels: Environment, tmp_path: Path
) -> None:
    built = wheels.ask(tmp_path, tmp_path / "memory", _FUSED_ADAM)
    assert built["images"] == ["sm_80", "sm_90a"]
    assert not any("cuda" in name for name in built["needed"])  # type: ignore[attr-defined]


@pytest.mark.full  # an environment of its own
def test_wheels_of_two_releases_are_refused_with_the_command_that_mends_them(
    tmp_path: Path,
) -> None:
    mixed = Environment(tmp_path / "venv")
    mixed.make()
    # As `pip install nvidia-cuda-nvcc==13.0.*` alone would leave it: its parts are the newest.
    mixed.install("--no-deps", "nvidia-nvvm==13.4.*")
    found = mixed.ask(tmp_path, tmp_path / "memory")
    assert found.get("kind") == "ToolchainError", found
    assert "Unsupported .version" in str(found["error"])
    assert "pip install 'cuda-toolkit[nvcc,cccl,cudart]==13.0.*'" in str(found["error"])
