"""nvcc: which CUDA toolkit is used, why, and what it can do with a host compiler.

The first build on a machine waits for the probe, so its questions are asked in parallel. For a
toolkit that was installed as a whole, the probe only preprocesses: that shows whether nvcc accepts
the host compiler. Wheels are upgraded one by one and may not fit each other, so for a toolkit made
of wheels the probe also compiles and links.
"""

from __future__ import annotations

import os
import shlex
import time
from typing import Any, NamedTuple

from opkiln.build_model import DeviceCompiler, Toolchain
from opkiln.digest import Signature, key, sha256_file
from opkiln.errors import BuildTimeout, ToolchainError
from opkiln.settings import origin_of, override, settings
from opkiln.toolchain import cuda_version, probing, toolkits, wheel_headers
from opkiln.toolchain import host as hosts
from opkiln.toolchain.find import Candidate
from opkiln.toolchain.torch_sdk import release

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.toolchain.toolkits import Toolkit

    Ask = Callable[..., tuple[int, str]]
    Refusal = dict[str, Any] | None


class _Search(NamedTuple):
    """The result of looking at every toolkit."""

    taken: DeviceCompiler | None
    found: bool  # whether there is any toolkit
    candidates: list[Candidate]  # in order of preference; the one taken is not refused
    mismatched: bool  # all that work have another CUDA major version than torch
    unsupported: str  # nvcc's message about a host compiler that it does not support
    signatures: list[list[Any]]  # of the files that decided the choice
    absent: list[str]  # files that would change the choice if they appeared
    lasting: bool  # nothing but files decided it


def recall(
    memory: tuple[str, ...], torch_cuda: str | None, host: Toolchain
) -> DeviceCompiler | None:
    """The nvcc that ``choose`` would take, if every probe is remembered.

    Starts no process, writes nothing.
    """
    search = _search(memory, torch_cuda, host, ask=False)
    return None if search is None else search.taken


def choose(memory: tuple[str, ...], torch_cuda: str | None, host: Toolchain) -> DeviceCompiler:
    """The toolkit that fits torch's CUDA best. Toolkits that are not remembered are probed.

    The same version is best, then the nearest newer minor, then the nearest older one. If torch has
    no CUDA, the first one found is taken. Raises MissingCUDAException if there is no toolkit,
    CUDAMismatchException if all have another major version than torch (unless
    ``OPKILN_SKIP_CUDA_CHECK`` is set), ToolchainError if those that fit do not work.
    """
    search = _search(memory, torch_cuda, host, ask=True)
    assert search is not None
    if search.taken is not None:
        return search.taken
    raise _failure(search, memory, torch_cuda, host)


def candidates(memory: tuple[str, ...], torch_cuda: str | None, host: Toolchain) -> list[Candidate]:
    """Every toolkit that was considered, for reports. The one that is taken is not refused."""
    search = _search(memory, torch_cuda, host, ask=True)
    assert search is not None
    return search.candidates


def available() -> bool:
    """Whether any nvcc is found. Starts no process."""
    return bool(toolkits.present())


def evidence(memory: tuple[str, ...], compiler: DeviceCompiler) -> dict[str, list[Any]] | None:
    """The facts behind the choice of this nvcc, in a form that ``stat`` can check.

    The host compiler and torch have evidence of their own. None if another nvcc would be chosen
    now, or if the choice depends on more than files.
    """
    host = hosts.recall(memory)
    if host is None:
        return None
    signed, absent = toolkits.watched()
    try:
        # Signed before the choice is made again, so that a later change shows.
        unchanged = [[path, *Signature.of(path)] for path in signed]
    except OSError:
        return None
    torch_cuda = None if host.torch is None else host.torch.cuda
    search = _search(memory, torch_cuda, host, ask=False)
    if search is None or search.taken != compiler or not toolkits.present():
        return None
    if any(map(os.path.lexists, absent)):
        return None  # another file is in a place where an nvcc could be
    if not search.lasting:
        return None
    absent += search.absent
    if settings.ccbin:
        # By the name that was given: another program of that name may come first on PATH.
        with override(cxx=(settings.ccbin,)):
            if hosts.recall(memory) is None:  # it records its own evidence
                return None
    return {"unchanged": unchanged + search.signatures, "absent": absent}


def mismatch_note(compiler: DeviceCompiler, torch_cuda: str | None) -> str:
    """A note for a toolkit whose version differs from torch's; empty if it is the same."""
    if torch_cuda is None or release(compiler.version) == release(torch_cuda):
        return ""
    what = (
        f"CUDA {compiler.version} in {compiler.home} compiles for a torch that was built with "
        f"CUDA {torch_cuda}"
    )
    if release(compiler.version)[0] == release(torch_cuda)[0]:
        return f"{what}: versions of one major are compatible"
    return f"{what}, another major version, because {origin_of('skip_cuda_check')[1]} is set"


def unfound_note(compiler: DeviceCompiler) -> str:
    """A note on places that variables name and that have no nvcc; empty if there are none."""
    absent = [f"{place.origin}: there is no {place.nvcc}" for place in toolkits.unfound()]
    return "; ".join([*absent, f"{compiler.home} is used"]) if absent else ""


# The choice


def _search(
    memory: tuple[str, ...], torch_cuda: str | None, host: Toolchain, *, ask: bool
) -> _Search | None:
    """Look at every toolkit. None if ``ask`` is false and a probe is not remembered."""
    partner = _partner(memory, host, ask=ask)
    if partner is None:
        return None
    found = toolkits.survey(memory, partner.cxx, ask=ask)
    if found is None:
        return None
    refusals = [each.record["refused"] for each in found]
    working = [place for place, refused in enumerate(refusals) if not refused]
    for place in working:
        refusals[place] = cuda_version.misfit(found[place].record["version"], torch_cuda)
    ranked = sorted(
        (place for place in working if not refusals[place]),
        key=lambda place: cuda_version.distance(found[place].record["version"], torch_cuda),
    )
    signatures = [row for each in found for row in each.record["signatures"]]
    taken, unsupported, wheels = None, "", wheel_headers.NONE
    for place in ranked:
        if taken is not None:
            refusals[place] = _outranked(found[place], taken, torch_cuda)
            continue
        probed = pair(memory, found[place], partner, ask=ask)
        if probed is None:
            return None
        signatures += probed["signatures"]
        refusals[place] = probed["refused"]
        if not probed["refused"]:
            own = partner.cxx == host.cxx
            taken = _compiler(found[place], probed, None if own else partner)
            wheels = wheel_headers.beside(host.torch, taken.include_dirs, found[place].release)
            taken = taken._replace(wheel_include_dirs=wheels.directories)
        elif probed["unsupported"]:
            unsupported = unsupported or probed["refused"]
    candidates = [
        Candidate(place.nvcc, place.origin, "no such program") for place in toolkits.unfound()
    ] + [
        Candidate(each.label, each.place.origin, refused, each.record["version"])
        for each, refused in zip(found, refusals, strict=True)
    ]
    return _Search(
        taken,
        bool(found),
        candidates,
        mismatched=bool(working) and not ranked,
        unsupported=unsupported,
        signatures=signatures + wheels.signatures,
        absent=[*(path for each in found for path in each.record["absent"]), *wheels.absent],
        lasting=not any(each.record["until"] for each in found),
    )


def _partner(memory: tuple[str, ...], host: Toolchain, *, ask: bool) -> Toolchain | None:
    """The compiler that nvcc uses for host code: ``NVCC_CCBIN``, else the toolchain's own."""
    wanted, origin = origin_of("ccbin")
    if not wanted:
        return host
    with override(cxx=(wanted,)):
        if not ask:
            return hosts.recall(memory)
        try:
            return hosts.choose(memory)
        except ToolchainError as error:
            raise ToolchainError(
                f"nvcc cannot use {wanted} as its host compiler",
                why=error.why.replace(" (call): ", f" ({origin}): ", 1),
                hint=f"unset {origin}" if origin.isupper() else "",
            ) from None


def _outranked(toolkit: Toolkit, taken: DeviceCompiler, torch_cuda: str | None) -> str:
    if torch_cuda is None or toolkit.record["version"] == taken.version:
        return f"found after {taken.home}"
    return f"CUDA {taken.version} in {taken.home} is nearer to torch's {torch_cuda}"


def _failure(
    search: _Search, memory: tuple[str, ...], torch_cuda: str | None, host: Toolchain
) -> ToolchainError:
    why = "\n".join(f"{each.path} ({each.origin}): {each.refused}" for each in search.candidates)
    if not search.found:
        return cuda_version.missing(torch_cuda)
    if search.mismatched and torch_cuda is not None:
        return cuda_version.mismatch(torch_cuda, why)
    if search.unsupported:
        others = _others(memory, torch_cuda, host)
        return ToolchainError(
            f"nvcc does not support the host compiler {settings.ccbin or host.cxx}",
            why="\n".join([why, *(f"{path} is supported" for path in others)]),
            hint=f"NVCC_CCBIN={shlex.quote(others[0])}"
            if others
            else _installing(search.unsupported),
        )
    named, origin = origin_of("cuda_home")
    said = next((each.version for each in search.candidates if each.version), "")
    return ToolchainError(
        "no CUDA toolkit can be used here",
        why=why,
        hint=f"unset {origin}" if named else cuda_version.fitting(torch_cuda or said),
    )


def _installing(objection: str) -> str:
    """The command for the newest compiler that nvcc's objection allows."""
    number = objection.partition("later than ")[2].partition(" ")[0]
    if number.isdigit():
        return f"apt-get install g++-{number} && export NVCC_CCBIN=g++-{number}"
    return "export NVCC_CCBIN=g++-12    (or whichever is in that range)"


def _others(memory: tuple[str, ...], torch_cuda: str | None, host: Toolchain) -> list[str]:
    """Compilers on PATH that nvcc supports, the newest first."""
    works = []
    for path in _on_path_by_version():
        with override(ccbin=path):
            try:
                search = _search(memory, torch_cuda, host, ask=True)
            except ToolchainError:
                continue  # this compiler cannot be used here
        if search is not None and search.taken is not None:
            works.append(path)
    return works


def _on_path_by_version() -> list[str]:
    """``g++-14``, ``g++-13``, … and ``clang++-18``, … of PATH, in this order."""
    found: dict[str, tuple[bool, int, str]] = {}
    for directory in settings.path:
        try:
            names = os.listdir(directory)
        except OSError:
            continue  # PATH often names directories that do not exist
        for name in names:
            stem, _, number = name.rpartition("-")
            if stem in ("g++", "clang++") and number.isdigit():
                path = os.path.join(directory, name)
                found.setdefault(os.path.realpath(path), (stem != "g++", -int(number), path))
    return [path for _, _, path in sorted(found.values())]


def _compiler(toolkit: Toolkit, probed: dict[str, Any], ccbin: Toolchain | None) -> DeviceCompiler:
    record, identity = toolkit.record, probed["identity"]
    if ccbin is not None:
        identity = key("toolchain", (identity, ccbin.identity))
    return DeviceCompiler(
        family="nvcc",
        path=record["program"],
        home=record["home"],
        version=record["version"],
        identity=identity,
        archs=tuple(record["archs"]),
        accepts=frozenset(probed["accepts"]),
        include_dirs=tuple(record["include_dirs"]),
        library_dirs=tuple(record["library_dirs"]),
        host="" if ccbin is None else ccbin.cxx,
    )


# The probe of one toolkit with one host compiler

# A flag is listed in `accepts` if this nvcc accepts it. The value is the arguments to try.
_FLAGS = {
    "-std=c++17": ("-std=c++17",),
    "-std=c++20": ("-std=c++20",),
    "--threads": ("--threads", "2"),
    "--compress-mode=size": ("--compress-mode=size",),
    "--objdir-as-tempdir": ("--objdir-as-tempdir",),
}
_RUNTIME = "libcudart_static.a"
_AT_ONCE = 4  # questions in parallel; each is a process or the digest of a file
_SOURCE = """\
#include <cuda_runtime.h>
__global__ void opkiln_probe() {}
cudaError_t opkiln_launch() { opkiln_probe<<<1, 1>>>(); return cudaGetLastError(); }
"""


def pair(
    memory: tuple[str, ...], toolkit: Toolkit, host: Toolchain, *, ask: bool
) -> dict[str, Any] | None:
    """What a toolkit can do with a host compiler.

    None if ``ask`` is false and the probe is not remembered.

    ``refused`` is empty for a pair that can be used. Such a pair has ``identity`` (of the toolkit
    alone) and ``accepts``. ``unsupported`` says that nvcc rejects the host compiler.
    """
    subject = probing.asked(f"nvcc {toolkit.record['program']} by {host.cxx} {host.identity}")
    record = probing.recall(memory, subject)
    if record is None and ask:
        asked_at = time.time_ns()
        try:
            record = _probe(toolkit.record, host.cxx, in_parts=toolkit.place.origin == "PyPI")
        except (ToolchainError, BuildTimeout) as error:
            # It answered a moment ago, so it was removed since, or the machine is overloaded.
            return {**_refusal(f"{error.what}: {error.why}"), "signatures": []}
        except OSError as error:
            return {**_refusal(f"cannot be run: {error}"), "signatures": []}
        files = [path for _, path in toolkit.record["parts"]] + toolkit.record["directories"]
        probing.remember(memory, subject, record, files, asked_at)
        record = {**record, "signatures": []}
    return record


def _probe(toolkit: dict[str, Any], cxx: str, *, in_parts: bool) -> dict[str, Any]:
    from concurrent.futures import ThreadPoolExecutor

    from opkiln.process import run

    with probing.scratch() as scratch, ThreadPoolExecutor(_AT_ONCE) as pool:

        def ask(*argv: str) -> tuple[int, str]:
            done = run(argv, cwd=scratch, tmpdir=scratch, timeout=120)
            return done.returncode, done.output

        def accepts(flags: tuple[str, ...]) -> bool:
            # --dryrun reads and checks the options, and compiles nothing.
            dry = ("--dryrun", *flags, "-x", "cu", "-c", os.devnull)
            return ask(toolkit["program"], "-ccbin", cxx, *dry)[0] == 0

        tried = {**_FLAGS, **_variants(toolkit["archs"])}
        refusal = pool.submit(_compiles if in_parts else _preprocesses, ask, toolkit, cxx, scratch)
        identity = pool.submit(_identity, toolkit)
        taken = list(pool.map(accepts, tried.values()))
        if (refused := refusal.result()) is not None:
            return refused
        return {
            "refused": "",
            "unsupported": False,
            "identity": identity.result(),
            "accepts": [name for name, took in zip(tried, taken, strict=True) if took],
        }


def _preprocesses(ask: Ask, toolkit: dict[str, Any], cxx: str, scratch: str) -> Refusal:
    """nvcc's own headers refuse a host compiler that it does not support."""
    source = _written(scratch)
    status, said = ask(toolkit["program"], "-ccbin", cxx, "-E", source, "-o", os.devnull)
    if status != 0:
        reason = _first_error(said)
        return _refusal(f"does not compile with {cxx}: {reason}", "unsupported" in reason)
    if not any(_has_runtime(path) for path in toolkit["library_dirs"]):
        return _refusal(f"has no {_RUNTIME}")
    return None


def _compiles(ask: Ask, toolkit: dict[str, Any], cxx: str, scratch: str) -> Refusal:
    """Checks that its parts work together: the compiler, the assembler, the runtime."""
    source, output = _written(scratch), os.path.join(scratch, "probe.o")
    status, said = ask(
        toolkit["program"], "-ccbin", cxx, f"-arch=sm_{_number(toolkit['archs'][0])}",
        "-Xcompiler", "-fPIC", "-c", source, "-o", output,
    )  # fmt: skip
    if status != 0:
        reason = _first_error(said)
        return _refusal(f"does not compile with {cxx}: {reason}", "unsupported" in reason)
    status, said = ask(
        cxx, "-shared", output, "-o", os.path.join(scratch, "probe.so"),
        *(f"-L{path}" for path in toolkit["library_dirs"]),
        "-lcudart_static", "-ldl", "-lrt", "-lpthread",
    )  # fmt: skip
    if status != 0:
        return _refusal(f"does not link with its static runtime: {_first_error(said)}")
    return None


def _written(scratch: str) -> str:
    source = os.path.join(scratch, "probe.cu")
    with open(source, "w") as file:
        file.write(_SOURCE)
    return source


def _has_runtime(directory: str) -> bool:
    return os.path.isfile(os.path.join(directory, _RUNTIME))


def _identity(toolkit: dict[str, Any]) -> str:
    # Without the directories: the same files in another place are the same compiler.
    digests = [(role, sha256_file(path)) for role, path in toolkit["parts"]]
    return key("toolchain", ("nvcc", toolkit["banner"], digests))


def _variants(archs: list[str]) -> dict[str, tuple[str, ...]]:
    """How to try ``90a``, ``100f`` and so on, which nvcc may accept but does not list."""
    names = [_number(arch) + suffix for arch in archs for suffix in "af"]
    return {name: ("-gencode", f"arch=compute_{name},code=sm_{name}") for name in names}


def _number(arch: str) -> str:
    return arch.replace(".", "")


def _refusal(reason: str, unsupported: bool = False) -> dict[str, Any]:
    return {"refused": reason, "unsupported": unsupported}


def _first_error(text: str) -> str:
    """The line that says what is wrong, without nvcc's advice to ignore it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = (line for line in lines if "error" in line or "fatal" in line or "cannot" in line)
    line = next(telling, lines[-1] if lines else "it printed nothing")
    return line.rpartition("#error -- ")[2].partition(" The nvcc flag")[0]
