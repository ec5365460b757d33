"""The records that travel between the layers: OpSpec, Op, Target, Toolchain, Plan, Artifact.

All of them are immutable and hold only immutable values.
"""

from __future__ import annotations

import os
from typing import Any

from opkiln.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# What a finished op is, and so how it is loaded.
LIBRARY = "library"  # registers torch ops when loaded: torch.ops.load_library
PYTHON = "python"  # a CPython extension module (pybind11 or by hand)
EXECUTABLE = "executable"  # a program; load() gives its path
PLAIN = "plain"  # a shared library with a C interface; load() gives a ctypes.CDLL

# What the binary depends on.
ABI_STABLE = "torch-stable"  # torch's stable ABI: one binary for torch >= 2.10
ABI_TORCH = "torch"  # torch/extension.h: one torch version, one Python
ABI_NONE = "none"  # no torch at all

STABLE_VERSION = "2.10"  # of torch: the stable ABI's floor that opkiln builds for
STABLE_TAG = f"{ABI_STABLE}-{STABLE_VERSION}"

# What a library's kernels run on.
CPU = "cpu"
CUDA = "cuda"
ROCM = "rocm"
XPU = "xpu"

# The dispatch keys under which a backend's library may register: torch calls ROCm's devices CUDA,
# and SYCL runs on CPUs, too.
DISPATCH_KEYS = {CPU: ("CPU",), CUDA: ("CUDA",), ROCM: ("CUDA",), XPU: ("XPU", "CPU")}

# The settings that add flags to every build. They are part of a target and so of a key.
_FLAGS = ("cppflags", "cxxflags", "ldflags", "cpath", "cplus_include_path", "library_path")
_DEVICE_FLAGS = ("cudaflags",)

ONE_CALL = "jit"  # the distribution of what `opkiln.load` compiles: it belongs to no package

# Where packages carry libraries that were built elsewhere.
CARRIED = "prebuilt"  # below a package: for its own ops
SHARED = "opkiln_prebuilt"  # below a directory of sys.path: a name for each wheel of ops

# Who declares a spec, and so in which words a hint speaks of its parts.
BUILDER = "builder"  # an OpBuilder's methods
CALL = "call"  # the arguments of `load` or `load_inline`
EXTENSION = "extension"  # the arguments of a setuptools Extension

# Bump when the same inputs should give another binary for a reason that no argv shows.
PLAN_VERSION = 1

INLINE_ROOT = "/opkiln/src"  # where sources that are in no file are said to lie
# The anchor of a shipped entry's headers that lie outside of its package, by their paths where it
# was built: on another machine there may be none.
OUTSIDE = "outside"
PACKAGE = os.path.dirname(os.path.abspath(__file__))  # opkiln itself: the anchor of its headers


def flag_settings(backend: str) -> tuple[str, ...]:
    """The settings whose flags a build for this backend gets."""
    return _FLAGS if backend == CPU else (*_FLAGS, *_DEVICE_FLAGS)


class OpSpec(Record):
    """What an author declares. Paths are relative to ``root`` or absolute."""

    name: str
    distribution: str  # the package that owns the op; ops of two packages never collide
    root: str  # absolute; the anchor that makes keys independent of where a package lies
    sources: tuple[str, ...]
    include_dirs: tuple[str, ...] = ()
    cxx_args: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    kind: str = LIBRARY
    abi: str = ABI_STABLE
    std: str = "c++20"
    vectorize: bool = True  # compile for the target CPU's features, not only its baseline
    backend: str = CPU  # one library per op and backend
    device_args: tuple[str, ...] = ()  # flags for nvcc, hipcc or the SYCL compiler
    device_libraries: tuple[str, ...] = ()  # linked with relocatable device code, by name
    # Functions whose schemas are defined in Python, as `namespace::name`. The library must register
    # a kernel for each, and must not define them again.
    kernels: tuple[str, ...] = ()
    inline: tuple[tuple[str, str], ...] = ()  # (source, text) of sources that are in no file
    declared_by: str = BUILDER  # for messages; in no key


class Registration(Record):
    """What an author declares beside the sources. Each part is called when it is needed."""

    namespace: str
    schemas: tuple[str, ...]
    reference: Callable[[], Any] | None
    fake: Callable[[], Any] | None = None
    autograd: Callable[[], Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The op's functions."""
        return tuple(map(function_name, self.schemas))


def function_name(schema: str) -> str:
    """The name of the function that a schema declares."""
    return schema.partition("(")[0].strip()


class Op(Record):
    """An op to load: what it is built from, how it is registered, and for which devices."""

    spec: OpSpec
    registration: Registration | None = None
    rule: Callable[[list[str]], Any] | None = None  # the author's filter_ccs
    asked: str = ""  # an arch list given in the call; it goes before every setting

    @property
    def name(self) -> tuple[str, str, str]:
        """Its identity in a process: one library per distribution, op and backend."""
        return self.spec.distribution, self.spec.name, self.spec.backend

    @property
    def has_reference(self) -> bool:
        """Whether PyTorch code can serve it where a native library cannot."""
        return self.registration is not None and self.registration.reference is not None


class Target(Record):
    """What to build for. Holds no trace of the machine that happens to run the build."""

    backend: str  # cpu, cuda, rocm, xpu
    system: str  # linux
    machine: str  # x86_64, aarch64
    cpu: str  # a psABI level: x86-64-v4; or armv8-a
    cpu_features: tuple[str, ...]  # beyond the level, explicit and sorted
    abi_tag: str  # torch-stable-2.10[-cuda13], torch-2.13.0+cpu-cxx11-cpython-311, none
    debug: bool = False
    flags: tuple[tuple[str, tuple[str, ...]], ...] = ()  # the user's own: (("cxxflags", (...)),)
    archs: tuple[str, ...] = ()  # of the device, canonical, as the op's filter left them: 9.0a+PTX


class TorchSDK(Record):
    """What a build needs of torch, read from its files without importing it."""

    path: str  # the package directory
    version: str
    identity: str  # digest of what makes two torches different
    cuda: str | None
    hip: str | None
    cxx11_abi: bool


class DeviceCompiler(Record):
    """A compiler of device code, and what is known of it."""

    family: str  # nvcc, hipcc, icpx, sycl-rt
    path: str  # absolute, of the program itself and not of a script that runs it
    home: str  # the toolkit's root: the anchor "toolkit"
    version: str  # 13.0, 5.2.3
    identity: str  # digest over the programs and files that decide its output
    archs: tuple[str, ...]  # what it says it can compile for: 7.5, 8.0, …
    accepts: frozenset[str]  # flags that a probe has shown to work
    include_dirs: tuple[str, ...]  # of its runtime's headers
    library_dirs: tuple[str, ...]  # of its runtime's libraries
    host: str = ""  # the host compiler it is to use, where that is not the toolchain's own
    # Below the anchor "wheels": where headers are that the toolkit lacks.
    wheel_include_dirs: tuple[str, ...] = ()


class Toolchain(Record):
    """The compilers for a target, and what is known of them."""

    family: str  # gcc, clang
    cxx: str  # absolute path
    version: str
    machine: str  # what it compiles for: x86_64-linux-gnu
    identity: str  # digest over the programs that decide its output
    accepts: frozenset[str]  # flags that a compile probe has shown to work
    include_dirs: tuple[str, ...]  # its own search path, in order
    launcher: str | None = None
    torch: TorchSDK | None = None
    python_include: str = ""
    device: DeviceCompiler | None = None
    shared_runtime: str = ""  # libstdc++ to link, for a compiler that would link its own static one
    cross: bool = False  # for another machine than this one, whose torch is not here to link


class Anchored(Record):
    """An argument that holds a path below a named anchor: prefix + anchor's path + rest.

    A plan is made of these, so that it (and the keys made of it) says ``src/cpu.cpp`` wherever the
    package is installed and whatever staging directory a build gets.
    """

    prefix: str
    anchor: str  # src, opkiln, stage, torch, python, toolkit, wheels, threads, abs
    path: str
    suffix: str = ""


Arg = str | Anchored


class Step(Record):
    """One process to run: its argv, its inputs and its one output below ``stage``."""

    # compile, stub (a library to link in the place of one that is not here), device-link, link
    kind: str
    output: str  # relative to the staging directory
    argv: tuple[Arg, ...]
    source: str = ""  # compile: the source, for people
    depfile: str = ""  # compile: where the compiler lists what it read
    inputs: tuple[str, ...] = ()  # link, device-link: outputs of other steps
    memory: int = 512 << 20  # what it is expected to take at most, for each thread
    threads: int = 1  # the most it can use; what it gets replaces the anchor "threads"
    plain_paths: bool = False  # the compiler hands its arguments to a shell


class Plan(Record):
    """The exact steps that turn a spec into an artifact for a target; JIT and AOT run the same."""

    spec: OpSpec
    target: Target
    toolchain: Toolchain
    steps: tuple[Step, ...]
    environment: tuple[tuple[str, str], ...]
    output: str  # the file that is the artifact, relative to stage


class Artifact(Record):
    """A finished, verified file that may be loaded, and where it was found."""

    path: str
    sha256: str
    origin: str  # prebuilt, store, layer, built
    compiled: int = 0  # steps that ran to make it now; 0 for one that was found
    seconds: float = 0.0
