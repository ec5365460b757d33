"""The self-check: a tiny op per backend, compiled, loaded and called, in a child process.

A crash there is a finding and not the end of the doctor. The store is one that is thrown away,
everything else is as the user's own programs have it.
"""

from __future__ import annotations

import json
import os
from typing import Any

from opkiln import process
from opkiln.devices import amd, nvidia
from opkiln.errors import StoreError
from opkiln.model import CUDA, ROCM, XPU, DeviceCompiler
from opkiln.report.doctor import child
from opkiln.report.doctor.finding import Outcome, copyable, failed, joined, passed, skipped
from opkiln.report.doctor.here import Here, of_this_python
from opkiln.report.layout import duration
from opkiln.settings import settings, table, whole_environment
from opkiln.store import publish
from opkiln.toolchain import hipcc, libsycl, nvcc, torch_sdk
from opkiln.toolchain import sycl as sycl_compilers

_CHILD = """
from opkiln.report.doctor.selfcheck_child import main
sys.exit(main(*sys.argv[1:]))
"""
_LONGEST = 600.0  # seconds
# Settings that put words of the user's on command lines. The op itself compiles without any.
_FLAGS = ("cppflags", "cxxflags", "cudaflags", "ldflags")
_OF_FILES = ("command: ", "log: ")  # lines of an error


def cpu(here: Here) -> Outcome:
    """C++ without torch."""
    if here.compiler is None:
        return skipped("there is no compiler")
    return _tried("cpu", {}, calls=True)


def torch(here: Here) -> Outcome:
    """C++ on torch's stable ABI, called with a tensor."""
    if here.compiler is None or here.torch is None:
        return skipped("there is no compiler" if here.torch else "torch is not installed")
    if not torch_sdk.has_stable_abi(here.torch):
        return skipped(f"torch {here.torch.version} lacks the stable ABI: see torch")
    return _tried("torch", {}, calls=True)


def cuda(here: Here) -> Outcome:
    """A kernel by nvcc; called where there is a GPU."""
    if not nvcc.available() or not isinstance(here.cuda, DeviceCompiler):
        return skipped("no CUDA toolkit can be used")
    visible, _ = nvidia.visible(here.nvidia)
    # For no more than it takes: a user's own list may name every architecture there is.
    archs = "native" if here.nvidia.gpus else here.cuda.archs[-1]
    return _tried(CUDA, {"OPKILN_CUDA_ARCH_LIST": archs}, calls=bool(visible))


def rocm(here: Here) -> Outcome:
    """The same kernel by hipcc; called where there is an AMD GPU."""
    if not hipcc.available() or here.torch is None:
        return skipped("there is no hipcc" if here.torch else "torch, which has hipify, is missing")
    device = here.device_compiler(ROCM)
    if not isinstance(device, DeviceCompiler):
        return skipped("no hipcc can be used: see rocm")
    devices = amd.devices()
    archs = "native" if devices.gpus or not device.archs else device.archs[-1]
    return _tried(ROCM, {"OPKILN_ROCM_ARCH_LIST": archs}, calls=bool(amd.visible(devices)))


def xpu(here: Here) -> Outcome:
    """A SYCL kernel; called where there is a device."""
    if not sycl_compilers.available():
        return skipped("there is no SYCL compiler")
    if isinstance(here.device_compiler(XPU), Exception):
        return skipped("no SYCL compiler can be used: see sycl")
    if libsycl.no_device(settings.ocl_icd_filenames):
        return skipped("there is no device to load it for: see sycl device")
    return _tried(XPU, {}, calls=True)


def _tried(what: str, variables: dict[str, str], *, calls: bool) -> Outcome:
    try:
        work = publish.make_scratch("doctor")
    except StoreError as error:
        return skipped(f"{error.what}: see tmpdir")
    try:
        return _in(work, what, variables, calls=calls)
    finally:
        publish.remove(work)
        process.release_scratch(work)


def _in(work: str, what: str, variables: dict[str, str], *, calls: bool) -> Outcome:
    result = os.path.join(work, "result.json")
    environment = {
        **whole_environment(),
        "OPKILN_CACHE_DIR": os.path.join(work, "store"),
        "OPKILN_STORE_LAYERS": "",
        "OPKILN_MODE": "auto",
        "OPKILN_PROGRESS": "off",
        **variables,
    }
    how = "call" if calls else "load"
    done = process.run(child.argv(_CHILD, what, how, result), env=environment, timeout=_LONGEST)
    found: dict[str, Any] = {}
    if os.path.exists(result):
        with open(result) as file:
            found = json.load(file)
    if "answer" in found:
        rest = "loaded and called" if calls else "loaded, with no GPU to call it on"
        return passed(f"compiled, {rest}, in {duration(found['seconds'])}")
    flags = _unset_flags()
    if "what" in found:
        # The log is gone with the store, and the command is of files that are.
        why = [line for line in found["why"].splitlines() if not line.startswith(_OF_FILES)]
        told = of_this_python(copyable(found["hint"]))
        command = "" if "opkiln_doctor" in told else told
        if found["by_flags"] and flags:
            command = flags
        return failed(joined(found["what"], *why[:4]), command)
    step = f" while it would {found.get('step', 'start')}" if done.returncode < 0 else ""
    last = done.output.strip().splitlines()[-1:]
    return failed(joined(f"the child {child.ended(done.returncode)}{step}", *last), flags)


def _unset_flags() -> str:
    """The command that takes the user's flags off command lines; empty where there are none."""
    environment = whole_environment()
    fields = (setting for setting in table() if setting.field in _FLAGS)
    names = [name for each in fields for name in (each.variable, *each.aliases)]
    given = [name for name in names if environment.get(name)]
    return f"unset {' '.join(given)}" if given else ""
