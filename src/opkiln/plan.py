"""spec + target + toolchain -> plan: the exact argv and environment of every step.

A pure function: it reads no environment, no file system and no clock. Paths below the source root,
torch, Python's headers and the staging directory are ``Anchored``, so the same op gives the same
plan wherever its package is installed and wherever a build is staged.
"""

from __future__ import annotations

import posixpath
from typing import NamedTuple

from opkiln.errors import SpecError
from opkiln.model import CUDA, Anchored, Arg, OpSpec, Plan, Step, Target, Toolchain
from opkiln.steps import flags, host, link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_ENVIRONMENT = (("LC_ALL", "C"), ("SOURCE_DATE_EPOCH", "0"))

_DEVICE_SOURCES = {CUDA: (".cu",)}  # the names by which a backend's compiler knows its sources


def check(spec: OpSpec) -> None:
    """Refuse a declaration that cannot be built or must not be. Raises SpecError."""
    if not (spec.name.isascii() and spec.name.isidentifier() and len(spec.name) <= 100):
        raise SpecError(
            f"{spec.name[:80]!r} cannot be the name of an op",
            why="a name is a C identifier of at most 100 characters: it becomes a file, a module "
            "and a macro",
        )
    if not spec.sources:
        raise SpecError(f"op {spec.name} declares no sources")
    for source in spec.sources:
        known = host.SOURCES + _DEVICE_SOURCES.get(spec.backend, ())
        if not source.endswith(known):
            raise SpecError(
                f"op {spec.name}: no compiler is known for the source {source!r}",
                why=f"sources for {spec.backend} end in " + ", ".join(known),
            )
    flags.check(spec.name, spec.cxx_args)
    flags.check(spec.name, spec.ldflags)
    if spec.backend == CUDA:
        flags.check_nvcc(spec.name, spec.device_args)
    elif spec.device_args:
        flags.check(spec.name, spec.device_args)
    for path in (spec.root, *spec.sources, *spec.include_dirs):
        # Depfiles have no escape for a newline, and -ffile-prefix-map=OLD=NEW none for a '='; some
        # compilers escape a colon, so that an escaped one cannot be told from one that is not.
        if any(each in path for each in ("\0", "\n", "=", "\\:")):
            raise SpecError(
                f"op {spec.name}: the path {path!r} cannot be built from",
                why="it holds a newline, a NUL, a '=' or a '\\:', which dependency files and "
                "prefix maps cannot express",
                hint="move the sources to a directory without these characters",
            )


def make(spec: OpSpec, target: Target, toolchain: Toolchain) -> Plan:
    """The plan. Raises SpecError for a declaration that cannot be built."""
    check(spec)
    users = dict(target.flags)
    for name in ("cppflags", "cxxflags", "ldflags"):
        flags.check(spec.name, users.get(name, ()), name.upper())
    if target.backend == CUDA:
        flags.check_nvcc(spec.name, users.get("cudaflags", ()), "CUDAFLAGS")
    compiles = tuple(_compile(spec, target, toolchain, users, source) for source in spec.sources)
    objects = tuple(step.output for step in compiles)
    last = link.link_step(spec, target, toolchain, users, objects)
    return Plan(spec, target, toolchain, (*compiles, last), _ENVIRONMENT, last.output)


def _compile(
    spec: OpSpec,
    target: Target,
    toolchain: Toolchain,
    users: Mapping[str, tuple[str, ...]],
    source: str,
) -> Step:
    if target.backend == CUDA and source.endswith(_DEVICE_SOURCES[CUDA]):
        from opkiln.steps import nvcc

        return nvcc.compile_step(spec, target, toolchain, users, source)
    return host.compile_step(spec, target, toolchain, users, source)


def anchors(plan: Plan, stage: str) -> dict[str, str]:
    """The directories that a plan's anchors stand for on this machine."""
    return anchors_of(plan.spec, plan.toolchain) | {"stage": stage, "threads": "1"}


def anchors_of(spec: OpSpec, toolchain: Toolchain | None) -> dict[str, str]:
    """The anchors that do not depend on a build."""
    places = {"src": spec.root, "abs": ""}
    if toolchain is not None:
        places["python"] = toolchain.python_include
        if toolchain.torch is not None:
            places["torch"] = toolchain.torch.path
        if toolchain.device is not None:
            places["toolkit"] = toolchain.device.home
    return places


def render(argument: Arg, places: Mapping[str, str]) -> str:
    """An argument as the compiler gets it."""
    if isinstance(argument, str):
        return argument
    place = places[argument.anchor]
    path = posixpath.join(place, argument.path) if argument.path else place
    return f"{argument.prefix}{path}{argument.suffix}"


def argv(step: Step, places: Mapping[str, str]) -> tuple[str, ...]:
    """A step's command line as it is run."""
    return tuple(render(argument, places) for argument in step.argv)


class Flags(NamedTuple):
    """A plan's flags for a build system that names files and outputs itself."""

    cxx: list[str]
    device: list[str]
    link: list[str]


def author_flags(plan: Plan) -> Flags:
    """The flags that a plan's steps have in common; those of one source alone are left out."""
    places = anchors(plan, "")
    *compiles, last = plan.steps
    device = plan.toolchain.device
    program = "" if device is None else device.path
    of_device = [step for step in compiles if program and program in step.argv]
    of_host = [step for step in compiles if step not in of_device]
    linking = argv(last, places)
    objects = {render(Anchored("", "stage", name), places) for name in last.inputs}
    return Flags(
        cxx=_common(plan, of_host, places),
        device=_common(plan, of_device, places),
        link=[part for part in linking[1:-2] if part not in objects and part != "-shared"],
    )


_OF_ONE_SOURCE = ("-frandom-seed=", "-Xcudafe=--orig_src_path_name=")


def _common(plan: Plan, steps: list[Step], places: Mapping[str, str]) -> list[str]:
    if not steps:
        return []
    parts = argv(steps[0], places)
    start = parts.index("-ccbin") + 2 if "-ccbin" in parts else parts.index(plan.toolchain.cxx) + 1
    return [
        part
        for part in parts[start : parts.index("-MD")]
        if "=/opkiln/build" not in part and not part.startswith(_OF_ONE_SOURCE)
    ]
