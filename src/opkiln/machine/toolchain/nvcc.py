"""nvcc: which CUDA toolkit is used, why, and what it can do with a host compiler.

The first build on a machine waits for the probe, so its questions are asked in parallel. For a
toolkit that was installed as a whole, the probe only preprocesses: that shows whether nvcc accepts
the host compiler. Wheels are upgraded one by one and may not fit each other, so for a toolkit made
of wheels the probe also compiles and links.
"""

from __future__ import annotations

import os
import shlex
from typing import Any

from opkiln.base.build_model import NVCC, DeviceCompiler, Toolchain
from opkiln.base.digest import key
from opkiln.errors import BuildTimeout, ToolchainError
from opkiln.machine.facts import digest_of
from opkiln.machine.toolchain import cuda_version, find, probing, toolkits
from opkiln.machine.toolchain import host as hosts
from opkiln.machine.toolchain.find import Compiler, Search
from opkiln.machine.toolchain.toolkits import Toolkit
from opkiln.machine.toolchain.torch_sdk import release
from opkiln.settings import origin_of, override, settings

Refusal = dict[str, Any] | None  # a record with the reason; None if nothing is wrong


def available() -> bool:
    """Whether any nvcc is found. Starts no process."""
    return bool(toolkits.find_nvcc())


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


# The choice


def search(
    memory: tuple[str, ...], wanted: str | None, host: Toolchain, *, ask: bool
) -> Search | None:
    """Every toolkit. The one that fits torch's CUDA best (``find.distance``) is taken.

    The failure is MissingCUDAException if there is no toolkit, CUDAMismatchException if all have
    another major version than torch (unless ``DS_SKIP_CUDA_CHECK`` is set), ToolchainError if those
    that fit do not work.
    """
    partner = _partner(memory, host, ask=ask)
    found = None if partner is None else toolkits.list_toolkits(memory, partner.cxx, ask=ask)
    if partner is None or found is None:
        return None
    listed, ranked = find.rank(
        [Compiler(each.label, each.place.origin) for each in found],
        [each.record for each in found], wanted,
        lambda record: cuda_version.misfit(record["version"], wanted),
    )  # fmt: skip
    mismatched = not ranked and not all(each.record["refused"] for each in found)
    taken, best, unsupported = None, None, ""
    for place in ranked:
        if best is not None:
            listed[place] = find.demote(listed[place], best, "CUDA", wanted)
            continue
        probed = pair(memory, found[place], partner, ask=ask)
        if probed is None:
            return None
        listed[place] = listed[place]._replace(refused=probed["refused"])
        if not probed["refused"]:
            best, taken = listed[place], _compiler(found[place], probed, partner, host)
        elif probed.get("unsupported"):
            unsupported = unsupported or probed["refused"]
    unfound = ((each.nvcc, each.origin) for each in toolkits.list_unfound())
    candidates = [*(Compiler(*each, "no such program") for each in unfound), *listed]

    def failure() -> ToolchainError:
        why = find.list_refusals(candidates)
        if not found:
            return cuda_version.missing_error(wanted)
        if mismatched and wanted is not None:
            return cuda_version.mismatch_error(wanted, why)
        if unsupported:
            others = _list_supported(memory, wanted, host)
            newest = f"NVCC_CCBIN={shlex.quote(others[0])}" if others else ""
            return ToolchainError(
                f"nvcc does not support the host compiler {settings.ccbin or host.cxx}",
                why="\n".join([why, *(f"{path} is supported" for path in others)]),
                hint=newest or _install_command(unsupported),
            )
        named, origin = origin_of("cuda_home")
        said = next((each.version for each in candidates if each.version), "")
        return ToolchainError(
            "no CUDA toolkit can be used here",
            why=why,
            hint=f"unset {origin}" if named else cuda_version.install_command(wanted or said),
        )

    return Search(taken, candidates, failure)


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


def _install_command(objection: str) -> str:
    """The command for the newest compiler that nvcc's objection allows."""
    number = objection.partition("later than ")[2].partition(" ")[0]
    if number.isdigit():
        return f"apt-get install g++-{number} && export NVCC_CCBIN=g++-{number}"
    return "export NVCC_CCBIN=g++-12    (or whichever is in that range)"


def _list_supported(memory: tuple[str, ...], torch_cuda: str | None, host: Toolchain) -> list[str]:
    """Compilers on PATH that nvcc supports, the newest first."""
    works = []
    for path in _list_host_compilers():
        with override(ccbin=path):
            try:
                found = search(memory, torch_cuda, host, ask=True)
            except ToolchainError:
                continue  # this compiler cannot be used here
        if found is not None and found.taken is not None:
            works.append(path)
    return works


def _list_host_compilers() -> list[str]:
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


def _compiler(
    toolkit: Toolkit, probed: dict[str, Any], partner: Toolchain, host: Toolchain
) -> DeviceCompiler:
    found = {**toolkit.record, **probed, "family": NVCC, "path": toolkit.record["program"]}
    if partner.cxx != host.cxx:
        found["host"] = partner.cxx
        found["identity"] = key("toolchain", (probed["identity"], partner.identity))
    wheels = toolkits.find_wheels(host.torch, found["include_dirs"], toolkit.release)
    return find.make_compiler(found, wheel_include_dirs=wheels.directories)


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
    alone) and ``accepts``. ``unsupported`` is true if nvcc rejects the host compiler.
    """
    record, cxx = toolkit.record, host.cxx
    subject = probing.make_subject(f"nvcc {record['program']} by {cxx} {host.identity}")

    def question() -> tuple[dict[str, Any], list[str]]:
        files = [path for _, path in record["parts"]] + record["directories"]
        return _probe(record, cxx, in_parts=toolkit.place.origin == "PyPI"), files

    try:
        return probing.recall_or_ask(memory, subject, question if ask else None)
    except (ToolchainError, BuildTimeout) as error:
        # It answered a moment ago, so it was removed since, or the machine is overloaded.
        return probing.refusal(f"{error.what}: {error.why}")
    except OSError as error:
        return probing.refusal(f"cannot be run: {error}")


def _probe(toolkit: dict[str, Any], cxx: str, *, in_parts: bool) -> dict[str, Any]:
    from concurrent.futures import ThreadPoolExecutor

    with probing.scratch() as scratch, ThreadPoolExecutor(_AT_ONCE) as pool:
        ask = probing.make_ask(cwd=scratch, tmpdir=scratch, timeout=120)

        def accepts(flags: tuple[str, ...]) -> bool:
            # --dryrun reads and checks the options, and compiles nothing.
            dry = ("--dryrun", *flags, "-x", "cu", "-c", os.devnull)
            return ask(toolkit["program"], "-ccbin", cxx, *dry)[0] == 0

        tried = {**_FLAGS, **_variants(toolkit["archs"])}
        source = os.path.join(scratch, "probe.cu")
        with open(source, "w") as file:
            file.write(_SOURCE)
        tries = _try_compiling if in_parts else _try_preprocessing
        refusal = pool.submit(tries, ask, toolkit, cxx, source)
        identity = pool.submit(_identity, toolkit)
        taken = list(pool.map(accepts, tried.values()))
        if (refused := refusal.result()) is not None:
            return refused
        return {
            "refused": "",
            "identity": identity.result(),
            "accepts": [name for name, took in zip(tried, taken, strict=True) if took],
        }


def _try_preprocessing(ask: probing.Ask, toolkit: dict[str, Any], cxx: str, source: str) -> Refusal:
    """Checks nvcc with its headers, which refuse a host compiler that it does not support."""
    if refused := _run_nvcc(ask, toolkit, cxx, "-E", source, "-o", os.devnull):
        return refused
    if not any(os.path.isfile(os.path.join(path, _RUNTIME)) for path in toolkit["library_dirs"]):
        return probing.refusal(f"has no {_RUNTIME}")
    return None


def _try_compiling(ask: probing.Ask, toolkit: dict[str, Any], cxx: str, source: str) -> Refusal:
    """Checks that its parts work together: the compiler, the assembler, the runtime."""
    arch, output = f"-arch=sm_{toolkit['archs'][0].replace('.', '')}", f"{source}.o"
    compiling = (arch, "-Xcompiler", "-fPIC", "-c", source, "-o", output)
    if refused := _run_nvcc(ask, toolkit, cxx, *compiling):
        return refused
    search = (f"-L{path}" for path in toolkit["library_dirs"])
    libraries = ("-lcudart_static", "-ldl", "-lrt", "-lpthread")
    status, said = ask(cxx, "-shared", output, "-o", f"{source}.so", *search, *libraries)
    if status != 0:
        return probing.refusal(f"does not link with its static runtime: {_first_error(said)}")
    return None


def _run_nvcc(ask: probing.Ask, toolkit: dict[str, Any], cxx: str, *arguments: str) -> Refusal:
    status, said = ask(toolkit["program"], "-ccbin", cxx, *arguments)
    if status == 0:
        return None
    reason = _first_error(said)
    what = f"does not compile with {cxx}: {reason}"
    return probing.refusal(what, unsupported="unsupported" in reason)


def _identity(toolkit: dict[str, Any]) -> str:
    # Without the directories: the same files in another place are the same compiler.
    digests = [(role, digest_of(path)) for role, path in toolkit["parts"]]
    return key("toolchain", ("nvcc", toolkit["banner"], digests))


def _variants(archs: list[str]) -> dict[str, tuple[str, ...]]:
    """How to try ``90a``, ``100f`` and so on, which nvcc may accept but does not list."""
    names = [arch.replace(".", "") + suffix for arch in archs for suffix in "af"]
    return {name: ("-gencode", f"arch=compute_{name},code=sm_{name}") for name in names}


def _first_error(text: str) -> str:
    """The line that says what is wrong, without nvcc's advice to ignore it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = (line for line in lines if "error" in line or "fatal" in line or "cannot" in line)
    line = next(telling, lines[-1] if lines else "it printed nothing")
    return line.rpartition("#error -- ")[2].partition(" The nvcc flag")[0]
