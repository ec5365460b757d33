"""Steps for the emulator: CUDA sources that the host compiler compiles, to run on the CPU.

Kernels are compiled with g++'s instrumentation for data races, but without the sanitizer's library:
the emulator's runtime has the functions that the instrumentation calls, and so sees every load and
store of a kernel. docs/emulator.md says what it makes of them.
"""

from __future__ import annotations

from opkiln.build_model import Anchored, Arg, Step, Toolchain
from opkiln.model import EMULATOR_RUNTIME, PACKAGE, OpSpec
from opkiln.steps.arguments import (
    REDEFINED,
    TIMESTAMP,
    anchored,
    author_flags,
    object_name,
    prefix_maps,
)
from opkiln.steps.host import torch_defines, torch_includes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# The number changes with what `toolchain.emulate` translates: it is in the key that way.
_DEFINE = "-DOPKILN_EMULATED=1"

# Line tables name the line of a race. DWARF 4, because the runtime reads that version.
_LINES = ("-g1", "-gdwarf-4", "-gz=none")
_CHECKS = ("-fsanitize=thread,bounds,alignment",)
# In g++ alone: volatile accesses have functions of their own, and no variable of an inline function
# is one for the whole process.
_GCC_CHECKS = ("--param=tsan-distinguish-volatile=1",)
_GCC = ("-fno-gnu-unique",)

_MEMORY = 500 << 20


def compile_step(
    spec: OpSpec,
    toolchain: Toolchain,
    flags: Mapping[str, tuple[str, ...]],
    source: str,
) -> Step:
    """The step that compiles one CUDA or C++ source, or the runtime."""
    output = object_name("emulator/runtime.cpp" if source == EMULATOR_RUNTIME else source)
    gcc = toolchain.family == "gcc"
    arguments: list[Arg] = [toolchain.launcher] if toolchain.launcher else []
    arguments.append(toolchain.cxx)
    ours = [Anchored("-I", "opkiln", "csrc"), Anchored("-I", "opkiln", "csrc/opkiln/emulator/cuda")]
    if source == EMULATOR_RUNTIME:
        users = (flag for flag in flags.get("cxxflags", ()) if flag.startswith("-fsanitize"))
        arguments += ["-std=c++17", "-O1", "-fPIC", *users]
        arguments += [Anchored("-ffile-prefix-map=", "opkiln", "", "=/opkiln/opkiln")]
        arguments += [Anchored("-ffile-prefix-map=", "stage", "", "=/opkiln/build")]
        arguments += [REDEFINED, TIMESTAMP, *([f"-frandom-seed={output}"] if gcc else [])]
        arguments += [ours[0]]
    else:
        authors = (*spec.cxx_args, *flags.get("cxxflags", ()))
        if not any(flag.startswith(("-std", "--std")) for flag in authors):
            arguments.append(f"-std={spec.std}")
        arguments += ["-O1", "-DNDEBUG", "-fPIC", *_LINES, _DEFINE, *(_GCC if gcc else ())]
        if not _has_address_sanitizer(flags):
            arguments += [*_CHECKS, *(_GCC_CHECKS if gcc else ())]
        arguments += ["-Wno-unknown-pragmas", "-Wno-attributes"]
        arguments += [Anchored("-ffile-prefix-map=", "opkiln", "", "=/opkiln/opkiln")]
        arguments += [each for each in prefix_maps(spec) if each.anchor != "opkiln"]
        arguments += [REDEFINED, TIMESTAMP, *([f"-frandom-seed={output}"] if gcc else [])]
        arguments += torch_defines(spec, toolchain)
        arguments += flags.get("cppflags", ())
        arguments += author_flags(spec, authors)
        arguments += ours
        arguments += [anchored(spec, path, "-I") for path in spec.include_dirs]
        arguments += [f"-I{path}" for path in flags.get("cpath", ())]
        arguments += torch_includes(spec)
        arguments += [f"-isystem{path}" for path in flags.get("cplus_include_path", ())]
    arguments += ["-x", "c++"]
    # The runtime stays where it is: the sources of an op of opkiln's own may be a translated copy.
    runtime = Anchored("", "opkiln", EMULATOR_RUNTIME.removeprefix(PACKAGE + "/"))
    compiled = runtime if source == EMULATOR_RUNTIME else anchored(spec, source)
    return Step(
        kind="compile",
        output=output,
        words=tuple(arguments),
        file=compiled,
        source="the emulator's runtime" if source == EMULATOR_RUNTIME else source,
        memory=_MEMORY,
    )


def _has_address_sanitizer(flags: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the user asks for AddressSanitizer, which a compiler does not combine with the other
    instrumentation: it then checks bounds, and nothing checks races."""
    given = flags.get("cxxflags", ())
    return any(flag.startswith("-fsanitize=") and "address" in flag for flag in given)
