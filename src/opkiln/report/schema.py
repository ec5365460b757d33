"""A report as plain values, for programs. ``docs/report.md`` describes every field.

``SCHEMA`` changes when a field changes its meaning or goes; new fields may come without that.
"""

from __future__ import annotations

from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.report.cache import StoreStatus
    from opkiln.report.collect import Environment, Report
    from opkiln.report.operators import BackendStatus, OpStatus

SCHEMA = 1


def document(report: Report, *, errors_only: bool = False) -> dict[str, Any]:
    """The report, or only its problems and the ops that have some. What is hidden is null."""
    around = None if errors_only else report.environment
    ops = report.ops
    if errors_only and ops is not None:
        ops = tuple(each for each in ops if not each.here.compatible)
    return {
        "schema": SCHEMA,
        "opkiln": report.opkiln,
        "made": report.made,
        "ops": None if ops is None else [_op(each) for each in ops],
        "environment": None if around is None else _environment(around),
        "store": None if around is None else _store(around.store),
        "settings": None if around is None else [each._asdict() for each in around.settings],
        "problems": [each._asdict() for each in report.problems],
    }


def _op(found: OpStatus) -> dict[str, Any]:
    return {
        "op": found.op,
        "distribution": found.distribution,
        "serves": found.serves,
        "error": found.error,
        "backends": [_backend(each) for each in found.backends],
    }


def _backend(found: BackendStatus) -> dict[str, Any]:
    return {**found._asdict(), "candidates": [each._asdict() for each in found.candidates]}


def _environment(around: Environment) -> dict[str, Any]:
    machine, devices, budget = around.machine, around.devices, around.budget
    shared = machine.shared_memory
    tools = [each._asdict() for each in around.tools]
    return {
        **machine._asdict(),
        "shared_memory": None if shared is None else shared._asdict(),
        "limits": [each._asdict() for each in machine.limits],
        "cgroup": machine.cgroup._asdict(),
        "compilers": [each for each in tools if each["backend"] == "cpu"],
        "toolkits": [each for each in tools if each["backend"] != "cpu"],
        "unfound": [each._asdict() for each in around.unfound],
        "torch": None if around.torch is None else around.torch._asdict(),
        "torch_error": around.torch_error,
        "accelerator": devices.in_force._asdict(),
        "accelerators": [each._asdict() for each in devices.accelerators],
        "drivers": [each._asdict() for each in devices.drivers],
        "gpus": [each._asdict() for each in devices.gpus],
        "collectives": [each._asdict() for each in devices.collectives],
        "budget": {
            "slots": len(budget.limits.slots),
            "slots_from": budget.limits.cpus_from,
            "memory": budget.limits.memory,
            "memory_from": budget.limits.memory_from,
            "max_jobs": budget.max_jobs,
            "where": budget.where,
            "refused": list(budget.refused),
        },
        "unknown_variables": list(around.unknown),
        "dropped_variables": list(around.dropped),
    }


def _store(found: StoreStatus) -> dict[str, Any]:
    sizes = found.sizes
    return {
        "root": found.root,
        "layers": list(found.layers),
        "notes": list(found.notes),
        "sizes": None if sizes is None else {**sizes._asdict(), "total": sizes.total},
        "limit": found.limit,
        "space": None if found.space is None else found.space._asdict(),
        "builds": [each._asdict() for each in found.builds],
    }
