"""Redirects DeepSpeed's builders, and chooses what they load.

Some functions of their base classes are replaced. No file of DeepSpeed changes, and ``remove`` puts
the functions back. Builders with their own ``load`` (those for NPUs, for example) are unchanged. A
builder loads from the first possible one of the resorts that ``OPKILN_DEEPSPEED`` names.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache, partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import opkiln
from opkiln import errors
from opkiln.compat import hook
from opkiln.compat.deepspeed.table import MODULES
from opkiln.settings import settings

_MODULE = "deepspeed.ops.op_builder.builder"
_REPORT = "deepspeed.env_report"

_TOOLKIT_CHECKS = (
    "installed_cuda_version", "assert_no_cuda_mismatch", "get_default_compute_capabilities"
)  # fmt: skip

OPS, ENGINE, DEEPSPEED = "ops", "engine", "deepspeed"


def install() -> None:
    """Make DeepSpeed's builders load through opkiln from now on, in this process.

    This includes builders that were imported before; modules that they have already loaded stay as
    they are. Calling it again has no effect. Raises UsageError if DeepSpeed is not installed.
    """
    _import_deepspeeds(_MODULE)
    hook.install((_MODULE, _REPORT))


def _import_deepspeeds(module: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise errors.UsageError(
            f"DeepSpeed's builders cannot be imported: {error}", hint="pip install deepspeed"
        ) from error


def remove() -> None:
    """Put the functions of DeepSpeed's builders back."""
    hook.remove((_MODULE, _REPORT))


def replacements(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """The owner, the attribute and the value of each function that is replaced in DeepSpeed's
    ``op_builder.builder`` or ``env_report``."""
    if module.__name__ == _REPORT:
        yield module, "debug_report", _report_with_origins(module, module.debug_report)
        return
    base, cuda = module.OpBuilder, module.CUDAOpBuilder
    yield base, "load", _replacement_load(base.load)
    yield base, "jit_load", _replacement_load(base.jit_load)
    yield base, "has_function", _has_function
    yield base, "cpu_arch", _read_this_cpu(base.cpu_arch)
    yield base, "simd_width", _read_this_cpu(base.simd_width)
    yield cuda, "compute_capability_args", _compute_capability_args
    for name in _TOOLKIT_CHECKS:
        yield module, name, _toolkit_check(getattr(module, name), module)


# Loading


class Served(NamedTuple):
    """The module that serves one of DeepSpeed's ops in this process."""

    module: Any
    origin: str  # ops, engine, deepspeed
    seconds: float  # how long it took to load


# Each with the resorts that were allowed when it was loaded.
_served: dict[tuple[type, str], tuple[Served, tuple[str, ...]]] = {}


def served() -> dict[str, Served]:
    """DeepSpeed's ops that this process has loaded, by name."""
    return {name: found for (_, name), (found, _) in _served.items()}


def load_module(builder: Any, original: Callable[[], Any]) -> Any:
    """The module for a builder; ``original`` is how DeepSpeed itself loads it.

    Raises OpkilnError if opkiln should serve it and cannot.
    """
    key = (type(builder), str(builder.name))
    resorts = _resorts_of(builder.name)
    if key in _served and _served[key][1] == resorts:
        return _served[key][0].module
    begin = time.perf_counter()
    try:
        module, origin = _choose(builder, original)
    except errors.OpkilnError as error:
        builder.error_log = str(error)
        raise
    _served[key] = Served(module, origin, time.perf_counter() - begin), resorts
    return module


class Functions(NamedTuple):
    """Who serves the functions of one of DeepSpeed's ops. A name that ends with ``*`` stands for
    several, which a macro of DeepSpeed makes."""

    op: str
    ops: tuple[str, ...]  # by an op of opkiln
    engine: tuple[str, ...]  # by DeepSpeed's own source, built by opkiln on its first use
    deepspeed: tuple[str, ...]  # by DeepSpeed itself
    missing: tuple[str, ...]  # by nobody, because `OPKILN_DEEPSPEED` leaves the engine out
    error: str  # why DeepSpeed's sources could not be read


def functions() -> tuple[Functions, ...]:
    """Who serves each function of DeepSpeed's ops. Imports DeepSpeed, and builds nothing.

    Raises UsageError if DeepSpeed is not installed.
    """
    builders = _import_deepspeeds("deepspeed.ops.op_builder.all_ops").ALL_OPS
    return tuple(_functions(builders[name]) for name in sorted(builders))


def _functions(builder: Any) -> Functions:
    origin, with_engine = origin_of(builder), ENGINE in _resorts_of(builder.name)
    ours = MODULES[builder.name].functions if origin == OPS else ()
    try:
        theirs, error = _list_theirs(builder), ""
    except Exception as raised:  # a builder's methods may raise anything
        theirs, error = (), f"{type(raised).__name__}: {raised}"
    left = tuple(each for each in theirs if not any(fnmatchcase(name, each) for name in ours))
    who = DEEPSPEED if origin == DEEPSPEED else ENGINE if with_engine else "missing"
    rest = {each: left if each == who else () for each in (ENGINE, DEEPSPEED, "missing")}
    return Functions(builder.name, ours, **rest, error=error)


def _resorts_of(op: str) -> tuple[str, ...]:
    """The resorts that may serve an op, in order; empty if DeepSpeed should load it itself."""
    chosen: dict[str, tuple[str, ...]] = dict(settings.deepspeed)
    return chosen.get(op, chosen[""])


def origin_of(builder: Any) -> str:
    """The resort that a builder would load from: ops, engine or deepspeed."""
    if _has_own_op(builder):
        return OPS
    # An op that was built when DeepSpeed was installed is as good as one of the engine's.
    by_engine = ENGINE in _resorts_of(builder.name) and not _is_installed(builder)
    return ENGINE if by_engine else DEEPSPEED


def _choose(builder: Any, original: Callable[[], Any]) -> tuple[Any, str]:
    def build() -> Any:
        from opkiln.compat.deepspeed import engine

        return original() if _is_installed(builder) else engine.load(builder)

    origin = origin_of(builder)
    if origin != OPS:
        return (build if origin == ENGINE else original)(), origin
    from opkiln.compat.deepspeed.modules import OpModule

    build_rest = build if ENGINE in _resorts_of(builder.name) else None
    return OpModule(builder.name, build_rest, cache(partial(_list_theirs, builder))), OPS


def _list_theirs(builder: Any) -> tuple[str, ...]:
    from opkiln.compat.deepspeed import engine

    return engine.functions(builder)


def _has_own_op(builder: Any) -> bool:
    """Whether an op of opkiln serves this builder, which is DeepSpeed's, not another package's."""
    own = type(builder).__module__.partition(".")[0] in ("deepspeed", "op_builder")
    return own and builder.name in MODULES and OPS in _resorts_of(builder.name)


def _is_installed(builder: Any) -> bool:
    git = import_module("deepspeed.git_version_info")
    here = import_module("deepspeed.accelerator").get_accelerator()._name
    return bool(git.installed_ops.get(builder.name, False)) and git.accelerator_name == here


# The functions that replace DeepSpeed's


def _replacement_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """The op's module: opkiln's op, DeepSpeed's built by opkiln, or DeepSpeed's own."""

    @wraps(original)
    def load(self: Any, *args: Any, **named: Any) -> Any:
        return load_module(self, lambda: original(self, *args, **named))

    return load


def _has_function(
    self: Any,
    funcname: str,
    libraries: Any,
    library_dirs: Any = None,
    verbose: bool = False,  # noqa: ARG001 (taken for compatibility)
) -> bool:
    """Whether a C function can be linked by the compiler that would build the op."""
    from opkiln.machine.toolchain.host import can_link
    from opkiln.store.layers import Store

    if funcname == "io_submit" and _has_own_op(self):
        return True  # DeepSpeed asks for libaio, and opkiln's op does without
    try:
        return can_link(Store().memory, funcname, tuple(libraries), tuple(library_dirs or ()))
    except errors.ToolchainError as error:
        self.error_log = str(error)
        return False


def _read_this_cpu(original: Callable[..., str]) -> Callable[..., str]:
    """A replacement that starts no program. DeepSpeed asks a package that starts programs, which
    takes a second or more at each load."""

    @wraps(original)
    def answer(self: Any) -> str:
        from opkiln.builder import OpBuilder
        from opkiln.machine import uname

        if uname.architecture() != "x86_64":
            return original(self)  # DeepSpeed has its own macros for NEON and SVE
        found: str = getattr(OpBuilder(self.name), original.__name__)()
        return found

    return answer


def _compute_capability_args(self: Any, cross_compile_archs: str | None = None) -> list[str]:
    """The ``-gencode`` flags from opkiln's arch list; none during a build: the plan sets them.

    Sets ``enable_bf16`` if all of these architectures have bfloat16 arithmetic.
    """
    from opkiln.compat.deepspeed import engine

    self.enable_bf16, flags = engine.architectures(self, cross_compile_archs or "")
    return [] if self.jit_mode else flags


def _toolkit_check(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    """opkiln's check of the CUDA toolkit. It raises DeepSpeed's exceptions."""

    @wraps(original)
    def check(*name_of_op: str) -> Any:
        from opkiln.compat.deepspeed import builders

        try:
            return getattr(builders, original.__name__)(*name_of_op)
        except (errors.MissingCUDAException, errors.CUDAMismatchException) as error:
            raise getattr(module, type(error).__name__)(str(error)) from error

    return check


# ds_report's own table shows the builds of DeepSpeed, which are not used. These lines follow it.

_WORDS = {
    OPS: "opkiln's own kernels",
    ENGINE: "DeepSpeed's sources, built by opkiln",
    DEEPSPEED: "left to DeepSpeed",
}


def _report_with_origins(module: ModuleType, original: Callable[[], None]) -> Callable[[], None]:
    def debug_report() -> None:
        original()
        origins = {name: origin_of(each) for name, each in module.ALL_OPS.items()}
        lines = ["-" * 50, f"opkiln {opkiln.__version__} loads DeepSpeed's ops in this process:"]
        for origin, words in _WORDS.items():
            if names := [name for name, found in origins.items() if found == origin]:
                lines.append(f"{words}: {', '.join(names)}")
        lines.append("opkiln report says what is cached, and opkiln explain OP why")
        sys.stdout.write("\n".join(lines) + "\n")

    return debug_report
