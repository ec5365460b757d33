"""The link step: the host compiler links objects to a library or a program."""

from __future__ import annotations

from opkiln.build_model import NVRTC, Anchored, Arg, Step
from opkiln.model import (
    ABI_NONE,
    ABI_STABLE,
    ABI_TORCH,
    CUDA,
    EXECUTABLE,
    PLAIN,
    PYTHON,
    ROCM,
    XPU,
    OpSpec,
)
from opkiln.steps.flags import is_relocatable
from opkiln.steps.host import PlanInputs, author_flags, in_toolkit

# No op has an output of this name, because an op's name is a C identifier.
_STUB = "stub-libtorch_cpu.so"
# What has a linker refuse symbols that no library defines.
_COMPLETE = {"defs", "--no-undefined", "-no-undefined", "-zdefs"}


def stub_steps(inputs: PlanInputs) -> tuple[Step, ...]:
    """The step that makes a stub of torch's library, which is linked in its place.

    The stub only has the soname. A link needs no more: symbols of a shared library may stay
    undefined, and the output needs the same libraries. A linker takes half a second to read torch's
    own. Whether torch has the symbols, the load test finds out.
    """
    if not _stubbed(inputs):
        return ()
    argv: tuple[Arg, ...] = (
        inputs.toolchain.cxx, "-shared", "-nostdlib", "-x", "c++", "/dev/null",
        "-Wl,-soname,libtorch_cpu.so", "-o", Anchored("", "stage", _STUB),
    )  # fmt: skip
    return (Step(kind="stub", output=_STUB, words=argv, memory=100 << 20),)


def _stubbed(inputs: PlanInputs) -> bool:
    spec = inputs.spec
    if inputs.toolchain.cross:
        return spec.abi != ABI_NONE
    if spec.abi != ABI_STABLE or spec.kind == EXECUTABLE:
        return False
    words = {word for flag in (*spec.ldflags, *inputs.users("ldflags")) for word in flag.split(",")}
    return not words & _COMPLETE


def _torch_libraries(spec: OpSpec) -> list[str]:
    if spec.abi == ABI_STABLE:
        return ["-ltorch_cpu"] if spec.kind != PLAIN else []
    python = ["-ltorch_python"] if spec.kind == PYTHON else []
    return ["-lc10", "-ltorch_cpu", "-ltorch", *python]


def link_step(inputs: PlanInputs, objects: tuple[str, ...], *, stubbed: bool = True) -> Step:
    """The step that links a plan's objects: with the stub of torch's library where there is a step
    that makes one, and with the library itself if not ``stubbed``."""
    spec, target, toolchain = inputs
    output = spec.name if spec.kind == EXECUTABLE else f"{spec.name}.so"
    arguments: list[Arg] = [toolchain.cxx]
    if target.backend == XPU:
        from opkiln.steps import sycl

        arguments = sycl.linker(inputs)
    if spec.kind != EXECUTABLE:
        arguments.append("-shared")
    if spec.emulated:
        # Its shared variables and its functions are its own, whatever else is loaded.
        arguments.append("-Wl,-Bsymbolic")
    arguments += [Anchored("", "stage", name) for name in objects]
    arguments += author_flags(spec, spec.ldflags)
    arguments += [f"-l{name}" for name in spec.libraries]
    if stubbed and _stubbed(inputs):
        # The library is needed although the link uses nothing from it. Some linkers would drop it.
        kept = ("-Wl,--push-state,--no-as-needed", Anchored("", "stage", _STUB), "-Wl,--pop-state")
        arguments += kept
    elif spec.abi != ABI_NONE:
        # By soname and without an rpath: torch's libraries are loaded before any op.
        arguments.append(Anchored("-L", "torch", "lib"))
        arguments += _torch_libraries(spec)
        if spec.kind == EXECUTABLE and toolchain.torch is not None:
            # A program runs without a loaded torch, so it needs torch's path. That path is in the
            # output, so it is also in the key.
            arguments.append(f"-Wl,-rpath,{toolchain.torch.path}/lib")
    if toolchain.shared_runtime:
        arguments.append(toolchain.shared_runtime)
    if target.backend == CUDA:
        arguments += _cuda_runtime(inputs)
    elif target.backend == ROCM:
        from opkiln.steps import hipcc

        arguments += hipcc.runtime(inputs)
    elif target.backend == XPU:
        arguments += sycl.libraries(inputs)
    arguments += [f"-L{path}" for path in inputs.users("library_path")]
    arguments += inputs.users("ldflags")
    arguments += ["-o", Anchored("", "stage", output)]
    return Step(
        kind="link", output=output, words=tuple(arguments), inputs=objects, memory=500 << 20
    )


def _cuda_runtime(inputs: PlanInputs) -> list[Arg]:
    """The CUDA runtime. It is static, so that the library also loads without one installed.

    A full-ABI extension of a CUDA torch shares torch's runtime. If a device link used libraries,
    their host code comes from the same libraries.
    """
    spec, device, torch = inputs.spec, inputs.device, inputs.toolchain.torch
    if device.family == NVRTC:
        return ["-ldl"]  # kernels are launched through the driver, which is opened at the first
    search: list[Arg] = [in_toolkit(device, path, "-L") for path in device.library_dirs]
    if is_relocatable(inputs.device_flags):
        search += [f"-l{name}" for name in (*spec.device_libraries, "cudadevrt")]
    if spec.abi == ABI_TORCH and torch is not None and torch.cuda is not None:
        # By soname: the PyPI toolkit has no libcudart.so without a version.
        runtime = f"-l:libcudart.so.{torch.cuda.partition('.')[0]}"
        # Kept although nothing may be taken from them: through torch_cuda an extension finds the
        # cuBLAS that torch has. Compilers of some distributions drop what looks unused.
        kept = ("-Wl,--push-state,--no-as-needed", "-lc10_cuda", "-ltorch_cuda", "-Wl,--pop-state")
        return [*kept, *search, runtime]
    return [*search, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
