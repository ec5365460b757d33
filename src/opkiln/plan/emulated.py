"""Steps for the emulator: CUDA sources that the host compiler compiles, to run on the CPU.

Kernels are compiled with g++'s instrumentation for data races, but without the sanitizer's library:
the emulator's runtime has the functions that the instrumentation calls, and so sees every load and
store of a kernel (docs/emulator.md).
"""

from __future__ import annotations

from opkiln.base.build_model import Anchored, Arg, Step
from opkiln.base.model import EMULATOR_RUNTIME, PACKAGE
from opkiln.plan import host
from opkiln.plan.host import PlanInputs, torch_defines, torch_includes

# Change the number if ``staged_copy`` translates differently, so that keys change, too.
_DEFINE = "-DOPKILN_EMULATED=1"

# Line tables name the line of a race. DWARF 4, because the runtime reads that version.
_LINES = ("-g1", "-gdwarf-4", "-gz=none")
_CHECKS = ("-fsanitize=thread,bounds,alignment",)
# Only g++ has these: functions of their own for volatile accesses; and static variables of inline
# functions that are not unique in the process.
_GCC_CHECKS = ("--param=tsan-distinguish-volatile=1",)
_GCC = ("-fno-gnu-unique",)

_MEMORY = 500 << 20


def compile_emulated(inputs: PlanInputs, source: str) -> Step:
    """The step that compiles one CUDA or C++ source, or the runtime."""
    spec, _, toolchain = inputs
    launched = [toolchain.launcher] if toolchain.launcher else []
    compiler = (*launched, toolchain.cxx)
    ours = Anchored("-I", "opkiln", "csrc")
    if source == EMULATOR_RUNTIME:
        output = host.object_name("emulator/runtime.cpp")
        users = (flag for flag in inputs.users("cxxflags") if flag.startswith("-fsanitize"))
        runtime: list[Arg] = [*compiler, "-std=c++17", "-O1", "-fPIC", *users]
        runtime += [host.OPKILN_MAP, host.STAGE_MAP, *host.reproducible_flags(toolchain, output)]
        runtime += [ours, "-x", "c++"]
        # This is not anchored at the sources: those of opkiln's own ops may be a translated copy.
        file = Anchored("", "opkiln", EMULATOR_RUNTIME.removeprefix(PACKAGE + "/"))
        return Step(
            "compile", output, tuple(runtime), file, "the emulator's runtime", memory=_MEMORY
        )
    gcc = toolchain.family == "gcc"
    authors = (*spec.cxx_args, *inputs.users("cxxflags"))
    words: list[Arg] = [*compiler, *host.standard_flags(spec, authors)]
    words += ["-O1", "-DNDEBUG", "-fPIC", *_LINES, _DEFINE, *(_GCC if gcc else ())]
    if not _has_address_sanitizer(inputs.users("cxxflags")):
        words += [*_CHECKS, *(_GCC_CHECKS if gcc else ())]
    words += ["-Wno-unknown-pragmas", "-Wno-attributes", host.OPKILN_MAP]
    words += [each for each in host.prefix_maps(spec) if each != host.OPKILN_MAP]
    words += host.reproducible_flags(toolchain, host.object_name(source))
    words += torch_defines(spec, toolchain)
    words += inputs.users("cppflags")
    words += host.author_flags(spec, authors)
    words += [ours, Anchored("-I", "opkiln", "csrc/opkiln/emulator/cuda")]
    words += [*host.include_flags(inputs, *torch_includes(spec)), "-x", "c++"]
    return host.compile_step(spec, source, words, _MEMORY)


def _has_address_sanitizer(flags: tuple[str, ...]) -> bool:
    """Whether the user asks for AddressSanitizer. A compiler does not combine it with the other
    instrumentation. So it checks bounds, and nothing checks races."""
    return any(flag.startswith("-fsanitize=") and "address" in flag for flag in flags)
