"""Steps for hipcc: HIP sources, and CUDA sources that were translated to HIP.

A build compiles the translated copy (``toolchain.hipify``). The copy has the same file names as the
original, so the plan is the same for both. hipcc puts the path after ``-o`` between double quotes
and passes it to a shell, so steps ask for plain paths.

``-MD`` lists what the compile for the host read. The compiles for the devices may read other
headers and list nothing. So a build depends on the whole translated copy and on the listed files.
"""

from __future__ import annotations

from opkiln.arch import hip
from opkiln.build_model import Arg, Step, Target, Toolchain
from opkiln.digest import key
from opkiln.errors import SpecError
from opkiln.model import ABI_TORCH, EXECUTABLE, OpSpec
from opkiln.steps import flags as taken
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
from opkiln.steps.host import HIP_DEFINES, torch_defines, torch_includes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCES = (".cu", ".hip")

_MEMORY = 900 << 20
# torch's own headers need far more.
_MEMORY_WITH_TORCH = 3000 << 20

# torch's headers define these operators and conversions themselves.
_TORCH_HALF = ("-D__HIP_NO_HALF_OPERATORS__=1", "-D__HIP_NO_HALF_CONVERSIONS__=1")
# Enables CUDA's __shfl_down_sync and the like, which hipify does not translate. Since ROCm 6.2.
_WARP_SYNC = "-DHIP_ENABLE_WARP_SYNC_BUILTINS=1"

# Prefixes of flags that choose architectures, passes or another ROCm. The plan sets these itself.
_REFUSED = (
    "--offload-", "--no-offload-", "--amdgpu-target", "--cuda-", "--hip-link", "--rocm-path",
    "--hip-path", "--rocm-device-lib-path", "--hip-device-lib-path", "--hip-version", "--genco",
    "-cuid", "-fuse-cuid", "-parallel-jobs", "-Xarch_", "-nogpu", "-mcpu", "-march",
)  # fmt: skip
_RELOCATABLE = "-fgpu-rdc"


def check(op: str, flags: tuple[str, ...], variable: str = "") -> None:
    """Refuse flags that hipcc must not get. Raises SpecError.

    ``variable`` is the variable that the flags come from; empty for the author's flags.
    """
    hint = f"unset {variable}" if variable else ""
    for flag in flags:
        if flag.startswith(_REFUSED):
            raise SpecError(
                f"op {op}: the hipcc flag {flag!r} is not allowed",
                why="the plan chooses architectures, passes and the ROCm",
                hint=hint or "PYTORCH_ROCM_ARCH chooses architectures",
            )
        if flag == _RELOCATABLE:
            raise SpecError(
                f"op {op}: the hipcc flag {flag!r} is not allowed",
                why="relocatable device code needs a device link, which opkiln does not do for HIP",
                hint=hint or "define kernels in the file that calls them",
            )
        if "\n" in flag:
            raise SpecError(
                f"op {op}: the hipcc flag {flag!r} is not allowed",
                why="hipcc passes its flags to a shell, which would drop the newline",
                hint=hint,
            )
    taken.check(op, flags, variable)


def compile_step(
    spec: OpSpec,
    target: Target,
    toolchain: Toolchain,
    flags: Mapping[str, tuple[str, ...]],
    source: str,
) -> Step:
    """The step that compiles one source for every architecture of the target."""
    device = toolchain.device
    assert device is not None  # a plan for this backend is made with its compiler
    output = object_name(source)
    authors = (*spec.device_args, *flags.get("cudaflags", ()))
    # No launcher: hipcc cannot be run through ccache or sccache.
    arguments: list[Arg] = [device.path, "-x", "hip"]
    if not any(flag.startswith(("-std", "--std")) for flag in authors):
        arguments.append(f"-std={spec.std}")
    if target.debug:
        arguments += ["-O0", "-g3"]
    else:
        optimised = any(flag.startswith("-O") for flag in authors)
        arguments += ["-DNDEBUG"] if optimised else ["-O3", "-DNDEBUG"]
    if spec.kind != EXECUTABLE:
        arguments.append("-fPIC")
    arguments += hip.flags(hip.parse(";".join(target.archs)))
    arguments += prefix_maps(spec)
    arguments += [REDEFINED, TIMESTAMP]
    # hipcc makes names of internal device symbols from this; by default, from the source's path.
    arguments.append(f"-cuid={key('cuid', (spec.name, output))[:16]}")
    arguments += HIP_DEFINES
    arguments.append(_WARP_SYNC)
    if spec.abi == ABI_TORCH:
        arguments += _TORCH_HALF
    arguments += torch_defines(spec, toolchain)
    # nvcc includes cuda_runtime.h into every file; do the same here.
    arguments += ["-include", "hip/hip_runtime.h"]
    arguments += flags.get("cppflags", ())
    arguments += author_flags(spec, authors)
    arguments += [anchored(spec, path, "-I") for path in spec.include_dirs]
    arguments += [f"-I{path}" for path in flags.get("cpath", ())]
    arguments += torch_includes(spec)
    arguments += [f"-isystem{path}" for path in flags.get("cplus_include_path", ())]
    arguments += op_header(spec)
    return Step(
        kind="compile",
        output=output,
        words=tuple(arguments),
        file=anchored(spec, source),
        source=source,
        memory=_MEMORY_WITH_TORCH if spec.abi == ABI_TORCH else _MEMORY,
        plain_paths=True,
    )


def runtime(spec: OpSpec, toolchain: Toolchain) -> list[Arg]:
    """The link arguments for the HIP runtime, by soname. A ROCm torch has it loaded already."""
    device = toolchain.device
    assert device is not None  # a plan for this backend is made with its compiler
    torch: list[Arg] = ["-lc10_hip", "-ltorch_hip"] if spec.abi == ABI_TORCH else []
    search = [in_toolkit(device, path, "-L") for path in device.library_dirs]
    return [*torch, *search, "-lamdhip64"]
