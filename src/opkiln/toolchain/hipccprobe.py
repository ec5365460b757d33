"""What a hipcc says of itself: which programs and libraries it runs on, what it can compile."""

from __future__ import annotations

import os
import shlex
from itertools import pairwise
from typing import Any

from opkiln.arch import hip
from opkiln.digest import key, sha256_file
from opkiln.errors import ArchError, BuildTimeout, ToolchainError
from opkiln.toolchain import rocm_homes, torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Ask = Callable[..., tuple[int, str]]

# What every run of hipcc gets besides the allow-listed environment.
ENVIRONMENT = (("HIP_PLATFORM", "amd"),)

_RUNTIME = "libamdhip64.so"
_HEADER = "hip/hip_runtime.h"
_VERSION = "hip/hip_version.h"
_REQUIRED = "-std=c++20"
_ISA = "oclc_isa_version_"  # how the names of device libraries begin that stand for a processor
# Every ROCm of the last years has device libraries for one of these: to ask it about itself.
_ASKED = ("gfx90a", "gfx1030", "gfx900")
_SOURCE = """\
#include <hip/hip_runtime.h>
__global__ void opkiln_probe(float* x) { *x = expf(*x); }
hipError_t opkiln_launch(float* x) { opkiln_probe<<<1, 1>>>(x); return hipGetLastError(); }
"""


def probe(path: str) -> tuple[dict[str, Any], list[str]]:
    """Ask a hipcc everything at once: (record, the files that the answers depend on)."""
    program = os.path.realpath(path)
    files = [program, *_beside(program)]
    try:
        return _asked(program, files)
    except (ToolchainError, BuildTimeout) as error:  # it cannot be started, or does not end
        return {"refused": f"{error.what}: {error.why}", "version": ""}, files


def _asked(program: str, files: list[str]) -> tuple[dict[str, Any], list[str]]:
    from opkiln.toolchain import probing

    with probing.scratch() as scratch:
        ask = _asking(program, scratch)
        status, banner = ask("--version")
        version = banner.partition("HIP version: ")[2].partition("\n")[0].partition("-")[0].strip()
        if status != 0 or torch_sdk.release(version) == (0, 0) or "clang version" not in banner:
            said = f"--version exits with {status}: {_last_line(banner)}"
            return {"refused": said, "version": version}, files

        compiling = _compiling(scratch)
        arch, dry = _dry_run(ask)
        directories = [*_header_directories(dry), *_library_directories(dry)]
        status, said = ask(f"--offload-arch={arch}", _REQUIRED, *compiling)
    library_dirs = [d for d in _library_directories(dry) if _holds(d, _RUNTIME)]
    reason = ""
    if status != 0:
        reason = f"does not compile for {arch}: {_first_error(said)}"
    elif not library_dirs:
        reason = f"finds no {_RUNTIME} to link with"
    if reason:
        # With the directories: what is missing may come to be in one of them.
        return {"refused": reason, "version": version}, [*files, *directories]

    called = _programs(dry)
    bitcode = _bitcode(dry)
    parts = [*files, *map(os.path.realpath, called), *_shared_code(called)]
    parts += [os.path.join(directory, name) for directory, name in bitcode]
    include_dirs = [d for d in _header_directories(dry) if _holds(d, _HEADER)]
    # The release of the headers. Those that only a device's compile reads are in no depfile.
    parts += [os.path.join(d, _VERSION) for d in include_dirs if _holds(d, _VERSION)]
    parts = list(dict.fromkeys(parts))
    # Signed, too, and no part of the identity: what decides only which archs there are, and what
    # is linked with (which a link's own inputs are keyed by).
    signed = [*dict.fromkeys(d for d, _ in bitcode), os.path.join(library_dirs[0], _RUNTIME)]
    # The names stay out of the identity: the same files elsewhere are the same compiler.
    digests = [(os.path.basename(part), sha256_file(part)) for part in parts]
    record = {
        "refused": "",
        "version": version,
        "program": program,
        "home": rocm_homes.home_of(program),
        "machine": _field(banner, "Target:"),
        "identity": key("toolchain", ("hipcc", version, digests)),
        "archs": _archs(name for _, name in bitcode),
        "accepts": [_REQUIRED],
        "include_dirs": include_dirs,
        "library_dirs": library_dirs,
        "resolved": [[name, os.path.realpath(name)] for name in called],
    }
    return record, [*parts, *signed]


def compile_error(program: str, arch: str) -> str:
    """What a hipcc says when it is to compile a kernel for an architecture; empty if it does."""
    from opkiln.toolchain import probing

    with probing.scratch() as scratch:
        ask = _asking(program, scratch)
        status, said = ask(f"--offload-arch={arch}", _REQUIRED, *_compiling(scratch))
    return "" if status == 0 else _first_error(said)


def _asking(program: str, scratch: str) -> Ask:
    from opkiln.process import run

    def ask(*arguments: str) -> tuple[int, str]:
        done = run(
            (program, *arguments), cwd=scratch, env=dict(ENVIRONMENT), tmpdir=scratch,
            timeout=120, supervised=False,
        )  # fmt: skip
        return done.returncode, done.output

    return ask


def _compiling(scratch: str) -> tuple[str, ...]:
    with open(os.path.join(scratch, "probe.hip"), "w") as file:
        file.write(_SOURCE)
    return "-fPIC", "-c", "probe.hip", "-o", "probe.o"


def _dry_run(ask: Ask) -> tuple[str, str]:
    """(an architecture, the commands that hipcc would run to compile and link for it).

    clang exits with 0 here even where it has errors to report.
    """
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
    """clang, lld, the bundler and the linker, by the names that clang calls them by, and clang's
    configuration files."""
    configured = [
        line.partition(": ")[2].strip()
        for line in dry.splitlines()
        if line.startswith("Configuration file: ")
    ]
    return list(dict.fromkeys([*(words[0] for words in _commands(dry)), *configured]))


def _shared_code(programs: Iterable[str]) -> list[str]:
    """The libraries that hold the compiler proper where clang itself is a shell around them."""
    found = []
    for program in programs:
        directory = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(program))), "lib")
        if os.path.basename(program).startswith("clang") and os.path.isdir(directory):
            for name in sorted(os.listdir(directory)):
                if name.startswith(("libLLVM", "libclang-cpp")) and ".so" in name:
                    found.append(os.path.realpath(os.path.join(directory, name)))
    return list(dict.fromkeys(found))


def _bitcode(dry: str) -> list[tuple[str, str]]:
    """(directory, name) of every device library beside those that a compile would take."""
    taken = _values(dry, ("-mlink-builtin-bitcode",))
    found = dict.fromkeys(os.path.realpath(os.path.dirname(path)) for path in taken)
    return [(d, name) for d in found for name in sorted(os.listdir(d)) if name.endswith(".bc")]


def _archs(names: Iterable[str]) -> list[str]:
    """``gfx90a``, … of the names of device libraries, in order."""
    found: list[hip.Arch] = []
    for name in names:
        if name.startswith(_ISA):
            try:
                found += hip.parse("gfx" + name.removeprefix(_ISA).removesuffix(".bc"))
            except ArchError:
                continue  # a library for something that nobody can ask for
    return [str(arch) for arch in hip.merged(found)]


def _header_directories(dry: str) -> list[str]:
    options = ("-internal-isystem", "-internal-externc-isystem", "-isystem", "-idirafter")
    return _existing(_values(dry, options))


def _library_directories(dry: str) -> list[str]:
    link = (_commands(dry) or [[]])[-1]
    return _existing([word[2:] for word in link if word.startswith("-L")])


def _values(dry: str, options: tuple[str, ...]) -> list[str]:
    """What follows an option, anywhere in the commands."""
    return [
        value for words in _commands(dry) for option, value in pairwise(words) if option in options
    ]


def _existing(paths: list[str]) -> list[str]:
    return list(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.isdir(path)))


def _beside(program: str) -> list[str]:
    """The files that hipcc itself is made of, where it is a script in front of another."""
    names = ("hipcc.pl", "hipvars.pm", "hipcc.bin", ".hipVersion")
    paths = (os.path.join(os.path.dirname(program), name) for name in names)
    return [path for path in paths if os.path.isfile(path)]


def _holds(directory: str, name: str) -> bool:
    return os.path.exists(os.path.join(directory, name))


def _field(text: str, label: str) -> str:
    lines = (line for line in text.splitlines() if line.startswith(label))
    return next(lines, label)[len(label) :].strip()


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _first_error(text: str) -> str:
    """The line that says what is wrong, up to where clang begins to explain itself."""
    lines = [line for line in text.splitlines() if "error: " in line]
    return lines[0].partition("error: ")[2].partition("; ")[0] if lines else _last_line(text)
