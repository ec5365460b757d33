"""Collecting what a report shows. Imports no torch; builds, loads and opens nothing.

Everything is looked at once and kept as records; the forms of a report (text, JSON, Markdown, a
page) only read those. What is left out of a report is not looked at.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from opkiln import __version__
from opkiln.engine import budget
from opkiln.report import cache, compilers, devices, operators, problems, redact
from opkiln.report.machine import Machine, machine
from opkiln.settings import dropped, table, unknown
from opkiln.store.layers import Store
from opkiln.toolchain import torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.model import TorchSDK


class InForce(NamedTuple):
    """A setting's value, free of secrets, and where it comes from."""

    variable: str
    value: Any
    origin: str  # the variable that set it, or "default"


class Environment(NamedTuple):
    """What ops are built and run in."""

    machine: Machine
    tools: tuple[compilers.Tool, ...]
    unfound: tuple[compilers.Unfound, ...]
    torch: TorchSDK | None
    torch_error: str  # why nothing is known of the torch that is there
    devices: devices.Devices
    budget: budget.Description
    store: cache.StoreStatus
    settings: tuple[InForce, ...]
    unknown: tuple[str, ...]  # variables that look like settings and are none
    dropped: tuple[str, ...]  # variables that are set and that no compiler sees


class Report(NamedTuple):
    """Everything `opkiln report` says. None: it was not to be shown."""

    opkiln: str
    made: float  # seconds since the epoch
    ops: tuple[operators.OpStatus, ...] | None
    environment: Environment | None
    problems: tuple[problems.Problem, ...]


def collect(
    *, ops: bool = True, environment: bool = True, probe: bool = False, changes: bool = False
) -> Report:
    """Look at everything, now. Raises SettingError where a variable has no meaning.

    ``probe`` asks every toolkit who it is, also those that torch is not built for. ``changes``
    adds to each op what changed since it was built.
    """
    store = Store()
    torch, error = _torch()
    # The compilers first: who they are is part of what the ops' entries are looked up by.
    tools = compilers.survey(store.memory, torch, probe=probe)
    found = operators.statuses(changes=changes) if ops else None
    around = _environment(store, torch, error, tools) if environment else None
    return Report(__version__, time.time(), found, around, problems.of(found, around))


def _torch() -> tuple[TorchSDK | None, str]:
    try:
        return torch_sdk.find(), ""
    except OSError as error:  # half of it was removed, or it is not ours to read
        return None, str(error)


def _environment(
    store: Store, torch: TorchSDK | None, error: str, tools: tuple[compilers.Tool, ...]
) -> Environment:
    return Environment(
        machine=machine(),
        tools=tools,
        unfound=compilers.unfound(),
        torch=torch,
        torch_error=error,
        devices=devices.devices(store.memory, torch),
        budget=budget.shared().describe(),
        store=cache.status(store),
        settings=tuple(_in_force(each.variable, *each.resolve()) for each in table()),
        unknown=tuple(unknown()),
        dropped=dropped(),
    )


def _in_force(variable: str, value: Any, origin: str) -> InForce:
    if isinstance(value, str):
        value = redact.without_secrets(value)
    elif isinstance(value, tuple):
        value = redact.words_without_secrets(value)
    return InForce(variable, value, origin)
