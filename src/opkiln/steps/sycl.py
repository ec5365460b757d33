"""Steps for SYCL: icpx compiles sources with their kernels, or the host compiler compiles C++ for
SYCL's runtime compiler.

With the runtime compiler, the library contains its kernels as text, and libsycl compiles them when
they first run. So only C++ sources can be built; ``.sycl`` sources need icpx.
"""

from __future__ import annotations

from opkiln.build_model import SYCL_RUNTIME, Arg, DeviceCompiler, Step, Target, Toolchain
from opkiln.errors import ToolchainError
from opkiln.model import EXECUTABLE, OpSpec
from opkiln.steps import host
from opkiln.steps.arguments import (
    REDEFINED,
    TIMESTAMP,
    anchored,
    author_flags,
    in_toolkit,
    object_name,
    op_header,
    prefix_maps,
)
from opkiln.toolchain import sycl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCES = (".sycl",)

_MEMORY = 2000 << 20


def compile_step(
    spec: OpSpec,
    target: Target,
    toolchain: Toolchain,
    flags: Mapping[str, tuple[str, ...]],
    source: str,
) -> Step:
    """The step that compiles one source, C++ or SYCL.

    Raises ToolchainError for a ``.sycl`` source if there is only the runtime compiler.
    """
    device = _device(toolchain)
    if device.family == SYCL_RUNTIME:
        if source.endswith(SOURCES):
            raise ToolchainError(
                f"op {spec.name}: {source} cannot be compiled here",
                why=f"it needs a SYCL compiler, but {device.path} is only a runtime, which "
                "compiles kernels from text",
                hint="OPKILN_SYCL_CXX=icpx    (or put the kernels into a .cpp as source text)",
            )
        return host.compile_step(spec, target, toolchain, flags, source)
    output = object_name(source)
    # No launcher: no pass of the preprocessor tells what all of its compiles read. No flags for the
    # target's CPU: the code that must be fast is in kernels, which run on the device.
    arguments: list[Arg] = [device.path, "-fsycl", *_targets(target), f"-std={spec.std}"]
    arguments += ["-O0", "-g3"] if target.debug else ["-O3", "-DNDEBUG"]
    arguments += [flag for flag in ("-ffp-model=precise",) if flag in device.accepts]
    if spec.kind != EXECUTABLE:
        arguments.append("-fPIC")
    arguments += prefix_maps(spec)
    arguments += [REDEFINED, TIMESTAMP]
    arguments += host.torch_defines(spec, toolchain)
    arguments += flags.get("cppflags", ())
    arguments += author_flags(spec, spec.cxx_args)
    arguments += author_flags(spec, spec.device_args)
    arguments += flags.get("cxxflags", ())
    arguments += [anchored(spec, path, "-I") for path in spec.include_dirs]
    arguments += [f"-I{path}" for path in flags.get("cpath", ())]
    arguments += host.torch_includes(spec)
    arguments += [f"-isystem{path}" for path in flags.get("cplus_include_path", ())]
    arguments += op_header(spec)
    # A .sycl file is C++ by torch's convention. Without -x, icpx would take it for an object.
    arguments += ["-x", "c++"]
    return Step(
        kind="compile",
        output=output,
        words=tuple(arguments),
        file=anchored(spec, source),
        source=source,
        memory=_MEMORY,
    )


def linker(target: Target, toolchain: Toolchain) -> list[Arg]:
    """The linker and its first arguments."""
    device = _device(toolchain)
    if device.family == SYCL_RUNTIME:
        return [toolchain.cxx]
    return [device.path, "-fsycl", *_targets(target), *_backend(target)]


def libraries(toolchain: Toolchain) -> list[Arg]:
    """The SYCL runtime, if the linker does not add it by itself.

    It is linked by soname and without an rpath, like torch's libraries. So the output does not
    depend on where the runtime is installed. Whoever loads the library loads the runtime first.
    """
    device = _device(toolchain)
    if device.family != SYCL_RUNTIME:
        return []
    search: list[Arg] = [in_toolkit(device, path, "-L") for path in device.library_dirs]
    return [*search, f"-l:{sycl.soname(device)}"]


def _device(toolchain: Toolchain) -> DeviceCompiler:
    assert toolchain.device is not None  # a plan for this backend is made with its compiler
    return toolchain.device


def _targets(target: Target) -> list[str]:
    """Machine code for the devices that were named, and SPIR-V for all others."""
    return ["-fsycl-targets=spir64_gen,spir64"] if target.archs else []


def _backend(target: Target) -> list[str]:
    if not target.archs:
        return []
    return ["-Xsycl-target-backend=spir64_gen", f"-device {','.join(target.archs)}"]
