"""Finds libsycl, and tells whether it will find a device. Starts no process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from glob import glob

from opkiln.machine import facts, packages
from opkiln.machine.toolchain import find
from opkiln.machine.uname import read_text
from opkiln.settings import settings

PACKAGE = "intel-sycl-rt"
PROGRAMS = ("icpx", "dpcpp")
ONEAPI = "/opt/intel/oneapi/compiler"
INSTALL = f"pip install -U '{PACKAGE}>=2026' intel-opencl-rt"

_NAME = re.compile(r"libsycl\.so\.(\d+)\Z")
# The runtime compiler of libsycl 8 (2025) needs device libraries that its wheel does not have.
_OLDEST = 9
_DRIVER = "libintelocl.so"  # OpenCL's CPU driver, from intel-opencl-rt
_VENDORS = "/etc/OpenCL/vendors"
_GPUS = "sys/class/drm"
_NODES = "dev/dri"


def is_library(path: str) -> bool:
    """Whether this is the path of a libsycl with a version number."""
    return _NAME.match(os.path.basename(path)) is not None


def list_libraries(home: str) -> Iterator[str]:
    """Every ``lib/libsycl.so.N`` of an installation, the highest N first."""
    directory = os.path.join(home, "lib")
    matches = [match for name in facts.list_directory(directory) if (match := _NAME.match(name))]
    for match in sorted(matches, key=lambda match: int(match[1]), reverse=True):
        yield os.path.join(directory, match[0])


def find_installed() -> str | None:
    """The libsycl that pip or conda installed for this interpreter or in the user's site."""
    beside = next(list_libraries(sys.prefix), None)
    if beside is not None:
        return beside
    # It is not in the usual place of a virtual environment or conda, but may be in that of --user,
    # --target or the system's interpreter.
    if not packages.may_be_installed(PACKAGE):
        return None
    from importlib.metadata import PackageNotFoundError, files

    try:
        listed = files(PACKAGE) or []
    except PackageNotFoundError:
        return None
    facts.note_incomplete()  # a newer one would come with other files
    paths = (os.path.realpath(each.locate()) for each in listed if is_library(each.name))
    return next(paths, None)


def why_unfit(library: str) -> str:
    """Why this runtime cannot compile kernels, judging by its files; empty if it can."""
    name = os.path.basename(library)
    if int(name.rpartition(".")[2]) < _OLDEST:
        return f"{name} cannot compile kernels by itself: pip install -U '{PACKAGE}>=2026'"
    home = os.path.dirname(os.path.dirname(library))
    for part in ("include/sycl/sycl.hpp", "lib/libsycl-jit.so"):
        if not facts.exists(os.path.join(home, part)):
            return f"{os.path.join(home, part)} is missing"
    return ""


def programs() -> Iterator[tuple[str, str]]:
    """(path, origin) of every possible compiler; the bare name of one that is not on PATH."""
    for name in PROGRAMS:
        yield find.find_program(name) or name, "PATH"
    if root := settings.cmplr_root:
        for name in PROGRAMS:
            yield os.path.join(os.path.abspath(root), "bin", name), "CMPLR_ROOT"
    releases = [name for name in facts.list_directory(ONEAPI) if name[:1].isdigit()]
    releases.sort(key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
    for release in releases:
        yield os.path.join(ONEAPI, release, "bin", "icpx"), ONEAPI


def locate(soname: str) -> str | None:
    """The path of the libsycl with this name (``libsycl.so.9``): of a compiler or a pip package. An
    op's library contains only the soname, so it does not depend on where the runtime is installed.
    Therefore the runtime must be loaded before the op."""
    named = settings.sycl_cxx
    places = ([named] if named else []) + [path for path, _ in programs()]
    compilers = filter(None, map(find.find_program, places))
    paths = [os.path.join(home_of(path), "lib", soname) for path in compilers]
    beside = find_installed()
    if beside is not None:
        paths.append(os.path.join(os.path.dirname(beside), soname))
    return next((path for path in paths if os.path.exists(path)), None)


def home_of(program: str) -> str:
    """The installation that a compiler belongs to."""
    return os.path.dirname(os.path.dirname(os.path.realpath(program)))


def why_no_device(icd_filenames: str | None) -> tuple[str, str] | None:
    """(why SYCL will find no device, a command that may help); None if it may find one.

    ``icd_filenames`` is the value of ``OCL_ICD_FILENAMES``. SYCL reaches a CPU through OpenCL,
    whose loader knows its drivers from this variable and from the system's directory of drivers.
    The one that pip installs is in neither. opkiln does not set the variable: every child of the
    process would inherit it, and changing the environment races with whichever thread reads it.
    """
    usable, shut = intel_gpus()
    if usable:
        return None
    if icd_filenames:
        names = [name for name in icd_filenames.split(os.pathsep) if name]
        # The dynamic linker finds a name without a slash; it cannot be checked here.
        if any("/" not in name or os.path.exists(name) for name in names):
            return None
        why = f"OCL_ICD_FILENAMES={icd_filenames!r} does not name an existing file"
    elif any(map(os.path.exists, _registered_drivers())):
        return None
    else:
        why = "OpenCL has no driver for a CPU"
    gpu = f"the Intel GPU ({shut[0]}) is not open to this user" if shut else "there is no Intel GPU"
    return f"{gpu}, and {why}", _driver_command()


def _driver_command() -> str:
    library = find_installed()
    if library is None:
        return INSTALL
    driver = os.path.join(os.path.dirname(library), _DRIVER)
    if os.path.exists(driver):
        return f"export OCL_ICD_FILENAMES={driver}"
    return "pip install intel-opencl-rt"


def _registered_drivers() -> Iterator[str]:
    """The CPU drivers that OpenCL's loader would find by itself."""
    for path in sorted(glob(os.path.join(_VENDORS, "*.icd"))):
        driver = read_text(path).partition("\n")[0].strip()
        if os.path.basename(driver).startswith(_DRIVER):
            yield driver


def intel_gpus(root: str = "/") -> tuple[list[str], list[str]]:
    """(the Intel GPUs that this process can open, those that it cannot), by their nodes in
    ``/dev/dri``. Its user may not be in their group, or its container may lack the node."""
    usable: list[str] = []
    closed: list[str] = []
    for path in sorted(glob(os.path.join(root, _GPUS, "renderD*"))):
        if read_text(os.path.join(path, "device", "vendor")).strip() == "0x8086":
            node = os.path.join(root, _NODES, os.path.basename(path))
            may_open = os.access(node, os.R_OK | os.W_OK)
            (usable if may_open else closed).append(os.path.basename(path))
    return usable, closed
