"""Steps for NVRTC: CUDA sources on ``opkiln/op.h``, without nvcc.

One step makes one object. opkiln's own driver (``nvrtc/program.py``) starts the host compiler and
calls NVRTC. Authors write flags for nvcc. NVRTC gets the few that it knows, the host compiler gets
its own, and any other flag is an error.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from opkiln.base.build_model import Anchored, Arg, Step
from opkiln.base.model import ABI_NONE, ABI_TORCH, OpSpec
from opkiln.errors import SpecError
from opkiln.machine.arch import cuda
from opkiln.plan import host
from opkiln.plan.flags import host_options, is_relocatable, nvcc_options
from opkiln.plan.host import PlanInputs, torch_defines

# Without this, a step would also write to NVRTC's cache on disk.
ENVIRONMENT = (("CUDA_CACHE_DISABLE", "1"),)

_PROGRAM = "machine/nvrtc/program.py"
_HEADERS = "csrc"
_FOR_HOST = "csrc/opkiln/nvrtc/host"
_FOR_DEVICE = "csrc/opkiln/nvrtc/device"
_PRELUDE = "csrc/opkiln/nvrtc/host/prelude.h"

# Functions without annotation are for the device: those of the host are cut out, and only members
# and constexpr functions are left. A variable that only the host used is then unused (177).
_DEVICE_OPTIONS = ("-default-device", "-diag-suppress=177")

# Options of nvcc that NVRTC also has, without and with a value. All are without their dashes.
_SAME = frozenset((
    "use_fast_math", "lineinfo", "generate-line-info", "G", "device-debug",
    "extra-device-vectorization", "restrict", "w", "disable-warnings",
))  # fmt: skip
_SAME_WITH_VALUE = frozenset((
    "maxrregcount", "ftz", "prec-div", "prec-sqrt", "fmad", "diag-suppress", "diag-warn",
    "diag-error", "Xptxas", "ptxas-options",
))  # fmt: skip
# Options of nvcc that have no effect here: NVRTC compiles constexpr functions for the device
# anyway.
_NEEDLESS = frozenset((
    "expt-relaxed-constexpr", "Xfatbin", "fatbin-options", "rdc", "relocatable-device-code",
))  # fmt: skip

_MEMORY = 600 << 20


def compile_cuda(inputs: PlanInputs, source: str) -> Step:
    """The step that compiles one CUDA source for every architecture of the target. Raises SpecError
    for a source, or a flag, that only nvcc can compile."""
    device = inputs.device
    _check(inputs)
    given = _DividedFlags(inputs.spec, inputs.device_flags)
    words: list[Arg] = [device.path, "-I", "-S", "-B", Anchored("", "opkiln", _PROGRAM)]
    words += ["compile", *(host.anchor_in_toolkit(device, path) for path in device.libraries)]
    for image in cuda.images(cuda.parse(";".join(inputs.target.archs))):
        words += ["--image", image]
    words.append("--device")
    words += _device_words(inputs, given, source)
    words += ["--host", inputs.toolchain.cxx]
    words += _host_words(inputs, given, source)
    return host.compile_step(inputs.spec, source, words, _MEMORY)


def _check(inputs: PlanInputs) -> None:
    """Raise SpecError for an op that needs nvcc whatever its sources are."""
    spec = inputs.spec
    if spec.abi == ABI_TORCH:
        why = "it uses torch's own headers, which NVRTC cannot compile"
    elif spec.abi == ABI_NONE:
        why = "the op does not use torch, and opkiln/op.h does"
    elif is_relocatable(inputs.device_flags):
        why = "its device code is linked by a step of its own (-rdc=true)"
    else:
        return
    raise SpecError(f"op {spec.title} needs nvcc", why=why, hint="OPKILN_CUDA=nvcc")


class _DividedFlags:
    """An author's flags for nvcc, divided."""

    def __init__(self, spec: OpSpec, words: tuple[str, ...]) -> None:
        self.both: list[str] = []  # macros and include directories
        self.device: list[str] = []
        self.host: list[str] = []
        self.std = ""
        self.level = "-O3"  # of the host's code, as nvcc's -O is
        for option in nvcc_options(words):
            name = option.name.lstrip("-")
            if option.name in ("-D", "-U", "-I"):
                self.both.append(option.name + option.value)
            elif name == "std":
                self.std = option.value
            elif name in ("O", "optimize"):
                self.level = f"-O{option.value}"
            elif name in ("Xcompiler", "compiler-options"):
                self.host += option.value.split(",")
            elif name in _SAME_WITH_VALUE:
                to_nvrtc = "--ptxas-options" if name == "Xptxas" else option.name
                self.device.append(f"{to_nvrtc}={option.value}")
            elif name in _SAME:
                self.device += option.words
            elif name not in _NEEDLESS:
                raise SpecError(
                    f"op {spec.title}: NVRTC has no flag {' '.join(option.words)!r}",
                    why="it is one of nvcc's",
                    hint="OPKILN_CUDA=nvcc",
                )


def _device_words(inputs: PlanInputs, given: _DividedFlags, source: str) -> Iterator[Arg]:
    spec, device = inputs.spec, inputs.device
    yield f"-std={given.std or spec.std}"
    yield from ("-G",) if inputs.target.debug else ("-DNDEBUG",)
    yield from _DEVICE_OPTIONS
    yield from inputs.users("debug_cuda")
    yield from _make_preprocessor_flags(inputs.users("cppflags"))
    yield from host.author_flags(spec, (*given.both, *given.device))
    # NVRTC gets the text, not the file: the file's directory is where quoted includes begin.
    directory = posixpath.dirname(source)
    yield host.anchor_path(spec, directory, "-I") if directory else Anchored("-I", "src", "")
    ours = (Anchored("-I", "opkiln", path) for path in (_HEADERS, _FOR_DEVICE))
    toolkit = (host.anchor_in_toolkit(device, path, "-I") for path in device.include_dirs)
    yield from host.include_flags(inputs, *ours, *toolkit, system="-I")


def _host_words(inputs: PlanInputs, given: _DividedFlags, source: str) -> Iterator[Arg]:
    spec, target, toolchain = inputs
    device = inputs.device
    yield f"-std={given.std or spec.std}"
    yield from ("-O0", "-g3") if target.debug else (given.level, "-DNDEBUG")
    yield from host.position_flags(spec)
    yield from host.prefix_maps(spec)
    yield from host.reproducible_flags(toolchain, host.object_name(source))
    yield "-DOPKILN_NVRTC_HOST"
    yield from torch_defines(spec, toolchain)
    yield from inputs.users("cppflags")
    yield from host.author_flags(spec, (*given.both, *given.host))
    yield "-fno-lto"  # the kernels' symbols are read from assembly text
    prelude = ("-include", Anchored("", "opkiln", _PRELUDE))
    ours = Anchored("-isystem", "opkiln", _FOR_HOST)
    toolkit = (host.anchor_in_toolkit(device, path, "-isystem") for path in device.include_dirs)
    yield from host.include_flags(inputs, *prelude, ours, *toolkit)
    # op.h is a header of the system, so it is skipped when the text is divided.
    yield from host.op_header(spec)


def _make_preprocessor_flags(words: tuple[str, ...]) -> Iterator[str]:
    """The macros and include directories of ``CPPFLAGS``, in the form that NVRTC accepts."""
    for option in host_options(words):
        if option.name in ("-D", "-U", "-I"):
            yield option.name + option.value
        elif option.name == "-isystem":
            yield f"-I{option.value}"
        elif option.name == "-include":
            yield f"-include={option.value}"
