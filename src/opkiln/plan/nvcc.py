"""Steps for nvcc: CUDA sources.

nvcc passes its arguments to a shell, and splits the value of ``-Xcompiler`` at commas. So only
plain characters may reach it. ``flags.check_nvcc`` refuses flags with other characters. If the path
of the sources has other characters, nvcc gets the sources through a symbolic link. From the user's
``CPPFLAGS``, nvcc gets the macros and include directories. It passes the rest to the host compiler,
which does the preprocessing for the host and for every device.
"""

from __future__ import annotations

from opkiln.base.build_model import Anchored, Arg, Step
from opkiln.base.model import ABI_TORCH
from opkiln.errors import SpecError
from opkiln.machine.arch import cuda
from opkiln.plan import host
from opkiln.plan.flags import check_nvcc, host_options, is_relocatable, remove_relocatable
from opkiln.plan.host import PlanInputs, torch_defines, torch_includes

SOURCES = (".cu",)
# No source has an object of this name, because those end in a digest.
_LINKED = "device-link.o"

_MEMORY_PER_ARCH = 500 << 20
# torch's own headers in a .cu need far more.
_MEMORY_WITH_TORCH = 3000 << 20

# torch's headers define these operators and conversions themselves.
_TORCH_HALF = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
)

# Options that both g++ and nvcc have, and how nvcc expects the value.
_SHARED = {"-D": "-D", "-U": "-U", "-I": "-I", "-isystem": "-isystem=", "-include": "-include="}


def compile_cuda(inputs: PlanInputs, source: str) -> Step:
    """The step that compiles one CUDA source for every architecture of the target. Raises SpecError
    if a variable of the user contains something that cannot be passed to nvcc."""
    spec, target, toolchain = inputs
    device = inputs.device
    archs = cuda.parse(";".join(target.archs))
    authors = remove_relocatable(inputs.device_flags)
    # No launcher: no pass of nvcc's preprocessor tells what all of its compiles read.
    words: list[Arg] = [device.path, "-ccbin", device.host or toolchain.cxx]
    words += host.standard_flags(spec, authors)
    words += host.optimisation_flags(target, authors, debug=("-O0", "-g", "-G"))
    words += host.position_flags(spec, "-Xcompiler=-fPIC")
    words += cuda.flags(archs)
    optional = ("--objdir-as-tempdir", "--compress-mode=size")
    words += [flag for flag in optional if flag in device.accepts]
    if "--threads" in device.accepts and len(cuda.images(archs)) > 1:
        words.append(Anchored("--threads=", "threads", ""))
    maps = host.prefix_maps(spec, device)
    words += [each._replace(prefix=f"-Xcompiler={each.prefix}") for each in maps]
    words += [f"-Xcompiler={host.REDEFINED}", host.TIMESTAMP]
    # nvcc makes the names of internal symbols from the source's path. Give it a fixed path.
    words.append(f"-Xcudafe=--orig_src_path_name=/opkiln/src/{host.object_name(source)}")
    if spec.abi == ABI_TORCH:
        words += _TORCH_HALF
    words += torch_defines(spec, toolchain)
    words += inputs.users("debug_cuda")
    if is_relocatable(inputs.device_flags):
        words.append("-rdc=true")
    words += _make_preprocessor_flags(spec.name, inputs.users("cppflags"))
    words += host.author_flags(spec, authors)
    _check_paths(inputs, "cpath")
    _check_paths(inputs, "cplus_include_path")
    wheels = host.wheel_includes(spec, device, "-isystem=")
    others = (*torch_includes(spec, "-isystem="), *wheels)
    words += host.include_flags(inputs, *others, system="-isystem=")
    words += host.op_header(spec, "-isystem=")
    memory = _MEMORY_WITH_TORCH if spec.abi == ABI_TORCH else _MEMORY_PER_ARCH
    step = host.compile_step(spec, source, words, memory, plain_paths=True)
    return step._replace(threads=len(cuda.images(archs)) if "--threads" in device.accepts else 1)


def device_link_step(inputs: PlanInputs, objects: tuple[str, ...]) -> Step:
    """The step that links relocatable device code, for every architecture of the target. Its output
    has the kernels in their final form. The library's link takes it in addition to the objects."""
    spec, target, toolchain = inputs
    device = inputs.device
    words: list[Arg] = [device.path, "-ccbin", device.host or toolchain.cxx, "-dlink"]
    words += host.position_flags(spec, "-Xcompiler=-fPIC")
    words += cuda.flags(cuda.parse(";".join(target.archs)))
    words += [Anchored("", "stage", name) for name in objects]
    searched = tuple(flag for flag in spec.ldflags if flag.startswith("-L") and flag != "-L")
    words += host.author_flags(spec, searched)
    words += [host.anchor_in_toolkit(device, path, "-L") for path in device.library_dirs]
    words += [f"-l{name}" for name in (*spec.device_libraries, "cudadevrt")]
    words += ["-o", Anchored("", "stage", _LINKED)]
    return Step(
        kind="device-link",
        output=_LINKED,
        words=tuple(words),
        inputs=objects,
        memory=_MEMORY_PER_ARCH,
        plain_paths=True,
    )


def _make_preprocessor_flags(op: str, words: tuple[str, ...]) -> list[str]:
    """``CPPFLAGS`` in the form that nvcc accepts."""
    given: list[str] = []
    for option in host_options(words):
        if option.name in _SHARED:
            given.append(_SHARED[option.name] + option.value)
        else:
            given += [f"-Xcompiler={word}" for word in option.words]
    # In a list of nvcc's, a comma would divide a flag into two.
    if any("," in word for word in given):
        given = list(words)
    check_nvcc(op, tuple(given), "CPPFLAGS")
    return given


def _check_paths(inputs: PlanInputs, name: str) -> None:
    variable = name.upper()
    for path in inputs.users(name):
        # nvcc quotes a path for the shell, but quotes and backticks break out of that. A comma ends
        # the path.
        if any(char in path for char in ',"`'):
            raise SpecError(
                f"op {inputs.spec.title}: {path!r}, from {variable}, cannot be passed to nvcc",
                why="it contains a comma, a quote or a backtick",
                hint=f"unset {variable}",
            )
