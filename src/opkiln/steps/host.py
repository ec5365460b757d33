"""Steps for g++ and clang++: C++ sources."""

from __future__ import annotations

from opkiln.arch import cpu
from opkiln.build_model import Anchored, Arg, Step, Target, Toolchain
from opkiln.model import ABI_NONE, ABI_STABLE, ABI_TORCH, EXECUTABLE, PYTHON, ROCM, OpSpec
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
from opkiln.toolchain import torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCES = (".cpp", ".cc", ".cxx", ".c++", ".C", ".cp", ".CPP", ".c")

# Macros that HIP's and torch's headers need, in device code and in C++ that includes them.
HIP_DEFINES = ("-D__HIP_PLATFORM_AMD__=1", "-DUSE_ROCM=1")

_MEMORY = {ABI_STABLE: 700 << 20, ABI_TORCH: 2500 << 20, ABI_NONE: 400 << 20}


def compile_step(
    spec: OpSpec,
    target: Target,
    toolchain: Toolchain,
    flags: Mapping[str, tuple[str, ...]],
    source: str,
) -> Step:
    """The step that compiles one C++ source."""
    output = object_name(source)
    arguments: list[Arg] = [toolchain.launcher] if toolchain.launcher else []
    arguments += [toolchain.cxx, f"-std={spec.std}"]
    arguments += ["-O0", "-g3"] if target.debug else ["-O3", "-DNDEBUG"]
    if spec.kind != EXECUTABLE:
        arguments.append("-fPIC")
    if spec.vectorize:
        chosen = cpu.CPU(target.cpu, target.cpu_features)
        arguments += cpu.flags(chosen, target.machine, toolchain.accepts)
    arguments += prefix_maps(spec, toolchain.device)
    arguments += [REDEFINED, TIMESTAMP]
    if toolchain.family == "gcc":
        arguments.append(f"-frandom-seed={output}")
    if target.backend == ROCM:
        arguments += HIP_DEFINES
    arguments += torch_defines(spec, toolchain)
    arguments += flags.get("cppflags", ())
    arguments += author_flags(spec, spec.cxx_args)
    arguments += flags.get("cxxflags", ())
    arguments += [anchored(spec, path, "-I") for path in spec.include_dirs]
    arguments += [f"-I{path}" for path in flags.get("cpath", ())]
    if toolchain.device is not None:
        device = toolchain.device
        arguments += [in_toolkit(device, path, "-isystem") for path in device.include_dirs]
        arguments += wheel_includes(spec, device, "-isystem")
    arguments += torch_includes(spec)
    arguments += [f"-isystem{path}" for path in flags.get("cplus_include_path", ())]
    arguments += op_header(spec)
    return Step(
        kind="compile",
        output=output,
        words=tuple(arguments),
        file=anchored(spec, source),
        source=source,
        memory=_MEMORY[spec.abi],
    )


def torch_defines(spec: OpSpec, toolchain: Toolchain) -> list[Arg]:
    """The macros that torch's headers expect."""
    arguments: list[Arg] = []
    if spec.kind == PYTHON or spec.abi == ABI_TORCH:
        arguments.append(f"-DTORCH_EXTENSION_NAME={spec.name}")
    if spec.abi == ABI_TORCH:
        abi = 1 if toolchain.torch is None or toolchain.torch.cxx11_abi else 0
        arguments += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    elif spec.abi == ABI_STABLE:
        arguments.append(torch_sdk.STABLE_DEFINE)
    return arguments


def torch_includes(spec: OpSpec, option: str = "-isystem") -> list[Arg]:
    """The directories of torch's and Python's headers."""
    arguments: list[Arg] = []
    if spec.abi != ABI_NONE:
        arguments.append(Anchored(option, "torch", "include"))
    if spec.abi == ABI_TORCH:
        arguments.append(Anchored(option, "torch", "include/torch/csrc/api/include"))
    if spec.kind == PYTHON or spec.abi == ABI_TORCH:
        arguments.append(Anchored(option, "python", ""))
    return arguments
