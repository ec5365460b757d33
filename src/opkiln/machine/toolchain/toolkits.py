"""CUDA toolkits: where they may be, what each nvcc says about itself, and headers in wheels."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from opkiln.base.build_model import TorchSDK
from opkiln.base.lazy import Record
from opkiln.errors import BuildTimeout, ToolchainError
from opkiln.machine import facts
from opkiln.machine.toolchain import find, probing, torch_sdk
from opkiln.settings import executable, on_path, origin_of, settings

# The directories of installed toolkits. A trailing `*` stands for every directory with this prefix.
DIRECTORIES = ("/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda")

# The parts of a toolkit that decide its output, besides the headers that a compile reads. The
# headers listed here show the release of the wheel that has them: wheels are upgraded one by one.
_PROGRAMS = ("nvcc", "cudafe++", "ptxas", "fatbinary", "nvlink", "nvcc.profile",
             "crt/link.stub", "crt/prelink.stub")  # fmt: skip
_LIBRARIES = ("libcudart_static.a", "libcudadevrt.a")
_HEADERS = ("cuda.h", "cuda_runtime_api.h", "crt/host_config.h",
            "cuda/std/__cccl/version.h", "cub/version.cuh")  # fmt: skip

_PATIENCE = 3600  # seconds before an nvcc that did not answer in time is run again

_PATHFINDER = (
    "from cuda.pathfinder import find_nvidia_binary_utility as find; print(find('nvcc') or '')"
)


class NvccPlace(Record):
    """A place where an nvcc may be."""

    nvcc: str
    origin: str  # OPKILN_CUDA_HOME, CUDA_HOME, CUDA_PATH, PATH, a directory, conda, PyPI
    named: bool = False  # by the user, who is told if there is no nvcc


class Toolkit(Record):
    """An nvcc that was found, and its record: what it says about itself, or why it is refused."""

    place: NvccPlace
    record: dict[str, Any]

    @property
    def label(self) -> str:
        """The toolkit's name in messages: its root, or the nvcc if that is not known."""
        return str(self.record.get("home") or self.place.nvcc)

    @property
    def release(self) -> tuple[int, int]:
        """The version of CUDA, as (13, 0)."""
        return torch_sdk.release(self.record["version"])


def places() -> Iterator[NvccPlace]:
    """Every place where an nvcc may be, in order of preference, whether there is one or not. If
    ``OPKILN_CUDA_HOME`` names a toolkit, that is the only place."""
    for field in ("cuda_home", "system_cuda_home", "cuda_path"):
        home, origin = origin_of(field)
        if home:
            yield NvccPlace(_nvcc_below(os.path.abspath(home)), origin, named=True)
            if field == "cuda_home":
                return
    facts.note_programs("nvcc", list(on_path("nvcc")))
    for directory in settings.path:
        if os.path.isabs(directory):
            yield NvccPlace(os.path.join(directory, "nvcc"), "PATH")
    for pattern in DIRECTORIES:
        for home in find.list_directories(pattern):
            yield NvccPlace(_nvcc_below(home), pattern)
    if os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        yield NvccPlace(_nvcc_below(sys.prefix), "conda")
    for wheels in wheel_directories():
        for home in (*shared_wheels(wheels), os.path.join(wheels, "cuda_nvcc")):
            yield NvccPlace(_nvcc_below(home), "PyPI")


def find_nvcc() -> list[NvccPlace]:
    """The places that have an nvcc, each program once."""
    found: dict[str, NvccPlace] = {}
    for place in places():
        if facts.is_program(place.nvcc):
            found.setdefault(_real_program(place.nvcc), place)
    return list(found.values())


def list_toolkits(memory: tuple[str, ...], host: str, *, ask: bool) -> list[Toolkit] | None:
    """Every toolkit of this machine, each once, in order of preference. The nvcc of a toolkit that
    is not remembered is run, with ``host`` as its host compiler. (Without one, nvcc answers
    little.) If ``ask`` is false, the result is None instead."""
    toolkits: dict[str, Toolkit] = {}
    for place in find_nvcc() or _last_resort(memory, ask):
        program = _real_program(place.nvcc)
        question = partial(_question, program, host) if ask else None
        record = probing.recall_or_ask(memory, _subject(program, host), question)
        if record is None:
            return None
        toolkits.setdefault(record["program"], Toolkit(place, record))
    return list(toolkits.values())


def list_unfound() -> list[NvccPlace]:
    """The places that the user named and that have no nvcc."""
    return [place for place in places() if place.named and not executable(place.nvcc)]


def list_searched() -> str:
    """The places that were searched for toolkits, one per line."""
    lines = [f"{place.origin}: no {place.nvcc}" for place in list_unfound()]
    if settings.cuda_home:
        return "\n".join(lines)
    lines += ["PATH: no nvcc", *(f"{pattern}: no bin/nvcc" for pattern in DIRECTORIES)]
    return "\n".join([*lines, *(f"PyPI: no nvcc in {path}" for path in wheel_directories())])


def _nvcc_below(home: str) -> str:
    return os.path.join(home, "bin", "nvcc")


def site_directories() -> list[str]:
    """The directories of this interpreter's packages: torch's, and those that pip uses."""
    import site

    torch = torch_sdk.locate()
    found = [os.path.dirname(torch)] if torch else []
    found += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        found.append(site.getusersitepackages())
    return list(dict.fromkeys(found))


def wheel_directories() -> list[str]:
    """The directories that NVIDIA's wheels share."""
    return [os.path.join(site, "nvidia") for site in site_directories()]


def shared_wheels(wheels: str) -> list[str]:
    """The directories of wheels of one major version: ``cu13``; not ``curand``."""
    found = find.list_directories(os.path.join(wheels, "cu*"))
    return [home for home in found if home[-1].isdigit()]


def _real_program(path: str) -> str:
    """The path by which nvcc must be called. A wrapper (a script, ccache) is unchanged.

    nvcc looks for its toolkit next to the name it is called by, so a symbolic link misleads it. A
    link to the file itself is followed only if the toolkit is not next to the link: package
    managers may fill a whole toolkit with links into their caches.
    """
    beside = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return next(filter(_has_toolkit, (beside, os.path.realpath(path))), path)


def _has_toolkit(nvcc: str) -> bool:
    return os.path.exists(os.path.join(os.path.dirname(nvcc), "nvcc.profile"))


def _last_resort(memory: tuple[str, ...], ask: bool) -> list[NvccPlace]:
    """The toolkit that cuda-pathfinder finds, if that is installed: it may know new layouts. It
    runs in a child process: it keeps its answers for the life of the process, and loads libraries
    to find them."""
    if settings.cuda_home:
        return []
    facts.note_incomplete()  # what it looks at is not known
    subject = f"cuda-pathfinder {sys.prefix}"
    record = probing.recall(memory, subject)
    if record is None and ask:
        sites = [site for site in site_directories() if os.path.isdir(site)]
        if not any(os.path.isdir(os.path.join(site, "cuda", "pathfinder")) for site in sites):
            return []
        record = {"nvcc": _pathfinder()}
        # If pip installs something, one of these directories changes.
        probing.remember(memory, subject, record, [*sites, *filter(None, record.values())])
    return [NvccPlace(record["nvcc"], "cuda-pathfinder")] if record and record["nvcc"] else []


def _pathfinder() -> str:
    from opkiln.run.process import capture, python

    if not sys.executable:
        return ""  # Python is embedded in another program
    answer = capture(python("-c", _PATHFINDER), timeout=60)
    nvcc = answer.output.strip()
    return nvcc if answer.returncode == 0 and nvcc and executable(nvcc) else ""


# What an nvcc says about itself


def _subject(program: str, host: str) -> str:
    if _has_toolkit(program):
        return probing.make_subject(f"nvcc {program} beside {host}")
    # What a wrapper runs may depend on PATH: ccache runs the next nvcc there.
    called = f"{program} {os.path.realpath(program)}"
    path = os.pathsep.join(settings.path)
    return probing.make_subject(f"nvcc wrapper {called} beside {host} on {path}")


def _question(path: str, host: str) -> tuple[dict[str, Any], list[str]]:
    """Ask an nvcc for its version and place: (record, the files that the answers depend on)."""
    # A script may start an nvcc that does not exist yet. It would appear in one of these
    # directories, so they are signed too.
    parents = [os.path.dirname(pattern) for pattern in DIRECTORIES if pattern.endswith("*")]
    files = [os.path.realpath(path), *filter(os.path.isdir, (*parents, *wheel_directories()))]
    try:
        return _ask(path, host, files)
    except (ToolchainError, BuildTimeout) as error:
        record = probing.refusal(f"{error.what}: {error.why}", program=path)
        if isinstance(error, BuildTimeout):
            # Its file system may have been busy. Waiting again in every process would be worse.
            record["until"] = time.time() + _PATIENCE
        else:  # it cannot be started
            record["absent"] = _missing_interpreter(path)
        return record, files


def _missing_interpreter(path: str) -> list[str]:
    """The interpreter of a script, if it does not exist."""
    try:
        with open(path, "rb") as file:
            head = file.readline(4096)
    except OSError:
        return []
    words = os.fsdecode(head.removeprefix(b"#!")).split() if head.startswith(b"#!") else []
    return words[:1] if words and not os.path.exists(words[0]) else []


def _ask(path: str, host: str, files: list[str]) -> tuple[dict[str, Any], list[str]]:
    ask = probing.make_ask(path, timeout=60)
    status, banner = ask("--version")
    version = banner.partition("release ")[2].partition(",")[0].strip()
    if status != 0 or torch_sdk.release(version) == (0, 0):
        reason = f"--version exits with {status}: {probing.last_line(banner)}"
        return probing.refusal(reason, program=path), files
    status, listing = ask("--list-gpu-arch")
    archs = _archs(listing) if status == 0 else []
    if not archs:
        reason = f"does not list its architectures: {probing.last_line(listing)}"
        return probing.refusal(reason, version, program=path), files
    ccbin = ("-ccbin", host) if host else ()
    status, dryrun = ask("--dryrun", *ccbin, "-x", "cu", "-c", os.devnull)
    said = dict(re.findall(r"^#\$ ([A-Za-z_]+)=(.*)$", dryrun, re.MULTILINE))
    called = said.get("_HERE_", "")
    here = os.path.realpath(called)
    program = os.path.join(here, "nvcc")
    found = os.path.isabs(called) and "TOP" in said and executable(program)
    if status != 0 or not found:
        reason = f"--dryrun does not say where its toolkit is: {probing.last_line(dryrun)}"
        refusal = probing.refusal(reason, version, program=path)
        return refusal, [*files, os.path.realpath(host)] if host else files

    home = os.path.realpath(said["TOP"])
    include_dirs = probing.existing_directories(
        _split_quoted(said, "INCLUDES", "-I") + _split_quoted(said, "SYSTEM_INCLUDES", "")
    )
    # The nvcc.profile of the wheels names lib64, but they have lib.
    usual = [os.path.join(home, "lib64"), os.path.join(home, "lib")]
    library_dirs = probing.existing_directories([*_split_quoted(said, "LIBRARIES", "-L"), *usual])
    library_dirs = [path for path in library_dirs if probing.holds(path, _LIBRARIES[0])]
    nvvm = os.path.join(home, "nvvm")
    parts = [
        *_parts("bin", [here], _PROGRAMS),
        *_parts("nvvm", [said.get("CICC_PATH", ""), os.path.join(nvvm, "bin")], ["cicc"]),
        *_parts("nvvm", [said.get("NVVMIR_LIBRARY_DIR", "")], ["libdevice.10.bc"]),
        *_parts("nvvm", [os.path.join(nvvm, "lib64"), *usual], ["libnvvm.so.4"]),
        *_parts("lib", library_dirs, _LIBRARIES),
        *_parts("include", include_dirs, _HEADERS),
    ]  # fmt: skip
    # A refusal is also remembered, until a missing part appears.
    directories = probing.existing_directories([home, here, *usual, *include_dirs, *library_dirs])
    record = {
        "refused": "",
        "program": program,
        "home": home,
        "version": version,
        "banner": banner,
        "archs": archs,
        "include_dirs": include_dirs,
        "library_dirs": library_dirs,
        "parts": parts,
        "directories": directories,
    }
    # The directory is signed under the name that a wrapper uses. So if a link in that path changes,
    # the directory has another inode.
    files = [files[0], program, os.path.join(here, "nvcc.profile"), called, *directories]
    return record, list(dict.fromkeys(files))


def _split_quoted(said: dict[str, str], name: str, prefix: str) -> list[str]:
    """The directories of one variable: ``"-I/a" "-I/b"``, or ``"-isystem" "/a"``."""
    import shlex

    words = shlex.split(said.get(name, ""))
    return [word.removeprefix(prefix) for word in words if prefix or not word.startswith("-")]


def _parts(role: str, directories: list[str], names: Iterable[str]) -> list[list[str]]:
    """[role/name, file] for each name, from the first directory that has it."""
    found = []
    for name in names:
        holder = next((each for each in directories if each and probing.holds(each, name)), None)
        if holder is not None:
            found.append([f"{role}/{name}", os.path.realpath(os.path.join(holder, name))])
    return found


def _archs(listing: str) -> list[str]:
    """``7.5``, ``8.0``, … from lines such as ``compute_75``, in numeric order."""
    numbers = [line.strip().removeprefix("compute_") for line in listing.splitlines()]
    ordered = sorted({int(number) for number in numbers if number.isdigit()})
    return [f"{number // 10}.{number % 10}" for number in ordered]


# Headers of CUDA's libraries that a toolkit lacks but the wheels next to torch have
#
# ATen's CUDA headers include ``cublas_v2.h``, ``cusparse.h`` and others. A toolkit of a few
# packages does not have them, but torch from PyPI depends on wheels that do:
# ``nvidia/cu13/include`` beside torch, and for CUDA 12 one directory for each library. They are
# used if the wheels have the toolkit's release, and are searched after it, so that they only add
# what it lacks.

# The headers that torch's headers include, and the part of `cuda-toolkit` that has each.
WHEEL_HEADERS = {
    "cublas_v2.h": "cublas",
    "cublasLt.h": "cublas",
    "cufft.h": "cufft",
    "cufftXt.h": "cufft",
    "curand.h": "curand",
    "curand_kernel.h": "curand",
    "curand_philox4x32_x.h": "curand",
    "cusolverDn.h": "cusolver",
    "cusolver_common.h": "cusolver",
    "cusparse.h": "cusparse",
    "nvrtc.h": "nvrtc",
}
IN_EXTRA = ("cublas", "curand", "cusolver", "cusparse")  # those that `opkiln[cuda]` installs
_RUNTIME = "cuda_runtime_api.h"
_WHEELS = ("cublas", "cuda_nvrtc", "cufft", "curand", "cusolver", "cusparse")


class Wheels(Record):
    """The headers that wheels have for a toolkit."""

    directories: tuple[str, ...]  # in "nvidia", next to torch; empty if none is used
    release: tuple[int, int]  # of the wheels; (0, 0) if there are none


def find_wheels(
    torch: TorchSDK | None, include_dirs: Iterable[str], release: tuple[int, int]
) -> Wheels:
    """The headers that the wheels have for a toolkit of this release with these directories."""
    none, directories = Wheels((), (0, 0)), list(include_dirs)
    lacks = (not any(probing.holds(d, header) for d in directories) for header in WHEEL_HEADERS)
    if torch is None or not any(lacks):
        return none
    shared = (f"cu{release[0]}/include",)
    split = ("cuda_runtime/include", *(f"{part}/include" for part in _WHEELS))
    for layout in (shared, split):
        marker = os.path.join(torch.wheels, layout[0], _RUNTIME)
        if facts.exists(marker):
            break
    else:
        return none
    own = tuple(each for each in layout if facts.exists(os.path.join(torch.wheels, each)))
    try:
        found = _wheel_release(marker)
    except OSError:
        return none  # the files were just removed
    return Wheels(own if found == release else (), found)


def _wheel_release(header: str) -> tuple[int, int]:
    """(13, 0) from a runtime's header with ``#define CUDART_VERSION 13000``."""
    with open(header, encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if words[:2] == ["#define", "CUDART_VERSION"] and words[2:3] and words[2].isdigit():
                number = int(words[2])
                return number // 1000, number % 1000 // 10
    return 0, 0
