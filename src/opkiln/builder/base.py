"""OpBuilder: the class form of a declaration, with the interface authors of op builders know.

A subclass says what its op is made of; ``spec()`` collects that into one frozen OpSpec, and
``load()`` hands it to the loader. A builder does no work when it is made or imported.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from opkiln.base.forks import cached_property
from opkiln.base.model import (
    ABI_STABLE,
    BUILDER,
    CPU,
    CUDA,
    EMULATED,
    LIBRARY,
    NO_GRAD,
    PROGRAM,
    REGISTERED,
    ROCM,
    XPU,
    Op,
    OpSpec,
    Registration,
    function_name,
)
from opkiln.errors import OpkilnError, SpecError, UnknownBackend, UsageError, told_briefly
from opkiln.loading import loader
from opkiln.loading.here import Loaded, here
from opkiln.loading.register import is_tracing, load_in_trace
from opkiln.settings import build_switch, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import ClassVar, Self

    from opkiln.builder.parameters import Value

# (package, op) -> (the file that declares it, its namespace)
_claimed: dict[tuple[str, str], tuple[str, str]] = {}


class DeclaredFunctions:
    """The functions of a library. ``module`` declares them, if it is another than the library's:
    as long as it is not imported, their schemas are read from its text."""

    def __init__(self, module: str = "") -> None:
        self.module = module
        self.declared: dict[str, Any] = {}  # the Entrance of each, by name
        self._read: tuple[str, ...] | None = None

    def __bool__(self) -> bool:
        return bool(self.module or self.declared)

    @property
    def schemas(self) -> tuple[str, ...]:
        """The schema of each, without a namespace."""
        module = sys.modules.get(self.module)
        if self.module and (not module or getattr(module.__spec__, "_initializing", False)):
            if self._read is None:
                from opkiln.builder import reading

                self._read = reading.schemas_in(self.module, self)
            if self._read:
                return self._read
            self.import_module()
        return tuple([each.schema for each in self.declared.values()])

    def import_module(self) -> None:
        """Have the functions declared."""
        if self.module:
            import_module(self.module)

    def by_part(self) -> dict[str, list[tuple[str, Any]]]:
        """Every function in Python that may be called, with its name, by the part of a declaration
        that it is. If the module fails, the class of its exception stands for the references."""
        try:
            self.import_module()
        except Exception as error:  # whoever needs the functions is told
            return {"reference": [(self.module, type(error))]}
        found: dict[str, list[tuple[str, Any]]] = {}
        for part in REGISTERED:
            for name, each in self.declared.items():
                if part in each.parts:
                    found.setdefault(part, []).append((name, each.parts[part]))
        return found


class OpBuilder:
    """What authors subclass. Override ``sources()`` at least.

    ``NAME`` is the op's name, a C identifier. ``BUILD_VAR`` is a variable that selects the op for
    precompilation, besides ``OPKILN_BUILD_<NAME>``. Paths are relative to the top-level package of
    the class. ``opkiln.library`` gives it functions that torch knows; an op without is an extension
    module, a program or a plain library, see ``KIND``.
    """

    NAME = ""  # the op's name, a C identifier
    BUILD_VAR = ""  # a variable that selects the op for precompilation
    KIND = LIBRARY  # what the file is: library, python, plain or executable
    ABI = ABI_STABLE  # what it is compiled against: torch-stable, torch or none
    NAMESPACE = ""  # of the op's functions; the distribution's name when empty
    DISTRIBUTION = ""  # the owning package; the top-level package of the class when empty
    BACKENDS: tuple[str, ...] = (CPU,)  # what the op has sources for, the preferred one first
    # Run the CUDA sources on the CPU, by the emulator: for tests on machines without a GPU.
    EMULATE = False
    FUNCTIONS = DeclaredFunctions()  # those that @kit.op() declares
    PARTS: tuple[type[OpBuilder], ...] = ()  # of what is several libraries under one name
    PASSES_ON = False  # the reference takes the calls that a kernel does not serve
    PARAMETERS: Any = ()  # the compile-time parameters of decorated functions
    VALUES: tuple[Value, ...] = ()  # of the parameters, in the builder of one variant
    OVERLOADS: tuple[str, ...] = ("", NO_GRAD)  # what a library's function is registered as
    _made: ClassVar[dict[tuple[Value, ...], type[OpBuilder]]] = {}  # those of the variants
    _translated: OpSpec | None = None  # what hipify_extension() made, for builder()

    def __init__(
        self, name: str | None = None, *, backend: str | None = None, archs: str | None = None
    ) -> None:
        """``backend`` and ``archs`` (an arch list) ask for one of ``BACKENDS`` by name; left out,
        they are what this machine and the settings say. Raises UsageError."""
        self.name = name or self.NAME
        self.error_log: str | None = None
        self.remarks: list[str] = []
        self.ask_for(backend, archs)

    def ask_for(self, backend: str | None, archs: str | None) -> None:
        """As the arguments of the same names: for builders whose constructor does not take them.

        Raises UsageError, and SpecError for a name in ``BACKENDS`` that is no backend.
        """
        self._check_tuple("BACKENDS")
        if unknown := set(self.BACKENDS) - {CPU, CUDA, ROCM, XPU}:
            raise SpecError(
                f"op {self.name}: BACKENDS names {', '.join(sorted(unknown))}",
                why="backends are cpu, cuda, rocm and xpu",
            )
        emulated = backend == EMULATED and CUDA in self.BACKENDS
        if backend is not None and backend not in self.BACKENDS and not emulated:
            raise UnknownBackend(
                f"op {self.name} has no version for {backend!r}",
                why="it has: " + ", ".join(self.BACKENDS),
            )
        self._asked_backend = backend
        self._asked_archs = archs or ""

    def _check_tuple(self, attribute: str) -> None:
        """Refuse anything but a tuple of strings, such as ``("one")``. Raises SpecError."""
        value = getattr(self, attribute)
        if isinstance(value, str):
            raise SpecError(
                f"op {self.name}: {attribute} is a string, not a tuple",
                why="a tuple of one element needs a comma after it",
                hint=f"{attribute} = ({value!r},)",
            )
        if not isinstance(value, (tuple, list)) or not all(isinstance(v, str) for v in value):
            raise SpecError(f"op {self.name}: {attribute} is not a tuple of strings: {value!r}")

    # What an author declares

    def sources(self) -> Sequence[str]:
        """The C++ files of the op."""
        raise SpecError(f"{type(self).__name__} declares no sources()")

    def include_paths(self) -> Sequence[str]:
        """Directories for ``#include``."""
        return ()

    def cxx_args(self) -> Sequence[str]:
        """Flags for the C++ compiler; they come after opkiln's own and so win."""
        return ()

    def extra_ldflags(self) -> Sequence[str]:
        """Flags for the linker."""
        return ()

    def libraries_args(self) -> Sequence[str]:
        """Libraries to link, by name, without ``-l``."""
        return ()

    def kernels(self) -> Sequence[str]:
        """The functions that the library for ``backend`` implements; all unless an author says
        otherwise. The reference serves the others. A library that lacks one of these is refused."""
        return [function_name(schema) for schema in self.FUNCTIONS.schemas]

    def absolute_name(self) -> str:
        """The dotted name under which the op would be installed."""
        return f"{self.distribution}.ops.{self.name}.{self.name}_op"

    # What follows from it

    @classmethod
    def declare(cls, function: Any) -> None:
        """Add a function, or replace one."""
        cls.forget()
        cls.FUNCTIONS.declared.pop(function.name, None)
        cls.FUNCTIONS.declared[function.name] = function

    @classmethod
    def forget(cls) -> None:
        """Have this process load the libraries anew: they have other functions, or sources."""
        libraries = (cls, *cls._made.values())
        here.served = {
            place: each for place, each in here.served.items() if place[0] not in libraries
        }
        for each in libraries:
            loader.forget(each().distribution, each.NAME)

    @classmethod
    def for_device(cls, device: str) -> Self:
        """A builder of the library for tensors on such a device."""
        builder = cls()
        builder.ask_for(backend_of(cls, device), None)  # an author's may take no arguments
        return builder

    @classmethod
    def variant(cls, values: tuple[Value, ...]) -> type[OpBuilder]:
        """The builder of the variant with these values."""
        found = cls._made.get(values) if values else cls
        if found is None:
            ending = cls.PARAMETERS.suffix(values)
            overloads = cls.OVERLOADS
            if cls.PARAMETERS.are_overloads:
                overloads = tuple(f"{ending}_{each}" if each else ending for each in overloads)
            words = {
                "__module__": cls.__module__,
                "NAME": cls.PARAMETERS.library(values),
                "VALUES": values,
                "OVERLOADS": overloads,
            }
            found = cls._made[values] = type(f"{cls.__name__}_{ending}", (cls,), words)
        return found

    @classmethod
    def variants(cls) -> tuple[type[OpBuilder], ...]:
        """The builders of the op's variants or parts, each with a library of its own; empty for an
        op that is one library."""
        if cls.VALUES or not cls.PARAMETERS:
            return tuple(each for part in cls.PARTS for each in part.variants() or (part,))
        return tuple(map(cls.variant, cls.PARAMETERS.combinations()))

    @classmethod
    def ahead(cls) -> tuple[type[OpBuilder], ...]:
        """Those of ``variants`` that are built if the op is asked for as a whole."""
        found = cls.variants()
        return tuple(
            each for each in found if not each.VALUES or each.PARAMETERS.is_ahead(each.VALUES)
        )

    @classmethod
    def emulates(cls) -> bool:
        """Whether calls with CPU tensors run the op's CUDA kernels in the emulator: ``EMULATE`` is
        set, or ``OPKILN_CUDA=emulated`` and all CUDA sources are ``.cu`` files, as with op.h."""
        if CUDA not in cls.BACKENDS:
            return False
        if cls.EMULATE or settings.cuda != EMULATED:
            return cls.EMULATE
        builders = [each() for each in cls.PARTS or (cls,)]
        for each in builders:
            each.ask_for(CUDA, None)
        return all(source.endswith(".cu") for each in builders for source in each.sources())

    @cached_property
    def backend(self) -> str:
        """Which of ``BACKENDS`` this builder serves."""
        return self._asked_backend or self.BACKENDS[0]

    _declared_by = BUILDER  # for messages

    @cached_property
    def distribution(self) -> str:
        """The package that owns the op: "main" for a program, and for code of no module."""
        name = self.DISTRIBUTION or type(self).__module__.partition(".")[0]
        return PROGRAM if name in ("", "__main__") else name

    @cached_property
    def root(self) -> str:
        """The directory that relative paths start from."""
        return root_of(type(self).__module__, directory_of(self._declared_in))

    def spec(self) -> OpSpec:
        """The declaration as one immutable record."""
        flags = self.strip_empty_entries(self.cxx_args())
        if any(flag.startswith("-m") for flag in flags):
            # cpu_arch() gives authors a flag that the plan sets itself; each flag has one owner.
            own = self._cpu_flags()
            flags = [flag for flag in flags if flag not in own]
        return OpSpec(
            name=self.name,
            distribution=self.distribution,
            root=self.root,
            sources=tuple(self.strip_empty_entries(self.sources())),
            include_dirs=tuple(self.strip_empty_entries(self.include_paths())),
            cxx_args=tuple(flags),
            ldflags=tuple(self.strip_empty_entries(self.extra_ldflags())),
            libraries=tuple(self.strip_empty_entries(self.libraries_args())),
            kind=self.KIND,
            abi=self.ABI,
            kernels=self._kernels(),
            schemas=self.FUNCTIONS.schemas,
            declared_by=self._declared_by,
        )

    def _kernels(self) -> tuple[str, ...]:
        named, functions = self.kernels(), OpBuilder.kernels(self)
        listed = self.strip_empty_entries(named)
        unknown = ", ".join(name for name in listed if name not in functions)
        if unknown or (functions and not listed):
            raise SpecError(
                f"op {self.name}: kernels() names "
                + (f"{unknown}, which is not declared" if unknown else "no function"),
                why=f"the functions that are declared are {', '.join(functions)}",
            )
        prefix = f"{self.NAMESPACE or self.distribution}::"
        return tuple([prefix + name for name in named])

    def registration(self) -> Registration | None:
        """How the op is registered with torch; None for one without functions. Raises SpecError."""
        if not self.FUNCTIONS:
            return None
        namespace = self._checked_namespace('NAMESPACE = "my_package"    # in the builder class')
        functions = self.FUNCTIONS
        return Registration(namespace, functions.schemas, functions, self.OVERLOADS, self.PASSES_ON)

    def _checked_namespace(self, hint: str) -> str:
        """Where the op's functions are in ``torch.ops``. Raises SpecError."""
        namespace = self.NAMESPACE or self.distribution
        good = isinstance(namespace, str) and namespace.isascii() and namespace.isidentifier()
        if not good:
            raise SpecError(
                f"{str(namespace)[:80]!a} cannot be the namespace of op {self.name}",
                why="a namespace is a C identifier: torch.ops has it as an attribute",
                hint=hint,
            )
        return namespace

    def op(self) -> Op:
        """What the loader serves: the spec, and how it is registered. Raises SpecError, and
        UsageError for an op that has several libraries."""
        if names := [each.NAME for each in self.variants()]:
            kind = "parts" if self.PARTS else "variants"
            raise UsageError(
                f"op {self.name} has a library for each of its {kind}, and none of its own",
                why=f"they are {', '.join(names)}",
                hint=f"name one of them: {names[0]}",
            )
        spec = self.spec()
        return Op(spec, self.registration())

    # What users of a builder call

    @told_briefly
    def load(self, verbose: bool = True, *, reload: bool = False) -> Any:
        """The op, by the first resort that can serve it: loaded, cached, built, the reference.

        A module for a pybind op, an object with the op's functions for a ``torch.library`` op.
        ``reload`` looks at the sources anew and swaps in what changed. Raises OpkilnError where
        nothing serves.
        """
        return self._value(verbose=verbose, reload=reload)

    @told_briefly
    def jit_load(self, verbose: bool = True) -> Any:
        """As ``load``, but native or an error: what was asked for by name does not fall back."""
        return self._value(verbose=verbose, must_be_native=True)

    def _value(self, **how: bool) -> Any:
        if is_tracing():
            return load_in_trace(_load, type(self), self.__dict__, how)
        return self.loaded(**how).value

    def _claim_name(self) -> None:
        """Take the name of the op for the file that declares it. Raises SpecError if another file
        of the same package has it, or if this one has it for another namespace: then the kernels of
        one op would be taken for those of the other, or from it."""
        mine = self._declared_in, self.NAMESPACE or self.distribution
        before = _claimed.setdefault((self.distribution, self.name), mine)
        if before == mine:
            return
        # A cell of a notebook has no file. It replaces the op of an earlier cell.
        if os.path.isfile(before[0]) and os.path.isfile(self._declared_in):
            both = [f"{file} (namespace {namespace})" for file, namespace in (before, mine)]
            if before[1] != mine[1] or not os.path.samefile(before[0], self._declared_in):
                raise SpecError(
                    f"op {self.name} of {self.distribution} is declared twice",
                    why=f"in {both[0]}\nand {both[1]}\na package has one op of a name",
                    hint="give one of them another name, or its module",
                )
        _claimed[self.distribution, self.name] = mine

    @property
    def _declared_in(self) -> str:
        """The file that declares the op; empty if there is none."""
        return getattr(sys.modules.get(type(self).__module__), "__file__", None) or ""

    def loaded(
        self, verbose: bool = True, *, reload: bool = False, must_be_native: bool = False
    ) -> Loaded:
        """As ``load`` or ``jit_load``, with the artifact and the trace. Raises OpkilnError."""
        if self.FUNCTIONS:
            self.FUNCTIONS.import_module()
            self._claim_name()
        if self.VALUES:
            for each in self.FUNCTIONS.declared.values():
                each.variant(self.VALUES)
        try:
            loaded = loader.load(
                self.op(), again=reload, must_be_native=must_be_native, verbose=verbose
            )
        except OpkilnError as error:
            self.error_log = str(error)
            raise
        self.error_log = None if loaded.artifact else "; ".join(loaded.trace.refusals()) or None
        return loaded

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the native op can be had here: it is cached, or it can be built and run.

        ``error_log`` holds the reason when not; ``verbose`` also writes it to standard error.
        """
        from opkiln.decision.terms import Build, Request, Serve

        try:
            outcome = loader.look(Request(self.op(), must_be_native=True))
            error = None if isinstance(outcome, (Serve, Build)) else outcome.error
        except OpkilnError as raised:
            error = raised  # the declaration itself is wrong
        return self._log("" if error is None else str(error), verbose)

    def _log(self, error: str, verbose: bool) -> bool:
        self.error_log = error or None
        if error and verbose:
            print(f"{self.name}: {error}", file=sys.stderr)
        return not error

    def build_wanted(self) -> bool:
        """Whether the user's variables select this op for precompilation."""
        from opkiln.builder import deepspeed_names

        own = (self.BUILD_VAR,) if self.BUILD_VAR else ()
        chosen, _ = build_switch(self.name, (*own, *deepspeed_names.variables(self.name)))
        return bool(settings.build_ops) if chosen is None else chosen

    def builder(self) -> Any:
        """A ``setuptools.Extension`` for ``opkiln.compat.torch.BuildExtension``.

        It has the plan's flags, so other commands compile and link it, too; with device code,
        torch's ``BuildExtension``, which adds no architectures of its own to those in the flags.
        """
        from opkiln.building.asking import plan_here
        from opkiln.decision.archs import lacks_targets
        from opkiln.decision.search import plan_for
        from opkiln.decision.terms import BUILD, Request
        from opkiln.plan import plan as plans

        try:
            from setuptools import Extension
        except ImportError as error:
            raise OpkilnError(
                "builder() needs setuptools", why=str(error), hint="pip install setuptools"
            ) from error
        op = self.op()
        if not op.asked and lacks_targets(op.spec.backend):
            op = op._replace(asked="all")
        plan = plan_here(Request(op, BUILD))
        if self._translated is not None:
            plan = plan_for(self._translated, plan.target, plan.toolchain)
        spec = plan.spec
        name = self.absolute_name()
        flags = plans.author_flags(plan, name.rpartition(".")[2])
        # torch's BuildExtension takes flags by compiler; setuptools' own takes a list.
        family = "sycl" if spec.backend == XPU else "nvcc"
        compiling = {"cxx": flags.cxx, family: flags.device} if plan.toolchain.device else flags.cxx
        extension = Extension(
            name=name,
            sources=[os.path.join(spec.root, source) for source in spec.sources],
            extra_compile_args=compiling,
            extra_link_args=flags.link,
            language="c++",
        )
        extension.opkiln = self  # by which opkiln.ship.setuptools knows it
        return extension

    def hipify_extension(self, directory: str = os.path.join("build", "hip")) -> list[str]:  # noqa: ARG002 (what it is for, ROCm's builders say)
        """Translate CUDA sources to HIP for ``builder()``; the files that it made.

        None where the op is not built for ROCm. Authors' setup scripts call it for every op.
        """
        return []

    # What authors ask the machine

    def has_function(
        self,
        funcname: str,
        libraries: Sequence[str],
        library_dirs: Sequence[str] = (),
        verbose: bool = False,
    ) -> bool:
        """Whether a C function can be linked from these libraries; asked of the compiler."""
        from opkiln.machine.toolchain.host import can_link
        from opkiln.store.layers import Store

        found = can_link(Store().memory, funcname, tuple(libraries), tuple(library_dirs))
        return found or self._log(
            f"{funcname} cannot be linked from {', '.join(libraries) or 'libc'}", verbose
        )

    def command_exists(self, cmd: str | Sequence[str]) -> bool:
        """Whether a program (any of several) is on PATH."""
        from opkiln.machine.toolchain import find

        names = [cmd] if isinstance(cmd, str) else list(cmd)
        if any(find.find_program(name) for name in names):
            return True
        self.error_log = f"{' or '.join(names)} is not on PATH"
        return False

    def _cpu_flags(self) -> tuple[str, ...]:
        from opkiln.decision.archs import target_cpu, target_machine
        from opkiln.machine.arch import cpu

        family = target_machine()
        return cpu.flags(target_cpu(), family, frozenset(cpu.probes(family)))

    def cpu_arch(self) -> str:
        """The compiler flag of the target CPU's level, as an author may put it in ``cxx_args``."""
        return next(iter(self._cpu_flags()), "")

    def simd_width(self) -> str:
        """A macro for the target's vector unit: ``-D__AVX512__``, ``-D__AVX256__``, else scalar."""
        from opkiln.decision.archs import target_cpu, target_machine
        from opkiln.machine.arch import cpu

        widths = {"avx512": "-D__AVX512__", "avx2": "-D__AVX256__"}
        return widths.get(cpu.simd(target_machine(), target_cpu()), "-D__SCALAR__")

    def warning(self, message: str) -> None:
        """Keep a remark, such as what a filter left out, in ``remarks``: it decides nothing."""
        if message not in self.remarks:
            self.remarks.append(message)

    def version_dependent_macros(self) -> list[str]:
        """The macros by which sources written for several torches know this one."""
        return ["-DVERSION_GE_1_1", "-DVERSION_GE_1_3", "-DVERSION_GE_1_5"]

    def strip_empty_entries(self, args: Sequence[str | os.PathLike[str]]) -> list[str]:
        """The arguments that say something, as text. Raises SpecError for other than a list."""
        try:
            if not isinstance(args, str):
                return [os.fspath(argument) for argument in args if argument]
            kind = "is a string"
        except TypeError:
            kind = "stands"
        raise SpecError(
            f"op {self.name}: {args!r} {kind} where a list of strings is wanted",
            why="sources(), include_paths(), kernels() and the methods for flags return lists",
        )


def directory_of(file: str) -> str:
    """Where a file lies, also in an archive; the working directory for what is in no file."""
    path = found = os.path.abspath(file)
    while not os.path.exists(found):
        found = os.path.dirname(found)
    return os.path.dirname(path) if os.path.isfile(found) else os.getcwd()


def root_of(module: str, directory: str) -> str:
    """The directory of the outermost package of a module in ``directory``: what paths in keys start
    from. For a module of no package, its directory. A namespace package is none."""
    name = ""
    for part in module.split(".")[:-1] or [module]:
        name = f"{name}.{part}" if name else part
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and os.path.basename(file).startswith("__init__."):
            root = os.path.dirname(os.path.abspath(file))
            return root if f"{directory}/".startswith(f"{root}/") else directory
    return directory


def torch_built_for() -> tuple[bool, bool]:
    """Whether torch is built for CUDA, and for ROCm: asked of torch if it is imported, else of its
    files, which say the same."""
    version = getattr(sys.modules.get("torch"), "version", None)
    if version is not None:
        return version.cuda is not None, version.hip is not None
    from opkiln.machine.toolchain import torch_sdk

    sdk = torch_sdk.find()
    return sdk is not None and sdk.cuda is not None, sdk is not None and sdk.hip is not None


def backend_of(kind: type[OpBuilder], device: str) -> str | None:
    """The backend of the library for tensors on such a device; None: whichever load() chooses."""
    if device == "cpu" and kind.emulates():
        return EMULATED
    if device == "cuda":  # which is what torch calls ROCm's devices, too
        backend = ROCM if torch_built_for()[1] else CUDA
    else:
        # SYCL's kernels run on CPUs, too.
        has_other = device == "xpu" or (CPU not in kind.BACKENDS and device == "cpu")
        backend = XPU if has_other else CPU
    return backend if backend in kind.BACKENDS else None


def _load(kind: type[OpBuilder], fields: dict[str, Any], how: dict[str, Any]) -> Any:
    # A builder that traced code has made exists in the trace alone; its fields are known, though.
    builder = kind.__new__(kind)
    builder.__dict__.update(fields)
    return builder.loaded(**how).value
