"""NVRTC: the library that compiles device code, from torch's own wheels or from a toolkit.

It serves sources that are written with ``opkiln/op.h``: ``machine/nvrtc`` divides them, the host
compiler takes the one half and NVRTC the other. Nothing else of a CUDA toolkit is needed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from opkiln.base.build_model import NVRTC, DeviceCompiler, Toolchain
from opkiln.base.digest import key
from opkiln.base.lazy import Record
from opkiln.base.model import PACKAGE
from opkiln.errors import BuildTimeout, ToolchainError
from opkiln.machine import facts
from opkiln.machine.toolchain import cuda_version, find, probing, toolkits
from opkiln.machine.toolchain.find import Compiler, Search
from opkiln.settings import settings

PROGRAM = "machine/nvrtc/program.py"  # below opkiln's package
_LIBRARY = re.compile(r"libnvrtc\.so\.(\d+)\Z")
_BUILTINS = re.compile(r"libnvrtc-builtins\.so\.(\d+)\.(\d+)\Z")
_HEADER = "vector_types.h"
_PIP = "pip install nvidia-cuda-nvrtc nvidia-cuda-runtime"


class NvrtcPlace(Record):
    """A directory that has libnvrtc."""

    library: str
    builtins: str  # empty if it is missing
    home: str  # of the libraries and the headers: the anchor "toolkit"
    include_dirs: tuple[str, ...]
    origin: str  # PyPI, conda, or how the toolkit was found


def available() -> bool:
    """Whether any NVRTC is found. Starts no process."""
    return bool(find_nvrtc())


def covered_prefixes(device: DeviceCompiler) -> tuple[str, ...]:
    """Prefixes of paths that the driver reads and that are not facts: those of the driver and the
    libraries, which are in the compiler's identity, and of Python, which does not matter."""
    standard = os.path.dirname(os.path.abspath(os.__file__))
    programs = (device.path, os.path.realpath(device.path))
    directories = {
        *map(os.path.dirname, (*programs, *device.libraries)),
        *(standard, os.path.realpath(standard)),
        *(os.path.join(PACKAGE, part) for part in ("machine/nvrtc", "__pycache__")),
    }
    files = {os.path.join(PACKAGE, "__init__."), os.path.join(sys.prefix, "pyvenv.cfg")}
    files.add(os.path.join(os.path.dirname(os.path.realpath(standard)), "libpython"))
    # Python looks for its library as a zip file, in every directory above its program.
    archive = f"lib/python{sys.version_info[0]}{sys.version_info[1]}.zip"
    for path in (*programs, standard):
        while path != (path := os.path.dirname(path)):
            files.add(os.path.join(path, archive))
    return tuple(sorted({*files, *(each.rstrip("/") + "/" for each in directories)}))


# Where it may be


def find_nvrtc() -> list[NvrtcPlace]:
    """Every libnvrtc, in order of preference: torch's first, each once."""
    found: dict[str, NvrtcPlace] = {}
    for directory, home, include, origin in _list_layouts():
        place = _find_place(directory, home, include, origin)
        if place is not None:
            found.setdefault(os.path.realpath(place.library), place)
    return list(found.values())


def _list_layouts() -> Iterator[tuple[str, str, str, str]]:
    """(directory of the libraries, home, directory of the headers, origin)."""
    if not settings.cuda_home:
        for wheels in toolkits.wheel_directories():
            for home in toolkits.shared_wheels(wheels):
                yield os.path.join(home, "lib"), home, os.path.join(home, "include"), "PyPI"
            split = os.path.join(wheels, "cuda_nvrtc", "lib")  # the wheels of CUDA 12
            yield split, wheels, os.path.join(wheels, "cuda_runtime", "include"), "PyPI"
    for place in toolkits.places():
        home = os.path.dirname(os.path.dirname(place.nvcc))
        for part in ("lib64", "lib"):
            yield os.path.join(home, part), home, os.path.join(home, "include"), place.origin


def _find_place(directory: str, home: str, include: str, origin: str) -> NvrtcPlace | None:
    names = facts.list_directory(directory)
    libraries = [(int(found[1]), name) for name in names if (found := _LIBRARY.match(name))]
    if not libraries:
        return None
    major, library = max(libraries)
    builtins = [
        (int(found[2]), name)
        for name in names
        if (found := _BUILTINS.match(name)) and int(found[1]) == major
    ]
    there = os.path.join(directory, max(builtins)[1]) if builtins else ""
    headers: tuple[str, ...] = ()
    if os.path.isfile(os.path.join(include, _HEADER)):
        headers = (include, *filter(os.path.isdir, [os.path.join(include, "cccl")]))
    return NvrtcPlace(os.path.join(directory, library), there, home, headers, origin)


# The choice


def search(
    memory: tuple[str, ...], wanted: str | None, _host: Toolchain, *, ask: bool
) -> Search | None:
    """Every NVRTC. The one that fits torch's CUDA best is taken."""
    found = find_nvrtc()
    known = (_record(memory, place, ask=ask) for place in found)
    records = [record for record in known if record is not None]
    if len(records) < len(found):
        return None
    listed, ranked = find.rank(
        [Compiler(place.library, place.origin) for place in found], records, wanted,
        lambda record: cuda_version.misfit(record["version"], wanted),
    )  # fmt: skip
    for place in ranked[1:]:
        listed[place] = find.demote(listed[place], listed[ranked[0]], "CUDA", wanted)
    taken = _compiler(found[ranked[0]], records[ranked[0]]) if ranked else None
    return Search(taken, listed, lambda: _failure(listed))


def _failure(listed: list[Compiler]) -> ToolchainError:
    if not listed:
        where = ", ".join(toolkits.site_directories())
        return ToolchainError("no NVRTC is installed", why=f"no libnvrtc in {where}", hint=_PIP)
    return ToolchainError("no NVRTC can be used here", why=find.list_refusals(listed), hint=_PIP)


def _compiler(place: NvrtcPlace, record: dict[str, Any]) -> DeviceCompiler:
    from opkiln.run.process import python

    return find.make_compiler(
        record,
        family=NVRTC,
        path=python(isolated=True)[0],
        home=place.home,
        include_dirs=place.include_dirs,
        library_dirs=(),
        libraries=(place.library, place.builtins),
    )


def _record(memory: tuple[str, ...], place: NvrtcPlace, *, ask: bool) -> dict[str, Any] | None:
    """What one NVRTC says of itself, or why it is refused."""
    if not place.builtins:
        return probing.refusal("libnvrtc-builtins is not beside it")
    if not place.include_dirs:
        return probing.refusal(f"its headers are missing: there is no {_HEADER}")
    subject = probing.make_subject(f"nvrtc {place.library} {place.builtins}")

    def question() -> tuple[dict[str, Any], list[str]]:
        files = [os.path.realpath(path) for path in (place.library, place.builtins)]
        # The driver's files decide the result as the libraries do.
        driver = os.path.join(PACKAGE, os.path.dirname(PROGRAM))
        names = sorted(name for name in os.listdir(driver) if name.endswith(".py"))
        files += [os.path.join(driver, name) for name in names]
        return _ask(place, files), files

    return probing.recall_or_ask(memory, subject, question if ask else None)


def _ask(place: NvrtcPlace, files: list[str]) -> dict[str, Any]:
    from opkiln.run.process import run

    try:
        done = run(driver_argv("probe", place.library, place.builtins), timeout=120)
        said = json.loads(done.output) if done.returncode == 0 else None
        digests = [facts.digest_of(path) for path in files]
    except (ToolchainError, BuildTimeout) as error:
        return probing.refusal(f"{error.what}: {error.why}")
    except (OSError, ValueError) as error:
        return probing.refusal(f"cannot be asked: {error}")
    if said is None:
        return probing.refusal(f"cannot be used: {probing.last_line(done.output)}")
    return {
        "refused": "",
        "version": said["version"],
        "archs": [f"{number // 10}.{number % 10}" for number in said["archs"]],
        "accepts": said["accepts"],
        "identity": key("toolchain", (NVRTC, said["version"], digests)),
    }


def driver_argv(*arguments: str) -> tuple[str, ...]:
    """The argv of opkiln's driver of NVRTC. It writes no bytecode beside itself."""
    from opkiln.run.process import python

    program = os.path.join(PACKAGE, PROGRAM)
    interpreter, *options = python(isolated=True)
    return (interpreter, *options, "-B", program, *arguments)
