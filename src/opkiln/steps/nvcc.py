"""Steps for nvcc: CUDA sources.

nvcc passes its arguments to a shell, and splits the value of ``-Xcompiler`` at commas. So only
plain characters may reach it. ``flags.check_nvcc`` refuses flags with other characters. If the path
of the sources has other characters, nvcc gets the sources through a symbolic link. From the user's
``CPPFLAGS``, nvcc gets the macros and include directories. It passes the rest to the host compiler,
which does the preprocessing for the host and for every device.
"""

from __future__ import annotations

from opkiln.arch import cuda
from opkiln.build_model import Anchored, Arg, Step, Target, Toolchain
from opkiln.errors import SpecError
from opkiln.model import ABI_TORCH, EXECUTABLE, OpSpec
from opkiln.steps.arguments import (
    REDEFINED,
    TIMESTAMP,
    anchored,
    author_flags,
    in_toolkit,
    object_name,
    op_header,
    prefix_maps,
    wheel_includes,
)
from opkiln.steps.flags import check_nvcc, host_options, is_relocatable, without_relocatable
from opkiln.steps.host import torch_defines, torch_includes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


def compile_step(
    spec: OpSpec,
    target: Target,
    toolchain: Toolchain,
    flags: Mapping[str, tuple[str, ...]],
    source: str,
) -> Step:
    """The step that compiles one CUDA source for every architecture of the target.

    Raises SpecError if a variable of the user contains something that cannot be passed to nvcc.
    """
    device = toolchain.device
    assert device is not None  # a plan for this backend is made with its compiler
    archs = cuda.parse(";".join(target.archs))
    output = object_name(source)
    authors = without_relocatable((*spec.device_args, *flags.get("cudaflags", ())))
    # No launcher: no pass of nvcc's preprocessor tells what all of its compiles read.
    arguments: list[Arg] = [device.path, "-ccbin", device.host or toolchain.cxx]
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
    arguments += [f"-Xcompiler={REDEFINED}", TIMESTAMP]
    # nvcc makes the names of internal symbols from the source's path. Give it a fixed path.
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
    arguments += op_header(spec, "-isystem=")
    memory = _MEMORY_WITH_TORCH if spec.abi == ABI_TORCH else _MEMORY_PER_ARCH
    return Step(
        kind="compile",
        output=output,
        words=tuple(arguments),
        file=anchored(spec, source),
        source=source,
        memory=memory,
        threads=len(cuda.images(archs)) if "--threads" in device.accepts else 1,
        plain_paths=True,
    )


def relocatable(spec: OpSpec, flags: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the device code of a spec needs its own link step."""
    return is_relocatable((*spec.device_args, *flags.get("cudaflags", ())))


def device_link_step(
    spec: OpSpec,
    target: Target,
    toolchain: Toolchain,
    objects: tuple[str, ...],
) -> Step:
    """The step that links relocatable device code, for every architecture of the target.

    Its output has the kernels in their final form. The library's link takes it in addition to the
    objects.
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
        words=tuple(arguments),
        inputs=objects,
        memory=_MEMORY_PER_ARCH,
        plain_paths=True,
    )


def _preprocessing(op: str, words: tuple[str, ...]) -> list[str]:
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


def _directories(op: str, option: str, variable: str, paths: tuple[str, ...]) -> Iterator[str]:
    for path in paths:
        # nvcc quotes a path for the shell, but quotes and backticks break out of that. A comma ends
        # the path.
        if any(char in path for char in ',"`'):
            raise SpecError(
                f"op {op}: {path!r}, from {variable}, cannot be passed to nvcc",
                why="it contains a comma, a quote or a backtick",
                hint=f"unset {variable}",
            )
        yield option + path
