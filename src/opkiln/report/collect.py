"""Collects what a report shows, as records. The forms of a report (``forms``, ``page``) read these.

Imports no torch; builds, loads and opens nothing. A part that is not shown is not looked at.
"""

from __future__ import annotations

import heapq
import time
from typing import Any, NamedTuple

from opkiln import __version__
from opkiln.decision.prebuilt import fetched_from
from opkiln.engine import budget
from opkiln.errors import StoreError
from opkiln.model import CPU
from opkiln.report import compilers, machine, operators, redact
from opkiln.report.commands import install, pip
from opkiln.report.compilers import BACKENDS, taken, wanted
from opkiln.report.machine import Devices, Machine, Space, space
from opkiln.settings import dropped, settings, table, unknown
from opkiln.store import entry, inventory
from opkiln.store.layers import Store
from opkiln.toolchain import torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.build_model import TorchSDK
    from opkiln.report.compilers import Tool
    from opkiln.report.operators import OpStatus

# A store may have thousands of entries. A report shows the newest.
_SHOWN = 40


class SettingValue(NamedTuple):
    """A setting's value, free of secrets, and where it comes from."""

    variable: str
    value: Any
    origin: str  # the variable that set it, or "default"


class Environment(NamedTuple):
    """The environment that ops are built and run in."""

    machine: Machine
    tools: tuple[compilers.Tool, ...]
    unfound: tuple[compilers.Unfound, ...]
    torch: TorchSDK | None
    torch_error: str  # why the installed torch cannot be read
    devices: Devices
    budget: budget.Description
    store: StoreStatus
    settings: tuple[SettingValue, ...]
    unknown: tuple[str, ...]  # variables that look like settings but are not
    dropped: tuple[str, ...]  # variables that are set but not passed to compilers


class Report(NamedTuple):
    """Everything that `opkiln report` shows. A part that is None was not asked for."""

    opkiln: str
    made: float  # seconds since the epoch
    ops: tuple[operators.OpStatus, ...] | None
    environment: Environment | None
    problems: tuple[Problem, ...]


def collect(
    *, ops: bool = True, environment: bool = True, probe: bool = False, changes: bool = False
) -> Report:
    """Look at everything, now. Raises SettingError for a variable with an invalid value.

    ``probe`` runs every toolkit to identify it, also those that torch is not built for. ``changes``
    adds to each op what changed since it was built.
    """
    store = Store()
    torch, error = _torch()
    # The compilers first: the keys of the ops' entries contain their identities.
    tools = compilers.survey(store.memory, torch, probe=probe)
    found = operators.statuses(changes=changes) if ops else None
    around = _environment(store, torch, error, tools) if environment else None
    return Report(__version__, time.time(), found, around, problems(found, around))


def _torch() -> tuple[TorchSDK | None, str]:
    try:
        return torch_sdk.find(), ""
    except OSError as error:  # half of it was removed, or this user may not read it
        return None, str(error)


def _environment(
    store: Store, torch: TorchSDK | None, error: str, tools: tuple[compilers.Tool, ...]
) -> Environment:
    return Environment(
        machine=machine.machine(),
        tools=tools,
        unfound=compilers.unfound(),
        torch=torch,
        torch_error=error,
        devices=machine.devices(store.memory, torch),
        budget=budget.shared().describe(),
        store=store_status(store),
        settings=tuple(_in_force(each.variable, *each.resolve()) for each in table()),
        unknown=tuple(unknown()),
        dropped=dropped(),
    )


def _in_force(variable: str, value: Any, origin: str) -> SettingValue:
    if value and redact.is_secret(variable):
        value = "***"
    elif isinstance(value, str):
        value = redact.without_secrets(value)
    elif isinstance(value, tuple):
        value = redact.words_without_secrets(value)
    return SettingValue(variable, value, origin)


# The store


class Build(NamedTuple):
    """How an entry was built, from its manifest."""

    op: str
    distribution: str
    made_for: str  # "cpu", "cuda 9.0a"
    ended: float  # seconds since the epoch
    seconds: float
    max_rss: int  # bytes, of the largest compile; 0 if none ran
    directory: str


class Fetch(NamedTuple):
    """An entry that came from a remote tier."""

    op: str
    distribution: str
    made_for: str
    origin: str  # the tier, and why it is trusted
    directory: str


class StoreStatus(NamedTuple):
    """Where entries are read and written."""

    root: str | None  # None: nothing can be written
    layers: tuple[str, ...]
    notes: tuple[str, ...]  # why it is not where the user asked for it, or cannot be read
    sizes: inventory.Sizes | None
    limit: int
    space: Space | None
    builds: tuple[Build, ...]  # the newest first
    fetches: tuple[Fetch, ...] = ()
    remotes: tuple[str, ...] = ()


def store_status(store: Store) -> StoreStatus:
    """The layers, and the contents of the writable one."""
    root, notes = store.root, store.location.notes
    sizes: inventory.Sizes | None = None
    builds: list[Build] = []
    fetches: list[Fetch] = []
    if root is not None:
        try:
            sizes, newest = inventory.sizes(root), _newest(root)
            builds = sorted(filter(None, map(_build, newest)), key=lambda each: -each.ended)
            fetches = [*filter(None, map(_fetch, newest))]
        except StoreError as error:
            notes = (*notes, error.what)  # the report must still work if this happens
    return StoreStatus(
        root=root,
        layers=tuple(layer.root for layer in store.location.layers),
        notes=notes,
        sizes=sizes,
        limit=settings.cache_max_size,
        space=None if root is None else space(root),
        builds=tuple(builds),
        fetches=tuple(fetches),
        remotes=tuple(map(redact.without_secrets, settings.remotes)),
    )


def _newest(root: str) -> list[str]:
    """The directories of the newest entries."""
    ops = (each for each in inventory.entries(root) if each.kind == inventory.OP)
    newest = heapq.nlargest(_SHOWN, ops, key=lambda each: each.published)
    return [each.directory for each in newest]


def _fetch(directory: str) -> Fetch | None:
    try:
        manifest = entry.read_manifest(directory)
        if not (origin := fetched_from(manifest)):
            return None
        return Fetch(
            op=str(manifest["op"]),
            distribution=str(manifest["distribution"]),
            made_for=_made_for(manifest),
            origin=origin,
            directory=directory,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # damaged, which `cache verify` reports, or just removed by `cache gc`


def _made_for(manifest: dict[str, Any]) -> str:
    target = manifest["target"]
    return " ".join((target["backend"], ";".join(target["archs"]))).strip()


def _build(directory: str) -> Build | None:
    try:
        manifest = entry.read_manifest(directory)
        return Build(
            op=str(manifest["op"]),
            distribution=str(manifest["distribution"]),
            made_for=_made_for(manifest),
            ended=float(manifest["created"]),
            seconds=float(manifest["seconds"]),
            max_rss=int(manifest["max_rss"]),
            directory=directory,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # damaged, which `cache verify` reports, or just removed by `cache gc`


# Problems


class Problem(NamedTuple):
    """One thing that does not work."""

    subject: str  # an op, "torch", "cache", …
    text: str
    hint: str = ""  # a command


def problems(
    ops: tuple[OpStatus, ...] | None, environment: Environment | None
) -> tuple[Problem, ...]:
    """Every problem. Those of the environment come first: they explain those of the ops."""
    found = [] if environment is None else list(_around(environment))
    affected: dict[str, dict[str, None]] = {}  # reason -> ops
    for each in ops or ():
        if each.is_problem:
            affected.setdefault(each.here.reason, {})[each.variant_of or each.op] = None
    for reason, ops_of_it in affected.items():
        names = list(ops_of_it)
        hint = f"opkiln explain {names[0]}"
        if len(names) == 1:
            found.append(Problem(names[0], reason, hint))
        else:
            found.append(Problem(f"{len(names)} ops", f"{reason}: {', '.join(names)}", hint))
    return tuple(found)


def _around(environment: Environment) -> Iterator[Problem]:
    torch = environment.torch
    if environment.torch_error:
        reinstall = pip("install", "--force-reinstall", "torch")
        yield Problem("torch", f"it cannot be read: {environment.torch_error}", reinstall)
    elif torch is None:
        yield Problem("torch", "it is not installed", pip("install", "torch"))
    for backend, name in BACKENDS.items():
        own = [tool for tool in environment.tools if tool.backend == backend]
        for tool in own:
            if tool.unobserved:
                why = (
                    f"what {tool.path} makes serves one process and is not kept: {tool.unobserved}"
                )
                yield Problem(f"{name} compiler", why, "opkiln explain OP")
        needed = backend == CPU or wanted(backend, torch)
        if not needed or taken(own, backend):
            continue
        what = "compiler" if backend == CPU else "toolkit"
        reasons = "; ".join(f"{tool.path}: {tool.refused}" for tool in own) or "none was found"
        hint = _another_compiler(own) if backend == CPU else "opkiln doctor"
        yield Problem(f"{name} {what}", f"none can be used: {reasons}", hint)
    for each in environment.unfound:
        yield Problem(each.origin, f"there is no {each.path}", _unset(each.origin))
    accelerator = environment.devices.in_force
    if accelerator.error:
        yield Problem("accelerator", accelerator.error, accelerator.hint)
    store = environment.store
    for note in store.notes:
        yield Problem("cache", note)
    if store.root is None:
        yield Problem("cache", "nothing can be written", "export OPKILN_CACHE_DIR=DIRECTORY")
    for refused in environment.budget.refused:
        yield Problem("budget", f"not shared with other processes through {refused}")
    for text in environment.unknown:
        yield Problem("settings", text)


def _another_compiler(refused: list[Tool]) -> str:
    """The command that lets opkiln choose a compiler, or installs one."""
    return next((_unset(tool.origin) for tool in refused if _unset(tool.origin)), install("g++"))


def _unset(origin: str) -> str:
    """``unset CXX``; empty if no variable but PATH led there."""
    return f"unset {origin}" if origin.isupper() and origin != "PATH" else ""
