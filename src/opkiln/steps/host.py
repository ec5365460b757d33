"""Steps for g++ and clang++: C++ sources."""

from __future__ import annotations

from opkiln.arch import cpu
from opkiln.build_model import Anchored, Arg, Step, Toolchain
from opkiln.model import ABI_NONE, ABI_STABLE, ABI_TORCH, PYTHON, ROCM, OpSpec
from opkiln.steps import arguments
from opkiln.steps.arguments import PlanInputs
from opkiln.toolchain import torch_sdk

SOURCES = (".cpp", ".cc", ".cxx", ".c++", ".C", ".cp", ".CPP", ".c")

# Macros that HIP's and torch's headers need, in device code and in C++ that includes them.
HIP_DEFINES = ("-D__HIP_PLATFORM_AMD__=1", "-DUSE_ROCM=1")

_MEMORY = {ABI_STABLE: 700 << 20, ABI_TORCH: 2500 << 20, ABI_NONE: 400 << 20}


def compile_cxx(inputs: PlanInputs, source: str) -> Step:
    """The step that compiles one C++ source."""
    spec, target, toolchain = inputs
    words: list[Arg] = [toolchain.launcher] if toolchain.launcher else []
    words += [toolchain.cxx, f"-std={spec.std}"]
    words += [*arguments.optimisation(target), *arguments.position(spec)]
    if spec.vectorize:
        chosen = cpu.CPU(target.cpu, target.cpu_features)
        words += cpu.flags(chosen, target.machine, toolchain.accepts)
    words += arguments.prefix_maps(spec, toolchain.device)
    words += arguments.reproducible(toolchain, arguments.object_name(source))
    if target.backend == ROCM:
        words += HIP_DEFINES
    words += torch_defines(spec, toolchain)
    words += inputs.users("cppflags")
    words += arguments.author_flags(spec, spec.cxx_args)
    words += inputs.users("cxxflags")
    toolkit: list[Arg] = []
    if device := toolchain.device:
        toolkit += [arguments.in_toolkit(device, path, "-isystem") for path in device.include_dirs]
        toolkit += arguments.wheel_includes(spec, device, "-isystem")
    words += arguments.searched(inputs, *toolkit, *torch_includes(spec))
    words += arguments.op_header(spec)
    return arguments.compile_step(spec, source, words, _MEMORY[spec.abi])


def torch_defines(spec: OpSpec, toolchain: Toolchain) -> list[Arg]:
    """The macros that torch's headers expect."""
    words: list[Arg] = []
    if spec.kind == PYTHON or spec.abi == ABI_TORCH:
        words.append(f"-DTORCH_EXTENSION_NAME={spec.name}")
    if spec.abi == ABI_TORCH:
        abi = 1 if toolchain.torch is None or toolchain.torch.cxx11_abi else 0
        words += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    elif spec.abi == ABI_STABLE:
        words.append(torch_sdk.STABLE_DEFINE)
    return words


def torch_includes(spec: OpSpec, option: str = "-isystem") -> list[Arg]:
    """The directories of torch's and Python's headers."""
    words: list[Arg] = []
    if spec.abi != ABI_NONE:
        words.append(Anchored(option, "torch", "include"))
    if spec.abi == ABI_TORCH:
        words.append(Anchored(option, "torch", "include/torch/csrc/api/include"))
    if spec.kind == PYTHON or spec.abi == ABI_TORCH:
        words.append(Anchored(option, "python", ""))
    return words
