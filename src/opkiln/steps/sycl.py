"""SYCL sources: by icpx, kernels and all; or by the host compiler, for the runtime compiler.

With the runtime compiler the library holds its kernels as text, and libsycl compiles them when they
first run. So C++ sources are all that can be built; ``.sycl`` ones need icpx.
"""

from __future__ import annotations

from opkiln.errors import ToolchainError
from opkiln.model import EXECUTABLE, Anchored, Arg, DeviceCompiler, OpSpec, Step, Target, Toolchain
from opkiln.steps import host
from opkiln.steps.arguments import (
    anchored,
    author_flags,
    depfile_name,
    in_toolkit,
    object_name,
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

    Raises ToolchainError for a ``.sycl`` source where there is only the runtime compiler.
    """
    device = _device(toolchain)
    if device.family == sycl.RUNTIME:
        if source.endswith(SOURCES):
            raise ToolchainError(
                f"op {spec.name}: {source} cannot be compiled here",
                why=f"it needs a SYCL compiler, and {device.path} is a runtime, which takes "
                "kernels as text",
                hint="OPKILN_SYCL_CXX=icpx    (or put the kernels into a .cpp as source text)",
            )
        return host.compile_step(spec, target, toolchain, flags, source)
    output = object_name(source)
    depfile = depfile_name(output)
    arguments: list[Arg] = [toolchain.launcher] if toolchain.launcher else []
    # No flags for the target's CPU: what is to be fast is in kernels, which run elsewhere.
    arguments += [device.path, "-fsycl", *_targets(target), f"-std={spec.std}"]
    arguments += ["-O0", "-g3"] if target.debug else ["-O3", "-DNDEBUG"]
    arguments += [flag for flag in ("-ffp-model=precise",) if flag in device.accepts]
    if spec.kind != EXECUTABLE:
        arguments.append("-fPIC")
    arguments += prefix_maps(spec)
    arguments += host.torch_defines(spec, toolchain)
    arguments += flags.get("cppflags", ())
    arguments += author_flags(spec, spec.cxx_args)
    arguments += author_flags(spec, spec.device_args)
    arguments += flags.get("cxxflags", ())
    arguments += [anchored(spec, path, "-I") for path in spec.include_dirs]
    arguments += [f"-I{path}" for path in flags.get("cpath", ())]
    arguments += host.torch_includes(spec)
    arguments += [f"-isystem{path}" for path in flags.get("cplus_include_path", ())]
    arguments += ["-MD", "-MF", Anchored("", "stage", depfile)]
    # A .sycl file is C++ by torch's custom; by its name it would be taken for an object.
    arguments += ["-x", "c++", "-c", anchored(spec, source), "-o", Anchored("", "stage", output)]
    return Step(
        kind="compile",
        output=output,
        argv=tuple(arguments),
        source=source,
        depfile=depfile,
        memory=_MEMORY,
    )


def linker(target: Target, toolchain: Toolchain) -> list[Arg]:
    """The program that links, with what it must be told first."""
    device = _device(toolchain)
    if device.family == sycl.RUNTIME:
        return [toolchain.cxx]
    return [device.path, "-fsycl", *_targets(target), *_backend(target)]


def libraries(toolchain: Toolchain) -> list[Arg]:
    """The SYCL runtime, where the linker does not add it by itself.

    By soname and without an rpath, as with torch's: the library is then the same wherever the
    runtime lies, and whoever loads it loads the runtime first.
    """
    device = _device(toolchain)
    if device.family != sycl.RUNTIME:
        return []
    search: list[Arg] = [in_toolkit(device, path, "-L") for path in device.library_dirs]
    return [*search, f"-l:{sycl.soname(device)}"]


def _device(toolchain: Toolchain) -> DeviceCompiler:
    assert toolchain.device is not None  # a plan for this backend is made with its compiler
    return toolchain.device


def _targets(target: Target) -> list[str]:
    """Machine code for the devices that were named, and SPIR-V for every other one."""
    return ["-fsycl-targets=spir64_gen,spir64"] if target.archs else []


def _backend(target: Target) -> list[str]:
    if not target.archs:
        return []
    return ["-Xsycl-target-backend=spir64_gen", f"-device {','.join(target.archs)}"]
