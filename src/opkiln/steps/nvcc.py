"""CUDA sources, by nvcc.

nvcc hands its arguments to a shell and cuts what follows ``-Xcompiler`` at commas. So nothing but
plain characters may reach it: ``flags.check_nvcc`` refuses flags with others, and a build whose
sources lie below a path with others shows them to nvcc through a symbolic link. Of the user's
``CPPFLAGS`` it is given the macros and include directories; the host compiler, which preprocesses
for the host and for every device, gets the rest through it.
"""

from __future__ import annotations

from opkiln.arch import cuda
from opkiln.errors import SpecError
from opkiln.model import ABI_TORCH, EXECUTABLE, Anchored, Arg, OpSpec, Step, Target, Toolchain
from opkiln.steps.arguments import (
    anchored,
    author_flags,
    depfile_name,
    in_toolkit,
    object_name,
    prefix_maps,
    wheel_includes,
)
from opkiln.steps.flags import check_nvcc, is_relocatable, without_relocatable
from opkiln.steps.host import torch_defines, torch_includes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOURCES = (".cu",)
# No source has an object of this name: those end in a digest.
_LINKED = "device-link.o"

_MEMORY_PER_ARCH = 500 << 20
# torch's own headers in a .cu take far more.
_MEMORY_WITH_TORCH = 3000 << 20

# torch's headers define these operators and conversions themselves.
_TORCH_HALF = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
)

# Options of g++ that nvcc has, too, and how it wants to be given the value.
_SHARED = {"-D": "-D", "-U": "-U", "-I": "-I", "-isystem": "-isystem=", "-include": "-include="}
_JOINED = ("-D", "-U", "-I", "-isystem")  # may be written in one word with the value


def compile_step(
    spec: OpSpec,
    target: Target,
    toolchain: Toolchain,
    flags: Mapping[str, tuple[str, ...]],
    source: str,
) -> Step:
    """The step that compiles one CUDA source for every architecture of the target.

    Raises SpecError for what is in a variable of the user's and cannot be passed to nvcc.
    """
    device = toolchain.device
    assert device is not None  # a plan for this backend is made with its compiler
    archs = cuda.parse(";".join(target.archs))
    output = object_name(source)
    depfile = depfile_name(output)
    authors = without_relocatable((*spec.device_args, *flags.get("cudaflags", ())))
    arguments: list[Arg] = [toolchain.launcher] if toolchain.launcher else []
    arguments += [device.path, "-ccbin", device.host or toolchain.cxx]
    if not any(flag.startswith(("-std", "--std")) for flag in authors):
        arguments.append(f"-std={spec.std}")
    if target.debug:
        arguments += ["-O0", "-g", "-G"]
    else:
        optimised = any(flag.startswith("-O") for flag in authors)
        arguments += ["-DNDEBUG"] if optimised else ["-O3", "-DNDEBUG"]
    if spec.kind != EXECUTABLE:
        arguments.append("-Xcompiler=-fPIC")
    arguments += cuda.flags(archs)
    optional = ("--objdir-as-tempdir", "--compress-mode=size")
    arguments += [flag for flag in optional if flag in device.accepts]
    if "--threads" in device.accepts and len(cuda.images(archs)) > 1:
        arguments.append(Anchored("--threads=", "threads", ""))
    maps = prefix_maps(spec, device)
    arguments += [each._replace(prefix=f"-Xcompiler={each.prefix}") for each in maps]
    # Names of internal symbols are made of the source's path; this is the path they are made of.
    arguments.append(f"-Xcudafe=--orig_src_path_name=/opkiln/src/{output}")
    if spec.abi == ABI_TORCH:
        arguments += _TORCH_HALF
    arguments += torch_defines(spec, toolchain)
    arguments += flags.get("debug_cuda", ())
    if relocatable(spec, flags):
        arguments.append("-rdc=true")
    arguments += _preprocessing(spec.name, flags.get("cppflags", ()))
    arguments += author_flags(spec, authors)
    arguments += [anchored(spec, path, "-I") for path in spec.include_dirs]
    arguments += _directories(spec.name, "-I", "CPATH", flags.get("cpath", ()))
    arguments += torch_includes(spec, "-isystem=")
    arguments += wheel_includes(spec, device, "-isystem=")
    arguments += _directories(
        spec.name, "-isystem=", "CPLUS_INCLUDE_PATH", flags.get("cplus_include_path", ())
    )
    arguments += ["-MD", "-MF", Anchored("", "stage", depfile)]
    arguments += ["-c", anchored(spec, source), "-o", Anchored("", "stage", output)]
    memory = _MEMORY_WITH_TORCH if spec.abi == ABI_TORCH else _MEMORY_PER_ARCH
    return Step(
        kind="compile",
        output=output,
        argv=tuple(arguments),
        source=source,
        depfile=depfile,
        memory=memory,
        threads=len(cuda.images(archs)) if "--threads" in device.accepts else 1,
        plain_paths=True,
    )


def relocatable(spec: OpSpec, flags: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the device code of a spec is linked by a step of its own."""
    return is_relocatable((*spec.device_args, *flags.get("cudaflags", ())))


def device_link_step(
    spec: OpSpec,
    target: Target,
    toolchain: Toolchain,
    objects: tuple[str, ...],
) -> Step:
    """The step that links relocatable device code, for every architecture of the target.

    What comes out holds the kernels as they run; the link of the library takes it beside them.
    """
    device = toolchain.device
    assert device is not None  # a plan for this backend is made with its compiler
    arguments: list[Arg] = [device.path, "-ccbin", device.host or toolchain.cxx, "-dlink"]
    if spec.kind != EXECUTABLE:
        arguments.append("-Xcompiler=-fPIC")
    arguments += cuda.flags(cuda.parse(";".join(target.archs)))
    arguments += [Anchored("", "stage", name) for name in objects]
    searched = tuple(flag for flag in spec.ldflags if flag.startswith("-L") and flag != "-L")
    arguments += author_flags(spec, searched)
    arguments += [in_toolkit(device, path, "-L") for path in device.library_dirs]
    arguments += [f"-l{name}" for name in (*spec.device_libraries, "cudadevrt")]
    arguments += ["-o", Anchored("", "stage", _LINKED)]
    return Step(
        kind="device-link",
        output=_LINKED,
        argv=tuple(arguments),
        inputs=objects,
        memory=_MEMORY_PER_ARCH,
        plain_paths=True,
    )


def _preprocessing(op: str, words: tuple[str, ...]) -> Iterator[str]:
    """``CPPFLAGS`` as nvcc takes them."""
    variables = "CPPFLAGS"
    check_nvcc(op, words, variables)
    rest = iter(words)
    for word in rest:
        option = next((each for each in _SHARED if _is(each, word)), None)
        if option is None:
            yield f"-Xcompiler={word}"
        else:
            yield _SHARED[option] + (word[len(option) :] or next(rest, ""))


def _is(option: str, word: str) -> bool:
    return word == option or (option in _JOINED and word.startswith(option))


def _directories(op: str, option: str, variable: str, paths: tuple[str, ...]) -> Iterator[str]:
    for path in paths:
        # nvcc quotes a path for the shell, in a way that these break out of; a comma ends it.
        if any(char in path for char in ',"`'):
            raise SpecError(
                f"op {op}: {path!r}, of {variable}, cannot be passed to nvcc",
                why="it holds a comma, a quote or a backtick",
                hint=f"unset {variable}",
            )
        yield option + path
