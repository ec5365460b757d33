"""spec + target + toolchain -> plan: the exact argv and environment of every step.

A pure function: it reads no environment, no file system and no clock. Paths below the source root,
torch, Python's headers and the staging directory are ``Anchored``, so the same op gives the same
plan wherever its package is installed and wherever a build is staged. The host compiler links.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from typing import NamedTuple

from opkiln.base.build_model import NVRTC, Anchored, Arg, Plan, Step, Target, Toolchain
from opkiln.base.model import (
    ABI_NONE,
    ABI_STABLE,
    ABI_TORCH,
    CPU,
    CUDA,
    EXECUTABLE,
    OUTSIDE,
    PACKAGE,
    PLAIN,
    PYTHON,
    ROCM,
    XPU,
    OpSpec,
    check_names,
)
from opkiln.errors import SpecError
from opkiln.plan import flags, host
from opkiln.plan.flags import is_relocatable
from opkiln.plan.host import PlanInputs, anchor_in_toolkit

# No op has an output of this name, because an op's name is a C identifier.
_STUB = "stub-libtorch_cpu.so"
# Flags with which a linker refuses symbols that no library defines.
_COMPLETE = {"defs", "--no-undefined", "-no-undefined", "-zdefs"}


def stub_steps(inputs: PlanInputs) -> tuple[Step, ...]:
    """The step that makes a stub of torch's library, which is linked in its place.

    The stub only has the soname. A link needs no more: symbols of a shared library may stay
    undefined, and the output needs the same libraries. A linker takes half a second to read torch's
    own. The load test checks whether torch has the symbols.
    """
    if not _has_stub(inputs):
        return ()
    argv: tuple[Arg, ...] = (
        inputs.toolchain.cxx, "-shared", "-nostdlib", "-x", "assembler", "/dev/null",
        "-Wl,-soname,libtorch_cpu.so", "-o", Anchored("", "stage", _STUB),
    )  # fmt: skip
    return (Step(kind="stub", output=_STUB, words=argv, memory=100 << 20),)


def _has_stub(inputs: PlanInputs) -> bool:
    spec = inputs.spec
    if inputs.toolchain.cross:
        return spec.abi != ABI_NONE
    if spec.abi != ABI_STABLE or spec.kind == EXECUTABLE:
        return False
    words = {word for flag in (*spec.ldflags, *inputs.users("ldflags")) for word in flag.split(",")}
    return not words & _COMPLETE


def _torch_libraries(spec: OpSpec) -> list[str]:
    if spec.abi == ABI_STABLE:
        return ["-ltorch_cpu"] if spec.kind != PLAIN else []
    python = ["-ltorch_python"] if spec.kind == PYTHON else []
    return ["-lc10", "-ltorch_cpu", "-ltorch", *python]


def link_step(inputs: PlanInputs, objects: tuple[str, ...], *, stubbed: bool = True) -> Step:
    """The step that links a plan's objects: with the stub of torch's library, if there is one and
    ``stubbed`` is set, else with the library itself."""
    spec, target, toolchain = inputs
    output = spec.name if spec.kind == EXECUTABLE else f"{spec.name}.so"
    arguments: list[Arg] = [toolchain.cxx]
    if target.backend == XPU:
        from opkiln.plan import sycl

        arguments = sycl.linker_words(inputs)
    if spec.kind != EXECUTABLE:
        arguments.append("-shared")
    if spec.emulated:
        # It must use its own variables and functions, whatever else is loaded.
        arguments.append("-Wl,-Bsymbolic")
    arguments += [Anchored("", "stage", name) for name in objects]
    arguments += host.author_flags(spec, spec.ldflags)
    arguments += [f"-l{name}" for name in spec.libraries]
    if stubbed and _has_stub(inputs):
        # The library is needed although the link uses nothing from it. Some linkers would drop it.
        kept = ("-Wl,--push-state,--no-as-needed", Anchored("", "stage", _STUB), "-Wl,--pop-state")
        arguments += kept
    elif spec.abi != ABI_NONE:
        # By soname and without an rpath: torch's libraries are loaded before any op.
        arguments.append(Anchored("-L", "torch", "lib"))
        arguments += _torch_libraries(spec)
        if spec.kind == EXECUTABLE and toolchain.torch is not None:
            # A program runs without a loaded torch, so it needs torch's path. That path is in the
            # output, so it is also in the key.
            arguments.append(f"-Wl,-rpath,{toolchain.torch.path}/lib")
    if toolchain.shared_runtime:
        arguments.append(toolchain.shared_runtime)
    if target.backend == CUDA:
        arguments += _cuda_runtime(inputs)
    elif target.backend == ROCM:
        from opkiln.plan import hipcc

        arguments += hipcc.runtime(inputs)
    elif target.backend == XPU:
        arguments += sycl.libraries(inputs)
    arguments += [f"-L{path}" for path in inputs.users("library_path")]
    arguments += inputs.users("ldflags")
    arguments += ["-o", Anchored("", "stage", output)]
    return Step(
        kind="link", output=output, words=tuple(arguments), inputs=objects, memory=500 << 20
    )


def _cuda_runtime(inputs: PlanInputs) -> list[Arg]:
    """The CUDA runtime. It is static, so that the library also loads without one installed. A
    full-ABI extension of a CUDA torch shares torch's runtime. If a device link used libraries,
    their host code comes from the same libraries."""
    spec, device, torch = inputs.spec, inputs.device, inputs.toolchain.torch
    if device.family == NVRTC:
        return ["-ldl"]  # kernels are launched through the driver, which is opened at the first
    search: list[Arg] = [anchor_in_toolkit(device, path, "-L") for path in device.library_dirs]
    if is_relocatable(inputs.device_flags):
        search += [f"-l{name}" for name in (*spec.device_libraries, "cudadevrt")]
    if spec.abi == ABI_TORCH and torch is not None and torch.cuda is not None:
        # By soname: the PyPI toolkit has no libcudart.so without a version.
        runtime = f"-l:libcudart.so.{torch.cuda.partition('.')[0]}"
        # Kept although nothing may be taken from them: through torch_cuda an extension finds the
        # cuBLAS that torch has. Compilers of some distributions drop what looks unused.
        kept = ("-Wl,--push-state,--no-as-needed", "-lc10_cuda", "-ltorch_cuda", "-Wl,--pop-state")
        return [*kept, *search, runtime]
    return [*search, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


_ENVIRONMENT = (("LC_ALL", "C"), ("SOURCE_DATE_EPOCH", "0"))

# Without this, hipcc compiles for NVIDIA's GPUs if it finds nvcc.
_ENVIRONMENTS = {ROCM: (*_ENVIRONMENT, ("HIP_PLATFORM", "amd"))}

# The suffixes of sources for a backend's compiler.
_DEVICE_SOURCES = {CUDA: (".cu",), ROCM: (".cu", ".hip"), XPU: (".sycl",)}


def check(spec: OpSpec) -> None:
    """Raise SpecError for a declaration that cannot or must not be built."""
    check_names(spec.distribution, spec.name)
    if not spec.sources:
        raise SpecError(f"op {spec.title} declares no sources")
    for source, _ in spec.inline:
        if "/" in source or source.startswith("."):
            raise SpecError(f"op {spec.title}: {source!a} cannot be the name of a source in text")
    paths = [os.path.normpath(source) for source in spec.sources]
    if twice := next((path for path in paths if paths.count(path) > 1), ""):
        raise SpecError(
            f"op {spec.title}: the source {twice} is listed twice",
            why="each source is compiled to one object, and the linker would find all of its "
            "functions twice",
        )
    for source in spec.sources:
        known = host.SOURCES + _DEVICE_SOURCES.get(CUDA if spec.emulated else spec.backend, ())
        if not source.endswith(known):
            raise SpecError(
                f"op {spec.title}: no compiler is known for the source {source!r}",
                why=f"sources for {spec.backend} end in " + ", ".join(known),
            )
    flags.check(spec.name, spec.cxx_args)
    flags.check(spec.name, spec.ldflags)
    _check_device_flags(spec.backend, spec.name, spec.device_args)
    for path in (spec.root, *spec.sources, *spec.include_dirs):
        # Depfiles have no escape for a newline, and -ffile-prefix-map=OLD=NEW none for a '='; some
        # compilers escape a colon, so that an escaped one cannot be told from one that is not.
        if not flags.is_encodable(path) or any(each in path for each in ("\0", "\n", "=", "\\:")):
            raise SpecError(
                f"op {spec.title}: the path {path!r} cannot be built from",
                why="it holds a newline, a NUL, a '=', a '\\:' or a lone surrogate, which "
                "dependency files, prefix maps and programs' arguments cannot express",
                hint="move the sources to a directory without these characters",
            )


def _check_device_flags(backend: str, op: str, given: tuple[str, ...], variable: str = "") -> None:
    if backend == CUDA:
        flags.check_nvcc(op, given, variable)
    elif backend == ROCM:
        from opkiln.plan import hipcc

        hipcc.check(op, given, variable)
    else:
        flags.check(op, given, variable)


def _variables(name: str) -> str:
    """The variables that a user's flags may come from, as `unset` takes them."""
    return "CPPFLAGS" if name == "cppflags" else f"OPKILN_{name.upper()} {name.upper()}"


def make(spec: OpSpec, target: Target, toolchain: Toolchain) -> Plan:
    """The plan. Raises SpecError for a declaration that cannot be built."""
    check(spec)
    users = dict(target.flags)
    for name in ("cppflags", "cxxflags", "ldflags"):
        flags.check(spec.name, users.get(name, ()), _variables(name))
    _check_device_flags(
        target.backend, spec.name, users.get("cudaflags", ()), _variables("cudaflags")
    )
    if toolchain.cross:
        _check_cross(spec, target)
    inputs = PlanInputs(spec, target, toolchain)
    compiles = tuple(_compile(inputs, source) for source in spec.sources)
    objects = tuple(step.output for step in compiles)
    before = (*stub_steps(inputs), *_device_link(inputs, compiles))
    linked = tuple(step.output for step in before if step.kind == "device-link")
    last = link_step(inputs, (*objects, *linked))
    environment = (*_ENVIRONMENTS.get(target.backend, _ENVIRONMENT), *toolchain.environment)
    if _uses_nvrtc(toolchain):
        from opkiln.plan import nvrtc

        environment = (*environment, *nvrtc.ENVIRONMENT)
    return Plan(spec, target, toolchain, (*compiles, *before, last), environment, last.output)


def _check_cross(spec: OpSpec, target: Target) -> None:
    """Raise SpecError for an op that needs more than a compiler for the other machine."""
    if target.backend != CPU:
        needs = f"a {target.backend} toolkit"
    elif spec.abi == ABI_TORCH or spec.kind == PYTHON:
        needs = "torch's and Python's own headers and libraries"
    elif spec.kind == EXECUTABLE and spec.abi != ABI_NONE:
        needs = "torch's libraries"
    else:
        return
    raise SpecError(
        f"op {spec.title} cannot be built for {target.machine} here",
        why=f"it needs {needs} of that machine",
        hint=f"opkiln build {spec.name}    # on {target.machine}",
    )


def _compile(inputs: PlanInputs, source: str) -> Step:
    backend = inputs.target.backend
    if inputs.spec.emulated:
        from opkiln.plan import emulated

        return emulated.compile_emulated(inputs, source)
    of_device = source.endswith(_DEVICE_SOURCES.get(backend, ()))
    if backend == CUDA and of_device:
        from opkiln.plan import nvcc, nvrtc

        step = nvrtc.compile_cuda if _uses_nvrtc(inputs.toolchain) else nvcc.compile_cuda
        return step(inputs, source)
    if backend == ROCM and of_device:
        from opkiln.plan import hipcc

        return hipcc.compile_hip(inputs, source)
    if backend == XPU:
        from opkiln.plan import sycl

        return sycl.compile_sycl(inputs, source)
    return host.compile_cxx(inputs, source)


def _uses_nvrtc(toolchain: Toolchain) -> bool:
    return toolchain.device is not None and toolchain.device.family == NVRTC


def _device_link(inputs: PlanInputs, compiles: tuple[Step, ...]) -> tuple[Step, ...]:
    if inputs.target.backend != CUDA or _uses_nvrtc(inputs.toolchain):
        return ()
    if not flags.is_relocatable(inputs.device_flags):
        return ()
    from opkiln.plan import nvcc

    objects = tuple(step.output for step in compiles if step.source.endswith(nvcc.SOURCES))
    return (nvcc.device_link_step(inputs, objects),) if objects else ()


def anchors(plan: Plan, stage: str) -> dict[str, str]:
    """The directories that a plan's anchors stand for on this machine."""
    return anchors_of(plan.spec, plan.toolchain) | {"stage": stage, "threads": "1"}


def anchors_of(spec: OpSpec, toolchain: Toolchain | None) -> dict[str, str]:
    """The anchors that do not depend on a build."""
    places = {"src": spec.root, "opkiln": PACKAGE, "abs": "", OUTSIDE: ""}
    if toolchain is not None:
        places["python"] = toolchain.python_include
        if toolchain.torch is not None:
            places["torch"] = toolchain.torch.path
        if toolchain.device is not None:
            places["toolkit"] = toolchain.device.home
            if toolchain.torch is not None:
                places["wheels"] = toolchain.torch.wheels
    return places


def render(argument: Arg, places: Mapping[str, str]) -> str:
    """An argument as the compiler gets it."""
    if isinstance(argument, str):
        return argument
    place = places[argument.anchor]
    path = posixpath.join(place, argument.path) if argument.path else place
    return f"{argument.prefix}{path}{argument.suffix}"


class Command(NamedTuple):
    """A step's command, with the places of this machine."""

    words: tuple[str, ...]
    file: str
    output: str

    @property
    def argv(self) -> tuple[str, ...]:
        return (*self.words, "-c", self.file, "-o", self.output) if self.file else self.words


def command(step: Step, places: Mapping[str, str]) -> Command:
    """A step's command as it is run."""
    words = tuple(render(argument, places) for argument in step.words)
    output = render(Anchored("", "stage", step.output), places)
    return Command(words, render(step.file, places), output)


class Flags(NamedTuple):
    """A plan's flags for a build system that names files and outputs itself."""

    cxx: list[str]
    device: list[str]
    link: list[str]


def author_flags(plan: Plan, module: str) -> Flags:
    """The flags that are common to a plan's steps, without those for one source.

    ``module`` is the build system's name of the artifact. Raises SpecError if nvcc's shell would
    interpret the path of the sources, since there is no link to replace it, and for relocatable
    device code, which needs a step of its own.
    """
    why = hint = ""
    if any(step.kind == "device-link" for step in plan.steps):
        why = "its relocatable device code is linked by a step of its own"
        hint = "opkiln.compat.torch.BuildExtension runs the whole plan"
    elif _uses_nvrtc(plan.toolchain):
        why = "opkiln itself divides its sources for the host compiler and NVRTC"
        hint = "OPKILN_CUDA=nvcc"
    if why:
        what = f"op {plan.spec.title} cannot be described by flags alone"
        raise SpecError(what, why=why, hint=hint)
    places = anchors(plan, "")
    compiles = [step for step in plan.steps if step.kind == "compile"]
    inputs = PlanInputs(plan.spec, plan.target, plan.toolchain)
    last = link_step(inputs, plan.steps[-1].inputs, stubbed=False)
    if any(step.plain_paths for step in compiles):
        for path in (plan.spec.root, *plan.spec.include_dirs):
            if any(char in path for char in '$`"\\'):
                raise SpecError(
                    f"op {plan.spec.title}: {path!r} cannot be passed to nvcc",
                    why="nvcc hands its arguments to a shell, which would interpret a character "
                    "of it",
                    hint="move it to a path without these characters",
                )
    device = plan.toolchain.device
    program = "" if device is None else device.path
    of_device = [step for step in compiles if program and program in step.words]
    of_host = [step for step in compiles if step not in of_device]
    linking = command(last, places).argv
    objects = {render(Anchored("", "stage", name), places) for name in last.inputs}
    return Flags(
        cxx=_common(of_host, plan.toolchain.cxx, places, module),
        device=_common(of_device, program, places, module),
        link=[part for part in linking[1:-2] if part not in objects and part != "-shared"],
    )


_OF_ONE_SOURCE = ("-frandom-seed=", "-Xcudafe=--orig_src_path_name=")
_OF_OUR_DIRECTORY = "--objdir-as-tempdir"  # for the directory of one build; sccache lacks it
_MODULE = "-DTORCH_EXTENSION_NAME="
_HOST_MAP = "-Xcompiler=-ffile-prefix-map="


def _common(steps: list[Step], program: str, places: Mapping[str, str], module: str) -> list[str]:
    if not steps:
        return []
    parts = command(steps[0], places).words
    kept = [
        part
        for part in parts[parts.index(program) + 1 :]
        if "=/opkiln/build" not in part and not part.startswith(_OF_ONE_SOURCE)
        if part != _OF_OUR_DIRECTORY
        # The host compiler's maps are not quoted for a shell; nvcc quotes other paths itself.
        if not part.startswith(_HOST_MAP) or flags.PLAIN.match(part)
    ]
    return [_MODULE + module if part.startswith(_MODULE) else part for part in kept]
