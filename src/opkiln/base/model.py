"""The records of an op: OpSpec, Registration, Op and Artifact, and the values of their fields.

A hit needs these; the records of a build are in ``build_model``. All are immutable and hold only
immutable values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from opkiln.base.lazy import Record
from opkiln.errors import SpecError

# The kinds of finished ops. The kind says how it is loaded.
LIBRARY = "library"  # registers torch ops when loaded: torch.ops.load_library
PYTHON = "python"  # a CPython extension module (pybind11 or by hand)
EXECUTABLE = "executable"  # a program; load() gives its path
PLAIN = "plain"  # a shared library with a C interface; load() gives a ctypes.CDLL

# The ABIs. The ABI says what the binary depends on.
ABI_STABLE = "torch-stable"  # torch's stable ABI: one binary for torch >= 2.10
ABI_TORCH = "torch"  # torch/extension.h: one torch version, one Python
ABI_NONE = "none"  # no torch at all

STABLE_VERSION = "2.10"  # of torch: the stable ABI's floor that opkiln builds for
STABLE_TAG = f"{ABI_STABLE}-{STABLE_VERSION}"

# The backends. The backend says what a library's kernels run on.
CPU = "cpu"
CUDA = "cuda"
ROCM = "rocm"
XPU = "xpu"
# Requested like a backend: CUDA sources that are compiled for the CPU (``OpSpec.emulated``).
EMULATED = "emulated"

# The dispatch keys under which a backend's library may register: torch calls ROCm's devices CUDA,
# and SYCL runs on CPUs, too.
DISPATCH_KEYS = {CPU: ("CPU",), CUDA: ("CUDA",), ROCM: ("CUDA",), XPU: ("XPU", "CPU")}

# The settings that add flags to every build. They are part of a target and so of a key.
_FLAGS = ("cppflags", "cxxflags", "ldflags", "cpath", "cplus_include_path", "library_path")
_DEVICE_FLAGS = ("cudaflags",)

PROGRAM = "main"  # the distribution of ops that a program declares
ONE_CALL = "jit"  # the distribution of ops that `opkiln.load` compiles

# Where packages carry libraries that were built elsewhere.
CARRIED = "prebuilt"  # below a package: for its own ops
SHARED = "opkiln_prebuilt"  # below a directory of sys.path: a name for each wheel of ops

# The forms of a declaration. A hint names its parts accordingly.
BUILDER = "builder"  # an OpBuilder's methods
DECORATOR = "decorator"  # the arguments of @opkiln.op
CALL = "call"  # the arguments of `load` or `load_inline`
EXTENSION = "extension"  # the arguments of a setuptools Extension

# Bump when the same inputs should give another binary for a reason that no argv shows.
PLAN_VERSION = 2

_LONGEST_NAME = 100  # of an op or a distribution: a file name with more around it must fit

INLINE_ROOT = "/opkiln/src"  # the root of sources that are not files
# The anchor of a shipped entry's headers outside of its package, with their paths on the machine
# that built it. Another machine may not have them.
OUTSIDE = "outside"
# opkiln's own directory, which is the anchor of its headers.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The part of the emulator that is compiled once, not with each kernel. Every emulated op has it.
EMULATOR_RUNTIME = os.path.join(PACKAGE, "csrc", "opkiln", "emulator", "runtime.cpp")


def flag_settings(backend: str) -> tuple[str, ...]:
    """The settings whose flags a build for this backend gets."""
    return _FLAGS if backend == CPU else (*_FLAGS, *_DEVICE_FLAGS)


class OpSpec(Record):
    """What an author declares. Paths are relative to ``root`` or absolute."""

    name: str  # the op's name, a C identifier
    distribution: str  # the package that owns the op; ops of two packages never collide
    root: str  # absolute; the anchor that makes keys independent of where a package lies
    sources: tuple[str, ...]  # C++, CUDA or SYCL files
    include_dirs: tuple[str, ...] = ()  # searched by #include
    cxx_args: tuple[str, ...] = ()  # flags for the C++ compiler
    ldflags: tuple[str, ...] = ()  # flags for the linker
    libraries: tuple[str, ...] = ()  # linked, by name, without -l
    kind: str = LIBRARY  # library, python, plain or executable
    abi: str = ABI_STABLE  # torch-stable, torch or none
    std: str = "c++20"  # the C++ standard
    vectorize: bool = True  # compile for the target CPU's features, not only its baseline
    backend: str = CPU  # one library per op and backend
    emulated: bool = False  # CUDA sources that the emulator runs on the CPU; the backend is the CPU
    device_args: tuple[str, ...] = ()  # flags for nvcc, hipcc or the SYCL compiler
    device_libraries: tuple[str, ...] = ()  # linked with relocatable device code, by name
    # Functions whose schemas are defined in Python, as `namespace::name`. The library must register
    # a kernel for each, and must not define them again.
    kernels: tuple[str, ...] = ()
    schemas: tuple[str, ...] = ()  # of all functions, to compare with the library's; in no key
    inline: tuple[tuple[str, str], ...] = ()  # (source, text) of sources that are in no file
    declared_by: str = BUILDER  # for messages; in no key

    @property
    def title(self) -> str:
        """Its name for people, as ``transformer (norms, float32)``."""
        return display_name(self.name)

    @property
    def is_known_by_name(self) -> bool:
        """Whether a command such as `opkiln build NAME` finds it."""
        return self.distribution not in (ONE_CALL, PROGRAM)


def place_of(distribution: str, op: str) -> str:
    """The directory of an op below ``ops`` or ``receipts`` of a layer: ``<distribution>/<op>``.
    Raises SpecError for a name that could lead elsewhere."""
    check_names(distribution, op)
    return f"{distribution}/{op}"


def check_names(distribution: str, op: str) -> None:
    """Refuse names that cannot be directories of a layer. Raises SpecError."""
    good = isinstance(op, str) and op.isascii() and op.isidentifier()
    if not good or len(op) > _LONGEST_NAME:
        raise SpecError(
            f"{str(op)[:80]!a} cannot be the name of an op",
            why=f"a name is a C identifier of at most {_LONGEST_NAME} characters: it becomes a "
            "file, a module and a macro",
        )
    # The name of a package on PyPI may have a '-' or a '.', that of one to import may not.
    words = distribution.replace("-", "_").replace(".", "_")
    letters = f"_{words}".isidentifier() and len(words.encode()) <= _LONGEST_NAME
    if not letters or distribution[:1] in ("", "-", "."):
        raise SpecError(
            f"{distribution[:80]!a} cannot be the name of a distribution (op {op})",
            why=f"a name has at most {_LONGEST_NAME} bytes: letters, digits, '_', '-' and '.'. It "
            "does not begin with '-' or '.'. It becomes a directory of the store.",
            hint='DISTRIBUTION = "my_package"    # in the builder class',
        )


def texts(where: str, given: Any) -> tuple[str, ...]:
    """A text, or several, as a tuple; a path is a text. Raises SpecError for anything else."""
    one = isinstance(given, (str, os.PathLike)) or not isinstance(given, Iterable)
    found: list[str] = []
    for each in (given,) if one else given:
        if not isinstance(each, (str, os.PathLike)) or not os.fspath(each):
            raise SpecError(
                f"{where} has {repr(each)[:80]}", why="it takes a text, or a list of texts"
            )
        found.append(os.fspath(each))
    return tuple(found)


def display_name(name: str) -> str:
    """The name of a library for people: ``transformer__norms__float32`` is the library of
    ``transformer (norms, float32)``."""
    op, *parts = name.split("__")
    return f"{op} ({', '.join(parts)})" if op and parts else name


# The overloads of a function besides the default one.
NO_GRAD = "no_grad"  # without a gradient, of a function that has one
UNSERVED = "unserved"  # takes the calls that a kernel does not serve
NATIVE = "native"  # what libraries implement if every call is to be compared
# What a declaration has of each function in Python.
REGISTERED = ("reference", "fake", "backward", "vmap", "variant", "tune_key")


class Registration(Record):
    """What torch is told of a library's functions, by the decorator that declares them."""

    namespace: str  # below torch.ops
    schemas: tuple[str, ...]  # one for each function, without a namespace
    functions: Any  # those in Python: the DeclaredFunctions of their builder
    # The overloads that a library's function is registered as; "" is the default one.
    overloads: tuple[str, ...]
    passes_on: bool  # whether the reference takes the calls that a kernel does not serve

    @property
    def names(self) -> tuple[str, ...]:
        """The op's functions."""
        return tuple(map(function_name, self.schemas))

    def overloads_of(self, name: str) -> tuple[str, ...]:
        """Those of one function: without a gradient it has no overload that leaves one out."""
        declared = self.functions.declared.get(name)
        if declared is not None and declared.has_gradient:
            return self.overloads
        return tuple([each for each in self.overloads if each != NO_GRAD])


def function_name(schema: str) -> str:
    """The name of the function that a schema declares."""
    return schema.partition("(")[0].strip()


class Op(Record):
    """An op to load: its sources, its registration, its devices."""

    spec: OpSpec  # its sources and flags
    registration: Registration | None = None  # with torch; None: it is not registered
    rule: Callable[[list[str]], Any] | None = None  # the author's filter_ccs
    asked: str = ""  # an arch list given in the call; it overrides every setting

    @property
    def name(self) -> tuple[str, str, str]:
        """Its identity in a process: one library per distribution, op and backend."""
        spec = self.spec
        return spec.distribution, spec.name, EMULATED if spec.emulated else spec.backend

    @property
    def has_reference(self) -> bool:
        """Whether PyTorch code can serve it where a native library cannot."""
        return self.registration is not None


class Artifact(Record):
    """A finished, verified file that may be loaded, and where it was found."""

    path: str  # the file
    sha256: str  # its digest
    origin: str  # prebuilt, store, layer, built
    compiled: int = 0  # steps that ran to make it now; 0 for one that was found
    seconds: float = 0.0  # how long that took
    unobserved: str = ""  # why only this process may use it
