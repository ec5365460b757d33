"""CUDA sources, by nvcc.

nvcc hands its arguments to a shell and cuts what follows ``-Xcompiler`` at commas. So nothing but
plain characters may reach it: ``flags.check_nvcc`` refuses flags with others, and a build whose
sources lie below a path with others shows them to nvcc through a symbolic link.
"""

from __future__ import annotations

from opkiln.arch import cuda
from opkiln.model import ABI_TORCH, EXECUTABLE, Anchored, Arg, OpSpec, Step, Target, Toolchain
from opkiln.steps.arguments import (
    anchored,
    author_flags,
    depfile_name,
    object_name,
    prefix_maps,
)
from opkiln.steps.host import torch_defines, torch_includes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCES = (".cu",)

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


def compile_step(
    spec: OpSpec,
    target: Target,
    toolchain: Toolchain,
    flags: Mapping[str, tuple[str, ...]],
    source: str,
) -> Step:
    """The step that compiles one CUDA source for every architecture of the target."""
    device = toolchain.device
    assert device is not None  # a plan for this backend is made with its compiler
    archs = cuda.parse(";".join(target.archs))
    output = object_name(source)
    depfile = depfile_name(output)
    authors = (*spec.device_args, *flags.get("cudaflags", ()))
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
    arguments += ["--objdir-as-tempdir"]
    arguments += [f for f in ("--compress-mode=size",) if f in device.accepts]
    if "--threads" in device.accepts and len(cuda.images(archs)) > 1:
        arguments.append(Anchored("--threads=", "threads", ""))
    arguments += [each._replace(prefix=f"-Xcompiler={each.prefix}") for each in prefix_maps(spec)]
    # Names of internal symbols are made of the source's path; this is the path they are made of.
    arguments.append(f"-Xcudafe=--orig_src_path_name=/opkiln/src/{output}")
    if spec.abi == ABI_TORCH:
        arguments += _TORCH_HALF
    arguments += torch_defines(spec, toolchain)
    arguments += flags.get("lineinfo", ())
    arguments += flags.get("debug_cuda", ())
    arguments += author_flags(spec, authors)
    arguments += [anchored(spec, path, "-I") for path in spec.include_dirs]
    arguments += [f"-I{path}" for path in flags.get("cpath", ())]
    arguments += torch_includes(spec, "-isystem=")
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
