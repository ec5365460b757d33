"""hipcc: where a ROCm may be installed, which hipcc is used and why, and what a probe says of it.

hipcc is a script in front of clang. It passes its arguments to a shell, and if it finds an nvcc it
may compile for NVIDIA. So it always runs with ``ENVIRONMENT``, and its arguments may only contain
plain characters. Its own variables (``HIPCC_COMPILE_FLAGS_APPEND``, ``HIP_PATH``, …) do not reach
it: children get an allow-listed environment.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from opkiln.base.build_model import HIPCC, DeviceCompiler, Toolchain
from opkiln.base.digest import key
from opkiln.errors import ArchError, BuildTimeout, ToolchainError
from opkiln.machine import facts
from opkiln.machine.arch import hip
from opkiln.machine.facts import digest_of
from opkiln.machine.toolchain import find, probing, torch_sdk
from opkiln.machine.toolchain.find import Compiler, Search
from opkiln.machine.uname import read_text
from opkiln.settings import origin_of

# Set for every run of hipcc, in addition to the allow-listed environment.
ENVIRONMENT = (("HIP_PLATFORM", "amd"),)


def available() -> bool:
    """Whether any hipcc is found. Starts no process."""
    return any(not candidate.refused for candidate in hipcc_candidates())


# Installations

# The directory in which AMD's packages install it: as `rocm`, or as `rocm-6.2.0` if there are
# several.
PARENT = "/opt"
# The files with an installation's version, the best first: ROCm's own version, then HIP's, whose
# major and minor are the same.
_TEXTS = (".info/version", ".info/version-dev")
_HEADERS = (
    ("include/rocm-core/rocm_version.h", "ROCM_VERSION_"),
    ("include/rocm_version.h", "ROCM_VERSION_"),
    ("include/hip/hip_version.h", "HIP_VERSION_"),
)


def hipcc_candidates() -> Iterator[Compiler]:
    """Every hipcc, in order of preference: the one the user named, else those on PATH and in /opt.
    If the user named a ROCm without a hipcc, no other one is used instead."""
    return find.list_programs(_places())


def _places() -> Iterator[tuple[str, str]]:
    named, origin = origin_of("rocm_home")
    if named:
        yield _hipcc_below(os.path.abspath(named)), origin
        return
    yield "hipcc", "PATH"
    found = facts.list_directory(PARENT)
    names = [name for name in ("rocm", *find.sort_by_version(found, "rocm-")) if name in found]
    for name in names or ["rocm*"]:
        yield _hipcc_below(os.path.join(PARENT, name)), PARENT


def rocm_homes() -> list[str]:
    """The roots of those installations, in the same order."""
    found = (each.path for each in hipcc_candidates() if not each.refused)
    return list(dict.fromkeys(home_of(os.path.realpath(path)) for path in found))


def home_of(hipcc: str) -> str:
    """The root of the ROCm that a hipcc belongs to: two levels up, or three in older ones."""
    home = os.path.dirname(os.path.dirname(hipcc))
    return os.path.dirname(home) if os.path.basename(home) == "hip" else home


def _hipcc_below(home: str) -> str:
    """The hipcc of an installation, or where it would be."""
    usual = os.path.join(home, "bin", "hipcc")
    older = os.path.join(home, "hip", "bin", "hipcc")
    return next(filter(facts.is_program, (usual, older)), usual)


def installed_rocm_version() -> tuple[int, int]:
    """(major, minor) of the ROCm installation that builds use. Its compiler is not run. If there is
    none, it is the ROCm that torch was built with and ships. (0, 0) without either."""
    for home in rocm_homes():
        found = _release_of(home)
        if found != (0, 0):
            return found
    torch = torch_sdk.find()
    return (0, 0) if torch is None or torch.hip is None else torch_sdk.release(torch.hip)


def _release_of(home: str) -> tuple[int, int]:
    for name in _TEXTS:
        found = torch_sdk.release(read_text(os.path.join(home, name)).strip())
        if found != (0, 0):
            return found
    for name, prefix in _HEADERS:
        defined = rf"#define\s+{prefix}(MAJOR|MINOR)\s+(\d{{1,9}})\b"
        numbers = dict(re.findall(defined, read_text(os.path.join(home, name))))
        if len(numbers) == 2:
            return int(numbers["MAJOR"]), int(numbers["MINOR"])
    return 0, 0


# The choice


def search(
    memory: tuple[str, ...], wanted: str | None, host: Toolchain, *, ask: bool
) -> Search | None:
    """Every hipcc. The one that fits torch's HIP best (``find.distance``) is taken. Another major
    version than torch's is refused: two HIP runtimes do not work in one process."""
    found = list(hipcc_candidates())
    known = (_record(memory, candidate, ask=ask) for candidate in found)
    records = [record for record in known if record is not None]
    if len(records) < len(found):
        return None
    listed, ranked = find.rank(found, records, wanted, partial(_misfit, wanted, host))
    taken = _compiler(records[ranked[0]], host) if ranked else None
    for place in ranked[1:]:
        listed[place] = find.demote(listed[place], listed[ranked[0]], "HIP", wanted)
    mismatched = not ranked and not all(record["refused"] for record in records)
    return Search(taken, listed, lambda: _failure(listed, wanted, mismatched=mismatched))


def _record(memory: tuple[str, ...], candidate: Compiler, *, ask: bool) -> dict[str, Any] | None:
    if candidate.refused:
        return probing.refusal(candidate.refused)
    path = candidate.path
    subject = probing.make_subject(f"hipcc {path} {os.path.realpath(path)}")
    return probing.recall_or_ask(memory, subject, partial(probe, path) if ask else None)


def _misfit(torch_hip: str | None, host: Toolchain, record: dict[str, Any]) -> str:
    """Why a working hipcc cannot build for this torch and host; empty if it can."""
    architecture = host.machine.partition("-")[0]
    if not record["machine"].startswith(architecture):
        return f"compiles for {record['machine']}, but {host.cxx} compiles for {host.machine}"
    return find.misfit("HIP", record["version"], torch_hip)


def _failure(listed: list[Compiler], torch_hip: str | None, *, mismatched: bool) -> ToolchainError:
    named, origin = origin_of("rocm_home")
    if named:
        what, hint = f"{origin}={named} cannot be used", f"unset {origin}"
    elif mismatched and torch_hip is not None:
        major, minor = torch_sdk.release(torch_hip)
        what = f"no ROCm here fits torch, which was built with HIP {torch_hip}"
        hint = f"ROCM_HOME=/opt/rocm-{major}.{minor}.0    (the path of a ROCm {major})"
    else:
        what, hint = "no hipcc can be used here", "apt-get install hipcc"
    return ToolchainError(what, why=find.list_refusals(listed), hint=hint)


def _compiler(record: dict[str, Any], host: Toolchain) -> DeviceCompiler:
    # Only those that the host compiler does not search anyway. Given one that it does, g++ no
    # longer finds the headers that libstdc++ includes after it.
    added = [path for path in record["include_dirs"] if path not in host.include_dirs]
    return find.make_compiler(record, family=HIPCC, path=record["program"], include_dirs=added)


# The probe

_RUNTIME = "libamdhip64.so"
_HEADER = "hip/hip_runtime.h"
_VERSION = "hip/hip_version.h"
_REQUIRED = "-std=c++20"
_ISA = "oclc_isa_version_"  # prefix of the device libraries that are for one processor
# Every recent ROCm has device libraries for at least one of these. They are used for the probe.
_ASKED = ("gfx90a", "gfx1030", "gfx900")
_SOURCE = """\
#include <hip/hip_runtime.h>
__global__ void opkiln_probe(float* x) { *x = expf(*x); }
hipError_t opkiln_launch(float* x) { opkiln_probe<<<1, 1>>>(x); return hipGetLastError(); }
"""


def probe(path: str) -> tuple[dict[str, Any], list[str]]:
    """Ask a hipcc everything at once. Returns (record, the files that the answers depend on)."""
    program = os.path.realpath(path)
    # hipcc may be a script in front of another program.
    names = ("hipcc.pl", "hipvars.pm", "hipcc.bin", ".hipVersion")
    others = (os.path.join(os.path.dirname(program), name) for name in names)
    files = [program, *filter(os.path.isfile, others)]
    try:
        record, files = _ask(program, files)
    except (ToolchainError, BuildTimeout) as error:  # it cannot be started, or hangs
        record = probing.refusal(f"{error.what}: {error.why}")
    return {**record, "resolved": [[path, program], *record.get("resolved", ())]}, files


def _ask(program: str, files: list[str]) -> tuple[dict[str, Any], list[str]]:
    with probing.scratch() as scratch:
        ask = probing.make_ask(
            program, cwd=scratch, env=dict(ENVIRONMENT), tmpdir=scratch, timeout=120
        )
        status, banner = ask("--version")
        version = banner.partition("HIP version: ")[2].partition("\n")[0].partition("-")[0].strip()
        if status != 0 or torch_sdk.release(version) == (0, 0) or "clang version" not in banner:
            said = f"--version exits with {status}: {probing.last_line(banner)}"
            return probing.refusal(said, version), files

        with open(os.path.join(scratch, "probe.hip"), "w") as file:
            file.write(_SOURCE)
        arch, dry = _dry_run(ask)
        compiling = ("-fPIC", "-c", "probe.hip", "-o", "probe.o")
        status, said = ask(f"--offload-arch={arch}", _REQUIRED, *compiling)
    directories = [*_header_directories(dry), *_library_directories(dry)]
    library_dirs = [d for d in _library_directories(dry) if probing.holds(d, _RUNTIME)]
    reason = ""
    if status != 0:
        reason = f"does not compile for {arch}: {_first_error(said)}"
    elif not library_dirs:
        reason = f"finds no {_RUNTIME} to link with"
    if reason:
        # The directories are included: the missing file may be installed into one of them.
        return probing.refusal(reason, version), [*files, *directories]

    called = _programs(dry)
    bitcode = _bitcode(dry)
    parts = [*files, *map(os.path.realpath, called), *_shared_code(called)]
    parts += [os.path.join(directory, name) for directory, name in bitcode]
    include_dirs = [d for d in _header_directories(dry) if probing.holds(d, _HEADER)]
    # The version of the headers. Headers that only the device compile reads are in no depfile.
    parts += [os.path.join(d, _VERSION) for d in include_dirs if probing.holds(d, _VERSION)]
    parts = list(dict.fromkeys(parts))
    # These are signed, but not part of the identity. They only decide which archs there are and
    # which runtime is linked, and a link step has the runtime in its own key.
    signed = [*dict.fromkeys(d for d, _ in bitcode), os.path.join(library_dirs[0], _RUNTIME)]
    # Without the directories: the same files elsewhere are the same compiler.
    digests = [(os.path.basename(part), digest_of(part)) for part in parts]
    record = {
        "refused": "",
        "version": version,
        "program": program,
        "home": home_of(program),
        "machine": probing.field(banner, "Target:"),
        "identity": key("toolchain", (HIPCC, version, digests)),
        "archs": _archs(name for _, name in bitcode),
        "accepts": [_REQUIRED],
        "include_dirs": include_dirs,
        "library_dirs": library_dirs,
        "resolved": [[name, os.path.realpath(name)] for name in called],
    }
    return record, [*parts, *signed]


def _dry_run(ask: probing.Ask) -> tuple[str, str]:
    """(an architecture, the commands that hipcc would run to compile and link for it). clang exits
    with 0 here even if it reports errors."""
    answers = []
    for arch in _ASKED:
        _, said = ask("-###", f"--offload-arch={arch}", "-shared", "probe.hip", "-o", "probe.so")
        if " error: " not in said:
            return arch, said
        answers.append((arch, said))
    return answers[0]


def _commands(dry: str) -> list[list[str]]:
    return [shlex.split(line) for line in dry.splitlines() if line.startswith(' "/')]


def _programs(dry: str) -> list[str]:
    """clang, lld, the bundler and the linker, by the names that clang uses, and clang's
    configuration files."""
    configured = [
        line.partition(": ")[2].strip()
        for line in dry.splitlines()
        if line.startswith("Configuration file: ")
    ]
    return list(dict.fromkeys([*(words[0] for words in _commands(dry)), *configured]))


def _shared_code(programs: Iterable[str]) -> list[str]:
    """The libraries with the compiler's code, if clang itself is a thin program over them."""
    found = []
    for program in programs:
        directory = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(program))), "lib")
        if os.path.basename(program).startswith("clang") and os.path.isdir(directory):
            for name in sorted(os.listdir(directory)):
                if name.startswith(("libLLVM", "libclang-cpp")) and ".so" in name:
                    found.append(os.path.realpath(os.path.join(directory, name)))
    return list(dict.fromkeys(found))


def _bitcode(dry: str) -> list[tuple[str, str]]:
    """(directory, name) of every device library in the directories that a compile uses."""
    taken = _values(dry, ("-mlink-builtin-bitcode",))
    found = dict.fromkeys(os.path.realpath(os.path.dirname(path)) for path in taken)
    return [(d, name) for d in found for name in sorted(os.listdir(d)) if name.endswith(".bc")]


def _archs(names: Iterable[str]) -> list[str]:
    """``gfx90a`` and so on, from the names of device libraries, in order."""
    found: list[hip.HipArch] = []
    for name in names:
        if name.startswith(_ISA):
            try:
                found += hip.parse("gfx" + name.removeprefix(_ISA).removesuffix(".bc"))
            except ArchError:
                continue  # a library for a processor that no arch list can name
    return [str(arch) for arch in hip.merge(found)]


def _header_directories(dry: str) -> list[str]:
    options = ("-internal-isystem", "-internal-externc-isystem", "-isystem", "-idirafter")
    return probing.existing_directories(_values(dry, options))


def _library_directories(dry: str) -> list[str]:
    link = (_commands(dry) or [[]])[-1]
    return probing.existing_directories([word[2:] for word in link if word.startswith("-L")])


def _values(dry: str, options: tuple[str, ...]) -> list[str]:
    """The words that follow these options, anywhere in the commands."""
    return [
        value for words in _commands(dry) for option, value in pairwise(words) if option in options
    ]


def _first_error(text: str) -> str:
    """The first error, without clang's explanation."""
    lines = [line for line in text.splitlines() if "error: " in line]
    return lines[0].partition("error: ")[2].partition("; ")[0] if lines else probing.last_line(text)
