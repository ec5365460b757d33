"""Steps for SYCL: icpx compiles sources with their kernels, or the host compiler compiles C++ for
SYCL's runtime compiler.

With the runtime compiler, the library contains its kernels as text, and libsycl compiles them when
they first run. So only C++ sources can be built; ``.sycl`` sources need icpx.
"""

from __future__ import annotations

from opkiln.base.build_model import SYCL_RUNTIME, Arg, Step, Target
from opkiln.errors import ToolchainError
from opkiln.machine.toolchain import sycl
from opkiln.plan import host
from opkiln.plan.host import PlanInputs

SOURCES = (".sycl",)

_MEMORY = 2000 << 20


def compile_sycl(inputs: PlanInputs, source: str) -> Step:
    """The step that compiles one source, C++ or SYCL. Raises ToolchainError for a ``.sycl`` source
    if there is only the runtime compiler."""
    spec, target, toolchain = inputs
    device = inputs.device
    if device.family == SYCL_RUNTIME:
        if source.endswith(SOURCES):
            raise ToolchainError(
                f"op {spec.title}: {source} cannot be compiled here",
                why=f"it needs a SYCL compiler, but {device.path} is only a runtime, which "
                "compiles kernels from text",
                hint="OPKILN_SYCL_CXX=icpx    (or put the kernels into a .cpp as source text)",
            )
        return host.compile_cxx(inputs, source)
    # No launcher: no pass of the preprocessor tells what all of its compiles read. No flags for the
    # target's CPU: the code that must be fast is in kernels, which run on the device.
    words: list[Arg] = [device.path, "-fsycl", *_targets(target), f"-std={spec.std}"]
    words += host.optimisation_flags(target)
    words += [flag for flag in ("-ffp-model=precise",) if flag in device.accepts]
    words += host.position_flags(spec)
    words += host.prefix_maps(spec)
    words += [host.REDEFINED, host.TIMESTAMP]
    words += host.torch_defines(spec, toolchain)
    words += inputs.users("cppflags")
    words += host.author_flags(spec, (*spec.cxx_args, *spec.device_args))
    words += inputs.users("cxxflags")
    words += host.include_flags(inputs, *host.torch_includes(spec))
    words += host.op_header(spec)
    # A .sycl file is C++ by torch's convention. Without -x, icpx would take it for an object.
    words += ["-x", "c++"]
    return host.compile_step(spec, source, words, _MEMORY)


def linker_words(inputs: PlanInputs) -> list[Arg]:
    """The linker and its first arguments."""
    device, target = inputs.device, inputs.target
    if device.family == SYCL_RUNTIME:
        return [inputs.toolchain.cxx]
    linking: list[Arg] = [device.path, "-fsycl", *_targets(target)]
    if target.archs:
        linking += ["-Xsycl-target-backend=spir64_gen", f"-device {','.join(target.archs)}"]
    return linking


def libraries(inputs: PlanInputs) -> list[Arg]:
    """The SYCL runtime, if the linker does not add it by itself. It is linked by soname and without
    an rpath, like torch's libraries. So the output does not depend on where the runtime is
    installed. Whoever loads the library loads the runtime first."""
    device = inputs.device
    if device.family != SYCL_RUNTIME:
        return []
    search: list[Arg] = [host.anchor_in_toolkit(device, path, "-L") for path in device.library_dirs]
    return [*search, f"-l:{sycl.soname(device)}"]


def _targets(target: Target) -> list[str]:
    """The flag for machine code for the named devices, and SPIR-V for all others."""
    return ["-fsycl-targets=spir64_gen,spir64"] if target.archs else []
