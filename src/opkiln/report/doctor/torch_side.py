"""torch: it is installed, new enough, can be loaded, and has one OpenMP runtime."""

from __future__ import annotations

import os
import sys

from opkiln.base.model import ABI_STABLE, STABLE_VERSION, OpSpec
from opkiln.building import loadtest
from opkiln.errors import LoadTestError
from opkiln.machine.devices import amd
from opkiln.machine.toolchain import torch_sdk
from opkiln.report.commands import pip_command
from opkiln.report.doctor.terms import Diagnosis, Facts, failed, join, passed, skipped, warned
from opkiln.run.process import capture, python
from opkiln.settings import child_environment, whole_environment


def version(here: Facts) -> Diagnosis:
    """torch is installed, and has the stable ABI that the bundled ops use."""
    torch = here.torch
    if torch is None:
        return failed(
            "torch is not installed: no op can be called", pip_command("install", "torch")
        )
    parts = [f"CUDA {torch.cuda}" if torch.cuda else "", f"HIP {torch.hip}" if torch.hip else ""]
    facts = ", ".join([torch.version, *filter(None, parts), torch.path])
    if not torch_sdk.has_stable_abi(torch):
        least = STABLE_VERSION
        return failed(
            f"{facts}: it lacks the stable ABI of torch {least}, so the references are used",
            pip_command("install", "--upgrade", f"torch>={least}"),
        )
    return passed(facts)


def devices(here: Facts) -> Diagnosis:
    """torch was built for the GPUs that are here."""
    torch = here.installed_torch
    nvidia, radeon = here.nvidia.gpus, amd.devices().gpus
    if not nvidia and not radeon:
        return skipped("there is no NVIDIA or AMD GPU")
    names = ", ".join([*(gpu.name for gpu in nvidia), *(gpu.name for gpu in radeon)])
    if (nvidia and torch.cuda) or (radeon and torch.hip):
        return passed(f"torch {torch.version} is built for {names}")
    # PyPI has torch for CUDA; torch for ROCm is in another index.
    command = pip_command("install", "--force-reinstall", "torch") if nvidia else ""
    return warned(f"torch {torch.version} has neither CUDA nor HIP: it cannot use {names}", command)


def libraries(here: Facts) -> Diagnosis:
    """torch's libraries can be loaded. A child tries it, without importing torch."""
    torch = here.installed_torch
    directory = os.path.join(torch.path, "lib")
    # The load test opens what an op on the stable ABI needs, and then the library given here.
    spec = OpSpec(name="torch", distribution="opkiln", root="/", sources=(), abi=ABI_STABLE)
    last = os.path.join(directory, "libtorch.so")
    try:
        loadtest.check(spec, torch, last, tmpdir=here.scratch)
    except LoadTestError as error:
        # Without a local part, the version may install another build, such as one for CPUs.
        exact = f"torch=={torch.version}"
        again = (
            pip_command("install", "--force-reinstall", "--no-deps", exact) if "+" in exact else ""
        )
        return failed(f"{directory}: {join(*error.why.splitlines())}", again)
    return passed(f"{directory}: libc10, libtorch_cpu and libtorch load")


def cxx_abi(here: Facts) -> Diagnosis:
    """The C++ ABI that ops on torch's full interface are compiled for."""
    torch = here.installed_torch
    if torch.cxx11_abi:
        return passed("C++11 (_GLIBCXX_USE_CXX11_ABI=1)")
    return warned(
        f"torch {torch.version} is built with _GLIBCXX_USE_CXX11_ABI=0: ops are compiled for that, "
        "and do not fit the other C++ libraries of this system",
        pip_command("install", "--upgrade", "torch"),
    )


# Two OpenMP runtimes

_FAMILIES = {"libgomp": "GNU", "libiomp5": "LLVM", "libomp": "LLVM"}
_MAPPED = """
import ctypes, os, sys
for path in sys.argv[1:]:
    ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
with open('/proc/self/maps') as maps:
    print('\\n'.join({line.split(None, 5)[5].strip() for line in maps if line.count('/')}))
sys.stdout.flush()
os._exit(0)
"""


def openmp(here: Facts) -> Diagnosis:
    """There is one OpenMP runtime in a process, not two that each start a thread per CPU."""
    torch = here.installed_torch
    preloaded = whole_environment().get("LD_PRELOAD", "")
    found, beside = _families(_mapped_files(torch.path, preloaded)), _families(_prefix_runtimes())
    together = {**found, **beside}
    if len(set(together.values())) < 2:
        return passed(", ".join(found) or "none is loaded with torch")
    what = ", ".join(f"{path} ({family})" for path, family in together.items())
    if len(set(found.values())) > 1:
        text = f"two runtimes are loaded, and each starts a thread per CPU: {what}"
        asked = _families(preloaded.replace(":", " ").split())
        return warned(text, "unset LD_PRELOAD" if asked else "")
    return warned(
        f"torch loads one, and another package of this environment may load a second: {what}",
        _removal_command(beside),
    )


def _families(paths: list[str]) -> dict[str, str]:
    """The OpenMP runtimes among some files, and their families."""
    stems = {path: os.path.basename(path).partition(".so")[0].partition("-")[0] for path in paths}
    return {path: _FAMILIES[stem] for path, stem in stems.items() if stem in _FAMILIES}


def _mapped_files(torch: str, preloaded: str) -> list[str]:
    """The files that a process maps when it loads torch's libraries."""
    names = ("libc10.so", "libtorch_cpu.so")
    libraries = [path for name in names if os.path.exists(path := os.path.join(torch, "lib", name))]
    environment = {**child_environment(), **({"LD_PRELOAD": preloaded} if preloaded else {})}
    argv = python("-c", _MAPPED, *libraries, isolated=True)
    answer = capture(argv, env=environment, timeout=60)
    # Resolved: conda makes libgomp a link to the other family's library.
    return sorted({os.path.realpath(path) for path in answer.output.split("\n") if path})


def _prefix_runtimes() -> list[str]:
    """Runtimes in the environment's own library directory, where conda and MKL put them."""
    directory = os.path.join(sys.prefix, "lib")
    names = ("libgomp.so.1", "libiomp5.so", "libomp.so")
    paths = (os.path.join(directory, name) for name in names)
    return sorted({os.path.realpath(path) for path in paths if os.path.exists(path)})


def _removal_command(beside: dict[str, str]) -> str:
    from importlib import metadata

    if not any(family == "LLVM" for family in beside.values()):
        return ""
    try:
        metadata.distribution("intel-openmp")
    except metadata.PackageNotFoundError:
        conda = os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
        return "conda install -y nomkl" if conda else ""
    return pip_command("uninstall", "-y", "intel-openmp")
