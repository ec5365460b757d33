"""Stores that know this machine's compilers, as every store does after its first build.

A store gains this knowledge in about three seconds of CPU time, so it is gained once, kept in the
pool and copied. What the pool has is checked again by the product, as in every store.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from opkiln import settings
from opkiln.machine.toolchain import probing
from sample import pool

_ENVIRONMENT = dict(os.environ)  # before a test has changed anything
_GAIN = """
import glob
import importlib.util
import tempfile
import opkiln
from opkiln.base.model import CUDA, ROCM
from opkiln.building.observing import observer
from opkiln.store.layers import Store
from opkiln.machine.toolchain import choice, hipcc, host, nvcc
for name in ('one', 'two'):  # the programs of a compiler are remembered by the second build
    opkiln.load_inline(name, 'int f() { return 1; }', is_python_module=False, abi='none')
with tempfile.TemporaryDirectory() as stage:  # those two may be there, and the observer not
    observer.library(Store().memory, host.choose(Store().memory), stage)
for compiler, backend in ((nvcc, CUDA), (hipcc, ROCM)):
    if compiler.available():
        choice.choose(Store().memory, backend)
(torch,) = importlib.util.find_spec('torch').submodule_search_locations
for library in glob.glob(f'{torch}/lib/*.so'):  # half a gigabyte, for ops on the whole C++ API
    observer.digest(library, Store().memory)
"""


@functools.cache
def _toolchains() -> dict[str, bytes]:
    """What a store that knows the compilers has of them, and the observer: files, by name."""
    cache = pool.ROOT / f"known{probing.SCHEMA}"  # another clone may keep it in another form
    environment = {**_ENVIRONMENT, "OPKILN_CACHE_DIR": str(cache), "OPKILN_PROGRESS": "off"}
    subprocess.run([sys.executable, "-c", _GAIN], env=environment, check=True, timeout=300)
    files = (cache / settings.LAYOUT / "toolchains").iterdir()
    return {each.name: each.read_bytes() for each in files if each.is_file()}


def make_store(path: Path) -> Path:
    """A store, where nothing is yet, that knows the compilers and has nothing else."""
    path.mkdir(0o700)
    (path / settings.LAYOUT).mkdir(0o700)
    toolchains = path / settings.LAYOUT / "toolchains"
    toolchains.mkdir(0o700)
    for name, data in _toolchains().items():
        (toolchains / name).write_bytes(data)
    return path
