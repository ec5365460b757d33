"""Steps for g++ and clang++, and the common parts of all compilers' command lines: anchored paths,
flags, names of objects."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Iterator

from opkiln.base.build_model import Anchored, Arg, DeviceCompiler, Step, Target, Toolchain
from opkiln.base.digest import key
from opkiln.base.lazy import Record
from opkiln.base.model import (
    ABI_NONE,
    ABI_STABLE,
    ABI_TORCH,
    EXECUTABLE,
    PACKAGE,
    PYTHON,
    ROCM,
    OpSpec,
)
from opkiln.machine.arch import cpu
from opkiln.machine.toolchain import torch_sdk

SOURCES = (".cpp", ".cc", ".cxx", ".c++", ".C", ".cp", ".CPP", ".c")

# Macros that HIP's and torch's headers need, in device code and in C++ that includes them.
HIP_DEFINES = ("-D__HIP_PLATFORM_AMD__=1", "-DUSE_ROCM=1")

_MEMORY = {ABI_STABLE: 700 << 20, ABI_TORCH: 2500 << 20, ABI_NONE: 400 << 20}

_PATH_FLAGS = ("-I", "-isystem", "-iquote", "-idirafter", "-L", "-include")

# These make the output the same wherever torch, the sources and the build are: __FILE__, debug
# information. The compiler uses the last map that matches. The sources may appear below the staging
# directory, so the map for "src" comes last.
OPKILN_MAP = Anchored("-ffile-prefix-map=", "opkiln", "", "=/opkiln/opkiln")
STAGE_MAP = Anchored("-ffile-prefix-map=", "stage", "", "=/opkiln/build")
_TORCH_MAP = Anchored("-ffile-prefix-map=", "torch", "", "=/opkiln/torch")
_WHEELS_MAP = Anchored("-ffile-prefix-map=", "wheels", "", "=/opkiln/wheels")
_PREFIX_MAPS = (STAGE_MAP, Anchored("-ffile-prefix-map=", "src", "", "=/opkiln/src"))

# __TIMESTAMP__ is a source's modification time: a touch, or another checkout, would change the
# output. With these it is the date that __DATE__ gives, which SOURCE_DATE_EPOCH fixes.
TIMESTAMP = "-D__TIMESTAMP__=__DATE__"
REDEFINED = "-Wno-builtin-macro-redefined"


class PlanInputs(Record):
    """The inputs of all steps of a plan."""

    spec: OpSpec
    target: Target
    toolchain: Toolchain

    @property
    def device(self) -> DeviceCompiler:
        """The compiler of a backend that has one: a plan for it is made with its compiler."""
        assert self.toolchain.device is not None
        return self.toolchain.device

    def users(self, name: str) -> tuple[str, ...]:
        """The user's own flags or paths of this name: ``cxxflags``, ``cpath``."""
        return dict(self.target.flags).get(name, ())

    @property
    def device_flags(self) -> tuple[str, ...]:
        """The author's and the user's flags for the device compiler."""
        return (*self.spec.device_args, *self.users("cudaflags"))


def compile_cxx(inputs: PlanInputs, source: str) -> Step:
    """The step that compiles one C++ source."""
    spec, target, toolchain = inputs
    words: list[Arg] = [toolchain.launcher] if toolchain.launcher else []
    words += [toolchain.cxx, f"-std={spec.std}"]
    words += [*optimisation_flags(target), *position_flags(spec)]
    if spec.vectorize:
        chosen = cpu.CPU(target.cpu, target.cpu_features)
        words += cpu.flags(chosen, target.machine, toolchain.accepts)
    words += prefix_maps(spec, toolchain.device)
    words += reproducible_flags(toolchain, object_name(source))
    if target.backend == ROCM:
        words += HIP_DEFINES
    words += torch_defines(spec, toolchain)
    words += inputs.users("cppflags")
    words += author_flags(spec, spec.cxx_args)
    words += inputs.users("cxxflags")
    toolkit: list[Arg] = []
    if device := toolchain.device:
        toolkit += [anchor_in_toolkit(device, path, "-isystem") for path in device.include_dirs]
        toolkit += wheel_includes(spec, device, "-isystem")
    words += include_flags(inputs, *toolkit, *torch_includes(spec))
    words += op_header(spec)
    return compile_step(spec, source, words, _MEMORY[spec.abi])


def torch_defines(spec: OpSpec, toolchain: Toolchain) -> list[Arg]:
    """The macros that torch's headers expect."""
    words: list[Arg] = []
    if spec.kind == PYTHON or spec.abi == ABI_TORCH:
        words.append(f"-DTORCH_EXTENSION_NAME={spec.name}")
    if spec.abi == ABI_TORCH:
        abi = 1 if toolchain.torch is None or toolchain.torch.cxx11_abi else 0
        words += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    elif spec.abi == ABI_STABLE:
        words.append(torch_sdk.STABLE_DEFINE)
    return words


def torch_includes(spec: OpSpec, option: str = "-isystem") -> list[Arg]:
    """The directories of torch's and Python's headers."""
    words: list[Arg] = []
    if spec.abi != ABI_NONE:
        words.append(Anchored(option, "torch", "include"))
    if spec.abi == ABI_TORCH:
        words.append(Anchored(option, "torch", "include/torch/csrc/api/include"))
    if spec.kind == PYTHON or spec.abi == ABI_TORCH:
        words.append(Anchored(option, "python", ""))
    return words


# What the steps of all compilers share


def compile_step(
    spec: OpSpec, source: str, words: Iterable[Arg], memory: int, *, plain_paths: bool = False
) -> Step:
    """The step that compiles one of the spec's sources."""
    return Step(
        kind="compile",
        output=object_name(source),
        words=tuple(words),
        file=anchor_path(spec, source),
        source=source,
        memory=memory,
        plain_paths=plain_paths,
    )


def standard_flags(spec: OpSpec, authors: tuple[str, ...]) -> list[str]:
    """The C++ standard, if the author's flags do not choose one."""
    chosen = any(flag.startswith(("-std", "--std")) for flag in authors)
    return [] if chosen else [f"-std={spec.std}"]


def optimisation_flags(
    target: Target, authors: tuple[str, ...] = (), debug: tuple[str, ...] = ("-O0", "-g3")
) -> tuple[str, ...]:
    """The level of optimisation, if the author's flags do not choose one."""
    if target.debug:
        return debug
    chosen = any(flag.startswith("-O") for flag in authors)
    return ("-DNDEBUG",) if chosen else ("-O3", "-DNDEBUG")


def position_flags(spec: OpSpec, flag: str = "-fPIC") -> list[str]:
    """The flag for position-independent code. Programs do not need it."""
    return [] if spec.kind == EXECUTABLE else [flag]


def reproducible_flags(toolchain: Toolchain, output: str) -> list[str]:
    """The flags that keep times and random numbers out of the host compiler's output."""
    seed = [f"-frandom-seed={output}"] if toolchain.family == "gcc" else []
    return [REDEFINED, TIMESTAMP, *seed]


def include_flags(inputs: PlanInputs, *between: Arg, system: str = "-isystem") -> list[Arg]:
    """The directories of headers: the author's, the user's, others, the user's system headers."""
    return [
        *(anchor_path(inputs.spec, path, "-I") for path in inputs.spec.include_dirs),
        *(f"-I{path}" for path in inputs.users("cpath")),
        *between,
        *(f"{system}{path}" for path in inputs.users("cplus_include_path")),
    ]


def prefix_maps(spec: OpSpec, device: DeviceCompiler | None = None) -> tuple[Anchored, ...]:
    """The flags that keep the paths of this machine out of the output."""
    maps = _PREFIX_MAPS if spec.abi == ABI_NONE else (_TORCH_MAP, *_PREFIX_MAPS)
    if device is not None and wheel_includes(spec, device, ""):
        maps = (_WHEELS_MAP, *maps)
    ours = any(anchor_path(spec, path).anchor == "opkiln" for path in spec.include_dirs)
    return (OPKILN_MAP, *maps) if ours or op_header(spec) else maps


def op_header(spec: OpSpec, option: str = "-idirafter") -> list[Anchored]:
    """The directory of ``<opkiln/op.h>``. It is searched last, so that compiles which do not
    include it do not look for anything there."""
    return [] if spec.abi == ABI_NONE else [Anchored(option, "opkiln", "csrc")]


def anchor_path(spec: OpSpec, path: str, prefix: str = "") -> Anchored:
    """An author's path, relative to the source root or to opkiln's package if it is below one."""
    if not os.path.isabs(path):
        return Anchored(prefix, "src", posixpath.normpath(path))
    for anchor, place in (("src", spec.root), ("opkiln", PACKAGE)):
        root = place.rstrip("/") + "/"
        if path.startswith(root):
            return Anchored(prefix, anchor, posixpath.normpath(path[len(root) :]))
    return Anchored(prefix, "abs", path)


def anchor_in_toolkit(device: DeviceCompiler, path: str, prefix: str = "") -> Anchored:
    """A path of the device toolkit, relative to its root if it is below it."""
    home = device.home.rstrip("/") + "/"
    if path.startswith(home):
        return Anchored(prefix, "toolkit", path[len(home) :])
    return Anchored(prefix, "abs", path)


def wheel_includes(spec: OpSpec, device: DeviceCompiler, option: str) -> list[Anchored]:
    """The directories of headers that the toolkit lacks. They must come after its own."""
    if spec.abi == ABI_NONE:
        return []
    return [Anchored(option, "wheels", path) for path in device.wheel_include_dirs]


def author_flags(spec: OpSpec, flags: tuple[str, ...]) -> Iterator[Arg]:
    """An author's flags, with their absolute paths anchored."""
    for flag in flags:
        prefix = next((p for p in _PATH_FLAGS if flag.startswith(p) and flag != p), None)
        path = flag[len(prefix) :] if prefix else ""
        yield anchor_path(spec, path, prefix or "") if os.path.isabs(path) else flag


def object_name(source: str) -> str:
    """The object's name for a source. It depends on the path, so two files of the same name do not
    collide."""
    plain = (
        char if char.isascii() and (char.isalnum() or char in "_.") else "-" for char in source
    )
    flat = "".join(plain).lstrip("-")[-80:]
    return f"{flat}-{key('source', source)[:8]}.o"
