"""Steps for hipcc: HIP sources, and CUDA sources that were translated to HIP.

A build compiles the translated copy (``toolchain.hipify``). The copy has the same file names as the
original, so the plan is the same for both. hipcc puts the path after ``-o`` between double quotes
and passes it to a shell, so steps ask for plain paths.

``-MD`` lists what the compile for the host read. The compiles for the devices may read other
headers and list nothing. So a build depends on the whole translated copy and on the listed files.
"""

from __future__ import annotations

from opkiln.base.build_model import Arg, Step
from opkiln.base.digest import key
from opkiln.base.model import ABI_TORCH
from opkiln.errors import SpecError
from opkiln.machine.arch import hip
from opkiln.plan import flags as taken
from opkiln.plan import host
from opkiln.plan.host import HIP_DEFINES, PlanInputs, torch_defines, torch_includes

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
    """Refuse flags that hipcc must not get. Raises SpecError. ``variable`` is the variable that the
    flags come from; empty for the author's flags."""
    for flag in flags:
        if flag.startswith(_REFUSED):
            why = "the plan chooses architectures, passes and the ROCm"
            instead = "PYTORCH_ROCM_ARCH chooses architectures"
        elif flag == _RELOCATABLE:
            why = "relocatable device code needs a device link, which opkiln does not do for HIP"
            instead = "define kernels in the file that calls them"
        elif "\n" in flag:
            why, instead = "hipcc passes its flags to a shell, which would drop the newline", ""
        else:
            continue
        what = f"op {op}: the hipcc flag {flag!r} is not allowed"
        raise SpecError(what, why=why, hint=f"unset {variable}" if variable else instead)
    taken.check(op, flags, variable)


def compile_hip(inputs: PlanInputs, source: str) -> Step:
    """The step that compiles one source for every architecture of the target."""
    spec, target, toolchain = inputs
    authors = inputs.device_flags
    # No launcher: hipcc cannot be run through ccache or sccache.
    words: list[Arg] = [inputs.device.path, "-x", "hip", *host.standard_flags(spec, authors)]
    words += [*host.optimisation_flags(target, authors), *host.position_flags(spec)]
    words += hip.flags(hip.parse(";".join(target.archs)))
    words += host.prefix_maps(spec)
    words += [host.REDEFINED, host.TIMESTAMP]
    # hipcc makes names of internal device symbols from this; by default, from the source's path.
    words.append(f"-cuid={key('cuid', (spec.name, host.object_name(source)))[:16]}")
    words += HIP_DEFINES
    words.append(_WARP_SYNC)
    if spec.abi == ABI_TORCH:
        words += _TORCH_HALF
    words += torch_defines(spec, toolchain)
    # nvcc includes cuda_runtime.h into every file; do the same here.
    words += ["-include", "hip/hip_runtime.h"]
    words += inputs.users("cppflags")
    words += host.author_flags(spec, authors)
    words += host.include_flags(inputs, *torch_includes(spec))
    words += host.op_header(spec)
    memory = _MEMORY_WITH_TORCH if spec.abi == ABI_TORCH else _MEMORY
    return host.compile_step(spec, source, words, memory, plain_paths=True)


def runtime(inputs: PlanInputs) -> list[Arg]:
    """The link arguments for the HIP runtime, by soname. A ROCm torch has it loaded already."""
    device = inputs.device
    torch: list[Arg] = ["-lc10_hip", "-ltorch_hip"] if inputs.spec.abi == ABI_TORCH else []
    search = [host.anchor_in_toolkit(device, path, "-L") for path in device.library_dirs]
    return [*torch, *search, "-lamdhip64"]
