"""Which of a package's ops are precompiled when it is installed, and for what.

``OPKILN_BUILD_OPS=1`` sweeps up all ops: one that cannot be built here is skipped, and listed.
``OPKILN_BUILD_<OP>=1`` names one: it is built, or the install fails. ``OPKILN_BUILD_<OP>=0`` leaves
one out. Each has its ``DS_BUILD_…`` twin. Nothing of a package is imported to find out: one whose
ops nobody wants precompiled is installed without a look at them.
"""

from __future__ import annotations

import ast
import os
import re
from typing import NamedTuple

from opkiln.errors import SettingError, UsageError
from opkiln.model import CPU, CUDA, ROCM, XPU
from opkiln.settings import build_switch_of, build_switches, origin_of, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from opkiln.ship.targets import Wanted

# The levels that torch's own CPU kernels are compiled for: without AVX, with AVX2, with AVX-512.
# A machine takes the best one that it can run, and none is beyond the reach of an old one.
_LEVELS = {
    "x86_64": ("x86-64-v2", "x86-64-v3", "x86-64-v4"),
    "aarch64": ("armv8-a", "armv8.2-a"),
}

_LOCAL = re.compile(r"[a-z0-9]+(?:[-_.][a-z0-9]+)*", re.IGNORECASE)
_SUFFIX = re.compile(r"\.(?:dev|post)[0-9]+")


class Declared(NamedTuple):
    """An op as a package declares it."""

    name: str
    value: str = ""  # the builder, as module:Class; empty for opkiln's own
    variables: tuple[str, ...] = ()  # that select it besides OPKILN_BUILD_<NAME>


class Choice(NamedTuple):
    """What the variables say of one op."""

    op: Declared
    wanted: bool
    named: bool  # by a variable of its own: it is built, or that is an error
    origin: str  # the variable that decided; ``default``


def bundled() -> list[Declared]:
    """opkiln's own ops."""
    from opkiln import registry

    own = {name: registry.ALL_OPS[name].BUILD_VAR for name in registry.bundled()}
    return [Declared(name, variables=(given,) if given else ()) for name, given in own.items()]


def declared(entry_points: Mapping[str, str], where: str) -> list[Declared]:
    """The ops of a package's entry points, whose modules lie below the directory ``where``.

    The variables that builders name as ``BUILD_VAR`` are read from the modules' text.
    """
    return [
        Declared(name, value, _build_vars(value, where)) for name, value in entry_points.items()
    ]


def _build_vars(value: str, where: str) -> tuple[str, ...]:
    module, _, builder = value.partition(":")
    stem = os.path.join(where, *module.strip().split("."))
    for path in (f"{stem}.py", os.path.join(stem, "__init__.py")):
        try:
            with open(path, "rb") as file:
                tree = ast.parse(file.read())
        except FileNotFoundError:
            continue
        except (SyntaxError, ValueError):
            return ()  # whoever imports it is told
        classes = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}
        return _build_var(builder.strip(), classes)
    return ()


def _build_var(name: str, classes: dict[str, ast.ClassDef]) -> tuple[str, ...]:
    """What a class, or its first base in the same module that does, gives as ``BUILD_VAR``."""
    found = classes.pop(name, None)
    if found is None:
        return ()
    for each in found.body:
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        given = getattr(each, "value", None)
        if "BUILD_VAR" in names and isinstance(given, ast.Constant):
            return (given.value,) if given.value and isinstance(given.value, str) else ()
    bases = (base.id for base in found.bases if isinstance(base, ast.Name))
    return next(filter(None, (_build_var(base, classes) for base in bases)), ())


def choose(ops: Iterable[Declared]) -> list[Choice]:
    """What the variables say of each op. Raises SettingError for a value without a meaning."""
    everything, origin = origin_of("build_ops")
    choices = []
    for op in ops:
        switch, variable = build_switch_of(op.name, op.variables)
        if switch is None:
            choices.append(Choice(op, bool(everything), False, origin))
        else:
            choices.append(Choice(op, switch, switch, variable))
    return choices


def strangers(ops: Iterable[Declared]) -> list[str]:
    """The variables ``OPKILN_BUILD_<OP>`` that are set and name no op of the package.

    No error: one command may install several packages.
    """
    known = {f"OPKILN_BUILD_{op.name.upper()}" for op in ops}
    known |= {name for op in ops for name in op.variables}
    return [name for name in build_switches() if name not in known]


def targets(backends: Sequence[str]) -> tuple[Wanted, ...]:
    """What an op with sources for these backends is precompiled for.

    ``OPKILN_BUILD_TARGETS``, as far as the op has sources. Else the CPU levels of this machine's
    family; and the GPUs of the arch settings, of this machine, or all that the toolkit knows, where
    there is a toolkit or a torch that wants one. Never nothing: what cannot be built is for its
    build to say. Raises UsageError.
    """
    from opkiln.ship import targets as parsing

    if settings.build_targets is not None:
        try:
            asked = tuple(
                wanted
                for text in settings.build_targets.split(";")
                if text.strip()
                for wanted in parsing.parse(text.strip())
            )
        except UsageError as error:
            raise SettingError(
                f"OPKILN_BUILD_TARGETS={settings.build_targets!r}: {error.what}",
                why=error.why,
                hint="export OPKILN_BUILD_TARGETS='cuda:8.0,9.0+PTX;cpu:x86-64-v3'",
            ) from None
        return tuple(wanted for wanted in asked if wanted.backend in backends)
    here = [backend for backend in backends if _served(backend)] or list(backends[:1])
    return tuple(wanted for each in here for wanted in parsing.parse(_text(each)))


def _text(backend: str) -> str:
    """A backend's targets by default, as ``--target`` takes them."""
    from opkiln import machine

    level, origin = origin_of("cpu")
    if backend != CPU:
        return backend
    if origin != "default":
        return f"{CPU}:{level}"
    levels = _LEVELS.get(machine.architecture(), ())
    return f"{CPU}:{','.join(levels)}" if levels else CPU


def _served(backend: str) -> bool:
    """Whether a package that is installed here is expected to have code for a backend."""
    from opkiln.toolchain import choice, torch_sdk

    if backend == CPU:
        return True
    sdk = torch_sdk.find()
    wants = {CUDA: sdk is not None and sdk.cuda, ROCM: sdk is not None and sdk.hip, XPU: False}
    if backend in (CUDA, ROCM) and sdk is not None and (sdk.cuda or sdk.hip):
        return bool(wants[backend])  # of the two, torch is for one
    # A torch without either says nothing: the wheel may be for others. A toolkit does.
    return backend != ROCM and choice.available(backend)


def strictest(tags: Iterable[str]) -> str:
    """The tag of a wheel that holds what has these tags, all built by one interpreter here."""

    def demand(tag: str) -> tuple[object, ...]:
        python, _, platform = tag.split("-")
        numbers = [int(part) for part in platform.split("_") if part.isdigit()]
        return python != "py3", platform.startswith("linux_"), numbers

    pythons, platforms = zip(*(tag.rsplit("-", 1) for tag in tags), strict=True)
    python = max(pythons, key=lambda each: demand(f"{each}-any"))
    return f"{python}-{max(platforms, key=lambda each: demand(f'py3-none-{each}'))}"


def tagged(version: str) -> str:
    """A package's version with ``DS_BUILD_STRING`` in it; with it once, also when it is there.

    Raises SettingError for a text that no version can have.
    """
    text, origin = origin_of("build_string")
    if not text:
        return version
    suffix = _SUFFIX.match(text)
    rest = text[suffix.end() :] if suffix else text
    local = rest.removeprefix("+")
    if (rest or not suffix) and not _LOCAL.fullmatch(local):
        raise SettingError(
            f"{origin}={text!r} cannot be part of a version",
            why="it is letters and digits, in parts that '.', '-' or '_' joins; or .devN or .postN",
            hint=f"{origin}=cu130",
        )
    public, _, before = version.partition("+")
    # As installers write it. A build asks several times, of what it answered before, too.
    local = re.sub(r"[-_.]", ".", local.lower())
    ending = suffix.group() if suffix else ""
    if not public.endswith(ending):
        public += ending
    parts = [before] if f".{before}".endswith(f".{local}") else [before, local]
    return "+".join(filter(None, (public, ".".join(filter(None, parts)))))
