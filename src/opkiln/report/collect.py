"""Collecting what a report shows. Imports no torch; builds, loads and opens nothing.

The first report on a machine asks its compilers who they are, which is then remembered.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

from opkiln import __version__
from opkiln import machine as this
from opkiln.arch import cpu
from opkiln.engine import budget
from opkiln.errors import OpkilnError
from opkiln.loading import resolve
from opkiln.registry import ALL_OPS
from opkiln.settings import dropped, settings, table
from opkiln.store import inventory
from opkiln.store.layers import Store
from opkiln.toolchain import host as host_compiler
from opkiln.toolchain import torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.model import TorchSDK
    from opkiln.toolchain.find import Candidate


class OpStatus(NamedTuple):
    """One op. ``compatible``: its native version can be had here, now or by a build."""

    op: str
    cached: bool
    compatible: bool
    reason: str  # why it is not cached, or not compatible
    path: str  # of the entry that serves


class Machine(NamedTuple):
    """What opkiln runs on."""

    python: str
    executable: str
    system: str
    cpu: str  # its name, for people
    level: str  # its target: a psABI level and the features beyond
    simd: str


class StoreStatus(NamedTuple):
    """Where entries are read and written."""

    root: str | None
    layers: tuple[str, ...]
    notes: tuple[str, ...]
    sizes: inventory.Sizes | None


class InForce(NamedTuple):
    """A setting's value and where it comes from."""

    variable: str
    value: Any
    origin: str  # the variable that set it, or "default"


class Report(NamedTuple):
    """Everything `opkiln report` says."""

    opkiln: str
    ops: tuple[OpStatus, ...]
    machine: Machine
    compilers: tuple[Candidate, ...]
    torch: TorchSDK | None
    budget: budget.Description
    store: StoreStatus
    settings: tuple[InForce, ...]
    dropped: tuple[str, ...]  # variables that are set and that no compiler sees


def collect() -> Report:
    """Look at everything, now. Raises SettingError where a variable has no meaning."""
    store = Store()
    return Report(
        opkiln=__version__,
        # The compilers first: who they are is part of what the ops' entries are looked up by.
        compilers=tuple(host_compiler.candidates(store.memory)),
        ops=tuple(op_status(name) for name in ALL_OPS),
        machine=machine(),
        torch=torch_sdk.find(),
        budget=budget.shared().describe(),
        store=store_status(store),
        settings=tuple(InForce(each.variable, *each.resolve()) for each in table()),
        dropped=dropped(),
    )


def op_status(name: str) -> OpStatus:
    """How one op stands. One of another package that cannot be imported is a row that says so."""
    try:
        builder = ALL_OPS[name]()
        op = builder.op()
        _, trace = resolve.would_compile(op)
    except OpkilnError as error:
        return OpStatus(name, False, False, error.what, "")
    except Exception as error:
        return OpStatus(name, False, False, f"{type(error).__name__}: {error}", "")
    for decision in trace.decisions:
        if decision.verdict == "taken":
            return OpStatus(name, True, True, "", decision.subject)
    if builder.is_compatible():
        why = "; ".join(trace.refusals()) or "not built yet"
        return OpStatus(name, False, True, f"{why}: its first use builds it", "")
    return OpStatus(name, False, False, builder.error_log or "", "")


def machine() -> Machine:
    """This interpreter, system and CPU."""
    family = this.architecture()
    native = cpu.native(family, resolve.features())
    release = os.uname().release
    return Machine(
        python=".".join(str(part) for part in sys.version_info[:3]),
        executable=sys.executable or "",
        system=f"{_distribution()} ({this.system()} {release}, {family})",
        cpu=this.cpu_name(),
        level=str(native),
        simd=cpu.simd(family, native),
    )


def _distribution() -> str:
    try:
        with open("/etc/os-release", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.strip().partition("=")
                if name == "PRETTY_NAME":
                    return value.strip("\"'")
    except OSError:
        pass  # a minimal image has none
    return "unknown distribution"


def store_status(store: Store) -> StoreStatus:
    """The layers, and the size of the one that is written to."""
    root = store.root
    layers = tuple(layer.root for layer in store.location.layers)
    return StoreStatus(
        root=root,
        layers=layers,
        notes=store.location.notes,
        sizes=None if root is None else inventory.sizes(root),
    )


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain values. The schema number changes when a field changes its meaning."""
    limits = report.budget.limits
    sizes = report.store.sizes
    return {
        "schema": 1,
        "opkiln": report.opkiln,
        "ops": [each._asdict() for each in report.ops],
        "environment": {
            **report.machine._asdict(),
            "compilers": [each._asdict() for each in report.compilers],
            "torch": None if report.torch is None else report.torch._asdict(),
            "budget": {
                "slots": len(limits.slots),
                "slots_from": limits.cpus_from,
                "memory": limits.memory,
                "memory_from": limits.memory_from,
                "max_jobs": report.budget.max_jobs,
                "where": report.budget.where,
                "refused": list(report.budget.refused),
            },
            "dropped_variables": list(report.dropped),
        },
        "store": {
            "root": report.store.root,
            "layers": list(report.store.layers),
            "notes": list(report.store.notes),
            "sizes": None if sizes is None else {**sizes._asdict(), "total": sizes.total},
            "limit": settings.cache_max_size,
        },
        "settings": [each._asdict() for each in report.settings],
    }
