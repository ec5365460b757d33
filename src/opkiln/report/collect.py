"""Collects the records of a report. Its forms (``forms``, ``page``) show them.

Imports no torch; builds, loads and opens nothing. A part that is not shown is not collected.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from opkiln import __version__
from opkiln.base.build_model import TorchSDK
from opkiln.base.model import CPU
from opkiln.decision.prebuilt import fetched_from
from opkiln.errors import StoreError
from opkiln.machine.toolchain import torch_sdk
from opkiln.report import compilers, machine, operators, redact
from opkiln.report.commands import install_command, pip_command, unset_command
from opkiln.report.compilers import BACKENDS, supports
from opkiln.report.machine import FoundDevices, Machine, Space, known_space
from opkiln.report.operators import OpStatus
from opkiln.run import budget
from opkiln.settings import dropped_variables, settings, table, unknown
from opkiln.store import entry, inventory
from opkiln.store.layers import Store

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
    unfound: tuple[compilers.Tool, ...]  # named by variables, but missing
    torch: TorchSDK | None
    torch_error: str  # why the installed torch cannot be read
    devices: FoundDevices
    budget: budget.Description
    store: StoreStatus
    settings: tuple[SettingValue, ...]
    unknown_variables: tuple[str, ...]  # they look like settings but are not
    dropped_variables: tuple[str, ...]  # they are set but not passed to compilers


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
    """A new report. Raises SettingError for a variable with an invalid value.

    ``probe`` runs every toolkit to identify it, also those that torch is not built for. ``changes``
    adds to each op what changed since it was built.
    """
    store = Store()
    torch, torch_error = None, ""
    try:
        torch = torch_sdk.find()
    except OSError as error:  # half of it was removed, or this user may not read it
        torch_error = str(error)
    # The compilers first: the keys of the ops' entries contain their identities.
    tools = compilers.survey(store.memory, torch, probe=probe)
    found = operators.statuses(changes=changes) if ops else None
    seen = None
    if environment:
        seen = Environment(
            machine=machine.machine(),
            tools=tools,
            unfound=compilers.list_missing_toolkits(),
            torch=torch,
            torch_error=torch_error,
            devices=machine.devices(store.memory, torch),
            budget=budget.shared_budget().describe(),
            store=store_status(store),
            settings=tuple(_setting_value(each.variable, *each.resolve()) for each in table()),
            unknown_variables=tuple(unknown()),
            dropped_variables=dropped_variables(),
        )
    return Report(__version__, time.time(), found, seen, problems(found, seen))


def _setting_value(variable: str, value: Any, origin: str) -> SettingValue:
    if value and redact.is_secret(variable):
        value = "***"
    elif isinstance(value, str):
        value = redact.hide_secrets(value)
    elif isinstance(value, tuple):
        value = redact.hide_secrets_in_words(value)
    return SettingValue(variable, value, origin)


# The store


class PastBuild(NamedTuple):
    """How an entry was built. The manifest of one that was fetched does not say when."""

    op: str
    distribution: str
    made_for: str  # "cpu", "cuda 9.0a"
    ended: float  # seconds since the epoch
    seconds: float
    max_rss: int  # bytes, of the largest compile; 0 if none ran
    directory: str
    origin: str = ""  # the remote tier that it was fetched from, and why that is trusted


class StoreStatus(NamedTuple):
    """The places where entries are read and written, and the latest entries."""

    root: str | None  # None: nothing can be written
    layers: tuple[str, ...]
    notes: tuple[str, ...]  # why it is not where the user asked for it, or cannot be read
    sizes: inventory.Sizes | None
    limit: int
    space: Space | None
    builds: tuple[PastBuild, ...]  # the newest first, without those that were fetched
    fetches: tuple[PastBuild, ...] = ()
    remotes: tuple[str, ...] = ()
    hosts: tuple[inventory.HostModule, ...] = ()  # what other programs built, the newest first


def store_status(store: Store) -> StoreStatus:
    """The layers, and the contents of the writable one."""
    root, notes = store.root, store.location.notes
    sizes: inventory.Sizes | None = None
    found: list[PastBuild] = []
    hosts: list[inventory.HostModule] = []
    if root is not None:
        try:
            listed = list(inventory.entries(root))
            sizes = inventory.sizes(root, listed)
            ops = (each for each in listed if each.kind == inventory.OP)
            newest = heapq.nlargest(_SHOWN, ops, key=lambda each: each.published)
            found = [*filter(None, (_build(each.directory) for each in newest))]
            hosts = sorted(inventory.host_modules(listed), key=lambda each: -each.published)
        except StoreError as error:
            notes = (*notes, error.what)  # the report must still work if this happens
    built = (each for each in found if not each.origin)
    return StoreStatus(
        root=root,
        layers=tuple(layer.root for layer in store.location.layers),
        notes=notes,
        sizes=sizes,
        limit=settings.cache_max_size,
        space=None if root is None else known_space(root),
        builds=tuple(sorted(built, key=lambda each: -each.ended)),
        fetches=tuple(each for each in found if each.origin),
        hosts=tuple(hosts[:_SHOWN]),
        remotes=tuple(map(redact.hide_secrets, settings.remotes)),
    )


def _build(directory: str) -> PastBuild | None:
    try:
        manifest = entry.read_manifest(directory)
        target, origin = manifest["target"], fetched_from(manifest)
        return PastBuild(
            op=str(manifest["op"]),
            distribution=str(manifest["distribution"]),
            made_for=" ".join((target["backend"], ";".join(target["archs"]))).strip(),
            ended=0.0 if origin else float(manifest["created"]),
            seconds=0.0 if origin else float(manifest["seconds"]),
            max_rss=0 if origin else int(manifest["max_rss"]),
            directory=directory,
            origin=origin,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
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
    """Every problem. Problems of the environment come first, because they explain those of ops."""
    found = [] if environment is None else list(_environment_problems(environment))
    affected: dict[str, dict[str, None]] = {}  # reason -> ops
    for each in ops or ():
        if each.is_problem:
            affected.setdefault(each.here.reason, {})[each.variant_of or each.op] = None
    for reason, names in affected.items():
        first, *others = names
        subject = f"{len(names)} ops" if others else first
        text = f"{reason}: {', '.join(names)}" if others else reason
        found.append(Problem(subject, text, f"opkiln explain {first}"))
    return tuple(found)


def _environment_problems(environment: Environment) -> Iterator[Problem]:
    torch = environment.torch
    if environment.torch_error:
        reinstall = pip_command("install", "--force-reinstall", "torch")
        yield Problem("torch", f"it cannot be read: {environment.torch_error}", reinstall)
    elif torch is None:
        yield Problem("torch", "it is not installed", pip_command("install", "torch"))
    for backend, name in BACKENDS.items():
        own = [tool for tool in environment.tools if tool.backend == backend]
        for tool in own:
            if tool.unobserved:
                why = f"what {tool.path} makes serves one process and is not kept"
                problem = f"{why}: {tool.unobserved}"
                yield Problem(f"{name} compiler", problem, "opkiln explain OP")
        needed = backend == CPU or supports(backend, torch)
        if not needed or any(tool.taken for tool in own):
            continue
        what, hint = "toolkit", "opkiln doctor"
        if backend == CPU:
            named = filter(None, (unset_command(tool.origin) for tool in own))
            what, hint = "compiler", next(named, install_command("g++"))
        reasons = "; ".join(f"{tool.path}: {tool.refused}" for tool in own) or "none was found"
        yield Problem(f"{name} {what}", f"none can be used: {reasons}", hint)
    for each in environment.unfound:
        yield Problem(each.origin, f"there is no {each.path}", unset_command(each.origin))
    accelerator = environment.devices.accelerator
    if accelerator.error:
        yield Problem("accelerator", accelerator.error, accelerator.hint)
    store = environment.store
    yield from (Problem("cache", note) for note in store.notes)
    if store.root is None:
        yield Problem("cache", "nothing can be written", "export OPKILN_CACHE_DIR=DIRECTORY")
    for refused in environment.budget.refused:
        yield Problem("budget", f"not shared with other processes through {refused}")
    yield from (Problem("settings", text) for text in environment.unknown_variables)
