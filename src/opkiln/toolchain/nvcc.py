"""nvcc: the choice among the toolkits of this machine, and what it rests on."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from opkiln.digest import Signature, key
from opkiln.errors import ToolchainError
from opkiln.model import DeviceCompiler, Toolchain
from opkiln.settings import origin_of, override, settings
from opkiln.toolchain import cuda_version, nvccprobe, toolkits, wheel_headers
from opkiln.toolchain import host as hosts
from opkiln.toolchain.find import Candidate
from opkiln.toolchain.torch_sdk import release

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.toolchain.toolkits import Toolkit


class _Search(NamedTuple):
    """What a look at every toolkit came to."""

    taken: DeviceCompiler | None
    found: bool  # whether there is any
    candidates: list[Candidate]  # in the order of preference; the one taken is not refused
    mismatched: bool  # those that work are of another major version than torch's
    unsupported: str  # what nvcc says of a host compiler outside its range
    signatures: list[list[Any]]  # of the files that the outcome rests on
    absent: list[str]  # files that would change it
    lasting: bool  # it rests on nothing else


def recall(
    memory: tuple[str, ...], torch_cuda: str | None, host: Toolchain
) -> DeviceCompiler | None:
    """The nvcc that would be chosen, if it is remembered. Starts no process, writes nothing."""
    search = _search(memory, torch_cuda, host, ask=False)
    return None if search is None else search.taken


def choose(memory: tuple[str, ...], torch_cuda: str | None, host: Toolchain) -> DeviceCompiler:
    """The toolkit that fits torch's CUDA best, probed where nothing is remembered of it.

    The same version is best, then the nearest newer minor, then the nearest older one; with no
    CUDA in torch, the first that is found. Raises MissingCUDAException where there is no toolkit,
    CUDAMismatchException where every one is of another major version than torch's (unless
    ``OPKILN_SKIP_CUDA_CHECK``), ToolchainError where those that fit do not work.
    """
    search = _search(memory, torch_cuda, host, ask=True)
    assert search is not None
    if search.taken is not None:
        return search.taken
    raise _failure(search, memory, torch_cuda, host)


def candidates(memory: tuple[str, ...], torch_cuda: str | None, host: Toolchain) -> list[Candidate]:
    """Every toolkit that was considered, for reports; the one that is taken has no refusal."""
    search = _search(memory, torch_cuda, host, ask=True)
    assert search is not None
    return search.candidates


def available() -> bool:
    """Whether any nvcc is to be found, without asking it anything."""
    return bool(toolkits.present())


def evidence(memory: tuple[str, ...], compiler: DeviceCompiler) -> dict[str, list[Any]] | None:
    """What the choice of this nvcc rests on, as facts that ``stat`` can check.

    It is the choice for the host compiler and the torch of this machine, which have evidence of
    their own. None where another choice would be made by now, or where it rests on more.
    """
    host = hosts.recall(memory)
    if host is None:
        return None
    signed, absent = toolkits.watched()
    try:
        # Before the choice is made again: what appears from here on is in no signature.
        unchanged = [[path, *Signature.of(path)] for path in signed]
    except OSError:
        return None
    torch_cuda = None if host.torch is None else host.torch.cuda
    search = _search(memory, torch_cuda, host, ask=False)
    if search is None or search.taken != compiler or not toolkits.present():
        return None
    if any(map(os.path.lexists, absent)):
        return None  # something that is no nvcc is where one may be
    if not search.lasting:
        return None
    absent += search.absent
    if settings.ccbin:
        # By the word that was given: another program of that name may come first on PATH.
        with override(cxx=(settings.ccbin,)):
            if hosts.recall(memory) is None:  # which says what it rests on
                return None
    return {"unchanged": unchanged + search.signatures, "absent": absent}


def mismatch_note(compiler: DeviceCompiler, torch_cuda: str | None) -> str:
    """What is to be said, once, of a toolkit that is not torch's version; empty where it is."""
    if torch_cuda is None or release(compiler.version) == release(torch_cuda):
        return ""
    what = (
        f"CUDA {compiler.version} in {compiler.home} compiles for a torch that was built with "
        f"CUDA {torch_cuda}"
    )
    if release(compiler.version)[0] == release(torch_cuda)[0]:
        return f"{what}: versions of one major are compatible"
    return f"{what}, another major version, as {origin_of('skip_cuda_check')[1]} asks"


def unfound_note(compiler: DeviceCompiler) -> str:
    """What is to be said, once, of places that variables name and where no nvcc is; or nothing."""
    absent = [f"{place.origin}: there is no {place.nvcc}" for place in toolkits.unfound()]
    return "; ".join([*absent, f"{compiler.home} is used"]) if absent else ""


# The choice


def _search(
    memory: tuple[str, ...], torch_cuda: str | None, host: Toolchain, *, ask: bool
) -> _Search | None:
    """Look at every toolkit; None where something is not remembered and may not be asked."""
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
        probed = nvccprobe.pair(memory, found[place], partner, ask=ask)
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
    """The compiler that nvcc hands host code to: ``NVCC_CCBIN``, else the toolchain's own."""
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
            hint=f"NVCC_CCBIN={others[0]}" if others else _installing(search.unsupported),
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
    """Compilers on PATH, the newest first, that work where the one in use does not."""
    works = []
    for path in _on_path_by_version():
        with override(ccbin=path):
            try:
                search = _search(memory, torch_cuda, host, ask=True)
            except ToolchainError:
                continue  # it is no compiler that could be used here
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
            continue  # PATH names many a directory that is not there
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
