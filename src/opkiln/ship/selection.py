"""The choice of what to precompile: the ops, their targets, and the version.

A target other than this machine has a name: ``cuda:8.0,9.0a``, ``cpu``.

When a package is installed, ``OPKILN_BUILD_OPS=1`` selects all of its ops: one that cannot be built
here is skipped and listed, one that does not compile fails the install. ``OPKILN_BUILD_<OP>=1``
selects one: it is built, or the install fails. ``OPKILN_BUILD_<OP>=0`` leaves one out. Each
variable has its ``DS_BUILD_…`` twin. The selection imports nothing of the package: if no op is
selected, no code of the package runs.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from opkiln.base.model import CPU, CUDA, ROCM, XPU
from opkiln.builder import OpBuilder, deepspeed_names
from opkiln.errors import ArchError, SettingError, SpecError, UsageError
from opkiln.settings import build_switch, build_switches, origin_of, override, settings

BACKENDS = (CPU, CUDA, ROCM, XPU)
_SOURCE = re.compile(r"[^\n]+\.(c|cc|cpp|cxx|cu|cuh|hip|sycl|h|hh|hpp)")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_EXAMPLES = {CPU: "cpu:x86-64-v3", CUDA: "cuda:8.0,9.0a+PTX", ROCM: "rocm:gfx90a"}
_LISTS = ("native", "all", "all-major")  # the architectures of the GPUs or of the toolkit
# The levels that torch's own CPU kernels are compiled for: without AVX, with AVX2, with AVX-512.
# A machine takes the best level that it can run; an old machine can run the first one.
_LEVELS = {
    "x86_64": ("x86-64-v2", "x86-64-v3", "x86-64-v4"),
    "aarch64": ("armv8-a", "armv8.2-a"),
}


class NamedTarget(NamedTuple):
    """A backend, and its architectures or one CPU; empty for those of this machine."""

    backend: str
    archs: str = ""

    def __str__(self) -> str:
        return f"{self.backend}:{self.archs}" if self.archs else self.backend


def parse(text: str) -> tuple[NamedTarget, ...]:
    """The targets that a text names. Raises UsageError for an unknown backend, CPU or arch.

    One library can have code for many GPU architectures, but for one CPU only. So a list of CPUs
    gives one target for each.
    """
    backend, colon, archs = text.strip().partition(":")
    if backend not in BACKENDS:
        raise UsageError(
            f"invalid target {text!r}: there is no backend {backend!r}",
            why="the backends are " + ", ".join(BACKENDS),
            hint="--target cuda:8.0,9.0a+PTX --target cpu:x86-64-v3",
        )
    names = [name.strip() for name in archs.replace(";", ",").split(",")] if colon else []
    if not all(names) or (":" in archs and backend != ROCM):
        raise UsageError(
            f"invalid target {text!r}: it names nothing, or two backends",
            why="a target is a backend, or a backend, a colon and its CPUs or architectures",
            hint="--target cpu:x86-64-v2,x86-64-v3 --target cuda:8.0,9.0a+PTX",
        )
    _check(text, backend, names)
    if backend == CPU and names:
        return tuple(NamedTarget(backend, name) for name in dict.fromkeys(names))
    return (NamedTarget(backend, archs.strip()),)


def parse_all(texts: Iterable[str]) -> list[NamedTarget]:
    """The targets that several texts name, each once. Raises UsageError."""
    return list(dict.fromkeys(each for text in texts for each in parse(text)))


def _check(text: str, backend: str, names: list[str]) -> None:
    """Refuse unknown names now, before the known ones are built for hours. Raises UsageError."""
    from opkiln.machine import uname
    from opkiln.machine.arch import cpu

    here = uname.architecture()
    try:
        for name in names if backend == CPU else ():
            cpu.parse(name, cpu.machine_of(name, here), cpu.features_of(uname.cpu_flags()))
        named = [name for name in names if name.lower().partition("+")[0] not in _LISTS]
        if backend in (CUDA, ROCM) and named:
            from opkiln.decision.archs import grammar

            grammar(backend).parse(";".join(named))
    except ArchError as error:
        raise UsageError(
            f"invalid target {text!r}: {error.what}",
            why=error.why,
            hint=f"--target {_EXAMPLES[backend]}",
        ) from None


def use_cpu(wanted: NamedTarget | None) -> AbstractContextManager[object]:
    """Sets the CPU within a block, if the target names one."""
    if wanted is not None and wanted.backend == CPU and wanted.archs:
        return override(cpu=wanted.archs)
    return override()


def ask(builder: OpBuilder, wanted: NamedTarget | None) -> OpBuilder:
    """Make a new builder serve a target. Raises UnknownBackend if its op has no such version.

    If no GPU architecture is named and this machine has no GPU, it is built for all that the
    toolkit knows.
    """
    from opkiln.decision.archs import lacks_targets

    if wanted is None:
        return builder
    archs = "" if wanted.backend == CPU else wanted.archs
    if not archs and lacks_targets(wanted.backend):
        archs = "all"
    builder.ask_for(wanted.backend, archs)
    return builder


# The ops, and their targets


class DeclaredOp(NamedTuple):
    """An op as a package declares it."""

    name: str
    value: str = ""  # the builder, as module:Class; empty for an op of opkiln itself
    variables: tuple[str, ...] = ()  # that select it, in addition to OPKILN_BUILD_<NAME>


class OpChoice(NamedTuple):
    """Whether one op is built, according to the variables."""

    op: DeclaredOp
    wanted: bool
    named: bool  # by a variable of its own: if it cannot be built, that is an error
    origin: str  # the variable that decided, or ``default``


def bundled_ops() -> list[DeclaredOp]:
    """The ops of opkiln itself."""
    from opkiln.builder import registry

    found = []
    for name in registry.bundled_ops():
        own = registry.ALL_OPS[name].BUILD_VAR
        variables = ((own,) if own else ()) + tuple(deepspeed_names.variables(name))
        found.append(DeclaredOp(name, variables=variables))
    return found


def declared_ops(entry_points: Mapping[str, str], where: str) -> list[DeclaredOp]:
    """The ops of a package's entry points. Their modules are in the directory ``where``.

    A builder's ``BUILD_VAR``, and which functions of a module are decorated, are read from the
    module's text.
    """
    found = []
    for name, value in entry_points.items():
        module, _, builder = (part.strip() for part in value.partition(":"))
        body = _module(module, where)[1]
        if builder or not (ops := _ops_in(body)):
            classes = {each.name: each for each in body if isinstance(each, ast.ClassDef)}
            found.append(DeclaredOp(name, value, _build_var(builder, classes)))
        else:
            found += [DeclaredOp(op, f"{module}:{variable}") for op, variable in ops.items()]
    return found


def sources(ops: Iterable[DeclaredOp], where: str) -> list[str]:
    """The files, relative to ``where``, that ops are compiled from: those that the text of their
    modules names, and what these include from beside them.

    Names that are computed are not found, nor is what is included from other directories.
    """
    found: set[str] = set()
    named: list[tuple[str, str]] = []  # a directory, and a file's path from there
    for module in {op.value.partition(":")[0].strip() for op in ops if op.value}:
        home, body = _module(module, where)
        for node in (each for statement in body for each in ast.walk(statement)):
            match node:
                case ast.Constant(str(name)) if _SOURCE.fullmatch(name):
                    # Decorators name files beside their module, builders files of their package.
                    named += [(home, name), (os.path.join(where, module.partition(".")[0]), name)]
    while named:
        path = os.path.normpath(os.path.join(*named.pop()))
        if path not in found and os.path.isfile(path):
            found.add(path)
            with open(path, encoding="utf-8", errors="replace") as file:
                named += [(os.path.dirname(path), name) for name in _INCLUDE.findall(file.read())]
    relative = (os.path.relpath(path, where) for path in found)
    return sorted(path for path in relative if not path.startswith(os.pardir))


def packages_around(module: str) -> list[str]:
    """A module's packages, the outermost first, and the module itself."""
    parts = module.strip().split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def require_sources(package: str, missing: Sequence[str], hint: str) -> None:
    """Raise SpecError if a package would be installed without sources of its ops."""
    if missing:
        raise SpecError(
            f"{package} would be installed without {', '.join(missing)}",
            why="its ops are built from these; without them the loader would refuse the ops",
            hint=hint,
        )


def _module(module: str, where: str) -> tuple[str, list[ast.stmt]]:
    """(the directory of a module, its statements)."""
    stem = os.path.join(where, *module.split("."))
    for path in (f"{stem}.py", os.path.join(stem, "__init__.py")):
        try:
            with open(path, "rb") as file:
                return os.path.dirname(path), ast.parse(file.read()).body
        except FileNotFoundError:
            continue
        except (SyntaxError, ValueError):
            break  # importing the module reports the error
    return where, []


def _ops_in(body: list[ast.stmt]) -> dict[str, str]:
    """The ops of a module by name, each with its variable: functions that ``@opkiln.op(...)`` or
    ``@op(...)`` decorates, and libraries, ``kit = opkiln.library("name", ...)``, whose functions
    are not listed."""
    functions: dict[str, str] = {}
    libraries: dict[str, str] = {}

    def is_op(decorator: ast.expr) -> bool:
        match decorator:
            case ast.Call(ast.Attribute(ast.Name(owner), "op")):
                return owner not in libraries.values()
            case ast.Call(ast.Attribute(_, "op") | ast.Name("op")):
                return True
        return False

    for statement in body:
        match statement:
            case ast.FunctionDef(name) if any(map(is_op, statement.decorator_list)):
                functions[name] = name
            case ast.Assign(
                [ast.Name(variable), *_],
                ast.Call(
                    ast.Attribute(_, "library") | ast.Name("library"), [ast.Constant(name), *_]
                ),
            ):
                libraries[str(name)] = variable
    return functions | libraries


def _build_var(name: str, classes: dict[str, ast.ClassDef]) -> tuple[str, ...]:
    """The ``BUILD_VAR`` of a class, or of its first base in the same module that has one."""
    found = classes.pop(name, None)
    if found is None:
        return ()
    for each in found.body:
        match each:
            case ast.Assign([ast.Name("BUILD_VAR")], ast.Constant(given)) | ast.AnnAssign(
                ast.Name("BUILD_VAR"), _, ast.Constant(given)
            ):
                return (given,) if given and isinstance(given, str) else ()
    bases = (base.id for base in found.bases if isinstance(base, ast.Name))
    return next(filter(None, (_build_var(base, classes) for base in bases)), ())


def choose(ops: Iterable[DeclaredOp]) -> list[OpChoice]:
    """The choice for each op, by the variables. Raises SettingError for an invalid value."""
    everything, origin = origin_of("build_ops")
    choices = []
    for op in ops:
        switch, variable = build_switch(op.name, op.variables)
        if switch is None:
            choices.append(OpChoice(op, bool(everything), False, origin))
        else:
            choices.append(OpChoice(op, switch, switch, variable))
    return choices


def unknown_variables(ops: Iterable[DeclaredOp]) -> list[str]:
    """The variables ``OPKILN_BUILD_<OP>`` that are set but do not name an op of the package.

    That is not an error: one command may install several packages.
    """
    known = {f"OPKILN_BUILD_{op.name.upper()}" for op in ops}
    known |= {name for op in ops for name in op.variables}
    return [name for name in build_switches() if name not in known]


def targets(backends: Sequence[str]) -> tuple[NamedTarget, ...]:
    """The targets to precompile an op for, if it has sources for these backends.

    They are the targets in ``OPKILN_BUILD_TARGETS`` that the op has sources for. If that is not
    set, they are the CPU levels of this machine's family. If there is a GPU toolkit or torch has a
    GPU backend, the GPUs are added: those of the arch settings, those of this machine, or all that
    the toolkit knows. There is always a target; if it cannot be built, its build reports that.
    Raises SettingError.
    """
    if settings.build_targets is not None:
        try:
            asked = parse_all(filter(str.strip, settings.build_targets.split(";")))
        except UsageError as error:
            raise SettingError(
                f"OPKILN_BUILD_TARGETS={settings.build_targets!r}: {error.what}",
                why=error.why,
                hint="export OPKILN_BUILD_TARGETS='cuda:8.0,9.0+PTX;cpu:x86-64-v3'",
            ) from None
        return tuple(wanted for wanted in asked if wanted.backend in backends)
    here = [backend for backend in backends if _serves(backend)] or list(backends[:1])
    return tuple(parse_all(map(_default_targets, here)))


def _default_targets(backend: str) -> str:
    """A backend's default targets, as ``--target`` takes them."""
    from opkiln.machine import uname

    if backend != CPU:
        return backend
    level, origin = origin_of("cpu")
    if origin != "default":
        return f"{CPU}:{level}"
    levels = _LEVELS.get(uname.architecture(), ())
    return f"{CPU}:{','.join(levels)}" if levels else CPU


def _serves(backend: str) -> bool:
    """Whether a package that is installed here should have code for a backend."""
    from opkiln.machine.toolchain import choice, torch_sdk

    if backend == CPU:
        return True
    sdk = torch_sdk.find()
    if backend != XPU and sdk is not None and (sdk.cuda or sdk.hip):
        return bool(sdk.cuda if backend == CUDA else sdk.hip)  # a torch is built for one of the two
    # If torch has neither, the toolkit decides, because the wheel may be for other machines.
    return backend != ROCM and choice.available(backend)


def strictest_tag(tags: Iterable[str]) -> str:
    """The tag of a wheel with contents of these tags, all built by this interpreter."""

    def demand(platform: str) -> tuple[object, ...]:
        numbers = [int(part) for part in platform.split("_") if part.isdigit()]
        return platform.startswith("linux_"), numbers

    pythons, platforms = zip(*(tag.rsplit("-", 1) for tag in tags), strict=True)
    python = max(pythons, key=lambda each: not each.startswith("py3-"))
    return f"{python}-{max(platforms, key=demand)}"


def tag_version(version: str) -> str:
    """A package's version with ``DS_BUILD_STRING`` added, unless the version already has it.

    Raises SettingError for a text that cannot be part of a version.
    """
    from packaging.version import InvalidVersion, Version

    text, origin = origin_of("build_string")
    if not text:
        return version
    try:
        mark = Version(f"0{text}" if text.startswith((".", "+")) else f"0+{text}")
        ending, local = mark.public.removeprefix("0"), mark.local or ""
        # It must not be a release or a pre-release, nor ".dev", which packaging reads as ".dev0".
        if mark.release != (0,) or mark.pre is not None or not text.startswith(ending):
            raise InvalidVersion(text)
    except InvalidVersion:
        raise SettingError(
            f"{origin}={text!r} cannot be part of a version",
            why="it must be letters and digits joined by '.', '-' or '_', or .devN or .postN",
            hint=f"{origin}=cu130",
        ) from None
    public, _, before = version.partition("+")
    # A build calls this several times, also with a version that already has the text.
    if not public.endswith(ending):
        public += ending
    parts = [before] if f".{before}".endswith(f".{local}") else [before, local]
    return "+".join(filter(None, (public, ".".join(filter(None, parts)))))
