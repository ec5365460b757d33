"""spec + target + toolchain -> plan: the exact argv and environment of every step.

A pure function: it reads no environment, no file system and no clock. Paths below the source root,
torch, Python's headers and the staging directory are ``Anchored``, so the same op gives the same
plan wherever its package is installed and wherever a build is staged.
"""

from __future__ import annotations

import os
import posixpath

from opkiln.arch import cpu
from opkiln.digest import key
from opkiln.errors import SpecError
from opkiln.model import (
    ABI_NONE,
    ABI_STABLE,
    ABI_TORCH,
    EXECUTABLE,
    LIBRARY,
    PLAIN,
    PYTHON,
    Anchored,
    Arg,
    OpSpec,
    Plan,
    Step,
    Target,
    Toolchain,
)
from opkiln.toolchain import torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CXX_SOURCES = (".cpp", ".cc", ".cxx", ".c++", ".C", ".cp", ".CPP", ".c")

# How flags begin that make a compiler run other programs, load code, read its command line or a
# profile from a file that no key sees, stop half-way, or write a file that nobody asked for. A
# depfile that lands elsewhere would make a build look as if it depended on nothing.
_REFUSED_FLAGS = (
    "@", "-wrapper", "--wrapper", "-specs", "--specs", "--config", "-fplugin", "-fpass-plugin",
    "-B", "--prefix", "-fuse-ld=/", "--ld-path", "-ccc-", "--gcc-toolchain", "-no-integrated-cpp",
    "-M", "--dependencies", "--write-", "--user-dependencies", "-o", "--output", "-###", "-E",
    "--preprocess", "-S", "--assemble", "-fsyntax-only", "-x", "--language", "-save-temps",
    "--save-temps", "-dump", "-fdump", "-aux-info", "-time=", "-fprofile-use", "-fauto-profile",
)  # fmt: skip
# The same for what is handed on to the preprocessor, the assembler or the linker.
_REFUSED_PARTS = (
    "@", "-plugin", "--plugin", "-load", "-add-plugin", "-o", "--output", "-M", "--M",
    "--out-implib", "--dependency-file", "-dependency-file",
)  # fmt: skip
_JOINED = ("-Wl,", "-Wa,", "-Wp,")
_HANDED_ON = (
    "-Xlinker", "-Xassembler", "-Xpreprocessor", "-Xclang", "--for-linker", "--for-assembler",
)  # fmt: skip
_PATH_FLAGS = ("-I", "-isystem", "-iquote", "-idirafter", "-L", "-include")

_ENVIRONMENT = (("LC_ALL", "C"), ("SOURCE_DATE_EPOCH", "0"))

_MEMORY = {ABI_STABLE: 700 << 20, ABI_TORCH: 2500 << 20, ABI_NONE: 400 << 20}


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
        if not source.endswith(_CXX_SOURCES):
            raise SpecError(
                f"op {spec.name}: no compiler is known for the source {source!r}",
                why="C++ sources end in " + ", ".join(_CXX_SOURCES),
            )
    _check_flags(spec.name, spec.cxx_args)
    _check_flags(spec.name, spec.ldflags)
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


def _check_flags(op: str, flags: tuple[str, ...], variable: str = "") -> None:
    before = ""
    for flag in flags:
        if not flag or "\0" in flag or any("\ud800" <= char <= "\udc7f" for char in flag):
            raise SpecError(f"op {op}: the flag {flag!r} is empty or cannot be passed to a program")
        option, _, value = flag.partition("=")
        if flag.startswith(_JOINED):
            refused = any(part.startswith(_REFUSED_PARTS) for part in flag.split(",")[1:])
        elif before in _HANDED_ON:
            refused = flag.startswith(_REFUSED_PARTS)
        elif option in _HANDED_ON:
            refused = value.startswith(_REFUSED_PARTS)
        else:
            refused = flag.startswith(_REFUSED_FLAGS)
        if refused:
            raise SpecError(
                f"op {op}: the flag {flag!r} is not taken",
                why="it would start another program, redirect an output or read what no key sees, "
                "past the plan",
                hint=f"unset {variable}" if variable else "",
            )
        before = flag


def make(spec: OpSpec, target: Target, toolchain: Toolchain) -> Plan:
    """The plan. Raises SpecError for a declaration that cannot be built."""
    check(spec)
    flags = dict(target.flags)
    for name in ("cppflags", "cxxflags", "ldflags"):
        _check_flags(spec.name, flags.get(name, ()), name.upper())
    compiles = tuple(_compile(spec, target, toolchain, flags, source) for source in spec.sources)
    link = _link(spec, toolchain, flags, tuple(step.output for step in compiles))
    return Plan(spec, target, toolchain, (*compiles, link), _ENVIRONMENT, link.output)


def anchors(plan: Plan, stage: str) -> dict[str, str]:
    """The directories that a plan's anchors stand for on this machine."""
    return anchors_of(plan.spec, plan.toolchain) | {"stage": stage}


def anchors_of(spec: OpSpec, toolchain: Toolchain | None) -> dict[str, str]:
    """The anchors that do not depend on a build."""
    places = {"src": spec.root, "abs": ""}
    if toolchain is not None:
        places["python"] = toolchain.python_include
        if toolchain.torch is not None:
            places["torch"] = toolchain.torch.path
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


def author_command(plan: Plan, places: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(compile flags, link flags) for a build system that names files and outputs itself."""
    compiling = argv(plan.steps[0], places)
    linking = argv(plan.steps[-1], places)
    tools = {plan.toolchain.cxx, plan.toolchain.launcher}
    start = compiling.index("-MD")
    stage = [part for part in compiling[:start] if "=/opkiln/build" not in part]
    objects = {render(Anchored("", "stage", name), places) for name in plan.steps[-1].inputs}
    flags = [part for part in linking[:-2] if part not in objects and part != "-shared"]
    return [p for p in stage if p not in tools], [p for p in flags if p not in tools]


def _anchored(spec: OpSpec, path: str, prefix: str = "") -> Anchored:
    if not os.path.isabs(path):
        return Anchored(prefix, "src", posixpath.normpath(path))
    root = spec.root.rstrip("/") + "/"
    if path.startswith(root):
        return Anchored(prefix, "src", posixpath.normpath(path[len(root) :]))
    return Anchored(prefix, "abs", path)


def _author_flags(spec: OpSpec, flags: tuple[str, ...]) -> Iterator[Arg]:
    """An author's flags, with the paths below the source root anchored."""
    for flag in flags:
        prefix = next((p for p in _PATH_FLAGS if flag.startswith(p) and flag != p), None)
        path = flag[len(prefix) :] if prefix else ""
        yield _anchored(spec, path, prefix or "") if os.path.isabs(path) else flag


def object_name(source: str) -> str:
    """The object of a source, named after its path: two files of one name do not collide."""
    plain = (
        char if char.isascii() and (char.isalnum() or char in "_.") else "-" for char in source
    )
    flat = "".join(plain).lstrip("-")[-80:]
    return f"{flat}-{key('source', source)[:8]}.o"


def _compile(
    spec: OpSpec,
    target: Target,
    toolchain: Toolchain,
    flags: Mapping[str, tuple[str, ...]],
    source: str,
) -> Step:
    output = object_name(source)
    depfile = output[:-2] + ".d"
    stable = spec.abi == ABI_STABLE
    arguments: list[Arg] = [toolchain.launcher] if toolchain.launcher else []
    arguments += [toolchain.cxx, f"-std={spec.std}"]
    arguments += ["-O0", "-g3"] if target.debug else ["-O3", "-DNDEBUG"]
    if spec.kind != EXECUTABLE:
        arguments.append("-fPIC")
    if spec.vectorize:
        chosen = cpu.CPU(target.cpu, target.cpu_features)
        arguments += cpu.flags(chosen, target.machine, toolchain.accepts)
    arguments += [
        # The same bytes wherever the sources and the build lie: __FILE__, debug information.
        Anchored("-ffile-prefix-map=", "src", "", "=/opkiln/src"),
        Anchored("-ffile-prefix-map=", "stage", "", "=/opkiln/build"),
    ]
    if toolchain.family == "gcc":
        arguments.append(f"-frandom-seed={output}")
    if spec.kind == PYTHON:
        arguments.append(f"-DTORCH_EXTENSION_NAME={spec.name}")
    if spec.abi == ABI_TORCH:
        abi = 1 if toolchain.torch is None or toolchain.torch.cxx11_abi else 0
        arguments += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        if spec.kind != PYTHON:
            arguments.append(f"-DTORCH_EXTENSION_NAME={spec.name}")
    elif stable:
        arguments.append(torch_sdk.STABLE_DEFINE)
    arguments += flags.get("cppflags", ())
    arguments += _author_flags(spec, spec.cxx_args)
    arguments += flags.get("cxxflags", ())
    arguments += [_anchored(spec, path, "-I") for path in spec.include_dirs]
    arguments += [f"-I{path}" for path in flags.get("cpath", ())]
    if spec.abi != ABI_NONE:
        arguments.append(Anchored("-isystem", "torch", "include"))
    if spec.abi == ABI_TORCH:
        arguments.append(Anchored("-isystem", "torch", "include/torch/csrc/api/include"))
    if spec.kind == PYTHON or spec.abi == ABI_TORCH:
        arguments.append(Anchored("-isystem", "python", ""))
    arguments += [f"-isystem{path}" for path in flags.get("cplus_include_path", ())]
    arguments += ["-MD", "-MF", Anchored("", "stage", depfile)]
    arguments += ["-c", _anchored(spec, source), "-o", Anchored("", "stage", output)]
    return Step(
        kind="compile",
        output=output,
        argv=tuple(arguments),
        source=source,
        depfile=depfile,
        memory=_MEMORY[spec.abi],
    )


_TORCH_LIBRARIES = {
    (ABI_STABLE, LIBRARY): ("-ltorch_cpu",),
    (ABI_STABLE, PYTHON): ("-ltorch_cpu",),
    (ABI_STABLE, EXECUTABLE): ("-ltorch_cpu",),
    (ABI_TORCH, LIBRARY): ("-lc10", "-ltorch_cpu", "-ltorch"),
    (ABI_TORCH, PYTHON): ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    (ABI_TORCH, EXECUTABLE): ("-lc10", "-ltorch_cpu", "-ltorch"),
    (ABI_TORCH, PLAIN): ("-lc10", "-ltorch_cpu", "-ltorch"),
}


def output_name(spec: OpSpec) -> str:
    """The file name of the artifact."""
    return spec.name if spec.kind == EXECUTABLE else f"{spec.name}.so"


def _link(
    spec: OpSpec,
    toolchain: Toolchain,
    flags: Mapping[str, tuple[str, ...]],
    objects: tuple[str, ...],
) -> Step:
    output = output_name(spec)
    arguments: list[Arg] = [toolchain.cxx]
    if spec.kind != EXECUTABLE:
        arguments.append("-shared")
    arguments += [Anchored("", "stage", name) for name in objects]
    arguments += _author_flags(spec, spec.ldflags)
    arguments += [f"-l{name}" for name in spec.libraries]
    if spec.abi != ABI_NONE:
        # By soname and without an rpath: torch has its libraries loaded before any op is.
        arguments.append(Anchored("-L", "torch", "lib"))
        arguments += _TORCH_LIBRARIES.get((spec.abi, spec.kind), ())
        if spec.kind == EXECUTABLE and toolchain.torch is not None:
            # A program has no torch around it. Its path is part of the bytes, so of the key, too.
            arguments.append(f"-Wl,-rpath,{toolchain.torch.path}/lib")
    arguments += [f"-L{path}" for path in flags.get("library_path", ())]
    arguments += flags.get("ldflags", ())
    arguments += ["-o", Anchored("", "stage", output)]
    return Step(kind="link", output=output, argv=tuple(arguments), inputs=objects, memory=500 << 20)
